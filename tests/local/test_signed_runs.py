"""The key of a signed run: replicas have it, this machine keeps it, and nobody else sees it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from support.cli import Folder
from support.third_party import PopenExecutor

from executors import LocalProcessExecutor, Run, attach, launch
from executors.resume import resume
from executors.run_index import key_file
from executors.run_key import RUN_KEY

PLAIN = LocalProcessExecutor(preload=(), term_grace_s=0.5)


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def key_here() -> str | None:
    """Return the digest of the key that a replica finds."""
    return digest_of(os.environ[RUN_KEY]) if RUN_KEY in os.environ else None


def fail_once(folder: str) -> str | None:
    if not Path(folder, "again").exists():
        raise RuntimeError("not yet")
    return key_here()


def assert_nowhere(key: str, run: Run, state_home: Path, *shown: Any) -> None:
    for entry in run.store.list(f"{run.run_id}/"):
        assert key.encode() not in bytes(run.store.get(entry.key)), entry.key
    found = [path for path in state_home.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
    assert found == [key_file(run.run_id)]
    assert key not in repr([run, run.handles, run.record, run.outcomes(), run.status(), *shown])


def test_every_attempt_has_the_key_and_nobody_else_sees_it(
    tmp_path: Path, state_home: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_KEY, "ab" * 32)  # of another run
    run = launch(PLAIN, fail_once, 2, args={"folder": str(tmp_path)}, signed=True, run_id="otter", rendezvous=tmp_path)
    assert run.wait(30)
    Path(tmp_path, "again").touch()
    key = key_file("otter").read_text()
    assert key != "ab" * 32
    assert resume(run).results() == [digest_of(key)] * 2
    assert key_file("otter").stat().st_mode & 0o777 == 0o600
    assert run.record.signed
    assert run.record.key_id == hashlib.sha256(bytes.fromhex(key)).hexdigest()[:8]
    told = Folder(tmp_path).replicas("status", "otter")
    assert f"signed (key {run.record.key_id})" in told.stdout
    assert_nowhere(key, attach("otter"), state_home, told)
    assert key not in "".join(capfd.readouterr())
    assert Folder(tmp_path).replicas("rm", "otter").code == 0
    assert not key_file("otter").exists()


def test_each_signed_run_has_a_key_of_its_own_and_others_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (launch(PLAIN, key_here, 1, signed=True).results() for _ in range(2))
    assert first != second
    monkeypatch.setenv(RUN_KEY, "ab" * 32)
    for backend in (PLAIN, "inline"):
        run = launch(backend, key_here, 1)
        assert run.results() == [None]
        assert (run.record.signed, run.record.key_id, key_file(run.run_id).exists()) == (False, None, False)
    assert launch("inline", key_here, 1, signed=True).results() != [None]
    assert os.environ[RUN_KEY] == "ab" * 32


def test_another_machine_resumes_a_signed_run_with_the_key_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = launch(PLAIN, fail_once, 1, args={"folder": str(tmp_path)}, signed=True, run_id="otter", rendezvous=tmp_path)
    assert run.wait(30)
    Path(tmp_path, "again").touch()
    key, digest = key_file("otter").read_text(), run.task_digest
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another-machine"))
    there = attach(run.url, executor=PLAIN)
    for wrong in (None, "not a key", "ab" * 32):
        if wrong is not None:
            monkeypatch.setenv(RUN_KEY, wrong)
        with pytest.raises(ValueError, match=rf"'otter' is signed \(key {run.record.key_id}\).*Set {RUN_KEY}"):
            resume(there, task_digest=digest)
    monkeypatch.setenv(RUN_KEY, key)
    assert resume(there, task_digest=digest).results() == [digest_of(key)]


def test_a_run_that_goes_on_from_a_snapshot_keeps_the_key(tmp_path: Path) -> None:
    run = launch(PLAIN, fail_once, 1, args={"folder": str(tmp_path)}, signed=True)
    assert run.wait(30)
    begun = resume(run, from_snapshot=True)
    assert begun.wait(30)
    assert key_file(begun.run_id).read_text() == key_file(run.run_id).read_text()
    assert begun.record.key_id == run.record.key_id


def test_a_key_is_neither_shown_by_a_dry_run_nor_taken_where_it_would_be_seen(tmp_path: Path) -> None:
    dry = Folder(tmp_path).replicas("launch", "os:getcwd", "--n", 1, "--signed", "--dry-run")
    assert dry.code == 0, dry
    assert dry.json["request"]["spec"]["key"] == "***"
    assert dry.json["run.json"]["signed"]
    assert len(dry.json["run.json"]["key_id"]) == 8
    with pytest.raises(ValueError, match=f"env cannot set '{RUN_KEY}'"):
        launch(PLAIN, key_here, 1, env={RUN_KEY: "ab" * 32})
    with pytest.raises(ValueError, match=r"takes no signed= \(--signed\): its five verbs carry no key"):
        launch(PopenExecutor(), key_here, 1, signed=True)
    with pytest.raises(ValueError, match="A resumed run keeps the signed it was launched with"):
        launch(PLAIN, key_here, 1, run_id="otter", resume=True, signed=True)
