"""The ends of local replicas: signals, memory, helper processes that they leave, and the time of `finally` blocks."""

from __future__ import annotations

import linecache
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import tasks
from support.processes import is_alive
from support.runs import pid_of, pid_said, record_of

from executors import LocalProcessExecutor, Run, current_replica, launch
from executors.errors import ReplicaCancelledError, ReplicaLostError, ReplicaTimeoutError
from executors.process import CAN_FORK
from executors.protocol import Outcome
from executors.run.run import view_of
from executors.testing import eventually

HELPERS = ("child", "session", "orphan", "daemon")


def one_row(executor: LocalProcessExecutor, entrypoint: Any, args: dict[str, Any], **options: Any) -> dict[str, Any]:
    (row,) = executor.collect(executor.launch_replicas(1, entrypoint, args, **options), timeout=60)
    return row


def outcomes_of(run: Run) -> list[Outcome]:
    assert run.wait(timeout=60)
    return run.outcomes()


def pids_in(folder: Path, names: tuple[str, ...] = HELPERS) -> list[int]:
    return [pid_said(folder / name) for name in names]


def all_end(pids: list[int]) -> None:
    eventually(lambda: not any(map(is_alive, pids)), f"{pids} end")


# --- signals and memory


def test_a_signal_is_named_with_its_number_and_the_last_output_is_kept(local: LocalProcessExecutor) -> None:
    numbers = [int(number) for number in (signal.SIGKILL, signal.SIGABRT, signal.SIGUSR1, signal.SIGHUP)]
    numbers.append(41)  # this signal has no name
    n = len(numbers)

    def entrypoint() -> None:
        from support import tasks

        tasks.die_by(numbers[tasks.rank()]) if tasks.rank() < n else tasks.segfault()

    run = launch(local, entrypoint, n + 1)
    assert run.wait(timeout=60)
    names = ["SIGKILL", "SIGABRT", "SIGUSR1", "SIGHUP", f"SIG{numbers[-1]}", "SIGSEGV"]
    for name, number, outcome in zip(names, [*numbers, signal.SIGSEGV], run.outcomes(), strict=True):
        assert (outcome.status, outcome.reason, outcome.exit_code) == ("failed", "signal", -number), name
        rank = outcome.rank
        assert (outcome.signal, outcome.error) == (name, f"Replica {rank} of 6 was ended by signal {number} ({name}).")
        assert rank == n or "last words\n" in run.logs(rank=rank)
        assert rank == n or "last words" in outcome.output_tail
    with pytest.raises(ReplicaLostError, match="was ended by signal"):
        run.results()


def test_a_sigterm_that_replicas_did_not_send_is_a_signal(local: LocalProcessExecutor) -> None:
    handles = local.launch_replicas(1, tasks.hang, {})
    os.kill(pid_of(handles[0]), signal.SIGTERM)
    (row,) = local.collect(handles, timeout=60)
    assert (row["status"], row["reason"]) == ("failed", "signal")
    assert row["error"] == "Replica 0 of 1 was terminated by SIGTERM, not sent by `replicas`."


def test_a_replica_killed_for_lack_of_memory_reports_that(local: LocalProcessExecutor, small_memory: Path) -> None:
    row = one_row(local, tasks.take_memory, {"group": str(small_memory)})
    assert (row["status"], row["reason"], row["exit_code"]) == ("failed", "oom", -signal.SIGKILL)
    assert "memory" in row["error"]


# --- exceptions, and what an entrypoint may do


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
            SystemExit("no data here"),
        ]
        try:
            raise ValueError("the cause")
        except ValueError as error:
            raise kinds[current_replica().rank] from error

    words = ["KeyboardInterrupt", "Own", "Silent", "KeyError: 'second'", "0xff", "surrogate", "xxx", "StopIteration"]
    words.append("GeneratorExit")
    *rows, left = local.collect(local.launch_replicas(len(words) + 1, entrypoint, {}), timeout=60)
    for word, row in zip(words, rows, strict=True):
        assert (row["status"], row["reason"], row["result"]) == ("failed", "exception", None), word
        assert word in row["error"]
        assert "test_local_endings" in row["error"], "the traceback names the user's file"
        cause, direct = row["error"].index("the cause"), row["error"].index("direct cause")
        assert cause < direct < row["error"].rindex(word), "the traceback shows the cause first"
    assert (left["status"], left["reason"], left["exit_code"]) == ("failed", "no_result", 1)
    assert "no data here" in left["error"]


