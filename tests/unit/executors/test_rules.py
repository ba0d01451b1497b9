"""Tests `decide` rule by rule: the decision that follows an end."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.new_runs import run_spec

from executors.attempt import Attempt
from executors.errors import CorruptObjectError, KeyNotFoundError, StoreError, UnsafeStoreError, UnwritableStoreError
from executors.protocol import Outcome, ReplicaStatus
from executors.replica.shared_page import SharedPage
from executors.restarts.decision_log import Decision, decision_on, is_blocked
from executors.restarts.rules import MOST_REFUSED, RunFacts, decide, made_progress, too_few_left
from executors.settings.policy import HangLimits, Restarts
from executors.store import MemoryStore
from executors.supervisor.exits import ExitClassifier, fields_from_outside
from executors.supervisor.memory_kills import CLOCKS_DRIFT, MemoryKills
from executors.supervisor.processes import NEVER, RunningAttempt
from executors.supervisor.watchdog import Watchdog
from executors.worker.failure import describe_failure

FACTS = RunFacts(run_id="run", world_size=4, launched_at=0.0, has_progress=True)
EARLY = replace(FACTS, has_progress=False)
BY_ITSELF: dict[str, Any] = {"reason": "exception", "fingerprint": "same"}
CANCELLED = Outcome(0, 0, ReplicaStatus.CANCELLED, "cancelled")


def end(rank: int = 0, attempt: int = 0, reason: str = "signal", **more: Any) -> Outcome:
    return Outcome(rank, attempt, ReplicaStatus.FAILED, reason, **more)  # type: ignore[arg-type]


def answers(policy: str, *ends: Outcome, at: Sequence[float] = (), facts: RunFacts = FACTS) -> list[Decision]:
    """Decide about ends one after the other. By default they have the same time."""
    log: list[Decision] = []
    for number, each in enumerate(ends):
        now = at[number] if at else 1.0
        if (answer := decide(log, each, [], Restarts.parse(policy), facts, now)) is not None:
            log.append(replace(answer, at=now))
    return log


def ended_for_want_of_a_store(has_result: bool = False, store_failed: bool = True) -> tuple[RunningAttempt, int]:
    """Return the outcome of a process that had no claim, or could not record its end."""
    page, attempt = SharedPage(), Attempt(MemoryStore(), "run", 0)
    page.has_result, page.store_failed = has_result, store_failed
    spec = run_spec("run", "memory:", "", 1, (0,))
    watchdog = Watchdog(page, 1, HangLimits(), ends=True, term_grace_s=1.0, spec=spec, rank=0)
    return RunningAttempt(1, attempt, page, watchdog, 0.0, NEVER), 1


def told(log: Sequence[Decision | None]) -> list[str]:
    return [entry.why or entry.kind for entry in log if entry is not None]


REFUSED: dict[str, Any] = {"reason": "start_failed", "was_refused": True}
KEPT = [end(attempt=number, saved_marks=1) for number in range(4)]
OUT_OF_MEMORY = [end(attempt=number, reason="oom", saved_marks=1) for number in range(3)]
POINTLESS = [end(attempt=number) for number in range(6)]
FREE = [end(attempt=number, exit_code=75) for number in range(4)]
RESTARTS_AND = ["restart"] * 3


@pytest.mark.parametrize(
    ("policy", "ends", "at", "expected"),
    [
        ("3", KEPT, (), [*RESTARTS_AND, "budget"]),
        ("0", KEPT[:1], (), ["budget"]),
        ("1/10s", KEPT, (0.0, 20.0, 40.0, 45.0), [*RESTARTS_AND, "budget"]),
        ("3,run=1", [KEPT[0], end(1, saved_marks=1)], (), ["restart", "budget"]),
        ("3,within=10s", KEPT[:2], (10.0, 10.5), ["restart", "budget"]),
        ("0,preempted=inf,within=10s", [end(reason="preempted")], (11.0,), ["budget"]),
        ("0,75=inf", FREE, (), ["restart"] * 4),
        ("3,75=1", FREE[:2], (), ["restart", "budget"]),
        ("3,75=1", [FREE[0], KEPT[1]], (), ["restart", "restart"]),
        ("3,signal=0,75=2", FREE[:1], (), ["restart"]),
        ("3,oom=2", OUT_OF_MEMORY, (), ["restart", "restart", "budget"]),
        ("3/10s,oom=1", OUT_OF_MEMORY[:2], (0.0, 20.0), ["restart", "restart"]),
        ("3", [end(reason="timeout")], (), ["budget"]),
        ("3", [end(reason="result_not_serializable", fingerprint="x")], (), ["budget"]),
        ("9", POINTLESS, (), [*RESTARTS_AND, "no_progress", "no_progress", "no_progress"]),
        ("9,no_progress=1", POINTLESS[:2], (), ["restart", "no_progress"]),
        ("9,no_progress=1", [end(), end(attempt=1, saved_marks=1), end(attempt=2)], (), RESTARTS_AND),
        ("9,no_progress=1,75=inf", [POINTLESS[0], FREE[1], POINTLESS[2]], (), ["restart", "restart", "no_progress"]),
        ("9", [end(**BY_ITSELF), end(attempt=1, **BY_ITSELF)], (), ["restart", "deterministic"]),
        ("9", [end(**BY_ITSELF), end(attempt=1, reached={"step": 3}, **BY_ITSELF)], (), ["restart", "restart"]),
        ("9", [end(reason="oom", fingerprint="same"), end(1, fingerprint="same")], (), ["restart", "restart"]),
        ("9", [end(fingerprint="SIGKILL", signal="SIGKILL"), end(attempt=1, signal="SIGKILL")], (), ["restart"] * 2),
        ("9", [end(attempt=n, fingerprint="v", signal="SIGSEGV") for n in range(2)], (), ["restart", "deterministic"]),
        ("9,exception=inf", [end(attempt=n, **BY_ITSELF) for n in range(3)], (), RESTARTS_AND),
        ("9", [CANCELLED, replace(CANCELLED, status=ReplicaStatus.SUCCEEDED), end(reason="fenced")], (), []),
    ],
)  # fmt: skip
def test_ends_are_answered(policy: str, ends: list[Outcome], at: tuple[float, ...], expected: list[str]) -> None:
    assert told(answers(policy, *ends, at=at)) == expected


def test_equal_failures_on_every_backend_before_any_progress_stop_the_run() -> None:
    ends = [end(rank, **BY_ITSELF) for rank in range(4)]
    answer = decide([], ends[0], ends[1:], Restarts(), EARLY, 1.0)
    assert answer is not None
    assert (answer.kind, answer.why, answer.start) == ("stop", "deterministic", {})
    for other, facts in (([end(1, reason="exception", fingerprint="other")], EARLY), (ends[1:], FACTS), ([], EARLY)):
        assert told([decide([], ends[0], other, Restarts(), facts, 1.0)]) == ["restart"]


def test_failures_on_one_of_several_backends_do_not_stop_the_ranks_of_another() -> None:
    """Two local ranks fail because a module is missing there.

    That proves nothing about jobs that still wait in a queue.
    """
    facts, policy = (
        replace(EARLY, rank_groups=(frozenset({0, 1}), frozenset({2, 3}))),
        Restarts.parse("3,no_progress=9"),
    )
    first, other, elsewhere, added, more = (end(rank, **BY_ITSELF) for rank in (0, 1, 2, 4, 5))
    log = answers("3,no_progress=9", first, other, facts=facts)
    assert told(log) == ["restart", "restart"]
    again = replace(first, attempt=1)
    assert told([decide(log, again, [other], policy, facts, 2.0)]) == ["deterministic"], "given up alone"
    assert [entry.kind for entry in [decide(log, again, [other], policy, facts, 2.0)] if entry] == ["give_up"]
    assert told([decide([], first, [elsewhere], policy, facts, 1.0)]) == ["deterministic"], "everywhere"
    assert told([decide(log, elsewhere, [other], policy, facts, 2.0)]) == ["deterministic"]
    one_place = replace(EARLY, rank_groups=(frozenset(range(4)),))
    assert told([decide([], first, [elsewhere], policy, one_place, 1.0)]) == ["deterministic"]
    assert told([decide([], added, [more], policy, one_place, 1.0)]) == ["restart"], "added ranks may be elsewhere"


def failure_of(error: Exception, while_handling: Exception | None = None) -> dict[str, Any]:
    """Return the failure in an outcome for an exception of the entrypoint."""
    try:
        try:
            if while_handling is not None:
                raise while_handling
        finally:
            raise error
    except type(error) as raised:
        return {"reason": "exception", **describe_failure(raised)}


SILENT = StoreError("Cannot read 'run/seal': timed out")


@pytest.mark.parametrize(
    "why",
    [
        failure_of(SILENT),
        failure_of(UnwritableStoreError("Cannot write 'run/seal': No space left on device.")),
        failure_of(RuntimeError("no anchor"), while_handling=SILENT),
        {"reason": "no_result", **fields_from_outside(*ended_for_want_of_a_store())},
        {"reason": "no_result", **fields_from_outside(*ended_for_want_of_a_store(has_result=True, store_failed=False))},
    ],
    ids=["silent", "full", "handled", "no_outcome", "unrecorded"],
)
def test_a_store_that_does_not_answer_is_never_a_deterministic_end(why: dict[str, Any]) -> None:
    ends = [end(rank, **why) for rank in range(4)]
    assert told([decide([], ends[0], ends[1:], Restarts(), EARLY, 1.0)]) == ["restart"]
    twice = [end(attempt=number, **why) for number in range(6)]
    assert told(answers("9", *twice)) == [*RESTARTS_AND, "no_progress", "no_progress", "no_progress"]


@pytest.mark.parametrize("store_failed", [False, True])
def test_a_process_that_returned_a_result_is_not_reported_to_have_ended_before_it(store_failed: bool) -> None:
    running, code = ended_for_want_of_a_store(has_result=True, store_failed=store_failed)
    reason, error = ExitClassifier(1, None, MemoryKills(lambda: 0)).explain(running, code)
    said = "Replica 0 of 1 returned a result that was not recorded. The replica's log has the reason."
    assert (reason, error) == ("no_result", said)


@pytest.mark.parametrize("set_back_by_s", [0.0, 3600.0, -3600.0])
def test_an_oom_is_called_that_even_if_the_clock_was_set_since_the_process_began(
    monkeypatch: pytest.MonkeyPatch, set_back_by_s: float
) -> None:
    def reason(killed_at: float) -> str | None:
        running, _ = ended_for_want_of_a_store(store_failed=False)
        running.started_at = time.time() + set_back_by_s
        monkeypatch.setattr("executors.supervisor.memory_kills.killed_for_memory", lambda _, since: killed_at >= since)
        return sigkilled(running, MemoryKills(ascending()))[0]

    now = time.monotonic()
    assert reason(killed_at=now) == "oom"
    assert reason(killed_at=now - 60 - 2 * now * CLOCKS_DRIFT) == "signal", (
        "the kill was of an earlier process with this pid"
    )


def ascending() -> Callable[[], int]:
    """Return a counter that grows after every second read. The first of two reads only checks that it exists."""
    numbers = itertools.count()
    return lambda: next(numbers)


def sigkilled(running: Any, kills: MemoryKills) -> tuple[str | None, str | None]:
    return ExitClassifier(1, None, kills).explain(running, -signal.SIGKILL)


@pytest.fixture
def unreadable_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the kernel's log, which only root may read."""
    monkeypatch.setattr("executors.supervisor.memory_kills.killed_for_memory", lambda pid, since: None)


