"""A signed run on a service that runs jobs: a stranger who can write to its store cannot start a container."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.fake_jobs import Machines, attached, start
from support.hostile_records import outcome_json

from executors import Run
from executors.attempt import Attempt
from executors.run.run import view_of
from executors.store.records import to_bytes
from executors.testing import eventually

MAIN = """
import time
from pathlib import Path
from executors import current_replica

def main(folder):
    replica = current_replica()
    Path(folder, f"{replica.rank}-{replica.attempt}").touch()
    while not Path(folder, "go").exists():
        time.sleep(0.02)
    return replica.attempt
"""
PREEMPTED: dict[str, Any] = {"status": "failed", "reason": "preempted", "error": "forged"}


@pytest.fixture
def folder(machines: Machines, tmp_path: Path) -> Path:
    made = tmp_path / "said"
    made.mkdir()
    Path("job.py").write_text(MAIN)
    return made


@contextmanager
def waiting(run: Run) -> Iterator[None]:
    """Wait for a run in a thread, as its launcher does, which restarts ended ranks."""
    thread = threading.Thread(target=run.wait, args=(120,))
    thread.start()
    try:
        yield
    finally:
        thread.join()


def forge(run: Run, rank: int, attempt: int = 0, **fields: Any) -> None:
    key = Attempt(view_of(run).store, run.run_id, rank, attempt).key("outcome.json")
    view_of(run).store.put(key, to_bytes(outcome_json(rank, attempt=attempt, **fields)))


@pytest.mark.parametrize("detach", [False, True])
def test_a_forged_preemption_starts_no_container_in_a_signed_run(
    machines: Machines, folder: Path, detach: bool
) -> None:
    run = start(2, args={"folder": str(folder)}, restarts="0,backoff=0s", signed=True, detach=detach)
    eventually(lambda: len(list(folder.iterdir())) == 2, "all replicas wait")
    for rank in range(2):
        forge(run, rank, **PREEMPTED)
    with waiting(run):
        seen = attached()
        for _ in range(3):
            assert str(seen.status().counts) == "2 running"
        assert seen.status().forged == [(0, 0), (1, 0)]
        (folder / "go").touch()
    assert run.results() == [0, 0]
    assert len(machines.jobs) == 2


def test_the_same_forgery_starts_a_container_in_a_run_that_is_not_signed(machines: Machines, folder: Path) -> None:
    run = start(2, args={"folder": str(folder)}, restarts="0,backoff=0s")
    eventually(lambda: len(list(folder.iterdir())) == 2, "all replicas wait")
    forge(run, 1, **PREEMPTED)
    with waiting(run):
        eventually((folder / "1-1").exists, "rank 1 is started again")
        (folder / "go").touch()
    assert len(machines.jobs) == 3
