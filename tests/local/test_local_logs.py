"""Logs of local replicas: whole, in order, of any shape, and read in little memory."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import tasks
from support.runs import log_of

from executors import LocalProcessExecutor, Run, launch
from executors.run.run import view_of

MIB = 1 << 20
SAID = ("stdout", "stderr", "os.write", "printf", "helper", "helper to stderr", "words in parts")


def ended(run: Run) -> Run:
    assert run.wait(timeout=60)
    return run


def in_turns() -> None:
    """Write from Python, C and helper processes in turn."""
    import ctypes
    import subprocess
    import sys

    libc = ctypes.CDLL(None)
    for number in range(5):
        print("stdout", number)
        print("stderr", number, file=sys.stderr)
        os.write(1, f"os.write {number}\n".encode())
        libc.printf(b"printf %d\n", number)
        libc.fflush(None)
        subprocess.run(["sh", "-c", f"echo helper {number}; echo helper to stderr {number} >&2"], check=True)
        print("words ", end="")
        print("in parts", number)


def unflushed() -> None:
    """Leave output in a buffer of C and one of the user's."""
    import ctypes
    import io
    import logging
    import sys
    import warnings

    ctypes.CDLL(None).printf(b"from C, not flushed\n")
    warnings.warn("mind this", stacklevel=1)
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)))
    print("buffered by the user")
    logging.basicConfig()
    logging.warning("by logging")


def odd_text() -> None:
    import sys

    os.write(1, b"\xff\xfe broken \x00 bytes\nafter\n")
    print("lone surrogate \udcff, ä, 🦦")
    for percent in range(0, 101, 10):
        print(f"\r{percent} %", end="")
    print()
    sys.stdout.write("x" * 2_000_000)


def close_files() -> None:
    import sys

    print("before")
    sys.stdout.close()
    sys.stderr.close()


def close_descriptors() -> None:
    print("before")
    os.close(1)
    os.close(2)
    raise ValueError("the error is reported in each case")


def unset() -> None:
    import sys

    print("before")
    sys.stdout = sys.stderr = None


SHAPES: dict[Callable[[], None], Callable[[str], Any]] = {
    in_turns: lambda log: log.splitlines() == [f"{words} {number}" for number in range(5) for words in SAID],
    unflushed: lambda log: all(
        f"{words}\n" in log
        for words in (
            "from C, not flushed",
            "buffered by the user",
            "WARNING:root:by logging",
            "UserWarning: mind this",
        )
    ),
    odd_text: lambda log: (
        " broken \x00 bytes\nafter\n" in log
        and "ä, 🦦\n" in log
        and "".join(f"\r{percent} %" for percent in range(0, 101, 10)) in log
        and log.rstrip("\n").endswith("\n" + "x" * 2_000_000)
    ),
    close_files: lambda log: log == "before\n",
    close_descriptors: lambda log: log == "before\n",
    unset: lambda log: log == "before\n",
}


def test_logs_of_any_shape_are_whole_and_stop_neither_replica_nor_reader(local: LocalProcessExecutor) -> None:
    shapes = list(SHAPES)

    def entrypoint() -> str:
        from executors import current_replica

        shapes[current_replica().rank]()
        return "went on"

    run = ended(launch(local, entrypoint, len(shapes)))
    for rank, (shape, is_whole) in enumerate(SHAPES.items()):
        assert is_whole(run.logs(rank=rank)), shape.__name__
        assert is_whole("".join(run.logs(rank=rank, follow=True))), f"{shape.__name__}, followed"
    failed = shapes.index(close_descriptors)
    assert [outcome.result for outcome in run.outcomes() if outcome.rank != failed] == ["went on"] * (len(shapes) - 1)
    assert run.outcomes()[failed].reason == "exception"
    assert "the error is reported in each case" in (run.outcomes()[failed].error or "")


def test_following_yields_whole_characters_and_lines_while_the_replica_runs(
    local: LocalProcessExecutor, tmp_path: Path
) -> None:
    def entrypoint(go: str) -> None:
        import os
        import time

        print("first")
        while not os.path.exists(go):
            time.sleep(0.01)
        for start in range(3):
            print("x" * start + "€" * 2_000_000)
        print("unfinished", end="")

    run = launch(local, entrypoint, 1, args={"go": str(tmp_path / "go")})
    lines = run.logs(rank=0, follow=True)
    assert next(lines) == "first\n"
    (tmp_path / "go").write_text("")
    text = "".join(lines)
    assert "\ufffd" not in text
    assert text.count("€") == 6_000_000
    assert text.rstrip("\n").endswith("€\nunfinished")


