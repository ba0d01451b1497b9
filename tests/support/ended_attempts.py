"""Reads the decisions and the ends of a local run's attempts from its records."""

from __future__ import annotations

from executors import Outcome, Run
from executors.attempt import Attempt
from executors.restarts.decision_log import Decision, DecisionLog
from executors.run.run import view_of
from executors.testing import eventually
from support.processes import is_alive


def supervisor_of(run: Run) -> int:
    """Return the pid of the supervisor."""
    return int(run.handles[0].metadata["supervisor_pid"])


def over(run: Run) -> Run:
    """Wait until the supervisor has ended, so that all records are complete."""
    pid = supervisor_of(run)
    eventually(lambda: not is_alive(pid), "the supervisor ends")
    return run


def decisions(run: Run) -> list[Decision]:
    """Return the decision log."""
    return list(DecisionLog(view_of(run).store, run.run_id).read())


def ends(run: Run, rank: int) -> list[Outcome]:
    """Return the outcomes of a rank's attempts, in order."""
    found: list[Outcome] = []
    while (outcome := Attempt(view_of(run).store, run.run_id, rank, len(found)).outcome()) is not None:
        found.append(outcome)
    return found
