"""The end of a local replica's output is an object of its attempt, if the rendezvous is not this user's own
directory.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from servers.s3.server import S3Server
from support import tasks
from support.processes import is_alive
from support.runs import log_of, pid_of, without_store

from executors import LocalProcessExecutor, Run, launch
from executors.attempt import Attempt
from executors.replica import Replica
from executors.run.run import view_of
from executors.store import MemoryStore
from executors.testing import eventually
from executors.worker import heartbeat
from executors.worker.heartbeat import Heartbeat
from executors.worker.log_copy import LogCopy

MIB = 1 << 20


def say_and_end(how: str) -> str:
    """Print on all ranks, and end in the given way."""
    print("the first words")
    os.write(1, b"x" * (17 * MIB if how == "large" else 10))
    print("the last words", end="")
    if how == "exception":
        raise ValueError("boom")
    if how == "leaves":
        os._exit(3)
    if how == "hangs":
        tasks.hang()
    return "done"


def copy_of(run: Run, rank: int = 0) -> bytes | None:
    key = f"{run.run_id}/replicas/{rank:04d}/0/output.log"
    return (
        bytes(view_of(run).store.get(key)) if any(entry.key == key for entry in view_of(run).store.list(key)) else None
    )


@pytest.mark.parametrize("how", ["returns", "exception", "leaves", "hangs"])
def test_the_whole_log_is_in_the_rendezvous_when_the_outcome_is(
    local: LocalProcessExecutor, tmp_path: Path, state_home: Path, how: str
) -> None:
    run = launch(local, say_and_end, 2, args={"how": how}, rendezvous=tmp_path / "shared")
    if how == "hangs":
        for handle in run.handles:
            pid = pid_of(handle)
            eventually(lambda handle=handle: "last words" in local.stream_logs(handle))  # type: ignore[misc]
        os.kill(pid, signal.SIGKILL)
        run.cancel(rank=0)
    assert run.wait(60)
    for rank, handle in enumerate(run.handles):
        said = copy_of(run, rank)
        assert said == log_of(handle, state_home).read_bytes()
        assert said.startswith(b"the first words\n" + b"x" * 10 + b"the last words")
    run.remove()
    assert not list((tmp_path / "shared").glob("*/replicas"))


def test_the_logs_of_replicas_that_leave_no_outcome_are_copied_into_a_bucket(
    local: LocalProcessExecutor, s3: S3Server
) -> None:
    run = launch(local, say_and_end, 3, args={"how": "leaves"}, rendezvous=s3.url("runs"))
    assert run.wait(60)
    assert [copy_of(run, rank) for rank in range(3)] == [b"the first words\n" + b"x" * 10 + b"the last words"] * 3


def test_a_copy_that_takes_too_long_is_given_up_and_delays_no_other_ranks_end(
    local: LocalProcessExecutor, s3: S3Server, tmp_path: Path
) -> None:
    def entrypoint(go: str) -> None:
        if tasks.rank() == 0:
            eventually(Path(go).exists)
            say_and_end("large")
            os._exit(3)
        tasks.hang()

    run = launch(local, entrypoint, 2, args={"go": str(tmp_path / "go")}, rendezvous=s3.url("runs"))
    pids = [pid_of(handle) for handle in run.handles]
    s3.misbehave(bytes_per_s=1_000_000)
    (tmp_path / "go").touch()
    eventually(lambda: not is_alive(pids[0]))
    os.kill(pids[1], signal.SIGKILL)
    assert run.wait(60)
    first, second = run.outcomes()
    assert (first.reason, second.reason) == ("no_result", "signal")
    assert second.finished_at < first.finished_at


def test_the_last_16_mebibytes_of_a_long_log_are_copied(local: LocalProcessExecutor, tmp_path: Path) -> None:
    run = launch(local, say_and_end, 1, args={"how": "large"}, rendezvous=tmp_path / "shared")
    assert run.results() == ["done"]
    said = copy_of(run)
    assert said is not None
    assert (len(said), said[:3], said[-14:]) == (16 * MIB, b"xxx", b"the last words")


def test_a_rendezvous_that_is_this_users_own_directory_has_the_log_itself(
    local: LocalProcessExecutor, tmp_path: Path, state_home: Path
) -> None:
    """The store is named by another path here. A copy would be written over the log."""
    launch(local, tasks.rank, 1).results()
    (tmp_path / "alias").symlink_to(state_home / "replicas")
    run = launch(local, say_and_end, 1, args={"how": "large"}, rendezvous=tmp_path / "alias")
    assert run.results() == ["done"]
    assert log_of(run.handles[0], state_home).stat().st_size > 17 * MIB


def test_while_a_replica_runs_the_last_256_kibibytes_are_copied_when_it_printed_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "COPY_S", 0.0)
    monkeypatch.setattr(heartbeat, "LOOK_S", 0.01)
    store = MemoryStore()
    replica = Replica(0, 1, "otter", 0, store.url, claimed_nonce="n")
    replica.__dict__["store"] = store  # a cached property
    log = tmp_path / "output.log"
    log.write_bytes(b"first\n" + b"y" * 300_000)
    attempt = Attempt(store, "otter", 0)
    beating = Heartbeat(replica, log=LogCopy(attempt, log))
    beating.start()
    eventually(lambda: attempt.has("output.log"))
    assert bytes(store.get(attempt.key("output.log"))) == b"y" * (256 << 10)
    with open(log, "ab") as file:
        file.write(b"more")
    eventually(lambda: bytes(store.get(attempt.key("output.log"))).endswith(b"ymore"))
    beating.stop()


def test_a_log_that_cannot_be_copied_costs_no_one_a_result(local: LocalProcessExecutor, tmp_path: Path) -> None:
    def entrypoint(state: str) -> str:
        for log in Path(state).rglob("output.log"):
            log.unlink()
        return "done"

    args = {"state": str(tmp_path / "state")}
    run = launch(local, entrypoint, 1, args=args, rendezvous=tmp_path / "shared")
    assert run.results() == ["done"]
    assert copy_of(run) is None


def test_the_log_of_a_result_that_waited_for_its_store_is_whole_where_it_is_read_from_elsewhere(
    local: LocalProcessExecutor, tmp_path: Path, state_home: Path
) -> None:
    run = without_store(local, tmp_path / "shared", state_home, "cannot be recorded yet", gives_up_s=60.0)
    assert run.results() == ["the result"]
    whole = log_of(run.handles[0], state_home).read_bytes()
    eventually(lambda: copy_of(run) == whole, "the copy")  # the store may come back just before the outcome is put
    assert b"cannot be recorded yet" in whole