@pytest.mark.usefixtures("unreadable_log")
def test_a_kill_counted_in_the_own_control_group_is_an_oom_and_explains_one_end_only() -> None:
    count = 5
    kills = MemoryKills(lambda: count)
    count = 6
    first, second = (ended_for_want_of_a_store(store_failed=False)[0] for _ in range(2))
    assert sigkilled(first, kills)[0] == "oom"
    assert sigkilled(second, kills)[0] == "signal"


@pytest.mark.usefixtures("unreadable_log")
def test_a_kill_counted_for_the_whole_machine_proves_nothing() -> None:
    count = 5
    kills = MemoryKills(lambda: None, lambda: count)
    running, _ = ended_for_want_of_a_store(store_failed=False)
    assert sigkilled(running, kills) == ("signal", "Replica 0 of 1 was ended by signal 9 (SIGKILL).")
    count = 6
    reason, error = sigkilled(running, kills)
    assert reason == "signal"
    assert error is not None
    assert "Perhaps memory ran out" in error


@pytest.mark.usefixtures("unreadable_log")
@pytest.mark.parametrize("count_all", [False, True])
def test_a_kill_of_a_stranger_does_not_explain_an_end_long_after_it(count_all: bool) -> None:
    now, count = 0.0, 5
    kills = MemoryKills(lambda: None if count_all else count, lambda: count, lambda: now)
    count = 6
    for _ in range(2):
        now += 10.0
        kills.look()
    running, _ = ended_for_want_of_a_store(store_failed=False)
    assert sigkilled(running, kills) == ("signal", "Replica 0 of 1 was ended by signal 9 (SIGKILL).")


