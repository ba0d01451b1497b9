"""A DiLoCo beside a trainer: what the callbacks of all trainers share."""

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
from diloco.outer import DiLoCo
from diloco.rendezvous.envelope import BadRecordError, proof_of, reading, typed
from diloco.rendezvous.extension import total_of_start
from diloco.rendezvous.frames import READ_TRIES
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.membership import RunLocation, find_location
from diloco.rendezvous.retrying_store import RetryingStore, backoff
from diloco.rendezvous.round import Limits, RoundReport
from diloco.rendezvous.snapshot import SnapshotPointer
from diloco.tensor_names import by_clean_name
from executors.errors import StoreError
from executors.patience import ROUND
from executors.patience import waits as waits_of_process
from executors.replica import current_replica, find_replica

log = logging.getLogger(__name__)

ROUNDS_PER_SNAPSHOT, MOST_ROUNDS = 20, 10


class TrainerLink:
    """Goes with one training from its begin to its end.

    Args:
        model: the trainer's model.
        total_steps: that the trainer plans; None: it has no end.
        options: DiLoCo's arguments.
        begun_at: the trainer's step at which the run begins. Where this replica has come back, or was added, the run
            says it; who was added waits for that.
        may_grow: whether the trainer can follow an extension that is ordered while it trains.

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
        """The trainer's planned steps when it began, from the begin of the run on."""
        total, follows = first_total(planned, place, options)
        self.last: RoundReport | None = None
        """The newest round."""
        self._has_asked = False
        self._held: list[tuple[Any, type[Any]]] = []
        """Schedules that go with the run, and their classes."""
        try:
            self.diloco = DiLoCo(
                model,
                total_steps=total,
                **{"snapshot_every": self._snapshot_every(total, options), **options},
                _begun_at=self.begun_at,
                _is_trainers=not (follows or may_grow),
            )
            self.diloco._extension.is_trainers = not may_grow  # from here on
            self.diloco._loop.is_trainers = True
            self.diloco._loop.trust()  # the callbacks set the trainer's own count of steps
        except ContributionError as error:
            if "total_steps=" in str(error):  # an argument of DiLoCo that this user did not give
                error.add_note(
                    f"total_steps is what this trainer plans: {total_steps} steps, from step {self.begun_at}. Give all "
                    "replicas the same max_steps, or shares of one length: shard(dataset, equal=True)."
                )
            raise

    @property
    def total_steps(self) -> int | None:
        """The run's planned steps, from its own begin on. None: it has no end."""
        total = self.diloco._settings.plan.total_steps
        return None if total is None else int(total)

    @property
    def has_grown(self) -> bool:
        """Whether the run has become longer than the trainer knew when it began."""
        total = self.total_steps
        return total is not None and self._planned is not None and total > self._planned

    def _snapshot_every(self, total_steps: int | None, options: Mapping[str, Any]) -> int:
        """Let short runs keep what is attached more often: a replica that is killed early has an optimizer, too."""
        if total_steps is None:
            return MOST_ROUNDS
        rounds: int = total_steps // max(1, options["inner_steps"])
        return max(1, min(MOST_ROUNDS, rounds // ROUNDS_PER_SNAPSHOT))

    def attach_schedule(self, name: str, schedule: Any) -> None:
        """Keep a schedule that the trainer steps once a step, and let it go with the run, neither behind nor ahead.

        After a notice the run is again where its last round was, and behind what the schedule has counted.
        """
        schedule = unwrapped(schedule)
        if not counts_steps(schedule):
            self.diloco.attach_state(name, schedule)
            return
        self.diloco.attach_state(name, schedule, follow=True, _lead=max(0, steps_counted(schedule) - self._of_trainer))
        kind: Any = type(schedule)

        def step(schedule: Any, *args: Any) -> None:
            if steps_counted(schedule) < self.diloco._attached.count_of(name, self.diloco.inner_step):
                kind.step(schedule, *args)

        schedule.__class__ = type(kind.__name__, (kind,), {"step": step})  # an attribute would be in its state
        self._held.append((schedule, kind))

    def step(self) -> None:
        """Count a step, once everything else has taken its own."""
        if not self.is_over:  # a trainer whose run has ended makes one step before it can be told to stop
            self.last = self.diloco.step() or self.last

    @property
    def trainer_step(self) -> int:
        """The step that the trainer is at: the run's, which went on where this replica was away."""
        return self.begun_at + self.capped(self.diloco.inner_step)

    def capped(self, step: int) -> int:
        return step if self.total_steps is None else min(step, self.total_steps)

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, as planned or because a replica stopped it."""
        return self.diloco.is_over

    def stop(self) -> bool:
        """Ask all replicas to end at one of the next rounds, because this trainer was told to stop early.

        One replica that ended by itself would keep a model that no other has, while the others train on without it.

        Returns: whether this trainer must continue until `is_over`. False if it may end now.
        """
        if self.is_over:
            return False
        if not self._has_asked:
            self._has_asked = True
            self.diloco.stop()
        return not self.is_over

    @torch.no_grad()
    def finish(self, *, is_asked_for: bool, keep_model: bool = False) -> None:
        """Give the model the anchor, which all replicas have in common, and leave the run.

        Args:
            is_asked_for: somebody has ended the training; else it is to be over.
            keep_model: the trainer has put another into its place, as the best one.
        """
        for schedule, kind in self._held:
            schedule.__class__ = kind
        buffers = by_clean_name(self.model, self.model.named_buffers())  # the anchor has no other names
        live: dict[str, torch.Tensor] = {**by_clean_name(self.model, self.model.named_parameters()), **buffers}
        best: dict[str, torch.Tensor] = {}
        if keep_model:
            merged = {*self.diloco.anchor(), *buffers}  # also what is frozen by now
            best = {name: live[name].clone() for name in merged}
        if not is_asked_for and not self.is_over and self.total_steps is not None:
            log.warning(
                "The trainer ended by itself at step %s of %s planned. A checkpoint that is ahead of the run leaves it "
                "too few epochs: who comes back needs none.", self.trainer_step, self.begun_at + self.total_steps,
            )  # fmt: skip
        self.diloco.close()  # which gives the model the anchor
        for name, values in best.items():
            live[name].copy_(values)


def location_of(options: Mapping[str, Any]) -> RunLocation:
    return find_location(*(options.get(name) for name in ("store", "run_id", "rank", "world_size")))


def step_of_begin(place: RunLocation, options: Mapping[str, Any], *, waits: bool) -> int | None:
    """Return the trainer's step at which a run has begun, as all its replicas agreed; None: it cannot be read.

    Args:
        waits: for a run that has not begun yet, since its own replicas alone know the step, up to `round_timeout_s`.
    """
    store = RetryingStore(place.store, clock=monotonic, patience=ROUND, waits=waits_of_process)
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
    """Return the trainer's step at which this replica's run ends since it was extended. None: it was not extended.

    A trainer plans its steps before training begins: the schedule's horizon, and the number of epochs. So it has to
    learn of an extension before that.

    Args:
        options: DiLoCo's arguments, as far as they are known.

    Example:
        extended_total({"inner_steps": 100})   # 800, after `replicas resume RUN --total-steps 800`
    """
    place = location_of(options)
    totals = totals_of(place)
    if not totals:
        return None
    return (step_of_begin(place, options, waits=False) or 0) + totals[-1]


def totals_of(place: RunLocation) -> Sequence[int]:
    """Return the totals of steps that the run of this replica was extended to, in their order."""
    replica = find_replica()
    if replica is None or not place.is_of_replica:
        return ()
    try:
        return replica.extensions().get("total_steps", ())
    except StoreError:  # DiLoCo, which reads them next, warns of it
        return ()


def first_total(planned: int | None, place: RunLocation, options: Mapping[str, Any]) -> tuple[int | None, bool]:
    """Return the total with which the run began, if a trainer plans the steps that the run was extended to.

    All replicas agree on the first total, and DiLoCo adds the extensions itself.

    Args:
        planned: the trainer's planned steps, from the begin of the run on.
        place: where the run is.
        options: DiLoCo's arguments.

    Returns: the total for DiLoCo, and whether the trainer follows an extension.
    """
    totals = totals_of(place)
    if planned is None or not totals or planned != totals[-1]:
        return planned, False
    store = RetryingStore(place.store, clock=monotonic, patience=ROUND, waits=waits_of_process)
    keys = Keys(place.run_id, options.get("name", "main"))
    first = total_of_start(store, keys, place.key_of_run(options.get("key")))
    return (planned, False) if first is None else (first, True)


def check_options(inner_steps: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for DiLoCo, as far as the trainer does not know them.

    Raises: TypeError: DiLoCo takes no such argument, or it is the trainer's to say.
    """
    for name in ("round_seconds", "total_rounds", "overlap_seconds"):
        if name in options:
            raise TypeError(
                f"A trainer ends after a number of steps that is every replica's, so its rounds go by inner_steps, got "
                f"{name}={options[name]!r}. For rounds by the clock, write a loop of your own: for step in "
                "diloco.steps()."
            )
    inspect.signature(DiLoCo).bind(nn.Module(), inner_steps=inner_steps, total_steps=None, **options)
    return {"inner_steps": inner_steps, **options}
