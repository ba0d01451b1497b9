"""How local replicas end: signals, memory, helpers they leave behind, and what `finally` may still do."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import local_tasks
import pytest
from processes_of_tests import is_alive
from runs_of_tests import pid_of, record_of

from executors import LocalProcessExecutor, launch
from executors.errors import ReplicaCancelledError, ReplicaLostError, ReplicaTimeoutError
from executors.testing import eventually

HELPERS = ("child", "session", "orphan", "daemon")


def one_row(executor: LocalProcessExecutor, entrypoint: Any, args: dict[str, Any], **options: Any) -> dict[str, Any]:
    (row,) = executor.collect(executor.launch_replicas(1, entrypoint, args, **options), timeout=60)
    return row


def pids_in(folder: Path, names: tuple[str, ...] = HELPERS) -> list[int]:
    return [int(eventually((folder / name).exists, name) and (folder / name).read_text()) for name in names]


# --- signals and memory


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_is_named_with_its_number(local: LocalProcessExecutor, number: signal.Signals) -> None:
    row = one_row(local, local_tasks.die_by, {"signal_number": int(number)})
    assert (row["status"], row["reason"], row["exit_code"]) == ("failed", "signal", -number)
    assert number.name in row["error"]
    assert str(int(number)) in row["error"]


def test_a_segmentation_fault_is_named(local: LocalProcessExecutor) -> None:
    row = one_row(local, local_tasks.segfault, {})
    assert (row["status"], row["reason"], row["exit_code"]) == ("failed", "signal", -signal.SIGSEGV)
    assert "SIGSEGV" in row["error"]


def test_the_last_words_before_a_sigkill_are_in_the_log_and_the_outcome(local: LocalProcessExecutor) -> None:
    run = launch(local, local_tasks.die_by, 1, args={"signal_number": 9})
    run.wait()
    assert "last words\n" in run.logs(rank=0)
    (outcome,) = run.outcomes()
    assert outcome.signal == "SIGKILL"
    assert "last words" in outcome.output_tail
    with pytest.raises(ReplicaLostError, match="SIGKILL"):
        run.results()


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """A control group with 128 MiB of memory."""
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(root, f"replicas-test-{os.getpid()}")
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / limit).exists():
            (group / limit).write_text(str(128 << 20))
            yield group
            group.rmdir()
            return
        group.rmdir()
    pytest.skip("a control group for memory can be made by root alone, where one is mounted")


def test_a_replica_killed_for_want_of_memory_says_so(local: LocalProcessExecutor, small_memory: Path) -> None:
    row = one_row(local, local_tasks.take_memory, {"group": str(small_memory)})
    assert (row["status"], row["reason"], row["exit_code"]) == ("failed", "oom", -signal.SIGKILL)
    assert "memory" in row["error"]


def test_a_sigterm_from_nobody_of_ours_is_a_signal(local: LocalProcessExecutor) -> None:
    handles = local.launch_replicas(1, local_tasks.hang, {})
    os.kill(pid_of(handles[0]), signal.SIGTERM)
    (row,) = local.collect(handles, timeout=60)
    assert (row["status"], row["reason"]) == ("failed", "signal")
    assert "SIGTERM" in row["error"]


# --- exceptions


def test_every_kind_of_exception_is_recorded(local: LocalProcessExecutor) -> None:
    def entrypoint() -> None:
        from executors import current_replica

        class Silent(Exception):
            def __str__(self) -> str:
                raise RuntimeError("no text")

        class Own(BaseException):
            pass

        kinds = [
            KeyboardInterrupt("pressed"),
            Own("own"),
            Silent(),
            ExceptionGroup("both", [ValueError("first"), KeyError("second")]),
            UnicodeDecodeError("utf-8", b"\xff", 0, 1, "odd"),
            RuntimeError("lone \udcff surrogate"),
            RuntimeError("x" * 10_000_000),
            StopIteration(3),
            GeneratorExit(),
        ]
        raise kinds[current_replica().rank]

    words = [
        "KeyboardInterrupt",
        "Own",
        "Silent",
        "KeyError: 'second'",
        "0xff",
        "surrogate",
        "xxx",
        "StopIteration",
        "Gen",
    ]
    rows = local.collect(local.launch_replicas(len(words), entrypoint, {}), timeout=60)
    for word, row in zip(words, rows, strict=True):
        assert (row["status"], row["reason"], row["result"]) == ("failed", "exception", None), word
        assert word in row["error"]
        assert "test_local_endings" in row["error"], "the traceback names the user's file"


def test_a_chained_exception_keeps_its_cause(local: LocalProcessExecutor) -> None:
    def entrypoint() -> None:
        try:
            raise ValueError("the cause")
        except ValueError as error:
            raise RuntimeError("the effect") from error

    row = one_row(local, entrypoint, {})
    assert row["error"].index("the cause") < row["error"].index("direct cause") < row["error"].index("the effect")


def test_leaving_with_a_sentence_keeps_the_sentence(local: LocalProcessExecutor) -> None:
    def entrypoint() -> None:
        raise SystemExit("no data here")

    row = one_row(local, entrypoint, {})
    assert (row["status"], row["reason"], row["exit_code"]) == ("failed", "no_result", 1)
    assert "no data here" in row["error"]


def test_what_was_registered_at_exit_runs(local: LocalProcessExecutor, tmp_path: Path) -> None:
    def entrypoint(path: str) -> str:
        import atexit
        from pathlib import Path

        atexit.register(lambda: Path(path).write_text("ran"))
        return "done"

    assert one_row(local, entrypoint, {"path": str(tmp_path / "atexit")})["result"] == "done"
    assert eventually((tmp_path / "atexit").exists)


def test_threads_left_running_do_not_keep_a_replica(local: LocalProcessExecutor) -> None:
    def entrypoint() -> str:
        import threading
        import time

        threading.Thread(target=time.sleep, args=(600,)).start()
        return "done"

    assert one_row(local, entrypoint, {})["result"] == "done"


def test_a_replica_that_becomes_another_program_keeps_its_exit_code(local: LocalProcessExecutor) -> None:
    def entrypoint() -> None:
        import os
        import sys

        os.execv(sys.executable, [sys.executable, "-c", "import sys; print('another'); sys.exit(7)"])

    handles = local.launch_replicas(1, entrypoint, {})
    (row,) = local.collect(handles, timeout=60)
    assert (row["status"], row["reason"], row["exit_code"]) == ("failed", "no_result", 7)
    assert local.stream_logs(handles[0]) == "another\n"


def test_a_replica_that_closes_all_descriptors_goes_on(local: LocalProcessExecutor, tmp_path: Path) -> None:
    def entrypoint(path: str) -> str:
        import os
        import time

        os.closerange(3, 4096)
        beats: set[int] = set()
        while len(beats) < 3:  # long enough for whatever watches over this process to look around
            time.sleep(0.05)
            from executors import current_replica

            current_replica().report(step=time.monotonic_ns())
            if os.path.exists(path):
                beats.add(os.stat(path).st_mtime_ns)
        return "done"

    beat = f"{tmp_path}/store/closing/replicas/0000/0/heartbeat.json"
    run = launch(local, entrypoint, 1, args={"path": beat}, run_id="closing", rendezvous=f"{tmp_path}/store")
    assert run.results() == ["done"]


def test_a_helper_forked_by_a_replica_dies_of_sigterm_as_any_process(local: LocalProcessExecutor) -> None:
    def entrypoint() -> int:
        import os
        import signal
        import time

        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            while True:
                try:
                    os.write(writer, b"here")
                    time.sleep(60)
                except BaseException:  # noqa: BLE001 - as a finalizer swallows what is raised in it
                    continue
        os.read(reader, 4)
        os.kill(child, signal.SIGTERM)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert one_row(local, entrypoint, {})["result"] == -signal.SIGTERM


def test_asyncio_runs_helpers_in_a_replica(local: LocalProcessExecutor) -> None:
    def entrypoint() -> str:
        import asyncio

        async def ask() -> str:
            helper = await asyncio.create_subprocess_exec("echo", "hello", stdout=asyncio.subprocess.PIPE)
            out, _ = await helper.communicate()
            return out.decode()

        return asyncio.run(ask())

    assert one_row(local, entrypoint, {})["result"] == "hello\n"


# --- SIGTERM, grace, SIGKILL


def test_a_cancelled_replica_runs_its_finally(local: LocalProcessExecutor, tmp_path: Path) -> None:
    path = tmp_path / "said"
    with launch(local, local_tasks.clean_up, 1, args={"path": str(path)}) as run:
        eventually(Path(f"{path}.0").exists)
    assert Path(f"{path}.cleaned").exists()
    with pytest.raises(ReplicaCancelledError):
        run.results()


def test_a_replica_out_of_time_runs_its_finally(local: LocalProcessExecutor, tmp_path: Path) -> None:
    run = launch(local, local_tasks.clean_up, 1, args={"path": str(tmp_path / "said")}, timeout=1)
    run.wait()
    assert (tmp_path / "said.cleaned").exists()
    with pytest.raises(ReplicaTimeoutError, match="time limit of 1 s"):
        run.results()


def test_a_cleaning_up_that_never_ends_is_ended(local: LocalProcessExecutor, tmp_path: Path) -> None:
    handles = local.launch_replicas(1, local_tasks.clean_up_slowly, {"path": str(tmp_path / "said")})
    pid = int(eventually(lambda: (tmp_path / "said.0").exists() and (tmp_path / "said.0").read_text()))
    local.cancel(handles[0])
    assert (tmp_path / "said.cleaning").exists()
    assert not is_alive(pid)
    assert local.poll(handles[0]) == "cancelled"


def test_who_swallows_sigterm_and_returns_is_cancelled_all_the_same(
    local: LocalProcessExecutor, tmp_path: Path
) -> None:
    handles = local.launch_replicas(1, local_tasks.swallow_sigterm, {"path": str(tmp_path / "said")})
    eventually((tmp_path / "said.0").exists)
    local.cancel(handles[0])
    (row,) = local.collect(handles, timeout=60)
    assert (row["status"], row["reason"], row["result"]) == ("cancelled", "cancelled", None)


def test_a_stopped_replica_can_be_cancelled(local: LocalProcessExecutor) -> None:
    handles = local.launch_replicas(1, local_tasks.hang, {})
    pid = pid_of(handles[0])
    os.kill(pid, signal.SIGSTOP)
    local.cancel(handles[0])
    assert not is_alive(pid)
    assert local.poll(handles[0]) == "cancelled"


def test_the_cancel_marker_is_written_before_the_outcome(local: LocalProcessExecutor) -> None:
    handles = local.launch_replicas(1, local_tasks.hang, {})
    pid_of(handles[0])
    assert record_of(handles[0], "cancel.json") is None
    local.cancel(handles[0])
    assert record_of(handles[0], "cancel.json") is not None
    assert record_of(handles[0], "outcome.json")["status"] == "cancelled"


# --- helpers


@pytest.mark.parametrize("deaf", [False, True])
def test_cancelling_ends_every_helper_also_in_sessions_of_their_own(
    local: LocalProcessExecutor, tmp_path: Path, deaf: bool
) -> None:
    handles = local.launch_replicas(1, local_tasks.hang_with_helpers, {"folder": str(tmp_path), "deaf": deaf})
    pids = pids_in(tmp_path, (*HELPERS, "rank.0"))
    assert all(is_alive(pid) for pid in pids)
    local.cancel(handles[0])
    assert [pid for pid in pids if is_alive(pid)] == []


def test_helpers_of_a_replica_that_returned_are_ended(local: LocalProcessExecutor, tmp_path: Path) -> None:
    assert one_row(local, local_tasks.return_with_helpers, {"folder": str(tmp_path)})["result"] == "returned"
    for pid in pids_in(tmp_path):
        eventually(lambda pid=pid: not is_alive(pid), f"{pid} ends")  # type: ignore[misc]


def test_helpers_of_a_killed_replica_are_ended(local: LocalProcessExecutor, tmp_path: Path) -> None:
    handles = local.launch_replicas(1, local_tasks.hang_with_helpers, {"folder": str(tmp_path), "deaf": True})
    *helpers, replica = pids_in(tmp_path, (*HELPERS, "rank.0"))
    os.kill(replica, signal.SIGKILL)
    (row,) = local.collect(handles, timeout=60)
    assert (row["status"], row["reason"]) == ("failed", "signal")
    for pid in helpers:
        eventually(lambda pid=pid: not is_alive(pid), f"{pid} ends")  # type: ignore[misc]


def test_ending_one_replica_leaves_the_helpers_of_the_others(local: LocalProcessExecutor, tmp_path: Path) -> None:
    folders = [tmp_path / "0", tmp_path / "1"]

    def entrypoint(folders: list[str]) -> None:
        import local_tasks

        local_tasks.hang_with_helpers(folders[local_tasks.rank()])

    for folder in folders:
        folder.mkdir()
    handles = local.launch_replicas(2, entrypoint, {"folders": [str(folder) for folder in folders]})
    others = pids_in(folders[1], (*HELPERS, "rank.1"))
    pids_in(folders[0], (*HELPERS, "rank.0"))
    local.cancel(handles[0])
    assert [pid for pid in others if not is_alive(pid)] == []
    local.cancel(handles[1])
    assert [pid for pid in others if is_alive(pid)] == []
