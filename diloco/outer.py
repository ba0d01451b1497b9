"""DiLoCo: train a model together with other replicas through nothing but a store.

Each replica trains alone for `inner_steps` steps, then all average how far they have come and step the *anchor*, the
parameters they share, along that average (Douillard et al., 2311.08105). With several fragments the model is
synchronised a part at a time, staggered, and a part may travel while training goes on (Streaming DiLoCo, 2501.18512).

`rendezvous/training_side.py` counts steps and merges, `rendezvous/round_runner.py` runs the rounds, and
`model_state.py` holds the anchor.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any, Literal, Self

from torch import Tensor, nn

from diloco.attached_state import AttachedState
from diloco.duplicate_work import DuplicateWorkCheck, SameDataMode
from diloco.errors import DiLoCoError
from diloco.extra_tensors import ExtraTensors, ExtraTensorsModule, addresses_of
from diloco.final_model_check import FinalModelCheck, forget
from diloco.fragments import FragmentSpec, check_sizes, plan_fragments
from diloco.model_state import ModelState
from diloco.optimizer_history import OptimizerHistory
from diloco.outer_optimizer import OptimizerFactory
from diloco.process_check import check_is_one_process, not_the_opener
from diloco.rendezvous.envelope import proof_of
from diloco.rendezvous.extension import Extension, total_of_start
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.membership import find_location
from diloco.rendezvous.retrying_store import RetryingStore
from diloco.rendezvous.round import Context, Limits, RoundReport
from diloco.rendezvous.training_side import TrainingSide
from diloco.replica_link import ReplicaLink, check_is_free, is_open, leave_all
from diloco.save_schedule import SaveSchedule
from diloco.settings import Settings, check_wires
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


# More than 20 methods: 17 are the interface for users. `RoundScope` and `StateSaver` do what surrounds a round.
class DiLoCo:
    """Keeps a model in step with those of the other replicas of a run.

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

    The constructor blocks until all agree on the first anchor, which replaces the model's parameters: the first
    replica to publish its own wins. From then on every replica's anchor is the same, bit for bit, after every round.
    The inner optimizer, its learning rate schedule and the gradients stay local and are never touched. A replica that
    dies costs the others `grace_s`, at most, once. One that comes back, joins or was late is *out of phase*: it sends
    its work at once, waits for nobody, and is in phase again after the next round; its work is not lost.

    Args:
        model: any module that is not sharded, as by FSDP. Its trainable parameters are shared, by name. Prefixes that
            `torch.compile` or DistributedDataParallel add are not part of a name. The anchor is float32 on the CPU.
        inner_steps: calls of `step()` from one round of a fragment to the next; a multiple of the fragments. None: 500.
        round_seconds: rounds by the clock instead, for replicas of unlike speeds: a fragment's round is due so long
            after its last one, and work weighs as many steps as it is made of. Train until `progress` is 1.
        outer_optimizer: from a list of parameters to a `torch.optim.Optimizer`, taken as it is. The default is
            Nesterov SGD with `outer_lr`, `outer_momentum`, the ramp and the final average.
        outer_lr: learning rate of the default outer optimizer, at least 0. If it and `outer_momentum` are None: 1.0 in
            plans of up to 1000 `total_steps` (the last round begins before step 1000). With a momentum of 0.5, it ended
            with less loss than one replica alone in all 55 measured plans. Else 0.7, as in the paper. In short plans of
            at least 20 rounds, 0.7 with a momentum of 0.8 measured better on average.
        outer_momentum: Nesterov momentum of the default outer optimizer, at least 0 and below 1. If it and `outer_lr`
            are None: 0.5 in plans of up to 1000 `total_steps`, else 0.9, as in the paper. If you give one of the two,
            the other is the paper's. The table is docs/results/outer_settings.md.
        momentum_warmup: rounds over which the outer momentum grows to its value; "auto": half of the planned ones.
        final_average: let each fragment's last planned round be a plain average. Default True. It needs a total.
            Without it, the running statistics of a BatchNorm do not fit the parameters, and the constructor warns.
        total_steps: planned inner steps of the run, the same for all. Every fragment has its last round at the last of
            them, so that every step is in an average and all replicas end with one model. Without a total the momentum
            grows over 40 rounds: a shorter run has little of it.
        total_rounds: planned rounds of a fragment and one more at the end, with `round_seconds`; else as `total_steps`.
        fragments: how many parts, or lists of modules or names; one has its round every inner_steps / fragments.
        background: have rounds in a thread beside the training; "auto": where `overlap_steps` is not 0. An error in one
            is raised by the next `step()`. May differ between replicas, as the next three.
        overlap_steps: steps between sending a fragment and applying its mean, after which `step()` waits for it.
            "auto": it is applied at the first `step()` after it has come, before the next is sent at the latest; live
            parameters then depend on the store's speed, too. Anchors never do.
        overlap_seconds: the same, with `round_seconds`.
        merge: "anchor": a mean replaces live values, and what was done since sending is lost, but for `mix`. "carry":
            they move with the anchor and keep it.
        mix: share of the live value that is kept when a mean is applied; with merge="anchor".
        wire: how contributions travel: "fp32", "bf16", or whole numbers with a scale for each group of them: "int8" in
            a quarter of fp32's bytes, "int4" in an eighth. What a wire leaves out goes with the next contribution.
        mean_wire: how means travel; None: as contributions do, but "int8" where those are "int4".
        late: what becomes of work that came too late for its round: "carry" it to the next, or "drop" it. Out of
            phase, "drop" also drops steps made after something was sent, unless that is counted.
        carry_rounds: uncounted work older than so many rounds of its fragment is given up, with a warning; None: never.
        min_quorum: contributions without which no round is decided, as far as so many replicas are left.
        grace_s: how long to wait, at most, for a replica of the last round that is not known to have ended, from when
            the first of them waits. Less, down to a quarter, when replicas use to arrive close to each other; at least
            a twentieth of the time between two rounds.
        round_timeout_s: longest time, in seconds, that a round may take. After it `QuorumTimeoutError` is raised. A
            replica that sees no member of the last round waits for two more phases before that. A store that fails,
            a directory or a bucket, is waited for as long; then its own error is raised. Default 1800.
        weight: of this replica's work in the mean, relative to the others'; a number, or a callable that is asked at
            each contribution, as for the tokens it is made of. A number is scaled where work of fewer than
            `inner_steps` is sent; with `round_seconds` it is the weight of one step.
        sync_buffers: average float buffers too, as a BatchNorm's statistics; each merge takes the anchor's. None: but
            for a wire of int8 or int4, too coarse for them, with a warning. Integer buffers stay each replica's own.
            Before the final average, a BatchNorm's statistics do not fit the anchor. To evaluate it earlier, compute
            them again with `torch.optim.swa_utils.update_bn`.
        snapshot_every: rounds between snapshots, from which later and returning replicas start.
        allow_no_rounds: let `close()` pass when there was no round: each replica has trained alone, on purpose.
        same_data: what to do when other replicas send the same work, bit for bit, three rounds in a row: they train on
            the same data, and the run gains nothing by them. The first such round is a warning.
        name: tells apart several DiLoCos of one run.
        store, run_id, rank, world_size: default to those of `current_replica()`; in a process that is no replica, as
            in `python train.py`, to a world of 1, in memory, which stderr says. rank="join": one more replica of a run
            that began with `world_size`, under the next free rank.
        key: bytes that all replicas share: only what was made with it is believed. None: that of a `signed` launch.

    Raises:
        ValueError, TypeError: an argument; nothing was written.
        ContributionError: this model, or these settings, are not the run's.
    """

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
        _limits: Limits | None = None,
        _begun_at: int = 0,
        _is_trainers: bool = False,
    ) -> None:
        place = find_location(store, run_id, rank, world_size)
        check_is_one_process(place, rank)
        self._pid = os.getpid()
        where = {"store": store, "run_id": run_id, "rank": rank, "world_size": world_size, "key": key}
        self._where: dict[str, Any] = where  # for the DiLoCos of `average_also`
        self._link = ReplicaLink(place.replica, name)
        self._limits = _limits
        limits = _limits or Limits(grace_s=grace_s, round_timeout_s=round_timeout_s)
        if place.is_alone:  # its memory is not to fill up: what a mean is made of is deleted behind the last snapshot
            snapshot_every, limits = 1, replace(limits, small_bytes=0)
        fragments_ = plan_fragments(model, fragments, sync_buffers=sync_buffers, wires=check_wires(wire, mean_wire))
        check_sizes(fragments_, wire, place.store)
        self._settings = settings = Settings.of(
            locals(), n_fragments=len(fragments_), key=place.key_of_run(key), world_size=place.world_size,
            rank=place.world_size if place.rank is None else place.rank, begun_at=_begun_at,
            begins_warm=place.begins_warm,
        )  # fmt: skip
        settings.check()
        self._plan = settings.plan
        settings.warn_of_outer_settings(model)
        self._model_state = ModelState(model, fragments_, settings, block_elements=limits.block_elements)
        proof = proof_of(settings.key)
        patience = replace(ROUND, seconds=limits.round_timeout_s)  # the group decides, and not the kind of store
        patient = RetryingStore(place.store, clock=monotonic, patience=patience, copies=proof.copies, waits=waits)
        keys = Keys(place.run_id, name, place.key_of_outcomes(key))
        me = place.identify(patient, keys, proof)
        self._name = (me.nonce, name)
        check_is_free(self._name)
        self._model_state.rank, self._model_state.is_back = me.rank, me.attempt > 0
        who, watch = f"diloco {name} of rank {me.rank}", open_watch(place.store)
        self._workers = workers = Workers(patient, watch, who, in_background=settings.in_background)
        warm_start = find_warm_start(place, patient, keys, self._model_state)
        context = Context(
            store=patient, keys=keys, me=me, training=self._model_state, plan=settings.plan,
            proof=proof, origin=place.origin, first_state=None if warm_start is None else warm_start.read,
            limits=limits, min_quorum=min_quorum or 1, weight=weight,
            snapshot_every=settings.entries_per_snapshot, carry_rounds=carry_rounds, wait=workers.scheduler.pause,
            in_background=workers.scheduler.in_background, background=workers.uploads, map=workers.map, ask=workers.ask,
            on_standstill=self._link.stand_still,
        )  # fmt: skip
        for layout in context.layouts:
            self._model_state.reserve(layout.kept_bytes(place.world_size, streams=patient.streams))
        self._attached = AttachedState(patient, keys, me, workers.uploads, settings.plan, context.proof, _begun_at)
        self._rest = None if place.is_alone else UnsharedStateWriter(patient, keys, me.rank, proof, workers.uploads)
        self._same_data = DuplicateWorkCheck(same_data, me.rank, place.replica, self._model_state.had_moved)
        self._extension = Extension(
            place.replica if place.is_of_replica else None, settings.plan, unit=settings.unit_of_total,
            per_total=settings.plan_steps_per_total, is_trainers=_is_trainers,
        )  # fmt: skip
        self._find_total = partial(total_of_start, patient, keys, settings.key)
        self._extension.look(self._find_total)
        self._members = context.members
        self._training_side = TrainingSide(context, workers.scheduler)
        self._round_s, self._closed, kept = 0.0, False, self._attached.kept
        self._find_averaged = partial(addresses_of, also := list[tuple[DiLoCo, ExtraTensorsModule]]())
        self._is_also, self._also = isinstance(model, ExtraTensorsModule), also
        forget(model)
        self._stale = StaleCopies(model, fragments_)
        self._history = OptimizerHistory(model)
        self._early = EarlyCopies(model, () if me.attempt else self._stale.names)
        self._stale.before_merge()
        with self._link.waiting("first anchor"):
            self._training_side.start(None if kept is None else kept.restored(self._model_state.sizes()))
        self._stale.after_merge("the first anchor")
        self._early.look()
        self._model_state.before_merge = self._stale.before_merge
        if context.origin is not None and kept is None:
            self._attached.take_over(context.origin, self.rounds)
        if self._rest is not None and self._training_side.runner.replayer.is_author:
            self._rest.keep(0, self._model_state.unshared.first(), FIRST_BYTES)
        self._model_state.local_buffers.give(self._attached.kept_buffers())
        self._steps_before = self._attached.step
        self._attached.begin(SaveSchedule(settings.n_fragments, settings.entries_per_snapshot, self.rounds))
        self._keeper = StateSaver(
            self._attached, self._rest, self._training_side, self._model_state, self._members, lambda: self._inner_step
        )
        self._loop = TrainingLoop(self._settings, begins_at=self._inner_step)
        self._link.plan(settings.total_of_steps, me.nonce, _begun_at)
        is_open[self._name] = self
        self._link.note_step(self._training_side.phase.run_step, settings.plan.total_steps)  # all may be done already
        if self._is_over:
            self._link.found_over()
        self._link.show(self.rounds, self._round_s)

    # -- training ----------------------------------------------------------------------------------------------------

    def step(self) -> RoundReport | None:
        """Count an inner step; when one is due, send a fragment or go through its round.

        Call it after each `optimizer.step()`. Out of phase it looks for the seal of the open round instead, now and
        then, and returns at once.

        Returns: the report of the round, if this step had one.

        Raises:
            QuorumTimeoutError: the round did not come about in `round_timeout_s`.
            ContributionError: this replica's parameters are not finite.
            DivergenceError: this replica's anchor is not the others', also after reloading it.
            FencedError: a newer attempt of this rank has begun; this one is to end.
            AbortedError, RunNotFoundError: a peer aborted the run, or it was deleted.
            DuplicateWorkError: other replicas train on the same data.
            StaleCopyError: the optimizer undid the last round, because it keeps a copy of the weights.
            SystemExit: this replica is asked to end (`Replica.ending_s`). What is attached was kept.
        """
        self._check_open()
        self._link.progress()
        self._leave_if_asked(after_round=False)
        if self._is_past_the_end("step"):
            return None
        self._loop.n_calls += 1
        if not self._loop.knows_begin:
            self._loop.tell_of_begin()
        self._stale.check(self._find_averaged)
        if self._early.found:
            self._early.warn()
        if not self._training_side.phase.n_steps and not self._members.is_alone:
            warn_of_own_averages(self._model_state.model, self._find_averaged())
        with RoundScope(self) as reports:
            reports += self._training_side.step()
        for other, _ in self._also:
            if not other._is_over:
                with RoundScope(other) as others:
                    others += other._training_side.step()
        self._leave_if_asked(after_round=bool(reports))
        return RoundReport.sum_of(reports) if reports else None

    def steps(self) -> Iterator[int]:
        """Return an iterator over the steps that this replica still has to make, for the training loop.

            for step in diloco.steps():
                loss = model(next(batches)).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                diloco.step()

        It begins at `inner_step`, which is not 0 in a resumed replica, and ends when the run has had its last planned
        round. Each value is the number of the step that the loop is about to make: 0 for the first one of the run. Call
        `step()` once for each value. A value may be larger than the previous value plus 1 if the run continued without
        this replica, or has rounds by the clock.

        A replica that is started again after the last round makes the last pass once more. Its step is undone and
        counted nowhere, so the model holds the anchor after the loop. Without this pass, the variables of the loop
        would not exist, and code after the loop that uses them would fail.

        Raises:
            DiLoCoError: no end is planned. Give DiLoCo total_steps, or total_rounds with round_seconds. While
                iterating: the loop does not call `step()`.
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
        """Ask all replicas to end the run with one of the next rounds, as for early stopping.

            if patience.is_over(held_out_loss):
                diloco.stop()  # and continue: the loop over steps() ends by itself, on every replica

        The wish travels with this replica's next contribution. The round that counts it is the last one, on all
        replicas: `is_over` is True from then on, and all end with the same model. Continue to call `step()`
        until then. A stopped run cannot continue: replicas that are resumed end at once.
        """
        self._check_open()
        self._training_side.phase.wants_to_stop = True

    def _is_past_the_end(self, call: str) -> bool:
        """Return whether the run has ended. If it has, undo what was trained since, and warn.

        Args:
            call: the name of the method that was called.
        """
        if not self._is_over:
            return False
        self._loop.called_past_the_end(call, self._inner_step)
        self._undo_step()
        return True

    def _undo_step(self) -> None:
        """Give the model, and all that is averaged besides, the anchor again. Called after the end of the run.

        Every replica ends with the anchor, and a step after the last round belongs to no round.
        """
        self._training_side.run_in_round_thread(self._model_state.take_anchor)
        for other, tensors in self._also:
            tensors.refresh()
            other._undo_step()
        self._link.note_step(self._training_side.phase.run_step, self._plan.total_steps)

    def sync(self) -> list[RoundReport]:
        """Have a round of every fragment now; all replicas must call it at the same step. Inner steps count from here.

        A fragment that is on its way has this as its round. With `total_steps` these are the next planned rounds, and
        there is none until those after them are due. By the clock the run is so much nearer to its end.

        After the end of the run there is no round: the model takes the anchor, as with `step()`, and a warning says so.
        """
        self._check_open()
        self._link.progress()
        if self._is_past_the_end("sync"):
            return []
        with RoundScope(self) as reports:
            reports += self._training_side.sync()
        for other, _ in self._also:
            if not other._is_over:
                with RoundScope(other) as others:
                    others += other._training_side.sync()
        return reports

    def attach_state(self, name: str, thing: Any, *, follow: bool = False, _lead: int | None = None) -> None:
        """Keep a state with the snapshots, so that this rank's next attempt goes on with it and the loss has no bump.

        Attach state that a later attempt of this rank needs: the inner optimizer, the learning rate schedule, the
        data's position and the random generators.

        Call this right after creating this DiLoCo. If this is a later attempt of its rank, each object gets the state
        that the earlier attempt kept. States are kept at the end of a `step()` with a round: after the first round, and
        at least once every `snapshot_every` rounds. In between they are kept as often as that costs at most 1 % of the
        time. Call `step()` last, when everything else has taken its step.

        A run goes on without a replica that is away: `inner_step` is then further than what is attached, which a line
        in the log says. Make schedules functions of `inner_step`, or of `progress`, or let them follow.

        Args:
            name: tells apart what is attached; the same in each attempt.
            thing: has `state_dict` and `load_state_dict`, or is a random generator of torch, numpy or Python. Its state
                is tensors, arrays and JSON; it is stored as safetensors and JSON, never as a pickle. An object that
                `accelerator.prepare` returned is unwrapped.
            follow: True for a learning rate schedule of torch that counts inner steps. DiLoCo then steps it to
                `inner_step`, now and at the end of each `step()`. Do not step it yourself, and attach its optimizer
                first. A schedule that counts epochs must not follow; a warning says so. Step it to the epoch as each
                epoch begins: `while schedule.last_epoch < epoch: schedule.step()`.

        Raises:
            TypeError: it is another thing, or its state is; the message names the place. It cannot follow; the message
                has the remedy. If a state later becomes something else, it is not kept, and a warning says so.
            ValueError: the name is taken, or a schedule that follows was attached before its optimizer.
        """
        self._check_open()
        self._attached.catch_up(self._inner_step, self._training_side.phase.n_steps)
        self._attached.attach(name, thing, self._inner_step, follow=follow, lead=_lead)
        self._model_state.before_hold = self._keeper.keep_if_due
        self._stale.warn_of_copies(thing, self._find_averaged())

    def average_also(self, thing: ExtraTensors) -> None:
        """Average tensors outside the model in each round, too: an EMA of the weights, or an optimizer's copies.

            ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
            diloco.average_also(ema)

        Every replica then has the same EMA after each round and after `close()`. Each value becomes its plain average
        over the replicas; the outer optimizer does not touch it. All replicas must call this in the same order, before
        their first step. It costs the same number of bytes a round as a model of that size.

        A copy that was made before `DiLoCo(model)` takes the values of the first anchor.

        Args:
            thing: a module, with its frozen parameters and its saved buffers of floats, a mapping from names to
                tensors, or a function that returns such a mapping, for tensors that are replaced by new ones.

        Raises:
            TypeError: it is none of these.
            ValueError: it has no tensor of floats.
            DiLoCoError: this replica has made a step already.
        """
        self._check_open()
        if self._training_side.phase.n_steps:
            raise DiLoCoError("average_also() must be called before the first step(): the others have none of it yet.")
        tensors = ExtraTensorsModule(thing)
        self._early.take_anchor(tensors.tensors().values())
        names = (
            "inner_steps", "round_seconds", "total_steps", "total_rounds", "wire", "mean_wire", "late", "carry_rounds",
            "min_quorum", "grace_s", "round_timeout_s", "weight", "snapshot_every",
        )  # fmt: skip
        options: dict[str, Any] = {name: getattr(self._settings, name) for name in names}
        other = DiLoCo(
            tensors, outer_lr=1.0, outer_momentum=0.0, allow_no_rounds=True, same_data="allow",
            name=f"{self._name[1]}.also{len(self._also)}", _limits=self._limits, _begun_at=self._settings.begun_at,
            **options, **self._where,
        )  # fmt: skip
        other._same_data.expect_no_moves()
        other._stale.trust()  # otherwise each of its rounds reads values that no step compares
        other._history.close()
        other._model_state.before_hold = tensors.refresh
        self._also.append((other, tensors))

    def close(self) -> None:
        """Apply what is in flight, give the model the anchor, and leave the run. Safe to call again.

        Afterwards the model holds the same values on every replica: evaluate and save it now. `close()` does not make a
        round. It warns of steps that are in no average; the model then no longer contains them. After training without
        a single round the model keeps its live values.

        Raises:
            DiLoCoError: this replica has trained, and there was no round at all.
        """
        self._close(in_order=True)

    def _close(self, *, in_order: bool) -> None:
        if self._closed or os.getpid() != self._pid:  # a forked process does not leave in place of the opener
            return
        self._closed = True
        self._stale.close()
        self._history.close()
        if in_order and self._training_side.phase.wants_to_stop and not self._is_over:
            self._loop.warn_of_early_close()
        is_open.pop(self._name, None)
        try:
            with self._link.waiting("round"):
                self._link.record(self._training_side.leave(in_order=in_order))
        finally:
            self._workers.close()
            self._link.record_left(self._training_side.scale.undecided)
        self._link.show(self.rounds, self._round_s)
        if not in_order:
            for other, _ in self._also:
                other._close(in_order=False)
        if in_order:
            phase = self._training_side.phase
            at = self.rounds if self._settings.round_seconds is not None else self._inner_step
            self._extension.check_what_was_trained(phase.n_steps, at, is_over=self._is_over)
            self._keeper.keep_rest()
            self._workers.uploads.finish()
            # Without a round, the anchor is still the first one, and only the live values contain the training.
            if self.rounds:
                self._model_state.take_anchor()
                self._look_at_end()
            if self._is_also:
                return  # the DiLoCo of the model warns of steps in no average
            for other, tensors in self._also:
                tensors.refresh()
                other._close(in_order=True)
            phase, moved, is_alone = self._training_side.phase, self._model_state.has_moved, self._members.is_alone
            uncounted = max(phase.uncounted_steps)
            if self.rounds and phase.n_steps and not is_alone and not self._is_over and not phase.wants_to_stop:
                uncounted = self._loop.warn_of_early_end(at, uncounted)
            self._settings.check_what_was_averaged(phase.n_steps, uncounted, self.rounds, moved, is_alone=is_alone)

    def _look_at_end(self) -> None:
        """Let the replica look once more at the model when the script has ended: it may have changed it by then."""
        model = self._model_state.model
        owner = model.module_of_copies if isinstance(model, ExtraTensorsModule) else model
        if owner is None or self._members.is_alone or not self._link.is_of_replica:
            return
        tensors = {
            slot.name: find_tensor(self._model_state.model, slot.name, slot.kind)
            for fragment in self._model_state.fragments
            for slot in fragment.slots
        }
        if isinstance(model, ExtraTensorsModule):  # its parameters are other objects than the tensors of the owner
            tensors = model.tensors()
        self._link.look_at_end(FinalModelCheck(owner, tensors, self._link.note_own_model).look)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(ReplicasError):  # the body's error is the one to report
            self._close(in_order=False)

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def rounds(self) -> int:
        """Fragment rounds applied so far."""
        return self._training_side.position

    @property
    def inner_step(self) -> int:
        """Inner steps so far, as the run counts them: rounds that went on without this replica included.

        With `round_seconds` they are this replica's own, with those of its earlier attempts that were kept.
        """
        note_loop_follows_run(self._name[0])
        return self._inner_step

    @property
    def is_over(self) -> bool:
        """Whether the run has had its last planned round: True for ever from then on.

        The training loop ends here; `steps()` ends by itself. False if no end is planned.
        """
        note_loop_follows_run(self._name[0])
        return self._is_over

    @property
    def progress(self) -> float:
        """How much of the planned run is over, from 0 to 1: for learning rate schedules, and to know when to end.

        Raises: DiLoCoError: nothing is planned.
        """
        if (total := self._plan.total_steps) is None:
            raise DiLoCoError("progress is a share of what is planned. Tell DiLoCo total_steps=…, or total_rounds=….")
        note_loop_follows_run(self._name[0])
        return min(1.0, self._training_side.phase.run_step / total)

    def anchor(self) -> dict[str, Tensor]:
        """Return a float32 copy of the shared parameters and buffers, by name.

            plain.load_state_dict(diloco.anchor(), strict=False)   # where model = torch.compile(plain)

        Names have no prefix of a wrapper, whether this replica's model is compiled or not.
        """
        return self._training_side.run_in_round_thread(self._model_state.anchor.by_name)

    def state_dict(self) -> dict[str, Any]:
        """Return anchor, outer state and position, to go with a checkpoint of the model in the same run.

        What is on its way is waited for and merged first: save the model's own state after this.
        """
        self._check_opener()
        taken: list[dict[str, Any]] = []
        with RoundScope(self) as reports:
            reports += self._training_side.at_rest(lambda: taken.append(self._model_state.anchor.checkpoint()))
        return {**self._training_side.phase.resume_point, "inner_step": self._inner_step, **taken[0]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a checkpoint of this run, and then on to where the run is now.

        Load the model's own state first: what it holds beyond the anchor is work that goes with the next contribution,
        unless a round has counted it since.

        Raises: ValueError: the checkpoint is not of this run and model.
        """
        self._check_open()
        with RoundScope(self) as reports:
            reports += self._training_side.drain()
        self._model_state.anchor.check_checkpoint(state, self._training_side.runner.replayer.first, self.rounds)
        self._attached.catch_up(self._inner_step, self._training_side.phase.n_steps)
        self._attached.step = state["inner_step"]
        self._steps_before = state["inner_step"] - self._training_side.phase.n_steps
        with RoundScope(self) as reports:
            reports += self._training_side.go_back(state, partial(self._model_state.anchor.load_checkpoint, state))

    # -- inside ------------------------------------------------------------------------------------------------------

    @property
    def _inner_step(self) -> int:
        phase = self._training_side.phase
        return int(phase.run_step) if self._settings.round_seconds is None else self._steps_before + phase.n_steps

    @property
    def _is_over(self) -> bool:
        return self._plan.is_over(self._training_side.position)

    def _leave_if_asked(self, *, after_round: bool) -> None:
        """Leave by `SystemExit`, with each DiLoCo of this replica, where it is asked to end."""
        if self._link.is_to_leave(after_round=after_round):
            leave_all(self._name[0], DiLoCo._keep_and_leave)

    def _keep_and_leave(self) -> None:
        """Keep what is attached, and tell the others."""
        if self._attached:
            self._link.record(self._training_side.stop())
            self._keeper.keep_attached()
        self._close(in_order=False)
        self._workers.uploads.finish()

    def _check_open(self) -> None:
        self._check_opener()
        if self._closed:
            raise DiLoCoError("This DiLoCo is closed: it has left the run.")

    def _check_opener(self) -> None:
        if os.getpid() != self._pid:
            raise not_the_opener(self._pid)


class RoundScope:
    """Surrounds a call that may run rounds: it collects their reports, and at its end passes them on.

    The end keeps attached state if that is due, and shows the round to the replica. An error ends it without that.

    Args:
        diloco: the DiLoCo whose rounds they are.

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
        # The frames between here and the user's line are counted by the warnings of `follow` and `look`.
        diloco, reports = self._diloco, self._reports
        side, plan, link, loop = diloco._training_side, diloco._plan, diloco._link, diloco._loop
        if reports:
            if diloco._is_over and plan.ended_by and not loop.has_told_of_stop:
                link.replan(diloco._settings.total_of_steps)
                loop.tell_of_stop(plan.ended_by, reports[-1].round)
            if diloco._is_over and diloco._extension.look(diloco._find_total):
                link.replan(diloco._settings.total_of_steps)
            if diloco._attached.things:
                diloco._keeper.keep_if_due()
            if side.position // diloco._keeper.entries_per_period != diloco._keeper.period:
                diloco._keeper.begin_period()
            side.phase.start_training_clock()
            log.debug("rank %s: %s", diloco._settings.rank, RoundReport.sum_of(reports))
        diloco._round_s += monotonic() - self._began_s
        if reports:
            when = f"round {reports[-1].round}"
            diloco._stale.after_merge(when)
            diloco._history.last_merge = when
            link.show(side.position, diloco._round_s)
        link.record(reports)
        link.note_step(side.phase.run_step, plan.total_steps)
        if not diloco._same_data.is_calm or any(report.same for report in reports):
            diloco._same_data.check(reports)
        step = diloco._inner_step
        link.show_step(step)
        if diloco._attached.things or diloco._attached.kept is not None:
            diloco._attached.follow(step, side.phase.n_steps)
        else:
            diloco._attached.is_behind = True


def note_loop_follows_run(nonce: str) -> None:
    """Note that the training loop of a replica knows where the run is: it asks for that, or uses `steps()`.

    One loop calls `step()` of all DiLoCos of a replica, for example if a GAN trains two models.

    Args:
        nonce: the nonce of the replica's claim.

    Example:
        note_loop_follows_run(replica.nonce)
    """
    for (other, _), each in is_open.items():
        if other == nonce and isinstance(each, DiLoCo):
            each._loop.trust()
