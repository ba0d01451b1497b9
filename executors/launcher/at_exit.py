"""At the exit of a process: a note on each attached run that it launched, or the cancel of such a run."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from executors.attempt import Attempt
from executors.errors import ReplicasError
from executors.patience import GLANCE
from executors.protocol import ReplicaStatus
from executors.status import name_ranks
from executors.store.record_names import run_exists
from executors.store.url import impatient_store

if TYPE_CHECKING:
    from executors.run.run import Run

WHY = "the launcher of this attached run ended"


def ends_with_this_process(run: Run, *, detach: bool) -> Run:
    """Return the run, and print a note at the exit of this process if the run ends with it.

    Replicas of an executor with only the five methods are cancelled at the exit, because no supervisor ends them.

    Args:
        run: the run.
        detach: True if the run continues without this process.
    """
    from executors.run.run import manager_of, view_of

    view = view_of(run)
    placements, pid = view.placements, os.getpid()
    is_cancelled = placements.is_cancelled_at_exit
    if detach or not (placements.ends_with_launcher or is_cancelled):
        return run
    lease_s = placements.lease_s
    when = "" if lease_s is None else f", {lease_s / 60:.0f} minutes after it"

    def leave() -> None:
        if pid != os.getpid():
            return
        store = impatient_store(view.store.url, GLANCE.limit_s)
        attempts = [Attempt(store, run.run_id, rank) for rank in placements.ranks]
        goes_on = _goes_on(attempts)
        if goes_on is False:
            return
        if goes_on is None and placements.ends_jobs:  # replicas that cannot read their lease do not end because of it
            print(
                f"replicas: run {run.run_id} may still run, and its store does not answer. End it: replicas cancel "
                f"{run.run_id}   or: {placements.commands_to_end(run.run_id)}",
                file=sys.stderr,
            )
            return
        print(
            f"replicas: run {run.run_id} ends with this process{when}. Wait for it with run.wait(), or start it "
            "with launch(…, detach=True).",
            file=sys.stderr,
        )
        if is_cancelled:
            _cancel(run, attempts)

    manager_of(run).at_exit = leave
    atexit.register(leave)
    return run


def _goes_on(attempts: Sequence[Attempt]) -> bool | None:
    """Return True if replicas of a run may still run. None: its store does not answer."""
    try:
        if not run_exists(attempts[0].store, attempts[0].run_id):
            return False  # the run was deleted
        # One by one: at the exit no thread can be started any more.
        return any(each.newest().outcome() is None for each in attempts)
    except ReplicasError:
        return None


def _cancel(run: Run, attempts: Sequence[Attempt]) -> None:
    """Cancel the replicas of an executor with only the five methods, and print which of them did not end, with the
    reason.

    Such an executor starts each rank once, so these are the only attempts. A store that does not answer is not asked
    again.
    """
    from executors.run.run import view_of

    view = view_of(run)
    alive = attempts
    with contextlib.suppress(ReplicasError):
        alive = [attempt for attempt in attempts if attempt.outcome() is None]
        for attempt in alive:
            attempt.request_cancel(WHY)
    refused: dict[str, list[int]] = {}
    ended = []
    for attempt in alive:
        try:
            view.placements.cancel(view.reader.handles.of(attempt.rank))
            ended.append(attempt)
        except Exception as error:  # noqa: BLE001 - a user's executor may raise anything, and the others must end
            refused.setdefault(f"{type(error).__name__}: {error}", []).append(attempt.rank)
    for why, ranks in refused.items():
        print(
            f"replicas: {name_ranks(ranks)} of run {run.run_id} may still run on {view.backend!r}: {why}",
            file=sys.stderr,
        )
    with contextlib.suppress(ReplicasError):
        for attempt in ended:
            attempt.record(attempt.new_outcome(ReplicaStatus.CANCELLED, "cancelled"))
