"""Reads the trained model of a run from the run's store, for `replicas model`, `Run.model()` and `--from RUN`.

A reader loads the newest snapshot, verifies it by its digests, and applies the later means, as a resumed replica does.
So it gets the anchor of the newest round, also while replicas train, and writes nothing. `executors` must not import
torch, so it loads this module through an entry point.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from time import monotonic
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from diloco.attached_state import from_arrays
from diloco.errors import DiLoCoError
from diloco.fragments import Fragment, Slot
from diloco.outer_optimizer import (
    GivenOptimizer,
    NesterovSGD,
    OptimizerFactory,
    OuterOptimizer,
    Schedule,
    digest_of_given,
    never,
)
from diloco.rendezvous.envelope import BadRecordError, proof_of, reading
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.phase import RoundPlan
from diloco.rendezvous.retrying_store import RetryingStore
from diloco.rendezvous.round import Limits
from diloco.rendezvous.snapshot import SnapshotPointer
from diloco.rendezvous.stored_log import StoredAgreement, StoredRoundLog, UnsharedEntry
from diloco.rendezvous.training_state import Array, Arrays
from diloco.unshared_state import restored
from diloco.wires import wire_named
from diloco.wires.wire import decoded
from executors.errors import CorruptObjectError, RunNotFoundError
from executors.patience import BRIEF
from executors.store import Store
from executors.store.artifacts import replacing
from executors.store.protocol import FolderStore

Dtype = Literal["live", "float32"]
TRIES = 3
"""Number of attempts to find the newest state, because a running run deletes older states meanwhile."""
FORMAT_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """The run that a model is read from, and the settings that a reader needs.

    Args:
        store: the store of the run.
        run_id: the name of the run.
        name: the name of its DiLoCo.
        key: the key of a signed run. None: the run is not signed.
        extensions: the totals that the run was extended to: `total_steps`, or `total_rounds` if rounds go by the clock.
        limits: the sizes of blocks and shards. None: the defaults.

    Example:
        ModelSource(store=store_at("runs"), run_id="first-try")
    """

    store: Store
    run_id: str
    name: str = "main"
    key: bytes | None = None
    extensions: Mapping[str, Sequence[int]] = field(default_factory=dict)
    limits: Limits | None = None


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """The model of a run after one of its rounds.

    Attributes:
        run_id: the run.
        name: the name of its DiLoCo.
        rounds: the number of rounds of all fragments.
        step: the run's step after that round. None: the run has rounds by the clock.
        tensors: the tensors by their names in the model's `state_dict`.
        missing: the names in the model's `state_dict` that `tensors` does not have, each with the kind of its entry.
        notes: sentences that a user of the model should read.
    """

    run_id: str
    name: str
    rounds: int
    step: int | None
    tensors: Mapping[str, Tensor]
    missing: Mapping[str, str]
    notes: Sequence[str] = ()

    @property
    def size_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(values.nbytes for values in self.tensors.values())


def read_model(
    source: ModelSource,
    *,
    step: int | None = None,
    rounds: int | None = None,
    dtype: Dtype = "live",
    outer_optimizer: OptimizerFactory | None = None,
) -> TrainedModel:
    """Return the model of a run after its newest round, or after an earlier round that the store still has.

    Args:
        source: the run.
        step: the step of the run. The newest round at or before it is used. None: the newest round.
        rounds: use the state after this number of rounds, or the newest before it. None: the newest.
        dtype: "live": each tensor has the dtype that it has in the model. "float32": the anchor without conversion.
        outer_optimizer: the run's own outer optimizer, if it has one. Without it, only the rounds of snapshots are
            available.

    Raises:
        ValueError: an argument has a value that is not allowed.
        RunNotFoundError: the run has no DiLoCo of this name.
        DiLoCoError: `step` is given and the run has rounds by the clock. Or the store no longer has such a round.
        CorruptObjectError: an object in the store is damaged.

    Example:
        read_model(ModelSource(store=store_at("runs"), run_id="first-try")).tensors["weight"]
    """
    if dtype not in ("live", "float32"):
        raise ValueError(f"dtype must be 'live' or 'float32', got dtype={dtype!r}.")
    found = read_state(source, step=step, rounds=rounds, outer_optimizer=outer_optimizer)
    anchor = found.state.anchor_views()
    tensors = dict(_as_live(found.log.agreed, anchor) if dtype == "live" else anchor)
    missing, more_notes = _add_unshared(found.log, found.state.position, tensors)
    return TrainedModel(
        run_id=source.run_id,
        name=source.name,
        rounds=found.state.position,
        step=found.step,
        tensors=tensors,
        missing=missing,
        notes=(*found.notes, *more_notes),
    )


@dataclass(frozen=True, kw_only=True)
class FoundState:
    """Anchor and outer state of a run after one of its rounds.

    Attributes:
        log: the log of the run.
        state: the anchor and the outer state.
        step: the run's step after that round. None: the run has rounds by the clock.
        notes: sentences that a user of the state should read.
    """

    log: StoredRoundLog
    state: ReplayedState
    step: int | None
    notes: Sequence[str]


def read_state(
    source: ModelSource,
    *,
    step: int | None = None,
    rounds: int | None = None,
    outer_optimizer: OptimizerFactory | None = None,
) -> FoundState:
    """Return the anchor and the outer state of a run after its newest round, or after an earlier one.

    Args:
        source: the run.
        step: the step of the run. The newest round at or before it is used. None: the newest round.
        rounds: use the state after this number of rounds, or the newest before it. None: the newest.
        outer_optimizer: the run's own outer optimizer, if it has one. Without it, only the rounds of snapshots are
            available.

    Raises:
        ValueError: an argument has a value that is not allowed.
        RunNotFoundError: the run has no DiLoCo of this name.
        DiLoCoError: `step` is given and the run has rounds by the clock. Or the store no longer has such a round.
        CorruptObjectError: an object in the store is damaged.

    Example:
        read_state(ModelSource(store=store_at("runs"), run_id="first-try")).state.arrays()
    """
    log = open_log(source)
    agreed, plan = log.agreed, log.plan(source.extensions)
    most = _most_rounds(source, agreed, plan, step, rounds)
    try:
        state, notes = _newest(source, log, plan, most, outer_optimizer)
    except _NoSuchRound:
        raise DiLoCoError(f"{_missing_in_words(source, most, step)} {_available_in_words(log, plan)}") from None
    at = None if agreed.inner_steps is None else plan.step_before(state.position)
    return FoundState(log=log, state=state, step=at, notes=notes)


def save_model(model: TrainedModel, path: Path) -> int:
    """Write a model as a safetensors file, and return the size of the file in bytes.

    An existing file is replaced. If writing fails, no incomplete file is left.

    Args:
        model: the model.
        path: the path of the file.

    Raises:
        OSError: the file cannot be written.

    Example:
        save_model(read_model(source), Path("model.safetensors"))
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "run": model.run_id, "rounds": str(model.rounds)}}
    at = 0
    for name, values in model.tensors.items():
        kind = FORMAT_NAMES[str(values.dtype).removeprefix("torch.")]
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)  # the format pads with spaces
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for values in model.tensors.values():
            file.write(values.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return 8 + len(text) + at


def open_log(source: ModelSource) -> StoredRoundLog:
    """Return the log of a run.

    Args:
        source: the run.

    Raises:
        RunNotFoundError: the run has no DiLoCo of this name.
        CorruptObjectError: its first state cannot be read, or was made with another key.

    Example:
        open_log(source).agreed.n_fragments
    """
    proof = proof_of(source.key)
    patient = RetryingStore(source.store, clock=monotonic, tolerance=BRIEF, copies=proof.copies)
    log = StoredRoundLog(patient, Keys(source.run_id, source.name), proof, source.limits)
    if log.start is None:
        names = names_in(source.store, source.run_id)
        others = f" It has: {', '.join(names)}." if names else " Its replicas have not begun, or train without DiLoCo."
        raise RunNotFoundError(f"Run {source.run_id!r} has no DiLoCo named {source.name!r}.{others}")
    return log


def names_in(store: Store, run_id: str) -> list[str]:
    """Return the names of the DiLoCos of a run.

    Args:
        store: the store of the run.
        run_id: the run.

    Example:
        names_in(store, "first-try")  # ["main"]
    """
    prefix = f"{run_id}/diloco/"
    if isinstance(store, FolderStore):
        return sorted(store.folders(prefix))
    return sorted({entry.key.removeprefix(prefix).partition("/")[0] for entry in store.list(prefix)})


def _most_rounds(
    source: ModelSource, agreed: StoredAgreement, plan: RoundPlan, step: int | None, rounds: int | None
) -> int | None:
    """Return the largest number of rounds that the wanted state may have. None: the newest state is wanted."""
    for name, value in (("step", step), ("rounds", rounds)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise ValueError(f"{name} must be a whole number of at least 0, got {name}={value!r}.")
    if step is None:
        return rounds
    if agreed.inner_steps is None:
        raise DiLoCoError(
            f"Run {source.run_id!r} has rounds by the clock, so step={step} does not name a round. Use --round N, or "
            "rounds=N in Python."
        )
    at = plan.position_at(step)
    return at if rounds is None else min(at, rounds)


class _NoSuchRound(Exception):
    """Raised if the store has no state of a round at or before the wanted round."""


# -- the anchor --------------------------------------------------------------------------------------------------------


class ReplayedState:
    """The anchor and the outer state of a run before one of its entries.

    Args:
        agreed: the settings that the run's replicas agreed on.
        plan: divides the run into entries.
        outer_optimizer: the run's own outer optimizer. None: it is the built-in one, or unknown. An unknown one cannot
            apply a mean.

    Example:
        state = ReplayedState(log.agreed, plan, None)
        state.load(entry, *log.load(entry))
    """

    def __init__(self, agreed: StoredAgreement, plan: RoundPlan, outer_optimizer: OptimizerFactory | None) -> None:
        self.position = 0
        """The next entry."""
        self.fragments = _fragments_of(agreed)
        self.is_stepped = agreed.outer_optimizer is None or outer_optimizer is not None
        self._agreed = agreed
        self._anchors = [torch.zeros(f.n_elements, dtype=torch.float32, device="cpu") for f in self.fragments]
        self._outer: list[OuterOptimizer] = []
        self._arrays: Arrays = {}
        is_average = plan.is_final if agreed.final_average else never
        schedule = Schedule(agreed.outer_lr, agreed.outer_momentum, agreed.warmup, agreed.n_fragments, is_average)
        for fragment, anchor in zip(self.fragments, self._anchors, strict=True):
            if agreed.outer_optimizer is None:
                self._outer.append(NesterovSGD(fragment, anchor, schedule))
            elif outer_optimizer is not None:
                self._outer.append(GivenOptimizer(fragment, anchor, outer_optimizer))

    def load(self, position: int, pointer: SnapshotPointer, arrays: Arrays) -> None:
        """Load a snapshot.

        Args:
            position: the entry before which the snapshot was made.
            pointer: the pointer of the snapshot, which has the digests.
            arrays: its arrays.

        Raises:
            BadRecordError: the snapshot is of another model, or its digests differ.
        """
        with reading("snapshot of this model"):
            for name, view in self.anchor_views().items():
                view.numpy()[...] = arrays[f"anchor/{name}"]
            for outer in self._outer:
                outer.load_arrays(arrays)
            self.position, self._arrays = position, arrays
            if (*self.digests(),) != pointer.state:
                raise ValueError("its digests differ")

    def digests(self) -> Iterator[str]:
        """Yield the digest of each fragment."""
        for fragment in self.fragments:
            yield self.digest(fragment.index)

    def digest(self, fragment: int) -> str:
        """Return the digest of a fragment's anchor and outer state.

        Args:
            fragment: the number of the fragment.
        """
        if self._outer:
            return self._outer[fragment].digest()
        state = from_arrays(self._arrays, f"outer/{fragment}") or {"state": {}}
        return digest_of_given(self._anchors[fragment], state["state"])

    @torch.no_grad()
    def apply(self, mean: Sequence[memoryview]) -> None:
        """Step the anchor by the mean of the next entry. If no replica sent any work, the anchor does not change.

        Args:
            mean: the encoded mean, in parts. Empty: no replica sent any work.
        """
        fragment = self.fragments[self.position % len(self.fragments)]
        if mean:
            wire, n_elements = wire_named(self._agreed.mean_wire), fragment.n_elements
            self._outer[fragment.index].step(self.position, decoded(wire, mean, n_elements, self.block_elements))
        self.position += 1

    block_elements = Limits().block_elements
    """The number of elements of a payload that share one digest."""

    def anchor_views(self) -> dict[str, Tensor]:
        """Return the anchor by name, as views."""
        return {
            slot.name: anchor[slot.start : slot.end].view(slot.shape)
            for fragment, anchor in zip(self.fragments, self._anchors, strict=True)
            for slot in fragment.slots
        }

    def arrays(self) -> dict[str, Array]:
        """Return anchor and outer state under the names that they have in snapshots."""
        arrays: dict[str, Array] = {f"anchor/{name}": view.numpy() for name, view in self.anchor_views().items()}
        for outer in self._outer:
            arrays |= outer.arrays()
        if not self._outer:
            arrays |= {name: values for name, values in self._arrays.items() if name.startswith("outer/")}
        return arrays


def _check_shapes(agreed: StoredAgreement, arrays: Arrays) -> None:
    """Check that a snapshot has the tensors that the run agreed on, before memory of these sizes is used.

    Raises:
        BadRecordError: the snapshot has other tensors.
    """
    with reading("snapshot of this model"):
        for name, (shape, _, _) in agreed.tensors.items():
            values = arrays[f"anchor/{name}"]
            if values.dtype != np.float32 or values.shape != shape:
                raise ValueError(f"{name!r} is {values.dtype} of shape {values.shape}")


def _fragments_of(agreed: StoredAgreement) -> list[Fragment]:
    fragments = []
    for index in range(agreed.n_fragments):
        slots: list[Slot] = []
        at = 0
        for name, (shape, dtype, fragment) in agreed.tensors.items():
            if fragment == index:
                end = at + prod(shape)
                kind: Literal["parameter", "buffer"] = "parameter" if end <= agreed.stepped[index] else "buffer"
                slots.append(Slot(name, kind, shape, dtype, at, end))
                at = end
        fragments.append(Fragment(index, tuple(slots), agreed.stepped[index], at))
    return fragments


def _newest(
    source: ModelSource,
    log: StoredRoundLog,
    plan: RoundPlan,
    most: int | None,
    outer_optimizer: OptimizerFactory | None,
) -> tuple[ReplayedState, list[str]]:
    """Return the state after the newest round up to a number, with notes for the user.

    Raises:
        _NoSuchRound: the store no longer has such a round.
        CorruptObjectError: every snapshot is damaged.
    """
    for _ in range(TRIES):
        damaged: str | None = None
        for entry in log.snapshots():
            if most is not None and entry > most:
                continue
            if (found := log.load(entry)) is None:
                continue
            try:
                _check_shapes(log.agreed, found[1])
                state = ReplayedState(log.agreed, plan, outer_optimizer)
                state.block_elements = (source.limits or Limits()).block_elements
                state.load(entry, *found)
                _replay(log, state, most)
            except BadRecordError as error:
                damaged = str(error)
                continue
            return state, _notes_on(log, state, most)
        if damaged is not None:
            raise CorruptObjectError(f"All snapshots of run {source.run_id!r} are damaged. {damaged}")
    raise _NoSuchRound


def _replay(log: StoredRoundLog, state: ReplayedState, most: int | None) -> None:
    """Apply the rounds after a snapshot, as far as they are complete.

    Raises:
        BadRecordError: a seal was made from a different state.
    """
    while state.is_stepped and (most is None or state.position < most):
        if (found := log.round(state.position)) is None:
            return
        seal, mean = found
        fragment = state.position % len(state.fragments)
        if seal.anchor != state.digest(fragment):
            raise BadRecordError(f"Round {state.position + 1} was made from a different state than the one before it.")
        state.apply(mean)


def _notes_on(log: StoredRoundLog, state: ReplayedState, most: int | None) -> list[str]:
    """Return notes for the user about later rounds in the store that a state does not contain."""
    if (most is not None and state.position >= most) or not log.is_sealed(state.position):
        return []
    if not state.is_stepped:
        return [
            f"This is the newest snapshot, after round {state.position}. Later rounds need the run's outer optimizer "
            f"({log.agreed.outer_optimizer}): Run.model(outer_optimizer=…)."
        ]
    if log.is_sealed(state.position + len(state.fragments)):
        return [f"The model has no round after {state.position}: data of the next round is missing or damaged."]
    return [f"The model does not contain round {state.position + 1}, which is not complete yet."]


def _missing_in_words(source: ModelSource, most: int | None, step: int | None) -> str:
    run = f"Run {source.run_id!r}"
    if most is None:
        return f"{run} has no whole snapshot in its store."
    asked = f"round {most}" if step is None else f"step {step}"
    return f"{run} no longer has the state of {asked}: rounds older than the second newest snapshot are deleted."


def _available_in_words(log: StoredRoundLog, plan: RoundPlan) -> str:
    """Return a sentence that names the rounds that the store still has."""
    kept = sorted(entry for entry in log.snapshots() if log.has_parts(entry))
    if not kept:
        return "Its model is not available."
    agreed, every = log.agreed, "after every round"
    end = kept[-1]
    if agreed.outer_optimizer is None:
        while log.is_sealed(end):
            end += 1
    else:
        every = f"after the rounds {', '.join(map(str, kept))} only"
    if agreed.inner_steps is None:
        return f"Available: rounds {kept[0]} to {end}, {every}."
    return f"Available: steps {plan.step_before(kept[0])} to {plan.step_before(end)}, {every}."


# -- in the dtypes of the live model -----------------------------------------------------------------------------------


def _as_live(agreed: StoredAgreement, anchor: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, values in anchor.items():
        dtype = getattr(torch, agreed.tensors[name][1], None)
        if not isinstance(dtype, torch.dtype) or str(dtype).removeprefix("torch.") not in FORMAT_NAMES:
            raise CorruptObjectError(
                f"The run's agreement gives {name!r} the dtype {agreed.tensors[name][1]!r}, which torch does not have."
            )
        yield name, values.to(dtype)


def _add_unshared(log: StoredRoundLog, position: int, tensors: dict[str, Tensor]) -> tuple[dict[str, str], list[str]]:
    """Add the unshared tensors that a replica stored. Return the missing names, and notes for the user.

    Args:
        log: the log of the run.
        position: the number of rounds of the anchor. Newer tensors are not used.
        tensors: the anchor by name. It is changed.
    """
    more, notes = log.agreed.unshared, list[str]()
    wanted = {name: each for name, each in more.items() if each.kind in ("frozen", "buffer")}
    found: dict[str, tuple[int, int, Tensor]] = {}
    for entry in (each for each in log.unshared_rounds() if each <= position) if wanted else ():
        if wanted.keys() <= found.keys():
            break
        if (rest := log.read_unshared(entry)) is None:
            continue
        try:
            kept = restored(rest)
        except (ValueError, RuntimeError) as error:
            raise CorruptObjectError(f"The values kept in round {entry} do not fit their record: {error}.") from error
        for name in kept.keys() & wanted.keys() - found.keys():
            if _fits(kept[name], wanted[name]):
                found[name] = entry, rest.rank, kept[name]
    tensors |= {name: values for name, (_, _, values) in found.items()}
    for name, each in more.items():
        if each.kind == "tied" and each.same_as in tensors:
            tensors[name] = tensors[each.same_as]
    own = {name: found[name] for name, each in wanted.items() if each.kind == "buffer" and name in found}
    if own:
        name, (entry, rank, _) = next(iter(own.items()))
        others = f" and {len(own) - 1} more" if len(own) > 1 else ""
        when = "at the beginning of the run" if not entry else f"after round {entry}"
        notes.append(f"Not averaged: {name!r}{others}. The values are those of rank {rank}, {when}.")
    missing = {name: _described(each) for name, each in more.items() if name not in tensors}
    if missing:
        name, size = next(iter(missing)), sum(_bytes_of(more[name]) for name in missing)
        notes.append(
            f"Not in the run: {len(missing)} of the model's tensors ({size / 1e6:,.1f} MB), the first is {name!r} "
            f"({missing[name]}). Build the model as the run did, then load with strict=False."
        )
    return missing, notes


def _fits(values: Tensor, more: UnsharedEntry) -> bool:
    return tuple(values.shape) == more.shape and str(values.dtype).removeprefix("torch.") == more.dtype


def _described(more: UnsharedEntry) -> str:
    return "not a tensor" if more.kind == "other" else f"{more.kind}, {more.dtype}, {list(more.shape)}"


def _bytes_of(more: UnsharedEntry) -> int:
    dtype = getattr(torch, more.dtype, None)
    return prod(more.shape) * (dtype.itemsize if isinstance(dtype, torch.dtype) else 1) if more.kind != "other" else 0
