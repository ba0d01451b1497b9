"""The interface between the protocol and the model: `TrainingState`, and the agreement that all replicas share.

The rendezvous decides, and the training state computes. `diloco.model_state.ModelState` implements it with torch. The
simulation in the tests implements it with a few integers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import isclose
from typing import Any, Protocol

import numpy.typing as npt

from diloco.errors import ContributionError
from diloco.wires.wire import Wire

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]
Agreement = Mapping[str, Any]
"""The agreement of the replicas of a run, as a JSON object.

`tensors` maps the name of each averaged tensor to [shape, dtype, fragment]. `frozen` maps the name of each frozen
parameter to a fingerprint of its values. `unshared` has the other entries of the model's `state_dict`. All other fields
are settings.
"""
FROZEN_TOLERANCE = 1e-3
"""The relative difference up to which two fingerprints count as equal.

Machines round weights a little differently, but another seed makes a larger difference.
"""


class Verdict(StrEnum):
    """The decision of an entry about the local work of a fragment."""

    COUNTED = "counted"
    """The seal names this process. The work that it has sent is in the mean."""
    KEPT = "kept"
    """The seal does not name this rank. The next contribution contains the work."""
    DROPPED = "dropped"
    """The seal names another process of this rank, which may have sent the same work. So this process drops its own
    work.
    """


@dataclass(frozen=True, slots=True)
class PackedWork:
    """The encoded work of a contribution.

    Example:
        packed = training.pack(entry)
        packed.part(0, size_bytes=4096)
    """

    blocks: tuple[str, ...]
    """The digest of each block of the payload."""
    norms: tuple[float, ...]
    """The norm of each block."""
    kept: memoryview
    """The part of the payload that is in memory. It is writable, and valid until the next work is packed."""
    start: int = 0
    """The offset of that part in the payload, in bytes."""

    def part(self, start: int, size_bytes: int) -> memoryview | None:
        """Return a range of the payload. None: it is not in memory.

        Args:
            start: the offset of the range in the payload, in bytes.
            size_bytes: the size of the range.
        """
        at = start - self.start
        return self.kept[at : at + size_bytes] if at >= 0 and at + size_bytes <= len(self.kept) else None


@dataclass(frozen=True, slots=True)
class ApplyStats:
    """Measurements from applying a mean. Users read them, and no decision depends on them."""

    mean_norm: float | None = None
    """The norm of the mean. None: there was no mean."""
    wire_error: float | None = None
    """The share of the work that was not sent: the wire has rounded it off, or leaves it to later contributions.

    None: not known, or no work was counted.
    """


class TrainingState(Protocol):
    """The anchor, the state of the outer optimizer and the live work of one replica, by fragment.

    *Live work* is the distance of the live parameters from the anchor. *Held work* is a copy of it, made for sending.
    """

    carries: bool
    """True if work that came too late for its round is sent with the next contribution. False: it is dropped."""
    wire: Wire
    """The encoding of contributions."""
    mean_wire: Wire
    """The encoding of means."""
    clips: bool
    """True if a mean scales down contributions that are much larger than the others."""
    keeps_later_work: bool
    """True if steps that were made after the work was held stay in the live parameters when the held work is counted.
    """

    def sizes(self) -> Sequence[int]:
        """Return the number of elements of each fragment."""

    def agreement(self) -> Agreement:
        """Return the agreement of this replica. It must fit the agreement of the run."""

    def arrays(self) -> Arrays:
        """Return the anchor, and the outer state as far as it differs from the initial state."""

    def load(self, arrays: Arrays) -> None:
        """Replace the anchor and the outer state. The live work stays as it is.

        Args:
            arrays: the arrays by name, as `arrays` returned them. Missing outer state becomes the initial state.
        """

    def digest(self, fragment: int) -> str:
        """Return the digest of the anchor and the outer state of a fragment."""

    def snapshot(self) -> tuple[Arrays, tuple[str, ...]]:
        """Return a copy of the arrays, and the digest of each fragment, computed from the memory as it is now.

        Raises:
            TypeError: the state of the outer optimizer has values other than tensors and JSON.
        """

    # -- for the training thread, which owns the live parameters -----------------------------------------------------

    def hold(self, fragment: int, *, is_early: bool) -> None:
        """Hold the live work of a fragment as it is now, until `apply` or `follow` has decided about it.

        Args:
            fragment: the fragment.
            is_early: True if training continues out of phase, so that a copy is needed in any case.

        Raises:
            ContributionError: a parameter has changed its shape.
        """

    def merge(self) -> None:
        """Change the live parameters as the calls of `apply` and `follow` since the last merge require it."""

    # -- for the round runner, which owns the anchor and the held work ------------------------------------------------

    def pack(
        self, entry: int, write: Callable[[memoryview], object] | None = None, keep: tuple[int, int] | None = None
    ) -> PackedWork:
        """Encode the pseudo-gradient of an entry's fragment: the held work, which no mean contains yet.

        Args:
            entry: the entry.
            write: called with each block of the payload, in order. A block is valid only during the call.
            keep: the first byte of the payload that stays in memory, and the byte after the last one. None: all of it.

        Raises:
            ContributionError: the work is not finite, or a parameter has changed its shape.
        """

    def apply(
        self, entry: int, mean: Sequence[memoryview], verdict: Verdict, packed: PackedWork | None, *, partly: bool
    ) -> ApplyStats:
        """Step the anchor by a mean. `merge` then changes the live parameters accordingly.

        If no inner step was made since the work was held, the live parameters may be set at once.

        Args:
            entry: the entry.
            mean: the encoded mean in consecutive ranges of whole blocks. Empty: there is no mean, and the anchor stays.
            verdict: the decision of the entry about the work of this replica.
            packed: the encoded work that was sent. None: no work was sent.
            partly: True if the verdict concerns only the held work, so that later work stays.
        """

    def replay(self, entry: int, mean: Sequence[memoryview]) -> object:
        """Step the anchor by a mean, and do not change the live parameters. An empty mean changes nothing.

        Args:
            entry: the entry.
            mean: the encoded mean in consecutive ranges of whole blocks.
        """

    def prepare_merge(self) -> None:
        """Copy the values for `merge` to the device of the live parameters. Call it when these values are complete."""

    def anchors_now(self) -> Any:
        """Return a copy of the anchors, as the method `follow` takes it."""

    def follow(self, anchors: Any, verdicts: Sequence[Verdict | None], *, partly: int | None) -> None:
        """Move the live work and the held work from earlier anchors to the current ones, after a state was loaded.

        Args:
            anchors: the earlier anchors, as `anchors_now` returned them.
            verdicts: the decision of the passed entries about each fragment's work. None: no entry was passed. Work
                that was held for a passed entry is no longer held.
            partly: the fragment whose verdict concerns only the held work. None: no fragment.
        """

    # -- while only one of the two threads works ----------------------------------------------------------------------

    def progress(self) -> Any:
        """Return a copy of all live work: the distances of the live parameters from the anchor."""

    def resume(self, progress: Any, verdicts: Sequence[Verdict | None] = ()) -> None:
        """Set the live parameters to the anchor minus the live work of an earlier attempt.

        Args:
            progress: the live work, as `progress` returned it. None: there is none.
            verdicts: the decision about each fragment's work since then. Only work with the verdict KEPT is used.
        """


ARGUMENTS = (
    *("round_seconds", "inner_steps", "total_steps", "total_rounds", "fragments", "wire", "mean_wire", "robust"),
    *("outer_optimizer", "outer_lr", "outer_momentum", "momentum_warmup", "final_average", "snapshot_every"),
)
"""The arguments of `DiLoCo` that all replicas share, in the order in which an error names them."""
OUTER = ("outer_lr", "outer_momentum")
"""The outer settings. If the user gives neither of them, both follow from the length of the plan."""
TOTALS = ("total_steps", "total_rounds")
NOT_SETTINGS = ("tensors", "frozen", "given", "unshared")
MAX_SHOWN = 60
FEW = 0.02
"""Numbers of steps that differ by less than this share probably come from shards of different lengths."""


def check_agreement(mine: Agreement, agreed: Agreement, *, run_id: str, author: int, rank: int) -> None:
    """Refuse to join a run with another model or other settings.

    Replicas must have the same settings, but not the same arguments. The error names the arguments that differ. It
    names a derived setting only if no argument differs.

    Args:
        mine: the agreement of this replica.
        agreed: the agreement of the run.
        run_id: the id of the run.
        author: the rank that began the run.
        rank: the rank of this replica.

    Raises:
        ContributionError: names the first tensor that differs, or all arguments that differ, with both values.
    """
    prefix = f"Rank {rank} does not fit run {run_id!r}"
    if difference := _tensor_difference(mine["tensors"], agreed.get("tensors", {})):
        raise ContributionError(f"{prefix}, begun by rank {author}: {difference}.")
    names = [name for name in {**agreed, **mine} if name not in NOT_SETTINGS and mine.get(name) != agreed.get(name)]
    if names:
        raise ContributionError(f"{prefix}: {_settings_difference(names, mine, agreed, author, rank)}")


def _settings_difference(derived: list[str], mine: Agreement, agreed: Agreement, author: int, rank: int) -> str:
    """Return a text about settings that differ, and about the remedy.

    Args:
        derived: the names of the settings that differ.
    """
    # a trainer subtracts the step at which it began from its total, so the numbers of steps also differ
    if "begun_at" in derived:
        there, here = (agreement.get("begun_at", 0) for agreement in (agreed, mine))
        return (
            f"the trainer of rank {author} began at step {_shown(there)}, and the trainer of rank {rank} at step "
            f"{_shown(here)}. Let all replicas begin from the same checkpoint, or none of them."
        )
    ours, theirs = ({**agreement, **agreement.get("given", {})} for agreement in (mine, agreed))
    if not all(name in one and one[name] is None for one in (ours, theirs) for name in OUTER):
        # If one replica was given outer settings, the error shows the numbers of both replicas. If none was, the
        # numbers differ only because the plans differ, and the error names the plans alone.
        for shown, of in ((ours, mine), (theirs, agreed)):
            shown.update({name: of.get(name) for name in OUTER})
    # An argument that differs but changed no setting is not the reason. One replica may only have written out the
    # default.
    reasons = {*derived, *(["total_steps"] if {"last_entry", "inner_steps"} & {*derived} else [])}
    names = [name for name in ARGUMENTS if name in reasons and ours.get(name) != theirs.get(name)]
    if "total_steps" in names and "snapshot_every" in names:
        names.remove("snapshot_every")  # a trainer derives this argument from the total, so the user did not give it
    if not names:
        names, ours, theirs = derived, {**mine}, {**agreed}
    now = f"rank {rank} has" if rank != author else "it now has"  # the replica was resumed with other arguments
    difference = f"rank {author} began it with {_values(names, theirs)}, and {now} {_values(names, ours)}."
    if rank != author and names == ["total_steps"] and _are_close(ours.get("total_steps"), theirs.get("total_steps")):
        return (
            f"{difference} If total_steps comes from the length of a loader, use shard(dataset, equal=True), which "
            "gives all ranks the same number of items."
        )
    advice = "A run keeps the arguments that it began with: give them to all replicas."
    longer = next((name for name in TOTALS if name in names and _is_more(ours.get(name), theirs.get(name))), None)
    # a replica that was resumed with a larger total needs an extension of the run
    if rank == author and longer is not None:
        option = f"--{longer.replace('_', '-')}"
        advice = (
            f"Give {longer}={_shown(theirs.get(longer))} again. To train further, extend the run: replicas resume RUN "
            f"{option} {_shown(ours.get(longer))}"
        )
    return f"{difference} {advice}"


def _is_more(ours: Any, theirs: Any) -> bool:
    return type(ours) is int and type(theirs) is int and ours > theirs


def _values(names: list[str], values: Mapping[str, Any]) -> str:
    """Return a text such as `inner_steps=10 and total_steps=400`. A value of None is left out, unless all are None."""
    named = [name for name in names if values.get(name) is not None] or names
    return " and ".join(f"{name}={_shown(values.get(name))}" for name in named)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def _are_close(ours: Any, theirs: Any) -> bool:
    """Return True if two numbers of steps may come from loaders whose shards differ by one item.

    If one loader has one batch more per epoch, the two numbers differ by the number of epochs, E. Both numbers are
    multiples of E then.
    """
    if type(ours) is not int or type(theirs) is not int or ours == theirs:
        return False
    apart, most = abs(ours - theirs), max(ours, theirs)
    return apart <= FEW * most or most % apart == 0


def _tensor_difference(mine: Mapping[str, Any], agreed: Mapping[str, Any]) -> str | None:
    for name, (shape, dtype, fragment) in agreed.items():
        if name not in mine:
            return f"{name!r} of shape {tuple(shape)} is missing in this model"
        my_shape, my_dtype, my_fragment = mine[name]
        if list(shape) != list(my_shape):
            return shape_difference(name, tuple(shape), tuple(my_shape))
        if dtype != my_dtype:
            return f"{name!r} is {dtype}, this model has {my_dtype}"
        if fragment != my_fragment:
            return f"{name!r} belongs to fragment {fragment} there and to {my_fragment} here"
    for name in mine:
        if name not in agreed:
            return f"{name!r} of shape {tuple(mine[name][0])} is only in this model"
    return None if list(mine) == list(agreed) else "the parameters come in another order"


def differing_frozen(mine: Agreement, agreed: Agreement) -> list[str]:
    """Return the names of frozen parameters whose values differ from the values in the replica that began the run.

    Replicas with different frozen parameters train different models, because frozen parameters are never sent.

    Args:
        mine: the agreement of this replica.
        agreed: the agreement of the run.
    """
    here = mine.get("frozen", {})
    return [
        name
        for name, mark in agreed.get("frozen", {}).items()
        if name in here and not isclose(here[name], mark, rel_tol=FROZEN_TOLERANCE)
    ]


def shape_difference(name: str, theirs: tuple[int, ...], mine: tuple[int, ...]) -> str:
    """Return the part of a message that names two different shapes of one tensor."""
    return f"{name!r} has shape {theirs}, this model has {mine}"
