"""The newest round of a run was damaged while no replica was alive.

The error reports that, and a new run continues from a snapshot.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.chaos_tasks import closed_gates, train
from support.cli import HereInstead

from diloco.rendezvous.envelope import UNSIGNED
from diloco.rendezvous.snapshot import SnapshotPointer
from executors import LocalProcessExecutor, Run, attach, current_replica, launch
from executors.errors import ReplicaFailedError
from executors.run.resume import resume
from executors.run.run import view_of
from executors.run.start_spec import trusted_task
from executors.testing import eventually

LOCAL = LocalProcessExecutor(term_grace_s=0.5)
LAST, ROUNDS, SNAPSHOT = 12, 16, 10


def rotten_run(folder: Path, *, sharded: bool) -> tuple[Run, str]:
    """Return a run of two replicas that were killed after round 12, and the objects of that round, which were damaged
    later.
    """
    args: dict[str, Any] = {"folder": str(folder), "rounds": ROUNDS, "sharded": sharded, "snapshot_every": 5}
    chaos = [f"kill:rank={rank},round={LAST + 1}" for rank in range(2)]
    run = launch(LOCAL, train, 2, args=args, seed=1, chaos=chaos)
    assert run.wait(120)
    assert [outcome.signal for outcome in run.outcomes()] == ["SIGKILL"] * 2
    prefix = f"{run.run_id}/diloco/main/" + (f"r{LAST - 1}/mean/" if sharded else f"seal/{LAST - 1}")
    rotten = [entry.key for entry in view_of(run).store.list(prefix)]
    for key in rotten:
        data = bytearray(view_of(run).store.get(key))
        data[-1 if not sharded else -3] ^= 1
        view_of(run).store.put(key, data)
    return run, prefix


def by_command(run: Run, here: HereInstead) -> str:
    """Resume a run by the command, and return the id of the new run."""
    told = here.replicas("resume", run.run_id, "--from-snapshot")
    assert told.code == 0, told
    said = re.match(
        rf"(\S+) continues {run.run_id} from its newest complete snapshot\.\n\1: 2 replicas of ", told.stdout
    )
    assert said, told
    return said[1]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("sharded", [False, True])
def test_a_damaged_newest_round_is_named_within_the_grace_and_a_new_run_continues(
    tmp_path: Path, here: HereInstead, sharded: bool
) -> None:
    run, rotten = rotten_run(tmp_path, sharded=sharded)
    with pytest.raises(ReplicaFailedError, match=rf"Round {LAST} cannot be completed: {rotten}") as failed:
        resume(run).results()
    assert f"replicas resume {run.run_id} --from-snapshot" in str(failed.value)
    outcomes = run.outcomes()
    assert all(outcome.finished_at - (outcome.started_at or 0) < 60 for outcome in outcomes), (
        "the run ended within half of the time limit of a round"
    )

    new = attach(by_command(run, here)) if sharded else resume(run, from_snapshot=True)
    assert new.run_id != run.run_id
    results = new.results()
    assert [result["rounds"] for result in results] == [ROUNDS] * 2
    assert results[0]["anchor"] == results[1]["anchor"]
    assert results[0]["loss"] < 0.4, "0.25 is the noise alone"
    first = SnapshotPointer.parse(view_of(new).store.get(f"{new.run_id}/diloco/main/snapshot/0"), "", UNSIGNED)
    old = SnapshotPointer.parse(view_of(run).store.get(f"{run.run_id}/diloco/main/snapshot/{SNAPSHOT}"), "", UNSIGNED)
    assert (first.first, first.state, first.agreement["last_entry"]) == (SNAPSHOT, old.state, ROUNDS - 1)
    assert f"continues from round {SNAPSHOT} of run {run.run_id}" in new.logs(rank=0) + new.logs(rank=1)
    assert view_of(new).record.continues == run.run_id
    assert trusted_task(view_of(new)).record.args == trusted_task(view_of(run)).record.args
    assert view_of(attach(new.run_id)).task_digest == view_of(new).record.task_digest != view_of(run).record.task_digest


def test_a_run_that_is_not_over_or_only_some_of_its_ranks_begin_no_new_run(tmp_path: Path) -> None:
    args: dict[str, Any] = {"folder": str(tmp_path / "gates"), "rounds": ROUNDS, "gates": [1]}
    with closed_gates(tmp_path / "gates", [1]), launch(LOCAL, train, 2, args=args) as run:
        eventually(lambda: run.status().counts == "2 running", "both replicas run")
        with pytest.raises(ValueError, match=rf"has not ended \(2 running\).* replicas cancel {run.run_id}"):
            resume(run, from_snapshot=True)
        with pytest.raises(ValueError, match="remove ranks="):
            resume(run, ranks=[1], from_snapshot=True)


def test_a_run_that_has_no_snapshot_is_named_by_the_process_that_would_continue_from_it() -> None:
    run = launch(LOCAL, "executors.testing.tasks:fail", 1, args={"message": "no"})
    run.wait(60)
    new = launch(LOCAL, say_where_it_begins, 1, env={"ORIGIN": run.run_id})
    with pytest.raises(ReplicaFailedError, match=rf"Rank 0 found no snapshot of run '{run.run_id}' that can be read"):
        new.results()


def say_where_it_begins() -> int:
    """Train as a run that continues from the run `$ORIGIN`."""
    import torch

    from diloco import DiLoCo

    replica = current_replica()
    assert replica.record is not None
    replica.launched = replace(replica.record, continues=os.environ["ORIGIN"])
    return DiLoCo(torch.nn.Linear(1, 1), grace_s=0.2).rounds
