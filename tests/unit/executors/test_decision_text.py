"""Tests the texts of decisions that users read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from executors.protocol import Outcome, ReplicaStatus
from executors.restarts.decision_log import Decision
from executors.restarts.decision_text import RestartTally, describe_decision, describe_wait
from executors.restarts.rules import RunFacts, decide
from executors.settings.policy import Restarts

REACHED = {"step": 812.0}
ERROR = "ValueError: no shard 'corpus-0003'"
AGAIN = "`replicas resume otter --rank 3` tries again."


def answered(*ends: Outcome, policy: str = "3") -> list[Decision]:
    """Return the decision log after some ends, with the decisions of the rules."""
    log: list[Decision] = []
    for end in ends:
        facts = RunFacts(run_id="otter", world_size=8, launched_at=0.0, has_progress=True)
        answer = decide(log, end, [], Restarts.parse(policy), facts, now=10.0)
        assert answer is not None
        log.append(answer)
    return log


def end(reason: Any, attempt: int = 0, **more: Any) -> Outcome:
    return Outcome(3, attempt, ReplicaStatus.FAILED, reason, **more)


KILLED = [end("signal", number, signal="SIGKILL", reached={"round": 41.0}, saved_marks=1) for number in range(3)]
RAISED = [
    end("exception", number, error=f"…\n{ERROR}", error_line=ERROR, fingerprint="f", reached=REACHED, saved_marks=1)
    for number in range(2)
]
STUCK = [end("hang", number) for number in range(4)]


@pytest.mark.parametrize(
    ("ends", "policy", "line", "note"),
    [
        (KILLED[:1], "3", "restarting rank 3 as attempt 1 (1 of 3): signal, SIGKILL, after round 41",
         "restarts now: signal, SIGKILL, after round 41"),
        (KILLED[:2], "3/5s", "restarting rank 3 as attempt 2 (2 of 3): signal, SIGKILL, after round 41",
         "restarts now: signal, SIGKILL, after round 41"),
        (KILLED[:1], "0,signal=inf", "restarting rank 3 as attempt 1 (free): signal, SIGKILL, after round 41",
         "restarts now: signal, SIGKILL, after round 41"),
        (RAISED, "3", f"rank 3 given up: it failed twice the same way at step 812: {ERROR}. {AGAIN}",
         f"given up: failed twice in the same way at step 812 ({ERROR})"),
        (STUCK, "9", f"rank 3 given up: 4 attempts in a row made no progress, the last: hang. {AGAIN}",
         "given up: 4 attempts in a row made no progress, the last: hang"),
        (KILLED, "2", f"rank 3 given up: 2 of 2 restarts are used: signal, SIGKILL, after round 41. {AGAIN}",
         "given up: 2 of 2 restarts are used: signal, SIGKILL, after round 41"),
        (KILLED, "9,run=2", "rank 3 given up: 2 of 2 restarts of the run are used: signal, SIGKILL, after round 41. "
         + AGAIN, "given up: 2 of 2 restarts of the run are used: signal, SIGKILL, after round 41"),
        ([end("timeout")], "3", f"rank 3 given up: the policy has no restart after timeout: timeout. {AGAIN}",
         "given up: the policy has no restart after timeout: timeout"),
        ([end("no_result", exit_code=42)], "3,42=0",
         f"rank 3 given up: the policy has no restart after exit code 42: no_result. {AGAIN}",
         "given up: the policy has no restart after exit code 42: no_result"),
        ([end("oom", number, saved_marks=1) for number in range(2)], "3",
         f"rank 3 given up: 1 of 1 restarts after oom are used: oom. {AGAIN}",
         "given up: 1 of 1 restarts after oom are used: oom"),
        (KILLED[:1], "3,within=5s",
         "rank 3 given up: the time for restarts has passed: signal, SIGKILL, after round 41. "
         + AGAIN, "given up: the time for restarts has passed: signal, SIGKILL, after round 41"),
    ],
)  # fmt: skip
def test_the_text_of_a_decision_has_the_next_step_and_the_reason(
    ends: Sequence[Outcome], policy: str, line: str, note: str
) -> None:
    log, launched = answered(*ends, policy=policy), Restarts.parse(policy)
    assert describe_decision(log[-1], RestartTally(launched, log[:-1]), "otter") == line
    assert describe_wait(log, len(log) - 1, launched, now=11.0) == note


def test_a_waiting_restart_shows_its_remaining_time() -> None:
    log = [Decision(kind="restart", rank=3, start={3: 1}, words="signal, SIGKILL", not_before=14.2)]
    assert describe_wait(log, 0, Restarts(), now=10.3) == "restarts in 4 s: signal, SIGKILL"


def test_a_restart_waits_no_longer_than_its_own_wait_if_the_clock_of_the_log_is_ahead() -> None:
    log = [Decision(kind="restart", rank=3, start={3: 1}, words="signal, SIGKILL", at=10_810.0, not_before=10_812.0)]
    assert describe_wait(log, 0, Restarts(), now=10.0) == "restarts in 2 s: signal, SIGKILL"


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        (
            Decision(kind="stop", why="deterministic", reason="exception", words=f"exception, {ERROR}"),
            f"stopped: ranks 0-7 failed the same way before their first step: {ERROR}",
        ),
        (
            Decision(kind="stop", why="min_replicas"),
            "stopped: fewer replicas than --min-replicas asks for can still succeed",
        ),
        (Decision(kind="stop", why="asked", within_s=600.0), "stopping, as requested, within 600 s"),
        (Decision(kind="cancel"), "cancelled: all ranks"),
        (Decision(kind="resume", start={3: 2, 5: 1}), "resuming ranks 3, 5 as attempts 1, 2"),
        (Decision(kind="policy", restarts="5", hang="off"), "from here on: restarts 5, hang timeout off"),
        (Decision(kind="policy"), "an entry without the run's key, which has no effect"),
    ],
)
def test_an_event_of_the_whole_run_is_printed_as_a_line_too(entry: Decision, line: str) -> None:
    assert describe_decision(entry, RestartTally(Restarts()), "otter", alike=range(8)) == line


def test_a_restart_of_all_together_names_the_others() -> None:
    entry = Decision(kind="restart", rank=3, start={0: 1, 1: 1, 2: 1, 3: 1}, charged=True, words="signal, SIGKILL")
    assert describe_decision(entry, RestartTally(Restarts()), "otter") == (
        "restarting rank 3 as attempt 1 (1 of 3), and with it ranks 0-2: signal, SIGKILL"
    )
