"""The invariants of the decision log, checked when a schedule has ended, from outcomes and without `decide`.

- S1: there are not more charged restarts than the budgets allow.
- S2: there is at most one decision about each end.
- S3: after a cancel or a stop, no rank restarts until a resume, and no process lives much longer.
- S4: each attempt is started at most once.
- S5: the run ends.
- P: an attempt starts in the process of the previous attempt only if that process still exists, and after at most two
  strikes.
- S6: no process is fenced by its own claim.
- S7: all readers see the same log.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from executors.attempt import replica_key
from executors.protocol import Outcome, ReplicaStatus
from executors.restarts.decision_log import Decision, is_blocked
from executors.settings.policy import DEFAULT_CAPS, Restarts
from simulation.invariants import Violation
from simulation.restarts.record_store import RUN
from simulation.restarts.scenario import parse

if TYPE_CHECKING:
    from simulation.restarts.simulation import RestartSimulation

OWN = {"a", "SIGSEGV"}
"""The fingerprints of failures that the user's code caused."""


@dataclass
class Rank:
    """The state of one rank according to the log up to an entry."""

    charged: list[tuple[float, Outcome]] = field(default_factory=list)
    strikes: int = 0
    answered: int = -1
    """The last attempt for whose end the log has a decision."""
    is_given_up: bool = False


def check(simulation: RestartSimulation) -> None:
    """Check all invariants of a schedule that has ended.

    Raises:
        Violation: something does not hold.
    """
    entries = simulation.entries
    for key, values in simulation.store.ever.items():
        if "/decisions/" in key and len(values) > 1:
            raise Violation(f"S7: {key} had {len(values)} values")
    for log in simulation.logs:
        if log.entries != entries[: len(log.entries)]:
            raise Violation("S7: a process has read another log")
    for (rank, number), n_asked in simulation.asked.items():
        if n_asked > 1:
            raise Violation(f"S4: attempt {number} of rank {rank} was asked for {n_asked} times")
    LogChecker(simulation).walk()
    _check_ends(simulation)


