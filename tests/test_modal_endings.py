"""How replicas on Modal end, and what is told of it, on both of the SDK's back ends.

Without a GPU a sandbox goes to the newer back end, with one to the older.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from grpclib import Status
from modal_of_tests import alive, of_backend
from sandboxes_of_tests import gpu
from servers.modal_server import ModalServer

from executors import ModalExecutor, Run, attach, launch
from executors.errors import BackendError, ReplicaFailedError
from executors.testing import eventually
from executors.testing.executor_endings import task

pytestmark = pytest.mark.slow

__all__ = ["gpu"]  # a fixture

END_DIFFERENTLY = """
import time
from executors import current_replica

def main():
    rank = current_replica().rank
    if rank == 0:
        return "fine"
    if rank == 1:
        raise RuntimeError("no luck")
    print("hanging", flush=True)
    while True:
        time.sleep(60)
"""


def sandbox_id(run: Run, rank: int) -> str:
    return str(run.handles[rank].metadata["job"]["sandbox_id"])


def says(run: Run, text: str, ranks: Sequence[int]) -> None:
    for rank in ranks:
        eventually(lambda rank=rank: text in run.logs(rank=rank), f"rank {rank} says {text!r}")  # type: ignore[misc]


def test_every_ending_is_told_for_what_it_was(modal_runs: ModalServer, gpu: str | None) -> None:
    Path("train.py").write_text(END_DIFFERENTLY)
    run = launch("modal", "train.py", 7, gpu=gpu)
    says(run, "hanging", range(2, 7))
    run.cancel(2)
    modal_runs.kill(sandbox_id(run, 3))
    modal_runs.oom_kill(sandbox_id(run, 4))
    modal_runs.preempt(sandbox_id(run, 5))
    modal_runs.vanish(sandbox_id(run, 6))
    assert run.wait(60)
    rows = run.outcomes()
    assert [(row.rank, str(row.status), row.reason, row.exit_code) for row in rows] == [
        (0, "succeeded", None, 0),
        (1, "failed", "exception", 1),
        (2, "cancelled", "cancelled", 137),
        (3, "failed", "oom", 137),  # what killed it from inside the container is most likely the kernel
        (4, "failed", "oom", 137),
        (5, "failed", "preempted", 137),
        (6, "failed", "lost", None),
    ]
    said = [row.error or "" for row in rows]
    assert "RuntimeError: no luck" in said[1]
    assert said[2] == "Replica 2 was ended: cancelled by the user."
    assert said[4].startswith("Replica 4 of 7 (attempt 0) was killed: most likely out of memory (SIGKILL")
    assert said[5] == "Replica 5 of 7 (attempt 0) was preempted: Modal took its machine back."
    assert said[6].startswith("Replica 6 of 7 (attempt 0) was lost: Modal reports it gone and it left no outcome.")
    assert [row.output_tail for row in rows[3:6]] == ["hanging\n"] * 3, "what Modal kept of its output"
    with pytest.raises(ReplicaFailedError, match="no luck"):
        run.results()
    assert alive(modal_runs) == []


def test_a_time_limit_is_the_replicas_own_first(modal_runs: ModalServer, gpu: str | None) -> None:
    run = launch("modal", task("hang"), 1, gpu=gpu, timeout=4)
    assert run.wait(60)
    (row,) = run.outcomes()
    assert (row.reason, row.exit_code, row.error) == ("timeout", 143, "Replica 0 of 1 ran into its time limit of 4 s.")
    (sandbox,) = modal_runs.sandboxes
    assert sandbox.definition.timeout_secs == 4 + 120, "Modal's own comes later"


def test_a_replica_that_is_stuck_is_ended_by_modals_limit(
    modal_runs: ModalServer, gpu: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executors.cloud.MARGIN_S", 1 - 300)  # so that the replica's own limit comes too late
    run = launch("modal", task("hang"), 1, gpu=gpu, timeout=302)
    assert run.wait(60)
    (row,) = run.outcomes()
    assert (str(row.status), row.reason, row.exit_code) == ("failed", "timeout", 124)
    assert row.error == "Replica 0 of 1 (attempt 0) ran into its time limit of 302 s."


def test_a_replica_that_cannot_start_says_why(modal_runs: ModalServer, gpu: str | None) -> None:
    run = launch("modal", task("echo"), 1, gpu=gpu, env={"PATH": "/nowhere"})  # where no Python is
    assert run.wait(60)
    (row,) = run.outcomes()
    assert (str(row.status), row.reason, row.exit_code) == ("failed", "start_failed", 128)
    assert "before its entrypoint was reached" in (row.error or "")


def test_logs_that_modal_cannot_give_are_an_error_and_no_ending(modal_runs: ModalServer, gpu: str | None) -> None:
    run = launch("modal", task("hang"), 1, gpu=gpu)
    says(run, "hanging", [0])
    modal_runs.fail("AppFetchLogs", Status.UNAUTHENTICATED)
    with pytest.raises(BackendError, match="Modal"):
        run.logs(rank=0)
    assert run.logs(rank=0) == "hanging\n"
    assert run.status().replicas[0].status == "running"
    run.cancel()


def test_a_poll_that_fails_on_the_way_is_no_ending(modal_runs: ModalServer, gpu: str | None) -> None:
    run = launch("modal", task("hang"), 1, gpu=gpu)
    says(run, "hanging", [0])
    modal_runs.fail(of_backend("SandboxWait", gpu), Status.INTERNAL, times=4)  # the SDK's own three tries are in vain
    assert attach(run.url).status().replicas[0].status == "running"
    assert modal_runs.unused_faults() == []
    run.cancel()
    assert run.wait(60)
    assert [row.status for row in run.outcomes()] == ["cancelled"]


def test_a_look_at_a_replica_costs_one_call_and_its_logs_no_more_each_time(
    modal_runs: ModalServer, gpu: str | None
) -> None:
    run = launch("modal", task("hang"), 1, gpu=gpu)
    says(run, "hanging", [0])
    before = len(modal_runs.requests)
    assert ModalExecutor().poll(run.handles[0]) == "running"
    assert [rpc for rpc, _ in modal_runs.requests[before:]] == [of_backend("SandboxWait", gpu)]
    before = len(modal_runs.requests)
    assert run.logs(rank=0) == "hanging\n"
    assert {rpc for rpc, _ in modal_runs.requests[before:]} == {"AppFetchLogs"}
    run.cancel()
