"""`replicas launch --chaos`: what it does to replicas, where it is recorded, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_of_tests import FAST, Folder, HereInstead

from executors import LocalProcessExecutor, Run, attach, launch, list_runs
from executors.chaos import POINTS, check_chaos, parse
from executors.outcome import find_outcome
from executors.resuming import resume

KILL = "kill:rank=1,at=claim,when=after"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    (tmp_path / "work").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "work")  # for what is resumed from here
    return Folder(tmp_path / "work")


@pytest.fixture
def here(folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> HereInstead:
    return HereInstead(folder, monkeypatch, capsys)


def bring_back(run_id: str) -> Run:
    found = attach(run_id)
    run = resume(Run(found.store, run_id, executor=LocalProcessExecutor(preload=())))
    run.wait(60)
    return run


def test_a_rank_is_killed_where_it_is_told_and_a_resumed_attempt_is_not(folder: Folder) -> None:
    told = folder.launch("job:main", "--chaos", KILL, "--run-id", "shaken")
    assert told.code == 1
    assert f"on local, no time limit, chaos {KILL}" in told.stdout
    assert "Rank 1 failed (signal): was ended by signal 9 (SIGKILL)." in told.stdout
    assert "chaos: rank 1 dies after claim 1" in folder.replicas("logs", "shaken", "--rank", 1).stdout
    run = bring_back("shaken")
    assert run.record.chaos == (KILL,)
    assert [(outcome.attempt, outcome.status) for outcome in run.outcomes()] == [(0, "succeeded"), (1, "succeeded")]


def test_a_later_attempt_is_killed_when_the_spec_says_so(folder: Folder) -> None:
    specs = (KILL, "kill:rank=1,at=outcome,attempt=1")
    folder.launch("job:main", *(part for spec in specs for part in ("--chaos", spec)), "--run-id", "twice")
    bring_back("twice")
    run = bring_back("twice")
    found = [find_outcome(run.store, "twice", 1, attempt) for attempt in range(3)]
    assert [outcome.signal for outcome in found if outcome is not None] == ["SIGKILL", "SIGKILL", None]


def test_chaos_is_shown_by_a_dry_run(folder: Folder) -> None:
    shown = folder.launch("job:main", "--chaos", KILL, "--dry-run").json
    assert shown["run.json"]["chaos"] == shown["request"]["spec"]["chaos"] == [KILL]


def test_a_store_that_fails_at_random_costs_no_replica(folder: Folder) -> None:
    """Claim, task and outcome are asked for again, so that nothing is lost at these rates."""
    spec = "store:error=0.2,lost=0.2,truncate=0.1,delay=0.002"
    told = folder.launch("job:main", "--chaos", spec, "--run-id", "the-same-faults-each-time", "--json", n=6)
    assert told.code == 0, told
    assert [row["result"] for row in told.json["replicas"]] == [{"rank": rank} for rank in range(6)]


def test_the_faults_of_a_store_hit_the_rank_they_name(folder: Folder) -> None:
    (folder.path / "count.py").write_text(
        "from executors import current_replica\n"
        "from executors.errors import StoreError\n\n"
        "def main():\n"
        "    failed = 0\n"
        "    for number in range(200):\n"
        "        try:\n"
        "            current_replica().store.put(f'here/{number}', b'')\n"
        "        except StoreError:\n"
        "            failed += 1\n"
        "    return failed\n"
    )
    told = folder.launch("count.py", "--chaos", "store:rank=1,error=0.3,seed=5", "--json", n=3)
    counts = [row["result"] for row in told.json["replicas"]]
    assert counts[0] == counts[2] == 0
    assert 30 < counts[1] < 90


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("kil:rank=1", "No chaos 'kil'. Did you mean 'kill'? Known: kill, store."),
        ("kill:rnk=1", "No setting of kill 'rnk'. Did you mean 'rank'? Known: at, attempt, count, rank, round, when."),
        ("kill:rank=1,at=seel", "No fault point 'seel'. Did you mean 'seal'? Known: bye, claim, "),
        ("kill:rank=1,when=now", "No time 'now'. Known: after, before."),
        ("kill:rank=one", "rank is an integer, got rank=one."),
        ("kill:rank=2", "the run has the ranks 0 to 1, got rank=2."),
        ("kill:rank=-1", "rank must be at least 0, got rank=-1."),
        ("kill:round=3", "whom? Give a rank"),
        ("kill:rank=1,count=0", "count must be at least 1, got count=0."),
        ("kill:rank=1,rank=1", "'rank' needs one value"),
        ("kill:rank", "'rank' needs one value"),
        ("kill:rank=1,at=bye,round=3", "at=bye belongs to no round, got round=3."),
        ("store:lost=2", "lost is a rate from 0 to 1, got lost=2.0."),
        ("store:delay=-1", "delay is a number of seconds, got delay=-1.0."),
        ("store:delay=fast", "delay is a number, got delay=fast."),
        ("store:", "this does nothing"),
        ("store:dealy=1", "Did you mean 'delay'?"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused_before_anything_is_written(
    here: HereInstead, state_home: Path, spec: str, says: str
) -> None:
    told = here.replicas("launch", "job:main", "--n", 2, *FAST, "--chaos", spec)
    assert told.code == 2
    assert f"Error: chaos {spec!r}: " in told.stderr
    assert says in told.stderr
    assert list_runs() == []


def test_other_backends_take_no_chaos(here: HereInstead) -> None:
    told = here.replicas("launch", "job:main", "--n", 2, "-b", "strangers_executor:PopenExecutor", "--chaos", KILL)
    assert told.code == 2
    assert "Backend 'popen' takes no chaos: faults are injected into local replicas only." in told.stderr


def test_chaos_in_python_is_a_list_and_a_resumed_run_keeps_its_own() -> None:
    local = LocalProcessExecutor(preload=())
    with pytest.raises(TypeError, match="chaos is a list of specs"):
        launch(local, str, 1, chaos="kill:rank=0")
    with pytest.raises(ValueError, match="keeps the chaos it was launched with"):
        launch(local, str, 1, run_id="any", resume=True, chaos=["kill:rank=0"])


@pytest.mark.parametrize("point", POINTS)
def test_every_fault_point_can_be_asked_for(point: str) -> None:
    assert check_chaos([f"kill:rank=0,at={point}"], 1) == (f"kill:rank=0,at={point}",)
    assert parse(f"kill:rank=0,at={point},count=2,when=after").rank == 0
