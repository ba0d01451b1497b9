"""`replicas launch --chaos`: its effect on replicas, its record, and the specs that are refused."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from support.cli import FAST, Folder, HereInstead

from diloco.fault_points import FAULT_POINTS
from executors import LocalProcessExecutor, Run, attach, launch, list_runs
from executors.attempt import Attempt
from executors.run.resume import resume
from executors.run.run import view_of
from executors.store import MemoryStore
from executors.testing.helpers import environment
from executors.worker.chaos import EVERY_REPLICA, Kill, parse

KILL = "kill:rank=1,at=claim,when=after"


def bring_back(run_id: str) -> Run:
    found = attach(run_id)
    run = resume(Run(view_of(found).store, run_id, executor=LocalProcessExecutor(preload=())))
    run.wait(60)
    return run


def test_chaos_kills_only_the_attempt_and_place_of_its_spec(folder: Folder) -> None:
    later = "kill:rank=1,at=outcome,attempt=1"
    shown = folder.launch("job:main", "--chaos", KILL, "--dry-run").json
    assert shown["run_record"]["settings"]["chaos"] == shown["request"]["spec"]["settings"]["chaos"] == [KILL]
    told = folder.launch("job:main", "--chaos", KILL, "--chaos", later, "--run-id", "shaken")
    assert told.code == 1
    assert f"on local, no time limit, chaos {KILL}" in told.stdout
    assert "Rank 1 failed (signal): was ended by signal 9 (SIGKILL)." in told.stdout
    assert "chaos: rank 1 dies after claim 1" in folder.replicas("logs", "shaken", "--rank", 1).stdout
    bring_back("shaken")
    run = bring_back("shaken")
    assert view_of(run).record.settings.chaos == (KILL, later)
    found = [Attempt(view_of(run).store, "shaken", 1, attempt).outcome() for attempt in range(3)]
    assert [outcome.signal for outcome in found if outcome is not None] == ["SIGKILL", "SIGKILL", None]
    assert [(outcome.attempt, outcome.status) for outcome in run.outcomes()] == [(0, "succeeded"), (2, "succeeded")]


def test_a_store_that_fails_at_random_costs_no_replica(folder: Folder) -> None:
    """Requests for claim, task and outcome are repeated, so that no replica is lost at these rates."""
    spec = "store:error=0.2,lost=0.2,truncate=0.1,delay=0.002"
    told = folder.launch("job:main", "--chaos", spec, "--run-id", "the-same-faults-each-time", "--json", n=6)
    assert told.code == 0, told
    assert [row["result"] for row in told.json["replicas"]] == [{"rank": rank} for rank in range(6)]


REFUSED = {
    "kil:rank=1": "No fault 'kil'. Did you mean 'kill'? Known: exit, hang, kill, oom, raise, store.",
    "kill:rnk=1": "No setting of kill 'rnk'. Did you mean 'rank'? Known: at, attempt, count, every, member, ",
    "kill:rank=1,at=seel": "No fault point 'seel'. Did you mean 'seal'? Known: bye, claim, ",
    "kill:rank=1,when=now": "No time 'now'. Known: after, before.",
    "kill:rank=1,member=1": "each replica has one process, 0, got member=1. Change member or --procs.",
    "raise:rank=1,member=-1": "member must be at least 0, got member=-1.",
    "kill:every=5,member=1": "every= can only be combined with rank=",
    "store:error=0.1,member=1": "No setting of store 'member'.",
    "kill:rank=one": "rank must be an integer, got rank=one.",
    "kill:rank=2": "the run has the ranks 0 to 1, got rank=2.",
    "kill:rank=-1": "rank must be at least 0, got rank=-1.",
    "kill:round=3": "a rank is missing. Give one",
    "kill:rank=1,count=0": "count must be at least 1, got count=0.",
    "kill:rank=1,rank=1": "'rank' needs one value",
    "kill:rank": "'rank' needs one value",
    "kill:rank=1,at=bye,round=3": "at=bye has no rounds, got round=3. Remove round=.",
    "kill:every=0.001": "every must be a number of seconds, at least 0.01, got every=0.001.",
    "kill:every=5,round=3": "every= can only be combined with rank=, because it kills by the clock.",
    "kill:every=5,rank=2": "the run has the ranks 0 to 1, got rank=2.",
    "hang:how=gil": "a rank is missing. Give one",
    "hang:rank=1,how=gill": "No way to hang 'gill'. Did you mean 'gil'? Known: gil, lock, loop, spin, stop.",
    "raise:rank=1,attempt=each": "attempt must be an integer, got attempt=each.",
    "exit:rank=1,code=256": "an exit code must be from 0 to 255, got code=256.",
    "exit:rank=1,cod=1": "Did you mean 'code'?",
    "oom:rank=1,how=lock": "No setting of oom 'how'.",
    "kill:rank=1,round=0": "rounds count from 1, got round=0.",
    "store:lost=2": "lost must be a rate from 0 to 1, got lost=2.0.",
    "store:delay=-1": "The delay must be a number of seconds from 0 on, got -1.0.",
    "store:delay=fast": "delay must be a number, got delay=fast.",
    "store:": "no fault is given. Give lost, error",
    "store:dealy=1": "Did you mean 'delay'?",
}


def test_chaos_that_makes_no_sense_is_refused_before_anything_is_written(here: HereInstead, state_home: Path) -> None:
    for spec, says in REFUSED.items():
        told = here.replicas("launch", "job:main", "--n", 2, *FAST, "--chaos", spec)
        assert told.code == 2, spec
        assert f"Error: chaos {spec!r}: " in told.stderr
        assert says in told.stderr, spec
    told = here.replicas("launch", "job:main", "--n", 2, "-b", "support.third_party:PopenExecutor", "--chaos", KILL)
    assert told.code == 2
    assert "Backend 'popen' takes no chaos: faults are injected into local replicas only." in told.stderr
    assert list_runs() == []


def test_chaos_in_python_is_a_list_and_a_resumed_run_keeps_its_own() -> None:
    local = LocalProcessExecutor(preload=())
    with pytest.raises(TypeError, match="chaos must be a list of strings"):
        launch(local, str, 1, chaos="kill:rank=0")
    with pytest.raises(ValueError, match="keeps the chaos of its launch"):
        launch(local, str, 1, run_id="any", resume=True, chaos=["kill:rank=0"])


def test_the_fault_points_of_a_rendezvous_are_announced_and_found_without_torch() -> None:
    pyproject = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    (target,) = pyproject["project"]["entry-points"]["replicas.fault_points"].values()
    module, _, name = target.partition(":")
    assert getattr(import_module(module), name) is FAULT_POINTS
    assert not FAULT_POINTS.keys() & EVERY_REPLICA.keys()
    code = f"import sys, {module}, executors.worker.chaos; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=environment(), check=False).returncode == 0


def test_a_kill_names_its_round_as_people_count_them(monkeypatch: pytest.MonkeyPatch) -> None:
    deaths: list[str] = []
    monkeypatch.setattr(Kill, "act", lambda self, said: deaths.append(self.at))
    for spec, key in {
        "kill:rank=1,round=3": "run/diloco/main/r2/contribution/1",
        "kill:rank=1,round=3,at=seal": "run/diloco/main/seal/2",
        "kill:rank=1,round=3,at=pointer": "run/diloco/main/snapshot/3",
        "kill:rank=1,round=0,at=pointer": "run/diloco/main/snapshot/0",
    }.items():
        parse(spec).around(MemoryStore(spec), seed="").put_if_absent(key, b"")
    assert deaths == ["contribution", "seal", "pointer", "pointer"]
