"""The rules of restarts: `decide` returns what follows an ended attempt.

It is a pure function of the log and of outcomes, which never change. So all controllers come to the same decision.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from executors.protocol import Outcome, ReplicaStatus
from executors.restarts.decision_log import Decision, decision_on, is_blocked
from executors.settings.policy import Restarts

# Before any progress, the decision on a replica's own failure waits this long, so that failures of other ranks are
# seen.
LAST_CALL_S = 1.0
OWN_REASONS = ("exception", "no_result", "result_not_serializable", "start_failed")
MOST_REFUSED = 120  # refused starts in a row. They take about two hours, and a shortage of machines may last that long
SAME_PROCESS = "process"
"""The start of an attempt in the process of the previous attempt."""
MOST_PROCESS_STRIKES = 2  # from this number of strikes of a rank on, a new process may help
OWN_SIGNALS = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts about a run that `decide` needs in addition to the log and the ended attempt."""

    run_id: str
    world_size: int
    launched_at: float
    """Unix time."""
    newest: Mapping[int, int] = field(default_factory=dict)
    """The newest attempt of each rank, for restarts of all ranks together. Ranks that have succeeded are left out."""
    has_progress: bool = False
    """True if any attempt of the run has reported progress. An attempt that still runs counts as well."""
    rank_groups: tuple[frozenset[int], ...] = ()
    """The ranks of each placement of the launch. Empty: the launch has one placement."""


def is_own_failure(outcome: Outcome) -> bool:
    """Return True if the replica's own code caused its end, so that another attempt may end the same way.

    False for a lost machine, a refused start or a kill for memory.

    Args:
        outcome: the outcome of the attempt.
    """
    if outcome.was_refused:
        return False
    return outcome.reason in OWN_REASONS or (outcome.reason == "signal" and outcome.signal in OWN_SIGNALS)


def decide(
    log: Sequence[Decision], end: Outcome, ends: Sequence[Outcome], policy: Restarts, facts: RunFacts, now: float
) -> Decision | None:
    """Return the entry that decides on an ended attempt. The first rule that fits counts.

    Args:
        log: the entries of the log.
        end: the outcome of the newest attempt of a rank.
        ends: the outcomes of the newest attempts of the other ranks that have ended.
        policy: the restart policy in force.
        facts: further facts on the run.
        now: Unix time, for budgets per span of time and for waits.

    Returns: a restart, a give_up or a stop. None: nothing follows this end, or the log has a decision on it.
    """
    if end.status is not ReplicaStatus.FAILED or end.reason == "fenced":
        return None
    # If a service refuses the first attempt, `launch` has raised an error already.
    if not policy.answers(end.reason, was_refused=end.was_refused and end.attempt > 0):
        return None
    if is_blocked(log, end.rank) or decision_on(log, end.rank, end.attempt) is not None:
        return None
    if facts.newest.get(end.rank, end.attempt) > end.attempt:
        return None
    charged, has_advanced = charged_of(log, end.rank), made_progress(log, end, ends)
    cap_name, cap = policy.cap(end.reason, end.exit_code)
    is_refused = end.was_refused and cap_name is None
    is_free = cap == math.inf or is_refused
    strikes = 0 if is_free or has_advanced else 1 + (charged[-1].strikes if charged else 0)
    answer = Decision(
        kind="restart",
        rank=end.rank,
        ended=end.attempt,
        charged=not is_free,
        strikes=strikes,
        reason=end.reason,
        exit_code=end.exit_code,
        fingerprint=end.fingerprint,
        reached=_reached(end),
        has_saved_marks=end.saved_marks > 0,
        words=_words(end),
    )
    if is_own_failure(end) and end.fingerprint is not None and not is_free:
        if _is_common_failure(log, end, ends, facts):
            return _ended(answer, "stop", "deterministic")
        if charged and charged[-1].fingerprint == end.fingerprint and charged[-1].reached == answer.reached:
            return _ended(answer, "give_up", "deterministic")
    if is_refused and _refused_in_a_row(log, end.rank) >= MOST_REFUSED:
        return _ended(answer, "give_up", "refused")
    if strikes > policy.no_progress:
        return _ended(answer, "give_up", "no_progress")
    if policy.within_s is not None and now > facts.launched_at + policy.within_s:
        return _ended(answer, "give_up", "budget")
    recent = _recent(charged, policy, max(now, log[-1].at if log else now))
    if not is_free and (_is_used_up(log, recent, policy) or _is_capped(recent, cap_name, cap)):
        return _ended(answer, "give_up", "budget")
    start = {end.rank: end.attempt + 1}
    if policy.together:
        start = {**_others(log, ends, facts), **start}
    wait_s = 0.0 if has_advanced else _backoff_s(log, end.rank, policy, is_free) * _spread(facts.run_id, end)
    stays = end.goes_on and policy.how == "fork" and strikes <= MOST_PROCESS_STRIKES
    how = SAME_PROCESS if stays else policy.how
    return replace(answer, start=start, how=how, not_before=now + wait_s)


