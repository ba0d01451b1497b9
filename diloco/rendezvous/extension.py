"""Extends a run beyond its planned end: checks the order before it is written, and lets each replica follow the
order.

An extension is an entry in the decision log of the run, so it reaches every attempt on every machine. The script still
passes its first total to DiLoCo. Up to that total all replicas agree on every entry, whether they know of the extension
or not (`RoundPlan`). So a replica may learn of it at any time before it leaves.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from diloco.errors import DiLoCoError
from diloco.rendezvous.envelope import BadRecordError, proof_of
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.phase import RoundPlan
from diloco.rendezvous.retrying_store import RetryingStore
from diloco.rendezvous.stored_log import StoredAgreement, StoredRoundLog
from executors.errors import CorruptObjectError, StoreError
from executors.patience import BRIEF
from executors.store import Store

log = logging.getLogger(__name__)
UNITS = {"total_steps": "--total-steps", "total_rounds": "--total-rounds"}


class ExtensionOrders(Protocol):
    """The interface from which a replica reads the orders to extend its run."""

    def extensions(self) -> Mapping[str, Sequence[int]]:
        """Return the totals that were ordered, oldest first, as lists under `total_steps` and `total_rounds`."""


class Extension:
    """Reads the orders to extend a run, and changes the plan of one DiLoCo accordingly.

    Args:
        orders: the replica of this process. None: this process is not a replica of the run, and gets no orders.
        plan: the plan of the DiLoCo, which is changed.
        unit: the name of the argument with the total: `total_steps` or `total_rounds`.
        per_total: the number of steps of the plan for each unit of that total.
        is_trainers: True while a trainer runs the loop, which ends after its own number of steps. An order then has no
            effect.

    Example:
        Extension(replica, plan, unit="total_steps", per_total=1).look(lambda: 400)
    """

    def __init__(
        self, orders: ExtensionOrders | None, plan: RoundPlan, *, unit: str, per_total: int, is_trainers: bool = False
    ) -> None:
        self._orders = orders
        self._plan = plan
        self._unit = unit
        self._per_total = per_total
        self.is_trainers = is_trainers
        self._told: set[str] = set()
        """The warnings that were given already."""
        self.refused = ""
        """The reason why the newest order has no effect in this replica.

        Empty: the newest order has an effect, or there is no order.
        """

    @property
    def total(self) -> int | None:
        """The total to which the run was extended. None: it was not extended."""
        total = self._plan.total_steps
        return None if not self._plan.earlier or total is None else total // self._per_total

    def look(self, find_total: Callable[[], int | None]) -> bool:
        """Read the orders, and return True if the plan has become longer. In that case, a line on stderr names the new
        total.

        An order that has no effect in this replica causes a warning, which becomes an event of the run.

        Args:
            find_total: returns the total with which the run began, or None if this replica begins the run. Replicas
                with slightly different totals can have the same rounds. So all of them must extend the same total.
        """
        if self._orders is None:
            return False
        try:
            ordered = self._orders.extensions()
        # the replica may continue, because an extension does not change the rounds before the earlier end
        except StoreError as error:
            warnings.warn(f"The extensions of this run cannot be read: {error}", stacklevel=4)
            return False
        totals = ordered.get(self._unit, ())
        self.refused = self._why_not(ordered)
        if self.refused or not totals:
            if self.refused and self.refused not in self._told:
                self._told.add(self.refused)
                log.warning("%s", self.refused)
            return False
        before = self._plan.total_steps
        if not self._plan.earlier and (first := find_total()) is not None:
            self._plan.total_steps = first * self._per_total
        has_grown = [self._plan.extend(total * self._per_total) for total in totals]
        if any(has_grown):
            what = "steps" if self._unit == "total_steps" else "rounds"
            planned = 0 if before is None else before // self._per_total
            print(f"replicas: this run was extended from {planned} to {totals[-1]} {what}.", file=sys.stderr)
        return any(has_grown)

    def _why_not(self, ordered: Mapping[str, Sequence[int]]) -> str:
        """Return the reason why orders have no effect in this replica. Empty: they have an effect, or there are no
        orders.

        Args:
            ordered: the ordered totals.
        """
        others = [(name, totals[-1]) for name, totals in ordered.items() if totals and name != self._unit]
        mine = ordered.get(self._unit, ())
        if not mine and not others:
            return ""
        if self.is_trainers and (not mine or mine[-1] != self.total):
            return (
                "This run was extended, and its trainer has planned its own number of steps. A Trainer of transformers "
                "follows when it starts again with replica_arguments(…): replicas resume RUN --total-steps N. Or "
                "launch a new run from this one: replicas launch … --from RUN"
            )
        if not mine:
            name, total = others[0]
            return (
                f"This run was extended by {UNITS[name]} {total}, and this DiLoCo counts {self._unit}. "
                f"Resume the run with {UNITS[self._unit]} N."
            )
        if self._plan.total_steps is None:
            return f"This run was extended, and this DiLoCo has no {self._unit}: the script itself ends the training."
        return ""

    def check_what_was_trained(self, steps: int, at: int, *, is_over: bool) -> None:
        """Check that the training loop has followed an extension.

        Args:
            steps: the number of inner steps that this process has made.
            at: the step of the run, or its round if rounds go by the clock.
            is_over: True if the run has had its last planned round.

        Raises:
            DiLoCoError: the run was extended, and this attempt has not made a single step.
        """
        if is_over and not self.refused:
            return
        total = self.total
        if not self.refused and total is None:
            return
        why = self.refused or (
            f"This run was extended to {self._unit}={total}, and the training loop has ended at {at}. End the loop "
            "with `for step in diloco.steps()`, or when diloco.is_over is True."
        )
        if not steps:
            raise DiLoCoError(f"{why} Nothing was trained.")
        if not self.refused:
            warnings.warn(why, stacklevel=5)


def check_extension(store: Store, run_id: str, key: bytes | None, asked: Mapping[str, int]) -> None:
    """Check that a run can be extended to a new total, before the order is written.

        check_extension(store, "first-try", None, {"total_steps": 800})

    Args:
        store: the store of the run.
        run_id: the id of the run.
        key: the key of a signed run. None: the run is not signed.
        asked: the new total, under `total_steps` or `total_rounds`.

    Raises:
        ValueError: no DiLoCo of the run would continue. The message has the reason.
    """
    proof = proof_of(key)
    patient = RetryingStore(store, clock=lambda: 0.0, tolerance=BRIEF, copies=proof.copies)
    prefix = f"{run_id}/diloco/"
    names = {entry.key.removeprefix(prefix).partition("/")[0] for entry in store.list(prefix)}
    found: dict[str, StoredAgreement] = {}
    ended_by: dict[str, tuple[int, ...]] = {}
    for name in sorted(names):
        log = StoredRoundLog(patient, Keys(run_id, name), proof)
        try:
            if log.start is not None:
                found[name] = log.agreed
                ended_by[name] = log.plan().ended_by
        # this process may not have the run's key, so the replicas must decide
        except (BadRecordError, CorruptObjectError):
            return
    if not found:
        raise ValueError(f"Run {run_id!r} has nothing to extend: its replicas have not begun, or train without DiLoCo.")
    if all(ended_by.values()):
        rank = next(iter(ended_by.values()))[0]
        raise ValueError(
            f"Run {run_id!r} cannot be extended: rank {rank} stopped it with DiLoCo.stop(). Launch a new run from its "
            f"model: replicas launch … --from {run_id}"
        )
    problems = [problem for name, agreed in found.items() if (problem := _problem(run_id, agreed, asked))]
    if len(problems) == len(found):
        raise ValueError(problems[0])


def _problem(run_id: str, agreed: StoredAgreement, asked: Mapping[str, int]) -> str:
    """Return the reason why a DiLoCo would not continue to a new total. Empty: it would continue."""
    by_clock = agreed.inner_steps is None
    unit = "total_rounds" if by_clock else "total_steps"
    option, other = UNITS[unit], next(iter(asked))
    if unit not in asked:
        how = "by the clock" if by_clock else "by steps"
        return f"Run {run_id!r} has rounds {how}: use {option} instead of {UNITS[other]}."
    if agreed.total_steps is None:
        return (
            f"Run {run_id!r} has no {unit}, because the script did not give it to DiLoCo and ends the training itself. "
            f"Resume the run without {option}."
        )
    if asked[unit] <= agreed.total_steps:
        began = f"Run {run_id!r} was begun with {unit}={agreed.total_steps}"
        return f"{began}, and {option} must be more: got {asked[unit]}."
    return ""


def total_of_start(store: RetryingStore, keys: Keys, key: bytes | None) -> int | None:
    """Return the total with which a run began, in its own unit. None: the run has not begun, or has no total.

    Args:
        store: the store of the run.
        keys: the keys of the DiLoCo.
        key: the key of a signed run. None: the run is not signed.
    """
    log = StoredRoundLog(store, keys, proof_of(key))
    try:
        return None if log.start is None else log.agreed.total_steps
    except CorruptObjectError:  # a damaged agreement does not forbid the extension
        return None


def check_source(
    store: Store,
    run_id: str,
    key: bytes | None,
    step: int | None = None,
    extensions: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Check that a run has a model from which a new run can begin, before the new run is launched.

        check_source(store, "first-try", None)

    Args:
        store: the store of the existing run.
        run_id: the id of the existing run.
        key: the key of a signed run. None: the run is not signed.
        step: the step of the existing run at which the model is wanted. None: the newest model.
        extensions: the totals to which the existing run was extended. None: it was not extended.

    Raises:
        ValueError: no DiLoCo of that run has begun, or its state of that step was deleted.
        CorruptObjectError: the beginning of its log is damaged, or was signed with another key.
    """
    proof = proof_of(key)
    patient = RetryingStore(store, clock=lambda: 0.0, tolerance=BRIEF, copies=proof.copies)
    prefix = f"{run_id}/diloco/"
    names = {entry.key.removeprefix(prefix).partition("/")[0] for entry in store.list(prefix)}
    logs = [
        log for name in sorted(names) if (log := StoredRoundLog(patient, Keys(run_id, name), proof)).start is not None
    ]
    if not logs:
        raise ValueError(
            f"Run {run_id!r} has no model to start from: its replicas have not begun, or train without DiLoCo."
        )
    if step is None:
        return
    if all(log.agreed.inner_steps is None for log in logs):
        raise ValueError(
            f"Run {run_id!r} has rounds by the clock, so step {step} does not name a round. Remove the step."
        )
    firsts = [(log, min(filter(log.has_parts, log.snapshots()), default=None)) for log in logs]
    plans = [(log.plan(extensions), first) for log, first in firsts if first is not None]
    if all(plan.position_at(step) < first for plan, first in plans):
        first_step = min((plan.step_before(first) for plan, first in plans), default=None)
        left = "" if first_step is None else f" The earliest state is of step {first_step}."
        raise ValueError(f"Run {run_id!r} no longer has the state of step {step}.{left}")
