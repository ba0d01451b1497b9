"""The rounds of one replica, apart from its training: what is done with work that is handed over.

Everything here belongs to the rounds, which may run beside the training: anchor, outer state, position, and each call
to the store. It reads no live parameter but for work that is held. What it brings about *lands*, and the training takes
it from there; until then nothing else is brought about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from diloco.rendezvous.loop import Rendezvous
from diloco.rendezvous.restore import Restored
from diloco.rendezvous.round import Context, Landing, RoundReport, Send

LOOK_S, ANSWERS_PER_LOOK = 1.0, 40
"""Out of phase, a replica looks for the seal once a second, or as often as that costs a fortieth of its time."""
FENCE_S = 10.0
"""How often a replica out of phase looks for a newer attempt of its rank."""


class Rounds:
    """Has the rounds of a replica, one job at a time.

    Args:
        land: takes what was brought about.
    """

    def __init__(self, context: Context, land: Callable[[Landing], None]) -> None:
        self.rendezvous = Rendezvous(context)
        self._context = context
        self._members = context.members
        self._phase = context.phase
        self._cursor = self.rendezvous.cursor
        self._land = land
        self._is_looking = False
        """Whether something was sent out of phase, and nothing has landed since."""
        self._look: tuple[float, int, Future[tuple[bool, bool]]] | None = None
        """A look at the open entry that is under way: when it began, at which step; whether there is a seal; whether
        this replica is behind."""

    @property
    def position(self) -> int:
        """The next entry to apply."""
        return self._cursor.position

    # -- beginning ---------------------------------------------------------------------------------------------------

    def begin(self, restored: Restored | None) -> None:
        """Take the state from the log, or agree on the first anchor, and set the live parameters by it.

        Args:
            restored: of an earlier copy of this rank. What no seal has counted since goes on with this one.
        """
        self._cursor.begin()
        if restored is None:
            self._context.training.resume(None)
        else:
            self._cursor.replay(until=restored.position)
            self._cursor.uncounted_since = list(restored.uncounted_since)
            verdicts = self._cursor.give_up_old(self._cursor.settle(restored.position), restored.progress)
            self._context.training.resume(restored.progress, verdicts)
        self._cursor.set_newest_seal()

    def go_back(self, position: int) -> None:
        """Continue from an earlier position, whose training state was loaded; nothing is looked for until then."""
        self._is_looking, self._look = False, None
        self._cursor.position = position
        self._cursor.settle_all()
        self.rendezvous.entry = None
        self._cursor.set_newest_seal()

    def join(self) -> None:
        """Adopt what is sealed, and find out whether the others are in the midst of a phase."""
        with self._landing(has_met=True) as reports:
            self.rendezvous.adopt_sealed(reports)

    # -- in phase ----------------------------------------------------------------------------------------------------

    def publish(self, send: Send) -> None:
        """Send what is held."""
        self.rendezvous.publish(send)

    def meet(self, send: Send | None) -> None:
        """Go through the open entry, and all that others went through without this replica.

        Args:
            send: what is to be sent before, unless that was done.
        """
        self._members.check_fence()
        with self._landing(has_met=True) as reports:
            if send is not None:
                self.rendezvous.publish(send)
            if (first := self.rendezvous.adopt()) is not None:
                reports.append(first)
            self.rendezvous.adopt_sealed(reports)

    # -- out of phase ------------------------------------------------------------------------------------------------

    def present(self, send: Send) -> None:
        """Send the work there is for the open entry, at once, and look for its seal from then on."""
        self._note_look(self._context.clock(), self._phase.n_steps)
        self._is_looking = True
        self.rendezvous.publish(send)
        self.catch_up()

    def idle(self) -> bool:
        """Do what there is to do while the training wants nothing; return whether there is anything."""
        if self._is_looking:
            self._context.turns.pause(self._look_pause_s, ())
            self.look()
        return self._is_looking

    def look(self) -> bool:
        """Look for the seal of the open entry, now and then; never wait. Return whether something has landed."""
        context, rendezvous = self._context, self.rendezvous
        entry = rendezvous.current()
        now = context.clock()
        if self._look is None:
            if now - self._phase.looked_s < self._look_pause_s:
                return False
            answer = context.ask(lambda: (rendezvous.seals.is_sealed(entry.index), self._is_behind()))
            self._look = now, self._phase.n_steps, answer
        began_s, at_step, answer = self._look
        if not answer.done():
            return False
        self._look = None
        is_sealed, is_behind = answer.result()
        if is_sealed:
            return self.catch_up()
        self._note_look(began_s, at_step)
        context.members.check_abort()
        if not is_behind or not entry.published:  # it is in phase again, or a seal only seemed to exist
            self._bring([], 0, is_out=is_behind)
            return True
        if entry.published_s is not None and now - entry.published_s >= rendezvous.sealer.lone_s:
            if rendezvous.sealer.try_seal(entry, rendezvous.reducer.takeover_after_s):
                return self.catch_up()
            rendezvous.sealer.check_time(entry)
        return False

    def catch_up(self) -> bool:
        """Adopt every entry that is sealed already, in the midst of a phase; return whether something has landed."""
        with self._landing(has_met=False) as reports:
            self.rendezvous.adopt_sealed(reports)
        return not self._is_looking

    # -- inside ------------------------------------------------------------------------------------------------------

    @property
    def _look_pause_s(self) -> float:
        return min(LOOK_S, ANSWERS_PER_LOOK * self._context.store.answer_s)

    def _note_look(self, at_s: float, at_step: int) -> None:
        self._phase.looked(at_s, at_step, is_beside=self._context.turns.is_beside)

    def _is_behind(self) -> bool:
        """Return whether this replica is out of phase: not named by the newest seal, while a named process lives."""
        if self._context.clock() - self._members.fence_checked_s >= FENCE_S:
            self._members.check_fence()
        return not self._members.names_me and self._members.someone_lives()

    @contextmanager
    def _landing(self, *, has_met: bool) -> Iterator[list[RoundReport]]:
        """Let land what is adopted inside, also where an error ends it."""
        before = self.position
        reports: list[RoundReport] = []
        try:
            yield reports
        except BaseException:
            if self.position != before:
                self._bring(reports, self.position - before, is_out=self._phase.is_out, has_met=has_met)
            raise
        if has_met or self.position != before or self._cursor.is_reloaded:
            is_over = self._context.plan.is_over(self.position)
            is_out = not is_over and self._is_behind()
            self._bring(reports, self.position - before, is_out=is_out, has_met=has_met)

    def _bring(self, reports: list[RoundReport], n_entries: int, *, is_out: bool, has_met: bool = False) -> None:
        """Hand over what was brought about."""
        phase, cursor = self._phase, self._cursor
        if has_met:
            phase.head_start_s = 0.0
        elif n_entries:
            phase.head_start_s = max(0.0, self._context.clock() - phase.ahead_from_s)
        phase.is_out = is_out
        is_plain = has_met and n_entries == 1 and len(cursor.settlements) == 1
        landing = Landing(
            reports=tuple(reports),
            settlements=tuple(cursor.settlements),
            n_entries=n_entries,
            is_out=is_out,
            has_met=has_met,
            looked_step=phase.looked_step,
            looked_s=phase.looked_s,
            landed_s=self._context.clock(),
            is_urgent=is_out or cursor.is_reloaded or not is_plain,
        )
        cursor.settlements, cursor.is_reloaded, self._is_looking = [], False, False
        self._context.training.land()
        self._land(landing)
