"""Tests the key of a signed run: replicas have it, this machine keeps it, and no one else sees it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cli import Folder
from support.third_party import PopenExecutor
from torch import nn

from diloco import DiLoCo
from diloco.rendezvous.envelope import UNSIGNED, proof_of
from diloco.rendezvous.frames import Contribution, Seal
from executors import LocalProcessExecutor, Run, attach, current_replica, launch
from executors.replica import Replica, run_key
from executors.run.resume import resume
from executors.run.run import view_of
from executors.store.records import to_bytes
from executors.store.run_key import RUN_KEY, key_file
from executors.testing import eventually

PLAIN = LocalProcessExecutor(preload=(), term_grace_s=0.5)


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def key_here() -> str | None:
    """Return the digest of the key that a replica finds."""
    return digest_of(os.environ[RUN_KEY]) if RUN_KEY in os.environ else None


def fail_at_first() -> str | None:
    if os.environ["REPLICA_ATTEMPT"] == "0":
        raise RuntimeError("not yet")
    return key_here()


def fail_once(folder: str) -> str | None:
    if not Path(folder, "again").exists():
        raise RuntimeError("not yet")
    return key_here()


def assert_nowhere(key: str, run: Run, state_home: Path, *shown: Any) -> None:
    for entry in view_of(run).store.list(f"{run.run_id}/"):
        assert key.encode() not in bytes(view_of(run).store.get(entry.key)), entry.key
    found = [path for path in state_home.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
    assert found == [key_file(run.run_id)]
    assert key not in repr([run, run.handles, view_of(run).record, run.outcomes(), run.status(), *shown])


def test_every_attempt_has_the_key_and_no_one_else_sees_it(
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
    assert view_of(run).record.settings.signed
    assert view_of(run).record.key_id == hashlib.sha256(bytes.fromhex(key)).hexdigest()[:8]
    told = Folder(tmp_path).replicas("status", "otter")
    assert f"signed (key {view_of(run).record.key_id})" in told.stdout
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
        assert (view_of(run).record.settings.signed, view_of(run).record.key_id, key_file(run.run_id).exists()) == (
            False,
            None,
            False,
        )
    assert launch("inline", key_here, 1, signed=True).results() != [None]
    assert os.environ[RUN_KEY] == "ab" * 32


def test_a_restarted_replica_has_the_key() -> None:
    run = launch(PLAIN, fail_at_first, 1, signed=True, restarts=1)
    assert run.results() == [digest_of(key_file(run.run_id).read_text())]


def forge_and_fail(forged: list[dict[str, Any]]) -> int:
    """Write forged decisions, as any process with write access can, and fail. Return the next attempt."""
    replica = current_replica()
    if replica.attempt == 0:
        for number, entry in enumerate(forged):
            replica.store.put(f"{replica.run_id}/decisions/{number:06d}.json", to_bytes(entry))
        raise RuntimeError("not yet")
    return replica.attempt


def test_a_forged_decision_starts_nothing_in_a_signed_run() -> None:
    forged: list[dict[str, Any]] = [{"kind": "restart", "rank": 0, "ended": 0, "start": {"0": 5}, "how": "fork"}]
    assert launch(PLAIN, forge_and_fail, 1, args={"forged": forged}, restarts=1).results() == [5]
    assert launch(PLAIN, forge_and_fail, 1, args={"forged": forged}, restarts=1, signed=True).results() == [1]


def test_another_machine_resumes_a_signed_run_with_the_key_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = launch(PLAIN, fail_once, 1, args={"folder": str(tmp_path)}, signed=True, run_id="otter", rendezvous=tmp_path)
    assert run.wait(30)
    Path(tmp_path, "again").touch()
    key, digest = key_file("otter").read_text(), view_of(run).task_digest
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another-machine"))
    there = attach(run.url, executor=PLAIN)
    for wrong in (None, "not a key", "ab" * 32):
        if wrong is not None:
            monkeypatch.setenv(RUN_KEY, wrong)
        other = "" if wrong is None else f"{RUN_KEY} holds a different key.*"
        with pytest.raises(
            ValueError, match=rf"'otter' is signed \(key {view_of(run).record.key_id}\).*{other}Set {RUN_KEY}"
        ):
            resume(there, task_digest=digest)
    monkeypatch.setenv(RUN_KEY, key)
    assert resume(there, task_digest=digest).results() == [digest_of(key)]


def test_a_run_that_continues_from_a_snapshot_keeps_the_key(tmp_path: Path) -> None:
    run = launch(PLAIN, fail_once, 1, args={"folder": str(tmp_path)}, signed=True)
    assert run.wait(30)
    begun = resume(run, from_snapshot=True)
    assert begun.wait(30)
    assert key_file(begun.run_id).read_text() == key_file(run.run_id).read_text()
    assert view_of(begun).record.key_id == view_of(run).record.key_id


def test_a_key_is_neither_shown_by_a_dry_run_nor_taken_where_it_would_be_seen(tmp_path: Path) -> None:
    dry = Folder(tmp_path).replicas("launch", "os:getcwd", "--n", 1, "--signed", "--dry-run")
    assert dry.code == 0, dry
    assert dry.json["request"]["spec"]["key"] == "***"
    assert dry.json["run_record"]["settings"]["signed"]
    assert len(dry.json["run_record"]["key_id"]) == 8
    with pytest.raises(ValueError, match=f"env cannot set '{RUN_KEY}'"):
        launch(PLAIN, key_here, 1, env={RUN_KEY: "ab" * 32})
    with pytest.raises(ValueError, match=r"takes no signed= \(--signed\): its five verbs carry no key"):
        launch(PopenExecutor(), key_here, 1, signed=True)
    with pytest.raises(ValueError, match="A resumed run keeps the signed of its launch"):
        launch(PLAIN, key_here, 1, run_id="otter", resume=True, signed=True)


# -- training under forgeries ------------------------------------------------------------------------------------------

KEYS = ("{run}/diloco/main/r{n}/contribution/0",) * 2 + (
    "{run}/diloco/main/r0/contribution/0",
    "{run}/diloco/main/r{n}/contribution/1",
    "another-run/diloco/main/r{n}/contribution/0",
)
"""The proofs of the forgeries: without a key, with a stranger's key, and a genuine proof of another place."""
FIRST = 2
"""The step before which a forgery first occupies the key of rank 0's contribution."""


