"""The log of decisions, and what follows an end."""

from __future__ import annotations

import math

import pytest

from executors.policy import HangLimits, Restarts
from executors.protocol import Outcome, ReplicaStatus
from executors.store.memory import MemoryStore
from executors.supervision.decisions import Decision, DecisionLog
from executors.supervision.rules import RunFacts, decide

FACTS = RunFacts(run_id="run", world_size=4, launched_at=0.0, has_progress=True)


def end(rank: int = 0, attempt: int = 0, reason: str = "signal", **more: object) -> Outcome:
    return Outcome(rank, attempt, ReplicaStatus.FAILED, reason, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    ["3", "0", "3/3600s", "3,oom=0,timeout=2,75=inf,42=0", "2,run=5,backoff=2s:30s,within=60s,together,how=launch"],
)
def test_a_policy_reads_as_it_is_written(text: str) -> None:
    assert str(Restarts.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("three", "whole number"),
        ("3,oon=1", "Did you mean 'oom'"),
        ("3,cancelled=1", "never restarted"),
        ("3,oom", "needs a value"),
        ("3,oom=1,oom=2", "given twice"),
        ("-1", "whole number"),
        ("3/0s", "at least 0.001 s"),
        ("3,how=proces", "way"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Restarts.parse(text)


def test_a_hang_limit_alone_has_a_hard_one_of_one_and_a_half_times() -> None:
    assert HangLimits.parse("2m") == HangLimits(120.0, 180.0)
    assert [str(HangLimits.parse(text)) for text in ("auto", "off", "90s:2m")] == ["auto", "off", "90s:120s"]


def test_of_two_writers_the_second_computes_again_behind_the_first() -> None:
    store = MemoryStore()
    first, second = DecisionLog(store, "run"), DecisionLog(store, "run")
    seen = []

    def answer(log: object) -> Decision | None:
        seen.append(len(second.entries))
        if len(seen) == 1:
            first.append(lambda _: Decision(kind="cancel"))
        return decide(second.entries, end(), [], Restarts(), FACTS, now=1.0)

    assert second.append(answer) is None
    assert seen == [0, 1]


def test_an_end_is_answered_once_and_counts_against_the_budget() -> None:
    log: list[Decision] = []
    for attempt in range(5):
        answer = decide(log, end(attempt=attempt, kept=1), [], Restarts(per_replica=3), FACTS, now=1.0)
        assert answer is not None
        log.append(answer)
        assert decide(log, end(attempt=attempt, kept=1), [], Restarts(per_replica=3), FACTS, now=1.0) is None
    assert [entry.kind for entry in log] == ["restart"] * 3 + ["give_up"] * 2
    assert log[-1].why == "budget"


def test_what_is_preempted_is_free() -> None:
    answer = decide([], end(reason="preempted"), [], Restarts(per_replica=0), FACTS, now=1.0)
    assert answer is not None
    assert (answer.kind, answer.charged, answer.not_before) == ("restart", False, 1.0)
    assert Restarts().cap("preempted", None) == ("preempted", math.inf)
