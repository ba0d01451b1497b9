"""Saves the state of attached objects for a rank's next attempt: the inner optimizer, data position, generators.

The state is stored per rank, as safetensors and JSON. The state belongs to one rank alone, and no decision of the run
depends on it. So the rank may find its state by a listing of the store, which can be incomplete. If the newest record
is missing or damaged, the rank loads an earlier one, or none.
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
from diloco.rendezvous.retrying_store import RetryingStore, is_local_store, read_ahead
from diloco.rendezvous.round import Background
from diloco.rendezvous.snapshot import DTYPES, PART_BYTES, decode_part, digest_of, encode_part, parts_of, proven_part
from diloco.rendezvous.training_state import Array, Arrays
from diloco.save_schedule import SaveSchedule
from diloco.tensor_names import is_dtensor
from executors.errors import StoreError, kind_of

log = logging.getLogger(__name__)

OWN_PART_BYTES = 1 << 30
"""The largest stored object. A larger array is cut. A bucket allows five times that size in one request."""
STEPS_OF_AN_EPOCH = 5
"""A schedule that the script steps only once in this number of inner steps counts epochs, and not inner steps.

A script that skips a step now and then, for example after an overflow, never skips this many in a row.
"""
_STATE_CALLS = (("state_dict", "load_state_dict"), ("get_state", "set_state"), ("getstate", "setstate"))
_KEPT = {np.dtype(dtype) for dtype in DTYPES.values()}


@dataclass(frozen=True, slots=True)
class SavedState:
    """The state that an earlier attempt of this rank saved."""

    position: int
    arrays: Arrays
    uncounted_since: Sequence[int]
    """The entry at which each fragment's live work began.

    The earlier attempt may have had another number of fragments.
    """
    steps: int = 0
    """The steps that the earlier attempts had made. Runs with `round_seconds` need this number."""

    def restored(self, sizes: Sequence[int]) -> RestoredWork:
        """Return the position and the live work of the earlier attempt.

        Args:
            sizes: the number of elements of each fragment.
        """
        since = [*self.uncounted_since, *[self.position] * len(sizes)][: len(sizes)]
        return RestoredWork(self.position, self.progress(sizes), since)

    def names(self) -> set[str]:
        """Return the names of the attached objects."""
        matches = (re.fullmatch("attached/(.*)/json", key, re.DOTALL) for key in self.arrays)
        return {match[1] for match in matches if match}

    def progress(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return the live work of each fragment: its distance from the anchor. Saved work of another size counts as
        zero.

        Args:
            sizes: the number of elements of each fragment.
        """
        found = (self.arrays.get(f"progress/{index}") for index in range(len(sizes)))
        return [
            torch.zeros(size, dtype=torch.float32, device="cpu")
            if values is None or values.dtype != np.float32 or values.shape != (size,)
            else torch.from_numpy(np.array(values))
            for values, size in zip(found, sizes, strict=True)
        ]


