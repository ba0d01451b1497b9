"""A run in a storm: replicas are killed, stopped, hung and starved of memory all the time, and the result is as good as
without the storm.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from support.cli import Folder

from executors import LocalProcessExecutor, Run, launch
from executors.attempt import Attempt, Claim
from executors.process import start_time
from executors.run.run import view_of
from executors.testing import eventually
from executors.worker.chaos import small_memory

pytestmark = pytest.mark.slow

TRAIN = f"{Path(__file__).parents[1] / 'benchmarks/restarts_replica.py'}:train"
SECONDS = float(os.environ.get("REPLICAS_STORM_S", "20"))  # ten minutes, to judge a change of the restart rules
N, ROUND_S = 4, 0.5


def claims(run: Run) -> dict[tuple[int, int], Claim]:
    """Return the claims of attempts, by rank and number."""
    found = {}
    for rank in range(N):
        for number in range(view_of(run).newest_attempt(rank).number + 1):
            if claim := Attempt(view_of(run).store, run.run_id, rank, number).find("started.json", Claim.parse):
                found[rank, number] = claim
    return found


def lives(claim: Claim) -> bool:
    return claim.pid is not None and start_time(claim.pid) == claim.pid_started


def strike(run: Run, orders: Path, rank: int, kind: str) -> bool:
    """Apply a fault to a rank, if it is alive."""
    attempt = view_of(run).newest_attempt(rank)
    claim = attempt.find("started.json", Claim.parse)
    if claim is None or claim.pid is None or not lives(claim):
        return False
    if kind == "SIGSTOP" and ((beat := attempt.beat()) is None or not beat.reported):
        return False  # before its first mark, a rank may take ten times as long as between two marks
    if kind in ("SIGKILL", "SIGSTOP"):
        os.kill(claim.pid, signal.Signals[kind])
    else:
        (orders / "new").write_text(kind.format(rank=rank))
        (orders / "new").rename(orders / str(rank))
    return True


@pytest.mark.timeout(SECONDS * 3 + 240)
def test_a_run_in_a_storm_ends_with_one_anchor_and_leaves_nothing_running(tmp_path: Path) -> None:
    kinds = ["SIGKILL", "SIGKILL", "SIGSTOP", "hang:rank={rank},how=gil", "oom:rank={rank}"]
    try:
        small_memory()
    except ValueError:
        kinds.pop()  # not root
    dice, rounds = random.Random(SECONDS), max(10, round(SECONDS / ROUND_S))
    run = launch(
        LocalProcessExecutor(term_grace_s=0.5),
        TRAIN,
        N,
        args={"rounds": rounds, "round_s": ROUND_S, "orders": str(tmp_path)},
        restarts="1000,oom=1000,no_progress=20",
        hang_timeout="2s:3s",
        seed=1,
    )
    until, struck = time.monotonic() + SECONDS * 0.8, Counter[str]()
    while time.monotonic() < until:
        time.sleep(dice.uniform(0.2, 2.0))  # seconds between two faults
        kind = dice.choice(kinds)
        struck[kind] += strike(run, tmp_path, dice.randrange(N), kind)
    results = run.results()
    assert [result["rounds"] for result in results] == [rounds] * N
    assert all(result == results[0] for result in results)
    found = claims(run)
    ends = [Attempt(view_of(run).store, run.run_id, *key).outcome() for key in found]
    reasons = Counter(end.reason for end in ends if end is not None)
    print(f"struck: {dict(struck)}; ends: {dict(reasons)}")
    assert reasons.keys() <= {None, "signal", "hang", "oom"}
    assert reasons[None] == N
    assert reasons["hang"] <= struck["SIGSTOP"] + struck[kinds[3]], "no replica was reported to hang without a fault"
    handle = run.handles[0]
    supervisor = Claim(
        nonce="", pid=handle.metadata["supervisor_pid"], pid_started=handle.metadata["supervisor_started"]
    )
    eventually(lambda: not any(map(lives, [*found.values(), supervisor])), "all processes have ended", within_s=20)


def test_a_crash_loop_is_given_up_and_the_exit_code_reports_that_it_would_continue(folder: Folder) -> None:
    chaos = "exit:rank=1,at=outcome,code=3,attempt=all"
    told = folder.launch("job:main", "--restarts", "10,backoff=0s:0s", "--chaos", chaos, "--run-id", "looping")
    assert told.code == 93, told
    assert "rank 1" in told.stdout
    assert "given up" in told.stdout
