"""Connects a trainer's callback with its DiLoCo: totals of steps, schedules that follow the run, and early stopping.

The callback for transformers and the callback for Lightning both use it.
"""

from __future__ import annotations

import inspect
import logging
import math
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from time import monotonic, sleep
from typing import Any

import torch
from torch import nn

from diloco.errors import ContributionError
from diloco.lr_schedules import counts_steps, steps_counted, unwrapped
from diloco.outer import DiLoCo, open_diloco
from diloco.rendezvous.envelope import BadRecordError, proof_of, reading, typed
from diloco.rendezvous.extension import total_of_start
from diloco.rendezvous.frames import READ_TRIES
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.retrying_store import RetryingStore, backoff
from diloco.rendezvous.round import Limits, RoundReport
from diloco.rendezvous.run_location import RunLocation, find_location
from diloco.rendezvous.snapshot import SnapshotPointer
from diloco.tensor_names import by_clean_name
from executors.errors import StoreError
from executors.patience import ROUND
from executors.patience import waits as waits_of_process
from executors.replica import current_replica, find_replica

log = logging.getLogger(__name__)

ROUNDS_PER_SNAPSHOT, MOST_ROUNDS = 20, 10
"""A snapshot is made after 1/20 of the planned rounds, and at least after every 10 rounds."""


