"""Tests logs that arrive as events through an open connection, with a fake response."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from executors.backends.jobs import job_logs
from executors.backends.jobs.job_logs import BROKEN, StreamedLog
from executors.backends.jobs.service import JobServiceError

BEGAN_AT = 1_700_000_000


class Service:
    """A service whose log gets one line a second.

    Args:
        pause: is called before a line.
    """

    def __init__(self, n_lines: int, pause: Callable[[int], object] = lambda number: None) -> None:
        self.asked: list[int] = []
        self._n_lines = n_lines
        self._pause = pause

    @contextlib.contextmanager
    def connect(self, n_lines: int) -> Iterator[Any]:
        self.asked.append(n_lines)

        def events() -> Iterator[str]:
            for number in range(max(0, self._n_lines - n_lines), self._n_lines):
                self._pause(number)
                at = datetime.fromtimestamp(BEGAN_AT + number, UTC).isoformat()
                yield f"data: {json.dumps({'timestamp': at, 'data': f'line {number}'})}"

        yield SimpleNamespace(iter_lines=events, headers={}, extensions={})


def lines_from(first: int, behind: int) -> list[str]:
    return [f"line {number}\n" for number in range(first, behind)]


@pytest.mark.parametrize(
    ("first", "asked"), [(19_900, [10_000]), (5_000, [10_000, 100_000]), (0, [10_000, 100_000]), (-5, [10_000, 10**5])]
)
def test_a_span_is_looked_for_from_the_end_of_a_log(first: int, asked: list[int]) -> None:
    service = Service(20_000)
    log = StreamedLog(service.connect)
    found = [line for part in log.between(BEGAN_AT + first, None) for line in part]
    assert (found, service.asked, log.cut) == (lines_from(max(0, first), 20_000), asked, "")


def test_the_lines_up_to_a_moment_begin_with_the_first() -> None:
    found = [line for part in StreamedLog(Service(20_000).connect).between(None, BEGAN_AT + 9) for line in part]
    assert found == lines_from(0, 10)


def test_a_long_log_comes_in_pieces() -> None:
    pieces = list(StreamedLog(Service(20_000).connect).pieces())
    assert b"".join(pieces).decode() == "".join(lines_from(0, 20_000))
    assert max(map(len, pieces)) < 200_000


def test_a_pause_within_the_log_of_a_job_that_has_ended_is_not_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_logs, "QUIET_S", 0.01)
    goes_on = threading.Event()
    service = Service(20, lambda number: number != 10 or goes_on.wait(10))

    def has_ended() -> bool:  # called when no line has come for a while
        goes_on.set()
        return True

    log = StreamedLog(service.connect, has_ended)
    assert b"".join(log.pieces()).decode() == "".join(lines_from(0, 20))
    assert log.cut == ""


@pytest.mark.parametrize(("has_ended", "cut"), [(True, BROKEN), (False, "")])
def test_a_stream_that_stays_silent_is_the_whole_log_of_a_running_job_alone(
    monkeypatch: pytest.MonkeyPatch, has_ended: bool, cut: str
) -> None:
    monkeypatch.setattr(job_logs, "QUIET_S", 0.01)
    monkeypatch.setattr(job_logs, "LONGEST_S", 0.05)
    is_over = threading.Event()
    log = StreamedLog(Service(20, lambda number: number != 10 or is_over.wait(10)).connect, lambda: has_ended)
    assert b"".join(log.pieces()).decode() == "".join(lines_from(0, 10))
    assert log.cut == cut
    is_over.set()
    log.close()


@pytest.mark.parametrize("failing", [1, 2])
def test_a_connection_that_fails_before_its_first_line_costs_no_lines(failing: int) -> None:
    service, n_connected = Service(30_000), [0]

    @contextlib.contextmanager
    def connect(n_lines: int) -> Iterator[Any]:
        n_connected[0] += 1
        if n_connected[0] == failing:
            raise JobServiceError("502", "unavailable")
        with service.connect(n_lines) as response:
            yield response

    log = StreamedLog(connect)
    found = [line for part in log.between(BEGAN_AT + 500, None) for line in part]
    assert (found, log.cut) == (lines_from(500, 30_000), "")
    if failing == 1:
        n_connected[0] = 0
        assert b"".join(StreamedLog(connect).pieces()).decode() == "".join(lines_from(0, 30_000))