# More than 20 methods: one object knows what was attached. Saving, loading and agreeing with the other members
# of a replica read the same list, in the order in which the user attached.
class AttachedState:
    """The attached objects of one replica, whose states are saved for the rank's next attempt.

    Args:
        store: the store of the run.
        keys: the keys of the rendezvous.
        me: this replica.
        background: runs an upload while training continues.
        plan: how the inner steps are divided into rounds.
        proof: signs and checks records, if the run has a key.
        begun_at: the number of steps that schedules had counted when the run was at its step 0. It is not 0 if the
            script continues an earlier training.

    Example:
        attached = AttachedState(store, keys, me, uploads, plan, UNSIGNED)
        attached.attach("optimizer", optimizer, step=0)
    """

    def __init__(
        self, store: RetryingStore, keys: Keys, me: Identity, background: Background, plan: RoundPlan, proof: Proof,
        begun_at: int = 0, member: int = 0,
    ) -> None:  # fmt: skip
        self._member = member
        self.on_keep: Callable[[int], None] = lambda position: None
        """Called with the position before states are saved. The other members of the replica then save theirs."""
        self.of_leader: set[str] = set()
        """The names of objects that member 0 saves for all members of the replica."""
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
        self.leads: dict[str, int] = {}
        """For each schedule that follows the run: the steps that it had counted before the run began, without the first
        `begun_at` steps.
        """
        self.kept = self._find(keys) if me.attempt else None
        """The state that an earlier attempt saved. None: there is none.

        It is large, so it is released when training continues.
        """
        self._let_go: set[str] = set()
        """The names of the objects that the released state had."""
        self.step = self._step_of_kept()
        """The run's step at the last call of `follow`. Before the first call, the step of the saved state."""
        self._n_steps = 0
        """The steps that this process had made at the last call of `follow`."""
        self.is_behind = False
        """True if `follow` was skipped in some rounds, because no object was attached."""
        self._missed = 0
        """Steps of the run that the attached objects missed, because the run continued without this replica."""
        self._set_to: dict[str, int] = {}
        """For each schedule that follows the run, the count that it was stepped to last.

        If its count is larger now, the script also steps the schedule.
        """
        self._own_step_at: dict[str, int] = {}
        """For each schedule that follows the run, the number of steps that this process had made when the script
        last stepped the schedule.
        """
        self._misfits: set[str] = set()
        """The names of schedules that follow the run, although they count epochs. The script was warned of them."""
        self._ended: set[str] = set()
        """The names of schedules that have reached their own last step before the run ends."""
        self._left_out: set[str] = set()
        """The names of objects whose state can no longer be saved."""

        self.schedule = SaveSchedule(1, 1, 0)
        """Decides when the attached state is saved."""
        self._room: dict[str, Array] = {}
        """The copies that were saved last.

        The next copies reuse their memory, because new memory pages are slow at first use.
        """
        self._written: list[tuple[int, int, bool]] = []
        """The states that this process has stored.

        Each has its position, its number of parts, and True for the first state after a snapshot.
        """

    def begin(self, schedule: SaveSchedule) -> None:
        """Set the times at which states are saved.

        Args:
            schedule: decides when states are saved.
        """
        self.schedule = schedule

    def saved_position(self, name: str) -> int:
        """Return the position of an object's saved state. -1: nothing was saved.

        Args:
            name: the name of the object.
        """
        return -1 if self.kept is None or f"attached/{name}/json" not in self.kept.arrays else self.kept.position

    def attach(
        self,
        name: str,
        thing: Any,
        step: int,
        *,
        follow: bool = False,
        lead: int | None = None,
        loads: bool = True,
    ) -> None:
        """Save the state of an object from now on. If an earlier attempt of this rank saved one, load it.

        Args:
            name: the name of the object.
            thing: the object.
            step: the run's current step.
            follow: True: the object is a learning rate schedule, which must be stepped to the run's step.
            lead: the steps that the schedule had counted before the run began. None: its count minus the steps of this
                process. In a later attempt without a saved state, its count minus the run's steps.

        Raises:
            TypeError: the object has no state that can be saved.
            ValueError: the name is taken, or a schedule of this optimizer is attached already.
        """
        thing = unwrapped(thing)
        if name in self.things:
            raise ValueError(f"Another object is attached as {name!r}. Choose another name.")
        if any(schedule.optimizer is thing for schedule in self._followers.values()):
            # The saved state of an optimizer has a learning rate, which would replace the learning rate that the
            # schedule has just set.
            raise ValueError(f"Optimizer {name!r} was attached after its schedule. Attach the optimizer first.")
        if follow:
            check_can_follow(name, thing)
        take, give = _state_calls(name, thing)
        to_arrays(take(), name)
        state, kept_lead = None, 0
        if self.kept is not None and loads:
            try:
                with reading("state"):
                    state = from_arrays(self.kept.arrays, f"attached/{name}", takes=True)
                    kept_lead = typed(int, from_arrays(self.kept.arrays, f"lead/{name}") or 0)
            except BadRecordError as error:
                log.warning("rank %s: the saved state of %r cannot be read: %s", self._me.rank, name, error)
        elif name in self._let_go:
            log.warning(
                "rank %s: %r is attached after a step, so its saved state is lost. Attach it right after creating the "
                "DiLoCo.", self._me.rank, name,
            )  # fmt: skip
        if state is not None:
            give(_as_parameters(thing, state))
        self.things[name] = thing
        if follow:
            self._followers[name] = thing
            if lead is None:
                lead = max(0, steps_counted(thing) - self._begun_at - (step if self._me.attempt else self._n_steps))
            self.leads[name] = lead if state is None else kept_lead
        with warnings.catch_warnings():
            # torch warns of a schedule's step before the first step of its optimizer. Here that is intended.
            warnings.filterwarnings("ignore", "Detected call of", UserWarning)
            self.follow(step, self._n_steps)

    def detach(self, name: str) -> None:
        """Forget an object, because another process of the replica could not attach it.

        Args:
            name: the name of the object.
        """
        self.things.pop(name, None)
        self._followers.pop(name, None)
        self.leads.pop(name, None)

    def catch_up(self, step: int, n_steps: int) -> None:
        """Note that calls of `follow` were skipped while no object was attached.

        Call this before the first `attach`.

        Args:
            step: the run's step.
            n_steps: the steps that this process has made.
        """
        if self.is_behind:
            self.follow(step, n_steps)

    def count_of(self, name: str, step: int) -> int:
        """Return the number of steps that a schedule must have counted at a step of the run.

        Args:
            name: the name of a schedule that follows.
            step: the run's step.
        """
        return self._begun_at + step + self.leads[name]

    def follow(self, step: int, n_steps: int) -> None:
        """Step the schedules that follow the run to the run's step. Log a line if the run continued without the other
        attached objects.

        Args:
            step: the run's step.
            n_steps: the steps that this process has made.
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
        # One line for the replica: its other members have saved their states at the same step as the leader.
        is_late = gap >= self._plan.steps_per_entry and self._member == 0
        if is_late and len(self.things) > len(self._followers):
            now, own = self._begun_at + step, self._begun_at + step - self._missed
            log.warning(
                "rank %s: DiLoCo %r continued at step %s, with attached state from step %s",
                self._me.rank, self._keys.name, now, own,
            )  # fmt: skip

    def _look_for_own_step(self, name: str, schedule: Any, n_steps: int) -> None:
        """Warn once if the script steps a schedule that follows the run, and does so much less often than at each inner
        step.

        Such a schedule counts epochs. If it followed the run's steps, a StepLR would decay hundreds of times in an
        epoch, without any message. A script that steps the schedule after each inner step does no harm, because
        `follow` then sets it to the run's step.

        Args:
            name: the name of the schedule.
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
            "epochs, attach it without follow=True; otherwise remove the step from the script.",
            stacklevel=5,
        )

    def _within(self, name: str, schedule: Any, count: int) -> int:
        """Return a count of steps, but at most the last count that the schedule allows. Warn once if the count is cut.

        OneCycleLR, alone or inside another schedule, raises an error when it is stepped beyond its own total.

        Args:
            name: the name of the schedule.
            schedule: the schedule.
            count: the number of steps that the schedule should have counted.
        """
        if (last := last_count_of(schedule)) is None or count <= last:
            return count
        if name not in self._ended:
            self._ended.add(name)
            warnings.warn(
                f"The schedule {name!r} ends at step {last}, before the run, so its last learning rate stays. Make "
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

        If a state is no longer tensors and JSON alone, it is not saved. A warning names it, and training continues.

        Args:
            position: the number of entries that the run has completed.
            progress: the live work of each fragment: its distance from the anchor.
            uncounted_since: the entry at which each fragment's live work began.
            buffers: the model's buffers that are not averaged, by name.
        """
        self.on_keep(position)
        arrays = {f"progress/{index}": part.numpy() for index, part in enumerate(progress) if part.count_nonzero()}
        own = {name: thing for name, thing in self.things.items() if name not in self.of_leader}
        states = {f"attached/{name}": _state_calls(name, thing)[0]() for name, thing in own.items()}
        leads = {f"lead/{name}": lead for name, lead in self.leads.items() if lead and name in own}
        for prefix, taken in {**states, **leads, **({"buffers": dict(buffers)} if buffers else {})}.items():
            name = prefix.removeprefix("attached/")
            try:
                state = to_arrays(taken, prefix)
            except TypeError as error:
                if name not in self._left_out:
                    log.warning("rank %s: %r is not saved: %s", self._me.rank, name, error)
                self._left_out.add(name)
                continue
            arrays |= {key: self._copy(key, value) for key, value in state.items()}
        since, steps, is_first = list(uncounted_since), self.step, self.schedule.is_first_of_period(position)
        # If an upload still reads the old copies, this state needs new memory.
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
        """Delete the states that were stored before the last two.

        Between two snapshots, only the newest state is needed. The previous state stays in case the newest state is
        damaged. The first state after each snapshot stays as well, because a run that continues from an older snapshot
        needs a state that is not newer than that snapshot. `collect_garbage` deletes these first states.
        """
        store, me = self._store.for_thread(), self._me
        for position, n_parts, is_first in self._written[:-2]:
            if not is_first:
                store.remove(self._keys.own_state_record(me.rank, position, me.attempt, self._member))
                for index in range(n_parts):
                    store.remove(self._keys.own_state_tensors(me.rank, position, me.attempt, index, self._member))
        self._written = self._written[-2:]

    def _upload(self, position: int, steps: int, arrays: Arrays, since: Sequence[int]) -> int:
        """Store a record and its tensors. Return the number of parts, or 0 if the store failed."""
        store, me = self._store.for_thread(), self._me
        parts = [encode_part(part) for part in parts_of(dict(_cut(arrays)), PART_BYTES)]
        digest, *more = (digest_of(part, self._proof) for part in parts)
        about = {"rank": me.rank, "attempt": me.attempt, "position": position, "uncounted_since": since, "steps": steps}
        record = {**about, "digest": digest, **({"more": more} if more else {})}
        key = self._keys.own_state_record(me.rank, position, me.attempt, self._member)
        keys = [
            self._keys.own_state_tensors(me.rank, position, me.attempt, index, self._member)
            for index in range(len(parts))
        ]
        try:
            is_kept = all(store.write(*each) for each in zip(keys, parts, strict=True))
            error = None if is_kept and store.write(key, frame(record, key, self._proof)) else store.last_error
        except StoreError as raised:
            error = raised
        if error is not None:
            log.warning("rank %s: attached state could not be stored after round %s: %s", me.rank, position, error)
            return 0
        return len(parts)

    def buffers_of_earlier_attempt(self) -> dict[str, Tensor]:
        """Return the buffers that an earlier attempt of this replica saved.

        Empty if the attempt saved no buffers, or if none can be read.
        """
        with contextlib.suppress(BadRecordError), reading("buffers"):
            found = None if self.kept is None else from_arrays(self.kept.arrays, "buffers")
            return {name: typed(Tensor, values) for name, values in typed(dict, found or {}).items()}
        return {}

    def load_from_run(self, origin: str, position: int) -> None:
        """Load the state that this rank saved in another run, which this run continues.

        Args:
            origin: the other run.
            position: the position at which this run begins. A newer state is not used.
        """
        self.kept = self._find(replace(self._keys, run_id=origin), position)
        self.step = self._step_of_kept()

    def _step_of_kept(self) -> int:
        if self.kept is None:
            return 0
        return self._plan.step_before(self.kept.position) if self._plan.entry_s is None else self.kept.steps

    def _find(self, keys: Keys, most: int = sys.maxsize) -> SavedState | None:
        """Return the newest saved state that can be read.

        Args:
            keys: the keys of the run in which it was saved.
            most: the largest position that the state may have.
        """
        prefix = keys.own_state(self._me.rank, self._member)
        for _ in range(READ_TRIES):  # a listing that failed counts as an empty one
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
        key = keys.own_state_record(self._me.rank, position, attempt, self._member)
        record = self._store.peek(key)
        if not record:
            return None
        with contextlib.suppress(BadRecordError):
            fields = unframe(record, key, self._proof)[0]
            with reading("record of an attached state"):
                since = [min(position, typed(int, entry)) for entry in typed(list, fields.get("uncounted_since", []))]
                steps = max(0, typed(int, fields.get("steps", 0)))
                digests = [fields["digest"], *typed(list, fields.get("more", []))]
                named = [
                    (keys.own_state_tensors(self._me.rank, position, attempt, index, self._member), typed(str, digest))
                    for index, digest in enumerate(digests)
                ]
                arrays: dict[str, Array] = {}
                for part in read_ahead(self._store, self._read_part, named):
                    if part is None:
                        return None
                    arrays |= part
                return SavedState(position, _joined(arrays), since, steps)
        self._store.record_misread(key, record)
        return None

    def _read_part(self, named: tuple[str, str]) -> dict[str, Array] | None:
        """Return the arrays of one part. None: it is missing, or has other bytes than were written.

        Objects of a remote store are copied here, because other threads read the next parts in the same time.

        Args:
            named: the key and the digest of the part.

        Raises:
            BadRecordError: the part was written in another format.
        """
        data = proven_part(self._store, *named, self._proof, tries=1)
        if data is None:
            return None
        arrays = decode_part(data)
        return arrays if is_local_store(self._store.store) else {name: np.array(part) for name, part in arrays.items()}


def _cut(arrays: Arrays) -> Iterator[tuple[str, Array]]:
    """Yield arrays by name. An array that is too large for one object is cut into pieces of whole rows."""
    for name, array in arrays.items():
        if array.nbytes <= OWN_PART_BYTES:
            yield name, array
            continue
        rows = max(1, OWN_PART_BYTES * len(array) // array.nbytes)
        for number, first in enumerate(range(0, len(array), rows)):
            yield f"{number} of {name}", array[first : first + rows]


def _joined(found: Arrays) -> dict[str, Array]:
    """Return arrays by name, with the pieces of cut arrays put together."""
    arrays: dict[str, Array] = {}
    pieces: dict[str, dict[int, Array]] = {}
    for name, array in found.items():
        if piece := re.fullmatch(r"(\d{1,9}) of (.*)", name, re.DOTALL):
            pieces.setdefault(piece[2], {})[int(piece[1])] = array
        else:
            arrays[name] = array
    return arrays | {name: np.concatenate([parts[n] for n in range(len(parts))]) for name, parts in pieces.items()}


def _state_calls(name: str, thing: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Return the two functions of an object that return and load its state."""
    for take, give in _STATE_CALLS:
        if callable(getattr(thing, take, None)) and callable(getattr(thing, give, None)):
            return getattr(thing, take), getattr(thing, give)
    if hasattr(getattr(thing, "bit_generator", None), "state"):  # the object is a Generator of numpy
        return lambda: thing.bit_generator.state, lambda state: setattr(thing.bit_generator, "state", state)
    raise TypeError(
        f"attach_state({name!r}) needs an object with state_dict() and load_state_dict(), or a random generator of "
        f"torch, numpy or Python, got {kind_of(thing)}."
    )


def _as_parameters(thing: Any, state: Any) -> Any:
    """Return the saved state of an optimizer, with the tensors of a sharded parameter as DTensors.

    Only the local part of a DTensor is saved. The parameter that it belongs to has its mesh and its placements.
    """
    groups = getattr(thing, "param_groups", None)
    if not isinstance(groups, list) or not isinstance(state, dict) or not isinstance(state.get("state"), dict):
        return state
    parameters = [p for group in groups for p in group["params"]]
    if not any(map(is_dtensor, parameters)):
        return state
    from torch.distributed.tensor import DTensor

    restored: dict[Any, Any] = {}
    for number, values in state["state"].items():
        p = parameters[number] if isinstance(number, int) and number < len(parameters) else None
        restored[number] = values
        if isinstance(p, DTensor) and isinstance(values, dict):
            restored[number] = {
                name: DTensor.from_local(
                    value.to(p.device), p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
                )
                if isinstance(value, Tensor) and value.dim() and value.shape == p.to_local().shape
                else value
                for name, value in values.items()
            }
    return {**state, "state": restored}


def to_arrays(state: Any, prefix: str) -> dict[str, Array]:
    """Return a state as arrays: `<prefix>/0`, `<prefix>/1`, … are its tensors, and `<prefix>/json` is the rest.

    The arrays share memory with tensors that are on the CPU.

    Args:
        state: tensors, arrays and JSON values, in dictionaries, lists and tuples.
        prefix: the beginning of each array's name.

    Raises:
        TypeError: an element is of another type. The message names it and its place.

    Example:
        to_arrays(optimizer.state_dict(), "attached/optimizer")
    """
    arrays: dict[str, Array] = {}
    text = json.dumps(_flatten(state, arrays, prefix, prefix), separators=(",", ":"))
    return {**arrays, f"{prefix}/json": np.frombuffer(text.encode(), np.uint8)}


def from_arrays(arrays: Mapping[str, Array], prefix: str, *, takes: bool = False) -> Any | None:
    """Return the state whose arrays `to_arrays` returned, with copies of the tensors. None: no state was saved under
    this prefix.

    Args:
        arrays: the arrays by name.
        prefix: the prefix that `to_arrays` was given.
        takes: True: the caller does not need the arrays any more, so arrays that can be written become the tensors.

    Example:
        optimizer.load_state_dict(from_arrays(arrays, "attached/optimizer"))
    """
    text = arrays.get(f"{prefix}/json")
    copied = (lambda values: values if values.flags.writeable else np.array(values)) if takes else np.array
    return None if text is None else _unflatten(json.loads(text.tobytes()), arrays, copied)


def _flatten(value: Any, arrays: dict[str, Array], prefix: str, where: str) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, (bool, int, float, str, type(None))):
                raise TypeError(f"{where} has a key of type {type(key).__name__}, which cannot be saved as JSON.")
        items = [[key, _flatten(item, arrays, prefix, f"{where}[{key!r}]")] for key, item in value.items()]
        return {"dict": items}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_flatten(item, arrays, prefix, f"{where}[{at}]") for at, item in enumerate(value)]}
    if isinstance(value, Tensor):
        if is_dtensor(value):  # each member of the replica saves its own part
            value = value.to_local()  # type: ignore[attr-defined]
        dtype = str(value.dtype).removeprefix("torch.")
        # numpy does not have the type, layout or class of the tensor
        with contextlib.suppress(TypeError, RuntimeError):
            values = value.detach().cpu()
            if dtype == "bfloat16":
                values = values.contiguous().view(torch.int16)  # numpy has no bfloat16
            if (array := values.numpy()).dtype in _KEPT:
                return {"tensor": _added(array, arrays, prefix), "dtype": dtype}
    if isinstance(value, np.ndarray) and value.dtype in _KEPT:
        return {"array": _added(value, arrays, prefix)}
    kind = f"{kind_of(value)} of {value.dtype}" if isinstance(value, (Tensor, np.ndarray)) else kind_of(value)
    raise TypeError(f"{where} is {kind}, which can be saved neither as a tensor nor as JSON.")


def _added(values: Array, arrays: dict[str, Array], prefix: str) -> str:
    name = f"{prefix}/{len(arrays)}"
    arrays[name] = values
    return name


def _unflatten(value: Any, arrays: Mapping[str, Array], copied: Callable[[Array], Array]) -> Any:
    if not isinstance(value, dict):
        return value
    if "dict" in value:
        return {key: _unflatten(item, arrays, copied) for key, item in value["dict"]}
    if "list" in value:
        return [_unflatten(item, arrays, copied) for item in value["list"]]
    if "tuple" in value:
        return tuple(_unflatten(item, arrays, copied) for item in value["tuple"])
    if "array" in value:
        return copied(arrays[value["array"]])
    tensor = torch.from_numpy(copied(arrays[value["tensor"]]))
    return tensor.view(torch.bfloat16) if value["dtype"] == "bfloat16" else tensor
