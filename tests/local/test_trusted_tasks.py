"""A resume starts a task that this machine or the user confirms.

It trusts the bucket only if the user asks for that.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.cli import FAST, HereInstead
from support.records import read_json

from executors import LocalProcessExecutor, Run, attach, launch, open_store
from executors.errors import CorruptObjectError, StoreError, UntrustedTaskError
from executors.registry.run_index import folder_of_run, forget, noted_at_launch
from executors.run.resume import resume
from executors.run.run import view_of
from executors.store import Store
from executors.store.records import to_bytes

PLAIN = LocalProcessExecutor(preload=(), term_grace_s=0.5)
FAIL = "executors.testing.tasks:fail"


def touch_and_fail(path: str) -> None:
    with open(path, "a") as file:
        file.write("x")
    raise RuntimeError("no")


def failed(rendezvous: Path | None, path: Path, run_id: str = "otter") -> Run:
    """Launch a run that fails; each attempt leaves a mark at `path`."""
    run = launch(PLAIN, touch_and_fail, 1, args={"path": str(path)}, rendezvous=rendezvous, run_id=run_id)
    assert run.wait(30)
    return run


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Act as another machine, which does not know the runs of this machine."""
    return lambda: monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another-machine"))


def objects_of(run: Run) -> dict[str, bytes]:
    return {entry.key: bytes(view_of(run).store.get(entry.key)) for entry in view_of(run).store.list("")}


def written(run: Run) -> dict[str, Any]:
    """Return the content of `run.json` in the store."""
    return dict(read_json(view_of(run).store, f"{run.run_id}/run.json"))


def exchange_task(run: Run, path: Path) -> str:
    """Replace the task with another one and adapt all digests, as the owner of a bucket can. Return the new digest."""
    other = launch(PLAIN, touch_and_fail, 1, args={"path": str(path)}, rendezvous=path.parent / "evil", run_id="evil")
    other.wait(30)
    path.unlink()
    for name in ("task/task.json", "task/callable.pkl"):
        view_of(run).store.put(f"{run.run_id}/{name}", bytes(view_of(other).store.get(f"evil/{name}")))
    digest = hashlib.sha256(bytes(view_of(run).store.get(f"{run.run_id}/task/task.json"))).hexdigest()
    view_of(run).store.put(f"{run.run_id}/run.json", to_bytes({**written(run), "task_digest": digest}))
    return digest


# The machine that launched


@pytest.mark.parametrize("rendezvous", [None, "bucket"])
def test_the_machine_that_launched_resumes_by_the_digest_that_it_kept(tmp_path: Path, rendezvous: str | None) -> None:
    run = failed(None if rendezvous is None else tmp_path / rendezvous, tmp_path / "ran")
    assert view_of(run).record.task_digest == view_of(run).task_digest
    assert resume(attach("otter")).wait(30)
    assert (tmp_path / "ran").read_text() == "xx"


