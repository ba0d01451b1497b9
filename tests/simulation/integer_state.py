"""A training state of whole numbers for the simulation: a mean shows which process did which part of the work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_hexdigest

from diloco.rendezvous.envelope import UNSIGNED, Proof
from diloco.rendezvous.frames import digests_of
from diloco.rendezvous.training_state import ApplyStats, PackedWork, Verdict
from diloco.wires import EACH, FP32
from diloco.wires.wire import Floats, Wire, blocks_of, decoded


class Multiples:
    """A wire that encodes each value as a multiple of a unit, either cut off or rounded to nearest."""

    is_exact = False
    is_relative = False

    def __init__(
        self,
        unit: float,
        dtype: npt.DTypeLike,
        to_whole: Callable[[Floats], Floats],
        *,
        keeps: float = 1.0,
        live: float = 1.0,
    ) -> None:
        self.is_sparse, self.keeps, self.live = live < 1, keeps, live
        self.name = f"multiples of {unit}"
        self._unit, self._dtype, self._to_whole = np.float32(unit), np.dtype(dtype), to_whole

    def size(self, n: int) -> int:
        return self._dtype.itemsize * n

    def span(self, n: int, start: int, end: int) -> slice:
        return slice(self.size(start), self.size(end))

    def encode_buffer(self, block: memoryview, n: int, start: int, scratch: Floats) -> Floats:
        return scratch

    def encode(self, values: Floats, block: memoryview, n: int, start: int) -> float:
        whole = self._to_whole(values / self._unit)
        np.frombuffer(block, self._dtype)[:] = whole
        return float(np.square(whole * self._unit).sum())

    def decode(self, block: memoryview, n: int, start: int, scratch: Floats) -> Floats:
        scratch[:] = np.frombuffer(block, self._dtype) * self._unit
        return scratch

    def accumulate(
        self, block: memoryview, n: int, start: int, weight: np.float32, acc: Floats, product: Floats, *, first: bool
    ) -> None:
        product[:] = self.decode(block, n, start, product) * weight
        acc[:] = product if first else acc + product

    def is_finite(self, block: memoryview, n: int) -> bool:
        return True


def whole(values: Floats) -> Floats:
    """Cut values off toward zero. A value that is a whole number except for rounding counts as that number."""
    cut: Floats = np.trunc(values * np.float32(1.001))
    return cut


def half(values: Floats) -> Floats:
    """Return half of the values, rounded up to a whole number of units."""
    units: Floats = np.floor((values + 1) / 2 + np.float32(1e-3))
    return units


MEANS = Multiples(1 / 1024, np.int32, np.rint)
WIRES: dict[str, tuple[Wire, Wire]] = {
    "exact": (FP32, FP32),
    "lossy": (Multiples(4, np.int16, whole), MEANS),
    "sparse": (Multiples(1, np.int16, half, keeps=0.5, live=0.25), MEANS),
    "each": (FP32, EACH),
    "sparse, each": (Multiples(1, np.int16, half, keeps=0.5, live=0.25), EACH),
}
"""The wires of contributions and of means. The sparse wire sends one unit of two, and holds the rest in two places.

