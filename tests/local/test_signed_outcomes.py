"""In a signed run, only an outcome with the run's key ends a rank. A forged outcome is reported and changes nothing."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from servers.s3.server import S3Server
from support.cli import Folder, Result
from support.hostile_records import outcome_json

from executors import LocalProcessExecutor, Run, attach, current_replica, launch
from executors.attempt import Attempt, Claim
from executors.attempt.signed_record import signed_key
from executors.protocol import ReplicaHandle
from executors.run.run import view_of
from executors.store import Store
from executors.store.record_names import CLAIM, HANDLE, INTENT
from executors.store.records import to_bytes
from executors.store.run_key import RUN_KEY, drop_key, key_file
from executors.testing import eventually

PLAIN = LocalProcessExecutor(preload=(), term_grace_s=0.5)
FORGED: dict[str, dict[str, Any]] = {
    "succeeded": {"result": "forged"},
    "failed": {"status": "failed", "reason": "exception", "error": "forged"},
    "preempted": {"status": "failed", "reason": "preempted", "error": "forged"},
    "lost": {"status": "failed", "reason": "lost", "error": "forged"},
    "cancelled": {"status": "cancelled", "reason": "cancelled", "error": "forged"},
    "with a proof": {"result": "forged", "proof": "ab" * 32},
}


@pytest.fixture(params=["directory", "bucket"])
def rendezvous(request: pytest.FixtureRequest, tmp_path: Path, s3: S3Server) -> str | Path:
    return s3.url("runs") if request.param == "bucket" else tmp_path / "runs"


def forge(store: Store, rank: int, attempt: int, **fields: Any) -> None:
    """Write an outcome without the key, as any process with write access can."""
    data = to_bytes(outcome_json(rank, attempt=attempt, **fields))
    store.put(f"otter/replicas/{rank:04d}/{attempt}/outcome.json", data)


def true_result() -> str:
    replica = current_replica()
    return f"rank {replica.rank}, attempt {replica.attempt}"


def wait_for_go(folder: str) -> str:
    """Run until the test or the other rank ends this function."""
    Path(folder, f"lives-{current_replica().rank}").touch()
    while not Path(folder, "go").exists():
        time.sleep(0.02)
    return true_result()


def forge_and_end(fields: dict[str, Any], fails_at: int) -> str:
    """Write a forged outcome in place of the rank's own, and end."""
    replica = current_replica()
    assert replica.store is not None
    forge(replica.store, replica.rank, replica.attempt, **fields)
    if replica.attempt <= fails_at:
        raise RuntimeError("true")
    return true_result()


def replace_the_others(fields: dict[str, Any]) -> str:
    """The first of two ranks replaces the outcome of the second after the second has ended."""
    replica = current_replica()
    if replica.rank == 0:
        prefix, store = f"{replica.run_id}/replicas/0001/0/outcome", replica.store
        assert store is not None
        eventually(lambda: f"{prefix}.json" in [entry.key for entry in store.list(prefix)], "the other has ended")
        forge(store, 1, 0, **fields)
    return true_result()


def wait_for_both(run: Run, folder: Path) -> None:
    eventually(lambda: all((folder / f"lives-{rank}").exists() for rank in range(2)), "both replicas run")
    eventually(lambda: str(run.status().counts) == "2 running", "status shows both replicas as running")


def keyless(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> Result:
    """Use the command as on a machine that did not launch the run."""
    with monkeypatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder / "another-machine"))
        patch.delenv(RUN_KEY, raising=False)
        return Folder(folder).replicas(*arguments)


@pytest.mark.parametrize("detach", [True, False])
def test_a_forged_outcome_ends_no_living_rank_and_starts_no_attempt(
    tmp_path: Path, rendezvous: str | Path, detach: bool
) -> None:
    run = launch(
        PLAIN, wait_for_go, 2, args={"folder": str(tmp_path)}, signed=True, run_id="otter",
        rendezvous=rendezvous, restarts="3,backoff=0s", detach=detach,
    )  # fmt: skip
    wait_for_both(run, tmp_path)
    for name, fields in FORGED.items():
        for rank, attempt in ((0, 0), (1, 0), (1, 1)):
            forge(view_of(run).store, rank, attempt, **fields)
        seen = run.status()
        assert str(seen.counts) == "2 running", name
        assert [state.attempt for state in seen.replicas] == [0, 0], name
        assert seen.forged == [(0, 0), (1, 0), (1, 1)], name
    told = Folder(tmp_path).replicas("status", run.url)
    assert "without the run's key were found, of ranks 0-1. They have no effect" in " ".join(told.stdout.split())
    (tmp_path / "go").touch()
    assert run.results() == ["rank 0, attempt 0", "rank 1, attempt 0"]
    ended = Folder(tmp_path).replicas("wait", run.url)
    assert (ended.code, "forged" in ended.stdout) == (0, False), ended
    assert attach(run.url).status().forged == [(0, 0), (1, 0), (1, 1)]


