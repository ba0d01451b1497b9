"""Runs with ranks on several fake services, and the requests that these services got."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from executors import LocalProcessExecutor, Run, launch
from executors.backends.jobs.executor import JobExecutor
from executors.errors import BackendError
from executors.registry import BUILT_IN
from executors.testing import eventually
from support.fake_jobs import FakeExecutor, FakeJobs, Machines

MAIN = """
import os, time
from pathlib import Path
from executors import current_replica

def main(folder):
    replica = current_replica()
    said = " ".join(os.environ.get(name, "-") for name in ("WORD", "MORE")) + os.environ.get("LAST", "")
    Path(folder, f".{replica.rank}-{replica.attempt}").write_text(said)
    Path(folder, f".{replica.rank}-{replica.attempt}").rename(Path(folder, f"{replica.rank}-{replica.attempt}"))
    while not Path(folder, "go").exists():
        time.sleep(0.02)
    return [replica.rank, replica.attempt]
"""


class AnyFakeExecutor(FakeExecutor):
    """A fake executor for one of several accounts. Its service has every secret."""

    accounts: ClassVar[dict[str, Machines]] = {}

    def __init__(self, account: str = "") -> None:
        machines = self.accounts[account] if account else self.machines
        JobExecutor.__init__(self, AnyFakeJobs(machines, account))


class OtherFakeExecutor(AnyFakeExecutor):
    backend_name = "other"


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


@pytest.fixture
def folder(machines: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setitem(BUILT_IN, "fake", f"{__name__}:AnyFakeExecutor")
    monkeypatch.setitem(BUILT_IN, "other", f"{__name__}:OtherFakeExecutor")
    monkeypatch.setattr("executors.run.launch_starter.AGAIN_S", 0.1)
    made = tmp_path / "said"
    made.mkdir()
    Path("job.py").write_text(MAIN)
    yield made
    (made / "go").touch()


@pytest.fixture
def others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    """Return the machines of another account."""
    made = Machines(tmp_path / "others")
    monkeypatch.setitem(AnyFakeExecutor.accounts, "other", made)
    yield made
    made.close()


def local() -> LocalProcessExecutor:
    return LocalProcessExecutor(preload=(), term_grace_s=0.5)


def installing(*pip: str) -> AnyFakeExecutor:
    made = AnyFakeExecutor()
    made.service.pip = pip
    return made


def launched(folder: Path, executor: Any, **more: Any) -> Run:
    run = launch(executor, "job.py:main", 1, **{"run_id": "otter", "args": {"folder": str(folder)}, **more})
    come(folder, "0-0")
    return run


def come(folder: Path, *names: str) -> None:
    eventually(lambda: all((folder / name).exists() for name in names), f"{names} wait", within_s=60)


def is_kept(run: Run) -> threading.Thread:
    thread = threading.Thread(target=run.wait, args=(60,), daemon=True)
    thread.start()
    return thread