@pytest.mark.parametrize("kind", [KeyNotFoundError, CorruptObjectError, UnsafeStoreError])
def test_two_equal_permanent_errors_of_a_store_stop_restarts(kind: type[StoreError]) -> None:
    text = "'run/task.json' has other bytes than were written."
    ends = [end(attempt=number, **failure_of(kind(text))) for number in range(2)]
    assert told(answers("9", *ends)) == ["restart", "deterministic"]


def test_a_sister_that_was_restarted_since_counts_too_until_a_user_resumes() -> None:
    log = answers("3", end(1, **BY_ITSELF), facts=EARLY)
    mine = end(0, **BY_ITSELF)
    assert told([decide(log, mine, [], Restarts(), EARLY, 2.0)]) == ["deterministic"]
    log.append(Decision(kind="resume", start={1: 2}))
    assert told([decide(log, mine, [], Restarts(), EARLY, 2.0)]) == ["restart"]


def test_waits_double_without_progress_and_are_spread() -> None:
    waits = [entry.not_before - 1.0 for entry in answers("9,no_progress=9,backoff=1s:5s", *POINTLESS)]
    assert all(most / 2 <= wait <= most for wait, most in zip(waits, (1, 2, 4, 5, 5, 5), strict=True))
    assert [entry.not_before for entry in answers("9", *KEPT)] == [1.0] * 4
    assert len({entry.not_before for rank in range(4) for entry in answers("9", end(rank))}) == 4


