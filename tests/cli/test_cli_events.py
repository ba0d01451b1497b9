"""`replicas events`, `status --check` and `launch --tee`, on a run in which a rank is killed and comes back."""

from __future__ import annotations

import json

import pytest
from support.cli import HereInstead
from support.documents import problems_of

from executors import LocalProcessExecutor, Run, attach, launch
from executors.cli.documents import VERSION
from executors.view.report.event_reader import KINDS

JOB = """
import os, signal
from executors import current_replica

def main():
    me = current_replica()
    me.report(step=1)
    print("attempt", me.attempt, flush=True)
    if me.rank == 1 and me.attempt == 0:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def job(here: HereInstead) -> HereInstead:
    (here.folder.path / "killed_job.py").write_text(JOB)
    return here


@pytest.fixture
def run(job: HereInstead, local: LocalProcessExecutor) -> Run:
    run = launch(local, "killed_job:main", 2, run_id="mine", restarts=1)
    assert run.wait(60)
    return run


def test_events_are_shown_as_lines_and_as_json_and_followed_to_the_end(job: HereInstead, run: Run) -> None:
    shown = job.replicas("events", "mine", "--json")
    rows = [json.loads(line) for line in shown.stdout.splitlines()]
    assert {row["kind"] for row in rows} <= {*KINDS}
    mine = [(row["kind"], row["attempt"]) for row in rows if row["rank"] == 1 and row["kind"] != "first_progress"]
    assert mine == [("claimed", 0), ("ended", 0), ("decided", 0), ("claimed", 1), ("ended", 1)]
    assert [row["kind"] for row in (rows[0], rows[-1])] == ["launched", "finished"]
    assert [{"version": VERSION, **event.to_json()} for event in attach("mine").events()] == rows
    assert [problem for row in rows for problem in problems_of("event", row)] == []
    lines = job.replicas("events", "mine", "-f").stdout
    assert len(lines.splitlines()) == len(rows)
    for text in ("signal: Replica 1 of 2 was ended by signal 9 (SIGKILL).", "restarting rank 1 as attempt 1 (1 of 1)"):
        assert text in lines
    document = job.replicas("status", "mine", "--json").json
    assert [row["attempts"] for row in document["replicas"]] == [1, 2]
    assert 0 < document["availability"] < 1
    assert document["flakiness"] == pytest.approx(1 / 3)
    assert (document["restarts_by_reason"], document["attention"]) == ({"signal": 1}, {})
    assert job.replicas("status", "mine", "--check").code == 0


def test_a_rank_that_was_given_up_fails_the_check(job: HereInstead, local: LocalProcessExecutor) -> None:
    launch(local, "killed_job:main", 2, run_id="mine", restarts="1,signal=0").wait(60)
    checked = job.replicas("status", "mine", "--check")
    assert (checked.code, checked.stdout.startswith("rank 1 given up: the policy has no restart")) == (1, True)
    assert list(job.replicas("status", "mine", "--check", "--json").json["attention"]) == ["1"]


def test_the_output_of_some_ranks_is_shown_while_a_run_is_watched(job: HereInstead) -> None:
    shown = job.launch("killed_job:main", "--tee", "1", "--restarts", "1")
    output = [line for line in shown.stdout.splitlines() if line.startswith("[1]")]
    assert output == ["[1] attempt 0", "[1] === attempt 1 ===", "[1] attempt 1"]
    assert "[0]" not in shown.stdout
    for arguments, message in (
        (["--tee", "0,2"], "--tee 2 is not a rank of this run, which has ranks 0-1."),
        (["--tee", "0", "-d"], "Remove --tee or --detach."),
    ):
        refused = job.launch("killed_job:main", *arguments)
        assert (refused.code, message in refused.stderr) == (2, True), refused
