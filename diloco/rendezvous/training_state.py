"""The interface between the protocol and the model: what a rendezvous moves, and what all replicas must agree on.

The rendezvous decides, the training state computes. `diloco.model_state.ModelState` is the real one, over torch; the
simulation in the tests has one of a few integers.
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
"""JSON. `tensors` maps each averaged name to [shape, dtype, fragment], and `frozen` each other name to a fingerprint of
its values. `unshared` names the other entries of a model's `state_dict`. The rest are settings."""
FROZEN_TOLERANCE = 1e-3
"""Relative. Machines compute tables and round weights a little differently; other seeds differ by more."""


class Verdict(StrEnum):
    """What became of the local work of a fragment in an entry."""

    COUNTED = "counted"
    """The seal names this process: what it sent, if anything, is in the mean."""
    KEPT = "kept"
    """The seal does not name this rank: its work goes with its next contribution."""
    DROPPED = "dropped"
    """The seal names another copy of this rank: counting this one's work too would count it twice."""


@dataclass(frozen=True, slots=True)
class PackedWork:
    """A payload as it is sent, or as it was: encoded."""

    blocks: tuple[str, ...]
    norms: tuple[float, ...]
    kept: memoryview
    """The part of it that is still in memory, writable, until the next one is packed."""
    start: int = 0
    """Where in the payload that part begins, in bytes."""

    def part(self, start: int, size_bytes: int) -> memoryview | None:
        """Return a range of the payload, or None where it was not kept."""
        at = start - self.start
        return self.kept[at : at + size_bytes] if at >= 0 and at + size_bytes <= len(self.kept) else None


@dataclass(frozen=True, slots=True)
class ApplyStats:
    """What was found out on the way when a mean was applied; for people."""

    mean_norm: float | None = None
    """Of the mean; None: there was none."""
    wire_error: float | None = None
    """The share of what was held that the wire lost; None: not known, or nothing was counted."""


class TrainingState(Protocol):
    """The anchor, the outer optimizer's state and the live work of one replica, by fragment."""

    carries: bool
    """Whether work that came too late for its round goes with the next one."""
    wire: Wire
    """How contributions travel."""
    mean_wire: Wire
    keeps_later_work: bool
    """Whether what was done while counted work travelled is kept."""

    def sizes(self) -> Sequence[int]:
        """Return the number of elements of each fragment."""

    def agreement(self) -> Agreement:
        """Return what every replica must have in common."""

    def arrays(self) -> Arrays:
        """Return the anchor and whatever outer state differs from the initial one."""

    def load(self, arrays: Arrays) -> None:
        """Replace anchor and outer state (by the initial one where `arrays` has none). Leaves live work alone."""

    def digest(self, fragment: int) -> str:
        """Digest anchor and outer state of a fragment."""

    def snapshot(self) -> tuple[Arrays, tuple[str, ...]]:
        """Return a copy of what `arrays` returns, and the digest of each fragment, made from memory as it is now.

        Raises: TypeError: the outer optimizer's state is more than tensors and JSON.
        """

    # -- the training's side: it owns the live parameters ------------------------------------------------------------

    def hold(self, fragment: int, *, is_early: bool) -> None:
        """Hold the live work of a fragment as it is now, until that is settled.

        Args:
            is_early: training goes on in any case.

        Raises: ContributionError: a parameter has changed its shape.
        """

    def merge(self) -> None:
        """Take what `apply` and `follow` have left into the live parameters."""

    # -- the rounds' side: they own the anchor, and what is held ------------------------------------------------------

    def pack(
        self, entry: int, write: Callable[[memoryview], object] | None = None, keep: tuple[int, int] | None = None
    ) -> PackedWork:
        """Encode the pseudo-gradient of the entry's fragment, anchor - held: work that is not yet in any mean.

        Args:
            write: is handed the payload block by block; a block is valid during the call only.
            keep: first byte, and the one after the last, of what is to stay in memory; None: all of it.

        Raises: ContributionError: it is not finite, or a parameter has changed its shape.
        """

    def apply(
        self, entry: int, mean: Sequence[memoryview], verdict: Verdict, packed: PackedWork | None, *, partly: bool
    ) -> ApplyStats:
        """Step the anchor by a mean, and leave what that means for the live parameters to `merge`.

        Where no step was made since, they may be set at once.

        Args:
            mean: encoded, in consecutive ranges of whole blocks; empty: there is none, and the anchor stays.
            packed: what was sent of what is held.
            partly: the verdict is about what is held alone, and what was done since stays.
        """

    def replay(self, entry: int, mean: Sequence[memoryview]) -> object:
        """Step the anchor by a mean, unless that is empty, and leave the live parameters alone."""

    def prepare_merge(self) -> None:
        """Bring the values that `merge` takes to the device of the live parameters. Called when they are complete."""

    def anchors_now(self) -> Any:
        """Return a copy of the anchors."""

    def follow(self, anchors: Any, verdicts: Sequence[Verdict | None], *, partly: int | None) -> None:
        """Let live work, and what is held, follow the anchors from those to what they are now.

        Args:
            verdicts: by fragment, what became of that work in entries which the anchor has jumped over; None: there
                were none. What was held for one is held no longer.
            partly: the fragment of which that is about what is held alone.
        """

    # -- while nothing goes on beside the other ----------------------------------------------------------------------

    def progress(self) -> Any:
        """Return a copy of all live work, as distances from the anchor."""

    def resume(self, progress: Any, verdicts: Sequence[Verdict | None] = ()) -> None:
        """Set the live parameters to the anchor less `progress`, as far as verdicts leave it; None: to the anchor."""


