"""A supervisor is known by the locks that it holds, and a folder of this machine belongs to one run of one store."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from support.new_runs import create_run
from support.processes import is_alive
from support.runs import pid_of

from executors import LocalProcessExecutor, attach, launch
from executors.backends.local.request import LocalLaunch
from executors.errors import RunExistsError
from executors.logs.times import PAIR, times_of
from executors.process import fork
from executors.registry.run_index import local_store
from executors.run.resume import resume
from executors.run.run import view_of
from executors.settings.run_spec import StartSpec
from executors.supervisor.supervisor_lock import NAME, hold, holder, open_locks, wake
from executors.testing import eventually
from executors.testing.executor_contract import task


def test_the_supervisor_of_a_replica_is_found_by_the_kernels_locks(
    local: LocalProcessExecutor, state_home: Path
) -> None:
    with launch(local, task("hang"), 2, run_id="mine") as run:
        folder = state_home / "replicas" / "mine"
        supervisor = view_of(run).reader.handles.of(0).metadata["supervisor_pid"]
        pids = [pid_of(handle) for handle in run.handles]
        assert [holder(folder, rank, 0) for rank in range(2)] == [supervisor] * 2
        assert holder(folder, 2, 0) is None
        assert holder(folder, 0, 1) is None
        os.kill(supervisor, signal.SIGKILL)
        eventually(lambda: not any(map(is_alive, pids)), "the ranks end with their supervisor")
        assert holder(folder, 0, 0) is None
        assert not wake(folder, 0, 0)


def test_a_process_that_a_supervisor_forks_does_not_hold_its_locks(tmp_path: Path) -> None:
    descriptor = open_locks(tmp_path)
    for rank in (0, 3):
        hold(descriptor, rank, 2)
    said, says = os.pipe()
    child = fork()
    if child == 0:
        os.write(says, str(holder(tmp_path, 3, 2)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert int(os.read(said, 100)) == os.getpid()
    for each in (descriptor, said, says):
        os.close(each)
    assert holder(tmp_path, 3, 2) is None


def test_a_supervisor_holds_no_lock_of_an_attempt_that_another_process_has_begun(
    local: LocalProcessExecutor, state_home: Path
) -> None:
    spec = create_run(local_store(), "mine", task("hang"), {}, 2, backend="local")
    theirs = LocalLaunch(spec, str(state_home / "replicas"), "", [], {})
    others = theirs.handle(theirs.attempt(0), os.getpid(), 0)
    assert theirs.begin(theirs.attempt(0), others) == others
    (mine,) = local.start_ranks(StartSpec(spec, task("hang")))
    folder = state_home / "replicas" / "mine"
    assert mine.rank == 1
    assert [holder(folder, rank, 0) for rank in range(2)] == [None, mine.metadata["supervisor_pid"]]
    local.cancel(mine)


def test_a_link_in_the_place_of_the_locks_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    descriptor = open_locks(tmp_path / "real")
    hold(descriptor, 0, 0)
    (tmp_path / NAME).symlink_to(tmp_path / "real" / NAME)
    assert holder(tmp_path, 0, 0) is None
    os.close(descriptor)


def test_a_run_is_cancelled_even_if_its_locks_are_not_found(local: LocalProcessExecutor, state_home: Path) -> None:
    run = launch(local, task("hang"), 1, run_id="mine")
    pid = pid_of(view_of(run).reader.handles.of(0))
    (state_home / "replicas" / "mine" / NAME).unlink()
    attach("mine").cancel()
    eventually(lambda: not is_alive(pid), "the supervisor reads the cancel marker and ends the rank")
    assert run.wait(30)
    assert run.status().status == "cancelled"


def test_logs_of_two_runs_of_one_id_are_never_mixed(
    local: LocalProcessExecutor, tmp_path: Path, state_home: Path
) -> None:
    """A run of a shared directory is resumed on this machine, which knows another run with this id."""
    theirs = launch(local, task("fail"), 1, args={"message": "theirs"}, run_id="same", rendezvous=tmp_path / "shared")
    assert theirs.wait(30)
    digest = view_of(theirs).task_digest
    shutil.rmtree(state_home / "replicas" / "same")  # as on another machine
    mine = launch(local, task("fail"), 1, args={"message": "mine"}, run_id="same")
    assert mine.wait(30)
    away = attach("same", rendezvous=tmp_path / "shared")
    assert "theirs" in away.logs(0)
    assert "mine" in attach("same").logs(0)
    with pytest.raises(RunExistsError, match=r"another run 'same'.*replicas rm same"):
        resume(away, task_digest=digest)
    away.remove()
    assert "mine" in attach("same").logs(0)


def test_a_run_under_the_id_of_one_that_was_deleted_elsewhere_begins_its_log_again(
    local: LocalProcessExecutor, tmp_path: Path, state_home: Path
) -> None:
    """A bucket's lifecycle and `replicas rm` on another machine leave this machine's folder as it is."""
    log = state_home / "replicas" / "nightly" / "replicas" / "0000" / "0" / "output.log"
    for message in ("theirs", "mine"):
        run = launch(local, task("fail"), 1, args={"message": message}, run_id="nightly", rendezvous=tmp_path)
        assert run.wait(30)
        assert message in log.read_text()
        assert ("theirs" in log.read_text()) is (message == "theirs")
        assert bytes(view_of(run).store.get("nightly/replicas/0000/0/output.log")) == log.read_bytes()
        assert all(at > view_of(run).record.created_at for at, _ in PAIR.iter_unpack(times_of(log).read_bytes()))
        shutil.rmtree(tmp_path / "nightly")


def test_a_store_that_moved_is_resumed_where_it_is(local: LocalProcessExecutor, tmp_path: Path) -> None:
    run = launch(local, task("fail"), 1, args={"message": "again"}, run_id="mover", rendezvous=tmp_path / "here")
    assert run.wait(30)
    noted = view_of(run).noted
    assert noted is not None
    (tmp_path / "here").rename(tmp_path / "there")
    again = resume(attach("mover", rendezvous=tmp_path / "there"), task_digest=view_of(run).record.task_digest)
    assert again.wait(30)
    assert again.outcomes()[0].attempt == 1
    assert view_of(attach("mover")).store.url == (tmp_path / "there").as_uri()
    assert view_of(attach("mover")).noted == replace(noted, rendezvous=view_of(attach("mover")).store.url), (
        "the note has the new address of the store"
    )
    assert resume(attach("mover")).wait(30)