@pytest.mark.parametrize("holds", ["what it raised", "its module"])
def test_a_replica_without_a_free_descriptor_left_reports_that_in_its_outcome(
    local: LocalProcessExecutor, holds: str
) -> None:
    def leak(for_good: bool) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        held: list[Any] = []
        if for_good:
            sys.modules["held"] = held  # type: ignore[assignment]
        current_replica().report(step=7)
        while True:
            held.append(open("/dev/null"))  # noqa: SIM115 - a leak

    (outcome,) = outcomes_of(launch(local, leak, 1, args={"for_good": holds == "its module"}))
    assert outcome.reason == "exception"
    assert outcome.error_line == "OSError: [Errno 24] Too many open files: '/dev/null'"
    assert str(outcome.error_place).startswith("tests/local/test_local_endings.py:")
    assert outcome.reported == {"step": 7}


def test_a_replica_that_asks_for_input_is_told_that_it_has_none(local: LocalProcessExecutor) -> None:
    (outcome,) = outcomes_of(launch(local, lambda: input("name? "), 1))
    hint = "a replica has no standard input, so give the value as an argument"
    assert outcome.error_line == f"EOFError: EOF when reading a line ({hint})"


def test_the_exception_of_a_replica_is_recorded_before_its_objects_are_deleted(local: LocalProcessExecutor) -> None:
    def entrypoint() -> None:
        class Crashes:
            def __del__(self) -> None:
                os.abort()

        held = Crashes()
        raise ValueError(f"with {type(held).__name__}")

    (outcome,) = outcomes_of(launch(local, entrypoint, 1))
    assert outcome.error_line == "ValueError: with Crashes"
    assert outcome.fingerprint is not None


def test_a_failure_in_a_notebooks_cell_shows_the_lines_of_all_cells_it_passed(local: LocalProcessExecutor) -> None:
    cells = {
        "/tmp/ipykernel_1/11.py": "class Trainer:\n    def run(self):\n        raise ValueError('boom')  # here\n",
        "/tmp/ipykernel_1/22.py": "def train():\n    Trainer().run()  # the second cell\n",
        "/tmp/ipykernel_1/33.py": "password = 'not needed by train'\n",
    }
    names: dict[str, Any] = {"__name__": "__main__"}
    for file, text in cells.items():
        exec(compile(text, file, "exec"), names)
        # IPython raises the same exception
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    run = launch(local, names["train"], 1)
    assert run.wait(timeout=60)
    (outcome,) = run.outcomes()
    assert "raise ValueError('boom')  # here" in str(outcome.error)
    assert "Trainer().run()  # the second cell" in str(outcome.error)
    assert (outcome.error_line, outcome.error_place) == ("ValueError: boom", "a notebook's cell, line 3")
    assert b"password" not in bytes(view_of(run).store.get(f"{run.run_id}/task/task.json"))


def write_at_exit(folder: Path) -> None:
    import atexit

    atexit.register(lambda: (folder / "atexit").write_text("ran"))


def leave_a_thread() -> None:
    import threading
    import time

    threading.Thread(target=time.sleep, args=(600,)).start()


def close_all_descriptors(folder: Path) -> None:
    import time

    from executors import current_replica

    os.closerange(3, 4096)
    beat = folder / "store/odd/replicas/0002/0/heartbeat.json"
    beats: set[int] = set()
    while len(beats) < 3:  # long enough for the supervisor of this process to make a pass
        time.sleep(0.05)
        current_replica().report(step=time.monotonic_ns())
        if beat.exists():
            beats.add(beat.stat().st_mtime_ns)


def end_a_forked_helper() -> None:
    """Fork a helper that dies of SIGTERM like any process, although it ignores exceptions, as a finalizer does."""
    import time

    reader, writer = os.pipe()
    child = os.fork()
    while child == 0:
        try:
            os.write(writer, b"here")
            time.sleep(60)
        except BaseException:  # noqa: BLE001
            continue
    os.read(reader, 4)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def ask_a_helper_with_asyncio() -> None:
    import asyncio

    async def ask() -> bytes:
        helper = await asyncio.create_subprocess_exec("echo", "hello", stdout=asyncio.subprocess.PIPE)
        return (await helper.communicate())[0]

    assert asyncio.run(ask()) == b"hello\n"


def become_another_program() -> None:
    import sys

    os.execv(sys.executable, [sys.executable, "-c", "import sys; print('another'); sys.exit(7)"])


