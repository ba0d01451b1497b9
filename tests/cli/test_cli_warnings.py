"""Warnings of replicas in the output of commands: the last lines of `launch`, `wait` and `collect`, `status`,
`events`."""

from __future__ import annotations

import json

import pytest
from support.cli import HereInstead

JOB = r"""
import logging
from executors import current_replica

def main(ranks):
    if current_replica().rank in ranks:
        logging.getLogger("diloco.made_up").warning("\x1b[2J%s steps\nare in <b>no</b> average.", 225)
        logging.getLogger("diloco.made_up").warning("of rank %s", current_replica().rank)
    return "fine"
"""
LINE = "2 warnings, the first: rank 1: 225 steps are in <b>no</b> average; replicas events mine"


@pytest.fixture
def job(here: HereInstead) -> HereInstead:
    (here.folder.path / "warns_job.py").write_text(JOB)
    return here


def test_commands_that_watch_a_run_to_its_end_show_its_warnings(job: HereInstead) -> None:
    launched = job.launch("warns_job:main", "--arg", "ranks=[1]", "--run-id", "mine")
    assert launched.code == 0, "a run with warnings ends with exit code 0"
    for shown in (
        launched.stdout,
        job.replicas("wait", "mine").stdout,
        job.replicas("collect", "mine").stdout,
        job.replicas("status", "mine").stdout,
    ):
        assert shown.count(LINE) == 1, shown
        assert "\x1b" not in shown
    for verb in ("wait", "collect"):
        document = job.replicas(verb, "mine", "--json").json
        assert document["n_warnings"] == 2
        first = document["warnings"][0]
        assert (first["rank"], first["attempt"], first["count"]) == (1, 0, 1)
        assert first["text"] == "\x1b[2J225 steps\nare in <b>no</b> average."
    document = job.replicas("status", "mine", "--json").json
    assert (document["n_warnings"], [row["n_warnings"] for row in document["replicas"]]) == (2, [0, 2])
    assert [row["rank"] for row in document["warnings"]] == [1]


def test_events_are_lines_without_control_characters_and_objects_with_the_whole_text(job: HereInstead) -> None:
    job.launch("warns_job:main", "--arg", "ranks=[0,1]", "--run-id", "mine")
    lines = [line for line in job.replicas("events", "mine").stdout.splitlines() if " warning: " in line]
    assert sorted(line.partition("] ")[2] for line in lines) == [
        "rank 0 warning: 225 steps are in <b>no</b> average.",
        "rank 0 warning: of rank 0",
        "rank 1 warning: 225 steps are in <b>no</b> average.",
        "rank 1 warning: of rank 1",
    ]
    rows = [json.loads(line) for line in job.replicas("events", "mine", "--json").stdout.splitlines()]
    found = [row for row in rows if row["kind"] == "warning"]
    assert {row["count"] for row in found} == {1}
    assert all(row["why"].startswith("\x1b[2J225") for row in found if "225" in row["why"])
    followed = job.replicas("events", "mine", "-f").stdout
    assert followed.count(" warning: ") == 4
    report = job.replicas("report", "mine", "--json").json
    assert (report["n_warnings"], len(report["warnings"])) == (4, 3), "a warning of several ranks is shown once"
    assert report["warnings"][0]["ranks"] == [0, 1]
    assert any(each["text"].startswith("4 warnings, the first: ranks 0-1: 225 steps") for each in report["in_short"])


def test_a_run_without_warnings_shows_no_line_about_them(job: HereInstead) -> None:
    launched = job.launch("warns_job:main", "--arg", "ranks=[]", "--run-id", "mine")
    for shown in (launched, job.replicas("status", "mine"), job.replicas("events", "mine")):
        assert " warning" not in shown.stdout
    assert job.replicas("wait", "mine", "--json").json["warnings"] == []
