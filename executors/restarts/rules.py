"""`decide`: what follows an end. A pure function of the log before it, and of outcomes, which never change."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from executors.protocol import Outcome, ReplicaStatus
from executors.restarts.decision_log import Decision, decision_on, is_blocked
from executors.settings.policy import Restarts

LAST_CALL_S = 1.0  # before any progress, an own end waits so long for its sisters' ends
OWN_REASONS = ("exception", "no_result", "result_not_serializable", "start_failed")
MOST_REFUSED = 120  # starts in a row: some two hours of a bad token or a quota; a shortage of machines may last as long
OWN_SIGNALS = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What counts beside the log and the end that is answered."""

    run_id: str
    world_size: int
    launched_at: float
    """Unix time."""
    newest: Mapping[int, int] = field(default_factory=dict)
    """The newest attempt of each rank, for restarts together; ranks that have succeeded are not in it."""
    has_progress: bool = False
    """Whether any attempt of the run has reported anything, a living one included."""
    rank_groups: tuple[frozenset[int], ...] = ()
    """The ranks of each placement of the launch. Empty: all are at one."""


def is_own_failure(outcome: Outcome) -> bool:
    """Return whether an end is the doing of what ran there, so that it may come again the same way."""
    if outcome.was_refused:
        return False
    return outcome.reason in OWN_REASONS or (outcome.reason == "signal" and outcome.signal in OWN_SIGNALS)


def decide(
    log: Sequence[Decision], end: Outcome, ends: Sequence[Outcome], policy: Restarts, facts: RunFacts, now: float
) -> Decision | None:
    """Return the entry that answers an end; None: nothing does, or something has.

    Args:
        end: of the newest attempt of its rank.
        ends: how the newest attempts of other ranks ended that have.
        now: Unix time, for windows and waits.
    """
    if end.status is not ReplicaStatus.FAILED or end.reason == "fenced":
        return None
    # The first attempt of a launch that was refused is the launch's own affair: it has raised why.
    if not policy.answers(end.reason, was_refused=end.was_refused and end.attempt > 0):
        return None
    if is_blocked(log, end.rank) or decision_on(log, end.rank, end.attempt) is not None:
        return None
    if facts.newest.get(end.rank, end.attempt) > end.attempt:
        return None
    mine, made = charged_of(log, end.rank), made_progress(log, end, ends)
    cap_name, cap = policy.cap(end.reason, end.exit_code)
    is_refused = end.was_refused and cap_name is None
    is_free = cap == math.inf or is_refused
    strikes = 0 if is_free or made else 1 + (mine[-1].strikes if mine else 0)
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
        if _is_everybodys(log, end, ends, facts):
            return _ended(answer, "stop", "deterministic")
        if mine and mine[-1].fingerprint == end.fingerprint and mine[-1].reached == answer.reached:
            return _ended(answer, "give_up", "deterministic")
    if is_refused and _refused_in_a_row(log, end.rank) >= MOST_REFUSED:
        return _ended(answer, "give_up", "refused")
    if strikes > policy.no_progress:
        return _ended(answer, "give_up", "no_progress")
    if policy.within_s is not None and now > facts.launched_at + policy.within_s:
        return _ended(answer, "give_up", "budget")
    recent = _recent(mine, policy, max(now, log[-1].at if log else now))
    if not is_free and (_is_used_up(log, recent, policy) or _is_capped(recent, cap_name, cap)):
        return _ended(answer, "give_up", "budget")
    start = {end.rank: end.attempt + 1}
    if policy.together:
        start = {**_others(log, ends, facts), **start}
    wait_s = 0.0 if made else _backoff_s(log, end.rank, policy, is_free) * _spread(facts.run_id, end)
    return replace(answer, start=start, how=policy.how, not_before=now + wait_s)


def charged_of(log: Sequence[Decision], rank: int) -> list[Decision]:
    """Return the charged restarts of a rank since a person last resumed it."""
    found: list[Decision] = []
    for entry in log:
        if entry.kind == "resume" and rank in entry.start:
            found.clear()
        elif entry.kind == "restart" and entry.rank == rank and entry.charged:
            found.append(entry)
    return found


def made_progress(log: Sequence[Decision], end: Outcome, ends: Sequence[Outcome]) -> bool:
    """Return whether an attempt left something that its successor need not do again.

    Where nobody in the run ever said so, that its last step is further than every earlier attempt's.
    """
    if end.saved_marks:
        return True
    if any(other.saved_marks for other in ends) or any(entry.has_saved_marks for entry in log):
        return False
    step = _reached(end).get("step")
    earlier = [entry.reached.get("step", 0.0) for entry in log if entry.rank == end.rank]
    return step is not None and step > max(earlier, default=0.0)


def too_few_left(log: Sequence[Decision], ends: Iterable[Outcome], n: int, min_replicas: int | None) -> bool:
    """Return whether fewer than `min_replicas` of `n` can still succeed, and nothing has ended the run.

    What a person ended before they resumed anything does not count: they know.
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
    """Return what was added since a person last resumed anything."""
    return log[1 + max((index for index, entry in enumerate(log) if entry.kind == "resume"), default=-1) :]


def _is_everybodys(log: Sequence[Decision], end: Outcome, ends: Sequence[Outcome], facts: RunFacts) -> bool:
    """Return whether another rank ended the same way, some at each place, and nobody in the run has come anywhere.

    What two ranks lack on one machine, those of another backend may have.
    """
    if facts.has_progress or end.progress_marks or any(entry.reached or entry.has_saved_marks for entry in log):
        return False
    before = {(entry.rank, entry.fingerprint) for entry in _resumed(log) if entry.kind == "restart"}
    known = {(other.rank, other.fingerprint) for other in ends} | before
    alike = {end.rank} | {rank for rank, fingerprint in known if fingerprint == end.fingerprint}
    return len(alike) > 1 and all(alike & place for place in facts.rank_groups)


def _refused_in_a_row(log: Sequence[Decision], rank: int) -> int:
    """Return how many starts of a rank its service has refused since it last took one, or a person resumed the rank."""
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


def _recent(mine: Sequence[Decision], policy: Restarts, now: float) -> Sequence[Decision]:
    """Return those restarts of a rank that its budget and its caps count."""
    return [entry for entry in mine if policy.per_s is None or entry.at > now - policy.per_s]


def _others(log: Sequence[Decision], ends: Sequence[Outcome], facts: RunFacts) -> dict[int, int]:
    """Return which attempts of other ranks are started with one: not of those that are over."""
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
    """Return how long to wait behind attempts without progress; the first end that costs nothing is not waited for."""
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
    """Return the share of the wait that this attempt takes, from 0.5 to 1: what ends together starts apart."""
    digest = hashlib.sha256(f"{run_id}/{end.rank}/{end.attempt}".encode()).digest()
    return 0.5 + int.from_bytes(digest[:4], "big") / 2**33


def _reached(end: Outcome) -> dict[str, float]:
    found = end.reached or {}
    return {name: found[name] for name in ("round", "step") if math.isfinite(found.get(name, math.nan))}


def _words(end: Outcome) -> str:
    """Say an end in a few words: `signal, SIGKILL, after round 41`."""
    where = [f"after {name} {step:.0f}" for name, step in _reached(end).items()][:1]
    what = end.signal or (end.headline[:200] if end.reason == "exception" or end.was_refused else None)
    return ", ".join(filter(None, [end.reason, what, *where]))
