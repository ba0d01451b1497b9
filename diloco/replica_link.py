"""Passes reports and progress from a DiLoCo to the replica of this process, and asks whether the replica must leave."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from typing import Any

from diloco.errors import DiLoCoError
from diloco.open_dilocos import open_dilocos
from diloco.rendezvous.round import RoundReport
from executors.replica import Replica
from executors.store.standstill import Standstill

LEAVING = 143
"""The exit code of a replica that left because it was asked to leave, the same as after SIGTERM."""


planned: dict[str, int] = {}
"""For each nonce, the total of steps that a DiLoCo has reported. Any other total was reported by the script itself."""
finished: set[tuple[str, str]] = set()
"""The keys of the DiLoCos in `open_dilocos` that have made all their planned steps."""


def check_is_free(name: tuple[str, str]) -> None:
    """Raise an error if this process already has an open DiLoCo of this name.

    Args:
        name: the nonce of the replica, and the name of the new DiLoCo.

    Raises:
        DiLoCoError: a DiLoCo of this name is open in this process.

    Example:
        check_is_free((replica.nonce, "main"))
    """
    if name in open_dilocos:
        raise DiLoCoError(
            f"A DiLoCo named {name[1]!r} is open in this replica already. Close it, or give this one another name: "
            "DiLoCo(model, name=…)."
        )


def leave_all(nonce: str, leave: Callable[[Any], None]) -> None:
    """Let each open DiLoCo of a replica leave the run, and then end the process.

    If a DiLoCo fails to leave, the others still leave.

    Args:
        nonce: the nonce of the replica's claim.
        leave: called with each DiLoCo.

    Raises:
        SystemExit: always, with the code `LEAVING`.

    Example:
        leave_all(replica.nonce, lambda diloco: diloco.close())
    """
    with ExitStack() as leaving:
        for diloco in open_dilocos.of(nonce).values():
            leaving.callback(leave, diloco)
    raise SystemExit(LEAVING)


def leave_after_error(nonce: str, leave: Callable[[Any], None]) -> None:
    """Let each open DiLoCo of a replica leave the run after an error, because the process stays for another attempt.

    Args:
        nonce: the nonce of the replica's claim.
        leave: called with each DiLoCo.

    Example:
        leave_after_error(replica.nonce, lambda diloco: diloco.close())
    """
    for diloco in open_dilocos.of(nonce).values():
        # The user sees the error of the attempt, and not the error of a DiLoCo that leaves because of it.
        with suppress(Exception):
            leave(diloco)
    planned.pop(nonce, None)
    finished.difference_update([key for key in finished.copy() if key[0] == nonce])


class ReplicaLink:
    """Passes the reports and the progress of one DiLoCo to its replica. Does nothing in a process that is not a
    replica.

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
            raise ValueError(f"name must be a word without '/', such as 'main', got name={name!r}.")
        self._replica = replica
        self._name = name
        self._nonce = ""
        self._is_shown = False
        self._begun_at = 0

    def plan(self, total_steps: int | None, nonce: str, begun_at: int = 0) -> None:
        """Report that this DiLoCo is open, and its planned steps.

        If several DiLoCos are open in a replica, the replica shows the steps of the first one.

        Args:
            total_steps: planned steps after `begun_at`. None: not known.
            nonce: the nonce of the replica's claim.
            begun_at: the step of the trainer at which the run began.

        Example:
            link.plan(1000, replica.nonce)
        """
        self._nonce, self._begun_at = nonce, begun_at
        total_steps = None if total_steps is None else begun_at + total_steps
        finished.discard((nonce, self._name))
        if self._replica is not None:
            self._replica.open_training()
        self._is_shown = self._replica is not None and not open_dilocos.of(nonce)
        if self._replica is not None and self._is_shown:
            reported = self._replica.reported
            if nonce in planned and reported.get("total_steps") == planned.pop(nonce):
                del reported["total_steps"]  # an earlier DiLoCo of this process has reported the total
            if total_steps is not None:
                reported["total_steps"] = planned[nonce] = total_steps

    def replan(self, total_steps: int | None) -> None:
        """Report a new total of planned steps, after an extension or a stop.

        Args:
            total_steps: planned steps of the whole run. None: rounds go by the clock.

        Example:
            link.replan(2000)
        """
        finished.discard((self._nonce, self._name))
        if self._replica is not None and self._is_shown and total_steps is not None:
            self._replica.reported["total_steps"] = planned[self._nonce] = self._begun_at + total_steps
        self.progress()

    def show(self, rounds: int, round_s: float) -> None:
        """Report the number of rounds and their time. Before the first round, nothing is reported.

        Args:
            rounds: rounds so far.
            round_s: seconds that all rounds took.

        Example:
            link.show(3, 1.5)
        """
        if self._replica is not None and self._is_shown and rounds:
            self._replica.reported.update(round=rounds, round_s=round(round_s, 3))

    def show_step(self, step: int) -> None:
        """Report the step of the run, which the live table shows.

        Args:
            step: the step, counted from the beginning of the run.

        Example:
            link.show_step(120)
        """
        if self._is_shown and self._replica is not None:
            self._replica.count_step(self._begun_at + step)

    def stand_still(self, found: Standstill | None) -> None:
        """Report a round that waits until the user deletes an object, for `replicas status` and the page.

        Args:
            found: the standstill. None: the rounds continue.

        Example:
            link.stand_still(None)
        """
        if self._replica is not None and self._replica.warnings is not None:
            self._replica.warnings.stand_still(found)

    def record(self, reports: Sequence[RoundReport]) -> None:
        """Store the reports of rounds with the run.

        Args:
            reports: the reports, in the order of the rounds.

        Example:
            link.record(diloco.sync())
        """
        for report in reports:
            if self._replica is not None:
                self._replica.record_round(report.ended, name=self._name, **report.line())

    def record_uncounted(self, work: float) -> None:
        """Record the work that no round has counted, when the DiLoCo is closed. From then on, the watchdog expects no
        progress of this DiLoCo.

        Args:
            work: the work in steps.

        Example:
            link.record_uncounted(2.0)
        """
        if self._replica is not None:
            self._replica.record_left(name=self._name, work=work)
        finished.discard((self._nonce, self._name))
        self._finish_if_last()

    def note_step(self, step: float, total_steps: float | None) -> None:
        """Record the training's step. After the last planned step, the watchdog expects no progress of this DiLoCo.

        A final evaluation, a save or an upload often follows before `close()`. The watchdog must not end the replica
        during these.

        Args:
            step: the run's step.
            total_steps: the step at which training ends. None: no end is planned.

        Example:
            link.note_step(1000, 1000)
        """
        if self._replica is not None and total_steps is not None and step >= total_steps:
            finished.add((self._nonce, self._name))
            self._finish_if_last()

    def note_began_after_end(self) -> None:
        """Record that this attempt began after the run's last round, so that messages can explain an error of the
        script.

        Example:
            link.note_began_after_end()
        """
        if self._replica is not None:
            self._replica.began_after_the_end = True

    @property
    def is_of_replica(self) -> bool:
        """True if this process is a replica."""
        return self._replica is not None

    def call_at_end(self, look: Callable[[], None]) -> None:
        """Let the replica call a function when its script has ended.

        Args:
            look: a function without parameters.

        Example:
            link.call_at_end(check.look)
        """
        if self._replica is not None:
            self._replica.at_end.append(look)

    def call_after_failure(self, leave: Callable[[Any], None], finish: Callable[[], None]) -> None:
        """Let the replica close its DiLoCos when the script has failed and the process stays for another attempt.

        Args:
            leave: called with each DiLoCo that is still open.
            finish: called after that. It ends threads that would outlive their DiLoCo.

        Example:
            link.call_after_failure(DiLoCo._leave_after_error, workers.uploads.finish)
        """
        if self._replica is not None:
            # The replica calls the last function first.
            self._replica.at_failure += [finish, partial(leave_after_error, self._nonce, leave)]

    def may_stay(self, error: BaseException) -> bool:
        """Return True if this process stays for the next attempt after an error of the script.

        Args:
            error: the error.

        Example:
            link.may_stay(error)
        """
        replica = self._replica
        return replica is not None and replica.may_stay is not None and replica.may_stay(error)

    def call_at_dismissal(self, say_bye: Callable[[], None]) -> None:
        """Let the replica call a function if this process stays after a failure, but runs no next attempt soon.

        Args:
            say_bye: tells the other replicas not to wait.

        Example:
            link.call_at_dismissal(bye_writer(store, keys, me))
        """
        if self._replica is not None:
            self._replica.at_dismissal.append(say_bye)

    def note_changed_model(self, mark: float) -> None:
        """Record that the script has changed the model after this DiLoCo was closed.

        Args:
            mark: a number that identifies the changed model. Replicas with the same model have the same number.

        Example:
            link.note_changed_model(0.25)
        """
        if self._replica is not None:
            self._replica.own_models[self._name] = mark

    def _finish_if_last(self) -> None:
        """Report that the training has ended, unless another DiLoCo of this replica still trains."""
        if self._replica is not None and all(key in finished for key in open_dilocos.of(self._nonce)):
            self._replica.finish_training()

    def progress(self) -> None:
        """Mark progress, so that the watchdog knows that training continues."""
        if self._replica is not None:
            self._replica.progress()

    def waiting(self, section: str) -> AbstractContextManager[None]:
        """Return a context in which this replica waits for the others, so that the watchdog does not count the time.

        Rounds have their own time limits.

        Args:
            section: the name of the wait, such as "round".

        Example:
            with link.waiting("round"):
                run_the_round()
        """
        return nullcontext() if self._replica is None else self._replica.section(section, math.inf)

    def is_to_leave(self, *, after_round: bool) -> bool:
        """Return True if the training must end here, because the machine will be stopped or the user asked for a stop.

        A stop by the user waits for the end of a round. The next attempt continues with work that no round has counted.

        Args:
            after_round: True if a round has just ended.

        Example:
            link.is_to_leave(after_round=True)
        """
        return self._replica is not None and self._replica.is_to_leave(after_round=after_round)
