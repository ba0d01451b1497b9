"""Tells users what follows the end of each replica: nothing, or a restart. The answer comes from the decision log."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from threading import Lock

from executors.errors import CorruptObjectError
from executors.process import may_live
from executors.protocol import BY_USER, STOPPED, Outcome, ReplicaStatus
from executors.restarts.decision_log import Decision, DecisionLog, blocking_order, decision_on, is_blocked, policy_of
from executors.restarts.decision_text import PERMANENT, RestartTally, describe_decision, describe_wait
from executors.restarts.orders import stop_reason
from executors.restarts.rules import RunFacts, decide
from executors.settings.policy import Restarts
from executors.status import WAITS_FOR_CONTROLLER, DecisionDocument, DecisionLine, ReplicaState, RestartState
from executors.store import Store
from executors.store.run_key import find_key
from executors.store.url import is_near
from executors.task.record import RunRecord

OVERDUE_S = 15.0  # a live supervisor needs at most this time to decide on an end and to start the next attempt
RESUME_S = 60.0  # the longest time from the entry of a resume to the claim of its replicas
CLOCKS_S = 60.0  # a time that is further in the future shows that a clock is wrong, on this machine or on the writer's


class RestartView:
    """Reads the decision log of one run, and adds to the state of each ended replica what follows its end.

    Args:
        store: the store of the run.
        run_id: the id of the run.
        record: the record of the run.
        has_live_controller: returns True if the supervisor of a given ended rank is alive. It is called only if a
            decision is overdue.
        has_ended: returns True if a given rank shows that its run ended with its launcher. It is called only if an
            attached run waits for a decision.
        reference: returns the name that finds a run again from this machine, given its id and the url of its store.
            Default: its id.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        record: RunRecord,
        has_live_controller: Callable[[int], bool],
        has_ended: Callable[[int], bool] = lambda rank: False,
        reference: Callable[[str, str], str] = lambda run_id, url: run_id,
    ) -> None:
        self._has_live_controller = has_live_controller
        self._has_ended = has_ended
        self._reference = reference
        self._is_near = is_near(store.url)
        self._log = DecisionLog(store, run_id, key=record.key_id and find_key(run_id, record.key_id))
        self._record = record
        self._rank_groups = record.ranks_by_placement  # computed once, because a run may have thousands of ranks
        self._launched = Restarts.of(record.settings.restarts)
        self._reading = Lock()
        self._seen: frozenset[tuple[int, int, bool]] = frozenset()
        self._problem = ""
        self._lines: list[DecisionLine] = []
        self._tally = RestartTally(self._launched)
        """The tally up to the last entry of `_lines`."""

    @property
    def decisions(self) -> Sequence[Decision]:
        """The entries of the log that were read."""
        return tuple(self._log.entries)

    def with_restarts(self, states: Sequence[ReplicaState], ends: Mapping[int, Outcome]) -> list[ReplicaState]:
        """Return the states of replicas. A replica that has ended is pending if another attempt follows.

        In a bucket, the log is read only after a replica has failed or was restarted. Before that it is usually empty,
        and each read would cost a request.

        Args:
            states: the states without the log.
            ends: the outcomes of all ranks that have one.
        """
        seen = frozenset(
            (state.rank, state.attempt, state.status.is_terminal)
            for state in states
            if state.attempt or (state.status.is_terminal and state.status is not ReplicaStatus.SUCCEEDED)
        )
        if self._is_near or (seen and (seen != self._seen or self._policy is not None)):
            self._read()
            self._seen = seen
        if self._policy is None and not self._log.entries:
            return [replace(state, doing=self._problem) if self._problem else state for state in states]
        log, now = self.decisions, time.time()
        tally = RestartTally(self._launched, log)
        return [self._with_answer(state, log, tally, list(ends.values()), now) for state in states]

    def about_to_start(self, newest: Mapping[int, int]) -> list[int]:
        """Read the log, and return the ranks whose next attempt a resume is about to start.

        The states of the run do not show this for ranks that have succeeded and that an extension of the run starts
        again.

        Args:
            newest: the number of the newest attempt of each rank that was begun.
        """
        self._read()
        log, now = self.decisions, time.time()
        answers = {rank: decision_on(log, rank, attempt) for rank, attempt in newest.items()}
        return [
            rank
            for rank, answer in answers.items()
            if answer is not None
            and answer.kind == "resume"
            and is_under_way(answer, now)
            and not is_blocked(log, rank)
        ]

    def share_log(self, log: DecisionLog) -> None:
        """Share the entries with another log object of the same run, so that each entry is read once.

        Args:
            log: the other log, as of a controller in this process.
        """
        with self._reading:
            self._log.take_over(log)
            log.take_over(self._log)

    def describe_decisions(self, ends: Mapping[int, Outcome]) -> list[DecisionLine]:
        """Return one line for each entry of the log that was read, oldest first.

        Args:
            ends: the outcomes of all ranks that have one.
        """
        with self._reading:
            for entry in self.decisions[len(self._lines) :]:
                found = ends.items() if entry.kind == "stop" else ()
                alike = [rank for rank, end in found if end.fingerprint == entry.fingerprint]
                self._lines.append(DecisionLine(entry.at, describe_decision(entry, self._tally, self._name, alike)))
                self._tally.add(entry)
            return list(self._lines)

    @property
    def restarts_by_reason(self) -> dict[str, int]:
        """The number of restarts that were decided, by the reason of the end before them."""
        return dict(Counter(str(entry.reason) for entry in self.decisions if entry.kind == "restart"))

    @cached_property
    def _name(self) -> str:
        """The name that finds the run again from this machine, in a command."""
        return self._reference(self._log.run_id, self._log.store.url)

    @property
    def _policy(self) -> Restarts | None:
        return policy_of(self._log.entries, self._launched)

    def _read(self) -> None:
        with self._reading:
            try:
                self._log.read()
                self._problem = ""
            except CorruptObjectError as error:  # no controller can read a damaged log, so no restart follows
                self._problem = str(error)

    def _with_answer(
        self, state: ReplicaState, log: Sequence[Decision], tally: RestartTally, ends: Sequence[Outcome], now: float
    ) -> ReplicaState:
        policy = tally.policy
        decided = [entry for entry in log if entry.kind == "restart" and state.rank in entry.start]
        known = RestartState(
            restarts=len(decided),
            charged=0 if policy is None else tally.charged(state.rank, now),
            limit=None if policy is None or policy.only_preempted else policy.per_replica,
        )
        end = state.outcome if state.status.is_terminal and state.is_readable else None
        if end is None or end.status is ReplicaStatus.SUCCEEDED:
            return replace(state, restart=known)
        answer = decision_on(log, end.rank, end.attempt)
        order = blocking_order(log, end.rank)
        if answer is not None:
            known = replace(known, decision=_decision_document(answer))
        if answer is not None and answer.kind in ("give_up", "stop"):
            note = describe_wait(log, log.index(answer), self._launched, now)
            return replace(state, restart=replace(known, note=note, is_permanent=answer.why in PERMANENT))
        # If an order cancelled a decided restart, it is shown as a cancelled attempt, as a live supervisor records it.
        if order is not None and answer is not None:
            number, error = answer.start[state.rank], f"Replica {state.rank} was ended: {stop_reason(order)}."
            gone = Outcome(state.rank, number, ReplicaStatus.CANCELLED, "cancelled", error=error, finished_at=order.at)
            return replace(state, attempt=number, status=gone.status, outcome=gone, restart=known)
        if order is not None or self._problem:
            is_permanent = order is not None and order.kind == "stop" and order.why in PERMANENT
            return replace(state, restart=replace(known, note=self._problem, is_permanent=is_permanent))
        if answer is not None and answer.kind == "resume":
            is_awaited = is_under_way(answer, now)
            return _awaiting(state, known, "resuming") if is_awaited else replace(state, restart=known)
        if answer is not None:
            known = replace(known, next_at=max(answer.not_before, answer.at))
            note = describe_wait(log, log.index(answer), self._launched, now)
            is_early = _is_within(answer.wait_s + OVERDUE_S, answer.at, now)
            if not (is_early and may_live(answer.by)) and self._is_left(end.rank):
                return replace(state, restart=replace(known, note=self._note_of_end))
            return _awaiting(state, known, self._note_of_wait(end.rank, note, is_early))
        expected = None if policy is None else self._expected(end, log, ends, policy, now)
        if expected is None:
            return replace(state, restart=known)
        if expected.kind == "give_up" and expected.why != "no_progress":
            note = describe_wait([*log, expected], len(log), self._launched, now)
            return replace(state, restart=replace(known, note=note, is_permanent=expected.why in PERMANENT))
        if self._is_left(end.rank):  # the supervisor and the launcher have ended, so no process can start a restart
            return replace(state, restart=replace(known, note=self._note_of_end))
        # The supervisor of a lost rank has ended with its machine. In a detached run no other process decides. So the
        # note appears at once, without the time that a supervisor gets.
        is_left = end.reason == "lost" and self._record.settings.detach
        is_early = not is_left and _is_within(OVERDUE_S, end.finished_at, now)
        return _awaiting(state, known, self._note_of_wait(end.rank, f"ended: {expected.words}", is_early))

    def _is_left(self, rank: int) -> bool:
        """Return True if an attached run has ended with its launcher and the rank's supervisor."""
        return not self._record.settings.detach and self._has_ended(rank)

    @property
    def _note_of_end(self) -> str:
        return f"the run ended with its launcher: replicas resume {self._name}"

    def _note_of_wait(self, rank: int, note: str, is_early: bool) -> str:
        # A living supervisor may wait with the start until fewer than `max_parallel` replicas run.
        if is_early or self._has_live_controller(rank):
            return note
        return f"{WAITS_FOR_CONTROLLER}: replicas watch {self._name}"

    def _expected(
        self, end: Outcome, log: Sequence[Decision], ends: Sequence[Outcome], policy: Restarts, now: float
    ) -> Decision | None:
        """Return the entry that a controller will add for an end without a decision.

        This process may not have seen all progress of the run. So it computes the entry twice, with and without
        progress. It returns a give_up only if both computations give one.
        """
        others = [other for other in ends if other.rank != end.rank]
        found = []
        for has_progress in (True, False):
            facts = RunFacts(
                run_id=self._log.run_id,
                world_size=self._record.world_size,
                launched_at=self._record.created_at,
                has_progress=has_progress,
                rank_groups=self._rank_groups,
            )
            found.append(decide(log, end, others, policy, facts, now))
        return next((answer for answer in found if answer is not None and answer.kind != "give_up"), found[0])