def test_only_the_first_end_that_costs_nothing_is_restarted_at_once() -> None:
    """Otherwise a command that exits at once with a free exit code would be started several times a second."""
    waits = [entry.not_before - 1.0 for entry in answers("0,75=inf", *FREE)]
    assert waits[0] == 0.0
    assert 0.5 <= waits[1] < waits[2] < waits[3]


def test_starts_that_the_service_refuses_cost_nothing_until_there_are_too_many_in_a_row() -> None:
    refused = [end(attempt=number, **REFUSED) for number in range(MOST_REFUSED + 1)]
    log = answers("1,no_progress=1", *refused)
    assert told(log) == ["restart"] * MOST_REFUSED + ["refused"]
    assert not any(entry.charged for entry in log)
    assert log[9].not_before - 1.0 >= 30.0, "the waits grow"
    taken = [*refused[:-1], end(attempt=MOST_REFUSED), replace(refused[0], attempt=MOST_REFUSED + 1)]
    assert told(answers("1,no_progress=1", *taken)) == ["restart"] * (MOST_REFUSED + 2)
    assert told(answers("1,start_failed=0", refused[0])) == ["budget"]


def test_a_resume_begins_budgets_and_strikes_again() -> None:
    log = answers("1", end(), end(attempt=1))
    assert told(log) == ["restart", "budget"]
    log.append(Decision(kind="resume", start={0: 2}))
    answer = decide(log, end(attempt=2), [], Restarts(1), FACTS, 1.0)
    assert answer is not None
    assert (answer.kind, answer.strikes, answer.start) == ("restart", 1, {0: 3})


def test_without_saved_state_a_step_further_than_ever_is_progress() -> None:
    log = answers("9", end(reached={"step": 5.0}), end(attempt=1, reached={"step": 5.0}))
    assert [entry.strikes for entry in log] == [0, 1]
    assert made_progress(log, end(attempt=2, reached={"step": 6.0}), [])
    assert not made_progress(log, end(attempt=2, reached={"step": 6.0}), [end(1, saved_marks=1)]), (
        "if the run saves work elsewhere, a further step alone is not progress"
    )


def test_together_restarts_every_rank_that_has_not_ended_for_good() -> None:
    log = [
        Decision(kind="give_up", rank=1, ended=0, why="budget"),
        Decision(kind="resume", start={5: 1}),
        Decision(kind="cancel", rank=5),
        Decision(kind="restart", rank=4, ended=0, start={4: 1}),
    ]
    done = [Outcome(2, 0, ReplicaStatus.SUCCEEDED), end(3, reason="fenced")]
    facts = replace(FACTS, newest={0: 2, 1: 0, 2: 0, 3: 1, 4: 0, 5: 1})
    answer = decide(log, end(attempt=2), done, Restarts(together=True), facts, 1.0)
    assert answer is not None
    assert answer.start == {0: 3, 3: 2, 4: 2}
    assert decision_on([*log, answer], 3, 1) is answer


