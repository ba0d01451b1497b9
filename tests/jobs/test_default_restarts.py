"""A launch without `restarts` still restarts replicas whose machine the service took back, because these restarts are
free.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.cli import Folder, HereInstead
from support.fake_jobs import FakeExecutor, FakeJobs, Machines, start, wait_until_hanging

from executors import Run
from executors.replica import SETTINGS
from executors.restarts.decision_log import DecisionLog
from executors.run.resume import resume
from executors.run.run import view_of
from executors.settings import Settings
from executors.settings.policy import Restarts, supervised
from executors.testing import eventually


@pytest.fixture(autouse=True)
def _tells_preemption(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeJobs, "reports_preemption", lambda self, gpu: True)


@contextmanager
def waited_for(run: Run) -> Iterator[None]:
    """Wait for a run in another thread within the block, as a launching process does, and then end the run."""
    waiting = threading.Thread(target=run.wait, args=(120,))
    waiting.start()
    try:
        yield
    finally:
        run.cancel()
        waiting.join()


def test_a_replica_whose_machine_was_taken_back_comes_back_by_itself(machines: Machines) -> None:
    run = start(2, "hang")
    assert view_of(run).record.settings.restarts == "preempted"
    with waited_for(run):
        wait_until_hanging(run)
        machines.end(machines.job_of(run, 1), "preempted")
        eventually(lambda: machines.living() == [(0, 0), (1, 1)], "rank 1 is started again")


@pytest.mark.parametrize("reason", ["oom", "lost", None])
def test_no_other_end_causes_a_restart(machines: Machines, reason: str | None) -> None:
    run = start(1, "hang")
    with waited_for(run):
        wait_until_hanging(run)
        machines.end(machines.job_of(run, 0), reason)  # type: ignore[arg-type]
        eventually(lambda: run.status().is_terminal, "the run has ended")
        assert machines.living() == []
        assert [outcome.attempt for outcome in run.outcomes()] == [0]


@pytest.mark.parametrize(("restarts", "recorded"), [("none", None), ("2", "2")])
def test_a_restarts_setting_of_the_user_replaces_the_default(
    machines: Machines, restarts: str, recorded: str | None
) -> None:
    run = start(1, "main", restarts=restarts)
    assert view_of(run).record.settings.restarts == recorded
    assert run.wait(60)


def test_a_detached_run_has_no_such_restarts_because_no_one_waits_for_it(machines: Machines) -> None:
    run = start(1, "main", detach=True)
    assert view_of(run).record.settings.restarts is None
    assert run.wait(60)


@pytest.mark.parametrize("restarts", ["preempted", "none"])
def test_a_preempted_rank_of_a_detached_run_comes_back_when_a_user_watches_with_a_policy_that_allows_it(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], restarts: str
) -> None:
    run = start(1, "hang", detach=True)
    wait_until_hanging(run)
    machines.end(machines.job_of(run, 0), "preempted")
    eventually(lambda: run.status().is_terminal, "the run ends, because no process restarts the rank")
    here = HereInstead(Folder(Path.cwd()), monkeypatch, capsys)
    fake = f"{FakeExecutor.__module__}:{FakeExecutor.__name__}"
    told = here.replicas("watch", "otter", "--once", "--restarts", restarts, "--backend", fake)
    assert told.code == 0, told
    assert machines.living() == ([(0, 1)] if restarts == "preempted" else [])


def restarts_nothing(environ: Mapping[str, str]) -> bool:
    """Return True if the supervisor in a container with this environment restarts nothing."""
    settings = Settings.parse(environ[SETTINGS].encode(), SETTINGS)
    policy = Restarts.of(supervised(settings.restarts))
    return policy is None or policy.nothing


@pytest.mark.parametrize("restarts", ["none", Restarts.parse("none")], ids=["text", "object"])
def test_a_resume_can_switch_restarts_off_for_a_run_that_was_launched_with_them(
    machines: Machines, restarts: str | Restarts
) -> None:
    run = start(1, "hang", restarts=3)
    machines.end(machines.job_of(run, 0), "preempted")
    assert run.status().replicas[0].restart.limit == 3
    run.cancel()
    resumed = resume(run, restarts=restarts)
    with waited_for(resumed):
        wait_until_hanging(resumed)
        assert restarts_nothing(machines.job_of(resumed, 0).job.env)
        machines.end(machines.job_of(resumed, 0), "preempted")
        eventually(lambda: resumed.status().is_terminal, "the run has ended")
    assert machines.living() == []
    policy = next(entry for entry in DecisionLog(view_of(run).store, "otter").read() if entry.kind == "policy")
    assert policy.restarts == "none"
    assert "from here on: restarts none" in [each.line for each in resumed.status().decided]


def test_a_replicas_own_supervisor_continues_without_a_policy(machines: Machines) -> None:
    start(1, "main").wait(60)
    (job,) = machines.jobs
    assert restarts_nothing(job.job.env), (
        "the supervisor of a replica gets no policy, because a policy would end an idle replica"
    )


def test_the_policy_is_read_as_it_is_written() -> None:
    assert str(Restarts.parse("preempted")) == "preempted"
    assert Restarts.parse("preempted").only_preempted
    assert str(Restarts.parse("none")) == "none"
    assert not Restarts.parse("none").answers("preempted", was_refused=True)