def _decision_document(entry: Decision) -> DecisionDocument:
    """Return the fields of a decision that other programs need, as plain JSON."""
    return {
        "kind": entry.kind,
        "why": entry.why,
        "reason": entry.reason,
        "words": entry.words,
        "start": entry.start,
        "charged": entry.charged,
        "strikes": entry.strikes,
        "not_before": entry.not_before,
        "at": entry.at,
        "by": entry.by,
    }


def was_stopped(log: Sequence[Decision], outcome: Outcome) -> bool:
    """Return True if a replica was cancelled because the run was stopped, and not by a cancel of the user.

    Args:
        log: the decisions on the run.
        outcome: the outcome of the newest attempt of the rank.
    """
    if outcome.reason == "stopped":
        return True
    last = next((entry for entry in reversed(log) if entry.kind in ("stop", "resume")), None)
    if last is None or last.kind != "stop":  # the run was never stopped, or was resumed since
        return False
    for entry in reversed(log):
        if entry.kind == "resume" and outcome.rank in entry.start:
            return False
        if entry.kind == "cancel" and entry.rank in (None, outcome.rank) and entry.words != STOPPED:
            return False
    return True


def was_removed(log: Sequence[Decision], outcome: Outcome) -> bool:
    """Return True if the user has cancelled this rank but not the run, so that the other ranks continue without it.

    Args:
        log: the decisions on the run.
        outcome: the outcome of the newest attempt of the rank.
    """
    if outcome.status is not ReplicaStatus.CANCELLED:
        return False
    for entry in reversed(log):
        if (entry.kind == "resume" and outcome.rank in entry.start) or entry.kind == "stop":
            return False
        if entry.kind == "cancel" and entry.rank in (None, outcome.rank):
            return entry.rank is not None and entry.words == BY_USER
    return False


