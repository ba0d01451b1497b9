"""The Modal server of the tests, seen through the real SDK: what holds of both back ends.

The CPU sandboxes go to V2, those with a GPU to V1; nothing of the SDK is replaced.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import modal
import pytest
from modal.exception import (
    AlreadyExistsError,
    NotFoundError,
    SandboxTerminatedError,
    SandboxTimeoutError,
)
from processes_of_tests import is_alive
from sandboxes_of_tests import app, create, gpu, text_of
from servers.modal_sandboxes import pids_with
from servers.modal_server import ModalServer

__all__ = ["app", "gpu"]  # fixtures

SAYS_ITS_SURROUNDINGS = """
import importlib.util, json, os, sys
found = {name: bool(importlib.util.find_spec(name)) for name in ("torch", "boto3", "numpy", "executors", "diloco")}
print(json.dumps([dict(os.environ), os.getcwd(), os.listdir(), found, sys.version_info[:2]]))
"""


def in_another_process(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_two_sandboxes_run_to_their_own_exit_codes(modal_cloud: ModalServer, app: modal.App, gpu: str | None) -> None:
    sandboxes = [create(app, "sh", "-c", f"echo rank {rank}; exit {3 * rank}", gpu=gpu) for rank in range(2)]
    for sandbox in sandboxes:
        sandbox.wait()
    assert [sandbox.poll() for sandbox in sandboxes] == [0, 3]
    assert [text_of(sandbox) for sandbox in sandboxes] == ["rank 0\n", "rank 1\n"]
    assert len(modal_cloud.calls_of("SandboxCreate" if gpu else "SandboxCreateV2")) == 2


def test_a_sandbox_has_an_empty_directory_and_nothing_of_the_launchers_environment(
    modal_cloud: ModalServer, app: modal.App, gpu: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_LAUNCHER", "must not be seen")
    sandbox = create(app, "python", "-c", SAYS_ITS_SURROUNDINGS, gpu=gpu, env={"ASKED": "for"})
    environment, folder, entries, found, _ = json.loads(sandbox.stdout.read())
    assert set(environment) - {"LC_CTYPE"} == {
        "PATH", "HOME", "ASKED", "MODAL_SANDBOX_ID", "MODAL_TASK_ID", "MODAL_IMAGE_ID", "MODAL_CLOUD_PROVIDER",
        "MODAL_REGION",
    }  # fmt: skip
    assert environment["MODAL_SANDBOX_ID"] == sandbox.object_id
    assert environment["HOME"] == folder
    assert entries == []
    assert found == {"torch": True, "boto3": True, "numpy": True, "executors": False, "diloco": False}


def test_every_name_of_python_is_the_interpreter_of_the_tests(modal_cloud: ModalServer, app: modal.App) -> None:
    for name in ("python3", f"python3.{sys.version_info.minor}"):
        sandbox = create(app, name, "-c", SAYS_ITS_SURROUNDINGS)
        assert json.loads(sandbox.stdout.read())[-1] == list(sys.version_info[:2])


def test_a_working_directory_is_made_inside_the_sandboxs_own(
    modal_cloud: ModalServer, app: modal.App, gpu: str | None
) -> None:
    sandbox = create(app, "sh", "-c", 'pwd | grep -F "$HOME/srv/here"', gpu=gpu, workdir="/srv/here")
    assert sandbox.stdout.read().endswith("/srv/here\n")


def test_local_files_of_the_image_are_there(modal_cloud: ModalServer, app: modal.App, tmp_path: Path) -> None:
    (tmp_path / "note").write_text("carried along")
    image = modal.Image.debian_slim(python_version="3.11").add_local_file(str(tmp_path / "note"), "/data/note")
    assert create(app, "sh", "-c", 'cat "$HOME/data/note"', image=image).stdout.read() == "carried along"


def test_another_process_finds_a_sandbox_by_its_id(modal_cloud: ModalServer, app: modal.App, gpu: str | None) -> None:
    sandbox = create(app, "sh", "-c", "echo before; exec sleep 60", gpu=gpu)
    assert next(iter(sandbox.stdout)) == "before\n"
    code = """
