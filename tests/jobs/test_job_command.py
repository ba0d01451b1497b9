"""The command, at a service that takes its time to start replicas, or refuses some."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.cli import Folder, HereInstead
from support.fake_jobs import FakeExecutor, Machines, attached, start

from executors import Run
from executors.attempt import replica_key
from executors.errors import ReplicaFailedError
from executors.run.run import view_of
from executors.status import RunStatus
from executors.testing import eventually
from executors.view.run_page import report_document

BACKEND = "support.fake_jobs:FakeExecutor"
LAUNCH = ("launch", "job.py:main", "--backend", BACKEND, "--run-id", "otter")
STATUS = ("status", "otter", "--backend", BACKEND)

pytestmark = pytest.mark.usefixtures("quick_tries")


@pytest.fixture
def command(machines: Machines, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> HereInstead:
    return HereInstead(Folder(Path.cwd()), monkeypatch, capsys)


def test_a_launch_that_fails_half_way_exits_with_1_and_one_that_starts_nothing_with_2(
    machines: Machines, command: HereInstead
) -> None:
    machines.fail("check_account", "rejected")
    assert command.replicas(*LAUNCH, "--n", 2).code == 2
    machines.fail("start", "rejected", rank=1)
    told = command.replicas(*LAUNCH, "--n", 2)
    assert told.code == 1, told
    assert "'fake' could not start replica 1 of 2" in told.stderr
    assert "See: replicas status otter" in told.stderr


def test_without_a_terminal_a_launch_prints_its_progress_from_time_to_time(
    machines: Machines, command: HereInstead, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executors.cli.output.QUIET_S", 0.01)
    monkeypatch.setattr("executors.cli.output.PROGRESS_EVERY_S", 0.01)
    machines.fail("start", when=lambda: time.sleep(0.3), rank=1)  # so that there is time to print it
    told = command.replicas(*LAUNCH, "--n", 2)
    assert told.code == 0, told
    assert "Starting 2 replicas of otter: 1 of 2 started …" in told.stderr.splitlines()


def test_a_run_in_which_enough_replicas_succeed_has_succeeded(machines: Machines, command: HereInstead) -> None:
    machines.fail("start", "rejected", rank=1)
    told = command.replicas(*LAUNCH, "--n", 3, "--min-replicas", 2, "--gather", "1m")
    assert told.code == 0, told
    assert "replicas: Rank 1 could not be started" in told.stderr
    assert "2 of 3 replicas succeeded; --min-replicas asks for 2. The others: rank 1 failed." in told.stdout
    status = command.replicas("status", "otter", "--backend", BACKEND, "--json").json
    assert (status["status"], status["exit_code"], status["min_replicas"]) == ("succeeded", 0, 2)
    assert attached().results() == [{"rank": 0}, None, {"rank": 2}]


def test_a_run_in_which_too_few_replicas_can_succeed_reports_that_and_fails(
    machines: Machines, command: HereInstead
) -> None:
    told = command.replicas(
        *LAUNCH[:1], "job.py:fail", *LAUNCH[2:], "--arg", "ranks=[0, 2]", "--n", 3, "--min-replicas", 2
    )
    assert told.code == 1, told
    assert "1 of 3 replicas succeeded; --min-replicas asks for 2." in told.stdout
    assert "only 1 of 3 succeeded, at least 2 were asked for" in command.replicas(*STATUS).stdout
    with pytest.raises(ReplicaFailedError):
        attached().results()


def test_the_table_shows_that_replicas_may_still_join(machines: Machines, command: HereInstead) -> None:
    decides = machines.hold(2)
    run = start(3, "hang", min_replicas=1, gather_s=0.1)
    for rank in (0, 1):
        eventually(lambda rank=rank: "hanging" in run.logs(rank=rank))  # type: ignore[misc]
    shown = command.replicas(*STATUS).stdout
    assert "1 pending, 2 running; started with 2 of 3; 1 may still join" in shown
    decides.set()
    run.cancel()


def test_the_pages_of_jobs_are_shown(machines: Machines, command: HereInstead) -> None:
    run = start(2)
    assert run.wait(60)
    pages = [f"https://fake.example/{machines.job_of(run, rank).id}" for rank in range(2)]
    assert [row["page"] for row in command.replicas(*STATUS, "--json").json["replicas"]] == pages
    assert "https://" not in command.replicas(*STATUS).stdout
    assert f"rank 1: {pages[1]}" in command.replicas(*STATUS, "-v").stdout.splitlines()
    assert [row["page"] for row in report_document(view_of(run))["replicas"]] == pages


def test_a_page_is_shown_with_its_rank_where_others_joined_or_are_added_during_the_look(
    machines: Machines, command: HereInstead, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, look = start(1, "hang"), Run.status
    view_of(run).store.put(replica_key("otter", 1, 0, "started.json"), b'{"nonce": "joined by itself"}')

    def look_before_somebody_adds(self: Run) -> RunStatus:
        now = look(self)
        monkeypatch.setattr(Run, "status", look)
        assert run.add(FakeExecutor(), 1) == [2]
        look(self)  # a reader of handles would find that one is missing
        return now

    monkeypatch.setattr(Run, "status", look_before_somebody_adds)
    pages = [row["page"] for row in command.replicas(*STATUS, "--json").json["replicas"]]
    assert pages == [f"https://fake.example/{machines.job_of(run, 0).id}"]
    shown = command.replicas(*STATUS, "-v").stdout.splitlines()
    assert [line for line in shown if "https://" in line] == [
        f"rank {rank}: https://fake.example/{machines.job_of(run, rank).id}" for rank in (0, 2)
    ]
    run.cancel()


def test_a_number_of_replicas_that_cannot_be_enough_is_refused(machines: Machines, command: HereInstead) -> None:
    for enough in (0, 4):
        told = command.replicas(*LAUNCH, "--n", 3, "--min-replicas", enough)
        assert (told.code, f"min_replicas must be from 1 to n=3, got min_replicas={enough}" in told.stderr) == (2, True)
