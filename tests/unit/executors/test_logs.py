"""Log files are read exactly and in bounded memory.

A log that comes late or is cut off is still returned completely.
"""

from __future__ import annotations

import errno
import re
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executors.attempt import Attempt
from executors.backends.local.local_log import CopiedLog
from executors.logs import LIMITED, MAX_READ_BYTES, last_of, read_from, tail_lines, tail_text
from executors.logs.follower import LogPosition, follow_logs
from executors.logs.gaps import BREAK, completed
from executors.logs.log import Log
from executors.logs.readers import WINDOW_LINES, FileLog, TailedLog
from executors.logs.times import PAIR, TimesWriter, times_of
from executors.store import MemoryStore
from executors.store.protocol import Entry
from executors.worker.log_copy import FINAL_BYTES, LIVE_BYTES

LINES = [f"line {i} of é\n" for i in range(12)]
ALL = "".join(LINES)


@given(
    lines=st.lists(st.binary(max_size=20).map(lambda data: data.replace(b"\n", b"")), max_size=30),
    ends_with_newline=st.booleans(),
    n_lines=st.integers(0, 40),
)
def test_the_last_lines_equal_a_plain_reading(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], ends_with_newline: bool, n_lines: int
) -> None:
    path = tmp_path_factory.mktemp("logs") / "log"
    if lines and not ends_with_newline and not lines[-1]:
        lines = [*lines, b"x"]
    path.write_bytes(b"\n".join(lines) + (b"\n" if lines and ends_with_newline else b""))
    newline = b"\n" if lines and ends_with_newline and n_lines else b""
    assert tail_lines(path, n_lines)[0] == b"\n".join(lines[max(0, len(lines) - n_lines) :]) + newline


def test_the_lines_of_a_span_are_found_by_when_the_log_grew(tmp_path: Path) -> None:
    path, now = tmp_path / "output.log", 1000.0
    writer, log = TimesWriter(path), FileLog(path)
    path.write_bytes(b"")
    for second in range(100):
        writer.note(now + second)
        if second not in range(40, 60):
            with open(path, "ab") as file:
                file.write(f"{second}\n".encode())
        writer.note(now + second + 0.5)  # within the same second
    assert times_of(path).stat().st_size <= 82 * PAIR.size, "the times have no entry while a log does not grow"

    def between(since: float | None, until: float | None) -> list[int]:
        return [int(line) for part in log.between(since, until) for line in part]

    everything = [number for number in range(100) if number not in range(40, 60)]
    assert between(None, None) == between(now - 5, now + 500) == everything
    for since in range(0, 100, 7):
        found = between(now + since, None)
        assert found == everything[len(everything) - len(found) :]
        assert {n for n in everything if n >= since} <= set(found) <= {n for n in everything if n >= since - 1}
        found = between(None, now + since)
        assert {n for n in everything if n < since - 1} <= set(found) <= {n for n in everything if n <= since}
    assert between(now + 45, now + 50) == []


def test_a_line_that_was_begun_before_a_span_and_ended_in_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    writer = TimesWriter(path)
    path.write_bytes(b"first\nhalf a")
    writer.note(1000.0)
    path.write_bytes(b"first\nhalf a line\n")
    writer.note(1010.0)
    assert list(FileLog(path).between(1005.0, None)) == [["half a line\n"], []]
    times_of(path).unlink()
    with pytest.raises(ValueError, match="were not kept"):
        list(FileLog(path).between(1005.0, None))


def test_a_progress_bar_is_one_line_and_a_line_of_two_megabytes_comes_whole(tmp_path: Path) -> None:
    for line in (b" 10%\r 20%\r 30%\n", b"x" * (2 << 20)):
        (tmp_path / "log").write_bytes(b"before\n" + line)
        assert tail_lines(tmp_path / "log", 1)[0] == line


