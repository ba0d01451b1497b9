"""Saves attached state, and the buffers that only this replica has, after rounds."""

from __future__ import annotations

from collections.abc import Callable

from diloco.attached_state import AttachedState
from diloco.model_state import ModelState
from diloco.rendezvous.membership import Membership
from diloco.rendezvous.training_side import TrainingSide
from diloco.unshared_state import LATER_BYTES, UnsharedStateWriter


class StateSaver:
    """Saves the attached state of a replica, and the buffers that only this replica has.

    Args:
        attached: the attached state.
        rest: writes the buffers for readers of the run. None: no process reads them.
        training_side: has the position and the live work.
        model_state: has the buffers.
        members: decides which replica writes the buffers.
        inner_step: returns the run's step.

    Example:
        saver = StateSaver(attached, rest, training_side, model_state, members, lambda: 100)
        saver.save_if_due()
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
        """Entries from one snapshot to the next. The buffers are saved once in each such period."""
        self.period = training_side.position // self.entries_per_period
        """The period in which the buffers were saved last."""

    def save_if_due(self) -> None:
        """Save attached state, if that is due. Call it after a merge, and before more work is sent."""
        position = self._training_side.position
        if self._attached.things and self._attached.schedule.is_due(position):
            self._attached.follow(self._inner_step(), self._training_side.phase.n_steps)
            self.save_attached()

    def save_attached(self) -> None:
        """Save attached state together with the live work. No round may be in flight."""
        side, state = self._training_side, self._model_state
        with self._attached.schedule.keeping(side.position):
            # Right after a round that counted all work, the live parameters equal the anchor. A comparison would take
            # as long as the copies, so the caller passes that as an argument.
            is_anchor = side.phase.has_no_work and state.leaves_no_work
            progress = [] if is_anchor else side.run_in_round_thread(state.progress)
            since = side.runner.account.uncounted_since
            self._attached.keep(side.position, progress, since, state.local_buffers.changed())

    def begin_period(self) -> None:
        """Save the buffers in a new period."""
        self.period = self._training_side.position // self.entries_per_period
        self.save_unshared()

    def save_unshared(self) -> None:
        """Save the buffers that only this replica has, for readers of the run. Only the first member of the run does
        so.
        """
        if self._rest is not None and self._members.is_first_member:
            self._rest.keep(self._training_side.position, self._model_state.local_buffers.changed(), LATER_BYTES)