ARGUMENTS = (
    *("round_seconds", "inner_steps", "total_steps", "total_rounds", "fragments", "wire", "mean_wire"),
    *("outer_optimizer", "outer_lr", "outer_momentum", "momentum_warmup", "final_average", "snapshot_every"),
)
"""Those of `DiLoCo` that all replicas share, in the order in which an error names them."""
OUTER = ("outer_lr", "outer_momentum")
"""If a replica was given neither, both follow from the length of its plan."""
TOTALS = ("total_steps", "total_rounds")
NOT_SETTINGS = ("tensors", "frozen", "given", "unshared")
MAX_SHOWN = 60
FEW = 0.02
"""Numbers of steps that differ by so small a part are probably made of the lengths of shares."""


def check_agreement(mine: Agreement, agreed: Agreement, *, run_id: str, author: int, rank: int) -> None:
    """Refuse to join a run with another model or other settings.

    Settings decide, and arguments explain: the error names the arguments that differ. It names a derived setting only
    if no argument differs. Arguments may differ if they lead to the same settings.

    Args:
        mine: the agreement of this replica.
        agreed: the agreement of the run.
        run_id: the id of the run.
        author: the rank that began the run.
        rank: the rank of this replica.

    Raises:
        ContributionError: names the first tensor that differs, or all arguments that do, with both values.
    """
    who = f"Rank {rank} does not fit run {run_id!r}"
    if difference := _tensor_difference(mine["tensors"], agreed.get("tensors", {})):
        raise ContributionError(f"{who}, begun by rank {author}: {difference}.")
    names = [name for name in {**agreed, **mine} if name not in NOT_SETTINGS and mine.get(name) != agreed.get(name)]
    if names:
        raise ContributionError(f"{who}: {_settings_difference(names, mine, agreed, author, rank)}")


def _settings_difference(derived: list[str], mine: Agreement, agreed: Agreement, author: int, rank: int) -> str:
    """Describe how settings differ, and what to do.

    Args:
        derived: the names of the settings that differ.
    """
    if "begun_at" in derived:  # a trainer subtracts it from its total, so the numbers of steps differ, too
        there, here = (agreement.get("begun_at", 0) for agreement in (agreed, mine))
        return (
            f"the trainer of rank {author} began at step {_shown(there)}, and that of rank {rank} at step "
            f"{_shown(here)}. Let all replicas begin from the same checkpoint, or none of them."
        )
    ours, theirs = ({**agreement, **agreement.get("given", {})} for agreement in (mine, agreed))
    if not all(name in one and one[name] is None for one in (ours, theirs) for name in OUTER):
        # One replica was given outer settings, so the error shows the numbers of both. If none was given any, they
        # differ because the plans differ, and the error names the plans alone.
        for shown, of in ((ours, mine), (theirs, agreed)):
            shown.update({name: of.get(name) for name in OUTER})
    # An argument that differs and changed no setting is not the reason: it may be the default, written out.
    reasons = {*derived, *(["total_steps"] if {"last_entry", "inner_steps"} & {*derived} else [])}
    names = [name for name in ARGUMENTS if name in reasons and ours.get(name) != theirs.get(name)]
    if "total_steps" in names and "snapshot_every" in names:
        names.remove("snapshot_every")  # a trainer derives it from the total, and the user did not give it
    if not names:
        names, ours, theirs = derived, {**mine}, {**agreed}
    now = f"rank {rank} has" if rank != author else "it now has"  # after a resume
    difference = f"rank {author} began it with {_values(names, theirs)}, and {now} {_values(names, ours)}."
    if rank != author and names == ["total_steps"] and _are_close(ours.get("total_steps"), theirs.get("total_steps")):
        return (
            f"{difference} Where total_steps comes from the length of a loader, use shard(dataset, equal=True): "
            "other shares may differ by one item."
        )
    advice = "A run keeps the arguments that it began with: give them to all replicas."
    longer = next((name for name in TOTALS if name in names and _is_more(ours.get(name), theirs.get(name))), None)
    if rank == author and longer is not None:  # a resumed replica with a larger total must train on
        option = f"--{longer.replace('_', '-')}"
        advice = (
            f"Give {longer}={_shown(theirs.get(longer))} again. To train further, extend the run: replicas resume RUN "
            f"{option} {_shown(ours.get(longer))}"
        )
    return f"{difference} {advice}"


def _is_more(ours: Any, theirs: Any) -> bool:
    return type(ours) is int and type(theirs) is int and ours > theirs


def _values(names: list[str], values: Mapping[str, Any]) -> str:
    """Return `inner_steps=10 and total_steps=400`, without those that are None, unless all are."""
    named = [name for name in names if values.get(name) is not None] or names
    return " and ".join(f"{name}={_shown(values.get(name))}" for name in named)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def _are_close(ours: Any, theirs: Any) -> bool:
    """Return whether two numbers of steps may be epochs of loaders whose shares differ by one item.

    So many epochs of one batch more or less differ by the number of epochs, which both are multiples of.
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


def unlike_frozen(mine: Agreement, agreed: Agreement) -> list[str]:
    """Return the names of frozen parameters that have other values here: each replica trains a model of its own."""
    here = mine.get("frozen", {})
    return [
        name
        for name, mark in agreed.get("frozen", {}).items()
        if name in here and not isclose(here[name], mark, rel_tol=FROZEN_TOLERANCE)
    ]


def shape_difference(name: str, theirs: tuple[int, ...], mine: tuple[int, ...]) -> str:
    return f"{name!r} has shape {theirs}, this model has {mine}"
