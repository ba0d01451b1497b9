"""Tests the local Modal server through the real SDK, as far as an adapter relies on it.

Sandboxes without a GPU use the back end V2, and sandboxes with a GPU use V1. No part of the SDK is replaced.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import sys

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
    PermissionDeniedError,
    ResourceExhaustedError,
    SandboxTerminatedError,
    UnimplementedError,
)
from support.modal import create_of, of_backend
from support.processes import is_alive
from support.sandboxes import app, create, text_of

from executors.testing.helpers import eventually
from servers.modal.sandboxes import pids_with
from servers.modal.server import ModalServer, modal_server

__all__ = ["app"]  # a fixture

KINDS = (None, "H100")
"""The values of `gpu` that lead to the back ends V2 and V1."""
PRINTS_SURROUNDINGS = """
import importlib.util, json, os, sys
found = {name: bool(importlib.util.find_spec(name)) for name in ("torch", "boto3", "numpy", "executors", "diloco")}
print(json.dumps([dict(os.environ), os.getcwd(), os.listdir(), found, sys.version_info[:2]]))
"""


def test_a_sandbox_has_an_empty_directory_and_no_variables_of_the_launcher(
    modal_cloud: ModalServer, app: modal.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_LAUNCHER", "must not be seen")
    for gpu, python in ((None, "python"), ("H100", "python"), (None, f"python3.{sys.version_info.minor}")):
        sandbox = create(app, python, "-c", PRINTS_SURROUNDINGS, gpu=gpu, env={"ASKED": "for"})
        sandbox.wait()
        environment, folder, entries, found, version = json.loads(text_of(sandbox))
        assert set(environment) - {"LC_CTYPE", "PYTHONPATH"} == {
            "PATH", "HOME", "ASKED", "MODAL_SANDBOX_ID", "MODAL_TASK_ID", "MODAL_IMAGE_ID", "MODAL_CLOUD_PROVIDER",
            "MODAL_REGION",
        }  # fmt: skip
        assert environment["MODAL_SANDBOX_ID"] == sandbox.object_id
        assert environment["HOME"] == folder
        assert entries == []
        assert found == {"torch": True, "boto3": True, "numpy": True, "executors": False, "diloco": False}
        assert version == list(sys.version_info[:2])


def test_a_sandbox_is_found_by_its_name_while_it_runs_and_on_v2_when_it_has_ended(
    modal_cloud: ModalServer, app: modal.App
) -> None:
    for gpu in KINDS:
        name = f"on-{gpu}"
        sandbox = create(app, "sleep", "60", gpu=gpu, name=name)
        assert modal.Sandbox.from_name("an-app", name).object_id == sandbox.object_id
        with pytest.raises(AlreadyExistsError):
            create(app, "sleep", "60", gpu=gpu, name=name)
        sandbox.terminate(wait=True)
        with pytest.raises(NotFoundError):
            modal.Sandbox.from_name("an-app", name)
    ended = modal.Sandbox.from_name("an-app", "on-None", include_terminated=True)
    assert ended.poll() == 137
    with pytest.raises(NotFoundError):
        modal.Sandbox.from_name("an-app", "on-H100", include_terminated=True)


def test_ending_a_sandbox_ends_all_processes_that_it_started(modal_cloud: ModalServer, app: modal.App) -> None:
    escapes = "import subprocess; print(subprocess.Popen(['sleep', '60'], start_new_session=True).pid, flush=True)"
    for gpu in KINDS:
        sandbox = create(app, "python", "-c", f"{escapes}; import time; time.sleep(60)", gpu=gpu)
        escaped = int(eventually(lambda sandbox=sandbox: text_of(sandbox)))  # type: ignore[misc]
        assert is_alive(escaped)
        sandbox.terminate()
        with pytest.raises(SandboxTerminatedError):
            sandbox.wait()
        assert sandbox.returncode == 137
        assert not is_alive(escaped)
        assert not pids_with({"MODAL_SANDBOX_ID": sandbox.object_id})
        sandbox.terminate()  # to end it a second time is not an error


def test_secrets_reach_the_environment_and_nothing_else(modal_cloud: ModalServer, app: modal.App) -> None:
    modal_cloud.secrets["named"] = {"NAMED": "hush-hush", "BOTH": "of the named one"}
    for gpu in KINDS:
        secrets = [
            modal.Secret.from_name("named", required_keys=["NAMED"]),
            modal.Secret.from_dict({"MADE": "on the spot"}),
        ]
        command = ("sh", "-c", 'echo "$NAMED, $MADE, $BOTH"')
        sandbox = create(app, *command, gpu=gpu, secrets=secrets, env={"BOTH": "of the call"})
        sandbox.wait()
        assert text_of(sandbox) == "hush-hush, on the spot, of the call\n"
    assert modal_cloud.requests_carrying("hush-hush") == []
    assert modal_cloud.requests_carrying("on the spot") == []
    assert modal_cloud.requests_carrying("named") == ["SecretGetOrCreate"] * 2
    n_sandboxes = len(modal_cloud.sandboxes)
    for keys in ([], ["OTHER"]):
        with pytest.raises(NotFoundError, match="gone"):
            create(app, "true", secrets=[modal.Secret.from_name("gone", required_keys=keys)])
        modal_cloud.secrets["gone"] = {"KEY": "value"}
    assert len(modal_cloud.sandboxes) == n_sandboxes


def test_the_sdk_uses_a_new_server_after_an_old_one(modal_cloud: ModalServer) -> None:
    """Every test has its own server, so the SDK must not use the client of the previous server again."""
    assert os.environ["MODAL_SERVER_URL"] == modal_cloud.url
    modal.App.lookup("elsewhere", create_if_missing=True)
    assert len(modal_cloud.calls_of("AppGetOrCreate")) == 1


# Faults


def test_the_sdk_repeats_a_create_after_a_server_error_and_not_after_a_refusal(
    modal_cloud: ModalServer, app: modal.App
) -> None:
    for gpu in KINDS:
        rpc, n_calls = create_of(gpu), 0
        for status, exception, calls in (
            (Status.UNAUTHENTICATED, AuthError, 1),
            (Status.RESOURCE_EXHAUSTED, ResourceExhaustedError, 1),
            (Status.INTERNAL, InternalError, 4),
        ):
            modal_cloud.fail(rpc, status, times=calls)
            with pytest.raises(exception):
                create(app, "true", gpu=gpu)
            n_calls += calls
            assert len(modal_cloud.calls_of(rpc)) == n_calls
            assert modal_cloud.unused_faults() == []
    assert modal_cloud.sandboxes == []
    modal_cloud.fail(create_of(None), Status.PERMISSION_DENIED, when=lambda request: request.definition.name == "b")
    create(app, "true", name="a")
    with pytest.raises(PermissionDeniedError):
        create(app, "true", name="b")


def test_a_create_that_fails_once_is_repeated_and_makes_one_sandbox(modal_cloud: ModalServer, app: modal.App) -> None:
    for gpu in KINDS:
        for after in (False, True):
            for way in ({"status": Status.INTERNAL}, {"loses_connection": True}):
                before = len(modal_cloud.calls_of(create_of(gpu)))
                modal_cloud.fail(create_of(gpu), after_applying=after, **way)
                sandbox = create(app, "sleep", "60", gpu=gpu, name="once")
                alive = [made.sandbox_id for made in modal_cloud.sandboxes if made.result is None]
                assert alive == [sandbox.object_id], (gpu, after, way)
                assert len(modal_cloud.calls_of(create_of(gpu))) == before + 2
                sandbox.terminate(wait=True)


def test_a_repeated_create_may_find_that_its_own_sandbox_exists(modal_cloud: ModalServer, app: modal.App) -> None:
    modal_cloud.deduplicates = False
    for gpu in KINDS:
        modal_cloud.fail(create_of(gpu), loses_connection=True, after_applying=True)
        with pytest.raises(AlreadyExistsError):
            create(app, "sleep", "60", gpu=gpu, name=f"on-{gpu}")
        assert modal.Sandbox.from_name("an-app", f"on-{gpu}").object_id == modal_cloud.sandboxes[-1].sandbox_id


def test_a_connection_that_is_always_lost_raises_an_error_that_is_not_from_the_sdk(
    modal_cloud: ModalServer, app: modal.App
) -> None:
    for gpu in KINDS:
        sandbox = create(app, "sleep", "60", gpu=gpu)
        modal_cloud.fail(of_backend("SandboxWait", gpu), loses_connection=True, times=4)
        with pytest.raises(StreamTerminatedError):
            sandbox.poll()
        assert sandbox.poll() is None


def test_a_sandbox_that_was_removed_is_never_found_again(modal_cloud: ModalServer, app: modal.App) -> None:
    for gpu in KINDS:
        sandbox = create(app, "sleep", "60", gpu=gpu)
        modal_cloud.vanish(sandbox.object_id)
        for act in (sandbox.poll, sandbox.wait, sandbox.terminate, lambda: modal.Sandbox.from_id(sandbox.object_id)):  # noqa: B023
            with pytest.raises(NotFoundError):
                act()


def test_a_pending_sandbox_starts_when_a_gpu_is_free(modal_cloud: ModalServer, app: modal.App) -> None:
    modal_cloud.capacity = 1
    first = create(app, "sleep", "60", gpu="H100")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        second = pool.submit(create, app, "echo", "at last", gpu="H100")
        create(app, "true").wait()  # without a GPU there is room
        first.terminate(wait=True)
        second.result(timeout=30).wait()
    assert text_of(second.result()) == "at last\n"


def test_ending_a_pending_sandbox_is_answered_as_a_conflict(modal_cloud: ModalServer, app: modal.App) -> None:
    modal_cloud.capacity = 0
    with concurrent.futures.ThreadPoolExecutor() as pool:
        pending = pool.submit(create, app, "true", gpu="H100", name="pending")
        modal_cloud.wait_for("SandboxGetTaskId")
        found = modal.Sandbox.from_name("an-app", "pending")
        assert found.poll() is None
        with pytest.raises(ExecutionError):
            text_of(found)  # a pending sandbox has no task yet
        found.terminate()
        with pytest.raises(ConflictError):
            pending.result(timeout=30)


# Its own end


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
