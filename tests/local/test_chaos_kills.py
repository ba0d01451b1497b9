"""Kills real replicas at random and at every call of the rendezvous.

The replicas start again, and the result is not affected.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from servers.s3.server import S3Server
from support.chaos_tasks import START, closed_gates, train
from support.records import read_json
from support.runs import pid_of

from diloco.fault_points import FAULT_POINTS
from diloco.rendezvous.envelope import UNSIGNED
from diloco.rendezvous.snapshot import SnapshotPointer
from executors import LocalProcessExecutor, Run, launch
from executors.attempt import Attempt, replica_key
from executors.protocol import Outcome
from executors.run.resume import resume
from executors.run.run import view_of
from executors.store.records import exists
from executors.testing import eventually
from executors.worker.chaos import EVERY_REPLICA

pytestmark = pytest.mark.slow

LOCAL = LocalProcessExecutor(term_grace_s=0.5)
SEED = 1  # the seed of the first model and of all data


@cache
def fault_free_loss(n: int, rounds: int) -> float:
    results = launch(LOCAL, train, n, args={"folder": "", "rounds": rounds, "inner_steps": 20}, seed=SEED).results()
    return float(results[0]["loss"])


def start(folder: Path, n: int, rounds: int, gates: Sequence[int] = (), url: str | None = None, **more: Any) -> Run:
    """Launch a training. `chaos` is an argument of the launch, and all other arguments go to the training."""
    chaos = more.pop("chaos", ())
    args = {"folder": str(folder), "rounds": rounds, "gates": gates, "inner_steps": 20, **more}
    return launch(LOCAL, train, n, args=args, rendezvous=url, seed=SEED, chaos=chaos)


def death_of(run: Run, rank: int, attempt: int) -> Outcome:
    """Wait until an attempt of a rank has ended, and return its outcome."""
    look = Attempt(view_of(run).store, run.run_id, rank, attempt).outcome
    outcome = eventually(look, f"attempt {attempt} of rank {rank} ends", within_s=45)
    assert outcome is not None
    return outcome


def is_unharmed(run: Run, n: int, rounds: int) -> None:
    """Check that the run has ended with one anchor, and that its loss is as low as without kills."""
    results = run.results()
    assert [result["rounds"] for result in results] == [rounds] * n
    assert all(result["anchor"] == results[0]["anchor"] for result in results)
    assert results[0]["loss"] == pytest.approx(fault_free_loss(n, rounds), rel=0.01)


@pytest.mark.timeout(300)  # ten seconds, because a failing bucket is slow on a busy machine
@pytest.mark.parametrize("place", ["a directory", "a bucket that fails"])
def test_random_replicas_are_killed_again_and_again_and_the_run_is_as_good(
    s3: S3Server, tmp_path: Path, place: str
) -> None:
    s3.misbehave(seed=5, unavailable=0.01, lost=0.01, truncated=0.005, delay_s=0.005)
    dice, gates = random.Random(7), [5, 10, 15]
    with closed_gates(tmp_path / "gates", gates) as open_gate:
        url = None if place == "a directory" else s3.url("runs")
        run = start(tmp_path / "gates", 4, 20, gates, url, snapshot_every=5)
        for gate in gates:
            seal = f"{run.run_id}/diloco/main/seal/{gate - dice.randrange(1, 5)}"
            eventually(partial(exists, view_of(run).store, seal), f"{seal} exists")
            rank = dice.randrange(4)
            attempt = view_of(run).newest_attempt(rank).number
            os.kill(pid_of(run.handles[rank]), signal.SIGKILL)
            assert death_of(run, rank, attempt).signal == "SIGKILL"
            run = resume(run, ranks=[rank])
            open_gate(gate)
    is_unharmed(run, 4, 20)


AT_THE_END = ("bye", "outcome")  # the number of steps of a training; no gate comes after these
GATE, ROUNDS = 12, 16
LATE = "drop"  # ten rounds pass while a process starts, so its contribution is for an earlier round
SHARDED = [*sorted(FAULT_POINTS.keys() - {"own-read"}), *EVERY_REPLICA]  # only a later attempt reads its saved state
SMALL = ["contribution", "contribution-read", "contribution-delete", "seal", "seal-read"]


@pytest.mark.parametrize(
    ("point", "sharded"), [*((point, True) for point in SHARDED), *((point, False) for point in SMALL)]
)
def test_a_replica_is_killed_at_a_fault_point_before_and_after_it_and_comes_back(
    tmp_path: Path, point: str, sharded: bool
) -> None:
    chaos = [f"kill:rank=1,at={point},when=before", f"kill:rank=2,at={point},when=after"]
    args: dict[str, Any] = {"sharded": sharded, "snapshot_every": 1, "late": LATE}
    with closed_gates(tmp_path / "gates", [GATE]) as open_gate:
        run = start(tmp_path / "gates", 3, ROUNDS, [GATE], chaos=chaos, **args)
        if point in AT_THE_END:
            open_gate(GATE)
        for rank in (1, 2):
            outcome = death_of(run, rank, 0)
            # an earlier attempt had written the object
            assert outcome.signal == "SIGKILL" or (point, rank) == ("outcome", 2)
            if outcome.signal:
                run = resume(run, ranks=[rank])
    is_unharmed(run, 3, ROUNDS)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_replica_is_killed_again_as_it_comes_back(tmp_path: Path, when: str) -> None:
    chaos = ["kill:rank=1,round=4", f"kill:rank=1,at=own-read,when={when},attempt=1"]
    with closed_gates(tmp_path / "gates", [GATE]):
        run = start(tmp_path / "gates", 2, ROUNDS, [GATE], chaos=chaos, snapshot_every=1, late=LATE)
        for attempt in (0, 1):
            assert death_of(run, 1, attempt).signal == "SIGKILL"
            run = resume(run, ranks=[1])
    is_unharmed(run, 2, ROUNDS)


@pytest.mark.parametrize("point", ["part", "pointer"])
def test_the_first_to_publish_an_anchor_is_killed_and_another_does_it(tmp_path: Path, point: str) -> None:
    chaos = [f"kill:rank=0,at={point},round=0,when=after"]
    with closed_gates(tmp_path / "gates", [START]) as open_gate:
        run = start(tmp_path / "gates", 2, ROUNDS, chaos=chaos, late=LATE, late_ranks=[1])
        assert death_of(run, 0, 0).signal == "SIGKILL"
        open_gate(START)
    run = resume(run, ranks=[0])
    is_unharmed(run, 2, ROUNDS)
    dead = read_json(view_of(run).store, replica_key(run.run_id, 0, 0, "started.json"))["nonce"]
    first = SnapshotPointer.parse(view_of(run).store.get(f"{run.run_id}/diloco/main/snapshot/0"), "", UNSIGNED)
    assert (first.nonce == dead) == (point == "pointer")  # parts without a pointer are not an anchor


def test_all_are_killed_between_seal_and_mean_and_come_back(tmp_path: Path) -> None:
    chaos = [f"kill:rank={rank},at=mean,round=5" for rank in range(3)]
    run = start(tmp_path, 3, ROUNDS, chaos=chaos, sharded=True, snapshot_every=2, late=LATE)
    assert [death_of(run, rank, 0).signal for rank in range(3)] == ["SIGKILL"] * 3
    is_unharmed(resume(run), 3, ROUNDS)