def test_an_entrypoint_may_do_odd_things_and_still_have_its_result(local: LocalProcessExecutor, tmp_path: Path) -> None:
    acts: list[Callable[..., None]] = [
        write_at_exit, leave_a_thread, close_all_descriptors, end_a_forked_helper, ask_a_helper_with_asyncio,
        become_another_program,
    ]  # fmt: skip

    def entrypoint(folder: str) -> str:
        from executors import current_replica

        act = acts[current_replica().rank]
        act(Path(folder)) if act.__code__.co_argcount else act()
        return "done"

    rendezvous = str(tmp_path / "store")
    run = launch(local, entrypoint, len(acts), args={"folder": str(tmp_path)}, run_id="odd", rendezvous=rendezvous)
    assert run.wait(timeout=60)
    *outcomes, program = run.outcomes()
    assert [(outcome.error, outcome.result) for outcome in outcomes] == [(None, "done")] * len(outcomes)
    assert eventually((tmp_path / "atexit").exists)
    assert (program.status, program.reason, program.exit_code) == ("failed", "no_result", 7)
    assert run.logs(rank=program.rank) == "another\n"


def test_any_exit_code_leaves_an_outcome_that_can_be_read(local: LocalProcessExecutor) -> None:
    codes = [True, -1, 256, 10**20, False]

    def entrypoint() -> None:
        import sys

        from support import tasks

        sys.exit(codes[tasks.rank()])  # unittest: sys.exit(not result.wasSuccessful())

    run = launch(local, entrypoint, len(codes))
    assert run.wait(timeout=60)
    *failed, fine = run.outcomes()
    assert [(each.reason, each.exit_code) for each in failed] == [("no_result", code) for code in (1, 255, 1, 1)]
    assert (fine.status, fine.exit_code) == ("succeeded", 0)


# --- SIGTERM, grace, SIGKILL


def test_finally_runs_in_a_replica_that_is_cancelled_or_out_of_time(
    local: LocalProcessExecutor, tmp_path: Path
) -> None:
    limit = 1 if CAN_FORK else 10  # a new Python needs a part of its time for imports
    limited = launch(local, tasks.clean_up, 1, args={"path": str(tmp_path / "limited")}, timeout=limit)
    with launch(local, tasks.clean_up, 1, args={"path": str(tmp_path / "said")}) as run:
        eventually((tmp_path / "said.0").exists)
        assert record_of(run.handles[0], "cancel.json") is None
    assert (tmp_path / "said.cleaned").exists()
    assert record_of(run.handles[0], "cancel.json") is not None
    assert record_of(run.handles[0], "outcome.json")["status"] == "cancelled"
    with pytest.raises(ReplicaCancelledError):
        run.results()
    assert limited.wait(60)
    assert (tmp_path / "limited.cleaned").exists()
    with pytest.raises(ReplicaTimeoutError, match=f"time limit of {limit} s"):
        limited.results()


def test_a_cleaning_up_that_never_ends_is_ended(local: LocalProcessExecutor, tmp_path: Path) -> None:
    handles = local.launch_replicas(1, tasks.clean_up_slowly, {"path": str(tmp_path / "said")})
    (pid,) = pids_in(tmp_path, ("said.0",))
    local.cancel(handles[0])
    assert (tmp_path / "said.cleaning").exists()
    assert not is_alive(pid)
    assert local.poll(handles[0]) == "cancelled"


def test_a_replica_that_swallows_sigterm_and_returns_is_cancelled_anyway(
    local: LocalProcessExecutor, tmp_path: Path
) -> None:
    handles = local.launch_replicas(1, tasks.swallow_sigterm, {"path": str(tmp_path / "said")})
    eventually((tmp_path / "said.0").exists)
    local.cancel(handles[0])
    (row,) = local.collect(handles, timeout=60)
    assert (row["status"], row["reason"], row["result"]) == ("cancelled", "cancelled", None)


@pytest.mark.parametrize("swallow", ["__del__", "weakref callback"])
def test_a_sigterm_that_python_swallows_in_a_callback_is_raised_again(
    local: LocalProcessExecutor, tmp_path: Path, swallow: str
) -> None:
    """For example, SIGTERM arrives in the callback of an import lock, where Python ignores exceptions."""
    args = {"path": str(tmp_path / "said"), "by_weakref": swallow != "__del__"}
    handles = local.launch_replicas(1, tasks.swallow_in_callback, args)
    eventually((tmp_path / "said.in callback").exists)
    local.cancel(handles[0])
    assert (tmp_path / "said.after callback").exists(), "the callback was interrupted"
    assert (tmp_path / "said.cleaned").exists(), "the clean-up of the entrypoint has run"
    assert local.poll(handles[0]) == "cancelled"