def train(steps: int) -> list[float]:
    """Train a model whose anchor is the sum of the means.

    Before some rounds, a forgery occupies the key of rank 0's contribution.
    """
    replica, model = current_replica(), nn.Linear(2, 2, bias=False)
    nn.init.zeros_(model.weight)
    settings: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0, "total_steps": steps}
    with DiLoCo(model, inner_steps=1, **settings) as diloco:
        for step in range(steps):
            if replica.rank == 0 and FIRST <= step < FIRST + len(KEYS) and diloco.rounds < steps:
                take_the_place(replica, step - FIRST, diloco)
            # seconds of a step, so that a replica that was left out is back before the others have ended
            time.sleep(0.02)
            with torch.no_grad():
                model.weight += replica.rank + step % 7
            diloco.step()
        return [float(value) for value in diloco.anchor()["weight"].flatten()]


def take_the_place(replica: Replica, number: int, diloco: DiLoCo) -> None:
    """Write a forgery under the key of rank 0's contribution, as any process with write access can."""
    key = KEYS[0].format(run=replica.run_id, n=diloco.rounds)
    proof = [UNSIGNED, proof_of(b"of a stranger"), *[proof_of(run_key())] * 3][number]
    payload, anchor = np.full(4, 1e6, np.float32).tobytes(), diloco._model_state.digest(0)
    forged = Contribution(0, 0, replica.nonce, 1.0, anchor, len(payload), (proof.digest(payload),), (2e6,), steps=1)
    head = forged.head(KEYS[number].format(run=replica.run_id, n=diloco.rounds), proof)
    replica.store.put(key, head + payload)


