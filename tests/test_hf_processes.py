"""Launchers of Hugging Face Jobs as processes of their own: killed, interrupted, two at once, on other machines."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from cli_of_tests import Folder
from servers.hub_faults import Request
from servers.hub_server import HubServer

from executors import HFJobsExecutor, attach, launch
from executors.testing import eventually

pytestmark = pytest.mark.slow

CPU = "cpu-basic"


@pytest.fixture
def folder(hf: HubServer) -> Folder:
    return Folder(Path.cwd())


def living(hub: HubServer) -> list[str]:
    return sorted(job.labels["replicas-rank"] for job in hub.jobs.newest_first() if not job.is_over)


def is_of_rank_1(request: Request) -> bool:
    return bool(request.json["labels"]["replicas-rank"] == "1")


def detached(n: int) -> list[Any]:
    return ["launch", "job.py:main", "--backend", "hf", "--n", n, "--run-id", "otter", "--detach"]


def test_a_job_whose_launcher_was_killed_before_the_answer_is_found_by_its_labels(
    hf: HubServer, folder: Folder
) -> None:
    hf.hold(CPU)
    hf.fail("create", "silent", after_applying=True, when=is_of_rank_1)
    with folder.started(*detached(2)) as launcher:
        eventually(lambda: living(hf) == ["0", "1"])
        launcher.interrupt(signal.SIGKILL)
        launcher.ends()
    hf.forgive()
    run = attach("otter")
    ids = [handle.metadata["job"]["id"] for handle in run.handles]
    assert [hf.job(job_id).labels["replicas-rank"] for job_id in ids] == ["0", "1"]
    assert run.status().counts == "2 pending"
    hf.release(CPU)
    assert run.results() == [{"rank": 0}, {"rank": 1}]
    assert hf.count("create") == 2


def test_a_launcher_killed_before_the_vendor_heard_of_a_rank_leaves_a_run_that_can_be_ended_and_resumed(
    hf: HubServer, folder: Folder
) -> None:
    hf.hold(CPU)
    hf.fail("create", "silent", when=is_of_rank_1)
    with folder.started(*detached(2)) as launcher:
        eventually(lambda: hf.count("create") == 2 and living(hf) == ["0"])
        launcher.interrupt(signal.SIGKILL)
        launcher.ends()
    hf.forgive()
    assert "2 pending" in folder.replicas("status", "otter").stdout
    told = folder.replicas("cancel", "otter")
    assert told.code == 0, told
    assert [(outcome.status, outcome.reason) for outcome in attach("otter").outcomes()] == [
        ("cancelled", "cancelled")
    ] * 2
    assert living(hf) == []
    hf.release(CPU)
    resumed = folder.replicas("resume", "otter", "--json")
    assert resumed.code == 0, resumed
    assert [outcome.attempt for outcome in attach("otter").outcomes()] == [1, 1]


def test_one_run_launched_twice_at_the_same_time_is_started_once(hf: HubServer, folder: Folder) -> None:
    hf.hold(CPU)
    with ExitStack() as stack:
        launchers = [stack.enter_context(folder.started(*detached(2))) for _ in range(2)]
        assert sorted(launcher.ends() for launcher in launchers) == [0, 2]
        assert sum("Run 'otter' exists" in launcher.output for launcher in launchers) == 1
    assert living(hf) == ["0", "1"]
    assert hf.count("create") == 2
    third = folder.replicas(*detached(2))
    assert (third.code, hf.count("create")) == (2, 2)
    attach("otter").cancel()


def test_an_interrupt_in_the_middle_of_a_launch_ends_what_was_started(hf: HubServer, folder: Folder) -> None:
    hf.hold(CPU)
    hf.fail("create", "silent", after_applying=True, when=is_of_rank_1)
    with folder.started(*detached(4)) as launcher:
        eventually(lambda: len(living(hf)) == 4)
        launcher.interrupt()
        eventually(lambda: living(hf) == [])
        hf.forgive()
        assert launcher.ends() == 130, launcher.output
    assert living(hf) == []
    assert {outcome.status for outcome in attach("otter").outcomes()} == {"cancelled"}
    assert hf.count("create") == 4


def test_another_machine_follows_cancels_and_collects_with_the_url_alone(
    hf: HubServer, folder: Folder, tmp_path: Path
) -> None:
    run = launch("hf", "job.py:hang", 2, args={"ranks": [1]})
    eventually(lambda: "hanging" in run.logs(rank=1))
    elsewhere = {"XDG_STATE_HOME": str(tmp_path / "elsewhere"), "REPLICAS_RENDEZVOUS": ""}
    eventually(lambda: run.status().counts == "1 running, 1 succeeded")
    status = folder.replicas("status", run.url, "--json", environ=elsewhere).json
    assert [row["status"] for row in status["replicas"]] == ["succeeded", "running"]
    assert folder.replicas("logs", run.url, environ=elsewhere).stdout == "[1] hanging\n"
    assert folder.replicas("cancel", run.url, "--rank", 1, environ=elsewhere).code == 0
    collected = folder.replicas("collect", run.url, "--json", environ=elsewhere)
    assert [row["status"] for row in collected.json["replicas"]] == ["succeeded", "cancelled"], collected


def test_a_run_is_resumed_as_it_was_launched(hf: HubServer, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALWAYS", "a secret")
    monkeypatch.setenv("ONCE", "another")
    options: dict[str, Any] = {"flavor": "cpu-upgrade", "labels": {"team": "ml"}, "image": "python:3.11-slim"}
    executor = HFJobsExecutor(secrets=["ALWAYS"], **options)
    run = launch(executor, "job.py:fail", 2, args={"ranks": [1]}, secrets=["ONCE"], timeout=500, run_id="otter")
    assert run.wait(60)
    (folder.path / "job.py").write_text("raise ImportError('what was launched is run again, not this')")
    resumed = folder.replicas("resume", "otter", "--json")
    assert resumed.code == 1, resumed
    assert [(outcome.attempt, outcome.reason) for outcome in attach("otter").outcomes()] == [
        (0, None),
        (1, "exception"),
    ]
    second, *first = hf.jobs.newest_first()
    assert [job.labels["replicas-rank"] for job in (second, *first)].count("1") == 2
    one = next(job for job in first if job.labels["replicas-rank"] == "1")
    changing = {"labels", "environment"}
    assert {k: v for k, v in second.spec.items() if k not in changing} == {
        k: v for k, v in one.spec.items() if k not in changing
    }
    assert second.spec["secrets"].items() >= {"ALWAYS": "a secret", "ONCE": "another"}.items()
    assert second.labels == {**one.labels, "replicas-attempt": "1", "name": one.labels["name"].replace("-a0", "-a1")}
    again = launch(
        executor, "job.py:fail", 2, run_id="otter", rendezvous=run.store.url, timeout=500, secrets=["ONCE"], resume=True
    )
    assert again.wait(60)
    assert [outcome.attempt for outcome in again.outcomes()] == [0, 2]
