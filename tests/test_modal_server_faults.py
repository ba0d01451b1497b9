"""How the Modal server of the tests misbehaves, seen through the real SDK: the exceptions that an adapter meets."""

from __future__ import annotations

import concurrent.futures
import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import modal
import pytest
from grpclib import Status
from grpclib.exceptions import StreamTerminatedError
from modal.exception import (
    AlreadyExistsError,
    AuthError,
    ConflictError,
    ExecutionError,
    InternalError,
    NotFoundError,
    ResourceExhaustedError,
    SandboxTerminatedError,
    UnimplementedError,
)
from processes_of_tests import is_alive
from sandboxes_of_tests import app, create, gpu, text_of
from servers.modal_sandboxes import pids_with
from servers.modal_server import ModalServer, modal_server

from executors.testing.processes import environment
from executors.testing.waiting import eventually

__all__ = ["app", "gpu"]  # fixtures


def of_backend(rpc: str, gpu: str | None) -> str:
    return rpc if gpu else f"{rpc}V2"


@pytest.mark.parametrize(
    ("status", "exception", "calls"),
    [
        (Status.UNAUTHENTICATED, AuthError, 1),
        (Status.RESOURCE_EXHAUSTED, ResourceExhaustedError, 1),
        (Status.INTERNAL, InternalError, 4),
    ],
    ids=["401", "429", "500"],
)
def test_a_refused_create_raises_and_only_a_broken_server_is_asked_again(
    modal_cloud: ModalServer, app: modal.App, gpu: str | None, status: Status, exception: type[Exception], calls: int
) -> None:
    rpc = of_backend("SandboxCreate", gpu)
    modal_cloud.fail(rpc, status, times=calls)
    with pytest.raises(exception):
        create(app, "true", gpu=gpu)
    assert len(modal_cloud.calls_of(rpc)) == calls
    assert modal_cloud.sandboxes == []
    assert modal_cloud.unused_faults() == []


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("way", [{"status": Status.INTERNAL}, {"loses_connection": True}], ids=["500", "cut"])
def test_a_create_that_fails_once_is_repeated_and_makes_one_sandbox(
    modal_cloud: ModalServer, app: modal.App, gpu: str | None, way: dict[str, Any], after: bool
) -> None:
    rpc = of_backend("SandboxCreate", gpu)
    modal_cloud.fail(rpc, after_applying=after, **way)
    sandbox = create(app, "sleep", "60", gpu=gpu, name="once")
    assert [made.sandbox_id for made in modal_cloud.sandboxes] == [sandbox.object_id]
    assert len(modal_cloud.calls_of(rpc)) == 2


def test_a_repeated_create_may_meet_its_own_sandbox(modal_cloud: ModalServer, app: modal.App, gpu: str | None) -> None:
    modal_cloud.deduplicates = False
    modal_cloud.fail(of_backend("SandboxCreate", gpu), loses_connection=True, after_applying=True)
    with pytest.raises(AlreadyExistsError):
        create(app, "sleep", "60", gpu=gpu, name="mine")
    assert modal.Sandbox.from_name("an-app", "mine").object_id == modal_cloud.sandboxes[0].sandbox_id


def test_a_connection_that_is_always_lost_raises_what_is_not_of_the_sdk(
    modal_cloud: ModalServer, app: modal.App, gpu: str | None
) -> None:
    sandbox = create(app, "sleep", "60", gpu=gpu)
    modal_cloud.fail(of_backend("SandboxWait", gpu), loses_connection=True, times=4)
    with pytest.raises(StreamTerminatedError):
        sandbox.poll()
    assert sandbox.poll() is None


def test_a_throttled_call_is_repeated_when_the_server_says_so(modal_cloud: ModalServer, app: modal.App) -> None:
    modal_cloud.fail("SandboxCreateV2", Status.RESOURCE_EXHAUSTED, retry_after_s=0.1)
    create(app, "true").wait()
    assert len(modal_cloud.calls_of("SandboxCreateV2")) == 2


def test_a_fault_can_choose_its_request(modal_cloud: ModalServer, app: modal.App, gpu: str | None) -> None:
    rpc = of_backend("SandboxCreate", gpu)
    modal_cloud.fail(rpc, Status.PERMISSION_DENIED, when=lambda request: request.definition.name == "second")
    create(app, "true", gpu=gpu, name="first")
    with pytest.raises(modal.exception.PermissionDeniedError):
        create(app, "true", gpu=gpu, name="second")


@pytest.mark.parametrize("rpc", ["AppFetchLogs", "SandboxTerminate"])
def test_other_calls_fail_the_same_way(modal_cloud: ModalServer, app: modal.App, gpu: str | None, rpc: str) -> None:
    sandbox = create(app, "sleep", "60", gpu=gpu)
    acts: dict[str, Callable[[], object]] = {
        "AppFetchLogs": lambda: text_of(sandbox),
        "SandboxTerminate": sandbox.terminate,
    }
    act = acts[rpc]
    modal_cloud.fail(rpc if rpc.startswith("App") else of_backend(rpc, gpu), Status.UNAUTHENTICATED)
    with pytest.raises(AuthError):
        act()
    act()


def test_wrong_credentials_are_refused(modal_cloud: ModalServer, app: modal.App, gpu: str | None) -> None:
    modal_cloud.token = ("ak-another", "as-another")
    with pytest.raises(AuthError):
        create(app, "true", gpu=gpu)


