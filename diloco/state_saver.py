"""Keeps what a later attempt of a rank, or a reader of the run, needs beside the anchor."""

from __future__ import annotations

from collections.abc import Callable

from diloco.attached_state import AttachedState
from diloco.model_state import ModelState
from diloco.rendezvous.membership import Membership
from diloco.rendezvous.training_side import TrainingSide
from diloco.unshared_state import LATER_BYTES, UnsharedStateWriter


class StateSaver:
    """Keeps the attached state of a replica and the buffers that only this replica has.

    Args:
        attached: the attached state.
        rest: writes the buffers for readers of the run. None: nothing reads them.
        training_side: knows the position and the live work.
        model_state: has the buffers.
        members: knows which replica writes the buffers.
        inner_step: returns the run's step.

    Example:
        keeper = StateSaver(attached, rest, training_side, model_state, members, lambda: 100)
        keeper.keep_if_due()
    """

    def __init__(
        self,
        attached: AttachedState,
        rest: UnsharedStateWriter | None,
        training_side: TrainingSide,
        model_state: ModelState,
        members: Membership,
        inner_step: Callable[[], int],
    ) -> None:
        self._attached = attached
        self._rest = rest
        self._training_side = training_side
        self._model_state = model_state
        self._members = members
        self._inner_step = inner_step
        self.entries_per_period = model_state.settings.entries_per_snapshot
        """Entries from one snapshot to the next. The buffers are kept once in each such period."""
        self.period = training_side.position // self.entries_per_period
        """The period in which the buffers were kept last."""

    def keep_if_due(self) -> None:
        """Keep what is attached, if that is due. Call it after a merge, and before more work is sent."""
        position = self._training_side.position
        if self._attached.things and self._attached.schedule.is_due(position):
            self._attached.follow(self._inner_step(), self._training_side.phase.n_steps)
            self.keep_attached()

    def keep_attached(self) -> None:
        """Keep what is attached, with this replica's live work. Nothing may be in flight."""
        side, state = self._training_side, self._model_state
        with self._attached.schedule.keeping(side.position):
            # Right after a round that counted everything, the live parameters are the anchor: reading both to see that
            # takes as long as the copies.
            is_anchor = side.phase.has_no_work and state.leaves_no_work
            progress = [] if is_anchor else side.run_in_round_thread(state.progress)
            since = side.runner.account.uncounted_since
            self._attached.keep(side.position, progress, since, state.local_buffers.changed())

    def begin_period(self) -> None:
        """Keep the buffers in a new period."""
        self.period = self._training_side.position // self.entries_per_period
        self.keep_rest()

    def keep_rest(self) -> None:
        """Keep the buffers that only this replica has, for readers of the run, if this replica is the one to do so."""
        if self._rest is not None and self._members.is_first_member:
            self._rest.keep(self._training_side.position, self._model_state.local_buffers.changed(), LATER_BYTES)