def test_following_all_ranks_names_them(local: LocalProcessExecutor) -> None:
    def entrypoint() -> None:
        from executors import current_replica

        print(f"I am {current_replica().rank}\nindeed")

    run = launch(local, entrypoint, 3)
    lines = sorted(run.logs(follow=True))
    assert lines == sorted(f"[{rank}] {words}\n" for rank in range(3) for words in (f"I am {rank}", "indeed"))
    assert sorted(run.logs().splitlines(keepends=True)) == lines
    with pytest.raises(ValueError, match="has no rank 3, but ranks 0-2"):
        run.logs(rank=3)


def test_logs_of_200_megabytes_are_read_and_followed_in_little_memory(
    local: LocalProcessExecutor, state_home: Path
) -> None:
    """Rank 0 writes lines. Rank 1 writes none, into a sparse file, so that it needs no disk space."""
    run = ended(launch(local, tasks.rank, 2))
    lines = b"".join(b"line %07d %s\n" % (number, b"." * 86) for number in range(10_000))
    with open(log_of(run.handles[0], state_home), "wb") as log:
        for _ in range(200):
            log.write(lines)
    with open(log_of(run.handles[1], state_home), "wb") as log:
        log.truncate(200 * MIB)
        log.seek(0, os.SEEK_END)
        log.write(b"\nthe end\n")
    last_lines = f"line 0009999 {'.' * 86}\n", "the end\n"
    tracemalloc.start()
    try:
        tail, end = run.logs(rank=0, tail=100), run.logs(rank=1, tail=1)
        for rank, n_lines in ((1, 200), (0, 10**9), (None, 10)):
            run.logs(rank=rank, tail=n_lines)
        run.status()
        run.outcomes()
        assert tracemalloc.get_traced_memory()[1] < 48 * MIB
        for rank in range(2):
            for line in run.logs(rank=rank, tail=10**9, follow=True):
                last = line
            assert last == last_lines[rank]
        assert tracemalloc.get_traced_memory()[1] < 64 * MIB
    finally:
        tracemalloc.stop()
    assert (len(tail.splitlines()), end) == (100, "the end\n")
    assert tail.endswith(last_lines[0])


def test_a_replica_that_writes_200_megabytes_ends_with_the_last_of_them(
    local: LocalProcessExecutor, state_home: Path
) -> None:
    def entrypoint() -> str:
        import os

        block = b"0123456789abcde\n" * (MIB // 16)
        for _ in range(200):
            os.write(1, block)
        os.write(1, b"the end\n")
        return "done"

    run = launch(local, entrypoint, 1)
    assert run.wait(timeout=100)
    (outcome,) = run.outcomes()
    assert outcome.result == "done"
    assert outcome.output_tail.endswith("0123456789abcde\nthe end\n")
    assert len(outcome.output_tail.encode()) == 64 * 1024
    log = log_of(run.handles[0], state_home)
    assert log.stat().st_size == 200 * MIB + 8
    assert run.logs(rank=0, tail=2) == "0123456789abcde\nthe end\n"
    log.unlink()


def test_each_log_lies_in_the_state_directory_for_the_user_alone(
    local: LocalProcessExecutor, state_home: Path, tmp_path: Path
) -> None:
    for signal_number in (9, 6):
        elsewhere = str(tmp_path / "elsewhere")
        run = ended(launch(local, tasks.die_by, 1, args={"signal_number": signal_number}, rendezvous=elsewhere))
        log = state_home / "replicas" / run.run_id / "replicas/0000/0/output.log"
        assert log.read_text().startswith("last words\n")
        assert local.stream_logs(run.handles[0]) == log.read_text()
        assert log.stat().st_mode & 0o077 == 0
        assert bytes(view_of(run).store.get(f"{run.run_id}/replicas/0000/0/output.log")) == log.read_bytes(), (
            "the store has a copy of the log"
        )
    assert (state_home / "replicas").stat().st_mode & 0o777 == 0o700
