"""A hostile owner of the store writes records that name jobs of this account outside of the run."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.fake_jobs import FakeExecutor, Machines, start
from support.hostile_records import LONG, outcome_json, run_json, task_json
from support.hostile_scene import OwnsDirectory

from executors import LocalProcessExecutor, Run, attach, launch, open_store
from executors.attempt import Attempt
from executors.backend import Backend, PendingReplica
from executors.errors import BackendError, CorruptObjectError
from executors.launcher.several_backends import executor_of
from executors.protocol import Outcome
from executors.registry import get_executor
from executors.registry.placements import known_supervisors
from executors.run.resume import resume
from executors.run.run import view_of
from executors.store.records import exists
from executors.testing import eventually
from executors.testing.executor_contract import task

LOOKS: list[Callable[[Run], Any]] = [
    lambda run: run.logs(0),
    lambda run: run.cancel(),
    lambda run: view_of(run).executor.stream_logs(view_of(run).reader.handles.of(0)),
    lambda run: view_of(run).executor.cancel(view_of(run).reader.handles.of(0)),
    lambda run: view_of(run).executor.poll(view_of(run).reader.handles.of(0)),
]


def run_of(owner: OwnsDirectory, job: object) -> Run:
    """A hostile run whose record names a job as its only replica."""
    owner.write("bad/run.json", json.dumps(run_json(backend="fake", world_size=1)).encode())
    place = {"run_id": "bad", "store_url": owner.url, "attempt": 0, "timeout_s": 60.0, "job": job}
    handle = {"rank": 0, "backend_name": "fake", "metadata": place}
    owner.write("bad/replicas/0000/0/handle.json", json.dumps(handle).encode())
    return attach("bad", rendezvous=owner.url, executor=FakeExecutor())


def test_a_job_of_another_users_run_is_neither_shown_nor_ended(machines: Machines, tmp_path: Path) -> None:
    machines.is_held = True
    owner, mine = OwnsDirectory(tmp_path / "theirs"), start()
    job = view_of(mine).reader.handles.of(0).metadata["job"]
    for named in (job, {"id": "../../x"}, {"id": 5}, {}, {"id": "x" * 500}):
        for look in LOOKS:
            with pytest.raises(BackendError, match="names a job that Fake does not know as this replica's"):
                look(run_of(owner, named))
        run = run_of(owner, named)
        assert "names a job that Fake does not know as this replica's" in run.status().replicas[0].note
        for name in ("outcome.json", "cancel.json"):
            assert not exists(view_of(run).store, f"bad/replicas/0000/0/{name}"), (
                "the store of the other user has no record about the job"
            )
    assert machines.living() == [(0, 0)]
    assert (machines.count("state"), machines.count("logs"), machines.count("stop")) == (0, 0, 0)


@pytest.mark.parametrize("parts", ["local:1,support.fake_jobs:FakeExecutor:2", "support.fake_jobs:FakeExecutor"])
def test_a_foreign_job_of_one_rank_hides_no_other_of_its_backend_in_a_mixed_run(machines: Machines, parts: str) -> None:
    """The same holds for a run on that backend alone."""
    options = {"preload": (), "term_grace_s": 0.5}
    executor = executor_of(parts, lambda name: get_executor(name, options if name == "local" else {}))
    run = launch(executor, "job.py:hang", 3, run_id="otter", detach=True)
    eventually(lambda: all("hanging" in run.logs(rank) for rank in range(3)), "all replicas run")
    machines.end(machines.job_of(run, 2), "preempted")
    key = Attempt(view_of(run).store, "otter", 1).key("handle.json")
    job, handle = view_of(run).reader.handles.of(2).metadata["job"], json.loads(bytes(view_of(run).store.get(key)))
    view_of(run).store.put(key, json.dumps({**handle, "metadata": {**handle["metadata"], "job": job}}).encode())
    seen = attach("otter", executor=FakeExecutor())
    states = [(str(state.status), state.is_readable) for state in seen.status().replicas]
    asked: list[Any] = [PendingReplica(view_of(seen).reader.handles.of(rank), 0) for rank in range(3)]
    backend = view_of(seen).executor
    assert isinstance(backend, Backend)
    parents = [(parent.is_alive, parent.reason) for parent in known_supervisors(backend, asked)]
    run.cancel()
    assert states == [("running", True), ("running", False), ("failed", True)]
    assert parents == [(True, None), (True, None), (False, "preempted")]


def test_a_job_that_is_not_an_object_is_refused_by_name(machines: Machines, tmp_path: Path) -> None:
    for job in ("x", 5, ["x"]):
        run = run_of(OwnsDirectory(tmp_path / "theirs"), job)
        assert re.search(r"'job' is .*, null or a JSON object was expected", run.status().replicas[0].note)


def test_no_secret_and_no_image_is_used_because_a_record_names_it(
    local: LocalProcessExecutor, tmp_path: Path, state_home: Path
) -> None:
    run = launch(local, task("fail"), 1, args={"message": "no"}, run_id="same", rendezvous=tmp_path / "shared")
    assert run.wait(30)
    record = json.loads(bytes(view_of(run).store.get("same/run.json")))
    shutil.rmtree(state_home / "replicas" / "same")  # like a process on another machine
    for changes, words in (
        ({"secrets": ["HOME"]}, "Name it again: --secret HOME"),
        ({"unrecorded_options": ["image"]}, "Give it again: --backend local --option image="),
    ):
        changed = {**record, "placements": [{**record["placements"][0], **changes}]}
        theirs = json.dumps(task_json(changed)).encode()
        digest = hashlib.sha256(theirs).hexdigest()
        view_of(run).store.put("same/task/task.json", theirs)
        view_of(run).store.put("same/run.json", json.dumps({**changed, "task_digest": digest}).encode())
        trusts: list[dict[str, Any]] = [{"trust_bucket": True}, {"task_digest": digest}]
        for trust in trusts:
            with pytest.raises(ValueError, match=words):
                resume(attach("same", rendezvous=tmp_path / "shared"), **trust)
    assert view_of(run).newest_attempt(0).number == 0


def test_only_two_reasons_of_a_service_are_accepted_and_only_after_a_notice() -> None:
    attempt = Attempt(open_store("memory://why"), "bad", 0)
    told = outcome_json(0, status="failed", reason="signal", notice="SIGTERM", error="theirs")

    def outcome(record: dict[str, Any], **word: Any) -> Outcome | None:
        attempt.store.put(attempt.key("outcome.json"), json.dumps(record).encode())
        attempt.store.put(attempt.key("service.json"), json.dumps(word).encode())
        return attempt.outcome()

    good = outcome(told, reason="preempted", error="it was")
    assert good is not None
    assert (good.status, good.reason, good.error) == ("failed", "preempted", "it was")
    bad: list[dict[str, Any]] = [
        {"reason": "cancelled", "error": ""},
        {"reason": "preempted"},
        {"reason": "timeout", "error": 5},
        {},
    ]
    for word in (*bad, {"reason": "preempted", "error": LONG}):
        with pytest.raises(CorruptObjectError, match=r"bad/replicas/0000/0/service\.json"):
            outcome(told, **word)
    for record in (outcome_json(0), {**told, "notice": None}, {**told, "reason": "oom"}):
        found = outcome(record, reason="preempted", error="it was")
        assert found is not None
        assert found.reason == record.get("reason"), record
