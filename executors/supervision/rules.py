"""`decide`: what follows an end. A pure function of the log before it, and of outcomes, which never change."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from executors.policy import Restarts
from executors.protocol import Outcome, ReplicaStatus
from executors.supervision.decisions import Decision, answer_to, is_barred

LAST_CALL_S = 1.0  # before any progress, an own end waits so long for its sisters' ends
OWN_REASONS = ("exception", "no_result", "result_not_serializable", "start_failed")
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


def is_own(outcome: Outcome) -> bool:
    """Return whether an end is the doing of what ran there, so that it may come again the same way."""
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
    if is_barred(log, end.rank) or answer_to(log, end.rank, end.attempt) is not None:
        return None
    if end.status is not ReplicaStatus.FAILED or end.reason == "fenced":
        return None
    mine = charged_of(log, end.rank)
    cap_name, cap = policy.cap(end.reason, end.exit_code)
    is_free, kept = cap == math.inf, made_progress(log, end, ends)
    strikes = 0 if is_free or kept else 1 + (mine[-1].strikes if mine else 0)
    answer = Decision(
        kind="restart",
        rank=end.rank,
        ended=end.attempt,
        charged=not is_free,
        strikes=strikes,
        reason=end.reason,
        exit_code=end.exit_code,
        fingerprint=end.fingerprint,
        reached=dict(end.reached or {}),
        kept=bool(end.kept),
        words=_words(end),
    )
    if is_own(end) and end.fingerprint is not None and not is_free:
        sisters = [other for other in ends if other.rank != end.rank and other.fingerprint == end.fingerprint]
        if sisters and not facts.has_progress and not end.marks:
            return _ended(answer, "stop", "deterministic")
        if mine and mine[-1].fingerprint == end.fingerprint and mine[-1].reached == answer.reached:
            return _ended(answer, "give_up", "deterministic")
    if strikes > policy.no_progress:
        return _ended(answer, "give_up", "no_progress")
    if _is_used_up(log, end, policy, facts, now, is_free=is_free, cap=(cap_name, cap)):
        return _ended(answer, "give_up", "budget")
    start = {end.rank: end.attempt + 1}
    if policy.together:
        start = {**{rank: number + 1 for rank, number in facts.newest.items()}, **start}
    first_s, longest_s = policy.backoff_s
    wait_s = min(longest_s, first_s * 2.0 ** min(strikes - 1, 60)) * _spread(facts.run_id, end) if strikes else 0.0
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


def charged_of_run(log: Sequence[Decision]) -> int:
    """Return how many restarts of the run count against its budget: since a person last resumed anything."""
    last = max((index for index, entry in enumerate(log) if entry.kind == "resume"), default=-1)
    return sum(entry.kind == "restart" and entry.charged for entry in log[last + 1 :])


def made_progress(log: Sequence[Decision], end: Outcome, ends: Sequence[Outcome]) -> bool:
    """Return whether an attempt left something that its successor need not do again.

    Where nobody in the run ever said so, that its last step is further than every earlier attempt's.
    """
    if end.kept:
        return True
    if any(other.kept for other in ends) or any(entry.kept for entry in log):
        return False
    step = (end.reached or {}).get("step")
    earlier = [entry.reached.get("step", -math.inf) for entry in log if entry.rank == end.rank and entry.reached]
    return step is not None and step > max(earlier, default=0)


def too_few_left(log: Sequence[Decision], done: int, gone: int, world_size: int, min_replicas: int | None) -> bool:
    """Return whether fewer than `min_replicas` can still succeed, where no stop stands.

    Args:
        done: ranks that have succeeded.
        gone: ranks that ended otherwise, and will not be restarted.
    """
    if min_replicas is None or world_size - gone >= min_replicas or done >= min_replicas:
        return False
    return not any(is_barred(log, rank) for rank in range(world_size))


def _is_used_up(
    log: Sequence[Decision],
    end: Outcome,
    policy: Restarts,
    facts: RunFacts,
    now: float,
    *,
    is_free: bool,
    cap: tuple[str | None, float],
) -> bool:
    if policy.within_s is not None and now > facts.launched_at + policy.within_s:
        return True
    if is_free:
        return False
    since = -math.inf if policy.per_s is None else now - policy.per_s
    mine = [entry for entry in charged_of(log, end.rank) if entry.at > since]
    of_run = policy.per_replica * facts.world_size if policy.run is None else policy.run
    if len(mine) >= policy.per_replica or charged_of_run(log) >= of_run:
        return True
    name, most = cap
    alike = [entry for entry in mine if name is not None and name in (str(entry.exit_code), entry.reason)]
    return name is not None and len(alike) >= most


def _ended(answer: Decision, kind: str, why: str) -> Decision:
    return replace(answer, kind=kind, why=why, charged=False)


def _spread(run_id: str, end: Outcome) -> float:
    """Return the share of the wait that this attempt takes, from 0.5 to 1: what ends together starts apart."""
    digest = hashlib.sha256(f"{run_id}/{end.rank}/{end.attempt}".encode()).digest()
    return 0.5 + int.from_bytes(digest[:4], "big") / 2**33


def _words(end: Outcome) -> str:
    """Say an end in a few words: `signal, SIGKILL, after round 41`."""
    reached = end.reached or {}
    where = [f"after {name} {reached[name]:.0f}" for name in ("round", "step") if name in reached][:1]
    what = end.signal or (f"{end.headline[:200]}" if end.reason == "exception" else None)
    return ", ".join(filter(None, [end.reason, what, *where]))
