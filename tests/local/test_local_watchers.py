"""The processes behind a local run, killed one by one: zygote and supervisor."""

from __future__ import annotations

import functools
import json
import os
import signal
import textwrap
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import tasks
from support.processes import is_alive, parent_of
from support.processes import zygote_of as zygote_behind
from support.runs import all_gone, launcher, pid_of, pids_said, record_of

from executors import LocalProcessExecutor, ReplicaHandle, Run, launch
from executors.errors import BackendError, ReplicaLostError
from executors.testing import eventually

# --- the zygote


def zygote_of(handle: ReplicaHandle) -> int:
    return zygote_behind(handle.metadata["supervisor_pid"])


def test_a_killed_zygote_ends_no_run_and_is_replaced(local: LocalProcessExecutor, tmp_path: Path) -> None:
    handles = local.launch_replicas(1, tasks.hang, {"path": str(tmp_path / "replica")})
    (pid,) = pids_said(tmp_path, "replica.*", 1)
    os.kill(zygote_of(handles[0]), signal.SIGKILL)
    assert launch(local, tasks.rank, 2).results() == [0, 1]
    assert is_alive(pid)
    assert local.poll(handles[0]) == "running"
    local.cancel(handles[0])
    assert local.poll(handles[0]) == "cancelled"
    assert not is_alive(pid)