def charged_of(log: Sequence[Decision], rank: int) -> list[Decision]:
    """Return the charged restarts of a rank since the user last resumed it.

    Args:
        log: the entries of the log.
        rank: the rank.
    """
    found: list[Decision] = []
    for entry in log:
        if entry.kind == "resume" and rank in entry.start:
            found.clear()
        elif entry.kind == "restart" and entry.rank == rank and entry.charged:
            found.append(entry)
    return found


def made_progress(log: Sequence[Decision], end: Outcome, ends: Sequence[Outcome]) -> bool:
    """Return True if an ended attempt left work that the next attempt need not repeat.

    If no attempt of the run has ever reported saved work, a last step beyond the last step of all earlier attempts
    counts.

    Args:
        log: the entries of the log.
        end: the outcome of the attempt.
        ends: the outcomes of other ranks.
    """
    if end.saved_marks:
        return True
    if any(other.saved_marks for other in ends) or any(entry.has_saved_marks for entry in log):
        return False
    step = _reached(end).get("step")
    earlier = [entry.reached.get("step", 0.0) for entry in log if entry.rank == end.rank]
    return step is not None and step > max(earlier, default=0.0)


def too_few_left(log: Sequence[Decision], ends: Iterable[Outcome], n: int, min_replicas: int | None) -> bool:
    """Return True if fewer than `min_replicas` of `n` ranks can still succeed, and no order has ended the run.

    Ranks that the user ended before the last resume do not count, because the user chose not to resume them.

    Args:
        log: the entries of the log.
        ends: the outcomes of the newest attempts.
        n: the number of ranks.
        min_replicas: the least number of ranks that must succeed. None: there is none, and the answer is False.
    """
    since = _resumed(log)
    if min_replicas is None or any(e.kind == "stop" or (e.kind == "cancel" and e.rank is None) for e in since):
        return False
    gone, done = {entry.rank for entry in since if entry.kind == "give_up"}, 0
    for end in ends:
        done += end.status is ReplicaStatus.SUCCEEDED
        if end.status is ReplicaStatus.CANCELLED and is_blocked(since, end.rank) >= is_blocked(log, end.rank):
            gone.add(end.rank)
    return done < min_replicas and n - len(gone) < min_replicas


def _resumed(log: Sequence[Decision]) -> Sequence[Decision]:
    """Return the entries since the user last resumed any rank."""
    return log[1 + max((index for index, entry in enumerate(log) if entry.kind == "resume"), default=-1) :]


def _is_common_failure(log: Sequence[Decision], end: Outcome, ends: Sequence[Outcome], facts: RunFacts) -> bool:
    """Return True if several ranks failed the same way before any progress, at least one of them in each placement.

    Each placement counts, because a package that is missing on one backend may be installed on another.
    """
    if facts.has_progress or end.progress_marks or any(entry.reached or entry.has_saved_marks for entry in log):
        return False
    before = {(entry.rank, entry.fingerprint) for entry in _resumed(log) if entry.kind == "restart"}
    known = {(other.rank, other.fingerprint) for other in ends} | before
    alike = {end.rank} | {rank for rank, fingerprint in known if fingerprint == end.fingerprint}
    return len(alike) > 1 and all(alike & place for place in facts.rank_groups)


