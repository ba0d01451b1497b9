"""Many logs are followed at the same time. Each line comes once and in order, whatever one rank does."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta

import pytest

from executors.backends.jobs.job_logs import RetryingLog
from executors.backends.jobs.service import JobServiceError
from executors.backends.jobs.timed_log import FULL, MAX_KNOWN, LogEntry, SharedLog, TimedLog
from executors.logs.follower import MAX_PARTS, MAX_THREADS, LogPosition, follow_logs
from executors.logs.log import Log
from executors.logs.readers import OffsetLog
from executors.testing import eventually

N = 64
PATIENCE_S = 60.0


class Scripted:
    """A log that counts its readings, and has all lines as soon as they were written."""

    note = cut = ""
    may_lag = False
    pause_s = 0.0

    def __init__(self, read: Callable[[], list[str]], close: Callable[[], None] = lambda: None) -> None:
        self.read = read
        self._close = close

    def tail(self, n_lines: int) -> str:
        return ""

    def pieces(self) -> Iterator[bytes]:
        yield b""

    def lines(self, n_first: int, *, has_ended: bool = False) -> Iterator[list[str]]:
        yield self.read()

    def close(self) -> None:
        self._close()


class Scene:
    """A run of some ranks. The test decides how it continues."""

    def __init__(self, open_log: Callable[[int, int], Log | None], *, has_ended: bool = False) -> None:
        self._open_log = open_log
        self.looks: list[Sequence[int] | None] = []
        self.positions: dict[int, LogPosition] = {}
        self.has_ended = has_ended

    def look(self, ranks: Sequence[int] | None) -> dict[int, LogPosition]:
        self.looks.append(ranks)
        return {rank: self.positions.get(rank, LogPosition(0, self.has_ended)) for rank in (ranks or self.positions)}

    def open(self, rank: int, attempt: int) -> Log | None:
        return self._open_log(rank, attempt)

    def kept(self, rank: int, attempt: int) -> str:
        return ""


def test_all_ranks_are_read_at_the_same_time_and_one_look_is_of_all() -> None:
    together = threading.Barrier(N, timeout=PATIENCE_S)  # the barrier breaks if one rank waits for another

    def open_log(rank: int, attempt: int) -> Log:
        def read() -> list[str]:
            together.wait()
            return [f"{rank}\n"]

        return Scripted(read)

    scene = Scene(open_log, has_ended=True)
    lines = sorted(follow_logs(scene, range(N), 5, look_s=PATIENCE_S))
    assert lines == [(rank, 0, f"{rank}\n") for rank in range(N)]
    assert scene.looks == [range(N)]


def test_a_rank_whose_log_does_not_answer_holds_up_no_other_and_not_the_end_of_following() -> None:
    never, was_closed = threading.Event(), threading.Event()

    def hang() -> list[str]:
        assert never.wait(PATIENCE_S)
        return []

    def open_log(rank: int, attempt: int) -> Log:
        return Scripted(hang, was_closed.set) if rank == 0 else Scripted(lambda: [f"{rank}\n"])

    lines = follow_logs(Scene(open_log), range(3), 5)
    seen: set[int] = set()
    while seen != {1, 2}:
        seen.add(next(lines)[0])
    lines.close()  # type: ignore[attr-defined]
    assert was_closed.is_set()
    never.set()


def test_the_last_lines_are_counted_among_those_that_the_reader_shows() -> None:
    text = [f"[{number % 3}] {number}\n" for number in range(30)]
    scene = Scene(lambda rank, attempt: Scripted(lambda: text), has_ended=True)
    selects = {0: lambda line: line.startswith("[1]"), 1: lambda line: False}
    lines = [(rank, line) for rank, _, line in follow_logs(scene, range(2), 2, look_s=PATIENCE_S, selects=selects)]
    assert lines == [(0, "[1] 25\n"), (0, "[1] 28\n")]


def test_a_reader_that_is_slow_makes_the_logs_wait() -> None:
    numbers = itertools.count()
    lines = follow_logs(Scene(lambda rank, attempt: Scripted(lambda: [f"{next(numbers)}\n"])), range(N + 9), 5)
    for _ in range(100):
        next(lines)
    threads = [thread for thread in threading.enumerate() if thread.name == "replicas-logs"]
    assert len(threads) <= MAX_THREADS + 1
    assert next(numbers) <= 100 + MAX_PARTS + MAX_THREADS + 1
    lines.close()  # type: ignore[attr-defined]
    eventually(lambda: not any(thread.is_alive() for thread in threads), "the threads end")


def test_following_ends_even_if_a_rank_that_had_ended_continued_for_a_while_under_its_old_log() -> None:
    phases = [{0: True}, {0: False}, {0: False, 1: True}, {0: True, 1: True}]
    phase, seen, has_come_to_end = 0, threading.Event(), threading.Event()

    class Flickering(Scene):
        def look(self, ranks: Sequence[int] | None) -> dict[int, LogPosition]:
            seen.set()
            return {rank: LogPosition(0, phases[phase].get(rank, False)) for rank in range(2)}

    def follow() -> None:
        list(follow_logs(Flickering(lambda rank, attempt: Scripted(list)), range(2), 5, look_s=0.01))
        has_come_to_end.set()

    threading.Thread(target=follow, daemon=True).start()
    for phase in range(len(phases)):
        for _ in range(5 if phase < 3 else 0):
            seen.clear()
            assert seen.wait(PATIENCE_S)
    assert has_come_to_end.wait(PATIENCE_S)


def test_if_all_ranks_are_followed_added_ranks_are_followed_too() -> None:
    scene = Scene(lambda rank, attempt: Scripted(lambda: [f"{rank}\n"]))
    scene.positions = {0: LogPosition(0, False)}
    lines = follow_logs(scene, None, 5, look_s=0.01)
    assert next(lines) == (0, 0, "0\n")
    scene.positions = {0: LogPosition(0, False), 7: LogPosition(0, False)}
    assert next(line for line in lines if line[0] != 0) == (7, 0, "7\n")
    scene.positions = dict.fromkeys(scene.positions, LogPosition(0, True))
    assert {rank for rank, _, _ in lines} <= {0, 7}


def test_a_rank_that_is_begun_again_is_followed_on() -> None:
    texts = {0: b"first\nunfinished", 1: b"second\n"}
    opened = []

    def open_log(rank: int, attempt: int) -> Log:
        opened.append(attempt)
        text = texts[attempt]
        return OffsetLog(lambda offset, n: (text[offset or 0 :], len(text)))

    scene = Scene(open_log)
    lines = follow_logs(scene, [3], 5, look_s=0.01)
    assert next(lines) == (3, 0, "first\n")
    scene.positions[3] = LogPosition(1, False)
    assert [next(lines) for _ in range(3)] == [
        (3, 0, "unfinished\n"),
        (3, 1, "=== attempt 1 ===\n"),
        (3, 1, "second\n"),
    ]
    scene.positions[3] = LogPosition(1, True)
    assert list(lines) == []
    assert opened == [0, 1]


def test_an_attempt_that_came_and_went_between_two_looks_is_shown_too() -> None:
    # attempt 1 continued in the log of attempt 0
    texts = {0: b"first\n", 2: b"the new traceback\nits end", 3: b"last\n"}
    scene = Scene(
        lambda rank, attempt: OffsetLog(lambda offset, n: (texts[attempt][offset or 0 :], len(texts[attempt])))
    )
    lines = follow_logs(scene, [3], 5, look_s=0.01)
    assert next(lines) == (3, 0, "first\n")
    scene.positions[3] = LogPosition(3, True, earlier=(0, 2))
    assert list(lines) == [
        (3, 2, "=== attempt 2 ===\n"),
        (3, 2, "the new traceback\n"),
        (3, 2, "its end\n"),
        (3, 3, "=== attempt 3 ===\n"),
        (3, 3, "last\n"),
    ]


def test_attempts_before_the_first_look_are_shown_of_a_rank_that_came_later_or_was_read_before() -> None:
    def open_log(rank: int, attempt: int) -> Log:
        text = f"{rank}, {attempt}\n".encode()
        return OffsetLog(lambda offset, n: (text[offset or 0 :], len(text)))

    scene = Scene(open_log)
    scene.positions = {0: LogPosition(2, False, earlier=(0, 1)), 1: LogPosition(2, True, earlier=(0, 1))}
    lines = follow_logs(scene, None, 5, first={1: 1}, look_s=0.01)
    shown = [next(lines) for _ in range(4)]
    assert [(rank, attempt) for rank, attempt, _ in shown if rank == 0] == [(0, 2)]
    assert [line for rank, _, line in shown if rank == 1] == ["1, 1\n", "=== attempt 2 ===\n", "1, 2\n"]
    scene.positions = {rank: LogPosition(2, True, earlier=(0, 1)) for rank in range(3)}
    assert [line for _, _, line in lines if "===" not in line] == ["2, 0\n", "2, 1\n", "2, 2\n"]


def test_an_error_in_a_thread_is_raised_to_the_reader_of_the_lines() -> None:
    def fail() -> list[str]:
        raise ValueError("not ours")

    with pytest.raises(ValueError, match="not ours"):
        list(follow_logs(Scene(lambda rank, attempt: Scripted(fail)), range(4), 5))


# Entries by time


class Service:
    """A service that stores the log entries of containers, and counts requests."""

    def __init__(self) -> None:
        self.start = datetime.now(UTC)
        self.entries: list[LogEntry] = []
        self.asked: list[tuple[str, datetime | None]] = []
        self.hides_all = False

    def write(self, text: str, at_s: float, container: str = "a") -> None:
        self.entries.append(LogEntry(self.start + timedelta(seconds=at_s), "stdout", text, container))

    def of(self, container: str) -> Callable[[datetime | None, int], list[LogEntry]]:
        def fetch(since: datetime | None, n: int) -> list[LogEntry]:
            self.asked.append((container, since))
            found = [e for e in self.entries if e.container == container and (since is None or e.at >= since)]
            return sorted(found)[-n:] if since is None else sorted(found)

        return fetch

    def of_all(self, since: datetime) -> list[LogEntry]:
        self.asked.append(("all", since))
        return [] if self.hides_all else sorted(entry for entry in self.entries if entry.at >= since)


def new_lines(log: TimedLog) -> list[str]:
    return [line for part in log.lines(5) for line in part]


def test_entries_that_come_late_or_are_alike_are_given_once_each_and_a_turn_is_one_request() -> None:
    service = Service()
    log = TimedLog(service.of("a"), None)
    service.write("one\n", 0)
    assert new_lines(log) == ["one\n"]
    service.write("x\n", 3)
    service.write("x\n", 3)
    assert new_lines(log) == ["x\n", "x\n"]
    service.write("late\n", 1)
    service.write("a par", 4)
    assert new_lines(log) == ["late\n"]
    service.write("t\n", 4.1)
    assert new_lines(log) == ["a part\n"]
    assert new_lines(log) == []
    assert len(service.asked) == 5
    assert all(since is not None for _, since in service.asked[1:]), (
        "every later request names the time since which it needs entries"
    )


def test_a_log_of_more_than_was_asked_for_begins_with_its_last_lines() -> None:
    service = Service()
    for number in range(500):
        service.write(f"{number}\n", number / 1000)
    log = TimedLog(service.of("a"), None)
    assert new_lines(log)[-1] == "499\n"
    assert new_lines(log) == []


def test_a_span_of_time_is_asked_of_a_service_that_keeps_times() -> None:
    service = Service()
    began = service.start.timestamp()
    for number in range(10):
        service.write(f"{number}\n", number)
    log = RetryingLog(TimedLog(service.of("a"), None), "rank 0")
    for since, until, found in ((3.0, None, range(3, 10)), (2.0, 5.5, range(2, 6)), (None, 1.5, range(2))):
        span = (None if since is None else began + since, None if until is None else began + until)
        assert [line for part in log.between(*span) for line in part] == [f"{number}\n" for number in found]


def test_a_span_of_more_entries_than_the_last_ones_that_a_service_gives_is_not_called_cut() -> None:
    service = Service()
    for number in range(MAX_KNOWN + 1):
        service.write(f"{number}\n", number / 1000)
    log = TimedLog(service.of("a"), None)
    for since, cut in ((service.start.timestamp(), ""), (None, FULL)):
        assert sum(map(len, log.between(since, None))) == MAX_KNOWN + 1
        assert log.cut == cut


def test_all_jobs_are_requested_together_and_missing_ones_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("executors.backends.jobs.timed_log.SHARED_EVERY_S", 0.0)
    for hides_all in (False, True):
        service = Service()
        service.hides_all = hides_all
        shared = SharedLog(service.of_all)
        names = [f"c{number}" for number in range(N)]
        for name in names:
            service.write("hello\n", 0, name)
        logs = [TimedLog(service.of(name), shared) for name in names]
        assert [new_lines(log) for log in logs] == [["hello\n"]] * N
        for turn in range(3):
            service.asked.clear()
            for name in names:
                service.write(f"{turn}\n", turn + 1, name)
            assert [new_lines(log) for log in logs] == [[f"{turn}\n"]] * N
            assert {container for container, _ in service.asked} == {"all"} | (set(names) if hides_all else set())


def test_a_request_for_all_jobs_that_fails_makes_each_asked_for_itself() -> None:
    service = Service()

    def refuse(since: datetime) -> list[LogEntry]:
        raise JobServiceError("no", "rejected")

    log = TimedLog(service.of("a"), SharedLog(refuse))
    service.write("one\n", 0)
    assert new_lines(log) == ["one\n"]
    service.write("two\n", 1)
    assert new_lines(log) == ["two\n"]