def counted(log: Sequence[Decision], outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the outcomes that count for the status of a run.

    If any replica succeeded, ranks that a user has removed do not count.

    Args:
        log: the decisions on the run.
        outcomes: the outcomes of all its ranks.
    """
    rest = [outcome for outcome in outcomes if not was_removed(log, outcome)]
    has_success = any(outcome.status is ReplicaStatus.SUCCEEDED for outcome in rest)
    return rest if has_success else list(outcomes)


def is_under_way(resume: Decision, now: float) -> bool:
    """Return True if a resume may still start attempts that have not begun.

    Args:
        resume: the entry of the resume.
        now: Unix time.
    """
    return _is_within(RESUME_S, resume.at, now) and not resume.is_orphaned


def _is_within(seconds: float, since: float, now: float) -> bool:
    """Return True if at most some seconds have passed since a time that another machine's clock gave.

    A time far in the future is wrong, so the answer for it is False.
    """
    return -CLOCKS_S <= now - since <= seconds


def _awaiting(state: ReplicaState, restart: RestartState, note: str) -> ReplicaState:
    """Return the state of a replica that waits for its next attempt."""
    restart = replace(restart, note=note, is_awaited=True)
    return replace(state, status=ReplicaStatus.PENDING, outcome=None, restart=restart)
