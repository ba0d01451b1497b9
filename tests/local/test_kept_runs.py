"""Controllers outside restart local replicas whose supervisor is gone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cli import FAST, Folder, Result
from support.processes import is_alive, parent_of
from support.runs import pid_said

from executors import Run, attach
from executors.restarts.decision_log import Decision, DecisionLog
from executors.run.run import view_of
from executors.store.records import exists
from executors.testing import eventually

WAITS = """
import os, sys, time
from pathlib import Path
from executors import current_replica

def main(ends_badly=False):
    replica = current_replica()
    said = Path(f"{replica.rank}-{replica.attempt}")
    Path(f"{said}.new").write_text(str(os.getpid()))
    os.rename(f"{said}.new", said)
    for step in range(10_000):
        replica.report(step=1000 * replica.attempt + step)
        if ends_badly or Path("go").exists():
            break
        time.sleep(0.02)
    if ends_badly:
        raise ValueError("always")
    return replica.attempt
"""


@pytest.fixture
def here(tmp_path: Path) -> Folder:
    folder = tmp_path / "work"
    folder.mkdir()
    made = Folder(folder)
    (folder / "waits.py").write_text(WAITS)
    return made


@pytest.fixture
def _supervisors(here: Folder) -> Iterator[None]:
    """End the processes of a detached run when its test ends."""
    yield
    (here.path / "go").touch()
    eventually(lambda: not any(map(is_alive, pids(here))), "all replicas have ended")


def pids(here: Folder) -> list[int]:
    return [pid_said(path) for path in here.path.iterdir() if path.name.replace("-", "").isdecimal()]


def launched(here: Folder, *more: object, n: int = 2) -> Result:
    done = here.launch("waits.py:main", "--run-id", "otter", "--detach", *more, n=n)
    assert done.code == 0, done
    eventually(lambda: len(pids(here)) == n, "all replicas wait")
    return done


def supervisor(here: Folder, rank: int, attempt: int) -> int:
    """Wait for an attempt, and return the pid of its supervisor."""
    parent = parent_of(pid_said(here.path / f"{rank}-{attempt}"))
    assert parent is not None
    return parent


def log_of(run: Run) -> list[Decision]:
    return list(DecisionLog(view_of(run).store, run.run_id).read())


def kinds(run: Run) -> list[tuple[str, dict[int, int], str | None]]:
    return [(entry.kind, entry.start, entry.how) for entry in log_of(run)]


def test_a_supervisor_that_is_killed_is_replaced_by_the_process_that_launched(here: Folder) -> None:
    with here.started("launch", "waits.py:main", "--n", 2, *FAST, "--restarts", 2, "--run-id", "otter") as command:
        command.prints("running")
        os.kill(supervisor(here, 0, 0), signal.SIGKILL)
        for rank in range(2):
            supervisor(here, rank, 1)
        (here.path / "go").touch()
        assert command.ends() == 0
        assert "restarting rank 1 as attempt 1 (1 of 2): lost" in command.output
    assert sorted(kinds(attach("otter")), key=str) == [("restart", {0: 1}, "launch"), ("restart", {1: 1}, "launch")]


@pytest.mark.usefixtures("_supervisors")
def test_a_detached_run_whose_machine_slept_is_brought_back_by_a_single_pass(here: Folder) -> None:
    launched(here, "--restarts", "1")  # its launcher is gone
    os.kill(supervisor(here, 0, 0), signal.SIGKILL)
    eventually(
        lambda: {r.status for r in attach("otter").status().replicas} == {"pending"},
        "both replicas wait for a controller",
    )
    once = here.replicas("watch", "otter", "--once")
    assert once.code == 0, once
    assert "restarting rank 0 as attempt 1 (1 of 1): lost" in once.stdout, once
    supervisors = {supervisor(here, rank, 1) for rank in range(2)}
    with here.started("watch", "otter") as left:
        left.prints("running")
        left.interrupt()
        assert left.ends() == 130
    for pid in supervisors:
        os.kill(pid, signal.SIGKILL)
    last = here.replicas("watch", "otter")
    assert last.code == 1, last
    assert "rank 0 given up: 1 of 1 restarts are used" in last.stdout, last
    assert [entry.kind for entry in log_of(attach("otter"))] == ["restart"] * 2 + ["give_up"] * 2


@pytest.mark.usefixtures("_supervisors")
def test_a_controller_needs_the_folder_and_a_policy_and_may_set_one(here: Folder, tmp_path: Path) -> None:
    launched(here, n=1)
    elsewhere = Folder(tmp_path).replicas("watch", "otter")
    assert (elsewhere.code, f"cd {here.path} && replicas watch otter" in elsewhere.stderr) == (2, True), elsewhere
    refused = here.replicas("watch", "otter")
    assert (refused.code, "replicas watch otter --restarts 3" in refused.stderr) == (2, True), refused
    os.kill(supervisor(here, 0, 0), signal.SIGKILL)
    eventually(lambda: attach("otter").status().status == "failed", "the rank ends after its supervisor")
    once = here.replicas("watch", "otter", "--once", "--set", "restarts=3,oom=0,hang=off")
    assert once.code == 0, once
    supervisor(here, 0, 1)
    policy, restart = log_of(attach("otter"))
    assert (policy.kind, policy.restarts, policy.hang) == ("policy", "3,oom=0", "off")
    assert (restart.kind, restart.start) == ("restart", {0: 1})


def test_controllers_of_one_run_do_each_others_work_once(here: Folder) -> None:
    """Two `replicas watch` and the launcher watch a run. Its supervisors and one of the controllers are killed."""
    n, rounds = 2, 3
    policy = f"{rounds + 2},backoff=0s,no_progress=100"
    with (
        here.started("launch", "waits.py:main", "--n", n, *FAST, "--restarts", policy, "--run-id", "otter") as launcher,
    ):
        supervisor(here, 0, 0), supervisor(here, 1, 0)
        with here.started("watch", "otter") as first, here.started("watch", "otter") as second:
            first.prints("running")
            second.prints("running")
            for attempt in range(rounds):
                for pid in {supervisor(here, rank, attempt) for rank in range(n)}:
                    os.kill(pid, signal.SIGKILL)
                if attempt == 1:
                    first.interrupt(signal.SIGKILL)
            for rank in range(n):
                supervisor(here, rank, rounds)
            (here.path / "go").touch()
            assert launcher.ends() == 0, launcher.output
            assert second.ends() == 0, second.output
    run = attach("otter")
    decided = log_of(run)
    assert sorted((e.rank, e.ended, e.start) for e in decided) == sorted(
        (rank, attempt, {rank: attempt + 1}) for rank in range(n) for attempt in range(rounds)
    )
    assert run.results() == [rounds] * n
    for rank in range(n):
        assert not exists(view_of(run).store, view_of(run).newest_attempt(rank).at(rounds + 1).key("handle.json"))


def test_a_cancel_while_a_restart_waits_ends_the_run_there(here: Folder) -> None:
    command = ("launch", "waits.py:main", "--n", 1, *FAST, "--restarts", "5,backoff=600s", "--run-id", "otter")
    with here.started(*command, "--arg", "ends_badly=true") as launcher:
        eventually(lambda: exists_run() and log_of(attach("otter")), "a restart is decided")
        assert here.replicas("cancel", "otter").code == 0
        assert launcher.ends() in (1, 130), launcher.output
    assert [entry.kind for entry in log_of(attach("otter"))] == ["restart", "cancel"]
    assert not (here.path / "0-1").exists()


def exists_run() -> bool:
    try:
        attach("otter")
    except Exception:  # noqa: BLE001 - it is not there yet
        return False
    return True


@pytest.mark.usefixtures("_supervisors")
def test_a_stop_cancels_replicas_that_do_not_end_in_time_and_exits_with_code_0(here: Folder) -> None:
    launched(here, "--restarts", "3")
    stopped = here.replicas("stop", "otter", "--within", "1s")
    assert stopped.code == 0, stopped
    assert "cancelled (stopped by the user" in stopped.stdout, stopped
    assert "replicas resume otter" in stopped.stdout
    again = here.replicas("stop", "otter")
    assert (again.code, "Nothing to stop" in again.stdout) == (0, True), again
