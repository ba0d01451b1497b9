"""Somebody else owns the bucket, and names jobs of this account that are none of their run's."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import modal
import pytest
from hostile_records import run_json, task_json
from hostile_scene import OwnsBucket
from hub_of_tests import Client
from sandboxes_of_tests import app, create, gpu  # noqa: F401 - fixtures
from servers.hub_server import HubServer
from servers.modal_server import ModalServer
from servers.s3_server import S3Server

from executors import LocalProcessExecutor, Run, attach, launch
from executors.errors import BackendError
from executors.records import exists
from executors.resuming import resume
from executors.testing.executor_endings import task

LOOKS: list[Callable[[Run], Any]] = [
    lambda run: run.status(),
    lambda run: run.logs(0),
    lambda run: run.cancel(),
    lambda run: run.executor.stream_logs(run.handle(0)),
    lambda run: run.executor.cancel(run.handle(0)),
    lambda run: run.executor.poll(run.handle(0)),
]


def run_of(owner: OwnsBucket, backend: str, job: object, **changes: Any) -> Run:
    """Their run, whose one replica is said to be a job."""
    owner.write("bad/run.json", json.dumps(run_json(backend=backend, world_size=1, **changes)).encode())
    place = {"run_id": "bad", "store_url": owner.url, "attempt": 0, "timeout_s": 60.0, "job": job}
    handle = {"rank": 0, "backend_name": backend, "metadata": place}
    owner.write("bad/replicas/0000/0/handle.json", json.dumps(handle).encode())
    return attach("bad", rendezvous=owner.url)


def is_left_alone(owner: OwnsBucket, make: Callable[[], Run], words: str) -> None:
    for look in LOOKS:
        with pytest.raises(BackendError, match=words):
            look(make())
    run = make()
    for name in ("outcome.json", "cancel.json"):
        assert not exists(run.store, f"bad/replicas/0000/0/{name}"), "they would learn of it there"


def test_a_job_of_somebody_elses_run_is_neither_shown_nor_ended(hf: HubServer, s3: S3Server) -> None:
    client, owner = Client(hf), OwnsBucket(s3)
    private = client.run("print('private'); import time; time.sleep(600)")
    named = {"id": private.id, "namespace": hf.namespace, "url": ""}
    is_left_alone(owner, lambda: run_of(owner, "hf", named), "names a job that Hugging Face does not know as this")
    assert client.look(private).status.stage not in ("CANCELED", "DELETED")
    assert hf.count("cancel") == 0
    client.cancel(private)


@pytest.mark.parametrize(
    "job", [{"id": "../../x", "namespace": "a"}, {"id": "x", "namespace": "a/b"}, {"id": 5}, {}, {"id": "x" * 500}]
)
def test_an_id_that_is_a_path_is_not_asked_for(hf: HubServer, s3: S3Server, job: dict[str, Any]) -> None:
    owner = OwnsBucket(s3)
    is_left_alone(owner, lambda: run_of(owner, "hf", job), "names a job that Hugging Face does not know")
    assert (hf.count("inspect"), hf.count("cancel")) == (0, 0)


def test_a_sandbox_of_somebody_elses_run_is_neither_shown_nor_ended(
    modal_runs: ModalServer,
    s3: S3Server,
    app: modal.App,  # noqa: F811
    gpu: str | None,  # noqa: F811
) -> None:
    owner = OwnsBucket(s3)
    private = create(app, "sleep", "600", gpu=gpu, tags={"mine": "yes"})
    for named in (private.object_id, "../x", 5):
        job = {"sandbox_id": named}
        is_left_alone(owner, lambda job=job: run_of(owner, "modal", job), "names a job that Modal")  # type: ignore[misc]
    assert private.poll() is None
    private.terminate()


@pytest.mark.parametrize("job", ["x", 5, ["x"]])
def test_a_job_that_is_no_object_is_refused_by_name(hf: HubServer, s3: S3Server, job: object) -> None:
    run = run_of(OwnsBucket(s3), "hf", job)
    with pytest.raises(Exception, match=r"'job' is .*, null or a JSON object was expected"):
        run.status()


def test_no_secret_and_no_image_is_used_because_a_record_names_it(
    local: LocalProcessExecutor, tmp_path: Path, state_home: Path
) -> None:
    run = launch(local, task("fail"), 1, args={"message": "no"}, run_id="same", rendezvous=tmp_path / "shared")
    assert run.wait(30)
    record = json.loads(bytes(run.store.get("same/run.json")))
    shutil.rmtree(state_home / "replicas" / "same")  # as on another machine
    for changes, words in (
        ({"secrets": ["HOME"]}, "Name it again: --secret HOME"),
        ({"unrecorded_options": ["image"]}, "Give it again: --backend local --option image="),
    ):
        theirs = json.dumps(task_json({**record, **changes})).encode()
        digest = hashlib.sha256(theirs).hexdigest()
        run.store.put("same/task/task.json", theirs)
        run.store.put("same/run.json", json.dumps({**record, **changes, "task_digest": digest}).encode())
        trusts: list[dict[str, Any]] = [{"trust_bucket": True}, {"task_digest": digest}]
        for trust in trusts:
            with pytest.raises(ValueError, match=words):
                resume(attach("same", rendezvous=tmp_path / "shared"), **trust)
    assert run.newest_attempt(0) == 0
