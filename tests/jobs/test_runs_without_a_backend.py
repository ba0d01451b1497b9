"""Tests runs on several backends if a backend is not installed here, or the launch was interrupted."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.cli import Folder
from support.fake_jobs import FakeExecutor, Machines

from executors import LocalProcessExecutor, Run, attach, launch
from executors.attempt import Attempt
from executors.errors import BackendError, LaunchError
from executors.launcher.several_backends import executor_of
from executors.registry import get_executor
from executors.restarts.decision_log import DecisionLog
from executors.run.resume import resume
from executors.run.run import view_of
from executors.settings.run_spec import StartSpec
from executors.store import store_at
from executors.store.added_ranks import added_key
from executors.store.records import exists, to_bytes
from executors.task.addition_record import read_additions
from executors.testing import eventually

LOCAL: Any = {"preload": (), "term_grace_s": 0.5}
WAITS = "import time\nfrom pathlib import Path\ndef main(go):\n    while not Path(go).exists(): time.sleep(0.02)\n"


@pytest.fixture
def go(machines: Machines, tmp_path: Path) -> Path:
    """The file that the replicas of `job.py` wait for."""
    Path("job.py").write_text(WAITS)
    return tmp_path / "go"


def waiting(go: Path, **more: Any) -> Run:
    return launch(LocalProcessExecutor(**LOCAL), "job.py:main", 1, run_id="otter", args={"go": str(go)}, **more)


def test_an_interrupt_in_the_middle_of_a_launch_leaves_no_job_that_waits_for_a_machine(
    machines: Machines, go: Path
) -> None:
    machines.is_held = True
    decides = machines.hold(2)

    def interrupt() -> None:
        eventually(lambda: machines.count("start") == 2, "both jobs are requested")
        os.kill(os.getpid(), signal.SIGINT)
        run = attach("otter", executor=FakeExecutor())
        eventually(
            lambda: all(view_of(run).newest_attempt(rank).has("cancel.json") for rank in range(3)),
            "all ranks have a cancel marker",
        )
        decides.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    spread = executor_of(
        "local:1,support.fake_jobs:FakeExecutor:2", lambda name: get_executor(name, LOCAL if name == "local" else {})
    )
    with pytest.raises(KeyboardInterrupt):
        launch(spread, "job.py:main", 3, run_id="otter", args={"go": str(go)})
    thread.join()
    assert machines.living() == []
    run = attach("otter", executor=FakeExecutor())
    assert run.wait(60)
    assert {str(each.status) for each in run.status().replicas} <= {"cancelled", "failed"}


def ended_on_two(go: Path) -> Run:
    """A run with rank 0 here and ranks 1 and 2 at the service, all cancelled."""
    spread = executor_of(
        "local:1,support.fake_jobs:FakeExecutor:2", lambda name: get_executor(name, LOCAL if name == "local" else {})
    )
    run = launch(spread, "job.py:main", 3, run_id="otter", args={"go": str(go)}, detach=True)
    run.cancel()
    assert run.wait(60)
    return run


class Overtaken(FakeExecutor):
    """An executor that lets another process begin attempt 1 of rank 1 just before it does so itself."""

    def start_ranks(self, start: StartSpec, *more: Any) -> Any:
        run = start.spec
        theirs = Attempt(store_at(run.store_url), run.run_id, 1, 1)
        theirs.store.put(theirs.key("intent.json"), to_bytes({"nonce": "x", "by": "elsewhere:1", "at": time.time()}))
        return super().start_ranks(start, *more)


@pytest.mark.parametrize("is_interrupted", [False, True], ids=["refused", "interrupted"])
def test_a_mixed_resume_that_is_overtaken_and_refused_leaves_the_others_attempts_alone(
    machines: Machines, go: Path, is_interrupted: bool
) -> None:
    run = ended_on_two(go)

    def interrupt() -> bool:
        eventually(
            lambda: Attempt(view_of(run).store, "otter", 1, 1).has("intent.json"),
            "another process has begun attempt 1 of rank 1",
        )
        os.kill(os.getpid(), signal.SIGINT)
        eventually(
            lambda: Attempt(view_of(run).store, "otter", 2, 1).has("cancel.json"),
            "the attempt of this process has a cancel marker",
        )
        return False

    machines.fail("start", "rejected", rank=2, when=interrupt if is_interrupted else None)
    with pytest.raises(KeyboardInterrupt if is_interrupted else LaunchError):
        resume(attach("otter", executor=Overtaken()), detach=True)
    assert machines.living() == []
    theirs = Attempt(view_of(run).store, "otter", 1, 1)
    assert [theirs.has(f"{name}.json") for name in ("intent", "cancel", "outcome")] == [True, False, False]
    assert all(Attempt(view_of(run).store, "otter", rank, 1).has("cancel.json") for rank in (0, 2))
    eventually(Attempt(view_of(run).store, "otter", 0, 1).outcome, "the attempt that this resume started has ended")


def test_a_resume_starts_nothing_if_one_backend_is_missing(machines: Machines, go: Path) -> None:
    run = ended_on_two(go)
    n_decided = len(DecisionLog(view_of(run).store, "otter").read())
    advice = r"Ranks 1-2 of run 'otter' cannot be started here, .*replicas resume otter --rank 0, or ranks="
    with pytest.raises(BackendError, match=advice):
        resume(attach("otter"), restarts=3)
    assert len(DecisionLog(view_of(run).store, "otter").read()) == n_decided, "the decision log has no new entry"
    ranks = [Attempt(view_of(run).store, "otter", rank) for rank in range(3)]
    assert [rank.newest().number for rank in ranks] == [0, 0, 0]
    go.touch()
    resume(attach("otter"), ranks=[0])
    eventually(ranks[0].at(1).outcome, "the attempt has ended")
    assert [rank.newest().number for rank in ranks] == [1, 0, 0]


def test_a_process_that_added_ranks_can_watch_and_resume_them_without_the_backend_of_the_launch(
    machines: Machines, go: Path
) -> None:
    run = launch(FakeExecutor(), "job.py:main", 1, run_id="otter", args={"go": str(go)}, detach=True, restarts="1")
    assert run.add(LocalProcessExecutor(**LOCAL), 1, detach=True) == [1]
    added = Attempt(view_of(run).store, "otter", 1)
    eventually(lambda: added.has("started.json"), "the added rank runs")
    attach("otter").cancel(1)  # from here on, no installed package registers the backend of the launch
    assert resume(attach("otter"), ranks=[1], detach=True).status().replicas[1].attempt == 1
    assert attach("otter").logs(1) == ""
    watched = Folder(Path.cwd()).replicas("watch", "otter", "--once")
    assert watched.code == 0, watched
    go.touch()
    assert run.wait(60)


@pytest.mark.parametrize("record", ["intent", "handle"])
def test_a_rank_on_a_backend_that_is_not_available_here_hides_no_other_and_is_cancelled(go: Path, record: str) -> None:
    run = waiting(go, detach=True)
    view_of(run).store.put(added_key("otter", 0), to_bytes({"backend": "elsewhere", "ranks": [1], "nonce": "x"}))
    place = {"store_url": view_of(run).store.url, "run_id": "otter", "attempt": 0}
    left = {
        "intent": {"nonce": "n", "by": "b", "at": 1.0},
        "handle": {"rank": 1, "backend_name": "elsewhere", "metadata": place},
    }
    view_of(run).store.put(f"otter/replicas/0001/0/{record}.json", to_bytes(left[record]))
    seen = attach("otter")
    assert [(each.rank, each.backend) for each in seen.status().replicas] == [(0, "local"), (1, "elsewhere")]
    assert ("elsewhere" in seen.logs()) == (record == "handle"), "the message names the place of the log"
    seen.cancel()
    assert seen.wait(60)
    assert [str(each.status) for each in seen.status().replicas] == ["cancelled", "cancelled"]


def test_replicas_that_cannot_be_recorded_are_refused_and_nothing_is_written(go: Path) -> None:
    run = waiting(go)
    with pytest.raises(ValueError, match=r"cannot be recorded: .*timeout_s"):
        run.add(LocalProcessExecutor(**LOCAL), 1, timeout=math.inf)
    assert list(view_of(run).store.list("otter/added/")) == []
    go.touch()
    assert run.wait(60)


def test_threads_that_look_at_once_count_each_addition_once(go: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = waiting(go)
    for k, rank in enumerate((1, 2)):
        record = {"backend": "local", "ranks": [rank], "nonce": f"n{k}"}
        view_of(run).store.put(added_key("otter", k), to_bytes(record))
    both_read = threading.Barrier(2)

    def slowly(*args: Any) -> Any:
        found = list(read_additions(*args))
        with ThreadPoolExecutor(1):  # another thread may act between these two calls
            both_read_if_unguarded(both_read)
        return found

    monkeypatch.setattr("executors.registry.run_placements.read_additions", slowly)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: view_of(run).placements.read_added(), range(2)))
    assert list(view_of(run).placements.ranks) == [0, 1, 2]
    go.touch()
    assert run.wait(60)


def both_read_if_unguarded(barrier: threading.Barrier) -> None:
    try:
        barrier.wait(0.2)
    except threading.BrokenBarrierError:  # one start at a time
        barrier.reset()


def test_a_spare_with_the_number_of_a_rank_that_was_added_elsewhere_takes_another_over(
    machines: Machines, go: Path
) -> None:
    run = launch(FakeExecutor(), "job.py:main", 1, run_id="otter", args={"go": str(go)}, restarts="3", spares=2)
    spares = [f"otter/spares/{number:04}/0/started.json" for number in (0, 1)]
    eventually(lambda: all(exists(view_of(run).store, spare) for spare in spares), "the spares wait")
    run.add(LocalProcessExecutor(**LOCAL), 1)
    machines.end(machines.jobs[1])  # the first spare
    machines.end(machines.job_of(run, 0), "preempted")
    waits = threading.Thread(target=run.wait, args=(60,))
    waits.start()
    eventually(
        lambda: view_of(run).newest_attempt(0).at(1).has("started.json"),
        "the spare has claimed the next attempt",
        within_s=30,
    )
    go.touch()
    waits.join()
    assert [str(each.status) for each in run.status().replicas] == ["succeeded"] * 2
