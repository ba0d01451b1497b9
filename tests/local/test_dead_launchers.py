"""Launches and resumes that are killed before they have started a replica: nothing waits for a process that is dead."""

from __future__ import annotations

import json
import signal
from typing import NoReturn

import pytest
from support.cli import HereInstead
from support.runs import launcher

from executors import LocalProcessExecutor, Run, attach, launch
from executors.errors import ReplicaFailedError, RunExistsError
from executors.process import has_ended, identify_process, this_machine
from executors.restarts.decision_log import DecisionLog
from executors.restarts.orders import order_resume
from executors.run.resume import resume
from executors.run.run import view_of
from executors.store.records import to_bytes
from executors.testing import eventually

PLAIN = LocalProcessExecutor(preload=(), term_grace_s=0.5)
DEAD = f"{this_machine()} {2**31 - 1} 1"
ELSEWHERE = "another-machine 0000-1111 pid:[4026531836] 17 4711"


def test_a_process_is_known_to_have_ended_only_on_its_own_machine() -> None:
    assert not has_ended(identify_process())
    assert has_ended(DEAD)
    for other in (ELSEWHERE, "", "17 4711", f"{this_machine()} {10**9 * 9} 1", f"{this_machine()} 0 1", "\n"):
        assert not has_ended(other), other


@pytest.fixture
def unstarted() -> Run:
    """A run whose launcher was killed between `run.json` and the first replica."""
    with launcher("launch_and_die_before_any_replica", "otter") as process:
        process.wait(60)
    assert process.returncode == -signal.SIGKILL
    return attach("otter")


def test_a_run_whose_launcher_died_at_once_was_never_started(unstarted: Run, here: HereInstead) -> None:
    shown = here.replicas("status", "otter", "--json").json
    assert (shown["status"], [row["status"] for row in shown["replicas"]]) == ("failed", ["failed"] * 2)
    assert "was never started: the process" in here.replicas("status", "otter").stdout
    assert unstarted.wait(60), "wait() returns at once"
    with pytest.raises(ReplicaFailedError, match="was never started"):
        unstarted.results()
    assert here.replicas("rm", "otter").code == 0
    assert here.replicas("ls", "--json").json["runs"] == []


def test_a_run_that_was_never_started_can_be_resumed(unstarted: Run) -> None:
    assert resume(Run(view_of(unstarted).store, "otter", executor=PLAIN)).results() == [0, 1]


def test_elsewhere_a_run_without_replicas_may_still_be_launched(unstarted: Run, here: HereInstead) -> None:
    record = json.loads(bytes(view_of(unstarted).store.get("otter/run.json")))
    view_of(unstarted).store.put("otter/run.json", to_bytes({**record, "launcher": ELSEWHERE}))
    assert here.replicas("status", "otter", "--json").json["status"] == "pending"
    with pytest.raises(RunExistsError, match=r"only the machine of its launcher \(.*\) can tell"):
        attach("otter").remove()
    assert here.replicas("cancel", "otter").code == 0
    attach("otter").remove()


def fail() -> NoReturn:
    raise RuntimeError("not yet")


@pytest.mark.parametrize(("process", "awaited"), [(DEAD, False), (ELSEWHERE, True), (None, True)])
def test_a_resume_whose_process_is_dead_holds_no_rank_up(process: str | None, awaited: bool) -> None:
    run = launch(PLAIN, fail, 1, run_id="otter")
    eventually(lambda: run.status().is_terminal, "the run has ended")
    log = DecisionLog(view_of(run).store, "otter")
    assert order_resume(log, {0: 1}, 0) is None
    order = json.loads(bytes(view_of(run).store.get(log.key(0))))
    assert order["process"] == identify_process()
    view_of(run).store.put(log.key(0), to_bytes({**order, "process": process}))
    (state,) = attach("otter").status().replicas
    assert state.restart.is_awaited is awaited
    if awaited:
        with pytest.raises(RunExistsError, match="still runs"):
            attach("otter").remove()
    else:
        attach("otter").remove()