def _refused_in_a_row(log: Sequence[Decision], rank: int) -> int:
    """Return how many starts of a rank its service has refused in a row, since the user last resumed the rank."""
    n = 0
    for entry in reversed(log):
        if entry.rank == rank and entry.kind == "restart":
            if entry.charged or entry.reason != "start_failed":
                break
            n += 1
        elif entry.kind == "resume" and rank in entry.start:
            break
    return n


def _is_used_up(log: Sequence[Decision], recent: Sequence[Decision], policy: Restarts) -> bool:
    of_run = sum(entry.charged for entry in _resumed(log))
    return len(recent) >= policy.per_replica or (policy.run is not None and of_run >= policy.run)


def _is_capped(recent: Sequence[Decision], name: str | None, cap: float) -> bool:
    return sum(name in (str(entry.exit_code), entry.reason) for entry in recent) >= cap


def _recent(charged: Sequence[Decision], policy: Restarts, now: float) -> Sequence[Decision]:
    """Return the charged restarts of a rank within the span of time that the policy limits."""
    return [entry for entry in charged if policy.per_s is None or entry.at > now - policy.per_s]


def _others(log: Sequence[Decision], ends: Sequence[Outcome], facts: RunFacts) -> dict[int, int]:
    """Return the attempts of other ranks that started together with this one.

    Ranks that will not be started again are not included.
    """
    over: set[int] = set()
    decided: dict[int, int] = {}
    for entry in log:
        decided.update(entry.start)
        if entry.kind == "resume":
            over -= entry.start.keys()
        elif entry.kind == "stop" or (entry.kind == "cancel" and entry.rank is None):
            over |= facts.newest.keys()
        elif entry.kind in ("cancel", "give_up") and entry.rank is not None:
            over.add(entry.rank)
    over |= {end.rank for end in ends if end.status is not ReplicaStatus.FAILED}
    return {rank: max(newest, decided.get(rank, 0)) + 1 for rank, newest in facts.newest.items() if rank not in over}


def _backoff_s(log: Sequence[Decision], rank: int, policy: Restarts, is_free: bool) -> float:
    """Return the seconds to wait before the restart.

    They double with each attempt without progress. The first free restart has no wait.
    """
    idle = 0 if is_free else 1
    for entry in reversed(log):
        if entry.rank == rank and entry.kind == "restart":
            if entry.charged and not entry.strikes:
                break
            idle += 1
        elif entry.kind == "resume" and rank in entry.start:
            break
    first_s, longest_s = policy.backoff_s
    return min(longest_s, first_s * 2.0 ** min(idle - 1, 60)) if idle else 0.0


def _ended(answer: Decision, kind: str, why: str) -> Decision:
    return replace(answer, kind=kind, why=why, charged=False)


def _spread(run_id: str, end: Outcome) -> float:
    """Return a random factor from 0.5 to 1 for the wait, so that ranks that ended together are not restarted
    together.
    """
    digest = hashlib.sha256(f"{run_id}/{end.rank}/{end.attempt}".encode()).digest()
    return 0.5 + int.from_bytes(digest[:4], "big") / 2**33


def _reached(end: Outcome) -> dict[str, float]:
    found = end.reached or {}
    return {name: found[name] for name in ("round", "step") if math.isfinite(found.get(name, math.nan))}


def _words(end: Outcome) -> str:
    """Describe an end in a few words: `signal, SIGKILL, after round 41`."""
    place = [f"after {name} {step:.0f}" for name, step in _reached(end).items()][:1]
    detail = end.signal or (end.headline[:200] if end.reason == "exception" or end.was_refused else None)
    if end.reason == "rule":  # the rule alone, because its evidence has a record and a line of its own
        detail = end.headline.partition("The rule ")[2].partition(" is broken")[0][:200]
    return ", ".join(filter(None, [end.reason, detail, *place]))