def test_forged_replayed_and_swapped_objects_never_steer_a_signed_run(tmp_path: Path) -> None:
    run = launch("local", train, 2, args={"steps": 20}, signed=True, run_id="otter", rendezvous=tmp_path)
    first, second = run.results()
    proof, states = proof_of(bytes.fromhex(key_file("otter").read_text())), [np.zeros(4, np.float32)]
    for entry in range(20):
        key = f"otter/diloco/main/seal/{entry}"
        seal = Seal.parse(view_of(run).store.get(key), key, proof)
        assert entry != FIRST or set(seal.replicas) == {1}
        states.append(states[-1] - np.frombuffer(seal.mean, np.float32))
    assert second == states[-1].tolist()
    assert first in [state.tolist() for state in states], (
        "an honest replica has the state, although it may have left early"
    )
    assert max(map(np.max, states)) < 20 * 8


def train_alone(steps: int, forged: str) -> int:
    """Train. Before that, a stranger occupies the key of one object of the third round."""
    replica, model = current_replica(), nn.Linear(2, 2, bias=False)
    with DiLoCo(model, inner_steps=1, total_steps=steps, grace_s=0.5) as diloco:
        for _ in range(steps):
            if diloco.rounds == 2 and replica.attempt == 0:
                replica.store.put(forged, b"forged" * 100)
            with torch.no_grad():
                model.weight += 1.0
            diloco.step()
        return diloco.rounds


def test_a_blocked_round_names_the_object_and_continues_after_its_deletion(tmp_path: Path) -> None:
    forged = "otter/diloco/main/r2/contribution/0"
    args = {"steps": 4, "forged": forged}
    run = launch(PLAIN, train_alone, 1, args=args, signed=True, run_id="otter", rendezvous=tmp_path / "a run's")
    eventually(lambda: run.status().standstills, "the round makes no progress", within_s=60)
    (line,) = run.status().standstills
    assert line.startswith(
        f"Round 3 makes no progress: the object '{forged}' was made without the run's key, or is damaged."
    )
    told = " ".join(Folder(tmp_path).replicas("status", run.url).stdout.split())
    assert "Round 3 makes no progress" in told
    waited = Folder(tmp_path).replicas("wait", run.url, "--timeout", "1s")
    assert (waited.code, line in " ".join(waited.stdout.split())) == (124, True), waited
    assert "Round 3 makes no progress" in run.report(tmp_path / "page.html").read_text()
    subprocess.run(line.partition("Delete it: ")[2], shell=True, check=True)
    assert run.results() == [4], "the contribution is sent again after the forged object was deleted"
    assert run.status().standstills == []
    assert any("Round 3 makes no progress" in each.text for each in run.warnings()), (
        "the warnings still have the standstill"
    )


def test_the_last_line_of_a_run_that_a_forged_seal_ended_names_the_object_to_delete_before_a_resume(
    tmp_path: Path,
) -> None:
    args = {"steps": 4, "forged": "otter/diloco/main/seal/2"}
    run = launch(PLAIN, train_alone, 1, args=args, signed=True, run_id="otter", rendezvous=tmp_path / "runs")
    assert run.wait(60)
    ended = Folder(tmp_path).replicas("wait", run.url)
    said, path = " ".join(ended.stdout.split()), tmp_path / "runs" / "otter/diloco/main/seal/2"
    assert ended.code == 1
    assert "Round 3 made no progress when the replica ended" in said
    assert f"Delete it: rm {path}" in said
    path.unlink()
    assert resume(run).results() == [4]


def test_the_same_forgery_steers_a_run_that_is_not_signed(tmp_path: Path) -> None:
    run = launch("local", train, 2, args={"steps": FIRST + 1}, rendezvous=tmp_path)
    assert max(run.results()[0]) < -1e5