import modal, sys
sandbox = modal.Sandbox.from_id(sys.argv[1])
print(sandbox.poll(), [entry.message for entry in sandbox.logs.tail(5)])
print(sandbox.terminate(wait=True))
"""
    assert in_another_process(code, sandbox.object_id) == "None ['before\\n']\n137\n"
    assert sandbox.poll() == 137


def test_a_running_sandbox_is_found_by_its_name(modal_cloud: ModalServer, app: modal.App, gpu: str | None) -> None:
    sandbox = create(app, "sleep", "60", gpu=gpu, name="run-0")
    assert modal.Sandbox.from_name("an-app", "run-0").object_id == sandbox.object_id
    with pytest.raises(AlreadyExistsError):
        create(app, "sleep", "60", gpu=gpu, name="run-0")
    sandbox.terminate(wait=True)
    with pytest.raises(NotFoundError):
        modal.Sandbox.from_name("an-app", "run-0")
    assert create(app, "sleep", "60", gpu=gpu, name="run-0").object_id != sandbox.object_id


def test_only_v2_finds_what_has_ended_by_its_name(modal_cloud: ModalServer, app: modal.App) -> None:
    ended = [create(app, "true", name=f"on-{kind}", gpu=kind) for kind in (None, "H100")]
    for sandbox in ended:
        sandbox.wait()
    assert modal.Sandbox.from_name("an-app", "on-None", include_terminated=True).object_id == ended[0].object_id
    with pytest.raises(NotFoundError):
        modal.Sandbox.from_name("an-app", "on-H100", include_terminated=True)


def test_sandboxes_are_listed_by_their_tags_over_several_pages(
    modal_cloud: ModalServer, app: modal.App, gpu: str | None
) -> None:
    made = [create(app, "sleep", "60", gpu=gpu, tags={"run": "a", "rank": str(rank)}) for rank in range(5)]
    create(app, "sleep", "60", gpu=gpu, tags={"run": "b"})
    made[0].terminate(wait=True)
    found = [sandbox.object_id for sandbox in modal.Sandbox.list(app_id=app.app_id, tags={"run": "a"})]
    assert found == [sandbox.object_id for sandbox in reversed(made[1:])]
    assert made[1].get_tags() == {"run": "a", "rank": "1"}


def test_logs_are_cut_at_the_newest_and_filtered(modal_cloud: ModalServer, app: modal.App, gpu: str | None) -> None:
    start = datetime.now(UTC)
    sandbox = create(app, "sh", "-c", "for i in 1 2 3 4; do echo line $i; done; echo trouble >&2", gpu=gpu)
    sandbox.wait()
    assert [entry.message for entry in sandbox.logs.tail(2, source="stdout")] == ["line 3\n", "line 4\n"]
    assert [entry.message for entry in sandbox.logs.tail(2, source="stderr")] == ["trouble\n"]
    since = start - timedelta(seconds=1)
    assert len(list(sandbox.logs.fetch(since=since))) == 5
    assert [entry.message for entry in sandbox.logs.fetch(since=since, search_text="3")] == ["line 3\n"]
    assert [entry.message for entry in sandbox.logs.fetch(since=since, until=start - timedelta(milliseconds=500))] == []


def test_live_output_arrives_while_the_sandbox_runs(modal_cloud: ModalServer, app: modal.App, gpu: str | None) -> None:
    sandbox = create(app, "sh", "-c", "printf 'no newline yet'; read never; sleep 60; echo; sleep 60", gpu=gpu)
    reader = create(app, "sh", "-c", "echo one; echo two >&2; exec sleep 60", gpu=gpu)
    assert next(iter(reader.stdout)) == "one\n"
    assert next(iter(reader.stderr)) == "two\n"
    assert reader.poll() is None
    sandbox.terminate()
    assert sandbox.stdout.read() in ("no newline yet", "")  # it may have been ended before it wrote


def test_an_apps_logs_are_those_of_all_its_sandboxes(modal_cloud: ModalServer, app: modal.App) -> None:
    for kind in (None, "H100"):
        create(app, "echo", f"on {kind}", gpu=kind).wait()
    assert sorted(entry.message for entry in app.logs.tail(10)) == ["on H100\n", "on None\n"]
    followed = app.logs.stream(timeout=5)
    assert sorted(next(followed).message for _ in range(2)) == ["on H100\n", "on None\n"]
    followed.close()


def test_ending_a_sandbox_ends_all_that_it_started(modal_cloud: ModalServer, app: modal.App, gpu: str | None) -> None:
    escapes = "import subprocess; print(subprocess.Popen(['sleep', '60'], start_new_session=True).pid, flush=True)"
    sandbox = create(app, "python", "-c", f"{escapes}; import time; time.sleep(60)", gpu=gpu)
    escaped = int(next(iter(sandbox.stdout)))
    assert is_alive(escaped)
    sandbox.terminate()
    with pytest.raises(SandboxTerminatedError):
        sandbox.wait()
    assert sandbox.returncode == 137
    assert not is_alive(escaped)
    assert not pids_with({"MODAL_SANDBOX_ID": sandbox.object_id})
    sandbox.terminate()  # once more is no error


def test_a_sandbox_is_ended_when_its_time_is_up(modal_cloud: ModalServer, app: modal.App, gpu: str | None) -> None:
    sandbox = create(app, "sleep", "60", gpu=gpu, timeout=1)
    with pytest.raises(SandboxTimeoutError):
        sandbox.wait()
    assert sandbox.poll() == 124


def test_secrets_reach_the_environment_and_nothing_else(
    modal_cloud: ModalServer, app: modal.App, gpu: str | None
) -> None:
    modal_cloud.secrets["named"] = {"NAMED": "hush-hush", "BOTH": "of the named one"}
    secrets = [
        modal.Secret.from_name("named", required_keys=["NAMED"]),
        modal.Secret.from_dict({"MADE": "on the spot"}),
    ]
    sandbox = create(
        app, "sh", "-c", 'echo "$NAMED, $MADE, $BOTH"', gpu=gpu, secrets=secrets, env={"BOTH": "of the call"}
    )
    assert sandbox.stdout.read() == "hush-hush, on the spot, of the call\n"
    assert modal_cloud.requests_carrying("hush-hush") == []
    assert modal_cloud.requests_carrying("on the spot") == []
    assert modal_cloud.requests_carrying("named") == ["SecretGetOrCreate"]


@pytest.mark.parametrize("keys", [[], ["OTHER"]], ids=["unknown", "without-the-key"])
def test_a_secret_that_is_not_there_is_not_found(
    modal_cloud: ModalServer, app: modal.App, gpu: str | None, keys: list[str]
) -> None:
    if keys:
        modal_cloud.secrets["gone"] = {"KEY": "value"}
    with pytest.raises(NotFoundError, match="gone"):
        create(app, "true", gpu=gpu, secrets=[modal.Secret.from_name("gone", required_keys=keys)])
    assert modal_cloud.sandboxes == []


def test_a_command_that_does_not_exist_ends_the_sandbox(
    modal_cloud: ModalServer, app: modal.App, gpu: str | None
) -> None:
    sandbox = create(app, "no-such-command", gpu=gpu)
    sandbox.wait()
    assert sandbox.poll() not in (0, None)


def test_the_sdk_goes_from_server_to_server(modal_cloud: ModalServer) -> None:
    """Every test has a server of its own: the client of the one before is not used again."""
    assert os.environ["MODAL_SERVER_URL"] == modal_cloud.url
    modal.App.lookup("elsewhere", create_if_missing=True)
    assert [rpc for rpc, _ in modal_cloud.requests] == ["AppGetOrCreate"]