@pytest.mark.parametrize("block", [b"a line of a log\n", b"no newline at all"])
def test_every_reader_of_a_200_mb_log_holds_a_bounded_part_of_it(tmp_path: Path, block: bytes) -> None:
    path = tmp_path / "log"
    with open(path, "wb") as file:
        chunk = block * ((1 << 20) // len(block))
        for _ in range(200):
            file.write(chunk)
    tracemalloc.start()
    try:
        tail_lines(path, 200)
        tail_lines(path, 10**9)
        tail_text(path, 65536)
        read_from(path, 100)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20 * MAX_READ_BYTES


def test_the_end_of_a_log_that_cannot_be_opened_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def has_none_free(*args: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    (tmp_path / "log").write_bytes(b"one\ntwo\n")
    with monkeypatch.context() as patch:  # the end of a test looks for processes, and reads files for that
        patch.setattr("builtins.open", has_none_free)
        assert tail_text(tmp_path / "log", 9) == ""


def test_reading_from_an_offset_gives_every_byte_once_and_a_missing_log_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert (tail_lines(path, 5), read_from(path, 7), tail_text(path, 9)) == ((b"", 0), (b"", 7), "")
    path.write_bytes(b"one\ntwo\nthree")
    first, offset = tail_lines(path, 2)
    with open(path, "ab") as file:
        file.write(b" and four\n")
    assert first + read_from(path, offset)[0] == b"two\nthree and four\n"


class Scripted:
    """A run of one rank. Its log returns the given answers one after another, and then repeats the last one."""

    def __init__(self, answers: tuple[str, ...], kept: str) -> None:
        self.answers = list(answers)
        self.tail = kept

    def look(self, ranks: Sequence[int] | None) -> dict[int, LogPosition]:
        return {0: LogPosition(0, has_ended=len(self.answers) == 1)}

    def open(self, rank: int, attempt: int) -> Log:
        log = TailedLog(lambda n_lines: self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])
        log.pause_s = 0.0
        return log

    def kept(self, rank: int, attempt: int) -> str:
        return self.tail


def followed(*answers: str, kept: str = "", tail: int = 200) -> str:
    """Follow a replica that ends when one answer is left."""
    scripted = Scripted(answers, kept)
    return "".join(line for _, _, line in follow_logs(scripted, [0], tail, look_s=0.001))


def test_a_log_that_lags_behind_the_end_is_completed_from_the_outcome() -> None:
    for n in range(13):
        given = "".join(LINES[:n])
        assert completed(given, ALL) == ALL, n
        assert followed(*dict.fromkeys(("".join(LINES[: n // 2]), given)), kept=ALL) == ALL, n
        assert last_of(completed(given, ALL), 3) == "".join(LINES[-3:]), n


def test_a_response_that_is_cut_off_costs_no_line_and_doubles_none() -> None:
    for cut in range(0, len(ALL), 3):
        assert followed(ALL[:cut], ALL) == ALL, cut
        assert followed(ALL[:80], ALL[:cut], ALL) == ALL, cut
        assert followed(ALL[:80], ALL[:cut], kept=ALL) == ALL, cut


def test_a_follower_yields_the_tail_of_the_existing_lines_and_then_every_line() -> None:
    before, after = "x\n1\nx\n2\nx\n", "x\n1\nx\n2\nx\n3\nx\n"
    assert followed(before, "x\n1\nx\n", after, f"{after}\n\nend", tail=1) == "x\n3\nx\n\n\nend\n"
    assert followed(before, after, tail=0) == "3\nx\n"


def test_a_response_in_a_window_that_moved_on_doubles_no_line() -> None:
    long = [f"{line[:-1]} {'.' * 2000}\n" for line in LINES]
    windows = [long[:6], long[3:8], long[3:5], long[4:]]
    assert followed(*map("".join, windows)) == "".join(long)


def test_a_window_that_moved_on_too_far_is_led_by_a_line_that_reports_that() -> None:
    lines = [f"step {number} {'.' * 60}\n\n" for number in range(3 * WINDOW_LINES)]
    first, second, third = lines[:WINDOW_LINES], lines[-WINDOW_LINES - 5 : -5], lines[-WINDOW_LINES:]
    assert followed(*map("".join, (first, second, third)), tail=0) == f"{BREAK}\n" + "".join([*second, *third[-5:]])


def test_a_line_that_comes_late_is_not_a_hole_and_is_shown_once() -> None:
    before = [f"step {number}\n" for number in range(1000)]
    late = [*before[:-1], "late\n", before[-1], "step 1000\n"]
    moved_on = [*late[500:], "step 1001\n"]
    windows = (before, late, late[:-3], late, moved_on)
    assert followed(*map("".join, windows), tail=0) == "late\nstep 1000\nstep 1001\n"
    assert followed("".join(before), "".join(late[:-2]), "".join(late), tail=0) == "late\nstep 1000\n"


class Copies(MemoryStore):
    """A rendezvous in which a log grows between looks, and its copy holds the last 256 KiB."""

    def __init__(self, attempt_key: str, sizes: Sequence[int]) -> None:
        super().__init__()
        self.key, self.sizes = attempt_key, iter(sizes)

    def list(self, prefix: str) -> Iterator[Entry]:
        if (size := next(self.sizes, None)) is not None:
            n_bytes = LIVE_BYTES if size < 70_000 else FINAL_BYTES
            self.put(self.key, b"".join(b"step %d\n\n" % number for number in range(size))[-n_bytes:])
        return super().list(prefix)


def test_a_copy_of_a_log_is_followed_completely_and_a_gap_between_two_copies_is_reported() -> None:
    attempt = Attempt(Copies("otter/replicas/0000/0/output.log", [100, 10_000, 60_000, 70_000]), "otter", 0)
    log = CopiedLog(attempt)
    assert [line for part in log.lines(0) for line in part] == []
    grown = "".join(line for part in log.lines(0) for line in part)
    assert grown == "".join(f"step {number}\n\n" for number in range(100, 10_000)), "more than 2000 lines are no hole"
    after = "".join(line for part in log.lines(0) for line in part)
    assert after.startswith(f"{BREAK}\n")
    assert after.endswith("step 59998\n\nstep 59999\n\n")
    end = "".join(line for part in log.lines(0) for line in part)
    assert end == "".join(f"step {number}\n\n" for number in range(60_000, 70_000)), "the last copy holds more"


@pytest.mark.parametrize(
    ("size_bytes", "n_lines", "why"),
    [
        (1 << 20, 10**7, ""),
        (6 << 20, 10**7, LIMITED),
        (FINAL_BYTES, 10**7, "these are the last 4 MiB; .* writes all lines of its copy in the rendezvous"),
        (LIVE_BYTES, 10**7, "these are the last 256 KiB, and its copy in the rendezvous has no more"),
        (LIVE_BYTES, 200, ""),
    ],
)
def test_the_last_lines_of_a_copy_come_with_the_reason_why_they_are_not_all(
    size_bytes: int, n_lines: int, why: str
) -> None:
    data = (b"step\n" * size_bytes)[-size_bytes + 3 :] + b"50%"
    (store := MemoryStore()).put("otter/replicas/0000/0/output.log", data)
    log = CopiedLog(Attempt(store, "otter", 0))
    text = log.tail(n_lines)
    assert text.endswith("step\n50%")
    assert re.fullmatch(why, log.cut)


def test_a_copy_of_a_log_comes_in_pieces_of_a_mebibyte() -> None:
    (store := MemoryStore()).put("otter/replicas/0000/0/output.log", b"step\n" * 600_000)
    pieces = list(CopiedLog(Attempt(store, "otter", 0)).pieces())
    assert (b"".join(pieces), max(map(len, pieces))) == (b"step\n" * 600_000, 1 << 20)


def test_a_log_is_completed_after_the_last_line_that_the_replica_kept_too() -> None:
    foreign = "a\nof another process\nb\nhalf of another"
    cut_within = "a\n100%\r\ncaf\ufffd\ufffd \n"
    cases = {
        "nothing is missing": (foreign, "a\nb\n", foreign),
        "lines of others stay": (foreign, "a\nb\nc\n", foreign + "\nc\n"),
        "repeated lines": ("{\na\n}\n", "{\na\n}\n{\nb\n}\n", "{\na\n}\n{\nb\n}\n"),
        "equal lines": ("x\nx\n", "x\nx\nx\n\ny\n", "x\nx\nx\n\ny\n"),
        "equal lines, all there": ("x\nx\nx\n", "x\nx\nx\n", "x\nx\nx\n"),
        "more history than was kept": ("1\nx\n2\nx\n3\nx\n", "2\nx\n3\nx\n4\nx\n", "1\nx\n2\nx\n3\nx\n4\nx\n"),
        "characters and bars that were cut": (cut_within, "a\n10%\r100%\ncafé\n", cut_within),
        "lines before the window": ("".join(LINES[8:10]), ALL, "".join(LINES[8:])),
        "a whole window": ("".join(LINES[8:]), ALL, "".join(LINES[8:])),
        "a megabyte of equal lines": ("x\n" * 400_000, "x\n" * 500_000, "x\n" * 500_000),
    }
    for name, (log, kept, whole) in cases.items():
        assert completed(log, kept) == whole, name
