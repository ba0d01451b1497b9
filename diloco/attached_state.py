"""What a rank keeps for its next attempt: the state of its inner optimizer, data position, generators and the like.

Kept once between two snapshots, per rank, as safetensors and JSON. No decision depends on it: it belongs to one rank
alone, so it may be found by a listing, and a record that is missing or rotten only means an earlier one, or none.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diloco.lr_schedules import check_can_follow, last_count_of, steps_counted, unwrapped
from diloco.rendezvous.envelope import BadRecordError, Proof, frame, reading, typed, unframe
from diloco.rendezvous.frames import READ_TRIES
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.membership import Identity
from diloco.rendezvous.phase import RoundPlan
from diloco.rendezvous.restore import RestoredWork
from diloco.rendezvous.retrying_store import RetryingStore
from diloco.rendezvous.round import Background
from diloco.rendezvous.snapshot import DTYPES, decode_part, digest_of, encode_part, parts_of
from diloco.rendezvous.training_state import Array, Arrays
from diloco.save_schedule import SaveSchedule
from executors.errors import StoreError, kind_of

log = logging.getLogger(__name__)

OWN_PART_BYTES = 1 << 30  # of one object; a bucket takes five times as much at once
STEPS_OF_AN_EPOCH = 5
"""Least number of inner steps between two steps of a schedule by the script that prove that the schedule does not count
inner steps. A script that leaves out a step now and then, as after an overflow, leaves out fewer in a row."""
_STATE_CALLS = (("state_dict", "load_state_dict"), ("get_state", "set_state"), ("getstate", "setstate"))
_KEPT = {np.dtype(dtype) for dtype in DTYPES.values()}


@dataclass(frozen=True, slots=True)
class SavedState:
    """What an earlier attempt of this rank left."""

    position: int
    arrays: Arrays
    uncounted_since: Sequence[int]
    """By fragment, the entry at which its live work began; may be of another number of fragments."""
    steps: int = 0
    """How many steps its attempts had made, by the clock."""

    def restored(self, sizes: Sequence[int]) -> RestoredWork:
        """Return where it was, and the live work it had."""
        since = [*self.uncounted_since, *[self.position] * len(sizes)][: len(sizes)]
        return RestoredWork(self.position, self.progress(sizes), since)

    def names(self) -> set[str]:
        """Return under which names something was attached."""
        matches = (re.fullmatch("attached/(.*)/json", key, re.DOTALL) for key in self.arrays)
        return {match[1] for match in matches if match}

    def progress(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return the live work it had, as distances from the anchor, by fragment."""
        found = (self.arrays.get(f"progress/{index}") for index in range(len(sizes)))
        return [
            torch.zeros(size, dtype=torch.float32, device="cpu")
            if values is None or values.dtype != np.float32 or values.shape != (size,)
            else torch.from_numpy(np.array(values))
            for values, size in zip(found, sizes, strict=True)
        ]


