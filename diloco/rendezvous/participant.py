"""One replica's part in a run: it counts its steps, meets the others when they are due, and comes and goes.

One log for all fragments: entry k = 0, 1, 2, … belongs to fragment k % P, and entries are applied in order, so a
replica's whole position is one integer. In phase, a replica meets the others when its steps are made; out of phase, it
presents itself, trains on, and looks for the seal.

This is the training's side: it owns the live parameters, and no store. What is to be sent it holds, and hands over to
the rounds (`rounds_apart.py`); what those bring about it merges. Whether they go on beside the training is `turns.py`'s
business. Plain blocking code: the tests run both sides under a simulated scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from diloco.rendezvous.contribution import check_weight
from diloco.rendezvous.frames import MAX_WEIGHT
from diloco.rendezvous.restore import Restored
from diloco.rendezvous.round import Context, Landing, RoundReport, Send
from diloco.rendezvous.rounds_apart import Rounds

PRESENTATIONS = 3
"""How often a replica out of phase sends something before it trains on: each time the seal may come meanwhile."""
T = TypeVar("T")


class Participant:
    """One replica's way through a run."""

    def __init__(self, context: Context) -> None:
        self.phase = context.phase
        self.position = 0
        """The next entry to merge: the number of fragment rounds so far."""
        self.is_out = False
        """Whether this replica is out of phase, as far as was merged."""
        self._context = context
        self._training = context.training
        self._turns = context.turns
        self._members = context.members
        self._plan = context.plan
        self._n_fragments = len(context.layouts)
        self._rounds = Rounds(context, self._lands)
        self._turns.begin(self._rounds.idle)
        self._landed: Landing | None = None
        self._n_landed = self._n_taken = 0
        self._sent: Send | None = None
        """What was handed over for the open entry."""
        self._is_awaited = False
        """Whether the rounds go through the open entry beside the training."""
        self._work_per_step = 1.0
        """By the last answer of a callable weight."""

    # -- beginning and leaving ---------------------------------------------------------------------------------------

    def start(self, restored: Restored | None = None) -> None:
        """Take the state from the log, or agree on the first anchor, and catch up.

        Args:
            restored: what an earlier copy of this rank had. What no seal has counted since goes on with this one.
        """
        self._rounds.begin(restored)
        if restored is not None:
            self.phase.is_restored = [True] * self._n_fragments
        self.position = self._rounds.position
        self.phase.begin(self._plan.step_before(self.position), position=self.position)
        try:
            self._join_the_others()
        except BaseException:
            self._turns.leave()
            raise

    @property
    def first(self) -> int:
        """The first entry of the log: a run that goes on from another's snapshot does not begin at 0."""
        return self._rounds.rendezvous.cursor.first

    @property
    def has_begun_the_run(self) -> bool:
        """Whether the log begins with this replica's model."""
        return self._rounds.rendezvous.cursor.is_author

    @property
    def is_first_member(self) -> bool:
        """Whether this is the lowest rank that the newest seal names: one replica does what all could do."""
        seal = self._members.seal
        return seal is not None and min(seal.members) == self._context.me.rank

    @property
    def place(self) -> dict[str, Any]:
        """Where in the run this replica is: rounds, the run's step at the last of them, and the steps made since."""
        return {"rounds": self.position, "base": self.phase.base, "since": self.phase.since}

    def go_back(self, place: Mapping[str, Any], load: Callable[[], None]) -> list[RoundReport]:
        """Continue from an earlier place, and then on to where the run is now; return what was merged before.

        Args:
            load: takes the training state of that place.
        """
        position, base, since = place["rounds"], place["base"], place["since"]

        def act() -> None:
            load()
            self._rounds.go_back(position)

        reports = self.at_rest(act)
        self.position, self._sent = position, None
        self.phase.made = [0] * self._n_fragments
        self.phase.is_restored = [True] * self._n_fragments
        self.phase.begin(base, since, position=position)
        self._join_the_others()
        return reports

    def _join_the_others(self) -> None:
        """Catch up, and go on in phase, or out of it where the others are in the midst of theirs."""
        since = self.phase.since
        self.apart(self._rounds.join)
        self._take()
        self.phase.go_on(since)
        may_be_sent = not self.is_out and bool(self._context.me.attempt) and not self._plan.is_over(self.position)
        if may_be_sent and self.apart(self._rounds.rendezvous.has_predecessor):
            self._rounds.rendezvous.current().send = self._hold(is_early=True)  # the rounds do nothing until then
        self.phase.left()

    @property
    def undecided(self) -> float:
        """How much work no seal has decided on, in the unit of `RoundReport.work`: the mean over all fragments."""
        made = self.phase.made
        return sum(made) / len(made) * self._work_per_step

    @property
    def has_no_work(self) -> bool:
        """Whether no step of this replica is uncounted, and no work of an earlier attempt either."""
        return not any(self.phase.made) and not any(self.phase.is_restored)

    @property
    def is_alone(self) -> bool:
        """Whether one replica was launched, and no other is in the newest seal."""
        me, seal = self._context.me, self._members.seal
        return me.world_size == 1 and (seal is None or seal.members.keys() <= {me.rank})

    @property
    def uncounted_since(self) -> list[int]:
        """By fragment, the entry at which the work began that no seal has counted."""
        return self._rounds.rendezvous.cursor.uncounted_since

    def leave(self, *, in_order: bool = True) -> list[RoundReport]:
        """Merge what has landed, and say that this replica sends nothing more.

        Args:
            in_order: wait for what is in flight; but not out of phase: what was sent may be counted after this replica
                has left.
        """
        try:
            if in_order:
                self._finish()
            reports = self.stop()
            if in_order:
                self._turns.check()  # an error may have come right behind what landed last
            return reports
        finally:
            self.say_bye()

    def _finish(self) -> None:
        """Let land what is in flight."""
        if not self._turns.check():
            return
        if self.is_out:
            self.apart(self._unless_landed(self._rounds.catch_up))
        elif self._is_awaited:
            self._turns.until(self._has_landed)
        elif not self._has_landed() and self._rounds.rendezvous.in_flight:
            self.apart(partial(self._rounds.meet, None))

    def say_bye(self) -> None:
        """Say that this replica sends nothing more; nowhere if the run was deleted."""
        context, pauses = self._context, self._context.pauses()
        self._turns.leave()
        while not self._members.is_deleted and not context.store.write(
            context.keys.bye(context.me.rank, context.me.attempt), b""
        ):
            self._turns.wait(next(pauses), ())

    # -- steps and rounds --------------------------------------------------------------------------------------------

    def step(self) -> list[RoundReport]:
        """Count an inner step, do what is due after it, and report the entries that were merged.

        Raises:
            QuorumTimeoutError, ContributionError, DivergenceError, FencedError, AbortedError: see `DiLoCo.step`.
        """
        phase, plan = self.phase, self._plan
        phase.step_made()
        self._turns.check()
        reports: list[RoundReport] = []
        if (landed := self._landed) is not None and (landed.is_urgent or plan.overlap_steps is None):
            reports += self._take()
        if not self._turns.is_beside and self._members.missing_looks:
            self._members.check_run()
        if plan.is_over(self.position):
            phase.is_over = True
            return reports
        if self.is_out and not phase.is_at_the_end and not self._turns.is_beside and self._rounds.look():
            reports += self._take()
        if not self.is_out:
            reports += self._do_what_is_due()
        while phase.is_at_the_end and not plan.is_over(self.position):
            reports += self._meet()  # all planned steps are made: the rest of the plan is gone through at once
        phase.left()
        return reports

    def _do_what_is_due(self) -> list[RoundReport]:
        """Send and meet, in phase."""
        phase, reports = self.phase, list[RoundReport]()
        if self._plan.overlap_steps is None:
            is_final = self._plan.is_final(self.position)
            if phase.is_due if is_final else self._is_awaited and phase.is_next_due:
                reports += self._meet()
            if not self._is_awaited and not self.is_out and phase.is_time_to_send(self.position):
                self._send()
                reports += [] if self._is_awaited else self._take()
        elif phase.is_due:
            reports += self._meet()
        elif self._sent is None and phase.is_time_to_send(self.position):
            self._send()
        return reports

    def sync(self) -> list[RoundReport]:
        """Have a round of every fragment now."""
        self._turns.check()
        self.phase.called()
        reports: list[RoundReport] = []
        plan, step, before = self._plan, self.phase.run_step, self.position
        for _ in range(self._n_fragments):
            reports += self._meet()
        missed = max(0, self.position - before - self._n_fragments)  # which the others had without this replica
        step += missed * plan.steps_per_entry
        if plan.entry_s is not None:
            step = plan.step_before(self.position)
        self.phase.synchronised(step, step if plan.total_steps is None else plan.step_before(self.position))
        self.phase.left()
        return reports

    def apart(self, act: Callable[[], T]) -> T:
        """Have something done in the rounds' turn, while the training waits; what is in flight comes first."""
        answers: list[T] = []

        def answer() -> None:
            answers.append(act())
            self._turns.landed()

        self._turns.submit(answer)
        self._turns.until(lambda: bool(answers))
        return answers[0]

    def drain(self) -> list[RoundReport]:
        """Wait for what is on its way, and merge it."""
        if self._is_awaited:
            self._turns.until(self._has_landed)
        return self._take()

    def at_rest(self, act: Callable[[], None]) -> list[RoundReport]:
        """Have something done apart once all that the rounds have brought about is merged; return what was merged."""
        reports: list[RoundReport] = []
        is_done = False

        def act_at_rest() -> None:  # out of phase, they may have found a seal since
            nonlocal is_done
            if not self._has_landed():
                act()
                is_done = True

        while not is_done:
            reports += self.drain()
            self.apart(act_at_rest)
        return reports

    def stop(self) -> list[RoundReport]:
        """End the rounds where they stand, and merge what they have brought about."""
        self._turns.leave()
        self._is_awaited = False
        return self._merge_landed()

    def _meet(self) -> list[RoundReport]:
        """Go through the due entry, and all that others went through without this replica."""
        reports: list[RoundReport] = []
        before = self.position
        while self.position == before and not self._plan.is_over(before):
            began = self._context.clock()
            if not self._is_awaited and not self._has_landed():
                self._go_through(self._sent or self._hold(is_early=False))
            self._turns.until(self._has_landed)
            reports += self._take(late_s=self._context.clock() - began)
        return reports

    def _send(self) -> None:
        """Send what there is, before its round is due."""
        send = self._sent or self._hold(is_early=False)
        if self._turns.is_beside or self._plan.overlap_steps is None:
            self._go_through(send)
        else:
            self._turns.submit(partial(self._rounds.publish, send))

    def _go_through(self, send: Send) -> None:
        self._is_awaited = self._turns.is_beside
        self._turns.submit(self._unless_landed(partial(self._rounds.meet, send)))

    def _has_landed(self) -> bool:
        return self._landed is not None

    def _unless_landed(self, job: Callable[[], object]) -> Callable[[], None]:
        """Return a job that is done unless, out of phase, something was found just before: that is merged first."""
        n_taken = self._n_taken

        def do() -> None:
            if self._n_landed == n_taken:
                job()

        return do

    # -- what passes between the training and the rounds -------------------------------------------------------------

    def _hold(self, *, is_early: bool) -> Send:
        """Hold the live work of the fragment whose turn it is, so that it can be sent while training goes on.

        Args:
            is_early: in the midst of a phase, weighed by the steps it is made of.
        """
        self._turns.check()  # rounds that have failed do not give back what they hold
        fragment = self.position % self._n_fragments
        weight = self._early_weight(fragment) if is_early else self._weight_of(fragment)
        steps = self.phase.made[fragment]
        work = float(steps) if weight else 0.0
        if callable(self._context.weight) and steps and weight:
            work, self._work_per_step = weight, weight / steps
        self._training.hold(fragment, is_early=is_early)
        self.phase.held()
        self._sent = Send(self.position, weight, steps, work, self.phase.n_steps, is_early)
        return self._sent

    def _weight(self, *, may_be_zero: bool = False) -> float:
        return check_weight(self._context.weight, self._context.me.rank, self.position, may_be_zero=may_be_zero)

    def _weight_of(self, fragment: int) -> float:
        """Weigh work by the steps that it is made of, where replicas make unlike numbers of them."""
        weight = self._weight()
        if self._plan.entry_s is None or callable(self._context.weight):
            return weight
        return min(weight * self.phase.made[fragment], MAX_WEIGHT)

    def _early_weight(self, fragment: int) -> float:
        """Weigh work of fewer steps than a phase has; 0 where there is none, or its number of steps is not known."""
        steps = self.phase.made[fragment]
        if not steps or self.phase.is_restored[fragment]:
            return 0.0
        if callable(self._context.weight):
            return self._weight(may_be_zero=True)
        if self._plan.entry_s is not None:
            return self._weight_of(fragment)
        return self._weight() * min(1.0, steps / self._plan.inner_steps)

    def _lands(self, landing: Landing) -> None:
        """Called by the rounds, which wait from then on."""
        assert self._landed is None
        self._n_landed += 1
        self._landed = landing
        self._turns.landed()

    def _take(self, late_s: float = 0.0) -> list[RoundReport]:
        """Merge what has landed; out of phase, present oneself, and merge what came meanwhile."""
        reports: list[RoundReport] = []
        for presented in range(PRESENTATIONS + 1):
            if self._landed is None:
                break
            reports += self._merge_landed(0.0 if presented else late_s)
            is_beside, is_last = self._turns.is_beside, presented == PRESENTATIONS
            if self._plan.is_over(self.position) or not self.is_out or (is_last and not is_beside):
                break  # in turn, the next step looks again
            self._turns.submit(partial(self._rounds.present, self._sent or self._hold(is_early=True)))
            if is_beside and (is_last or not self.phase.has_one_step):
                break
            self.apart(lambda: None)  # a step later the next seal would have come without this replica
        return reports

    def _merge_landed(self, late_s: float = 0.0) -> list[RoundReport]:
        """Take what has landed into the live parameters and the account of steps."""
        landing, self._landed = self._landed, None
        if landing is None:
            return []
        self._n_taken += 1
        self._is_awaited = False
        self._training.merge()
        phase, sent = self.phase, self._sent
        made, is_restored = list(phase.made), list(phase.is_restored)
        for settled in landing.settlements:
            f, steps = settled.fragment, settled.steps
            made[f], is_restored[f] = 0 if steps is None else made[f] - steps, False
        phase.made, phase.is_restored = made, is_restored
        if landing.n_entries:
            self.position += landing.n_entries
            self._sent = None
            if landing.has_met:
                phase.met(landing.n_entries, landing.landed_s)
            else:
                phase.caught_up(landing.n_entries, landing.looked_step, landing.looked_s)
        self.is_out = landing.is_out
        trained_s = phase.tell_trained_s() if landing.reports else 0.0
        reports = []
        for report in landing.reports:
            is_mine = sent is not None and report.round == sent.entry + 1
            stale = phase.n_steps - sent.at_step if sent is not None and is_mine else 0
            reports.append(replace(report, train_s=trained_s, late_s=late_s, stale_steps=stale))
            trained_s = late_s = 0.0
        return reports