def test_a_live_stream_that_ends_early_is_taken_up_again(
    modal_cloud: ModalServer, app: modal.App, gpu: str | None
) -> None:
    command = "for i in 1 2 3; do echo $i; done; exec sleep 60"
    sandbox = create(app, "sh", "-c", command, gpu=gpu)
    if gpu:
        modal_cloud.fail("SandboxGetLogs", after_applying=True)
    else:
        modal_cloud.fail("SandboxStdioReadV2", Status.UNAVAILABLE, after_applying=True)
    lines = iter(sandbox.stdout)
    assert [next(lines) for _ in range(3)] == ["1\n", "2\n", "3\n"]
    assert modal_cloud.unused_faults() == []


@pytest.mark.parametrize("fate", ["preempt", "oom_kill", "kill"])
def test_every_violent_end_has_the_same_exit_code(
    modal_cloud: ModalServer, app: modal.App, gpu: str | None, fate: str
) -> None:
    sandbox = create(app, "sleep", "60", gpu=gpu)
    getattr(modal_cloud, fate)(sandbox.object_id)
    if fate == "preempt":
        with pytest.raises(SandboxTerminatedError):
            sandbox.wait()
    else:
        sandbox.wait()
    assert sandbox.poll() == 137


def test_a_sandbox_that_vanished_is_not_found_ever_after(
    modal_cloud: ModalServer, app: modal.App, gpu: str | None
) -> None:
    sandbox = create(app, "sleep", "60", gpu=gpu)
    modal_cloud.vanish(sandbox.object_id)
    for act in (sandbox.poll, sandbox.wait, sandbox.terminate, lambda: modal.Sandbox.from_id(sandbox.object_id)):
        with pytest.raises(NotFoundError):
            act()


def test_who_waits_for_a_sandbox_learns_that_it_vanished(
    modal_cloud: ModalServer, app: modal.App, gpu: str | None
) -> None:
    sandbox = create(app, "sleep", "60", gpu=gpu)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(sandbox.wait)
        modal_cloud.wait_for(of_backend("SandboxWait", gpu))
        modal_cloud.vanish(sandbox.object_id)
        with pytest.raises(NotFoundError):
            waiting.result(timeout=30)


def test_a_gpu_sandbox_without_room_is_refused_and_ended(modal_cloud: ModalServer, app: modal.App) -> None:
    modal_cloud.capacity = 1
    modal_cloud.scheduling_limit_s = 0.2
    running = create(app, "sleep", "60", gpu="H100")
    with pytest.raises(ResourceExhaustedError, match="capacity"):
        create(app, "sleep", "60", gpu="H100")
    assert modal_cloud.sandboxes[-1].result is not None
    assert running.poll() is None
    create(app, "true").wait()  # without a GPU there is room


def test_a_pending_sandbox_starts_when_there_is_room(modal_cloud: ModalServer, app: modal.App) -> None:
    modal_cloud.capacity = {"H100": 1, "A100": 2}
    first = create(app, "sleep", "60", gpu="H100")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        second = pool.submit(create, app, "echo", "at last", gpu="H100")
        create(app, "true", gpu="A100:2").wait()
        first.terminate(wait=True)
        second.result(timeout=30).wait()
    assert text_of(second.result()) == "at last\n"


def test_a_pending_sandbox_that_is_ended_is_a_conflict(modal_cloud: ModalServer, app: modal.App) -> None:
    modal_cloud.capacity = 0
    with concurrent.futures.ThreadPoolExecutor() as pool:
        pending = pool.submit(create, app, "true", gpu="H100", name="pending")
        modal_cloud.wait_for("SandboxGetTaskId")
        found = modal.Sandbox.from_name("an-app", "pending")
        assert found.poll() is None
        with pytest.raises(ExecutionError):
            text_of(found)  # it has no task yet
        found.terminate()
        with pytest.raises(ConflictError):
            pending.result(timeout=30)


def test_many_threads_create_and_wait_at_once(modal_cloud: ModalServer, app: modal.App, gpu: str | None) -> None:
    def run(rank: int) -> tuple[int | None, str]:
        sandbox = create(app, "echo", str(rank), gpu=gpu, name=f"rank-{rank}")
        sandbox.wait()
        return sandbox.returncode, text_of(sandbox)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(run, range(8))) == [(0, f"{rank}\n") for rank in range(8)]


def test_a_call_that_the_server_does_not_know_fails_the_test_that_made_it() -> None:
    def use_a_queue() -> None:
        with modal_server() as server, server.used_by_the_sdk(), contextlib.suppress(UnimplementedError):
            modal.Queue.from_name("q", create_if_missing=True).hydrate()

    with pytest.raises(AssertionError, match="QueueGetOrCreate"):
        use_a_queue()


def test_stopping_the_server_ends_every_sandbox() -> None:
    with modal_server() as server, server.used_by_the_sdk():
        sandbox = create(modal.App.lookup("left", create_if_missing=True), "sleep", "60")
        pid = server.pid_of(sandbox.object_id)
        assert is_alive(pid)
    assert not is_alive(pid)
    assert not pids_with({"MODAL_SANDBOX_ID": sandbox.object_id})


def test_a_killed_test_process_leaves_no_sandbox(tmp_path: Path) -> None:
    code = """
import modal, os, signal
from servers.modal_server import modal_server
with modal_server() as server, server.used_by_the_sdk():
    app = modal.App.lookup("left", create_if_missing=True)
    print(server.pid_of(modal.Sandbox.create("sleep", "60", app=app, timeout=60).object_id), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    # Its temporary files stay behind, so they are put where the test's own go.
    surroundings = {**environment(), "TMPDIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", code], env=surroundings, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    eventually(lambda: not is_alive(int(ended.stdout)), "the sandbox ends")