class TrainerLink:
    """The DiLoCo of one training, and the trainer's settings that depend on it.

    Args:
        model: the trainer's model.
        total_steps: the steps that the trainer plans. None: no end is planned.
        options: the arguments of DiLoCo.
        begun_at: the trainer's step at which the run begins. A replica that was started again or added reads it from
            the run. An added replica waits until the run has begun.
        may_grow: True: the trainer can follow an extension that is ordered while it trains.

    Example:
        link = TrainerLink(module, 4000, {"inner_steps": 100})
    """

    def __init__(
        self,
        model: nn.Module,
        total_steps: int | None,
        options: Mapping[str, Any],
        *,
        begun_at: int = 0,
        may_grow: bool = False,
    ) -> None:
        self.model = model
        place = location_of(options)
        is_added = place.rank is None or place.rank >= place.world_size
        known = step_of_begin(place, options, waits=is_added) if is_added or current_replica().attempt else None
        self.begun_at = begun_at if known is None else known
        self._of_trainer = begun_at
        planned = None if total_steps is None else total_steps - self.begun_at
        self._planned = planned
        """The trainer's planned steps when it began, counted from the beginning of the run."""
        total, follows = first_total(planned, place, options)
        self.last: RoundReport | None = None
        """The newest round."""
        self._has_asked = False
        self._held: list[tuple[Any, type[Any]]] = []
        """Schedules that follow the run, and their classes before `attach_schedule`."""
        try:
            self.diloco = open_diloco(
                model,
                total_steps=total,
                **{"snapshot_every": self._snapshot_every(total, options), **options},
                begun_at=self.begun_at,
                is_trainers=not (follows or may_grow),
            )
            # The total already contains earlier extensions. A later extension needs `may_grow`.
            self.diloco._extension.is_trainers = not may_grow
            self.diloco._loop.is_trainers = True
            # the callback sets the trainer's count of steps to the run's step, so the loop follows the run
            self.diloco._loop.trust()
        except ContributionError as error:
            # an error must not blame the user for this argument, because the trainer gave it
            if "total_steps=" in str(error):
                error.add_note(
                    f"This trainer plans total_steps={total_steps}, from step {self.begun_at}. Give all replicas the "
                    "same max_steps, or data of the same length: shard(dataset, equal=True)."
                )
            raise

    @property
    def total_steps(self) -> int | None:
        """The run's planned steps, from its own beginning on. None: no end is planned."""
        total = self.diloco._settings.plan.total_steps
        return None if total is None else int(total)

    @property
    def has_grown(self) -> bool:
        """True if the run has become longer than the trainer knew when it began."""
        total = self.total_steps
        return total is not None and self._planned is not None and total > self._planned

    def _snapshot_every(self, total_steps: int | None, options: Mapping[str, Any]) -> int:
        """Return the rounds between snapshots. A short run saves attached state more often.

        Otherwise a replica of a short run that is killed early would lose its optimizer.
        """
        if total_steps is None:
            return MOST_ROUNDS
        rounds: int = total_steps // max(1, options["inner_steps"])
        return max(1, min(MOST_ROUNDS, rounds // ROUNDS_PER_SNAPSHOT))

    def attach_schedule(self, name: str, schedule: Any) -> None:
        """Attach a schedule that the trainer steps once per step, and keep it at the run's step.

        The schedule may be behind the run, or ahead of it. It is ahead if the replica was asked to leave and starts
        again, because the run is then at its last round.

        Args:
            name: the name of the schedule.
            schedule: the schedule. If it does not count steps, it is attached and does not follow.
        """
        schedule = unwrapped(schedule)
        if not counts_steps(schedule):
            self.diloco.attach_state(name, schedule)
            return
        lead = max(0, steps_counted(schedule) - self._of_trainer)
        self.diloco._attach_state(name, schedule, follow=True, lead=lead)
        kind: Any = type(schedule)

        def step(schedule: Any, *args: Any) -> None:
            if steps_counted(schedule) < self.diloco._attached.count_of(name, self.diloco.inner_step):
                kind.step(schedule, *args)

        # Use a subclass, because an attribute of the schedule would become a part of its saved state.
        schedule.__class__ = type(kind.__name__, (kind,), {"step": step})
        self._held.append((schedule, kind))

    def step(self) -> None:
        """Count a step. Call this after the optimizer and all schedules have made their steps."""
        if not self.is_over:  # a trainer makes one more step after the end of the run before it stops
            self.last = self.diloco.step() or self.last

    @property
    def trainer_step(self) -> int:
        """The step that the trainer must show: the run's step, which grows while this replica is away."""
        return self.begun_at + self.capped(self.diloco.inner_step)

    def capped(self, step: int) -> int:
        """Return a step, or the last planned step if that is smaller.

        Args:
            step: a step of the run.
        """
        return step if self.total_steps is None else min(step, self.total_steps)

    @property
    def is_over(self) -> bool:
        """True if the run has ended, as planned or because a replica stopped it."""
        return self.diloco.is_over

    def stop(self) -> bool:
        """Ask all replicas to end at one of the next rounds, because this trainer wants to stop early.

        A replica that ended by itself would keep a model that no other replica has, and the others would train on
        without it.

        Returns:
            True if this trainer must continue until `is_over`. False if it may end now.
        """
        if self.is_over:
            return False
        if not self._has_asked:
            self._has_asked = True
            self.diloco.stop()
        return not self.is_over

    @torch.no_grad()
    def finish(self, *, is_asked_for: bool, keep_model: bool = False) -> None:
        """Set the model to the anchor, which all replicas have in common, and leave the run.

        Args:
            is_asked_for: True: the training was stopped on purpose. False: log a warning if the training has not
                reached its planned end.
            keep_model: True: keep the model's values, because the trainer has loaded its best model.
        """
        for schedule, kind in self._held:
            schedule.__class__ = kind
        buffers = by_clean_name(self.model, self.model.named_buffers())  # the names in the anchor are also clean names
        live: dict[str, torch.Tensor] = {**by_clean_name(self.model, self.model.named_parameters()), **buffers}
        best: dict[str, torch.Tensor] = {}
        if keep_model:
            # The anchor itself is only in the first process of a replica.
            averaged = getattr(self.diloco, "names_of_anchor", self.diloco.anchor)()
            merged = {*averaged, *buffers}  # also parameters that were frozen during training
            best = {name: live[name].clone() for name in merged}
        is_leader = current_replica().member == 0
        if is_leader and not is_asked_for and not self.is_over and self.total_steps is not None:
            log.warning(
                "The trainer ended by itself at step %s of %s planned steps. If it began with a checkpoint that is "
                "ahead of the run, start it without it.", self.trainer_step, self.begun_at + self.total_steps,
            )  # fmt: skip
        self.diloco.close()  # this call sets the model to the anchor
        for name, values in best.items():
            live[name].copy_(values)


def location_of(options: Mapping[str, Any]) -> RunLocation:
    """Return the run and the rank that the arguments of DiLoCo name.

    Args:
        options: the arguments of DiLoCo.

    Example:
        location_of({"store": "runs", "run_id": "first-try", "rank": 0, "world_size": 2})
    """
    return find_location(*(options.get(name) for name in ("store", "run_id", "rank", "world_size")))


def step_of_begin(place: RunLocation, options: Mapping[str, Any], *, waits: bool) -> int | None:
    """Return the trainer's step at which a run has begun, as all its replicas agreed. None: it cannot be read.

    Args:
        place: the run and the rank.
        options: the arguments of DiLoCo.
        waits: True: wait up to `round_timeout_s` for a run that has not begun, because only its first replicas know the
            step.

    Example:
        step_of_begin(location_of({}), {}, waits=False)
    """
    store = RetryingStore(place.store, clock=monotonic, tolerance=ROUND, waits=waits_of_process)
    keys, proof = Keys(place.run_id, options.get("name", "main")), proof_of(place.key_of_run(options.get("key")))
    key, tries, pauses = keys.snapshot(0), 0, backoff(random.Random())
    until = monotonic() + (options.get("round_timeout_s", Limits().round_timeout_s) if waits else 0.0)
    with current_replica().section("first anchor", math.inf):
        while tries < READ_TRIES:
            data = store.peek(key)
            if data is None and monotonic() < until and not store.exists(keys.abort()):
                sleep(next(pauses))
                continue
            tries += 1
            if data is not None:
                with suppress(BadRecordError), reading("agreement"):
                    return max(0, typed(int, SnapshotPointer.parse(data, key, proof).agreement.get("begun_at", 0)))
    return None


def extended_total(options: Mapping[str, Any]) -> int | None:
    """Return the trainer's step at which this replica's extended run ends. None: the run was not extended.

    A trainer plans its steps before training begins: the length of the schedule, and the number of epochs. So it needs
    the total of an extension before that.

    Args:
        options: the arguments of DiLoCo, as far as they are known.

    Example:
        extended_total({"inner_steps": 100})   # 800, after `replicas resume RUN --total-steps 800`
    """
    place = location_of(options)
    totals = totals_of(place)
    if not totals:
        return None
    return (step_of_begin(place, options, waits=False) or 0) + totals[-1]


def totals_of(place: RunLocation) -> Sequence[int]:
    """Return the totals of steps that the run of this replica was extended to, in their order.

    Args:
        place: the run and the rank.

    Example:
        totals_of(location_of({}))  # (800,)
    """
    replica = find_replica()
    if replica is None or not place.is_of_replica:
        return ()
    try:
        return replica.extensions().get("total_steps", ())
    except StoreError:  # DiLoCo also reads the totals and warns of the error
        return ()


def first_total(planned: int | None, place: RunLocation, options: Mapping[str, Any]) -> tuple[int | None, bool]:
    """Return the first total of the run, even if the trainer plans the larger total of an extension.

    All replicas agree on the first total, and DiLoCo adds the extensions itself.

    Args:
        planned: the trainer's planned steps, counted from the beginning of the run.
        place: the run and the rank.
        options: the arguments of DiLoCo.

    Returns:
        The total for DiLoCo, and True if the trainer follows an extension.

    Example:
        first_total(800, location_of({}), {})  # (400, True)
    """
    totals = totals_of(place)
    if planned is None or not totals or planned != totals[-1]:
        return planned, False
    store = RetryingStore(place.store, clock=monotonic, tolerance=ROUND, waits=waits_of_process)
    keys = Keys(place.run_id, options.get("name", "main"))
    first = total_of_start(store, keys, place.key_of_run(options.get("key")))
    return (planned, False) if first is None else (first, True)


def check_options(inner_steps: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of DiLoCo that a callback was given.

    Args:
        inner_steps: steps from one round to the next.
        options: other arguments of DiLoCo.

    Raises:
        TypeError: DiLoCo has no such argument, or the trainer decides it.

    Example:
        check_options(100, {"wire": "int8"})
    """
    for name in ("round_seconds", "total_rounds", "overlap_seconds"):
        if name in options:
            raise TypeError(
                f"A trainer cannot use {name}={options[name]!r}, because all replicas end after the same number of "
                "steps. Use inner_steps, or write a loop of your own: for step in diloco.steps()."
            )
    inspect.signature(DiLoCo).bind(nn.Module(), inner_steps=inner_steps, total_steps=None, **options)
    return {"inner_steps": inner_steps, **options}
