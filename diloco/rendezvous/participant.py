"""One replica's part in a run: it counts its steps, meets the others when they are due, and comes and goes.

One log for all fragments: entry k = 0, 1, 2, … belongs to fragment k % P, and entries are applied in order, so a
replica's whole position is one integer. In phase, a replica meets the others when its steps are made; out of phase, it
presents itself, trains on, and looks for the seal. Plain blocking code; the clock, the waiting and the training state
are given, and the tests run it under a simulated scheduler.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from diloco.rendezvous.loop import Rendezvous
from diloco.rendezvous.round import Context, RoundReport

LOOK_S, ANSWERS_PER_LOOK = 1.0, 40
"""Out of phase, a replica looks for the seal once a second, or as often as that costs a fortieth of its time."""
PRESENTATIONS = 3
"""How often a replica out of phase sends something before it trains on: each time the seal may come meanwhile."""
FENCE_S = 10.0
"""How often a replica out of phase looks for a newer attempt of its rank."""


class Participant:
    """One replica's way through a run."""

    def __init__(self, context: Context) -> None:
        self.phase = context.phase
        self._context = context
        self._members = context.members
        self._plan = context.plan
        self._rendezvous = Rendezvous(context)
        self._cursor = self._rendezvous.cursor
        self._n_fragments = len(context.layouts)
        self._look: tuple[float, Future[tuple[bool, bool]]] | None = None
        """A look at the open entry that is under way: when it began; whether there is a seal; whether one is behind."""
        self._look_steps = 0
        """Steps since then."""

    @property
    def position(self) -> int:
        """The next entry to apply: the number of fragment rounds so far."""
        return self._cursor.position

    # -- beginning and leaving -------------------------------------------------------------------------------------

    def start(self, restored: tuple[int, Any] | None = None) -> None:
        """Take the state from the log, or agree on the first anchor, and catch up.

        Args:
            restored: a position of an earlier copy of this rank and the live work it had then. What no seal has
                counted since goes on with this one.
        """
        self._cursor.begin()
        if restored is None:
            self._context.training.restore(None)
        else:
            position, progress = restored
            self._cursor.replay(until=position)
            self.phase.is_restored = [True] * self._n_fragments
            self._cursor.restore(progress, position)
        self._cursor.set_newest_seal()
        self.phase.begin(self._plan.step_before(self.position))
        self._join_the_others()

    def go_back(self, position: int, base: int, since: int) -> None:
        """Continue from an earlier position, whose training state was loaded, and then on to where the run is now.

        Args:
            base, since: the run's step at that position, and the steps that were made since.
        """
        self._cursor.position = position
        self._rendezvous.entry = None
        self.phase.made = [0] * self._n_fragments
        self.phase.is_restored = [True] * self._n_fragments
        self._cursor.set_newest_seal()
        self.phase.begin(base, since)
        self._join_the_others()

    def _join_the_others(self) -> None:
        """Catch up, and go on in phase, or out of it where the others are in the midst of theirs."""
        before, since = self.position, self.phase.since
        self._rendezvous.adopt_sealed()
        self.phase.met(self.position - before)
        self.phase.since = since
        self._fall_in()
        if not self.phase.is_out and self._context.me.attempt and not self._plan.is_over(self.position):
            self._rendezvous.note_predecessor()
        self.phase.left()

    @property
    def undecided(self) -> float:
        """How much work no seal has decided on."""
        return self._rendezvous.undecided

    def leave(self) -> list[RoundReport]:
        """Adopt what is in flight, and say that this replica sends nothing more.

        Out of phase nothing is waited for: what was sent may be counted after this replica has left.
        """
        try:
            if self.phase.is_out:
                return self._rendezvous.adopt_sealed()
            report = self._rendezvous.adopt() if self._rendezvous.in_flight else None
            return [] if report is None else [report]
        finally:
            self.say_bye()

    def say_bye(self) -> None:
        """Say that this replica sends nothing more, and adopt nothing; nowhere if the run was deleted."""
        context, pauses = self._context, self._context.pauses()
        while not self._members.is_deleted and not context.store.write(
            context.keys.bye(context.me.rank, context.me.attempt), b""
        ):
            context.wait(next(pauses), ())

    # -- steps and rounds ------------------------------------------------------------------------------------------

    def step(self) -> list[RoundReport]:
        """Count an inner step, do what is due after it, and report the entries that were adopted.

        Raises:
            QuorumTimeoutError, ContributionError, DivergenceError, FencedError, AbortedError: see `DiLoCo.step`.
        """
        self.phase.step_made()
        if self._members.missing_looks:
            self._members.check_run()
        reports: list[RoundReport] = []
        if self._plan.is_over(self.position):
            return reports
        if self.phase.is_out and not self.phase.is_at_the_end:
            reports = self._look_around()
        if self.phase.is_out:
            pass
        elif self.phase.is_due:
            reports += self._meet()
        elif self.phase.is_time_to_publish(self.position):
            self._rendezvous.publish()
        while self.phase.is_at_the_end and not self._plan.is_over(self.position):
            reports += self._meet()  # all planned steps are made: the rest of the plan is gone through at once
        self.phase.left()
        return reports

    def sync(self) -> list[RoundReport]:
        """Have a round of every fragment now."""
        self.phase.called()
        reports: list[RoundReport] = []
        step, before = self.phase.inner_step, self.position
        for _ in range(self._n_fragments):
            reports += self._meet()
        missed = max(0, self.position - before - self._n_fragments)  # which the others had without this replica
        self.phase.synchronised(step + missed * self._plan.steps_per_entry)
        self.phase.left()
        return reports

    def _meet(self) -> list[RoundReport]:
        """Go through the due entry, and all that others went through without this replica."""
        self._members.check_fence()
        if self._plan.is_over(self.position):
            return []
        before = self.position
        self._rendezvous.publish()
        first = self._rendezvous.adopt()
        reports = [*([] if first is None else [first]), *self._rendezvous.adopt_sealed()]
        self.phase.met(self.position - before)
        return reports + self._fall_in()

    # -- out of phase ----------------------------------------------------------------------------------------------

    def _look_around(self) -> list[RoundReport]:
        """Look for the seal of the open entry, now and then, and adopt what is sealed."""
        context, rendezvous = self._context, self._rendezvous
        entry = rendezvous.current()
        now = context.clock()
        if self._look is None:
            if now - self.phase.looked_s < min(LOOK_S, ANSWERS_PER_LOOK * context.store.answer_s):
                return []
            self._look_steps = 0
            self._look = now, context.ask(lambda: (rendezvous.seals.is_sealed(entry.index), self._is_behind()))
        began_s, answer = self._look
        if not answer.done():
            self._look_steps += 1
            return []
        self._look = None
        is_sealed, is_behind = answer.result()
        if is_sealed:
            return self._catch_up()
        self.phase.looked(began_s, self._look_steps)
        self.phase.is_out = is_behind
        context.members.check_abort()
        if not entry.published:
            self._present()  # a seal seemed to exist
        elif entry.published_s is not None and now - entry.published_s >= rendezvous.sealer.lone_s:
            if rendezvous.sealer.try_seal(entry, rendezvous.reducer.takeover_after_s):
                return self._catch_up()
            rendezvous.sealer.check_time(entry)
        return []

    def _catch_up(self) -> list[RoundReport]:
        """Adopt every entry that is sealed already, in the midst of a phase."""
        before = self.position
        reports = self._rendezvous.adopt_sealed()
        self.phase.caught_up(self.position - before)
        return reports + self._fall_in()

    def _is_behind(self) -> bool:
        """Return whether this replica is out of phase: not named by the newest seal, while a named process lives."""
        if self._context.clock() - self._members.fence_checked_s >= FENCE_S:
            self._members.check_fence()
        return not self._members.names_me and self._members.someone_lives()

    def _fall_in(self) -> list[RoundReport]:
        """After entries were adopted: go on in phase, or present oneself.

        Returns: what was adopted besides, because its seal came while something was sent for it.
        """
        reports: list[RoundReport] = []
        for _ in range(PRESENTATIONS):
            self.phase.is_out = not self._plan.is_over(self.position) and self._is_behind()
            if not self.phase.is_out:
                break
            self._present()
            before = self.position
            reports += self._rendezvous.adopt_sealed()
            if self.position == before:
                break
            self.phase.caught_up(self.position - before)
        return reports

    def _present(self) -> None:
        """Send the work there is for the open entry, at once, and train on."""
        self.phase.looked(self._context.clock())
        self._rendezvous.publish(early=True)