class LogChecker:
    """Walks through the log once, and checks each entry."""

    def __init__(self, simulation: RestartSimulation) -> None:
        self.simulation = simulation
        self.ranks = [Rank() for _ in range(simulation.scenario.n_ranks)]
        self.n_of_run = 0
        self.policy: Restarts | None = None if simulation.scenario.policy is None else parse(simulation.scenario.policy)

    def walk(self) -> None:
        entries = self.simulation.entries
        last_s = 0.0
        for index, entry in enumerate(entries):
            if entry.at < last_s:
                raise Violation(f"S7: entry {index} is older than the one before it")
            last_s = entry.at
            if entry.kind == "policy":
                self.policy = parse(entry.restarts or "")
            elif entry.kind == "resume":
                self.n_of_run = 0
                for rank, number in entry.start.items():
                    self.ranks[rank] = Rank(answered=number - 1)
            elif entry.rank is not None and entry.ended is not None:
                self._check_answer(index, entry)
            elif entry.kind == "restart" or (entry.kind == "stop" and entry.why != "asked"):
                self._check_too_few(index)
        for cancelled in self.simulation.cancelled:
            self._check_cancelled(*cancelled)

    def _check_answer(self, index: int, entry: Decision) -> None:
        assert entry.rank is not None
        assert entry.ended is not None
        prefix, rank, policy = self.simulation.entries[:index], self.ranks[entry.rank], self.policy
        end = self.simulation.store.ends.get((entry.rank, entry.ended))
        if policy is None or end is None or end.status is not ReplicaStatus.FAILED or end.reason == "fenced":
            raise Violation(f"entry {index} decides about an end that needs no decision: {end}")
        if entry.ended <= rank.answered:
            raise Violation(f"S2: entry {index} answers attempt {entry.ended} of rank {entry.rank} again")
        for each in {entry.rank, *entry.start}:
            if is_blocked(prefix, each) or (self.ranks[each].is_given_up and each != entry.rank):
                raise Violation(f"S3: entry {index} is a {entry.kind} of rank {each}, which has ended or was given up")
        rank.answered = entry.ended
        for each, number in entry.start.items():
            self.ranks[each].answered = max(self.ranks[each].answered, number - 1)
        name = str(end.exit_code) if str(end.exit_code) in policy.reasons else str(end.reason)
        is_free = math.isinf(cap := {**DEFAULT_CAPS, **policy.reasons}.get(name, 10**6))
        strikes = 0 if is_free or end.saved_marks else rank.strikes + 1
        recent = [ended for at_s, ended in rank.charged if policy.per_s is None or at_s > entry.at - policy.per_s]
        n_alike = sum(name in (str(ended.exit_code), ended.reason) for ended in recent)
        has_budget = len(recent) < policy.per_replica and (policy.run is None or self.n_of_run < policy.run)
        late_s = -math.inf if policy.within_s is None else entry.at - policy.within_s
        found = {
            "deterministic": self._is_deterministic(entry, end, rank),
            "no_progress": strikes > policy.no_progress,
            "budget": late_s > (self.simulation.scenario.skew_s if entry.kind == "restart" else 0.0)
            or not (is_free or (has_budget and n_alike < cap)),
        }
        if entry.kind != "restart":
            if not found[entry.why]:
                raise Violation(f"entry {index} is a {entry.kind} of rank {entry.rank} for {entry.why}, which is wrong")
            rank.is_given_up = entry.kind == "give_up"
            return
        if found["budget"] or found["no_progress"] or entry.charged == is_free:
            raise Violation(f"S1: entry {index} restarts rank {entry.rank} ({name}) against {policy}")
        if not is_free:
            rank.charged.append((entry.at, end))
            rank.strikes = strikes
            self.n_of_run += 1
        if entry.how == "process" and not (end.goes_on and entry.strikes <= 2 and policy.how == "fork"):
            raise Violation(f"P: entry {index} starts rank {entry.rank} in a process that cannot run it")
        if policy.together:
            self._check_together(index, entry)

    def _is_deterministic(self, entry: Decision, end: Outcome, rank: Rank) -> bool:
        if end.fingerprint not in OWN:
            return False
        if entry.kind == "stop":
            others = self.simulation.store.ends.values()
            return any(other.rank != end.rank and other.fingerprint == end.fingerprint for other in others)
        last = rank.charged[-1][1] if rank.charged else None
        return last is not None and (last.fingerprint, last.reached) == (end.fingerprint, end.reached)

    def _but(self, rank: int) -> list[int]:
        return [other for other in range(len(self.ranks)) if other != rank]

    def _check_together(self, index: int, entry: Decision) -> None:
        """Check that a restart of all ranks names every rank that may still be started."""
        ends = self.simulation.store.ends
        for rank in self._but(entry.rank or 0):
            is_over = any(key[0] == rank and end.status is not ReplicaStatus.FAILED for key, end in ends.items())
            is_over = is_over or self.ranks[rank].is_given_up or is_blocked(self.simulation.entries[:index], rank)
            if rank not in entry.start and not is_over:
                raise Violation(f"entry {index} leaves out rank {rank}, which it must restart")

    def _check_too_few(self, index: int) -> None:
        scenario = self.simulation.scenario
        ends = self.simulation.store.ends
        cancelled = {key[0] for key, end in ends.items() if end.status is ReplicaStatus.CANCELLED}
        gone = {number for number, rank in enumerate(self.ranks) if rank.is_given_up} | cancelled
        if scenario.min_replicas is None or scenario.n_ranks - len(gone) >= scenario.min_replicas:
            raise Violation(f"entry {index} stops a run of which {sorted(gone)} are gone")

    def _check_cancelled(self, began_s: float, done_s: float, ranks: list[int]) -> None:
        """Check S3 from the view of the process that canceled the ranks."""
        resumed: set[int] = set()
        for entry, landed_s in zip(self.simulation.entries, self.simulation.landed_s, strict=True):
            if entry.kind == "resume" and landed_s >= began_s:
                resumed |= entry.start.keys()
            for rank in set(ranks) & entry.start.keys() - resumed:
                if landed_s > done_s and entry.kind == "restart":
                    raise Violation(f"S3: rank {rank} is restarted {landed_s - done_s:.1f} s after it was cancelled")


def _check_ends(simulation: RestartSimulation) -> None:
    """Check S5: every rank has ended, and if too few ranks can succeed, the run has ended."""
    scenario, store, entries = simulation.scenario, simulation.store, simulation.entries
    if simulation.world.now >= simulation.limit_s - 20.0:
        raise Violation("S5: the run did not end")
    living = [worker.name for worker in simulation.workers if worker.runs_user_code]
    if living:
        raise Violation(f"S5: {living} live on")
    last = max((index for index, entry in enumerate(entries) if entry.kind == "resume"), default=-1)
    since, landed_s = entries[last + 1 :], simulation.landed_s[last + 1 :]
    ended_s = [store.created_s.get(replica_key(RUN, *each, "outcome.json"), 0.0) for each in store.newest.items()]
    over_s = max(ended_s, default=0.0)  # a later cancel has no effect, and no controller is left to stop the run
    cancelled = {
        entry.rank for entry, at_s in zip(since, landed_s, strict=True) if entry.kind == "cancel" and at_s <= over_s
    }
    gone = {entry.rank for entry in since if entry.kind == "give_up"}
    for rank, number in store.newest.items():
        end = store.ends.get((rank, number))  # no outcome: the intent was stored after the run had ended
        if end is not None and end.status is ReplicaStatus.CANCELLED:
            gone |= {rank} & cancelled
    n_done = sum(end.status is ReplicaStatus.SUCCEEDED for end in store.ends.values())
    had_policy = any(
        controller.policy is not None for controller in simulation.controllers
    )  # a policy may be ordered when no controller is running
    if not had_policy or scenario.min_replicas is None:
        return
    if n_done >= scenario.min_replicas or scenario.n_ranks - len(gone) >= scenario.min_replicas:
        return
    if not any(entry.kind == "stop" or (entry.kind == "cancel" and entry.rank is None) for entry in since):
        raise Violation(f"ranks {gone} of {scenario.n_ranks} are gone, and no decision has stopped the run")