With `each`, means are not stored, and every replica computes them.
"""


def most_left(wires: str, done: float) -> float:
    """Return the largest amount of work that a process keeps when it has sent everything.

    Args:
        wires: the key of the wires.
        done: the steps that the process has made.
    """
    return 0 if wires in ("exact", "each") else 3 if wires == "lossy" else 3 + done


SLOTS = 12
"""The number of processes in a schedule. Each has one float of a fragment for its work, so a fragment has 3 blocks."""
BLOCK_ELEMENTS = 4
ZEROS = np.zeros(SLOTS, np.float32)


@dataclass
class HeldValues:
    """The held work of one fragment, and the changes of live work that the next merge makes."""

    owner: str = "the training"
    """The side that may use this object now."""
    values: Floats | None = None
    """The held work. None: the live work has not changed since it was held."""
    ops: list[tuple[str, Floats]] = field(default_factory=list)
    """The changes of live work: "take" subtracts values, and "only" replaces the live work by values. "all" does the
    same as "only" and asserts that no work is lost."""

    def of(self, owner: str) -> HeldValues:
        assert self.owner == owner, f"V7: this belongs to {self.owner}, and {owner} uses it"
        return self


class IntegerState:
    """A `TrainingState` of whole numbers. Each process adds 1 to its own slot at each step."""

    carries = True
    clips = False
    proof: Proof = UNSIGNED

    def __init__(
        self, n_fragments: int, slot: int, seed: int, *, wires: str = "exact", keeps_later_work: bool = False
    ) -> None:
        rng = np.random.default_rng(seed)
        self.anchor = [rng.integers(-9, 9, SLOTS).astype(np.float32) for _ in range(n_fragments)]
        self.momentum = [np.zeros(SLOTS, np.float32) for _ in range(n_fragments)]
        self.undone = [np.zeros(SLOTS, np.float32) for _ in range(n_fragments)]
        """By fragment, the live work, as distances from the anchor."""
        self.waiting = [np.zeros(SLOTS, np.float32) for _ in range(n_fragments)]
        """By fragment, the work that a sparse wire has not sent, as far as it is not in the live work."""
        self.given_up = [np.zeros(SLOTS, np.float32) for _ in range(n_fragments)]
        """By fragment, the work that was given up because a sparse wire has not sent it."""
        self.held = [HeldValues() for _ in range(n_fragments)]
        self.slot, self.done, self.dropped = slot, 0, False
        self.wire, self.mean_wire = WIRES[wires]
        self.keeps_later_work = keeps_later_work
        self.trains_on = False
        """True if steps are made between holding and merging."""
        self.is_final: Callable[[int], bool] = lambda entry: False
        self.excused_until = 0
        """The entry before which a flipped bit must have been found."""
        self._payload = memoryview(bytearray(self.wire.size(SLOTS)))

    def prepare(self, *, is_final: Callable[[int], bool], trains_on: bool) -> None:
        self.is_final, self.trains_on = is_final, trains_on

    def train_step(self) -> None:
        self.done += 1
        for undone in self.undone:
            undone[self.slot] += 1

    def flip(self, fragment: int) -> None:
        self.anchor[fragment].view(np.uint32)[5] ^= np.uint32(1 << 20)

    def sizes(self) -> list[int]:
        return [SLOTS] * len(self.anchor)

    def agreement(self) -> dict[str, Any]:
        return {"tensors": {}, "fragments": len(self.anchor)}

    def arrays(self) -> dict[str, Floats]:
        momentum = {f"m{f}": values for f, values in enumerate(self.momentum) if values.any()}
        return {**{str(f): anchor for f, anchor in enumerate(self.anchor)}, **momentum}

    def load(self, arrays: Any) -> None:
        self.anchor = [np.array(arrays[str(f)]) for f in range(len(self.anchor))]
        self.momentum = [np.array(arrays.get(f"m{f}", ZEROS)) for f in range(len(self.anchor))]

    def snapshot(self) -> tuple[dict[str, Floats], tuple[str, ...]]:
        return deepcopy(self.arrays()), tuple(self.digest(f) for f in range(len(self.anchor)))

    def digest(self, fragment: int) -> str:
        return xxh3_128_hexdigest(self.anchor[fragment].tobytes() + self.momentum[fragment].tobytes())

    # -- for the training ----------------------------------------------------------------------------------------------

    def hold(self, fragment: int, *, is_early: bool) -> None:
        held = self.held[fragment].of("the training")
        assert held.values is None, "V7: the work in flight is held a second time"
        if self.trains_on or is_early or not self.wire.is_exact:
            held.values = self.undone[fragment].copy()
        held.owner = "the rounds"

    def merge(self) -> None:
        for undone, held in zip(self.undone, self.held, strict=True):
            for op, values in held.ops:
                if op == "take":
                    undone -= values
                else:  # "only" drops later work on purpose, and with "all" there is no later work
                    self.dropped = self.dropped or (op == "only" and bool((undone != values).any()))
                    undone[:] = values
            held.ops = []

    # -- for the round runner ------------------------------------------------------------------------------------------

    def pack(
        self, entry: int, write: Callable[[memoryview], object] | None = None, keep: tuple[int, int] | None = None
    ) -> PackedWork:
        held = self.held[entry % len(self.anchor)].of("the rounds")
        work = self.undone[entry % len(self.anchor)] if held.values is None else held.values
        payload, work = self._payload, work + self.waiting[entry % len(self.anchor)]
        for number, block in enumerate(blocks_of(self.wire, SLOTS, BLOCK_ELEMENTS)):
            values = work[number * BLOCK_ELEMENTS :][: block.n]
            self.wire.encode(values, payload[block.start : block.end], block.n, 0)
        digests = digests_of(payload, self.wire.size(BLOCK_ELEMENTS), self.proof)
        norms = (float(np.abs(values_of(self.wire, [payload])).max()),) * len(digests)
        first, end = keep or (0, len(payload))
        if write is not None:
            write(payload)
            for at in [*range(first), *range(end, len(payload))]:
                payload[at] = 0xFF  # destroys the bytes that need not stay in memory, so that no caller can use them
        return PackedWork(digests, norms, payload[first:end], first)

    def apply(
        self, entry: int, mean: Sequence[memoryview], verdict: Verdict, packed: PackedWork | None, *, partly: bool
    ) -> ApplyStats:
        f = entry % len(self.anchor)
        held = self.held[f]
        work = self.undone[f].copy() if held.values is None else held.values
        if self._keeps(verdict) or (partly and verdict is Verdict.KEPT):
            pass
        elif verdict is Verdict.COUNTED:
            all_work = work + self.waiting[f]
            counted = all_work if self.wire.is_exact or packed is None else values_of(self.wire, [packed.kept])
            self.dropped = self.dropped or (self.wire.is_sparse and packed is None)
            lost, keeps, live = all_work - counted, np.float32(self.wire.keeps), np.float32(self.wire.live)
            self.given_up[f] += lost - keeps * lost
            self.waiting[f] = (1 - live) * keeps * lost
            back = live * keeps * lost
            held.ops.append(("take", work - back))
            if not (partly or self.keeps_later_work):
                held.ops.append(("only" if self.trains_on else "all", back))
        elif partly:
            held.ops.append(("take", work))
            self._drop_waiting(f)
            self.dropped = self.dropped or bool(work.any())
        else:
            held.ops.append(("only", ZEROS))
            self._drop_waiting(f)
        if self.is_final(entry):
            held.ops.append(("only", ZEROS))
            self._drop_waiting(f)
        self.replay(entry, mean)
        held.owner, held.values = "the training", None
        return ApplyStats()

    def _drop_waiting(self, fragment: int) -> None:
        self.dropped = self.dropped or bool(self.waiting[fragment].any())
        self.waiting[fragment] = np.zeros(SLOTS, np.float32)

    def _keeps(self, verdict: Verdict | None) -> bool:
        return verdict is None or (verdict is Verdict.KEPT and self.carries)

    def replay(self, entry: int, mean: Sequence[memoryview]) -> None:
        if mean:
            step(self.anchor, self.momentum, entry, values_of(self.mean_wire, mean))

    def prepare_merge(self) -> None:
        pass

    def anchors_now(self) -> Any:
        return None

    def follow(self, anchors: Any, verdicts: Sequence[Verdict | None], *, partly: int | None) -> None:
        # The counted work of a passed entry is not known exactly, so this process no longer accounts for all its work.
        self.dropped = self.dropped or Verdict.COUNTED in verdicts
        for f, (held, verdict) in enumerate(zip(self.held, verdicts, strict=True)):
            if not self._keeps(verdict):
                self._drop_waiting(f)
                is_part = f == partly and held.values is not None
                held.ops.append(("take", held.values) if is_part and held.values is not None else ("only", ZEROS))
            if verdict is not None:
                held.owner, held.values = "the training", None

    # -- while only one of the two sides works -------------------------------------------------------------------------

    def progress(self) -> Any:
        return [undone + waiting for undone, waiting in zip(self.undone, self.waiting, strict=True)]

    def resume(self, progress: Any, verdicts: Sequence[Verdict | None] = ()) -> None:
        verdicts = verdicts or [None] * len(self.undone)
        self.dropped = self.dropped or Verdict.COUNTED in verdicts
        live = np.float32(self.wire.live)
        for f, (value, verdict) in enumerate(zip(progress or [ZEROS] * len(self.undone), verdicts, strict=True)):
            self.undone[f][:], self.waiting[f] = live * value, (1 - live) * value
            if not self._keeps(verdict):
                self.dropped = self.dropped or bool(value.any())
                self.undone[f][:] = 0.0
                self.waiting[f] = np.zeros(SLOTS, np.float32)


def values_of(wire: Wire, ranges: Sequence[memoryview]) -> Floats:
    """Return the decoded values of a payload. An empty payload gives zeros."""
    values = np.zeros(SLOTS, np.float32)
    for first, piece in decoded(wire, ranges, SLOTS, BLOCK_ELEMENTS):
        values[first : first + len(piece)] = piece
    return values


def step(anchor: list[Floats], momentum: list[Floats], entry: int, mean: Floats) -> None:
    """Make the outer step of an entry, with a momentum of 0.5."""
    f = entry % len(anchor)
    momentum[f] *= np.float32(0.5)
    momentum[f] += mean
    anchor[f] -= momentum[f]
