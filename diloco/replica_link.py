"""The link from a DiLoCo to its replica: reports, marks of progress, and the request to leave."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any
from weakref import WeakValueDictionary

from diloco.errors import DiLoCoError
from diloco.rendezvous.round import RoundReport
from executors.replica import Replica
from executors.store.standstill import Standstill

LEAVING = 143
"""The exit code of a replica that left because it was asked to, as after SIGTERM."""


is_open: WeakValueDictionary[tuple[str, str], object] = WeakValueDictionary()
"""What is open in this process, by nonce and name: two of one name would be taken for one model."""
planned: dict[str, int] = {}
"""By nonce, the steps that a replica shows because a DiLoCo planned them: any others are the script's own."""
finished: set[tuple[str, str]] = set()
"""The names of those in `is_open` that have made all their planned steps."""


def check_is_free(name: tuple[str, str]) -> None:
    """Raises: DiLoCoError: there is one of this name."""
    if name in is_open:
        raise DiLoCoError(
            f"A DiLoCo named {name[1]!r} is open in this replica already. Give this one another name: "
            "DiLoCo(model, name=…)."
        )


def leave_all(nonce: str, leave: Callable[[Any], None]) -> None:
    """Let each that is open in a replica leave it, also where one of them cannot, and end the process."""
    with ExitStack() as leaving:
        for diloco in [each for (other, _), each in is_open.items() if other == nonce]:
            leaving.callback(leave, diloco)
    raise SystemExit(LEAVING)


class ReplicaLink:
    """Passes the reports and marks of one DiLoCo to its replica. Does nothing in a process that is not a replica.

    Args:
        replica: the replica of this process; None if this process is not a replica.
        name: the name of the DiLoCo.

    Raises:
        ValueError: the name is not a word.

    Example:
        link = ReplicaLink(find_replica(), "main")
    """

    def __init__(self, replica: Replica | None, name: str) -> None:
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name:
            raise ValueError(f"name must be a word without '/', as in 'main', got name={name!r}.")
        self._replica = replica
        self._name = name
        self._nonce = ""
        self._is_shown = False
        self._begun_at = 0

    def plan(self, total_steps: int | None, nonce: str, begun_at: int = 0) -> None:
        """Tell the replica that this DiLoCo is open, and how many steps are planned.

        If several DiLoCos are open in a replica, the replica shows the first one.

        Args:
            total_steps: planned steps after `begun_at`; None if not known.
            nonce: of the replica's claim.
            begun_at: the step of the trainer at which the run began.

        Example:
            link.plan(1000, replica.nonce)
        """
        self._nonce, self._begun_at = nonce, begun_at
        total_steps = None if total_steps is None else begun_at + total_steps
        finished.discard((nonce, self._name))
        if self._replica is not None:
            self._replica.open_training()
        self._is_shown = self._replica is not None and all(nonce != other for other, _ in is_open)
        if self._replica is not None and self._is_shown:
            reported = self._replica.reported
            if nonce in planned and reported.get("total_steps") == planned.pop(nonce):
                del reported["total_steps"]  # of one before
            if total_steps is not None:
                reported["total_steps"] = planned[nonce] = total_steps

    def replan(self, total_steps: int | None) -> None:
        """Tell the replica that more steps are planned than before.

        Args:
            total_steps: planned steps of the whole run; None if rounds go by the clock.

        Example:
            link.replan(2000)
        """
        finished.discard((self._nonce, self._name))
        if self._replica is not None and self._is_shown and total_steps is not None:
            self._replica.reported["total_steps"] = planned[self._nonce] = self._begun_at + total_steps
        self.progress()

    def show(self, rounds: int, round_s: float) -> None:
        """Report how many rounds there were; nothing before the first: whoever reads it knows that there was none."""
        if self._replica is not None and self._is_shown and rounds:
            self._replica.reported.update(round=rounds, round_s=round(round_s, 3))

    def show_step(self, step: int) -> None:
        """Report the step that the run is at, as the live table shows it.

        Args:
            step: counted from the begin of the run.
        """
        if self._is_shown and self._replica is not None:
            self._replica.count_step(self._begun_at + step)

    def stand_still(self, found: Standstill | None) -> None:
        """Pass on which round waits until the user deletes an object, for `status` and the page.

        Args:
            found: the standstill. None: the rounds continue.

        Example:
            link.stand_still(None)
        """
        if self._replica is not None and self._replica.warnings is not None:
            self._replica.warnings.stand_still(found)

    def record(self, reports: Sequence[RoundReport]) -> None:
        """Keep what rounds were with the run."""
        for report in reports:
            if self._replica is not None:
                self._replica.record_round(report.ended, name=self._name, **report.line())

    def record_left(self, work: float) -> None:
        """Record how much work is in no round when the DiLoCo is closed, and that it owes no more progress.

        Args:
            work: in steps.

        Example:
            link.record_left(2.0)
        """
        if self._replica is not None:
            self._replica.record_left(name=self._name, work=work)
        finished.discard((self._nonce, self._name))
        self._finish_if_last()

    def note_step(self, step: float, total_steps: float | None) -> None:
        """Note how far the training is: behind its last planned step it owes no more progress.

        A final evaluation, a save or an upload follows then, often before `close()`.

        Args:
            step: the run's step.
            total_steps: the step at which the training ends; None if that is not planned.

        Example:
            link.note_step(1000, 1000)
        """
        if self._replica is not None and total_steps is not None and step >= total_steps:
            finished.add((self._nonce, self._name))
            self._finish_if_last()

    def found_over(self) -> None:
        """Note that this attempt of the replica began after the last round, so that its errors can be explained.

        Example:
            link.found_over()
        """
        if self._replica is not None:
            self._replica.began_after_the_end = True

    @property
    def is_of_replica(self) -> bool:
        """Whether this process is a replica."""
        return self._replica is not None

    def look_at_end(self, look: Callable[[], None]) -> None:
        """Let the replica call something when its script has ended.

        Args:
            look: a function without arguments.

        Example:
            link.look_at_end(at_end.look)
        """
        if self._replica is not None:
            self._replica.at_end.append(look)

    def note_own_model(self, mark: float) -> None:
        """Note that the script has changed the model after this DiLoCo was closed.

        Args:
            mark: a number that stands for the changed model: the same on replicas with the same model.

        Example:
            link.note_own_model(0.25)
        """
        if self._replica is not None:
            self._replica.own_models[self._name] = mark

    def _finish_if_last(self) -> None:
        """Tell the replica that its training is finished, unless another DiLoCo still trains."""
        if self._replica is not None and all(key in finished for key in is_open if key[0] == self._nonce):
            self._replica.finish_training()

    def progress(self) -> None:
        """Mark progress: the training continues."""
        if self._replica is not None:
            self._replica.progress()

    def waiting(self, section: str) -> AbstractContextManager[None]:
        """Return a section in which this replica waits for the others: their limits count, not those of its steps."""
        return nullcontext() if self._replica is None else self._replica.section(section, math.inf)

    def is_to_leave(self, *, after_round: bool) -> bool:
        """Tell whether the training ends here: because the machine goes, or a person asked for it and a round is over.

        What is in no round then goes on with the next attempt.
        """
        return self._replica is not None and self._replica.is_to_leave(after_round=after_round)
