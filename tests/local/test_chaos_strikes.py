"""Tests that chaos ends a replica's process, or lets it hang, as the spec says."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

from support import tasks

from executors import LocalProcessExecutor, launch
from executors.process import fork
from executors.store import MemoryStore
from executors.testing import eventually
from executors.worker.chaos import HANGS, Killer, parse, small_memory


def is_in(pid: int, state: str) -> bool:
    """Return True if a process is in a state. A computing process must have computed for a while."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0] == state and int(fields[11]) >= 20 * (state == "R")


def test_chaos_lets_a_replica_hang_in_the_way_of_its_spec() -> None:
    expected = {"gil": "S", "lock": "S", "spin": "R", "loop": "R", "stop": "T"}
    assert expected.keys() == HANGS.keys()
    pids = {}
    try:
        for how in HANGS:
            store = parse(f"hang:rank=1,at=claim,how={how}").around(MemoryStore(), seed="")
            pids[how] = fork()
            if not pids[how]:
                try:
                    store.put_if_absent("run/replicas/0001/0/started.json", b"")
                finally:
                    os._exit(0)
        for how, state in expected.items():
            eventually(partial(is_in, pids[how], state), f"{how} is {state}")
    finally:
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_chaos_ends_a_replica_in_the_way_of_its_spec() -> None:
    ends = {"raise": ("no_result", 1), "exit": ("no_result", 75), "oom": ("oom", -9)}
    try:
        small_memory()
    except ValueError:
        del ends["oom"]  # not root
    chaos = [f"{kind}:rank={rank},at=outcome" + ",code=75" * (kind == "exit") for rank, kind in enumerate(ends)]
    run = launch(LocalProcessExecutor(preload=()), int, len(ends), chaos=chaos)
    run.wait(60)
    outcomes = run.outcomes()
    assert [(outcome.reason, outcome.exit_code) for outcome in outcomes] == [*ends.values()]
    assert "RuntimeError: chaos: rank 0 raises before outcome 1" in str(outcomes[0].output_tail)


def test_the_supervisor_kills_the_process_that_runs(tmp_path: Path) -> None:
    args = {"path": str(tmp_path / "hangs")}
    run = launch(LocalProcessExecutor(preload=()), tasks.hang, 2, args=args, chaos=["kill:every=0.1"])
    run.wait(60)
    assert [outcome.signal for outcome in run.outcomes()] == ["SIGKILL", "SIGKILL"]


def test_running_ranks_are_killed_again_and_again() -> None:
    sleepers = {rank: subprocess.Popen(["sleep", "60"]) for rank in range(4)}
    pids = {rank: sleeper.pid for rank, sleeper in sleepers.items()}
    killer = Killer(["kill:every=0.01", "kill:rank=1,every=0.01", "store:delay=1"], "a seed")
    try:
        killer.strike({})
        eventually(lambda: time.monotonic() > killer.next_at, "the time of the first kill has come")
        killer.strike({})  # no rank runs, so the next call is due at the next kill
        eventually(lambda: time.monotonic() > killer.next_at, "the time of the second kill has come")
        killer.strike({rank: pids[rank] for rank in (0, 2, 3)})
        ended = eventually(
            lambda: {r for r, each in sleepers.items() if each.poll() is not None}, "one process has ended"
        )
        assert len(ended & {0, 2, 3}) == 1, "one random running rank was killed"
        assert Killer(["store:delay=1"], "").next_at == float("inf")
    finally:
        for sleeper in sleepers.values():
            sleeper.kill()
            sleeper.wait()