def in_a_thread(act: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run a function in a thread, because the zygote may be gone. The list gets its result or its exception."""
    ends: list[Any] = []

    def go() -> None:
        try:
            ends.append(act())
        except BackendError as error:
            ends.append(error)

    thread = threading.Thread(target=go)
    thread.start()
    return thread, ends


def test_a_zygote_killed_in_the_middle_of_a_launch_either_launches_or_reports_that(local: LocalProcessExecutor) -> None:
    before = local.launch_replicas(1, tasks.hang, {})
    zygote = zygote_of(before[0])
    os.kill(zygote, signal.SIGSTOP)
    thread, ends = in_a_thread(lambda: launch(local, tasks.rank, 2).results())
    os.kill(zygote, signal.SIGKILL)
    thread.join(60)
    assert ends == [[0, 1]] or "The process that forks replicas was killed by SIGKILL" in str(ends[0])
    assert launch(local, tasks.rank, 2).results() == [0, 1], "the next launch works"
    assert local.poll(before[0]) == "running"
    local.cancel(before[0])


def test_a_launch_that_fails_half_way_leaves_no_orphans(local: LocalProcessExecutor, state_home: Path) -> None:
    first = local.launch_replicas(1, tasks.hang, {})
    thread, ends = in_a_thread(lambda: launch(local, tasks.hang, 48, run_id="half-way"))
    supervisor = supervisor_that_starts(state_home / "replicas/half-way")
    os.kill(zygote_of(first[0]), signal.SIGKILL)
    thread.join(60)
    if isinstance(ends[0], Run):
        ends[0].cancel()
    all_gone([supervisor])
    local.cancel(first[0])


def test_ctrl_c_in_launch_leaves_no_orphans(tmp_path: Path, state_home: Path) -> None:
    with launcher("interrupted_while_launching", str(tmp_path)) as process:
        supervisor = supervisor_that_starts(state_home / "replicas/interrupted")
        process.send_signal(signal.SIGINT)
        all_gone([supervisor])


def supervisor_that_starts(run: Path) -> int:
    """Wait until a launch has a supervisor, which now starts its ranks one by one and ends after the last of them."""
    handle = run / "replicas/0000/0/handle.json"
    eventually(handle.exists, "the launch begins", every_s=0)
    return int(json.loads(handle.read_text())["metadata"]["supervisor_pid"])


def test_one_zygote_serves_all_executors_with_the_same_preload(local: LocalProcessExecutor) -> None:
    others = (local, LocalProcessExecutor(preload=(), max_parallel=1), LocalProcessExecutor(preload=("json",)))
    handles = [executor.launch_replicas(1, tasks.hang, {})[0] for executor in others]
    first, same, different = (zygote_of(handle) for handle in handles)
    assert first == same != different
    assert parent_of(first) == parent_of(different) == os.getpid()
    assert len({handle.metadata["supervisor_pid"] for handle in handles}) == 3, "each run has its own supervisor"
    for handle in handles:
        local.cancel(handle)


def test_a_module_that_cannot_be_preloaded_is_named() -> None:
    with pytest.raises(BackendError, match="no_such_module_to_preload"):
        launch(LocalProcessExecutor(preload=("no_such_module_to_preload",)), tasks.rank, 1)


@pytest.fixture
def preloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], LocalProcessExecutor]:
    """Return an executor whose zygote runs these lines as a module of its preload list."""

    def executor(lines: str) -> LocalProcessExecutor:
        (tmp_path / f"{tmp_path.name}.py").write_text(textwrap.dedent(lines))
        # a preload list that no other test uses, so the zygote is new
        return LocalProcessExecutor(preload=("json", tmp_path.name))

    monkeypatch.syspath_prepend(tmp_path)
    return executor


@pytest.mark.parametrize("entrypoint", ["support.tasks:rank", tasks.rank], ids=["by name", "a function"])
@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("raise OSError('libcudart.so.12: cannot open shared object file')", "OSError: libcudart.so.12: cannot open"),
        ("raise ValueError('libnvJitLink.so was not found')", "ValueError: libnvJitLink.so was not found"),
        ("import sys; sys.exit('this machine has no licence')", "SystemExit: this machine has no licence"),
    ],
)
def test_a_preload_that_fails_otherwise_than_by_an_import_error_is_named(
    preloaded: Callable[[str], LocalProcessExecutor], lines: str, said: str, entrypoint: Any
) -> None:
    with pytest.raises(BackendError, match=f"preload: cannot import 'test_a_preload.*': {said}"):
        launch(preloaded(lines), entrypoint, 1)


def test_a_preload_that_was_mended_is_imported_by_the_next_launch(
    preloaded: Callable[[str], LocalProcessExecutor],
) -> None:
    with pytest.raises(BackendError, match="No usable temporary directory"):
        launch(preloaded("raise FileNotFoundError('No usable temporary directory found')"), tasks.rank, 1)
    assert launch(preloaded("is_well = True"), tasks.rank, 1).results() == [0]


@pytest.mark.parametrize(
    ("entrypoint", "left"),
    [("support.tasks:rank", 0), (tasks.rank, 0), (tasks.rank, 1), (tasks.rank, 2)],
    ids=["a check", "a guard", "a supervisor", "a rank"],
)
def test_the_error_of_a_machine_without_room_for_another_process_names_the_limit(
    preloaded: Callable[[str], LocalProcessExecutor], entrypoint: Any, left: int
) -> None:
    lines = f"""
        import os
        fork, left = os.fork, {left}
        def fork_while_there_is_room():
            global left
            left -= 1
            if left < 0:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            return fork()
        os.fork = fork_while_there_is_room
    """
    with pytest.raises(BackendError, match="Resource temporarily unavailable"):
        launch(preloaded(lines), entrypoint, 1)


def test_a_launcher_without_room_for_a_zygote_reports_that(
    preloaded: Callable[[str], LocalProcessExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def has_no_room(*args: Any, **options: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("executors.backends.local.zygote_client.subprocess.Popen", has_no_room)
    with pytest.raises(BackendError, match=r"process that forks replicas cannot be started: .*temporarily unavailable"):
        launch(preloaded("is_well = True"), tasks.rank, 1)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL. Perhaps memory ran out"),
        ("import os; os.kill(os.getpid(), 4)", "was killed by SIGILL. Perhaps by what it imports: json, test_the_end"),
        ("import os; os._exit(3)", "ended with exit code 3. Perhaps by what it imports: json, test_the_end"),
    ],
)
def test_the_end_of_a_zygote_that_left_no_message_is_reported(
    preloaded: Callable[[str], LocalProcessExecutor], lines: str, said: str
) -> None:
    with pytest.raises(BackendError, match=f"The process that forks replicas {said}"):
        launch(preloaded(lines), tasks.rank, 1)


def test_many_threads_launch_at_once(local: LocalProcessExecutor) -> None:
    def echo(number: int) -> list[Any]:
        return launch(local, lambda n: n, 2, args={"n": number}).results()

    launched = [in_a_thread(functools.partial(echo, number)) for number in range(6)]
    for number, (thread, ends) in enumerate(launched):
        thread.join(60)
        assert ends == [[number, number]]


def test_a_fork_of_the_launcher_can_launch_as_well(local: LocalProcessExecutor, tmp_path: Path) -> None:
    assert launch(local, tasks.rank, 1).results() == [0]
    with warnings.catch_warnings():
        # this fork of a process with threads is the subject of the test
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            (tmp_path / "child").write_text(str(launch(local, tasks.rank, 2).results()))
        finally:
            os._exit(0)
    assert launch(local, tasks.rank, 2).results() == [0, 1]
    os.waitpid(child, 0)
    assert (tmp_path / "child").read_text() == "[0, 1]"
    assert launch(local, tasks.rank, 1).results() == [0]


# --- the supervisor


def test_a_killed_supervisor_ends_its_replicas_and_they_count_as_lost(
    local: LocalProcessExecutor, tmp_path: Path
) -> None:
    folder = tmp_path / "pids"
    folder.mkdir()
    run = launch(local, tasks.hang_with_helpers, 1, args={"folder": str(folder), "deaf": True})
    pids = pids_said(folder, "*[!~]", 5)
    os.kill(run.handles[0].metadata["supervisor_pid"], signal.SIGKILL)
    all_gone(pids)
    assert run.wait(timeout=60)
    (outcome,) = run.outcomes()
    assert (outcome.status, outcome.reason) == ("failed", "lost")
    with pytest.raises(ReplicaLostError, match=r"Replica 0 of 1 .*lost"):
        run.results()
    assert record_of(run.handles[0], "outcome.json")["reason"] == "lost", "the recorded outcome does not change"


@pytest.mark.parametrize("first", [signal.SIGSTOP, signal.SIGKILL])
def test_nothing_is_left_by_a_killed_supervisor_whose_replica_cannot_clean_up(
    local: LocalProcessExecutor, tmp_path: Path, first: signal.Signals
) -> None:
    folder = tmp_path / "pids"
    folder.mkdir()
    run = launch(local, tasks.hang_with_helpers, 1, args={"folder": str(folder), "deaf": True})
    pids = pids_said(folder, "*[!~]", 5)
    supervisor = run.handles[0].metadata["supervisor_pid"]
    os.kill(supervisor, signal.SIGSTOP)  # so that the zygote gives no answer in the meantime
    os.kill(pid_of(run.handles[0]), first)
    os.kill(supervisor, signal.SIGKILL)
    all_gone(pids)
    assert run.wait(timeout=60)
    assert [outcome.reason for outcome in run.outcomes()] == ["lost"]


def test_a_supervisor_killed_with_its_replicas_or_before_some_started_is_found_out_by_polling(tmp_path: Path) -> None:
    one_at_a_time = LocalProcessExecutor(preload=(), max_parallel=1, term_grace_s=0.5)
    handles = one_at_a_time.launch_replicas(2, tasks.hang, {"path": str(tmp_path / "replica")})
    for pid in [handles[0].metadata["supervisor_pid"], *pids_said(tmp_path, "replica.*", 1)]:
        os.kill(pid, signal.SIGKILL)
    rows = one_at_a_time.collect(handles, timeout=60)
    assert [(row["status"], row["reason"]) for row in rows] == [("failed", "lost")] * 2


def test_ranks_that_ended_before_their_supervisor_was_killed_keep_their_results_and_others_can_be_cancelled(
    local: LocalProcessExecutor,
) -> None:
    handles = local.launch_replicas(2, "executors.testing.tasks:hang_on", {"rank": 1})
    eventually(lambda: local.poll(handles[0]) == "succeeded")
    pid = pid_of(handles[1])
    os.kill(handles[0].metadata["supervisor_pid"], signal.SIGKILL)
    local.cancel(handles[1])
    all_gone([pid])
    done, rest = local.collect(handles, timeout=60)
    assert (done["status"], done["result"]) == ("succeeded", "done")
    assert rest["status"] in ("cancelled", "failed")
    assert rest["reason"] in ("cancelled", "lost")


def test_supervisor_and_zygote_hold_nothing_of_the_launchers(local: LocalProcessExecutor, tmp_path: Path) -> None:
    held = open(tmp_path / "held", "w")  # noqa: SIM115 - open while others fork
    os.set_inheritable(held.fileno(), True)
    with held:
        handles = local.launch_replicas(1, tasks.hang, {"path": str(tmp_path / "replica")})
        pids = [zygote_of(handles[0]), handles[0].metadata["supervisor_pid"], *pids_said(tmp_path, "replica.*", 1)]
        for pid in pids:
            targets = {number.name: os.readlink(number) for number in Path(f"/proc/{pid}/fd").iterdir()}
            assert str(tmp_path / "held") not in targets.values()
            assert targets["0"] == os.devnull
    for pid in pids[:2]:
        assert {os.readlink(f"/proc/{pid}/fd/{number}") for number in (0, 1, 2)} == {os.devnull}
        ignored = next(
            line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn")
        )
        assert int(ignored.split()[1], 16) & 1 << (signal.SIGINT - 1), (
            "the supervisor ignores Ctrl-C, which is for the launcher"
        )
    local.cancel(handles[0])


def test_a_supervisor_collects_its_garbage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The zygote, which only imports, does not."""
    (tmp_path / "tells_of_its_collector.py").write_text(
        "import gc, pathlib\n"
        "from executors.supervisor.supervisor import Supervisor\n"
        "run = Supervisor.run\n"
        "def tell_and_run(self):\n"
        f"    pathlib.Path({str(tmp_path)!r}, 'told').write_text(str(gc.isenabled()))\n"
        "    run(self)\n"
        "Supervisor.run = tell_and_run\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert launch(LocalProcessExecutor(preload=("tells_of_its_collector",)), str, 1).results() == [""]
    assert (tmp_path / "told").read_text() == "True"