def test_a_forged_attempt_is_not_the_newest_one_and_does_not_end_the_living_one(
    tmp_path: Path, rendezvous: str | Path
) -> None:
    args = {"folder": str(tmp_path)}
    run = launch(PLAIN, wait_for_go, 2, args=args, signed=True, run_id="otter", rendezvous=rendezvous, restarts="1")
    wait_for_both(run, tmp_path)
    claim = {"nonce": "theirs", "pid": 4711, "pid_started": 1, "host": "elsewhere", "at": time.time()}
    elsewhere = {**run.handles[0].metadata, "machine": "elsewhere boot pid:[1]", "attempt": 1}
    for attempt in (Attempt(view_of(run).store, "otter", 0, 1), Attempt(view_of(run).store, "otter", 2)):
        view_of(run).store.put(attempt.key(CLAIM), to_bytes(claim))
        view_of(run).store.put(
            attempt.key(INTENT), to_bytes({"nonce": "theirs", "by": "elsewhere:1", "at": time.time()})
        )
        handle = {"rank": attempt.rank, "backend_name": "local", "metadata": elsewhere}
        view_of(run).store.put(attempt.key(HANDLE), to_bytes(handle))
    first = {"rank": 0, "backend_name": "local", "metadata": {**elsewhere, "attempt": 0}}
    view_of(run).store.put(Attempt(view_of(run).store, "otter", 0).key(HANDLE), to_bytes(first))
    seen = attach(run.url).status()
    assert (seen.counts, [state.attempt for state in seen.replicas]) == ("2 running", [0, 0])
    assert seen.forged_starts == [(0, 1), (2, 0)]
    told = Folder(tmp_path).replicas("status", run.url)
    assert "Attempts that begin without the run's key were found, of ranks 0, 2" in " ".join(told.stdout.split())
    (tmp_path / "go").touch()
    assert run.results() == ["rank 0, attempt 0", "rank 1, attempt 0"]
    assert Folder(tmp_path).replicas("wait", run.url).code == 0
    rows = Folder(tmp_path).replicas("collect", run.url, "--json").json["replicas"]
    assert [row["attempt"] for row in rows] == [0, 0]


