"""Logs of local replicas: whole, in order, of any shape, and read in little memory."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import local_tasks
import pytest
from runs_of_tests import log_of

from executors import LocalProcessExecutor, ReplicaHandle, Run, launch

MIB = 1 << 20


def ended(run: Run) -> Run:
    assert run.wait(timeout=60)
    return run


def test_a_line_of_two_megabytes_without_a_newline_is_read(local: LocalProcessExecutor) -> None:
    def entrypoint() -> None:
        import sys

        sys.stdout.write("x" * 2_000_000)

    run = ended(launch(local, entrypoint, 1))
    assert run.logs(rank=0) == "x" * 2_000_000
    assert "".join(run.logs(rank=0, follow=True)).rstrip("\n") == "x" * 2_000_000
    assert run.results() == [None]


def test_a_progress_bar_is_one_line(local: LocalProcessExecutor) -> None:
    def entrypoint() -> None:
        print("first")
        for percent in range(0, 101, 10):
            print(f"\r{percent} %", end="")
        print("\nlast")

    run = ended(launch(local, entrypoint, 1))
    assert run.logs(rank=0, tail=2) == "".join(f"\r{percent} %" for percent in range(0, 101, 10)) + "\nlast\n"


def test_closed_streams_do_not_stop_a_replica(local: LocalProcessExecutor) -> None:
    def entrypoint() -> str:
        import os
        import sys

        from executors import current_replica

        print("before")
        how = current_replica().rank
        if how == 0:
            sys.stdout.close()
            sys.stderr.close()
        elif how == 1:
            os.close(1)
            os.close(2)
        else:
            sys.stdout = sys.stderr = None
        return "went on"

    run = ended(launch(local, entrypoint, 3))
    assert run.results() == ["went on"] * 3
    assert [run.logs(rank=rank) for rank in range(3)] == ["before\n"] * 3


def test_failing_with_closed_streams_still_leaves_the_traceback(local: LocalProcessExecutor) -> None:
    def entrypoint() -> None:
        import os

        os.close(1)
        os.close(2)
        raise ValueError("told all the same")

    (outcome,) = ended(launch(local, entrypoint, 1)).outcomes()
    assert outcome.reason == "exception"
    assert "told all the same" in (outcome.error or "")


def test_python_c_and_helpers_write_to_one_log_in_the_order_written(local: LocalProcessExecutor) -> None:
    def entrypoint() -> None:
        import ctypes
        import os
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

    run = ended(launch(local, entrypoint, 1))
    said = ("stdout", "stderr", "os.write", "printf", "helper", "helper to stderr", "words in parts")
    assert run.logs(rank=0).splitlines() == [f"{words} {number}" for number in range(5) for words in said]


def test_what_c_code_left_in_its_buffer_is_written_at_the_end(local: LocalProcessExecutor) -> None:
    def entrypoint() -> None:
        import ctypes

        ctypes.CDLL(None).printf(b"from C, not flushed\n")

    assert ended(launch(local, entrypoint, 1)).logs(rank=0) == "from C, not flushed\n"


def test_a_replaced_stdout_and_logging_are_flushed_at_the_end(local: LocalProcessExecutor) -> None:
    def entrypoint() -> None:
        import io
        import logging
        import sys

        sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)))
        print("buffered by the user")
        logging.basicConfig()
        logging.warning("by logging")

    log = ended(launch(local, entrypoint, 1)).logs(rank=0)
    assert "buffered by the user\n" in log
    assert "WARNING:root:by logging\n" in log


def test_bytes_that_are_no_text_do_not_stop_a_reader(local: LocalProcessExecutor) -> None:
    def entrypoint() -> None:
        import os

        os.write(1, b"\xff\xfe broken \x00 bytes\nafter\n")
        print("lone surrogate \udcff, ä, 🦦")

    run = ended(launch(local, entrypoint, 1))
    for text in (run.logs(rank=0), "".join(run.logs(rank=0, follow=True))):
        assert " broken \x00 bytes\nafter\n" in text
        assert "ä, 🦦\n" in text
    assert run.results() == [None]


def test_a_warning_reaches_the_log(local: LocalProcessExecutor) -> None:
    def entrypoint() -> None:
        import warnings

        warnings.warn("mind this", stacklevel=1)

    assert "UserWarning: mind this" in ended(launch(local, entrypoint, 1)).logs(rank=0)


@pytest.mark.parametrize("n_lines", [0, 1, 2, 3, 4, 1000])
def test_the_number_of_lines_is_exact(local: LocalProcessExecutor, n_lines: int) -> None:
    def entrypoint() -> None:
        print("a\nb\nunfinished", end="")

    handles = local.launch_replicas(1, entrypoint, {})
    local.collect(handles, timeout=60)
    lines = ["a\n", "b\n", "unfinished"]
    assert local.stream_logs(handles[0], n_lines=n_lines) == "".join(lines[max(0, 3 - n_lines) :])


def test_logs_of_a_replica_that_has_not_started_are_empty(local: LocalProcessExecutor) -> None:
    one_at_a_time = LocalProcessExecutor(preload=(), max_parallel=1, term_grace_s=0.5)
    handles = one_at_a_time.launch_replicas(2, local_tasks.hang, {})
    assert one_at_a_time.stream_logs(handles[1]) == ""
    for handle in reversed(handles):
        one_at_a_time.cancel(handle)


def test_following_yields_lines_while_the_replica_runs(local: LocalProcessExecutor, tmp_path: Path) -> None:
    def entrypoint(go: str) -> None:
        import os
        import time

        print("first")
        while not os.path.exists(go):
            time.sleep(0.01)
        print("second\nunfinished", end="")

    run = launch(local, entrypoint, 1, args={"go": str(tmp_path / "go")})
    lines = run.logs(rank=0, follow=True)
    assert next(lines) == "first\n"
    (tmp_path / "go").write_text("")
    assert [line.rstrip("\n") for line in lines] == ["second", "unfinished"]


def test_following_all_ranks_names_them(local: LocalProcessExecutor) -> None:
    def entrypoint() -> None:
        from executors import current_replica

        print(f"I am {current_replica().rank}\nindeed")

    run = launch(local, entrypoint, 3)
    lines = list(run.logs(follow=True))
    assert sorted(lines) == sorted(
        line for rank in range(3) for line in (f"[{rank}] I am {rank}\n", f"[{rank}] indeed\n")
    )
    assert sorted(run.logs().splitlines(keepends=True)) == sorted(lines)
    with pytest.raises(ValueError, match=r"ranks 0 to 2.*3"):
        run.logs(rank=3)


def test_characters_of_several_bytes_are_never_cut(local: LocalProcessExecutor, tmp_path: Path) -> None:
    def entrypoint(go: str) -> None:
        import os
        import time

        print("first")
        while not os.path.exists(go):
            time.sleep(0.01)
        for start in range(3):
            print("x" * start + "€" * 2_000_000)

    run = launch(local, entrypoint, 1, args={"go": str(tmp_path / "go")})
    lines = run.logs(rank=0, follow=True)
    assert next(lines) == "first\n"
    (tmp_path / "go").write_text("")
    text = "".join(lines)
    assert "\ufffd" not in text
    assert text.count("€") == 6_000_000


# --- large logs: the file is sparse, so that no test writes 200 MB


@pytest.fixture
def large(local: LocalProcessExecutor, state_home: Path) -> Run:
    """A run whose rank 0 has a log of 200 MB with lines, and rank 1 one of 200 MB without."""
    run = ended(launch(local, local_tasks.rank, 2))
    lines = b"".join(b"line %07d %s\n" % (number, b"." * 86) for number in range(10_000))
    with open(log_of(run.handles[0], state_home), "wb") as log:
        for _ in range(200):
            log.write(lines)
    with open(log_of(run.handles[1], state_home), "wb") as log:
        log.truncate(200 * MIB)
        log.seek(0, os.SEEK_END)
        log.write(b"\nthe end\n")
    return run


def test_the_end_of_a_log_of_200_megabytes_is_read_in_little_memory(large: Run) -> None:
    tracemalloc.start()
    try:
        tail = large.logs(rank=0, tail=100)
        end = large.logs(rank=1, tail=1)
        large.logs(rank=1, tail=200)
        large.logs(rank=0, tail=10**9)
        large.logs(tail=10)
        large.status()
        large.outcomes()
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert tail.splitlines()[-1].startswith("line 0009999")
    assert len(tail.splitlines()) == 100
    assert end == "the end\n"
    assert peak_bytes < 48 * MIB


@pytest.mark.parametrize("rank", [0, 1])
def test_a_log_of_200_megabytes_is_followed_in_little_memory(large: Run, rank: int) -> None:
    tracemalloc.start()
    try:
        n_characters = 0
        last = ""
        for line in large.logs(rank=rank, tail=10**9, follow=True):
            n_characters += len(line)
            last = line
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert last == ("the end\n" if rank else f"line 0009999 {'.' * 86}\n")
    assert n_characters > 0
    assert peak_bytes < 64 * MIB


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

    (handle,) = local.launch_replicas(1, entrypoint, {})
    (row,) = local.collect([handle], timeout=100)
    assert row["result"] == "done"
    assert log_of(handle, state_home).stat().st_size == 200 * MIB + 8
    assert local.stream_logs(handle, n_lines=2) == "0123456789abcde\nthe end\n"
    log_of(handle, state_home).unlink()


def test_the_outcome_keeps_the_last_64_kib_of_the_output(local: LocalProcessExecutor) -> None:
    def entrypoint() -> None:
        for number in range(20_000):
            print("line", number)

    (outcome,) = ended(launch(local, entrypoint, 1)).outcomes()
    assert outcome.output_tail.endswith("line 19998\nline 19999\n")
    assert len(outcome.output_tail.encode()) == 64 * 1024


def test_logs_lie_where_they_are_said_to_and_are_for_the_user_alone(
    local: LocalProcessExecutor, state_home: Path, tmp_path: Path
) -> None:
    run = launch(local, local_tasks.die_by, 1, args={"signal_number": 9}, rendezvous=str(tmp_path / "elsewhere"))
    ended(run)
    log = state_home / "replicas" / run.run_id / "replicas/0000/0/output.log"
    assert log.read_text() == "last words\n"
    assert log.stat().st_mode & 0o077 == 0
    assert (state_home / "replicas").stat().st_mode & 0o777 == 0o700
    assert not list((tmp_path / "elsewhere").rglob("output.log"))


def test_a_handle_reads_the_log_of_its_own_run(local: LocalProcessExecutor) -> None:
    handles: list[ReplicaHandle] = []
    for number in range(3):

        def entrypoint(number: int) -> None:
            print("run", number)

        handles += local.launch_replicas(1, entrypoint, {"number": number})
    local.collect(handles, timeout=60)
    assert [local.stream_logs(handle) for handle in handles] == ["run 0\n", "run 1\n", "run 2\n"]