def test_a_stopped_replica_can_be_cancelled(local: LocalProcessExecutor) -> None:
    handles = local.launch_replicas(1, tasks.hang, {})
    pid = pid_of(handles[0])
    os.kill(pid, signal.SIGSTOP)
    local.cancel(handles[0])
    assert not is_alive(pid)
    assert local.poll(handles[0]) == "cancelled"


# --- helpers


@pytest.mark.parametrize("deaf", [False, True])
def test_cancelling_ends_every_helper_and_leaves_those_of_other_replicas(
    local: LocalProcessExecutor, tmp_path: Path, deaf: bool
) -> None:
    def entrypoint(folder: str, deaf: bool) -> None:
        from support import tasks

        tasks.hang_with_helpers(f"{folder}/{tasks.rank()}", deaf)

    for rank in "01":
        (tmp_path / rank).mkdir()
    handles = local.launch_replicas(2, entrypoint, {"folder": str(tmp_path), "deaf": deaf})
    cancelled, others = (pids_in(tmp_path / rank, (*HELPERS, f"rank.{rank}")) for rank in "01")
    assert all(map(is_alive, cancelled))
    local.cancel(handles[0])
    assert [pid for pid in cancelled if is_alive(pid)] == [], "helpers in their own sessions have ended, too"
    assert all(map(is_alive, others))
    local.cancel(handles[1])
    assert [pid for pid in others if is_alive(pid)] == []


@pytest.mark.parametrize("end", ["cancelled", "time limit", "supervisor killed"])
def test_processes_that_a_replica_started_save_their_work_in_the_rest_of_its_grace(
    local: LocalProcessExecutor, tmp_path: Path, end: str
) -> None:
    timeout = 3 if end == "time limit" else 600
    run = launch(local, tasks.run_a_launcher, 1, args={"folder": str(tmp_path)}, timeout=timeout)
    for number in range(4):
        eventually((tmp_path / str(number)).exists)
    if end == "cancelled":
        run.cancel()
    elif end == "supervisor killed":
        os.kill(run.handles[0].metadata["supervisor_pid"], signal.SIGKILL)
    assert run.wait(timeout=60)
    for number in range(4):
        # For readers, a run has ended as soon as its supervisor is gone. The replica ends itself a moment later.
        eventually((tmp_path / f"saved-{number}").exists, f"process {number} saves its work")


def test_a_child_that_ignores_sigterm_is_not_waited_for_in_vain() -> None:
    ready = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    )
    code = f"""
import subprocess, sys
from executors.process import ask_children_to_end, kill_descendants
import os

child = subprocess.Popen([sys.executable, "-c", {ready!r}], stdout=subprocess.PIPE)
child.stdout.readline()
ask_children_to_end(600.0)
print(child.poll())
kill_descendants(os.getpid())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "None\n"


def test_helpers_of_a_replica_that_returned_or_was_killed_are_ended(
    local: LocalProcessExecutor, tmp_path: Path
) -> None:
    for folder in ("returned", "killed"):
        (tmp_path / folder).mkdir()
    row = one_row(local, tasks.return_with_helpers, {"folder": str(tmp_path / "returned")})
    assert row["result"] == "returned"
    all_end(pids_in(tmp_path / "returned"))
    handles = local.launch_replicas(1, tasks.hang_with_helpers, {"folder": str(tmp_path / "killed"), "deaf": True})
    *helpers, replica = pids_in(tmp_path / "killed", (*HELPERS, "rank.0"))
    os.kill(replica, signal.SIGKILL)
    (row,) = local.collect(handles, timeout=60)
    assert (row["status"], row["reason"]) == ("failed", "signal")
    all_end(helpers)


@pytest.mark.parametrize("how", ["returns", "raises"])
def test_the_end_of_a_process_that_the_entrypoint_forked_is_not_the_replica_s(
    local: LocalProcessExecutor, how: str
) -> None:
    def entrypoint() -> str:
        pid = os.fork()
        if pid:
            return f"parent, after {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}"
        if how == "raises":
            raise ValueError("in the fork")
        return "child"

    run = launch(local, entrypoint, 1)
    assert run.results() == [f"parent, after {int(how == 'raises')}"]
    assert ("ValueError: in the fork" in run.logs(rank=0)) is (how == "raises")
