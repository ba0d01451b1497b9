"""What people tell a run through its log of decisions: cancel, stop, resume, and other rules from here on."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence

from executors.attempt import Attempt, launch_failed_message
from executors.errors import StoreError
from executors.process import identify_process, this_process
from executors.protocol import BY_USER, STOPPED
from executors.restarts.decision_log import MAX_WORDS, Decision, DecisionLog, decision_on
from executors.settings.policy import HangLimits, Restarts
from executors.store import Store

ASKED = "asked"


def order_cancel(log: DecisionLog, ranks: Sequence[int] | None, words: str = BY_USER) -> None:
    """Block ranks, None: all, so that they do not start again until a user resumes them.

    It is added even if an order blocks them already: this process may not have seen a resume that came since.

    Raises:
        StoreError: the store does not answer, or holds something else there.
    """
    for rank in (None,) if ranks is None else ranks:
        log.append(functools.partial(_cancel, rank, words))


def _cancel(rank: int | None, words: str, entries: Sequence[Decision]) -> Decision:
    return Decision(kind="cancel", rank=rank, words=words[:MAX_WORDS])


def abandon_run(store: Store, run_id: str, world_size: int, error: BaseException) -> None:
    """Leave a run whose launch failed half-way cancelled, not waiting, as far as its store answers."""
    with contextlib.suppress(StoreError):
        for rank in range(world_size):
            Attempt(store, run_id, rank).abandon(error)
        order_cancel(DecisionLog(store, run_id), None, launch_failed_message(error))  # no controller continues it


def order_stop(log: DecisionLog, within_s: float) -> Decision:
    """Ask all replicas to end well within some seconds; return the stop that stands.

    It gives no more time than a stop before it. Supervisors that have seen that one end their ranks by it.

    Raises:
        StoreError: the store does not answer, or holds something else there.
    """

    def entry(entries: Sequence[Decision]) -> Decision:
        last = next((each for each in reversed(entries) if each.kind in ("stop", "resume")), None)
        shorter_s = within_s
        if last is not None and last.kind == "stop":  # not what is left of it: it was written by another's clock
            shorter_s = min(within_s, last.within_s or 0.0)
        return Decision(kind="stop", why=ASKED, within_s=shorter_s, words=STOPPED)

    added = log.append(entry)
    assert added is not None
    return added


def order_resume(log: DecisionLog, start: Mapping[int, int], n_seen: int) -> Decision | None:
    """Start these attempts, by rank, with new budgets; return what was ordered since that forbids it, None: nothing.

    Args:
        n_seen: how long the log was when these ranks were chosen.

    Raises:
        StoreError: the store does not answer, or holds something else there.
    """
    forbidding: list[Decision] = []

    def entry(entries: Sequence[Decision]) -> Decision | None:
        later = entries[n_seen:]
        forbidding[:] = [e for e in later if e.kind == "stop" or (e.kind == "cancel" and e.rank in (None, *start))]
        return None if forbidding else Decision(kind="resume", start=dict(start), process=identify_process())

    log.append(entry)
    return forbidding[0] if forbidding else None


def take_back_resume(log: DecisionLog, start: Mapping[int, int], why: str) -> None:
    """Give up those of a resume's ranks whose attempts nobody has begun, since the resume failed: none waits for them.

    Raises:
        StoreError: the store does not answer, or holds something else there.
    """
    for rank, number in start.items():
        if Attempt(log.store, log.run_id, rank, number - 1).newest().number >= number:
            continue

        def entry(entries: Sequence[Decision], rank: int = rank, ended: int = number - 1) -> Decision | None:
            standing = decision_on(entries, rank, ended)
            if standing is None or (standing.kind, standing.by) != ("resume", this_process()):
                return None  # somebody has ordered something else since
            words = f"a resume failed: {why}"[:MAX_WORDS]
            return Decision(kind="give_up", rank=rank, ended=ended, why="not_started", words=words)

        log.append(entry)


def order_policy(
    log: DecisionLog,
    restarts: Restarts | None = None,
    hang: HangLimits | None = None,
    *,
    totals: Mapping[str, int] | None = None,
) -> None:
    """Let other rules count from here on.

    Args:
        log: the run's log of decisions.
        restarts: which ends are answered by a restart. None: as before.
        hang: the limits on hanging. None: as before.
        totals: the total that the run is extended to, as `total_steps` or `total_rounds`. None: as before.

    Raises:
        StoreError: the store does not answer, or holds something else there.
    """
    rules = {"restarts": None if restarts is None else str(restarts), "hang": None if hang is None else str(hang)}
    new = Decision(kind="policy", **rules, **(totals or {}))  # type: ignore[arg-type]

    def entry(entries: Sequence[Decision]) -> Decision | None:
        last = next((each for each in reversed(entries) if each.kind == "policy"), None)
        said = ("restarts", "hang", "total_steps", "total_rounds")
        is_same = last is not None and all(getattr(last, name) == getattr(new, name) for name in said)
        return None if is_same else new

    log.append(entry)


def stop_reason(entry: Decision) -> str:
    """Say why nothing of a rank runs any more, as its cancel marker does."""
    if entry.kind == "cancel" or entry.why == ASKED:
        return entry.words or BY_USER
    return f"the run was stopped: {entry.why}" + (f": {entry.words}" if entry.words else "")
