"""Tests launchers that are killed, interrupted, or return, and detached runs, which continue without a launcher."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
from support.processes import children_of, is_alive, zygote_of
from support.runs import all_gone, handles_of, launcher, pids_said, record_of, said

from executors import LocalProcessExecutor, attach, list_runs

# --- the launcher


def test_a_killed_launcher_leaves_nothing(tmp_path: Path) -> None:
    with launcher("hang_attached", str(tmp_path)) as process:
        handles = handles_of(said(tmp_path / "launched"))
        pids = pids_said(tmp_path, "[01]/*[!~]", 2 * 5)
        supervisor = handles[0].metadata["supervisor_pid"]
        zygote = zygote_of(supervisor)
        process.kill()
        all_gone([*pids, supervisor, zygote])
    (run,) = list_runs()
    assert [(outcome.status, outcome.reason) for outcome in run.outcomes()] == [("cancelled", "cancelled")] * 2


def test_a_killed_launcher_leaves_nothing_while_a_helper_it_forked_lives_on(tmp_path: Path) -> None:
    with launcher("hang_beside_a_helper", str(tmp_path)) as process:
        launched = said(tmp_path / "launched")
        try:
            pids = pids_said(tmp_path, "replica.*", 2)
            process.kill()
            all_gone([*pids, handles_of(launched)[0].metadata["supervisor_pid"]])
            assert is_alive(launched["helper"])
        finally:
            os.kill(launched["helper"], signal.SIGKILL)


def test_a_launcher_that_is_killed_while_its_entrypoint_is_imported_leaves_nothing(tmp_path: Path) -> None:
    """The import may train, because the script has no `__main__` guard, and that training belongs to no run."""
    with launcher("hang_while_its_entrypoint_is_imported", str(tmp_path)) as process:
        pids = pids_said(tmp_path, "importing.*", 3)
        try:
            process.kill()
            all_gone(pids)
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    assert list_runs() == []


def test_an_attached_run_ends_with_a_launcher_that_returns(tmp_path: Path) -> None:
    with launcher("launch_and_end", str(tmp_path)) as process:
        handles = handles_of(said(tmp_path / "launched"))
        assert process.wait(60) == 0
        rows = LocalProcessExecutor(preload=()).collect(handles, timeout=60)
    assert [(row["status"], row["reason"]) for row in rows] == [("cancelled", "cancelled")] * 2


def test_a_launcher_that_returns_with_the_results_cancels_nothing_and_cuts_no_exit_short(tmp_path: Path) -> None:
    with launcher("returns_with_the_results", str(tmp_path)) as process:
        launched = said(tmp_path / "launched")
        assert launched["results"] == ["done", "done"]
        assert process.wait(60) == 0
        all_gone(pids_said(tmp_path, "replica.*", 2))
    assert sorted(path.name for path in tmp_path.glob("left.*")) == ["left.0", "left.1"]
    for handle in handles_of(launched):
        assert record_of(handle, "cancel.json") is None
        assert record_of(handle, "outcome.json")["status"] == "succeeded"


def test_a_run_outlives_the_thread_that_launched_it(tmp_path: Path) -> None:
    with launcher("launch_from_a_thread_that_ends", str(tmp_path)):
        (handle,) = handles_of(said(tmp_path / "launched"))
        (pid,) = pids_said(tmp_path, "replica.*", 1)
        run = attach(handle.metadata["run_id"])
        assert not run.wait(timeout=1.5), "the run continues after the thread has ended"
        assert is_alive(pid)
        run.cancel()


@pytest.mark.parametrize("whole_group", [False, True], ids=["alone", "as a terminal does"])
def test_ctrl_c_in_wait_leaves_the_run_alone(tmp_path: Path, whole_group: bool) -> None:
    with launcher("interrupted_while_waiting", str(tmp_path), start_new_session=whole_group) as process:
        said(tmp_path / "launched")
        pids_said(tmp_path, "replica.*", 1)
        (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
        assert said(tmp_path / "interrupted") == {"status": "running"}
        assert said(tmp_path / "cancelled") == {"status": "cancelled"}
        assert process.wait(60) == 0


def test_a_launcher_that_used_torchs_threads_can_launch(tmp_path: Path) -> None:
    with launcher("after_threaded_torch", str(tmp_path)):
        assert said(tmp_path / "launched")["results"] == [600.0**3] * 2


# --- detached runs


def test_a_detached_run_continues_and_is_attached_cancelled_and_collected_elsewhere(tmp_path: Path) -> None:
    with launcher("launch_and_end", str(tmp_path), "detached") as process:
        launched = said(tmp_path / "launched")
        assert process.wait(60) == 0
    pids = pids_said(tmp_path, "replica.*", 2)
    run = attach(launched["run_id"])
    assert not run.wait(timeout=1.5), "the run continues without its launcher"
    assert all(is_alive(pid) for pid in pids)
    with launcher("attach_cancel_and_collect", str(tmp_path), launched["run_id"]) as process:
        assert said(tmp_path / "attached") == {
            "before": "running",
            "between": ["cancelled", "running"],
            "after": [[0, "cancelled", "cancelled"], [1, "cancelled", "cancelled"]],
        }
    assert run.wait(timeout=60)
    assert [handle.to_json() for handle in run.handles] == launched["handles"]
    all_gone([*pids, run.handles[0].metadata["supervisor_pid"]])


def test_a_detached_run_survives_a_killed_launcher_and_zygote(tmp_path: Path) -> None:
    with launcher("launch_and_end", str(tmp_path), "detached") as process:
        handles = handles_of(said(tmp_path / "launched"))
        for pid in children_of(process.pid):
            with contextlib.suppress(ProcessLookupError):  # the process that served the launch may have ended by itself
                os.kill(pid, signal.SIGKILL)
        process.kill()
    pids = pids_said(tmp_path, "replica.*", 2)
    executor = LocalProcessExecutor(preload=())
    assert [str(executor.poll(handle)) for handle in handles] == ["running", "running"]
    for handle in handles:
        executor.cancel(handle)
    all_gone([*pids, handles[0].metadata["supervisor_pid"]])
