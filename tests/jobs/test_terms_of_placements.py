"""What a replica is started with is what its launch or its addition was given, whoever starts it, and wherever."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from support.fake_jobs import FakeExecutor, FakeJobs, Machines

from executors import LocalProcessExecutor, Run, attach, launch
from executors.backends.jobs.executor import JobExecutor
from executors.errors import BackendError
from executors.registry import BUILT_IN
from executors.replica import LEASE_S
from executors.resume import resume
from executors.store.added_ranks import added_key
from executors.store.records import to_bytes
from executors.testing import eventually

MAIN = """
import os, time
from pathlib import Path
from executors import current_replica

def main(folder):
    replica = current_replica()
    said = " ".join(os.environ.get(name, "-") for name in ("WORD", "MORE"))
    Path(folder, f".{replica.rank}-{replica.attempt}").write_text(said)
    Path(folder, f".{replica.rank}-{replica.attempt}").rename(Path(folder, f"{replica.rank}-{replica.attempt}"))
    while not Path(folder, "go").exists():
        time.sleep(0.02)
    return [replica.rank, replica.attempt]
"""


@pytest.fixture
def folder(machines: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setitem(BUILT_IN, "fake", f"{__name__}:AnyFakeExecutor")
    monkeypatch.setattr("executors.run.launch_hands.AGAIN_S", 0.1)
    made = tmp_path / "said"
    made.mkdir()
    Path("job.py").write_text(MAIN)
    yield made
    (made / "go").touch()


class AnyFakeExecutor(FakeExecutor):
    """One whose service is one of several accounts, and knows any secret."""

    accounts: ClassVar[dict[str, Machines]] = {}

    def __init__(self, account: str = "") -> None:
        JobExecutor.__init__(self, AnyFakeJobs(self.accounts.get(account, self.machines), account))


class AnyFakeJobs(FakeJobs):
    def __init__(self, machines: Machines, account: str) -> None:
        super().__init__(machines)
        self.account = account

    @property
    def options(self) -> dict[str, Any]:
        return {"account": self.account}

    def check_account(self, gpu: str | None, timeout_s: float | None, secret_names: Sequence[str]) -> None:
        if "NOT_THERE" in secret_names:
            raise BackendError("Fake has no secret 'NOT_THERE'.")


def local() -> LocalProcessExecutor:
    return LocalProcessExecutor(preload=(), term_grace_s=0.5)


def launched(folder: Path, executor: Any, **more: Any) -> Run:
    run = launch(executor, "job.py:main", 1, run_id="otter", args={"folder": str(folder)}, **more)
    come(folder, "0-0")
    return run


def come(folder: Path, *names: str) -> None:
    eventually(lambda: all((folder / name).exists() for name in names), f"{names} wait", within_s=60)


def is_kept(run: Run) -> threading.Thread:
    thread = threading.Thread(target=run.wait, args=(60,), daemon=True)
    thread.start()
    return thread


def test_who_launched_does_not_start_what_another_process_added(machines: Machines, folder: Path) -> None:
    run = launched(folder, AnyFakeExecutor(), restarts="3,backoff=0s", timeout=500, env={"WORD": "launch"})
    there = attach("otter", executor=AnyFakeExecutor())
    assert there.add(AnyFakeExecutor(), 1, timeout=50, env={"WORD": "added", "MORE": "yes"}) == [1]
    come(folder, "1-0")
    machines.end(machines.job_of(there, 1), "preempted")
    machines.end(machines.job_of(run, 0), "preempted")
    waiting = is_kept(run)
    come(folder, "0-1")
    assert (folder / "0-1").read_text() == "launch -"
    assert [(job.job.key.rank, job.job.key.attempt) for job in machines.jobs] == [(0, 0), (1, 0), (0, 1)]
    also_waiting = is_kept(there)
    come(folder, "1-1")
    assert (folder / "1-1").read_text() == "added yes"
    limits = {job.job.key.rank: job.job.limit_s for job in machines.jobs[:2]}
    assert limits[0] != limits[1] == machines.jobs[-1].job.limit_s
    (folder / "go").touch()
    waiting.join()
    also_waiting.join()
    assert run.results() == [[0, 1], [1, 1]]


def test_what_is_added_changes_nothing_of_what_the_launch_is_started_with(machines: Machines, folder: Path) -> None:
    run = launched(folder, AnyFakeExecutor(), restarts="3,backoff=0s", env={"WORD": "launch"})
    leases = run.store.get("otter/lease.json")
    assert run.add(local(), 1, env={"WORD": "added", "MORE": "yes"}) == [1]
    come(folder, "1-0")
    waiting = is_kept(run)
    machines.end(machines.jobs[0], "preempted")
    come(folder, "0-1")
    assert (folder / "0-1").read_text() == "launch -"
    first, again = machines.jobs
    assert again.job.env[LEASE_S] == first.job.env[LEASE_S]
    assert bytes(run.store.get("otter/lease.json")) == bytes(leases), "one process holds it"
    (folder / "go").touch()
    waiting.join()
    assert run.results() == [[0, 1], [1, 0]]


def test_a_resume_gives_each_what_it_was_given_and_asks_for_nothing_that_somebody_else_wrote(
    machines: Machines, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("S", "a secret of this machine")
    run = launched(folder, AnyFakeExecutor(), secrets=["S"], env={"WORD": "launch"}, detach=True)
    added: Any = {"env": {"WORD": "added", "MORE": "yes"}, "detach": True}
    with pytest.raises(BackendError, match="NOT_THERE"):
        run.add(AnyFakeExecutor(), 1, secrets=["NOT_THERE"], **added)
    assert run.add(AnyFakeExecutor(), 1, secrets=["T"], **added) == [1]
    assert run.add(local(), 1, env={"WORD": "w"}, detach=True) == [2]
    come(folder, "1-0", "2-0")
    run.cancel()
    hostile = {"backend": "modal", "ranks": [3], "nonce": "x", "env": ["AWS_KEY"], "secrets": ["ITS"]}
    run.store.put(added_key("otter", 2), to_bytes(hostile))
    with pytest.raises(ValueError, match=r"ranks? 1 of run 'otter' came with the variable 'MORE', whose value"):
        resume(attach("otter"), env={"WORD": "again"}, detach=True)
    with pytest.raises(ValueError, match="'AWS_KEY'"):
        resume(attach("otter"), ranks=[3], env={"WORD": "again"}, detach=True)
    resume(attach("otter"), ranks=[0], env={"WORD": "again"}, detach=True)
    given = {"WORD": "again", "MORE": "more", "AWS_KEY": "key"}
    resume(attach("otter"), env=given, secrets=["T", "NEW"], detach=True)
    come(folder, "0-1", "1-1", "2-1")
    assert [(folder / name).read_text() for name in ("0-1", "1-1", "2-1")] == ["again -", "again more", "again -"]
    names = {(job.job.key.rank, job.job.key.attempt): job.job.secret_names for job in machines.jobs}
    assert names == {(0, 0): ("S",), (1, 0): ("T",), (0, 1): ("S",), (1, 1): ("T", "NEW")}
    (folder / "go").touch()