class AttachedState:
    """The states that are kept for a rank's next attempt.

    Args:
        begun_at: the step that schedules had counted when the run began, at its step 0.
    """

    def __init__(
        self, store: RetryingStore, keys: Keys, me: Identity, background: Background, plan: RoundPlan, proof: Proof,
        begun_at: int = 0,
    ) -> None:  # fmt: skip
        self._store = store
        self._keys = keys
        self._me = me
        self._background = background
        self._plan = plan
        self._proof = proof
        self._begun_at = begun_at
        self.things: dict[str, Any] = {}
        """The attached objects, by name."""
        self._followers: dict[str, Any] = {}
        self._leads: dict[str, int] = {}
        """By follower, the steps that it had counted before the run began, beyond `begun_at`."""
        self.kept = self._find(keys) if me.attempt else None
        """What an earlier attempt left, if there was one; let go once training goes on, as it is large."""
        self._let_go: set[str] = set()
        """The names of what was in it."""
        self.step = self._step_of_kept()
        """The run's step when `follow` was last called; before, the one that what was kept is of."""
        self._n_steps = 0
        """Those that this process had made then."""
        self.is_behind = False
        """True if `follow` was not called in each round so far, because nothing was attached."""
        self._missed = 0
        """Steps of the run that what is attached did not take."""
        self._set_to: dict[str, int] = {}
        """By follower, the count that it was stepped to last. A larger one tells of a step that the script made."""
        self._own_step_at: dict[str, int] = {}
        """By follower, the steps that this process had made when the script itself stepped it last."""
        self._misfits: set[str] = set()
        """The names of schedules that follow although they count something else than inner steps."""
        self._ended: set[str] = set()
        """The names of schedules that have reached their own end before the run's."""
        self._left_out: set[str] = set()
        """The names of what has a state by now that cannot be kept."""

        self.schedule = SaveSchedule(1, 1, 0)
        """When to keep what is attached."""
        self._room: dict[str, Array] = {}
        """The copies that were kept last: the next ones are written into the same memory, whose pages exist already."""
        self._written: list[tuple[int, int, bool]] = []
        """The states that this process has stored: position, number of parts, and True for the first of a period."""

    def begin(self, schedule: SaveSchedule) -> None:
        """Begin to keep states by a schedule."""
        self.schedule = schedule

    def attach(self, name: str, thing: Any, step: int, *, follow: bool = False, lead: int | None = None) -> None:
        """Keep the state of a thing from now on; when an earlier attempt of this rank left one, load it.

        Args:
            step: the run's, now.
            follow: it is a schedule, which is to be stepped to the run's step.
            lead: the steps that it had counted before. None: what it has counted, but for the steps of this process; a
                rank that comes back, and kept nothing, has counted those of the run.

        Raises:
            TypeError: it has no state that can be taken and given back, or one that is more than tensors and JSON.
            ValueError: the name is taken, or a schedule of this optimizer is attached already.
        """
        thing = unwrapped(thing)
        if name in self.things:
            raise ValueError(f"Something is attached as {name!r} already.")
        if any(schedule.optimizer is thing for schedule in self._followers.values()):
            raise ValueError(f"Attach {name!r} before its schedule: its state has a learning rate, too.")
        if follow:
            check_can_follow(name, thing)
        take, give = _state_calls(name, thing)
        to_arrays(take(), name)
        state, kept_lead = None, 0
        if self.kept is not None:
            try:
                with reading("state"):
                    state = from_arrays(self.kept.arrays, f"attached/{name}")
                    kept_lead = typed(int, from_arrays(self.kept.arrays, f"lead/{name}") or 0)
            except BadRecordError as error:
                log.warning("rank %s: what it kept as %r cannot be read: %s", self._me.rank, name, error)
        elif name in self._let_go:
            log.warning(
                "rank %s: %r is attached after a step: what was kept of it is let go. Attach it right after making the "
                "DiLoCo.", self._me.rank, name,
            )  # fmt: skip
        if state is not None:
            give(state)
        self.things[name] = thing
        if follow:
            self._followers[name] = thing
            if lead is None:
                lead = max(0, steps_counted(thing) - self._begun_at - (step if self._me.attempt else self._n_steps))
            self._leads[name] = lead if state is None else kept_lead
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of", UserWarning)  # before the optimizer's: on purpose
            self.follow(step, self._n_steps)

    def catch_up(self, step: int, n_steps: int) -> None:
        """Follow the run if that was left out while nothing was attached. Call it before the first `attach`.

        Args:
            step: the run's step.
            n_steps: the steps that this process has made.
        """
        if self.is_behind:
            self.follow(step, n_steps)

    def count_of(self, name: str, step: int) -> int:
        """Return what a schedule that follows has counted when the run is at a step."""
        return self._begun_at + step + self._leads[name]

    def follow(self, step: int, n_steps: int) -> None:
        """Step the schedules that follow to the run's step; say where the run went on and the rest did not.

        Args:
            n_steps: that this process has made.
        """
        self.is_behind = False
        if n_steps and self.kept is not None:
            self._let_go, self.kept = self.kept.names(), None
        for name, schedule in self._followers.items():
            self._look_for_own_step(name, schedule, n_steps)
            for _ in range(steps_counted(schedule), self._within(name, schedule, self.count_of(name, step))):
                schedule.step()
            self._set_to[name] = steps_counted(schedule)
        gap = step - self.step - (n_steps - self._n_steps)
        self.step, self._n_steps = step, n_steps
        self._missed += gap
        if gap >= self._plan.steps_per_entry and len(self.things) > len(self._followers):
            now, own = self._begun_at + step, self._begun_at + step - self._missed
            log.warning(
                "rank %s: DiLoCo %r continued at step %s, with attached state from step %s",
                self._me.rank, self._keys.name, now, own,
            )  # fmt: skip

    def _look_for_own_step(self, name: str, schedule: Any, n_steps: int) -> None:
        """Warn, once, of a schedule that the script also steps, but much less often than once in an inner step.

        Such a schedule counts epochs. As a follower, a StepLR would decay hundreds of times in an epoch, without a
        word. A script that steps the schedule with each inner step does no harm: the schedule is where the run is.

        Args:
            name: the name that the schedule is attached by.
            schedule: the schedule, before it is stepped to the run's step.
            n_steps: the steps that this process has made.
        """
        if steps_counted(schedule) <= self._set_to.get(name, sys.maxsize):
            return
        made = n_steps - self._own_step_at.get(name, 0)
        self._own_step_at[name] = n_steps
        if made < STEPS_OF_AN_EPOCH or name in self._misfits:
            return
        self._misfits.add(name)
        warnings.warn(
            f"The schedule {name!r} follows the run, and the script stepped it after {made} inner steps. If it counts "
            "epochs, attach it without follow=True; else do not step it yourself.",
            stacklevel=5,
        )

    def _within(self, name: str, schedule: Any, count: int) -> int:
        """Return a count of steps, or the last count of the schedule if that is smaller; then warn once.

        OneCycleLR, alone or inside another schedule, raises an error when it is stepped beyond its own total.
        """
        if (last := last_count_of(schedule)) is None or count <= last:
            return count
        if name not in self._ended:
            self._ended.add(name)
            warnings.warn(
                f"The schedule {name!r} ends at step {last}, before the run does: its last learning rate stays. Make "
                "it as long as total_steps.",
                stacklevel=6,
            )
        return last

    def keep(
        self,
        position: int,
        progress: Sequence[Tensor],
        uncounted_since: Sequence[int],
        buffers: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """Copy all states as they are now, and store the copy in the background.

        A state that has become more than tensors and JSON is not kept: a warning names it, and training continues.

        Args:
            buffers: of the model, in no average.
        """
        arrays = {f"progress/{index}": part.numpy() for index, part in enumerate(progress) if part.count_nonzero()}
        states = {f"attached/{name}": _state_calls(name, thing)[0]() for name, thing in self.things.items()}
        leads = {f"lead/{name}": lead for name, lead in self._leads.items() if lead}
        for prefix, taken in {**states, **leads, **({"buffers": dict(buffers)} if buffers else {})}.items():
            name = prefix.removeprefix("attached/")
            try:
                state = to_arrays(taken, prefix)
            except TypeError as error:
                if name not in self._left_out:
                    log.warning("rank %s: %r is not kept: %s", self._me.rank, name, error)
                self._left_out.add(name)
                continue
            arrays |= {key: self._copy(key, value) for key, value in state.items()}
        since, steps, is_first = list(uncounted_since), self.step, self.schedule.is_first_of_period(position)
        # An upload may still read the old copies. Then this state is copied to new memory.
        self._room = arrays
        self.schedule.hand_over()
        self._background(lambda: self._put(position, steps, arrays, since, is_first=is_first))

    def _copy(self, key: str, value: Array) -> Array:
        room = None if self.schedule.is_uploading else self._room.get(key)
        if room is None or room.shape != value.shape or room.dtype != value.dtype:
            return np.array(value)
        np.copyto(room, value)
        return room

    def _put(self, position: int, steps: int, arrays: Arrays, since: Sequence[int], *, is_first: bool) -> None:
        with self.schedule.uploading():
            n_parts = self._upload(position, steps, arrays, since)
        if n_parts:
            self._written.append((position, n_parts, is_first))
            self._forget_older()

    def _forget_older(self) -> None:
        """Delete what was stored before the last two: between two snapshots, only the newest is of use.

        The one before stays, should the newest be damaged, and so does the first of each period: a run that continues
        from an older snapshot needs what is not newer than that. `collect_garbage` deletes those.
        """
        store, me = self._store.for_thread(), self._me
        for position, n_parts, is_first in self._written[:-2]:
            if not is_first:
                store.remove(self._keys.own_state_record(me.rank, position, me.attempt))
                for index in range(n_parts):
                    store.remove(self._keys.own_state_tensors(me.rank, position, me.attempt, index))
        self._written = self._written[-2:]

    def _upload(self, position: int, steps: int, arrays: Arrays, since: Sequence[int]) -> int:
        """Store a record and its tensors; return the number of parts, 0 if that failed."""
        store, me = self._store.for_thread(), self._me
        parts = [encode_part(part) for part in parts_of(dict(_cut(arrays)), OWN_PART_BYTES)]
        digest, *more = (digest_of(part, self._proof) for part in parts)
        about = {"rank": me.rank, "attempt": me.attempt, "position": position, "uncounted_since": since, "steps": steps}
        record = {**about, "digest": digest, **({"more": more} if more else {})}
        key = self._keys.own_state_record(me.rank, position, me.attempt)
        keys = [self._keys.own_state_tensors(me.rank, position, me.attempt, index) for index in range(len(parts))]
        try:
            is_kept = all(store.write(*each) for each in zip(keys, parts, strict=True))
            error = None if is_kept and store.write(key, frame(record, key, self._proof)) else store.last_error
        except StoreError as raised:
            error = raised
        if error is not None:
            log.warning("rank %s: what is attached could not be kept after round %s: %s", me.rank, position, error)
            return 0
        return len(parts)

    def buffers_of_earlier_attempt(self) -> dict[str, Tensor]:
        """Return the model's own buffers that an earlier attempt kept; none where there are none that can be read."""
        with contextlib.suppress(BadRecordError), reading("buffers"):
            found = None if self.kept is None else from_arrays(self.kept.arrays, "buffers")
            return {name: typed(Tensor, values) for name, values in typed(dict, found or {}).items()}
        return {}

    def load_from_run(self, origin: str, position: int) -> None:
        """Load what is attached from what this rank kept in another run, up to this one's position."""
        self.kept = self._find(replace(self._keys, run_id=origin), position)
        self.step = self._step_of_kept()

    def _step_of_kept(self) -> int:
        if self.kept is None:
            return 0
        return self._plan.step_before(self.kept.position) if self._plan.entry_s is None else self.kept.steps

    def _find(self, keys: Keys, most: int = sys.maxsize) -> SavedState | None:
        """Return the newest record that can be read, of at most so many rounds."""
        prefix = keys.own_state(self._me.rank)
        for _ in range(READ_TRIES):  # a listing that fails lists nothing
            if listed := self._store.list_keys(prefix):
                break
        matches = (re.fullmatch(r"(\d+)/(\d+)/record", key.removeprefix(prefix)) for key in listed)
        found = [(int(match[1]), int(match[2])) for match in matches if match]
        for position, attempt in sorted((at for at in found if at[0] <= most), reverse=True):
            for _ in range(READ_TRIES):
                if (kept := self._read(keys, position, attempt)) is not None:
                    return kept
        return None

    def _read(self, keys: Keys, position: int, attempt: int) -> SavedState | None:
        key = keys.own_state_record(self._me.rank, position, attempt)
        record = self._store.peek(key)
        if not record:
            return None
        with contextlib.suppress(BadRecordError):
            fields = unframe(record, key, self._proof)[0]
            with reading("record of an attached state"):
                since = [min(position, typed(int, entry)) for entry in typed(list, fields.get("uncounted_since", []))]
                steps = max(0, typed(int, fields.get("steps", 0)))
                arrays: dict[str, Array] = {}
                for index, digest in enumerate([fields["digest"], *typed(list, fields.get("more", []))]):
                    part = self._store.peek(keys.own_state_tensors(self._me.rank, position, attempt, index))
                    if not part:
                        return None
                    if self._proof.digest(part) != digest:
                        raise ValueError("a part of other bytes")
                    arrays |= decode_part(part)
                return SavedState(position, _joined(arrays), since, steps)
        self._store.record_misread(key, record)
        return None


def _cut(arrays: Arrays) -> Iterator[tuple[str, Array]]:
    """Yield arrays by name, in pieces of whole rows where one is larger than an object should be."""
    for name, array in arrays.items():
        if array.nbytes <= OWN_PART_BYTES:
            yield name, array
            continue
        rows = max(1, OWN_PART_BYTES * len(array) // array.nbytes)
        for number, first in enumerate(range(0, len(array), rows)):
            yield f"{number} of {name}", array[first : first + rows]


def _joined(found: Arrays) -> dict[str, Array]:
    """Return arrays by name, of which some were cut."""
    arrays: dict[str, Array] = {}
    pieces: dict[str, dict[int, Array]] = {}
    for name, array in found.items():
        if piece := re.fullmatch(r"(\d{1,9}) of (.*)", name, re.DOTALL):
            pieces.setdefault(piece[2], {})[int(piece[1])] = array
        else:
            arrays[name] = array
    return arrays | {name: np.concatenate([parts[n] for n in range(len(parts))]) for name, parts in pieces.items()}


def _state_calls(name: str, thing: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Return the two calls that take a thing's state and give it back."""
    for take, give in _STATE_CALLS:
        if callable(getattr(thing, take, None)) and callable(getattr(thing, give, None)):
            return getattr(thing, take), getattr(thing, give)
    if hasattr(getattr(thing, "bit_generator", None), "state"):  # a numpy Generator
        return lambda: thing.bit_generator.state, lambda state: setattr(thing.bit_generator, "state", state)
    raise TypeError(
        f"attach_state({name!r}) takes something with state_dict() and load_state_dict(), or a random generator of "
        f"torch, numpy or Python, got {kind_of(thing)}."
    )


def to_arrays(state: Any, prefix: str) -> dict[str, Array]:
    """Take a state apart: `<prefix>/0`, `<prefix>/1`, … are its tensors, `<prefix>/json` is the rest.

    The arrays share memory with the tensors where those are on the CPU.

    Raises:
        TypeError: names what cannot be kept, and where it is.
    """
    arrays: dict[str, Array] = {}
    text = json.dumps(_flatten(state, arrays, prefix, prefix), separators=(",", ":"))
    return {**arrays, f"{prefix}/json": np.frombuffer(text.encode(), np.uint8)}


def from_arrays(arrays: Mapping[str, Array], prefix: str) -> Any | None:
    """Put a state together again, of copies; None when there is none under this prefix."""
    text = arrays.get(f"{prefix}/json")
    return None if text is None else _unflatten(json.loads(text.tobytes()), arrays)


def _flatten(value: Any, arrays: dict[str, Array], prefix: str, where: str) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, (bool, int, float, str, type(None))):
                raise TypeError(f"{where} has a key of type {type(key).__name__}, which cannot be kept as JSON.")
        items = [[key, _flatten(item, arrays, prefix, f"{where}[{key!r}]")] for key, item in value.items()]
        return {"dict": items}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_flatten(item, arrays, prefix, f"{where}[{at}]") for at, item in enumerate(value)]}
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        with contextlib.suppress(TypeError, RuntimeError):  # of another type, layout or class that numpy does not have
            values = value.detach().cpu()
            if dtype == "bfloat16":
                values = values.contiguous().view(torch.int16)  # numpy has no such type
            if (array := values.numpy()).dtype in _KEPT:
                return {"tensor": _added(array, arrays, prefix), "dtype": dtype}
    if isinstance(value, np.ndarray) and value.dtype in _KEPT:
        return {"array": _added(value, arrays, prefix)}
    kind = f"{kind_of(value)} of {value.dtype}" if isinstance(value, (Tensor, np.ndarray)) else kind_of(value)
    raise TypeError(f"{where} is {kind}, which can be kept neither as a tensor nor as JSON.")


def _added(values: Array, arrays: dict[str, Array], prefix: str) -> str:
    name = f"{prefix}/{len(arrays)}"
    arrays[name] = values
    return name


def _unflatten(value: Any, arrays: Mapping[str, Array]) -> Any:
    if not isinstance(value, dict):
        return value
    if "dict" in value:
        return {key: _unflatten(item, arrays) for key, item in value["dict"]}
    if "list" in value:
        return [_unflatten(item, arrays) for item in value["list"]]
    if "tuple" in value:
        return tuple(_unflatten(item, arrays) for item in value["tuple"])
    if "array" in value:
        return np.array(arrays[value["array"]])
    tensor = torch.from_numpy(np.array(arrays[value["tensor"]]))
    return tensor.view(torch.bfloat16) if value["dtype"] == "bfloat16" else tensor
