"""Two who resume one run in a cloud at the same time: each rank has one job more, and who came second ends none."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
from cli_of_tests import Folder
from overtaken import OvertakenInTheCloud
from resumers import resume_at_once, resumers
from servers.hub_faults import Request
from servers.hub_server import HubServer

from executors import Run, attach, launch
from executors.errors import AlreadyResumedError, LaunchError
from executors.resuming import resume
from executors.testing import eventually

N = 3
ROUNDS = 5

pytestmark = pytest.mark.usefixtures("quick_tries")


@pytest.fixture(autouse=True)
def _no_hardware(hf: HubServer) -> None:
    """Jobs are taken and do not start: what is asked for is enough here."""
    hf.hold("cpu-basic")


def living(hub: HubServer) -> list[tuple[str, str]]:
    """Return rank and attempt of the jobs that run or will."""
    labels = [job.labels for job in hub.jobs.newest_first() if not job.is_over]
    return sorted((label["replicas-rank"], label["replicas-attempt"]) for label in labels)


def cancelled(n: int = N, run_id: str | None = None) -> Run:
    """Launch a run and cancel it."""
    run = launch("hf", "job.py:main", n, run_id=run_id)
    run.cancel()
    return run


def creates(rank: int) -> Callable[[Request], bool]:
    return lambda request: bool(request.json["labels"]["replicas-rank"] == str(rank))


@pytest.mark.slow
def test_ranks_that_two_processes_resume_at_once_have_one_job_more(hf: HubServer) -> None:
    told = []
    with resumers(2) as started:
        for _ in range(ROUNDS):
            run = cancelled()
            told.append(resume_at_once(started, run))
            assert living(hf) == [(str(rank), "1") for rank in range(N)], told[-1]
            assert [state.status for state in attach(run.url).status().replicas] == ["pending"] * N
            run.cancel()
    assert hf.count("create") == 2 * N * ROUNDS
    assert all("resumed" in said for said in told)
    assert any("AlreadyResumedError" in line for said in told for line in said), "the two never met"


def test_who_comes_second_asks_for_nothing_and_is_told_who_was_first(hf: HubServer) -> None:
    run = cancelled(2, "otter")
    with pytest.raises(AlreadyResumedError, match=r"Ranks 0, 1 of run 'otter' are being resumed .*attempt 1, begun by"):
        resume(Run(run.store, "otter", executor=OvertakenInTheCloud()))
    assert living(hf) == [("0", "1"), ("1", "1")]
    assert hf.count("create") == 4


def test_a_resume_that_is_overtaken_in_part_goes_on_with_the_rest(
    hf: HubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(OvertakenInTheCloud, "by_ranks", [1])
    run = cancelled(3, "otter")
    resume(Run(run.store, "otter", executor=OvertakenInTheCloud()))
    assert "replicas: Rank 1 of run 'otter' is being resumed by another process" in capsys.readouterr().err
    assert living(hf) == [("0", "1"), ("1", "1"), ("2", "1")]


def test_a_resume_that_is_overtaken_in_part_and_fails_ends_its_own_jobs_alone(
    hf: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OvertakenInTheCloud, "by_ranks", [1])
    run = cancelled(3, "otter")

    def comes_last(request: Request) -> bool:
        if creates(2)(request):
            eventually(lambda: ("0", "1") in living(hf), "rank 0 has its job")
            return True
        return False

    hf.fail("create", 402, when=comes_last)
    with pytest.raises(LaunchError, match="replica 2 of 3"):
        resume(Run(run.store, "otter", executor=OvertakenInTheCloud()))
    assert living(hf) == [("1", "1")]
    states = attach("otter").status().replicas
    assert [(state.status, state.attempt) for state in states] == [("cancelled", 1), ("pending", 1), ("failed", 1)]


@pytest.mark.parametrize("was_heard", [False, True], ids=["before-the-vendor-heard", "before-the-answer"])
def test_a_resumer_that_is_killed_holds_no_rank_up(
    hf: HubServer, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, was_heard: bool
) -> None:
    folder = Folder(tmp_path_factory.mktemp("folder"))
    cancelled(1, "otter")
    victims: list[Any] = []

    def kill(request: Request) -> bool:
        victims[0].interrupt(signal.SIGKILL)
        return True

    hf.fail("create", "silent", after_applying=was_heard, when=kill)
    with folder.started("resume", "otter", "--detach") as resumer:
        victims.append(resumer)
        assert resumer.ends() == -signal.SIGKILL
    hf.forgive()
    hf.until(lambda: len(living(hf)) == was_heard)
    again = attach("otter")
    assert [(state.status, state.attempt) for state in again.status().replicas] == [("pending", 1)]
    if not was_heard:
        with pytest.raises(ValueError, match="no replica to resume: 1 pending"):
            resume(again)
        monkeypatch.setattr("executors.cloud.STALE_INTENT_S", 0)  # nobody waits that long here
        assert attach("otter").outcomes()[0].reason == "start_failed"
        resume(attach("otter"))
        assert living(hf) == [("0", "2")]
    else:
        assert living(hf) == [("0", "1")]
        assert hf.count("create") == 2