def test_an_end_of_an_attempt_that_is_not_the_newest_is_not_answered() -> None:
    assert decide([], end(), [], Restarts(), replace(FACTS, newest={0: 1}), 1.0) is None


@pytest.mark.parametrize("bar", [Decision(kind="stop"), Decision(kind="cancel"), Decision(kind="cancel", rank=0)])
def test_nothing_follows_a_stop_or_a_cancel_until_a_resume(bar: Decision) -> None:
    assert decide([bar], end(), [], Restarts(), FACTS, 1.0) is None
    resumed = [bar, Decision(kind="resume", start={0: 1})]
    assert decide(resumed, end(), [], Restarts(), FACTS, 1.0) is None, (
        "the resume starts the next attempt, so no decision is needed"
    )
    assert decide(resumed, end(attempt=1), [], Restarts(), FACTS, 1.0) is not None
    assert is_blocked(resumed, 1) == (bar.rank is None)


def test_a_decision_before_a_resume_does_not_count_for_an_end_after_it() -> None:
    log = [Decision(kind="restart", rank=1, ended=3, start={0: 4, 1: 4}), Decision(kind="resume", start={0: 2})]
    assert decision_on(log, 0, 1) is log[1]
    assert decision_on(log, 0, 2) is None


def test_a_restart_that_does_not_start_a_rank_is_not_an_answer_to_its_end() -> None:
    lie = Decision(kind="restart", rank=0, ended=5, start={1: 6})
    assert decision_on([lie], 0, 0) is None
    answer = decide([lie], end(), [], Restarts(), FACTS, 1.0)
    assert answer is not None
    assert answer.start == {0: 1}


GIVEN_UP = Decision(kind="give_up", rank=0, ended=0)
ENDED = [end(0), end(1)]
DONE = [Outcome(rank, 0, ReplicaStatus.SUCCEEDED) for rank in range(2, 5)]


@pytest.mark.parametrize(
    ("log", "ends", "is_so"),
    [
        ([GIVEN_UP], ENDED, False),
        ([GIVEN_UP, replace(GIVEN_UP, rank=1)], ENDED, True),
        ([GIVEN_UP, Decision(kind="cancel", rank=1)], [ENDED[0], replace(CANCELLED, rank=1)], True),
        ([GIVEN_UP], [ENDED[0], replace(CANCELLED, rank=1)], True),
        ([GIVEN_UP, replace(GIVEN_UP, rank=1), Decision(kind="stop")], ENDED, False),
        ([GIVEN_UP, replace(GIVEN_UP, rank=1), Decision(kind="cancel")], ENDED, False),
        ([GIVEN_UP, replace(GIVEN_UP, rank=1), Decision(kind="resume", start={0: 1})], ENDED, False),
        ([GIVEN_UP, replace(GIVEN_UP, rank=1)], [*ENDED, *DONE], False),
    ],
)  # fmt: skip
def test_too_few_are_left_when_fewer_than_min_replicas_can_succeed(
    log: list[Decision], ends: list[Outcome], is_so: bool
) -> None:
    assert too_few_left(log, ends, n=4, min_replicas=3) == is_so


class Counted(list[Decision]):
    """A log that counts how often an entry is looked at."""

    looks = 0

    def __iter__(self) -> Iterator[Decision]:
        for entry in super().__iter__():
            self.looks += 1
            yield entry

    def __reversed__(self) -> Iterator[Decision]:
        for entry in super().__reversed__():
            self.looks += 1
            yield entry


@pytest.mark.parametrize("policy", ["1000,run=1000,no_progress=1000", "1000,together,no_progress=1000"])
def test_a_decision_looks_at_each_entry_of_a_long_log_a_few_times(policy: str) -> None:
    looks = []
    for length in (1000, 10_000):
        log = Counted(Decision(kind="restart", rank=rank % 50 + 1, start={rank % 50 + 1: 1}) for rank in range(length))
        facts = replace(FACTS, newest=dict.fromkeys(range(200), 1) | {0: 0})
        assert decide(log, end(), [], Restarts.parse(policy), facts, 1.0) is not None
        looks.append(log.looks)
    assert looks[1] <= 10 * looks[0] <= 10 * 12 * 1000
