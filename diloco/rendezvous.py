"""One replica in a run: its steps, its rounds with the others, and how it falls in with them.

One log for all fragments: entry k = 0, 1, 2, … belongs to fragment k % P, and entries are applied in order, so a
replica's whole position is one integer. In phase, a replica meets the others when its steps are made; out of phase, it
presents itself, trains on, and looks. Plain blocking code; the clock, the waiting and the work are given, and the tests
run it under a simulated scheduler.
"""

from __future__ import annotations

from typing import Any

from diloco.loop import Loop
from diloco.parallel import Answer
from diloco.rounds import Adopted

LOOK_S, ANSWERS_PER_LOOK = 1.0, 40
"""Who is out of phase looks for the seal once a second, or as often as that costs a fortieth of its time."""
PRESENTATIONS = 3
"""How often who is out of phase sends something before it trains on: each time the seal may come meanwhile."""
FENCE_S = 10.0
"""How often who is out of phase looks for a newer attempt of its rank."""


class Rendezvous(Loop):
    """One replica's way through the log of sealed rounds."""

    _look: tuple[float, Answer[tuple[bool, bool]]] | None = None
    """A look at the open entry that is under way: when it began, and whether there is a seal, and anybody."""
    _look_steps = 0
    """Steps since then."""

    # -- beginning and leaving -------------------------------------------------------------------------------------

    def start(self, restored: tuple[int, Any] | None = None) -> None:
        """Take the state from the log, or agree on the first anchor, and catch up.

        Args:
            restored: a position of an earlier copy of this rank and the live work it had then. What no seal has
                counted since goes on with this one.
        """
        self.position = self._load(above=-1)
        if restored is None:
            self._work.restore(None)
        else:
            position, progress = restored
            self._replay(until=position)
            self.phase.is_restored = [True] * len(self._sizes)
            self._restore(progress, position)
        self._set_newest_seal()
        self.phase.begin(self.position * self._plan.steps_per_entry)
        self._fall_in_with_the_log()

    def go_back(self, position: int, base: int, since: int) -> None:
        """Continue from an earlier position, and then on to where the run is now; the work was given its state.

        Args:
            base, since: the run's step at that position, and the steps that were made since.
        """
        self.position = position
        self._round = None
        self.phase.made = [0] * len(self._sizes)
        self.phase.is_restored = [True] * len(self._sizes)
        self._set_newest_seal()
        self.phase.begin(base, since)
        self._fall_in_with_the_log()

    def _fall_in_with_the_log(self) -> None:
        """Catch up, and go on in phase, or out of it where the others are in the midst of theirs."""
        before, since = self.position, self.phase.since
        self._adopt_sealed()
        self.phase.met(self.position - before)
        self.phase.since = since
        self._fall_in()
        if not self.phase.is_out and self._me.attempt and not self._plan.is_over(self.position):
            self._note_predecessor()
        self.phase.left()

    def leave(self) -> None:
        """Adopt what is in flight, and say that nothing more is to be expected of this replica.

        Out of phase nothing is waited for: what was sent may be counted after this replica has left.
        """
        try:
            if self.phase.is_out:
                self._adopt_sealed()
            elif self.in_flight:
                self._adopt()
        finally:
            self.say_bye()

    def say_bye(self) -> None:
        """Say that nothing more is to be expected of this replica, and adopt nothing."""
        pauses = self._pauses()
        while not self._store.write(self._keys.bye(self._me.rank, self._me.attempt), b""):
            self._wait(next(pauses), ())

    # -- steps and rounds ------------------------------------------------------------------------------------------

    @property
    def inner_step(self) -> int:
        """The run's step."""
        return self.phase.inner_step

    @property
    def uncounted_steps(self) -> int:
        """How many of this process's steps are in no mean yet, in the fragment that has most."""
        return max(self.phase.made)

    def step(self) -> list[Adopted]:
        """Count an inner step, do what is due after it, and return the entries that were adopted.

        Raises:
            QuorumTimeoutError, ContributionError, DivergenceError, FencedError, AbortedError: see `DiLoCo.step`.
        """
        self.phase.step_made()
        adopted: list[Adopted] = []
        if self._plan.is_over(self.position):
            return adopted
        if self.phase.is_out and not self.phase.is_at_the_end:
            adopted = self._look_around()
        if self.phase.is_out:
            pass
        elif self.phase.is_due:
            adopted += self._meet()
        elif self.phase.is_time_to_publish(self.position):
            self._publish()
        while self.phase.is_at_the_end and not self._plan.is_over(self.position):
            adopted += self._meet()  # all planned steps are made: the rest of the plan is gone through at once
        self.phase.left()
        return adopted

    def sync(self) -> list[Adopted]:
        """Have a round of every fragment now."""
        adopted: list[Adopted] = []
        step, before, n_fragments = self.phase.inner_step, self.position, len(self._sizes)
        for _ in self._sizes:
            adopted += self._meet()
        missed = max(0, self.position - before - n_fragments)  # which the others had without us
        self.phase.synchronised(step + missed * self._plan.steps_per_entry)
        self.phase.left()
        return adopted

    def _meet(self) -> list[Adopted]:
        """Go through the due entry, and all that others went through without us."""
        self._check_fence()
        if self._plan.is_over(self.position):
            return []
        before = self.position
        self._publish()
        first = self._adopt()
        adopted = [*([] if first is None else [first]), *self._adopt_sealed()]
        self.phase.met(self.position - before)
        return adopted + self._fall_in()

    def _look_around(self) -> list[Adopted]:
        """Out of phase: look for the seal of the open entry, now and then, and adopt what is sealed."""
        r = self._current()
        now = self._clock()
        if self._look is None:
            if now - self.phase.looked_s < min(LOOK_S, ANSWERS_PER_LOOK * self._store.answer_s):
                return []
            self._look_steps = 0
            self._look = now, self._ask(lambda: (self._log.seal(r.entry) is not None, self._is_behind()))
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
        self._check_abort()
        if not r.published:
            self._present()  # a seal seemed to stand
        elif r.published_s is not None and now - r.published_s >= self._sealing.lone_s:
            if self._sealing.try_seal(r, self._means.patience_s):
                return self._catch_up()
            self._check_time(r)
        return []

    def _catch_up(self) -> list[Adopted]:
        """Adopt every entry that is sealed already, in the midst of a phase."""
        before = self.position
        adopted = self._adopt_sealed()
        self.phase.caught_up(self.position - before)
        return adopted + self._fall_in()

    def _is_behind(self) -> bool:
        """Tell whether this replica is out of phase: not named by the newest seal, while somebody named lives."""
        if self._clock() - self._fence_checked_s >= FENCE_S:
            self._check_fence()
        return not self._members.names_me and self._members.someone_lives()

    def _fall_in(self) -> list[Adopted]:
        """After entries were adopted: go on in phase, or present oneself.

        Returns: what was adopted besides, because its seal came while something was sent for it.
        """
        adopted: list[Adopted] = []
        for _ in range(PRESENTATIONS):
            self.phase.is_out = not self._plan.is_over(self.position) and self._is_behind()
            if not self.phase.is_out:
                break
            self._present()
            before = self.position
            adopted += self._adopt_sealed()
            if self.position == before:
                break
            self.phase.caught_up(self.position - before)
        return adopted

    def _present(self) -> None:
        """Send what there is for the open entry, at once, and train on."""
        self.phase.looked(self._clock())
        self._publish(early=True)

    def _adopt_sealed(self) -> list[Adopted]:
        """Adopt every entry that is sealed already."""
        adopted = []
        while self._unsealed != self.position and self._log.seal(self.position) is not None:
            if (entry := self._adopt()) is not None:
                adopted.append(entry)
        self._unsealed = -1
        return adopted
