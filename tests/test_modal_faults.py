"""Launches on Modal through a service that fails, and through the wait for a GPU: no orphan, and nothing twice."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from grpclib import Status
from modal_of_tests import alive, create_of
from sandboxes_of_tests import gpu
from servers.modal_server import ModalServer

from executors import Run, attach, launch
from executors.errors import LaunchError
from executors.testing.executor_endings import task

pytestmark = pytest.mark.slow

__all__ = ["gpu"]  # a fixture

N = 8


def is_rank(rank: int) -> Callable[[Any], bool]:
    return lambda request: request.definition.name.endswith(f"-r{rank:04d}-a0")


def attached(server: ModalServer, run_id: str) -> Run:
    return attach(run_id, rendezvous=os.environ["REPLICAS_RENDEZVOUS"])


def check_each_stands_once(server: ModalServer, run: Run) -> None:
    """Every handle names a sandbox of its own rank, and there is no other; then end them."""
    named = {handle.metadata["job"]["sandbox_id"]: handle.rank for handle in run.handles}
    assert named == {box.sandbox_id: int(box.tags["replicas-rank"]) for box in server.sandboxes}
    assert sorted(named.values()) == list(range(run.world_size))
    run.cancel()
    assert run.wait(60)
    assert alive(server) == []


@pytest.mark.parametrize(
    ("way", "says"),
    [
        ({"status": Status.UNAUTHENTICATED}, "UNAUTHENTICATED as the test asked"),
        ({"status": Status.PERMISSION_DENIED, "message": "no sandboxes for you"}, "no sandboxes for you"),
        ({"status": Status.INTERNAL, "times": 8}, "INTERNAL as the test asked"),
        ({"status": Status.RESOURCE_EXHAUSTED, "times": 2}, "RESOURCE_EXHAUSTED as the test asked"),
    ],
    ids=["unauthenticated", "forbidden", "internal", "exhausted"],
)
def test_a_refused_rank_is_named_and_the_others_are_ended(
    modal_runs: ModalServer, gpu: str | None, way: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executors.vendor_patience.TRIES", 2)  # the SDK itself makes four of each
    modal_runs.fail(create_of(gpu), when=is_rank(5), **way)
    with pytest.raises(LaunchError, match=says) as caught:
        launch("modal", task("hang"), N, gpu=gpu, run_id="otter")
    assert caught.value.rank == 5
    assert str(caught.value).startswith("Backend 'modal' could not start replica 5 of 8: Modal: ")
    assert str(caught.value).endswith("Those already started were ended.")
    assert ("modal token new" in str(caught.value)) == (way["status"] is Status.UNAUTHENTICATED)
    assert alive(modal_runs) == []
    rows = attached(modal_runs, "otter").outcomes()
    assert {row.rank for row in rows if row.reason == "start_failed"} == {5}
    assert {row.rank for row in rows if row.reason == "cancelled"} == set(range(N)) - {5}
    assert not any((row.error or "").endswith("..") for row in rows)


@pytest.mark.parametrize(
    "way",
    [
        {"status": Status.INTERNAL, "times": 5},  # once more than the SDK tries
        {"status": Status.INTERNAL, "times": 1, "after_applying": True},
        {"status": Status.RESOURCE_EXHAUSTED},
        {"status": Status.RESOURCE_EXHAUSTED, "message": "Rate limit: over capacity, slow down"},
        {"loses_connection": True},
        {"loses_connection": True, "after_applying": True},
        {"loses_connection": True, "after_applying": True, "times": 5},
    ],
    ids=["internal", "internal-after", "throttled", "over-capacity", "cut", "cut-after", "cut-after-often"],
)
def test_a_launch_gets_through_a_failing_service_with_each_rank_once(
    modal_runs: ModalServer, gpu: str | None, way: dict[str, Any]
) -> None:
    modal_runs.deduplicates = False  # a repeated request is a second one: the name alone keeps it from a second sandbox
    modal_runs.fail(create_of(gpu), when=is_rank(5), **way)
    run = launch("modal", task("hang"), N, gpu=gpu)
    check_each_stands_once(modal_runs, run)


# Waiting for a GPU


@contextmanager
def beside(act: Callable[[], object]) -> Iterator[None]:
    """Do something in a thread; its failure is the test's."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - handed on below
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    assert failures == []


def test_a_gpu_that_never_comes_ends_the_launch_and_names_the_rank(
    modal_runs: ModalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modal.sandbox._impl_v1._SANDBOX_SCHEDULING_TIMEOUT", 4.0)  # of 21 minutes
    modal_runs.capacity = 3
    with pytest.raises(LaunchError, match="Insufficient capacity to create sandbox") as caught:
        launch("modal", task("hang"), 4, gpu="H100", run_id="otter")
    (unlucky,) = [box for box in modal_runs.sandboxes if not box.is_scheduled]
    assert caught.value.rank == int(unlucky.tags["replicas-rank"])
    assert len(modal_runs.sandboxes) == 4, "it is not asked for again"
    assert alive(modal_runs) == []


def test_ctrl_c_during_the_wait_for_a_gpu_ends_everything(modal_runs: ModalServer) -> None:
    modal_runs.capacity = 2

    def interrupt() -> None:
        modal_runs.wait_for("SandboxCreate", 4, within_s=90.0)
        os.kill(os.getpid(), signal.SIGINT)

    with beside(interrupt), pytest.raises(KeyboardInterrupt):
        launch("modal", task("hang"), 4, gpu="H100", run_id="otter")
    assert alive(modal_runs) == []
    rows = attached(modal_runs, "otter").outcomes()
    assert [(str(row.status), row.reason) for row in rows] == [("cancelled", "cancelled")] * 4


def test_a_rank_that_waits_for_a_gpu_is_seen_and_cancelled_from_elsewhere(modal_runs: ModalServer) -> None:
    modal_runs.capacity = 0

    def look_and_cancel() -> None:
        modal_runs.wait_for("SandboxGetTaskId")  # so it has been created, and waits
        run = attached(modal_runs, "otter")
        assert [state.status for state in run.status().replicas] == ["pending"]
        assert run.logs(rank=0) == ""
        run.cancel()

    with beside(look_and_cancel), pytest.raises(LaunchError, match="replica 0 of 1: it was cancelled"):
        launch("modal", task("hang"), 1, gpu="H100", run_id="otter")
    assert len(modal_runs.sandboxes) == 1
    assert [row.status for row in attached(modal_runs, "otter").outcomes()] == ["cancelled"]