@pytest.mark.parametrize("rendezvous", [None, "bucket"])
def test_notes_of_a_launch_are_readable_by_this_user_only(
    tmp_path: Path, state_home: Path, rendezvous: str | None
) -> None:
    failed(None if rendezvous is None else tmp_path / rendezvous, tmp_path / "ran")
    assert (state_home / "replicas").stat().st_mode & 0o777 == 0o700
    assert (state_home / "replicas" / "otter" / "launched.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("rendezvous", [None, "bucket"])
def test_a_task_that_was_exchanged_with_its_digest_is_refused_and_both_digests_are_named(
    tmp_path: Path, rendezvous: str | None
) -> None:
    run = failed(None if rendezvous is None else tmp_path / rendezvous, tmp_path / "ran")
    launched = view_of(run).record.task_digest
    found = exchange_task(run, tmp_path / "evil-ran")
    before = objects_of(run)
    with pytest.raises(StoreError, match=f"is not what was launched: its sha256 is {found}, the launch's {launched}"):
        resume(attach("otter"))
    assert objects_of(run) == before
    assert not (tmp_path / "evil-ran").exists()


ALTERED: dict[str, Any] = {
    "seed": 5,
    "gpu": "H100:8",
    "timeout_s": 86_400.0,
    "executor": "evil:Executor",
    "executor_options": {"max_parallel": 3},
    "unrecorded_options": ["image"],
    "backend": "hf",
    "entrypoint": "evil.py",
    "env": ["TOKEN"],
    "secrets": ["KEY"],
    "chaos": ["kill:rank=0,round=3"],
    "task_digest": "0" * 64,
}


OF_PLACEMENTS = ("timeout_s", "executor", "executor_options", "unrecorded_options", "backend", "env")


def altered(record: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Return a record in which a named field has another value, at any depth."""
    if name in OF_PLACEMENTS:
        (place,) = record["placements"]
        return {**record, "placements": [{**place, name: value}]}
    return {**record, name: value} if name in record else {**record, "settings": {**record["settings"], name: value}}


@pytest.mark.parametrize("trust", ["kept", "carried", "bucket"])
def test_a_record_that_was_changed_beside_its_task_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: Callable[[], None], trust: str
) -> None:
    """The record decides the number of replicas, their size and their secrets.

    So a changed record is as dangerous as another task.
    """
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    run = failed(tmp_path / "bucket", tmp_path / "ran")
    if trust != "kept":
        elsewhere()
    given: dict[str, Any] = {
        "carried": {"task_digest": view_of(run).record.task_digest},
        "bucket": {"trust_bucket": True},
    }
    monkeypatch.setattr("executors.registry.run_placements.executor_of_record", None)  # not even an executor is created
    launched = written(run)
    for name, value in ALTERED.items():
        view_of(run).store.put("otter/run.json", to_bytes(altered(launched, name, value)))
        before = objects_of(run)
        what = r"'otter/run\.json' in .* is not what was launched: its " + (
            name if name not in OF_PLACEMENTS else "placements"
        )
        if (name, trust) == ("task_digest", "bucket"):
            what = r"'otter/task/task\.json' in .* is not what was launched: its sha256"
        with pytest.raises(StoreError, match=what):
            resume(attach(run.url), **given.get(trust, {}))
        assert objects_of(run) == before, name
    assert not (tmp_path / "imported").exists()


def test_the_launching_machine_uses_its_own_record_and_not_a_later_one_in_the_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meanwhile(store: Store, run_id: str, *_: object) -> None:
        record = read_json(store, f"{run_id}/run.json")
        store.put(f"{run_id}/run.json", to_bytes({**altered(record, "restarts", "9"), "created_at": 1e10}))

    monkeypatch.setattr("executors.attempt.handles.keep_handles", meanwhile)
    run = failed(tmp_path / "b", tmp_path / "ran")
    assert (view_of(run).record.settings.restarts, view_of(run).record.created_at < 1e10) == (None, True)


def test_the_folder_of_the_launch_is_not_taken_from_the_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs, elsewhere = (tmp_path / name for name in ("mine", "theirs", "elsewhere"))
    for folder in (mine, theirs, elsewhere):
        folder.mkdir()
        (folder / "train.py").write_text(f"def main():\n    raise RuntimeError({folder.name!r})\n")
    monkeypatch.chdir(mine)
    run = launch(PLAIN, "train.py:main", 1, rendezvous=tmp_path / "bucket", run_id="otter")
    run.wait(30)
    view_of(run).store.put("otter/run.json", to_bytes({**written(run), "cwd": str(theirs)}))
    for folder in (theirs, elsewhere):
        monkeypatch.chdir(folder)
        with pytest.raises(ValueError, match=f"cd {mine} && replicas resume"):
            resume(attach("otter"))
    monkeypatch.chdir(mine)
    (again := resume(attach("otter"))).wait(30)
    assert "mine" in str(again.outcomes()[0].error)


def test_a_run_of_the_same_id_at_another_store_does_not_borrow_the_digest(tmp_path: Path) -> None:
    failed(tmp_path / "bucket", tmp_path / "ran")
    (tmp_path / "bucket").rename(tmp_path / "copy")
    with pytest.raises(UntrustedTaskError, match="was not launched from here"):
        resume(attach(f"{tmp_path}/copy/otter"))


def test_a_removed_run_is_forgotten(tmp_path: Path) -> None:
    run = failed(tmp_path / "bucket", tmp_path / "ran")
    attach("otter").remove()
    assert noted_at_launch("otter", view_of(run).store.url) is None


def test_the_run_of_the_same_id_elsewhere_is_removed_alone(tmp_path: Path, elsewhere: Callable[[], None]) -> None:
    failed(None, tmp_path / "ran", "otter")
    other = open_store(tmp_path / "bucket")
    for entry in list(view_of(attach("otter")).store.list("otter/")):
        other.put(entry.key, bytes(view_of(attach("otter")).store.get(entry.key)))
    attach(f"{tmp_path}/bucket/otter").remove()
    assert not list(other.list("otter/"))
    assert resume(attach("otter")).wait(30)


def test_a_run_made_by_an_executor_alone_is_resumed_here_too(tmp_path: Path) -> None:
    (handle,) = PLAIN.launch_replicas(1, FAIL, {"message": "no"})
    PLAIN.collect([handle], timeout=60)
    again = resume(attach(handle.metadata["run_id"]))
    assert again.wait(30)
    assert again.status().replicas[0].attempt == 1


# Another machine


def test_another_machine_refuses_before_it_starts_or_writes_anything_and_shows_the_task_that_it_would_trust(
    tmp_path: Path, here: HereInstead, elsewhere: Callable[[], None]
) -> None:
    run = failed(tmp_path / "bucket", tmp_path / "ran")
    before = objects_of(run)
    elsewhere()
    told = here.replicas("resume", run.url)
    assert told.code == 2
    for what in (
        run.url,
        "test_trusted_tasks.touch_and_fail",
        view_of(run).record.created_by,
        view_of(run).record.task_digest,
        "with the credentials of this machine",
        "--task-digest",
        "--trust-bucket",
        "task_digest=",
        "trust_bucket=True",
    ):
        assert what in told.stderr
    assert objects_of(run) == before
    assert not list((tmp_path / "another-machine").rglob("*.json"))
    with pytest.raises(UntrustedTaskError):
        launch(PLAIN, touch_and_fail, 1, rendezvous=tmp_path / "bucket", run_id="otter", resume=True)


@pytest.mark.parametrize(
    ("shady", "refused"),
    [
        ({"entrypoint": "\x1b[2Jfine", "created_by": "you\r"}, UntrustedTaskError),
        ({"task_digest": ["\x07"]}, CorruptObjectError),
        ({"task_digest": "\x07" * 64}, CorruptObjectError),
    ],
)
def test_texts_from_the_bucket_are_shown_without_control_characters(
    tmp_path: Path, elsewhere: Callable[[], None], shady: dict[str, Any], refused: type[Exception]
) -> None:
    run = failed(tmp_path / "bucket", tmp_path / "ran")
    view_of(run).store.put("otter/run.json", to_bytes({**written(run), **shady}))
    elsewhere()
    with pytest.raises(refused) as caught:
        resume(attach(run.url))
    assert str(caught.value).isprintable()


def test_a_user_carries_the_digest_to_another_machine(
    tmp_path: Path, here: HereInstead, elsewhere: Callable[[], None]
) -> None:
    options = ("--n", 1, "--run-id", "otter", "--rendezvous", tmp_path / "b", "--json")
    launched = here.replicas("launch", FAIL, "--arg", "message=no", *options, *FAST).json
    digest = launched["task_digest"]
    assert here.replicas("status", "otter", "--json").json["task_digest"] == digest
    elsewhere()
    assert here.replicas("status", launched["url"], "--json").json["task_digest"] is None, (
        "status shows no digest that this machine cannot prove"
    )
    assert here.replicas("resume", launched["url"], "--task-digest", digest.upper()).code == 1
    again = attach(launched["url"])
    assert again.status().replicas[0].attempt == 1
    back = launch(PLAIN, FAIL, 1, rendezvous=tmp_path / "b", run_id="otter", resume=True, task_digest=digest)
    assert back.wait(30)
    assert back.status().replicas[0].attempt == 2


def test_a_digest_that_is_not_the_stored_tasks_is_refused_and_both_are_named(tmp_path: Path, here: HereInstead) -> None:
    run = failed(tmp_path / "bucket", tmp_path / "ran")
    told = here.replicas("resume", "otter", "--task-digest", "a" * 64)
    assert told.code == 2
    assert f"its sha256 is {view_of(run).record.task_digest}, the launch's {'a' * 64}" in told.stderr
    assert attach("otter").status().replicas[0].attempt == 0


def test_an_invalid_digest_is_a_usage_error(tmp_path: Path, here: HereInstead) -> None:
    failed(tmp_path / "bucket", tmp_path / "ran")
    for arguments, message in (
        (["--task-digest", "abc"], "must be a sha256, 64 hexadecimal digits, got 'abc'"),
        (["--task-digest", "g" * 64], "must be a sha256"),
        (["--task-digest", "a" * 64, "--trust-bucket"], "Give either task_digest= or trust_bucket=True"),
    ):
        told = here.replicas("resume", "otter", *arguments)
        assert (told.code, message in told.stderr) == (2, True), told


def test_a_user_who_trusts_the_bucket_is_shown_its_task(
    tmp_path: Path, here: HereInstead, elsewhere: Callable[[], None]
) -> None:
    run = failed(tmp_path / "bucket", tmp_path / "ran")
    elsewhere()
    told = here.replicas("resume", run.url, "--trust-bucket", "--json")
    assert told.code == 1
    assert told.json["replicas"][0]["attempt"] == 1
    assert (tmp_path / "ran").read_text() == "xx"
    assert "replicas: trusting" in told.stderr
    for what in (
        run.url,
        "test_trusted_tasks.touch_and_fail",
        view_of(run).record.created_by,
        view_of(run).record.task_digest,
    ):
        assert what in told.stderr


def test_a_user_who_trusts_the_bucket_is_warned_if_this_machine_launched_another_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = failed(tmp_path / "bucket", tmp_path / "ran")
    launched = view_of(run).record.task_digest
    found = exchange_task(run, tmp_path / "other-ran")
    assert resume(attach("otter"), trust_bucket=True).wait(30)
    assert (tmp_path / "other-ran").exists()
    told = capsys.readouterr().err
    assert found in told
    assert re.search(f"This machine launched another task there: .*{launched}", told)


def test_this_machines_note_of_its_own_task_is_not_used_for_another_trusted_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY", "mine")
    few = LocalProcessExecutor(preload=(), term_grace_s=0.5, gpus=["7"])
    run = launch(few, FAIL, 1, args={"message": "no"}, rendezvous=tmp_path / "b", run_id="otter", secrets=["KEY"])
    assert run.wait(30)
    mine = view_of(attach("otter"))
    noted = mine.noted
    assert noted is not None
    assert (noted.secrets, mine.executor.gpus) == (("KEY",), ("7",))  # type: ignore[attr-defined]
    exchange_task(run, tmp_path / "other-ran")
    theirs = view_of(attach("otter"))
    assert (theirs.noted, theirs.executor.gpus) == (None, None)  # type: ignore[attr-defined]


@pytest.mark.parametrize("trust", [{"task_digest": "a" * 64}, {"trust_bucket": True}])
def test_a_first_launch_trusts_itself(trust: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="go with resume=True"):
        launch(PLAIN, FAIL, 1, **trust)


def test_this_machines_note_is_read_by_no_one_else(tmp_path: Path) -> None:
    """If a run is in the state directory itself, its note moves together with the run."""
    run = failed(None, tmp_path / "ran")
    assert read_json(view_of(run).store, "otter/launched.json") == {
        "rendezvous": None,
        "task_digest": view_of(run).task_digest,
        "executor_options": PLAIN.options_to_keep,
        "more_options": {},
        "secrets": [],
    }
    forget(folder_of_run("otter", view_of(run).store.url))
    assert noted_at_launch("otter", view_of(run).store.url) is None
