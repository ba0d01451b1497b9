"""The DiLoCo object that a training loop calls: counts steps, runs rounds, and averages the model with other replicas.

Each replica trains alone for `inner_steps` steps. Then all replicas average their work, and an outer optimizer moves
the *anchor*, the shared parameters, along that average (DiLoCo, Douillard et al., arXiv 2311.08105). With several
fragments, parts of the model have their rounds in turn, and a part may travel while training continues (Streaming
DiLoCo, arXiv 2501.18512).

`DiLoCo` connects the parts and has no algorithm of its own. `rendezvous/training_side.py` counts steps and merges,
`rendezvous/round_runner.py` runs the rounds, and `model_state.py` holds the anchor.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any, Literal, Self

from torch import Tensor, nn

from diloco.attached_state import AttachedState
from diloco.clipped_work import ClippedWorkCheck
from diloco.duplicate_work import DuplicateWorkCheck, SameDataMode
from diloco.errors import DiLoCoError
from diloco.extra_tensors import ExtraTensors, ExtraTensorsModule, addresses_of
from diloco.final_model_check import FinalModelCheck, drop_checks_of
from diloco.fragments import FragmentSpec, check_sizes, plan_fragments
from diloco.model_state import ModelState
from diloco.open_dilocos import open_dilocos
from diloco.optimizer_history import OptimizerHistory
from diloco.outer_optimizer import OptimizerFactory
from diloco.process_check import find_group, not_the_opener
from diloco.rendezvous.claims import bye_writer
from diloco.rendezvous.earlier_call import EarlierCall, earlier_call, note_call
from diloco.rendezvous.envelope import proof_of
from diloco.rendezvous.extension import Extension, total_of_start
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.retrying_store import RetryingStore, is_local_store
from diloco.rendezvous.round import Context, Limits, RoundReport, leads_far
from diloco.rendezvous.run_location import find_location
from diloco.rendezvous.training_side import TrainingSide
from diloco.replica_link import ReplicaLink, check_is_free, leave_all
from diloco.save_schedule import SaveSchedule
from diloco.settings import DiLoCoSettings, check_wires
from diloco.stale_copies.comparison import StaleCopies
from diloco.stale_copies.early_copies import EarlyCopies, warn_of_own_averages
from diloco.state_saver import StateSaver
from diloco.tensor_names import find_tensor
from diloco.training_loop import TrainingLoop
from diloco.unshared_state import FIRST_BYTES, UnsharedStateWriter
from diloco.warm_start import find_warm_start
from diloco.workers import Workers
from executors.errors import ReplicasError
from executors.patience import ROUND, waits
from executors.store import Store
from executors.store.watch import open_watch

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Internals:
    """Internal values of a DiLoCo, which only `open_diloco` sets."""

    limits: Limits | None = None
    """The time limits of the rendezvous. None: they follow from the arguments of `DiLoCo`."""
    begun_at: int = 0
    """The step of the trainer at which the run began."""
    is_trainers: bool = False
    """True if a trainer gave the total of steps, and cannot train longer."""
    make_state: Callable[..., ModelState] | None = None
    """Makes the state of the model. None: `ModelState`."""


# More than 20 methods: 17 of them are the interface for users, who call everything on one object. The others check that
# the object is open, or end the run. `RoundScope` and `StateSaver` do the work around a round.
class DiLoCo:
    """Trains a model together with the other replicas of a run, through a directory or a bucket.

        diloco = DiLoCo(model, inner_steps=500, total_steps=20_000)
        for step in diloco.steps():
            loss = model(next(batches)); loss.backward(); optimizer.step(); optimizer.zero_grad()
            diloco.step()
        diloco.close()
        torch.save(model.state_dict(), "model.pt")  # the anchor: the same on every replica

    A loop over epochs begins at the run's step, and ends with the run:

        for epoch in itertools.count(diloco.inner_step // len(loader)):
            if diloco.is_over:
                break
            for batch in loader:
                if diloco.is_over:
                    break
                …; optimizer.step(); diloco.step()

    The constructor waits until all replicas have agreed on the first anchor. The first replica that publishes its
    parameters decides it, and the anchor replaces the parameters of every model. After each round, the anchor is the
    same on every replica, bit for bit. DiLoCo never changes gradients, the inner optimizer or its learning rate
    schedule.

    A replica that dies costs the others at most `grace_s`, once. A replica that comes back, joins or is late is *out of
    phase*: it sends its work at once and waits for no other replica. Its work is not lost, and after the next round it
    is in phase again.

    All replicas need the same values, except where an argument is marked as one that may differ.

    Args: Rounds
        model: The module to train. Its trainable parameters are shared by name. Prefixes that `torch.compile` or
            DistributedDataParallel add are not part of a name. A sharded model needs a process group: see `group`.
        inner_steps: Calls of `step()` from one round of a fragment to its next round. Default None: 500. It must be a
            multiple of the number of fragments.
        round_seconds: Seconds from one round of a fragment to its next round, in place of `inner_steps`, for replicas
            of different speeds. The work of a replica then weighs as much as its number of steps. Default None: rounds
            go by steps.
        total_steps: Planned inner steps of the run, at least `inner_steps`. Each fragment has its last round at the
            last of these steps, so all replicas end with one model. Default None: no end is planned, `steps()` is not
            available, and the momentum grows over 40 rounds.
        total_rounds: Planned rounds of each fragment, for runs with `round_seconds`; at least 1. Default None: no end
            is planned. With P fragments, all fragments but the last one have one more round at the end.
        fragments: Number of parts of the model that have their rounds in turn, one every `inner_steps` / `fragments`
            steps. Or a list for each part, of modules or names, which together name each trainable parameter once.
            Default 1.
        min_quorum: Least number of contributions that decide a round, as long as that many replicas are left. From 1 to
            `world_size`. Default None: 1. May differ between replicas. If all replicas have contributed, the round is
            decided, also if one that comes back had no steps to send yet.
        grace_s: Longest wait, in seconds, for a replica that took part in the last round and may still be alive.
            Default 30. The wait begins when the first replica arrives. It shrinks to a quarter of `grace_s` if replicas
            usually arrive together, but not below 1/20 of the time between two rounds. May differ between replicas.
        round_timeout_s: Longest time, in seconds, that a round may take; more than 0, default 1800. Then `step()`
            raises `QuorumTimeoutError`. If the store does not answer for this time, `step()` raises the store's error.
            A replica that finds no replica of the last round waits two phases longer. May differ between replicas.
        snapshot_every: Rounds from one snapshot to the next, at least 1, default 10. Replicas that start again or join
            begin at the newest snapshot.
        allow_no_rounds: True: `close()` accepts training without any round. Default False: `close()` raises, because
            each replica has trained a different model.

    Args: Outer optimizer
        outer_optimizer: A function from a list of parameters to the `torch.optim.Optimizer` that steps the anchor. It
            is used as it is: its momentum does not grow, and there is no final average. Default None: Nesterov SGD with
            the next four arguments.
        outer_lr: Learning rate of the default outer optimizer, at least 0. If `outer_lr` and `outer_momentum` are None,
            it is 1.0 in plans of up to 1000 steps, and otherwise 0.7, as in the paper. A plan has up to 1000 steps if
            its last round begins before step 1000. If only the other one is given, it is 0.7.
        outer_momentum: Nesterov momentum of the default outer optimizer, from 0 to below 1. If `outer_lr` and
            `outer_momentum` are None, it is 0.9, as in the paper. In plans of up to 1000 steps it is 0.8 if a round has
            at least 50 steps, and 0.5 otherwise. If only the other one is given, it is 0.9.
            `docs/results/outer_settings.md` has the measurements.
        momentum_warmup: Rounds over which the outer momentum grows to its value, at least 0. Default "auto": half of
            the planned rounds, at most 100. If no end is planned: 40.
        final_average: True: the last planned round of each fragment is a plain average, which removes the noise of the
            momentum. Default True. It needs `total_steps` or `total_rounds`. Without a final average, the running
            statistics of a BatchNorm do not fit the parameters, and the constructor warns.

    Args: Slow links
        background: True: rounds run in a thread of their own while training continues, and the next `step()` raises
            their errors. False: `step()` waits for the round. Default "auto": True if `overlap_steps` or
            `overlap_seconds` is not 0. May differ between replicas.
        overlap_steps: Steps between sending a fragment and applying its mean, from 0 to below `inner_steps` /
            `fragments`; then `step()` waits for the mean. Default 0. "auto": the first `step()` after the mean has
            arrived applies it, and the next send at the latest. Live parameters then depend on the store's speed;
            anchors never do. May differ between replicas.
        overlap_seconds: Seconds between sending a fragment and applying its mean, for runs with `round_seconds`. From 0
            to below `round_seconds` / `fragments`, default 0. "auto": the mean is applied when it has arrived. May
            differ between replicas.
        merge: How a mean changes the live parameters. Default "anchor": the anchor replaces them, and steps made since
            sending are lost, except for the share `mix`. "carry": they move with the anchor and keep these steps. May
            differ between replicas.
        mix: Share of the live value that is kept when a mean is applied, from 0 to 1. Default 0. It must be 0 with
            `merge="carry"`. May differ between replicas.
        wire: Encoding of contributions. Default "fp32". "bf16" has half the bytes, "int8" a quarter and "int4" an
            eighth. The rounding error is kept, and is part of the next contribution. "top8" has a 42nd: it sends one
            value in eight, and later contributions have the rest. It needs memory for one more copy of the model, and
            costs loss in short runs and with more than 20 `inner_steps`, most of it if the run begins with random
            parameters.
        mean_wire: Encoding of means: "fp32", "bf16", "int8", "int4" or "each". Default None: the value of `wire`, but
            "int8" if `wire` is "int4", and "int4" if `wire` is "top8". "each": no mean is stored, and each replica
            reads all contributions. With up to about 7 replicas and "top8", that moves the fewest bytes.

        robust: "clip": a contribution that is much larger than the others is scaled down to the median of their norms.
            This limits the harm of one replica whose gradients explode. It needs at least three replicas, and averages
            take longer. Default None: every contribution counts as it is.

    Args: Work and data
        weight: Weight of this replica's work in the mean, more than 0, default 1. Or a function without parameters that
            is called for each contribution, for example for its number of tokens. A number is scaled down for work of
            fewer than `inner_steps` steps. With `round_seconds` a number is the weight of one step. May differ between
            replicas.
        late: Treatment of work that missed its round. Default "carry": it is part of the next contribution. "drop": it
            is discarded. While a replica is out of phase, "drop" also discards the steps since its last contribution,
            if that was not counted. May differ between replicas.
        carry_rounds: Rounds of a fragment after which its uncounted work is discarded, with a warning; at least 1.
            Default 4. None: never. May differ between replicas.
        sync_buffers: True: float buffers that the model saves are averaged, too, such as the statistics of a BatchNorm.
            Each merge sets them to the anchor's values. False: each replica keeps its own. Default None: True, but
            False and a warning with a wire of "int8", "int4" or "top8", which is too coarse. Integer buffers are never
            averaged. Before the final average, the statistics of a BatchNorm do not fit the anchor: to evaluate it,
            compute them again with `torch.optim.swa_utils.update_bn`.
        same_data: Reaction to another replica that sends the same work, bit for bit, in three rounds in a row. Both
            then train on the same data, so one of them adds nothing. Default "raise": `DuplicateWorkError`. "warn": a
            warning. "allow": nothing. With "raise" and "warn", the first such round is a warning. May differ between
            replicas.

    Args: Identity
        name: Name of this DiLoCo, if a run has several. A word without "/". Default "main".
        store: The store, or the path or URL of it. Default None: the store of this replica's run. A process that is not
            a replica, as in `python train.py`, trains alone in memory, and a line on stderr reports that.
        run_id: Name of the run. Default None: the run of this replica.
        rank: Number of this replica, from 0. Default None: the rank of this replica. "join": one more replica of an
            existing run, under the next free rank.
        world_size: Number of replicas that the run begins with, at least 1. Default None: the world size of this
            replica's launch.
        key: Secret bytes that all replicas of a signed run share. Records that were not made with the key are ignored.
            Default None: the key of a launch with `signed`, otherwise no key.
        group: The process group of a replica that has several processes, which train one model together. The model is
            then wrapped in DistributedDataParallel, or sharded by `fully_shard`. Default "auto": the default group of
            `torch.distributed`, if one was made. A process group: that one. None: this process alone takes part.

    Raises:
        ValueError: An argument has a value that is not allowed. Nothing was written.
        TypeError: An argument has a type that is not allowed, or the model is sharded and has no process group. Nothing
            was written.
        ContributionError: The model or the settings differ from the run's. The message names the first difference.
        DiLoCoError: This process is one of several in a replica and has no process group, or another process of the
            group has not opened the DiLoCo. Or a DiLoCo of this name is open already. Or the process is not a replica,
            and only some of the arguments from `store` to `world_size` are given.
        QuorumTimeoutError: The replicas did not agree on the first anchor in `round_timeout_s`.
        StoreError: The store did not answer in `round_timeout_s`.
    """

    _internals = Internals()
    """The internal values. `open_diloco` sets other ones."""

    def __init__(
        self,
        model: nn.Module,
        *,
        inner_steps: int | None = None,
        round_seconds: float | None = None,
        outer_optimizer: OptimizerFactory | None = None,
        outer_lr: float | None = None,
        outer_momentum: float | None = None,
        momentum_warmup: int | Literal["auto"] = "auto",
        final_average: bool = True,
        total_steps: int | None = None,
        total_rounds: int | None = None,
        fragments: FragmentSpec = 1,
        background: bool | Literal["auto"] = "auto",
        overlap_steps: int | Literal["auto"] = 0,
        overlap_seconds: float | Literal["auto"] = 0.0,
        merge: Literal["anchor", "carry"] = "anchor",
        mix: float = 0.0,
        wire: str = "fp32",
        mean_wire: str | None = None,
        robust: Literal["clip"] | None = None,
        late: Literal["carry", "drop"] = "carry",
        carry_rounds: int | None = 4,
        min_quorum: int | None = None,
        grace_s: float = 30.0,
        round_timeout_s: float = ROUND.seconds,
        weight: float | Callable[[], float] = 1.0,
        sync_buffers: bool | None = None,
        snapshot_every: int = 10,
        allow_no_rounds: bool = False,
        same_data: SameDataMode = "raise",
        name: str = "main",
        store: Store | str | None = None,
        run_id: str | None = None,
        rank: int | Literal["join"] | None = None,
        world_size: int | None = None,
        key: bytes | None = None,
        group: Any = "auto",
    ) -> None:
        given = {argument: value for argument, value in locals().items() if argument not in ("self", "model")}
        location = find_location(store, run_id, rank, world_size)
        internals = self._internals
        if internals.make_state is None and (found := find_group(group, location, rank, name)) is not None:
            # Loaded by name, because it is a subclass of this class, and most replicas have one process.
            in_group = importlib.import_module("diloco.group_diloco").GroupDiLoCo
            self.__class__ = in_group
            in_group.open_in_group(self, model, found, location, given)
            return
        self._pid = os.getpid()
        where = {"store": store, "run_id": run_id, "rank": rank, "world_size": world_size, "key": key}
        self._where: dict[str, Any] = where  # `average_also` opens more DiLoCos in the same run
        self._link = ReplicaLink(location.replica, name)
        limits = internals.limits or Limits(grace_s=grace_s, round_timeout_s=round_timeout_s)
        # A process that trains alone stores everything in memory. After a snapshot it can delete older objects, so it
        # makes one after each round.
        if location.is_alone:
            snapshot_every, limits = 1, replace(limits, small_bytes=0)
        fragments_ = plan_fragments(model, fragments, sync_buffers=sync_buffers, wires=check_wires(wire, mean_wire))
        check_sizes(fragments_, wire, location.store)
        self._settings = settings = DiLoCoSettings.of(
            locals(), n_fragments=len(fragments_), key=location.key_of_run(key), world_size=location.world_size,
            rank=location.world_size if location.rank is None else location.rank, begun_at=internals.begun_at,
            begins_warm=location.begins_warm,
        )  # fmt: skip
        settings.check()
        self._plan = settings.plan
        settings.warn_of_outer_settings(model)
        if location.rank == 0 and not location.is_alone and is_local_store(location.store):
            settings.warn_of_costly_wire(sum(fragment.n_elements for fragment in fragments_))
        make_state = internals.make_state or ModelState
        self._model_state = make_state(model, fragments_, settings, block_elements=limits.block_elements)
        proof = proof_of(settings.key)
        # Calls of a failing store are tried again for as long as a round may take. After that, the other replicas give
        # up, too.
        tolerance = replace(ROUND, seconds=limits.round_timeout_s)
        patient = RetryingStore(location.store, clock=monotonic, tolerance=tolerance, copies=proof.copies, waits=waits)
        keys = Keys(location.run_id, name, location.key_of_outcomes(key))
        me = location.identify(patient, keys, proof)
        self._name, self._me = (me.nonce, name), me
        check_is_free(self._name)
        self._model_state.rank, self._model_state.is_back = me.rank, me.attempt > 0
        who, watch = f"diloco {name} of rank {me.rank}", open_watch(location.store)
        self._workers = workers = Workers(patient, watch, who, in_background=settings.in_background)
        warm_start = find_warm_start(location, patient, keys, self._model_state)
        context = Context(
            store=patient, keys=keys, me=me, training=self._model_state, plan=settings.plan,
            proof=proof, origin=location.origin, first_state=None if warm_start is None else warm_start.read,
            limits=limits, min_quorum=min_quorum or 1, weight=weight,
            snapshot_every=settings.entries_per_snapshot, carry_rounds=carry_rounds, wait=workers.scheduler.pause,
            in_background=workers.scheduler.in_background, background=workers.uploads, map=workers.map, ask=workers.ask,
            on_standstill=self._link.stand_still,
        )  # fmt: skip
        # Reserve memory for encoded work now, because the first use of each memory page costs as much as several
        # copies.
        for layout in context.layouts:
            self._model_state.reserve(layout.kept_bytes(location.world_size, streams=patient.streams))
        self._attached = AttachedState(
            patient, keys, me, workers.uploads, settings.plan, context.proof, internals.begun_at
        )
        self._unshared_writer = (
            None if location.is_alone else UnsharedStateWriter(patient, keys, me.rank, proof, workers.uploads)
        )
        self._duplicate_work = DuplicateWorkCheck(same_data, me.rank, location.replica, self._model_state.had_moved)
        self._clipped_work = ClippedWorkCheck(me.rank)
        self._extension = Extension(
            location.replica if location.is_of_replica else None, settings.plan, unit=settings.unit_of_total,
            per_total=settings.plan_steps_per_total, is_trainers=internals.is_trainers,
        )  # fmt: skip
        # The run may have been extended. Its new end is read before the first round, so that the loop and the trainer
        # plan the longer run.
        self._find_first_total = partial(total_of_start, patient, keys, settings.key)
        self._extension.look(self._find_first_total)
        self._members = context.members
        self._place = location.store.url, location.run_id, name, me.rank
        self._context, self._members.earlier = context, earlier_call(self._place)
        self._training_side = TrainingSide(context, workers.scheduler)
        self._round_s, self._closed, kept = 0.0, False, self._attached.kept
        self._extra_addresses = partial(addresses_of, extra := list[tuple[DiLoCo, ExtraTensorsModule]]())
        self._is_for_extra_tensors, self._extra = isinstance(model, ExtraTensorsModule), extra
        # a new DiLoCo trains the model again, so the model changes on purpose, and the check of the earlier DiLoCo ends
        drop_checks_of(model)
        self._stale_copies = StaleCopies(model, fragments_)
        self._history = OptimizerHistory(model)
        self._early_copies = EarlyCopies(model, () if me.attempt else self._stale_copies.names)
        # The first anchor changes the parameters like a round, so an optimizer made before may undo it.
        self._stale_copies.before_merge()
        with self._link.waiting("first anchor"):
            self._training_side.start(None if kept is None else kept.restored(self._model_state.sizes()))
        self._stale_copies.after_merge("the first anchor")
        self._early_copies.look()
        self._model_state.before_merge = self._stale_copies.before_merge
        if context.origin is not None and kept is None:
            self._attached.load_from_run(context.origin, self.rounds)
        # The replica whose parameters became the first anchor also writes the tensors that are not in the anchor, once
        # for all replicas.
        if self._unshared_writer is not None and self._training_side.runner.replayer.is_author:
            self._unshared_writer.keep(0, self._model_state.unshared.first(), FIRST_BYTES)
        self._model_state.local_buffers.give(self._attached.buffers_of_earlier_attempt())
        self._steps_of_earlier_attempts = self._attached.step
        self._attached.begin(SaveSchedule(settings.n_fragments, settings.entries_per_snapshot, self.rounds))
        self._saver = StateSaver(
            self._attached,
            self._unshared_writer,
            self._training_side,
            self._model_state,
            self._members,
            lambda: self._inner_step,
        )
        self._loop = TrainingLoop(self._settings, begins_at=self._inner_step)
        self._link.plan(settings.total_of_steps, me.nonce, internals.begun_at)
        open_dilocos.add(self._name, self)
        self._link.call_after_failure(DiLoCo._leave_after_error, self._workers.uploads.finish)
        # A replica that was started again may find that the run has already had its last round.
        self._link.note_step(self._training_side.phase.run_step, settings.plan.total_steps)
        if self._is_over:
            self._link.note_began_after_end()
        self._link.show(self.rounds, self._round_s)

    # -- training ----------------------------------------------------------------------------------------------------

    def step(self) -> RoundReport | None:
        """Count an inner step. If a round is due, send this replica's work, or run the round.

            for batch in loader:
                model(batch).mean().backward()
                optimizer.step()
                diloco.step()

        Call it after each `optimizer.step()`. A replica that is out of phase does not wait here: now and then it reads
        from the store whether the open round was decided.

        Returns:
            The report of the round that this step applied. None if it applied no round.

        Raises:
            QuorumTimeoutError: The round was not decided in `round_timeout_s`.
            ContributionError: A parameter of this replica is not finite, or has another shape.
            DivergenceError: This replica's anchor differs from the run's, also after it was loaded again.
            FencedError: A newer attempt of this rank has begun, so this process must end.
            AbortedError: Another replica aborted the run.
            RunNotFoundError: The run was deleted.
            DuplicateWorkError: Other replicas train on the same data.
            StaleCopyError: The optimizer undid the last round, because it keeps a copy of the weights.
            StoreError: The store did not answer in `round_timeout_s`, or an object in it is damaged.
            DiLoCoError: This DiLoCo is closed, or was opened by another process.
            SystemExit: This replica was asked to end (`Replica.ending_s`). Attached state was saved.
        """
        self._check_open()
        self._link.progress()
        self._leave_if_asked(after_round=False)
        if self._is_past_the_end("step"):
            return None
        self._loop.n_calls += 1
        if not self._loop.knows_begin:
            self._loop.print_begin()
        self._stale_copies.check(self._extra_addresses)
        if self._early_copies.found:
            self._early_copies.warn()
        if not self._training_side.phase.n_steps and not self._members.is_alone:
            warn_of_own_averages(self._model_state.model, self._extra_addresses())
        with RoundScope(self) as reports:
            reports += self._training_side.step()
        for other, _ in self._extra:
            if not other._is_over:
                with RoundScope(other) as others:
                    others += other._training_side.step()
        self._leave_if_asked(after_round=bool(reports))
        return RoundReport.sum_of(reports) if reports else None

    def steps(self) -> Iterator[int]:
        """Return an iterator over the steps that this replica has to make, for the training loop.

            for step in diloco.steps():
                loss = model(next(batches)).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                diloco.step()

        The iterator begins at `inner_step`, which is not 0 in a replica that was started again. It ends after the run's
        last planned round. Each value is the number of the step that the loop is about to make, counted from 0. Call
        `step()` once for each value. A value may be larger than the previous value plus 1 if the run continued without
        this replica, or has rounds by the clock.

        A replica that is started again after the last round makes one more pass. Its step is undone and not counted, so
        the model holds the anchor after the loop. Without this pass, the variables that the loop sets would not exist,
        and code after the loop that uses them would fail.

        Raises:
            DiLoCoError: No end is planned: give DiLoCo `total_steps`, or `total_rounds` with `round_seconds`. Or,
                during the iteration, the loop does not call `step()`.
        """
        self._check_open()
        note_loop_follows_run(self._name[0])
        if self._plan.total_steps is None:
            total = "total_steps" if self._settings.round_seconds is None else "total_rounds"
            raise DiLoCoError(
                f"steps() ends at the planned end of the run, and no end is planned. Pass {total}=… to DiLoCo, or "
                "write a loop of your own that calls step()."
            )
        return self._loop.steps(self, self._undo_step)

    def stop(self) -> None:
        """Ask all replicas to end the run with one of the next rounds, for example for early stopping.

            if patience.is_over(held_out_loss):
                diloco.stop()  # and continue: the loop over steps() ends by itself, on every replica

        The request is part of this replica's next contribution. The round that counts that contribution is the last one
        on all replicas: `is_over` is True from then on, and all replicas end with the same model. Continue to call
        `step()` until then. A stopped run cannot continue: replicas that are resumed end at once.

        Raises:
            DiLoCoError: This DiLoCo is closed.
        """
        self._check_open()
        self._training_side.phase.wants_to_stop = True

    def _is_past_the_end(self, call: str) -> bool:
        """Return True if the run has ended. In that case, undo the steps since the end, and warn.

        Args:
            call: the name of the public method that was called.
        """
        if not self._is_over:
            return False
        self._loop.warn_of_call_after_end(call, self._inner_step)
        self._undo_step()
        return True

    def _undo_step(self) -> None:
        """Set the model, and everything else that is averaged, to the anchor again. It is called after the end of the
        run.

        Every replica ends with the anchor, and a step after the last round belongs to no round.
        """
        self._training_side.run_in_round_thread(self._model_state.take_anchor)
        for other, tensors in self._extra:
            tensors.refresh()
            other._undo_step()
        self._link.note_step(self._training_side.phase.run_step, self._plan.total_steps)

    def sync(self) -> list[RoundReport]:
        """Run a round of every fragment now. All replicas must call it at the same step.

            diloco.sync()
            loss = evaluate(model)  # the anchor: the same model on every replica

        Inner steps are counted from here, so the next round is due `inner_steps` later. A fragment that was already
        sent has its round now. With `total_steps`, these rounds are the next planned ones: the following rounds keep
        their steps. With `round_seconds`, the end of the run comes that much earlier.

        After the end of the run there is no round. The model is set to the anchor, and a warning reports that.

        Returns:
            The reports of the rounds, one for each fragment. Empty after the end of the run.

        Raises:
            QuorumTimeoutError: A round was not decided in `round_timeout_s`.
            DiLoCoError: This DiLoCo is closed. `step()` lists the other errors of a round.
        """
        self._check_open()
        self._link.progress()
        if self._is_past_the_end("sync"):
            return []
        with RoundScope(self) as reports:
            reports += self._training_side.sync()
        for other, _ in self._extra:
            if not other._is_over:
                with RoundScope(other) as others:
                    others += other._training_side.sync()
        return reports

    def attach_state(self, name: str, thing: Any, *, follow: bool = False) -> None:
        """Save the state of an object with the run, so that this rank's next attempt continues with it.

            diloco.attach_state("optimizer", optimizer)
            diloco.attach_state("schedule", schedule, follow=True)

        Attach everything that a later attempt of this rank needs: the inner optimizer, the learning rate schedule, the
        data position and random generators. Without them, the loss jumps when the replica continues.

        Call this right after creating the DiLoCo. In a later attempt of a rank, each object gets the state that the
        earlier attempt saved. State is saved at the end of a `step()` with a round: after the first round, and at least
        once every `snapshot_every` rounds. In between, it is saved as often as that costs at most 1 % of the time. So
        call `step()` last, after everything else has made its step.

        A run continues without an absent replica. Then `inner_step` is ahead of the attached state, and a line in the
        log reports the difference. So make schedules functions of `inner_step` or `progress`, or let them follow.

        Args:
            name: Any text that identifies the object: the same in each attempt.
            thing: An object with `state_dict` and `load_state_dict`, or a random generator of torch, numpy or Python.
                Its state must consist of tensors, arrays and JSON values. It is stored as safetensors and JSON, never
                as a pickle. An object that `accelerator.prepare` returned is unwrapped.
            follow: True: DiLoCo steps a learning rate schedule of torch to `inner_step`, now and at the end of each
                `step()`. Do not step it yourself, and attach its optimizer first. Default False. A schedule that counts
                epochs must not follow, and a warning reports one. Step it when an epoch begins:
                `while schedule.last_epoch < epoch: schedule.step()`.

        Raises:
            TypeError: The object has no state that can be saved, or `follow` is True and the object is not a schedule
                that can follow. The message names the remedy. If a state later becomes one that cannot be saved, a
                warning reports that, and training continues.
            ValueError: The name is taken, or a schedule that follows was attached before its optimizer.
            DiLoCoError: This DiLoCo is closed.
        """
        self._attach_state(name, thing, follow=follow)

    def _attach_state(self, name: str, thing: Any, *, follow: bool, lead: int | None = None) -> None:
        """Attach the state of an object; see `attach_state`.

        Args:
            name: the name of the object.
            thing: the object.
            follow: True if DiLoCo steps the object, which is a schedule.
            lead: the steps by which a schedule is ahead of the run. None: it follows from the object.
        """
        self._check_open()
        self._attached.catch_up(self._inner_step, self._training_side.phase.n_steps)
        self._attached.attach(name, thing, self._inner_step, follow=follow, lead=lead)
        self._model_state.before_hold = self._saver.save_if_due
        self._stale_copies.warn_of_copies(thing, self._extra_addresses())

    def average_also(self, thing: ExtraTensors) -> None:
        """Also average tensors outside the model in each round, such as an EMA of the weights or an optimizer's copies.

            ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
            diloco.average_also(ema)

        Every replica then has the same EMA after each round and after `close()`. Each value becomes its plain average
        over the replicas; the outer optimizer does not step it. All replicas must call this in the same order, before
        their first step. It costs the same number of bytes in each round as a model of that size.

        A copy that was made before `DiLoCo(model)` gets the values of the first anchor.

        Args:
            thing: A module, whose parameters and saved float buffers are averaged, also frozen ones. Or a mapping from
                names to tensors. Or a function that returns such a mapping, for an optimizer that replaces its tensors
                by new ones.

        Raises:
            TypeError: `thing` is none of these.
            ValueError: `thing` has no float tensor.
            DiLoCoError: This replica has already made a step, or this DiLoCo is closed.
        """
        self._check_open()
        if self._training_side.phase.n_steps:
            raise DiLoCoError(
                f"average_also() was called after {self._training_side.phase.n_steps} steps. Call it before the first "
                "step(), on all replicas."
            )
        tensors = ExtraTensorsModule(thing)
        self._early_copies.take_anchor(tensors.tensors().values())
        names = (
            "inner_steps", "round_seconds", "total_steps", "total_rounds", "wire", "mean_wire", "robust", "late",
            "carry_rounds", "min_quorum", "grace_s", "round_timeout_s", "weight", "snapshot_every",
        )  # fmt: skip
        options: dict[str, Any] = {name: getattr(self._settings, name) for name in names}
        other = open_diloco(
            tensors, outer_lr=1.0, outer_momentum=0.0, allow_no_rounds=True, same_data="allow",
            name=f"{self._name[1]}.also{len(self._extra)}", limits=self._internals.limits,
            begun_at=self._settings.begun_at, **options, **self._where,
        )  # fmt: skip
        other._duplicate_work.expect_no_moves()
        # No optimizer steps these tensors, so the check for stale copies would have nothing to compare.
        other._stale_copies.trust()
        other._history.close()
        other._model_state.before_hold = tensors.refresh
        self._extra.append((other, tensors))

    def close(self) -> None:
        """Apply the round in flight, set the model to the anchor, and leave the run. A second call does nothing.

            diloco.close()
            torch.save(model.state_dict(), "model.pt")

        Afterwards the model holds the same values on every replica, so evaluate and save it now. `with DiLoCo(…) as
        diloco` calls this at the end of the block. `close()` runs no new round. Steps that no round has averaged are
        removed from the model, and a warning reports their number. Without any round, the model keeps its live values.

        Raises:
            DiLoCoError: This replica has trained, and there was no round at all. `allow_no_rounds=True` permits that.
            QuorumTimeoutError: The round in flight was not decided in `round_timeout_s`.
        """
        self._close(in_order=True)

    def _close(self, *, in_order: bool, returns: bool = False) -> None:
        """Leave the run. A second call has no effect.

        Args:
            in_order: True: wait for the round in flight, and check what was averaged. False: leave at once, after an
                error.
            returns: True: the next attempt of this process continues at once, so the others still wait for this
                replica.
        """
        # A forked process inherits this object. Only the process that opened it may leave the run.
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._stale_copies.close()
        self._history.close()
        if in_order and self._training_side.phase.wants_to_stop and not self._is_over:
            self._loop.warn_of_early_close()
        open_dilocos.remove(self._name)
        if returns:
            self._note_return()
        try:
            with self._link.waiting("round"):
                self._link.record(self._training_side.leave(in_order=in_order, says_bye=not returns))
        finally:
            self._workers.close()
            self._link.record_uncounted(self._training_side.scale.undecided)
        self._link.show(self.rounds, self._round_s)
        if not in_order:
            for other, _ in self._extra:
                other._close(in_order=False, returns=returns)
        if in_order:
            phase = self._training_side.phase
            at = self.rounds if self._settings.round_seconds is not None else self._inner_step
            self._extension.check_what_was_trained(phase.n_steps, at, is_over=self._is_over)
            self._saver.save_unshared()
            self._workers.uploads.finish()
            # Without a round, the anchor is still the first one, and only the live values contain the training.
            if self.rounds:
                self._model_state.take_anchor()
                self._look_at_end()
            if self._is_for_extra_tensors:
                return  # the DiLoCo of the model already warns of steps that no round has averaged
            for other, tensors in self._extra:
                tensors.refresh()
                other._close(in_order=True)
            phase, moved, is_alone = self._training_side.phase, self._model_state.has_moved, self._members.is_alone
            uncounted = max(phase.uncounted_steps)
            if self.rounds and phase.n_steps and not is_alone and not self._is_over and not phase.wants_to_stop:
                uncounted = self._loop.warn_of_early_end(at, uncounted)
            self._settings.check_what_was_averaged(phase.n_steps, uncounted, self.rounds, moved, is_alone=is_alone)

    def _look_at_end(self) -> None:
        """Let the replica check the model again when the script has ended, because the script may change it after
        `close()`.
        """
        model = self._model_state.model
        owner = model.module_of_copies if isinstance(model, ExtraTensorsModule) else model
        if owner is None or self._members.is_alone or not self._link.is_of_replica:
            return
        tensors = {
            slot.name: find_tensor(self._model_state.model, slot.name, slot.kind)
            for fragment in self._model_state.fragments
            for slot in fragment.slots
        }
        # the parameters of this module are not the tensor objects of the owner
        if isinstance(model, ExtraTensorsModule):
            tensors = model.tensors()
        self._link.call_at_end(FinalModelCheck(owner, tensors, self._link.note_changed_model).look)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(ReplicasError):  # the user must see the error of the block, and not one of `close()`
            self._close(in_order=False, returns=self._link.may_stay(error))

    def _leave_after_error(self) -> None:
        self._close(in_order=False, returns=True)

    def _note_return(self) -> None:
        """Remember the place of this attempt in its phase, and let the replica say goodbye if it is not continued."""
        context, phase = self._context, self._context.phase
        if not phase.is_out_of_phase:
            identities = frozenset({(self._me.attempt, self._me.nonce)})
            note_call(
                self._place,
                EarlierCall(identities, phase.position, phase.steps_now, phase.step_s, context.clock()),
            )
        self._link.call_at_dismissal(bye_writer(context.store, context.keys, self._me))

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def rounds(self) -> int:
        """The number of fragment rounds that this replica has applied.

        if diloco.rounds >= 10:
            evaluate(diloco.anchor())
        """
        return self._training_side.position

    @property
    def inner_step(self) -> int:
        """The run's step: the inner steps so far, including the rounds that happened without this replica.

            rate = cosine(diloco.inner_step / total_steps)

        With `round_seconds`, it is this replica's own number of steps, including the saved steps of its earlier
        attempts.
        """
        note_loop_follows_run(self._name[0])
        return self._inner_step

    @property
    def is_over(self) -> bool:
        """True when the run has had its last planned round, or was stopped. It stays True.

            while not diloco.is_over:
                train_on(next(batches)); diloco.step()

        A training loop of your own must end here; the loop over `steps()` ends by itself. Always False if no end is
        planned.
        """
        note_loop_follows_run(self._name[0])
        return self._is_over

    @property
    def progress(self) -> float:
        """The part of the planned run that is done, from 0 to 1, for example for a learning rate schedule.

            optimizer.param_groups[0]["lr"] = 1e-3 * (1 - diloco.progress)

        Raises:
            DiLoCoError: No end is planned: give DiLoCo `total_steps`, or `total_rounds` with `round_seconds`.
        """
        if (total := self._plan.total_steps) is None:
            raise DiLoCoError(
                "progress needs a planned end. Pass total_steps=… to DiLoCo, or total_rounds=… with round_seconds."
            )
        note_loop_follows_run(self._name[0])
        return min(1.0, self._training_side.phase.run_step / total)

    def anchor(self) -> dict[str, Tensor]:
        """Return a float32 copy of the shared parameters and buffers on the CPU, by name.

            plain.load_state_dict(diloco.anchor(), strict=False)   # where model = torch.compile(plain)

        Names have no prefix of a wrapper, whether this replica's model is compiled or not.

        Raises:
            DiLoCoError: An outer step was interrupted, so this replica's anchor is damaged.
        """
        return self._training_side.run_in_round_thread(self._model_state.anchor.by_name)

    def state_dict(self) -> dict[str, Any]:
        """Return the anchor, the outer optimizer's state and the position, for a checkpoint of the same run.

            torch.save({"diloco": diloco.state_dict(), "model": model.state_dict()}, "checkpoint.pt")

        It first waits for the round in flight and merges it. So call it before `model.state_dict()`, as here.

        Raises:
            DiLoCoError: An outer step was interrupted, or another process opened this DiLoCo.
        """
        self._check_opener()
        taken: list[dict[str, Any]] = []
        with RoundScope(self) as reports:
            reports += self._training_side.at_rest(lambda: taken.append(self._model_state.checkpoint()))
        return {**self._training_side.phase.resume_point, "inner_step": self._inner_step, **taken[0]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Return to a checkpoint of this run, and then catch up with the run.

            model.load_state_dict(checkpoint["model"])
            diloco.load_state_dict(checkpoint["diloco"])

        Load the model's own state first, as here. Its difference from the anchor is work. That work is part of the next
        contribution, unless a round has counted it since the checkpoint.

        Args:
            state: The value that `state_dict()` returned.

        Raises:
            ValueError: The checkpoint belongs to another run or another model.
            DiLoCoError: This DiLoCo is closed.
        """
        self._check_open()
        with RoundScope(self) as reports:
            reports += self._training_side.drain()
        self._model_state.anchor.check_checkpoint(state, self._training_side.runner.replayer.first, self.rounds)
        self._attached.catch_up(self._inner_step, self._training_side.phase.n_steps)
        self._attached.step = state["inner_step"]
        self._steps_of_earlier_attempts = state["inner_step"] - self._training_side.phase.n_steps
        with RoundScope(self) as reports:
            reports += self._training_side.go_back(state, partial(self._model_state.load_checkpoint, state))

    # -- inside ------------------------------------------------------------------------------------------------------

    @property
    def _inner_step(self) -> int:
        phase = self._training_side.phase
        return (
            int(phase.run_step)
            if self._settings.round_seconds is None
            else self._steps_of_earlier_attempts + phase.n_steps
        )

    @property
    def _is_over(self) -> bool:
        return self._plan.is_over(self._training_side.position)

    def _leave_if_asked(self, *, after_round: bool) -> None:
        """End the process with `SystemExit` if this replica was asked to end. Each DiLoCo of the replica leaves
        first.
        """
        if self._link.is_to_leave(after_round=after_round):
            leave_all(self._name[0], DiLoCo._keep_and_leave)

    def _keep_and_leave(self) -> None:
        """Save attached state, and tell the other replicas that this one leaves."""
        if self._attached:
            self._link.record(self._training_side.stop())
            self._saver.save_attached()
        self._close(in_order=False)
        self._workers.uploads.finish()

    def _check_open(self) -> None:
        self._check_opener()
        if self._closed:
            raise DiLoCoError(f"The DiLoCo {self._name[1]!r} is closed. Make a new one, or call close() later.")

    def _check_opener(self) -> None:
        if os.getpid() != self._pid:
            raise not_the_opener(self._pid)


class RoundScope:
    """Surrounds a call that may run rounds. It collects their reports and does the work that follows a round.

    At the end it saves attached state if that is due, and passes the reports to the replica. An error in the call skips
    that work.

    Args:
        diloco: the DiLoCo that runs the rounds.

    Example:
        with RoundScope(diloco) as reports:
            reports += diloco._training_side.step()
    """

    def __init__(self, diloco: DiLoCo) -> None:
        self._diloco = diloco
        self._reports: list[RoundReport] = []
        self._began_s = 0.0
        self._section = diloco._link.waiting("round")

    def __enter__(self) -> list[RoundReport]:
        self._began_s = monotonic()
        self._section.__enter__()
        return self._reports

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._section.__exit__(kind, error, trace)
        if error is not None:
            return
        # The warnings of `follow` and `look` must name the user's line. Their `stacklevel` counts the calls between
        # here and that line.
        diloco, reports = self._diloco, self._reports
        side, plan, link, loop = diloco._training_side, diloco._plan, diloco._link, diloco._loop
        if reports:
            if diloco._is_over and plan.ended_by and not loop.has_printed_stop:
                link.replan(diloco._settings.total_of_steps)
                loop.print_stop(plan.ended_by, reports[-1].round)
            if diloco._is_over and diloco._extension.look(diloco._find_first_total):
                link.replan(diloco._settings.total_of_steps)
            if diloco._attached.things:
                diloco._saver.save_if_due()
            if side.position // diloco._saver.entries_per_period != diloco._saver.period:
                diloco._saver.begin_period()
            side.phase.start_training_clock()
            log.debug("rank %s: %s", diloco._settings.rank, RoundReport.sum_of(reports))
        diloco._round_s += monotonic() - self._began_s
        if reports:
            when = f"round {reports[-1].round}"
            diloco._stale_copies.after_merge(when, may_return=any(map(leads_far, reports)))
            diloco._history.last_merge = when
            link.show(side.position, diloco._round_s)
        link.record(reports)
        link.note_step(side.phase.run_step, plan.total_steps)
        if not diloco._duplicate_work.needs_no_check or any(report.same for report in reports):
            diloco._duplicate_work.check(reports)
        if diloco._settings.robust is not None:
            diloco._clipped_work.check(reports)
        step = diloco._inner_step
        link.show_step(step)
        if diloco._attached.things or diloco._attached.kept is not None:
            diloco._attached.follow(step, side.phase.n_steps)
        else:
            diloco._attached.is_behind = True


def note_loop_follows_run(nonce: str) -> None:
    """Remember that a replica's training loop knows the run's step, because it reads `inner_step` or uses `steps()`.

    One loop calls `step()` of all DiLoCos of a replica, for example if a GAN trains two models. So the note applies to
    all of them.

    Args:
        nonce: the nonce of the replica's claim.

    Example:
        note_loop_follows_run(replica.nonce)
    """
    for each in open_dilocos.of(nonce).values():
        each._loop.trust()


def open_diloco(
    model: nn.Module,
    *,
    limits: Limits | None = None,
    begun_at: int = 0,
    is_trainers: bool = False,
    make_state: Callable[..., ModelState] | None = None,
    **options: Any,
) -> DiLoCo:
    """Open a DiLoCo with internal values. This function is for other modules of this package, and for tests.

    Args:
        model: the model.
        limits: the time limits of the rendezvous. None: they follow from the options.
        begun_at: the step of the trainer at which the run began. Default 0.
        is_trainers: True if a trainer gave the total of steps, and cannot train longer. Default False.
        make_state: makes the state of the model. None: `ModelState`.
        options: the arguments of `DiLoCo`.

    Example:
        open_diloco(model, inner_steps=10, limits=Limits(grace_s=1.0))
    """
    made = DiLoCo.__new__(DiLoCo)
    made._internals = Internals(limits=limits, begun_at=begun_at, is_trainers=is_trainers, make_state=make_state)
    DiLoCo.__init__(made, model, **options)
    return made
