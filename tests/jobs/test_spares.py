"""Tests spares: additional containers that take over ranks whose containers were lost."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from servers.modal.server import ModalServer
from support.cli import Folder, HereInstead
from support.fake_jobs import FakeExecutor, Machines, attached, start

from executors import Run, launch
from executors.attempt import Attempt
from executors.restarts.decision_log import Decision, DecisionLog
from executors.run.run import view_of
from executors.testing import eventually

MAIN = """
import itertools, time
from executors import current_replica

def main():
    replica = current_replica()
    for step in itertools.count():
        replica.report(step=step)
        if any(replica.store.list(f"{replica.run_id}/go")):
            return replica.attempt
        time.sleep(0.1)
"""
SOON = {"REPLICA_LOST_AFTER_S": "4"}


def spare_of(run: Run, number: int = 0) -> Attempt:
    return Attempt(view_of(run).store, run.run_id, number, is_spare=True)


def stands_by(run: Run) -> Run:
    """Wait until the ranks and the spare have started."""
    eventually(lambda: spare_of(run).has("heartbeat.json"), "the spare stands by")
    ranks = [Attempt(view_of(run).store, run.run_id, rank) for rank in range(view_of(run).world_size)]
    eventually(lambda: all(rank.has("heartbeat.json") for rank in ranks), "the ranks run")
    return run


def starts(n: int = 1, **more: Any) -> Run:
    """Launch replicas that run until the test ends them, and a spare."""
    Path("job.py").write_text(MAIN)
    return stands_by(start(n, restarts="2,backoff=0s", spares=1, **more))


def end_well(run: Run) -> None:
    view_of(run).store.put(f"{run.run_id}/go", b"")


def log_of(run: Run) -> list[Decision]:
    return list(DecisionLog(view_of(run).store, run.run_id).read())


def outcome_of_spare(run: Run) -> tuple[str, Any]:
    eventually(lambda: spare_of(run).has("outcome.json"), "the spare ends")
    outcome = spare_of(run).outcome()
    assert outcome is not None
    return str(outcome.status), outcome.result or outcome.error


def test_a_spare_of_a_detached_run_finds_a_rank_lost_and_takes_it_over_without_a_word_of_the_service(
    modal_runs: ModalServer,
) -> None:
    Path("job.py").write_text(MAIN)
    more: Any = {"restarts": "2,backoff=0s", "spares": 1, "detach": True, "env": SOON}
    run = launch("modal", "job.py:main", 2, run_id="otter", **more)
    stands_by(run)
    n_jobs, job = len(modal_runs.sandboxes), view_of(run).reader.handles.of(1).metadata["job"]
    modal_runs.kill(job["sandbox_id"], signal.SIGKILL)
    second = Attempt(view_of(run).store, run.run_id, 1, 1)
    eventually(lambda: second.has("heartbeat.json"), "the spare is rank 1", within_s=60)
    assert [(e.kind, e.start, e.how, e.reason) for e in log_of(run)] == [("restart", {1: 1}, "spare:0", "lost")]
    assert outcome_of_spare(run) == ("succeeded", "rank 1, attempt 1")
    assert str(view_of(run).executor.poll(view_of(run).reader.handles.of(1))) == "running"
    end_well(run)
    assert run.results() == [0, 1]
    assert len(modal_runs.sandboxes) == n_jobs == 3


def test_a_process_that_watches_a_run_names_the_spare_and_starts_nothing(machines: Machines) -> None:
    run = starts()
    thread = threading.Thread(target=run.wait, args=(120,))
    thread.start()
    machines.end(machines.job_of(run, 0))
    eventually(lambda: Attempt(view_of(run).store, run.run_id, 0, 1).has("heartbeat.json"), "the spare is rank 0")
    end_well(run)
    thread.join()
    assert run.results() == [1]
    assert [(e.kind, e.start, e.how) for e in log_of(run)] == [("restart", {0: 1}, "spare:0")]
    assert len(machines.jobs) == 2


def test_an_attempt_of_a_spare_can_be_seen_followed_and_cancelled(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = HereInstead(Folder(Path.cwd()), monkeypatch, capsys)
    status = ("status", "otter", "--backend", "support.fake_jobs:FakeExecutor")
    run = starts(detach=True, env=SOON)
    assert "\nspare 0 stands by\n" in command.replicas(*status).stdout
    machines.end(machines.job_of(run, 0))
    eventually(lambda: Attempt(view_of(run).store, run.run_id, 0, 1).has("heartbeat.json"), "the spare is rank 0")
    outcome_of_spare(run)
    assert command.replicas(*status, "--json").json["spares"] == ["became rank 0, attempt 1"]
    found = attached()
    assert "spare 0 becomes rank 0, attempt 1" in found.logs(rank=0)
    found.cancel()
    assert [str(outcome.status) for outcome in found.outcomes()] == ["cancelled"]
    assert machines.living() == []
    view_of(run).store.put(key := spare_of(run).key("outcome.json"), b"{")
    assert f"spare 0 cannot be read: '{key}'" in command.replicas(*status).stdout


@pytest.mark.parametrize("ending", ["cancel", "success"])
def test_a_spare_ends_with_its_run(machines: Machines, ending: str) -> None:
    run = starts(env=SOON)
    if ending == "cancel":
        run.cancel()
    else:
        end_well(run)
        assert run.results() == [0]
    status, why = outcome_of_spare(run)
    # A cancel ends the container as well, which may be first.
    reasons = ["the run has ended"] + ["its container got the signal to end"] * (ending == "cancel")
    assert (status, why) in [("cancelled", f"The spare ended: {reason}.") for reason in reasons]
    eventually(lambda: machines.living() == [], "the job of the spare has ended")
    assert view_of(run).record.settings.spares == 1


def test_a_spare_that_is_not_available_is_a_warning(machines: Machines, capsys: pytest.CaptureFixture[str]) -> None:
    Path("job.py").write_text(MAIN)
    machines.fail("start", "rejected", when=lambda: machines.jobs)
    run = start(1, restarts="2", spares=1, detach=True)
    assert "the run has no spare: Backend 'fake' could not start spare 0" in capsys.readouterr().err
    end_well(run)
    assert run.results() == [0]


@pytest.mark.parametrize(("backend", "says"), [("local", "has no spares"), ("fake", "Add restarts")])
def test_spares_are_refused_if_they_cannot_help(machines: Machines, backend: str, says: str) -> None:
    Path("job.py").write_text(MAIN)
    executor, restarts = (FakeExecutor(), None) if backend == "fake" else (backend, "2")
    with pytest.raises(ValueError, match=says):
        launch(executor, "job.py:main", 1, restarts=restarts, spares=1)
    assert machines.jobs == []