def test_a_handle_alone_is_enough_to_ask_for_proofs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that kept a handle asks an executor, and never reads the record of the run."""
    args = {"folder": str(tmp_path)}
    run = launch(PLAIN, wait_for_go, 1, args=args, signed=True, run_id="otter", rendezvous=tmp_path / "runs")
    eventually((tmp_path / "lives-0").exists, "the replica runs")
    kept = ReplicaHandle.from_json(run.handles[0].to_json())
    forge(view_of(run).store, 0, 0, **FORGED["succeeded"])
    view_of(run).store.put(Attempt(view_of(run).store, "otter", 0, 1).key(CLAIM), to_bytes({"nonce": "theirs"}))
    drop_key(view_of(run).store.url, "otter")  # this process now behaves like one that has just begun
    assert PLAIN.poll(kept) == "running"
    assert PLAIN.collect([kept], timeout=0)[0]["result"] is None
    with monkeypatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path / "another-machine"))
        drop_key(view_of(run).store.url, "otter")
        (row,) = PLAIN.collect([kept], timeout=0)
        assert row["unproven"], "the row is marked as unproven"
    drop_key(view_of(run).store.url, "otter")
    (tmp_path / "go").touch()
    (row,) = PLAIN.collect([kept], timeout=30)
    assert (row["result"], "unproven" in row) == ("rank 0, attempt 0", False)


def test_a_proven_outcome_counts_for_no_other_rank_and_no_other_attempt(tmp_path: Path, rendezvous: str | Path) -> None:
    first = launch(PLAIN, true_result, 1, signed=True, run_id="first", rendezvous=rendezvous)
    assert first.wait(30)
    run = launch(
        PLAIN, wait_for_go, 2, args={"folder": str(tmp_path)}, signed=True, run_id="otter", rendezvous=rendezvous
    )
    wait_for_both(run, tmp_path)
    key_file("otter").write_text(key := key_file("first").read_text())  # another run with the same key
    place = view_of(first).newest_attempt(0).key("outcome.json")
    data = bytes(view_of(first).store.get(place))
    digits = signed_key(place, bytes.fromhex(key)).rpartition("/")[2]
    for rank, attempt in ((0, 0), (1, 0), (1, 1)):
        for name in ("outcome.json", digits, signed_key("outcome.json", bytes.fromhex(key))):
            view_of(run).store.put(f"otter/replicas/{rank:04d}/{attempt}/{name}", data)
    assert str(run.status().counts) == "2 running"
    (tmp_path / "go").touch()
    assert run.results() == ["rank 0, attempt 0", "rank 1, attempt 0"]


@pytest.mark.parametrize("name", ["succeeded", "preempted", "cancelled"])
def test_a_true_end_gets_through_although_a_forgery_took_its_place(rendezvous: str | Path, name: str) -> None:
    """A forged `preempted` would make the restart free, and a forged success would make it needless."""
    args = {"fields": FORGED[name], "fails_at": 0}
    run = launch(
        PLAIN, forge_and_end, 1, args=args, signed=True, run_id="otter", rendezvous=rendezvous,
        restarts="1,backoff=0s",
    )  # fmt: skip
    assert run.results() == ["rank 0, attempt 1"]
    (state,) = run.status().replicas
    assert (state.attempt, state.restart.charged) == (1, 1)
    first = Attempt(view_of(run).store, "otter", 0, 0).outcome()
    assert first is not None
    assert (first.reason, first.error_line) == ("exception", "RuntimeError: true")


def test_a_forgery_after_the_true_end_changes_nothing(tmp_path: Path, rendezvous: str | Path) -> None:
    args = {"fields": FORGED["failed"]}
    run = launch(PLAIN, replace_the_others, 2, args=args, signed=True, run_id="otter", rendezvous=rendezvous)
    assert run.wait(60)
    assert attach(run.url).results() == ["rank 0, attempt 0", "rank 1, attempt 0"]
    told = Folder(tmp_path).replicas("wait", run.url, "--json")
    assert told.code == 0
    assert [row["status"] for row in told.json["replicas"]] == ["succeeded"] * 2


def test_a_signed_run_stays_signed_on_its_machine_although_its_record_is_replaced(tmp_path: Path) -> None:
    args = {"fields": FORGED["succeeded"], "fails_at": 5}
    run = launch(PLAIN, forge_and_end, 1, args=args, signed=True, run_id="otter", rendezvous=tmp_path / "runs")
    assert run.wait(30)
    record = bytes(view_of(run).store.get("otter/run.json"))
    unsigned = record.replace(b'"signed": true', b'"signed": false')
    unsigned = unsigned.replace(f'"{view_of(run).record.key_id}"'.encode(), b"null")
    assert unsigned.count(b"null") == record.count(b"null") + 1
    view_of(run).store.put("otter/run.json", unsigned)
    told = Folder(tmp_path).replicas("wait", run.url)
    assert (told.code, "forged" in told.stdout) == (1, False), told


def test_a_machine_without_the_key_shows_ends_as_unproven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = launch(PLAIN, true_result, 2, signed=True, run_id="otter", rendezvous=tmp_path / "runs")
    assert run.wait(30)
    told = keyless(tmp_path, monkeypatch, "status", run.url)
    words = " ".join(told.stdout.split())
    assert "Unproven: the run is signed, and this machine does not have its key" in words
    assert words.count("unproven") >= 2, "each rank is marked as unproven"
    assert "(unproven)" in keyless(tmp_path, monkeypatch, "wait", run.url).stdout
    rows = keyless(tmp_path, monkeypatch, "collect", run.url, "--json").json["replicas"]
    assert [row["unproven"] for row in rows] == [True, True]
    assert keyless(tmp_path, monkeypatch, "collect", run.url, "--out", tmp_path / "out").code == 0
    assert '"unproven": true' in (tmp_path / "out" / "results.json").read_text()
    rows = Folder(tmp_path).replicas("collect", run.url, "--json").json["replicas"]
    assert [row["unproven"] for row in rows] == [False, False]


def test_a_watcher_without_the_key_shows_a_lost_rank_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = {"folder": str(tmp_path)}
    run = launch(PLAIN, wait_for_go, 2, args=args, signed=True, run_id="otter", rendezvous=tmp_path / "runs")
    wait_for_both(run, tmp_path)
    claims = [Attempt(view_of(run).store, "otter", rank).find("started.json", Claim.parse) for rank in range(2)]
    pids = [claim.pid for claim in claims if claim is not None and claim.pid is not None]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # otherwise they would report themselves that their supervisor is gone
    for pid in [run.handles[0].metadata["supervisor_pid"], *pids]:
        os.kill(pid, signal.SIGKILL)

    def seen() -> list[str]:
        rows = keyless(tmp_path, monkeypatch, "status", run.url, "--json").json["replicas"]
        return [row["reason"] for row in rows]

    eventually(lambda: seen() == ["lost"] * 2, "the ranks are seen as lost", within_s=60)
    assert not [entry.key for entry in view_of(run).store.list("otter/replicas/") if "outcome" in entry.key]
    assert run.wait(30)
    assert [outcome.reason for outcome in run.outcomes()] == ["lost"] * 2
    assert Attempt(view_of(run).store, "otter", 0).has("outcome.json"), "a process with the key records it"


def test_the_outcomes_of_an_unsigned_run_are_as_before(tmp_path: Path) -> None:
    run = launch(PLAIN, true_result, 1, run_id="otter", rendezvous=tmp_path / "runs")
    assert run.wait(30)
    names = [entry.key.rpartition("/")[2] for entry in view_of(run).store.list("otter/replicas/0000/0/outcome")]
    assert names == ["outcome.json"]
    data = bytes(view_of(run).store.get("otter/replicas/0000/0/outcome.json"))
    assert b"proof" not in data
    assert b"unproven" not in data
    forge(view_of(run).store, 0, 0, **FORGED["succeeded"])
    assert attach(run.url).results() == ["forged"], "a process without the key may have written the end"
