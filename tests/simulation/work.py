"""Work of whole numbers for the simulated rendezvous: whose work is in a mean can be read off it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_hexdigest

from diloco.rendezvous.frames import digests_of
from diloco.rendezvous.proof import UNSIGNED, Proof
from diloco.rendezvous.training_state import Packed, Part, Verdict
from diloco.wires import FP32
from diloco.wires.wire import Floats, Wire, blocks_of, decoded


class Multiples:
    """A wire of multiples of a unit: whole ones, and the rest is left out, or the nearest ones."""

    is_exact = False

    def __init__(self, unit: float, dtype: npt.DTypeLike, to_whole: Callable[[Floats], Floats]) -> None:
        self.name = f"multiples of {unit}"
        self._unit, self._dtype, self._to_whole = np.float32(unit), np.dtype(dtype), to_whole

    def size(self, n: int) -> int:
        return self._dtype.itemsize * n

    def span(self, n: int, start: int, end: int) -> slice:
        return slice(self.size(start), self.size(end))

    def place(self, block: memoryview, n: int, start: int, room: Floats) -> Floats:
        return room

    def encode(self, values: Floats, block: memoryview, n: int, start: int) -> float:
        np.frombuffer(block, self._dtype)[:] = self._to_whole(values / self._unit)
        return self.square(block, n)

    def decode(self, block: memoryview, n: int, start: int, room: Floats) -> Floats:
        room[:] = np.frombuffer(block, self._dtype) * self._unit
        return room

    def accumulate(
        self, block: memoryview, n: int, start: int, weight: np.float32, acc: Floats, product: Floats, *, first: bool
    ) -> None:
        product[:] = self.decode(block, n, start, product) * weight
        acc[:] = product if first else acc + product

    def square(self, block: memoryview, n: int) -> float:
        return float(np.square(np.frombuffer(block, self._dtype) * self._unit).sum())


WIRES: dict[bool, tuple[Wire, Wire]] = {
    False: (FP32, FP32),
    True: (Multiples(4, np.int16, np.trunc), Multiples(1 / 1024, np.int32, np.rint)),
}
"""Of contributions and of means, by whether they lose something."""
MOST_LEFT = {False: 0, True: 3}
"""How many units of work stay at most, for each process, when all is sent."""
SLOTS = 12  # processes whose work is told apart: one float each, so a fragment has three blocks
BLOCK_ELEMENTS = 4
ZEROS = np.zeros(SLOTS, np.float32)


class Toy:
    """Work of whole numbers: each process counts what it did in a slot of its own."""

    carries = True
    proof: Proof = UNSIGNED

    def __init__(self, n_fragments: int, slot: int, seed: int, *, is_lossy: bool = False) -> None:
        self.wire, self.mean_wire = WIRES[is_lossy]
        rng = np.random.default_rng(seed)
        self.anchor = [rng.integers(-9, 9, SLOTS).astype(np.float32) for _ in range(n_fragments)]
        self.momentum = [np.zeros(SLOTS, np.float32) for _ in range(n_fragments)]
        self.undone = [np.zeros(SLOTS, np.float32) for _ in range(n_fragments)]
        self.slot, self.done, self.dropped = slot, 0, False
        self.loses_steps = False
        """Whether steps made after something was sent may be lost when that is counted: with an overlap they are."""
        self.is_final: Callable[[int], bool] = lambda entry: False
        self.excused_until = 0
        """A flipped bit shows at the latest when the entry before this one is applied."""
        self._payload = memoryview(bytearray(self.wire.size(SLOTS)))
        self._sent = np.zeros(SLOTS, np.float32)

    def labour(self) -> None:
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

    def pack(
        self, entry: int, write: Callable[[memoryview], object] | None = None, keep: tuple[int, int] | None = None
    ) -> Packed:
        payload, undone = self._payload, self.undone[entry % len(self.anchor)].copy()
        for number, block in enumerate(blocks_of(self.wire, SLOTS, BLOCK_ELEMENTS)):
            values = undone[number * BLOCK_ELEMENTS :][: block.n]
            self.wire.encode(values, payload[block.start : block.end], block.n, 0)
        self._sent = values_of(self.wire, [payload])
        digests = digests_of(payload, self.wire.size(BLOCK_ELEMENTS), self.proof)
        norms = (float(np.abs(self._sent).max()),) * len(digests)
        first, end = keep or (0, len(payload))
        if write is not None:
            write(payload)
            for at in [*range(first), *range(end, len(payload))]:
                payload[at] = 0xFF  # what is not to be kept is no longer there
        return Packed(digests, norms, payload[first:end], first)

    def apply(self, entry: int, mean: Sequence[memoryview], verdict: Verdict, part: Part | None = None) -> None:
        self.replay(entry, mean)
        undone = self.undone[entry % len(self.anchor)]
        if part is not None:
            taken = values_of(*part)
            undone -= taken
            self.dropped = self.dropped or (verdict is Verdict.DROPPED and bool(taken.any()))
        else:
            self._merge(undone, verdict)
        if self.is_final(entry):
            self.dropped = self.dropped or bool(undone.any())
            undone[:] = 0.0

    def replay(self, entry: int, mean: Sequence[memoryview]) -> None:
        if mean:
            step(self.anchor, self.momentum, entry, values_of(self.mean_wire, mean))

    def work(self, entry: int) -> Part:
        return Part(FP32, [self.undone[entry % len(self.anchor)].copy().data.cast("B")])

    def progress(self) -> Any:
        return deepcopy(self.undone)

    def restore(self, progress: Any, verdicts: Sequence[Verdict | None] = ()) -> None:
        verdicts = verdicts or [None] * len(self.undone)
        self.dropped = self.dropped or Verdict.COUNTED in verdicts  # what was jumped over cannot be read back
        for undone, value, verdict in zip(self.undone, progress or [ZEROS] * len(self.undone), verdicts, strict=True):
            undone[:] = value
            self._merge(undone, verdict)

    def _merge(self, undone: Floats, verdict: Verdict | None) -> None:
        if verdict is Verdict.COUNTED:
            self.dropped = self.dropped or (self.loses_steps and bool((undone != self._sent).any()))
            undone[:] = 0.0
        elif verdict is Verdict.DROPPED or (verdict is Verdict.KEPT and not self.carries):
            self.dropped = self.dropped or bool(undone.any())
            undone[:] = 0.0


def values_of(wire: Wire, ranges: Sequence[memoryview]) -> Floats:
    """Decode a payload, or none: zeros."""
    values = np.zeros(SLOTS, np.float32)
    for first, piece in decoded(wire, ranges, SLOTS, BLOCK_ELEMENTS):
        values[first : first + len(piece)] = piece
    return values


def step(anchor: list[Floats], momentum: list[Floats], entry: int, mean: Floats) -> None:
    f = entry % len(anchor)
    momentum[f] *= np.float32(0.5)
    momentum[f] += mean
    anchor[f] -= momentum[f]
