"""Readers of logs: exact about lines, and bounded whatever the file."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executors.logs import MAX_READ_BYTES, read_from, tail_bytes, tail_lines


@given(
    lines=st.lists(st.binary(max_size=20).map(lambda data: data.replace(b"\n", b"")), max_size=30),
    ends_with_newline=st.booleans(),
    n_lines=st.integers(0, 40),
)
def test_the_last_lines_are_what_a_plain_reading_gives(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], ends_with_newline: bool, n_lines: int
) -> None:
    path = tmp_path_factory.mktemp("logs") / "log"
    if lines and not ends_with_newline and not lines[-1]:
        lines = [*lines, b"x"]
    path.write_bytes(b"\n".join(lines) + (b"\n" if lines and ends_with_newline else b""))
    newline = b"\n" if lines and ends_with_newline and n_lines else b""
    assert tail_lines(path, n_lines)[0] == b"\n".join(lines[max(0, len(lines) - n_lines) :]) + newline


def test_a_progress_bar_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"start\n 10%\r 20%\r 30%\n")
    assert tail_lines(tmp_path / "log", 1)[0] == b" 10%\r 20%\r 30%\n"


def test_a_line_of_two_megabytes_comes_whole(tmp_path: Path) -> None:
    line = b"x" * (2 << 20)
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
        tail_bytes(path, 65536)
        read_from(path, 100)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20 * MAX_READ_BYTES


def test_reading_on_from_an_offset_gives_every_byte_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\nthree")
    first, offset = tail_lines(path, 2)
    with open(path, "ab") as file:
        file.write(b" and four\n")
    assert first + read_from(path, offset)[0] == b"two\nthree and four\n"


def test_a_missing_log_is_empty(tmp_path: Path) -> None:
    assert tail_lines(tmp_path / "none", 5) == (b"", 0)
    assert read_from(tmp_path / "none", 7) == (b"", 7)
