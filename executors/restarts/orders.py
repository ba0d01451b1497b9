"""Orders: entries that the user adds to the decision log. These are cancel, stop, resume and a new policy."""

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

ASKED, BY_RULE = "asked", "rule"
STOP_BY_RULE_S = 60.0
"""The seconds that replicas have to end by themselves after a stop by a rule. It is short, because the rule objects to
the work of the present round.
"""


def order_cancel(log: DecisionLog, ranks: Sequence[int] | None, words: str = BY_USER) -> None:
    """Add a cancel, which blocks ranks until a user resumes them.

    The cancel is added even if the ranks are already blocked. Another process may have resumed them since the last
    read.

    Args:
        log: the log of the run.
        ranks: the ranks to block. None: all ranks.
        words: the reason. Default: the user cancelled them.

    Raises:
        StoreError: the store does not answer, or holds an entry that cannot be parsed.
    """
    for rank in (None,) if ranks is None else ranks:
        log.append(functools.partial(_cancel, rank, words))


def _cancel(rank: int | None, words: str, entries: Sequence[Decision]) -> Decision:
    return Decision(kind="cancel", rank=rank, words=words[:MAX_WORDS])


def abandon_run(store: Store, run_id: str, world_size: int, error: BaseException) -> None:
    """Record that a launch failed: all ranks are cancelled, so that no process waits for them.

    Errors of a store that does not answer are ignored.

    Args:
        store: the store of the run.
        run_id: the run.
        world_size: the number of ranks of the launch.
        error: the error of the launch.
    """
    with contextlib.suppress(StoreError):
        for rank in range(world_size):
            Attempt(store, run_id, rank).abandon(error)
        order_cancel(
            DecisionLog(store, run_id), None, launch_failed_message(error)
        )  # otherwise a controller would restart ranks


def order_stop(log: DecisionLog, within_s: float) -> Decision:
    """Add a stop, which asks all replicas to end by themselves within some seconds.

    A stop never gives more time than an earlier stop, because supervisors may already act on the earlier one.

    Args:
        log: the log of the run.
        within_s: the seconds that the replicas have.

    Returns: the entry as it was added.

    Raises:
        StoreError: the store does not answer, or holds an entry that cannot be parsed.
    """

    def entry(entries: Sequence[Decision]) -> Decision:
        last = next((each for each in reversed(entries) if each.kind in ("stop", "resume")), None)
        shorter_s = within_s
        # The limit is all seconds of the earlier stop, and not its remaining seconds. These are not known, because the
        # clock of its writer may differ.
        if last is not None and last.kind == "stop":
            shorter_s = min(within_s, last.within_s or 0.0)
        return Decision(kind="stop", why=ASKED, within_s=shorter_s, words=STOPPED)

    added = log.append(entry)
    assert added is not None
    return added


def order_stop_by_rule(log: DecisionLog, words: str) -> Decision | None:
    """Add a stop because a rule of the run was broken, unless an order has already ended the run.

    Args:
        log: the log of the run.
        words: the broken rule and its evidence.

    Returns: the entry as it was added. None: the run was stopped or cancelled before.

    Raises:
        StoreError: the store does not answer, or holds an entry that cannot be parsed.

    Example:
        order_stop_by_rule(log, "rank 1: The rule 'loss > 8 -> stop' is broken: loss is 9.3 in report 812.")
    """

    def entry(entries: Sequence[Decision]) -> Decision | None:
        for each in reversed(entries):
            if each.kind == "resume":
                break
            if each.kind == "stop" or (each.kind == "cancel" and each.rank is None):
                return None
        return Decision(kind="stop", why=BY_RULE, within_s=STOP_BY_RULE_S, words=words[:MAX_WORDS])

    return log.append(entry)


def order_resume(log: DecisionLog, start: Mapping[int, int], n_seen: int) -> Decision | None:
    """Add a resume, which starts attempts with new budgets. A stop or cancel since the ranks were chosen forbids it.

    Args:
        start: the number of the attempt to start, by rank.
        start: the numbers of the attempts, by rank.
        n_seen: the number of entries of the log when the ranks were chosen.

    Returns: the stop or cancel that forbids the resume. None: the resume was added.

    Raises:
        StoreError: the store does not answer, or holds an entry that cannot be parsed.
    """
    forbidding: list[Decision] = []

    def entry(entries: Sequence[Decision]) -> Decision | None:
        later = entries[n_seen:]
        forbidding[:] = [e for e in later if e.kind == "stop" or (e.kind == "cancel" and e.rank in (None, *start))]
        return None if forbidding else Decision(kind="resume", start=dict(start), process=identify_process())

    log.append(entry)
    return forbidding[0] if forbidding else None


def take_back_resume(log: DecisionLog, start: Mapping[int, int], why: str) -> None:
    """Give up the ranks of a failed resume whose attempts have not begun.

    Otherwise other processes would wait for these ranks.

    Args:
        log: the log of the run.
        start: the numbers of the resume's attempts, by rank.
        why: the error of the resume.

    Raises:
        StoreError: the store does not answer, or holds an entry that cannot be parsed.
    """
    for rank, number in start.items():
        if Attempt(log.store, log.run_id, rank, number - 1).newest().number >= number:
            continue

        def entry(entries: Sequence[Decision], rank: int = rank, ended: int = number - 1) -> Decision | None:
            standing = decision_on(entries, rank, ended)
            if standing is None or (standing.kind, standing.by) != ("resume", this_process()):
                return None  # another order was added since the ranks were chosen
            words = f"a resume failed: {why}"[:MAX_WORDS]
            return Decision(kind="give_up", rank=rank, ended=ended, why="not_started", words=words)

        log.append(entry)


def order_policy(
    log: DecisionLog,
    restarts: Restarts | None = None,
    hang: HangLimits | None = None,
    *,
    rules: Sequence[str] | None = None,
    totals: Mapping[str, int] | None = None,
) -> None:
    """Add a policy that is in force from now on. Nothing is added if the last policy in the log is the same.

    Args:
        log: the log of the run.
        restarts: the restart policy. None, the default: it is not changed.
        hang: the limits on hanging. None, the default: it is not changed.
        rules: the rules of attempts that start from now on. None, the default: they are not changed.
        totals: the new total of the run, under `total_steps` or `total_rounds`. None, the default: it is not changed.

    Raises:
        StoreError: the store does not answer, or holds an entry that cannot be parsed.
    """
    new = Decision(
        kind="policy",
        restarts=None if restarts is None else str(restarts),
        hang=None if hang is None else str(hang),
        rules=None if rules is None else tuple(rules),
        **(totals or {}),  # type: ignore[arg-type]
    )

    def entry(entries: Sequence[Decision]) -> Decision | None:
        last = next((each for each in reversed(entries) if each.kind == "policy"), None)
        names = ("restarts", "hang", "rules", "total_steps", "total_rounds")
        is_same = last is not None and all(getattr(last, name) == getattr(new, name) for name in names)
        return None if is_same else new

    log.append(entry)


def stop_reason(entry: Decision) -> str:
    """Return the reason why an order ended a rank, as the text of the rank's cancel marker.

    Args:
        entry: the stop or the cancel.
    """
    if entry.kind == "cancel" or entry.why == ASKED:
        return entry.words or BY_USER
    return f"the run was stopped: {entry.why}" + (f": {entry.words}" if entry.words else "")
