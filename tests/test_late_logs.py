"""Logs that come late, or whose answers break off: every line is told, and none twice."""

from __future__ import annotations

from typing import Any, cast

import pytest

from executors.following import follow_logs, last_lines
from executors.late_logs import completed
from executors.protocol import ReplicaStatus, ServerlessExecutor

LINES = [f"line {i} of é\n" for i in range(12)]
ALL = "".join(LINES)


class Scripted:
    """An executor that gives one answer after the other, and the last one for ever."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)

    def stream_logs(self, handle: Any, *, n_lines: int = 200) -> str:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def followed(*answers: str, kept: str = "", tail: int = 200) -> str:
    """Follow a replica that ends when one answer is left."""
    executor = Scripted(*answers)

    def poll(rank: int) -> ReplicaStatus:
        return ReplicaStatus.RUNNING if len(executor.answers) > 1 else ReplicaStatus.SUCCEEDED

    lines = follow_logs(
        cast(ServerlessExecutor, executor),
        poll,
        {0: "a handle"},
        tail,
        prefix=False,
        kept=lambda rank: kept,
        sleep=lambda seconds: None,
    )
    return "".join(lines)


@pytest.mark.parametrize("n_told", range(13))
def test_a_log_that_lags_behind_the_end_is_completed_from_the_outcome(n_told: int) -> None:
    told = "".join(LINES[:n_told])
    assert completed(told, ALL, 200) == ALL
    assert followed(*dict.fromkeys(("".join(LINES[: n_told // 2]), told)), kept=ALL) == ALL
    assert last_lines(cast(ServerlessExecutor, Scripted(told)), "a handle", 3, lambda: ALL) in ("".join(LINES[-3:]), "")


@pytest.mark.parametrize("cut", range(len(ALL)))
def test_an_answer_that_breaks_off_costs_no_line_and_doubles_none(cut: int) -> None:
    assert followed(ALL[:cut], ALL) == ALL
    assert followed(ALL[:80], ALL[:cut], ALL) == ALL
    assert followed(ALL[:80], ALL[:cut], kept=ALL) == ALL


def test_an_answer_in_a_window_that_moved_on_doubles_no_line() -> None:
    long = [f"{line[:-1]} {'.' * 2000}\n" for line in LINES]  # longer than what is looked for
    windows = [long[:6], long[3:8], long[3:5], long[4:]]
    assert followed(*map("".join, windows)) == "".join(long)


def test_what_the_replica_did_not_keep_stays_where_it_is() -> None:
    log = "a\nof another process\nb\nhalf of another"
    assert completed(log, "a\nb\n", 200) == log
    assert completed(log, "a\nb\nc\n", 200) == log + "\nc\n"


def test_lines_that_are_alike_are_counted() -> None:
    assert completed("{\na\n}\n", "{\na\n}\n{\nb\n}\n", 200) == "{\na\n}\n{\nb\n}\n"
    assert completed("x\nx\n", "x\nx\nx\n\ny\n", 200) == "x\nx\nx\n\ny\n"


def test_a_line_that_comes_otherwise_is_known_again() -> None:
    log = "a\n100%\r\ncaf\ufffd\ufffd \n"
    assert completed(log, "a\n10%\r100%\ncafé\n", 200) == log


def test_lines_before_the_window_are_not_missing() -> None:
    assert completed("".join(LINES[8:10]), ALL, 2) == "".join(LINES[8:])
    assert completed("".join(LINES[8:12]), ALL, 4) == "".join(LINES[8:])
