"""Tests the duties that only the supervisor of a container has, and not the supervisor of a local run."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.new_runs import run_spec

from executors import open_store
from executors.attempt import Attempt, Beat
from executors.process import oom_kills_in_group, oom_kills_in_own_group
from executors.protocol import Outcome, ReplicaStatus, WarningCount
from executors.replica import Replica
from executors.replica.shared_page import SharedPage
from executors.restarts.decision_log import Decision, DecisionLog
from executors.restarts.orders import order_cancel
from executors.settings.policy import HangLimits
from executors.supervisor.container import BEAT_LATE_S, ContainerStarter, ContainerSupervisor, imports_torch
from executors.supervisor.processes import NEVER, STUCK_S, RunningAttempt
from executors.supervisor.watchdog import Watchdog
from executors.task.record import TaskRecord
from executors.task.stored import StoredTask
from executors.worker import main
from executors.worker.heartbeat import Heartbeat

WARNED_OF = WarningCount(2, "the first", 0.5)


def supervised(folder: Path, restarts: str | None = None) -> tuple[ContainerSupervisor, Attempt, SharedPage]:
    """Return the supervisor of a rank that has claimed its attempt and beaten once, and the page of that rank."""
    store = open_store(folder)
    spec = run_spec("run", store.url, "00", 1, (0,), restarts=restarts)
    supervisor = ContainerSupervisor(
        spec, ContainerStarter(spec, term_grace_s=1, gpu=None), timeout_s=None, term_grace_s=1, notice_s=1
    )
    page, attempt = SharedPage(), Attempt(store, "run", 0)
    attempt.store.put(attempt.key("heartbeat.json"), Beat(1.0, {"step": 7}, WARNED_OF).to_bytes())
    watchdog = Watchdog(page, os.getpid(), HangLimits(), ends=True, term_grace_s=1, spec=spec, rank=0)
    supervisor._running[1] = RunningAttempt(1, attempt.at(0), page, watchdog, time.time(), NEVER)
    page.claimed = 1
    return supervisor, attempt, page


@pytest.mark.parametrize(("late_s", "beats"), [(BEAT_LATE_S + 1, True), (BEAT_LATE_S - 5, False)])
@pytest.mark.parametrize("late", ["beat", "beaten"], ids=["does not get its GIL", "waits for the store"])
def test_a_supervisor_writes_heartbeats_for_a_rank_that_cannot(
    tmp_path: Path, late: str, late_s: float, beats: bool
) -> None:
    supervisor, attempt, page = supervised(tmp_path)
    setattr(page, late, time.monotonic() - late_s)
    supervisor._check_store()
    beat = attempt.beat()
    assert beat is not None
    assert (beat.reported, beat.warned) == ({"step": 7}, WARNED_OF)
    assert (beat.at > 1.0) is beats


def test_a_supervisor_does_not_beat_for_a_rank_that_beats_no_more(tmp_path: Path) -> None:
    """The rank may take long to end, and a user may delete the run meanwhile."""
    supervisor, attempt, page = supervised(tmp_path)
    replica = Replica(0, 1, "run", 0, attempt.store.url, claimed_nonce="n")
    replica.page = page
    page.beaten = time.monotonic() - BEAT_LATE_S - 1
    Heartbeat(replica).stop()
    supervisor._check_store()
    beat = attempt.beat()
    assert beat is not None
    assert beat.at == 1.0


def test_a_supervisor_beats_for_a_rank_whose_result_waits_for_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a spare or a reader would record the rank as lost, and its result would come too late."""
    supervisor, attempt, page = supervised(tmp_path)
    worker = main._Worker(main.Assignment(supervisor._spec, 0, page=page))
    outcome = worker.succeeded("the result")
    worker.stop(outcome)
    now = time.monotonic()

    def look(after_s: float) -> float:
        page.beat = now + after_s
        monkeypatch.setattr(time, "monotonic", lambda: now + after_s)
        supervisor._check_store()
        beat = attempt.beat()
        return 0.0 if beat is None else beat.at

    def retry(act: Callable[[], Outcome], *_: object, **__: object) -> Outcome:
        beats.append(look(BEAT_LATE_S + 1))
        return act()

    beats = [look(0.0)]
    monkeypatch.setattr(main, "retry", retry)
    worker.record(outcome)
    beats.append(look(2 * BEAT_LATE_S + 100))
    assert beats[0] < beats[1] == beats[2]


def test_a_supervisor_does_not_make_the_folder_of_a_deleted_run_again(tmp_path: Path) -> None:
    supervisor, _, page = supervised(tmp_path)
    shutil.rmtree(tmp_path / "run")
    page.beat = page.beaten = time.monotonic() - BEAT_LATE_S - 1
    supervisor._check_store()
    assert not (tmp_path / "run").exists()


def test_a_supervisor_whose_directory_cannot_be_looked_at_keeps_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor, attempt, page = supervised(tmp_path)
    look, folder = os.stat, tmp_path / "run"

    def stat(path: Any, **how: Any) -> os.stat_result:
        if path == folder:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return look(path, **how)

    page.beaten = time.monotonic() - BEAT_LATE_S - 1
    monkeypatch.setattr(os, "stat", stat)
    supervisor._check_store()
    beat = attempt.beat()
    assert beat is not None
    assert beat.at > 1.0, "the supervisor keeps its rank, because the run is not known to be deleted"


@pytest.mark.parametrize(
    ("own", "files", "count", "count_of_own"),
    [
        ("0::/", {"memory.events": "low 0\noom 3\noom_kill 2\n"}, 2, 2),
        ("0::/box/job", {"box/job/memory.events": "oom_kill 1\n", "memory.events": "oom_kill 9\n"}, 1, 1),
        ("0::/box/job", {"box/job/pids.max": "max\n", "box/memory.events": "oom_kill 9\n"}, 9, None),
        ("4:memory:/box", {"memory/box/memory.oom_control": "under_oom 0\noom_kill 5\n"}, 5, 5),
        ("4:memory:/of/the/host", {"memory/memory.oom_control": "oom_kill 4\n"}, 4, 4),
        ("4:memory:/\n3:cpu:/", {"memory/memory.oom_control": "under_oom 0\n"}, 0, None),
        ("0::/", {}, 0, None),
    ],
)
def test_kills_for_lack_of_memory_are_counted_in_the_own_control_group(
    own: str, files: dict[str, str], count: int, count_of_own: int | None, tmp_path: Path
) -> None:
    (tmp_path / "own").write_text(own + "\n")
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert oom_kills_in_group(tmp_path / "groups", tmp_path / "own") == count
    assert oom_kills_in_own_group(tmp_path / "groups", tmp_path / "own") == count_of_own


@pytest.mark.parametrize(
    ("text", "does"),
    [
        ("import torch\n", True),
        ("def f():\n    from torch.nn import Linear\n", True),
        ("from diloco import DiLoCo\n", True),
        ("import torchaudio_of_mine\n# import torch\n", False),
        ("import numpy\n", False),
    ],
)
def test_torch_is_imported_ahead_where_a_file_of_the_workspace_or_a_callables_imports_it(
    text: str, does: bool, tmp_path: Path
) -> None:
    store = open_store(tmp_path / "store")
    task = StoredTask(store, "run", TaskRecord(python="3.11", entrypoint="a:b"), "00")
    pickled = StoredTask(store, "run", TaskRecord(python="3.11", callable_sha256="0" * 64, sources={"x": text}), "00")
    (tmp_path / "empty").mkdir()
    assert imports_torch(pickled, tmp_path / "empty") is does
    (tmp_path / "workspace" / "models").mkdir(parents=True)
    (tmp_path / "workspace" / "models" / "a.py").write_text(text)
    assert imports_torch(task, tmp_path / "workspace") is does


@pytest.mark.parametrize(
    ("claimed", "other_ended", "ends"),
    [(None, True, False), (1, False, True), (1, True, True), (2, False, False), (3, False, False)],
    ids=["none yet, its own taken", "an earlier", "an earlier, ended by others", "that one", "a later"],
)
def test_a_process_is_ended_for_the_attempt_that_follows_only_if_it_is_an_earlier_one(
    claimed: int | None, other_ended: bool, ends: bool, tmp_path: Path
) -> None:
    """A process that found its attempt taken has claimed the next one.

    If it were ended, the rank would never run again.
    """
    store = open_store(tmp_path)
    spec = run_spec("run", store.url, "00", 2, (1,), attempt=1, restarts="3,together")
    supervisor = ContainerSupervisor(
        spec, ContainerStarter(spec, term_grace_s=1, gpu=None), timeout_s=None, term_grace_s=1, notice_s=1
    )
    asked, page = Attempt(store, "run", 1, 1), SharedPage()
    page.claimed = 0 if claimed is None else claimed + 1
    if other_ended:
        asked.record(asked.new_outcome(ReplicaStatus.FAILED, "lost"))
    together = Decision(kind="restart", rank=0, ended=0, start={0: 1, 1: 2}, how="fork")
    DecisionLog(store, "run").append(lambda _: together)
    with subprocess.Popen(["sleep", "60"]) as process:
        watchdog = Watchdog(page, process.pid, HangLimits(), ends=True, term_grace_s=1, spec=spec, rank=1)
        running = RunningAttempt(process.pid, asked, page, watchdog, time.time(), NEVER)
        supervisor._running[process.pid] = running
        supervisor._session.note_start(asked)
        supervisor._session.read_log_soon()
        supervisor._advance_restarts()
        process.kill()
    assert running.ending == ("fenced" if ends else None)
    assert supervisor._session.is_pending is (claimed is None)


def test_a_container_whose_rank_cannot_be_killed_starts_nothing_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU and the disk of the rank may hang, too. The service takes them back when the container has ended."""
    supervisor, attempt, _ = supervised(tmp_path, restarts="3")
    attempt.store.put("run/run.json", b"{}")
    monkeypatch.setattr(os, "kill", lambda *_: None)
    supervisor._session.note_start(attempt)
    running = supervisor._running[1]
    running.ending, running.error, running.killed_at = "hang", "It hangs.", time.monotonic() - STUCK_S
    supervisor._enforce_deadlines()
    outcome = attempt.outcome()
    assert outcome is not None
    assert outcome.reason == "hang"
    assert not supervisor._is_needed
    assert supervisor.exit_code == 137


def test_a_supervisor_receives_a_notice_while_it_reads_a_long_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a log of three weeks from a distant store takes longer than the time after a notice."""
    supervisor, attempt, page = supervised(tmp_path)
    log = DecisionLog(attempt.store, "run")
    for decision in (Decision(kind="stop"), Decision(kind="resume", start={0: 0}), Decision(kind="policy")):
        log.append(lambda _, decision=decision: decision)  # type: ignore[misc]
    supervisor._session.note_start(attempt)
    supervisor._session.read_log_soon()
    monkeypatch.setattr("executors.restarts.session.READ_TURN_S", 0.0, raising=False)
    turns = [b"", bytes([signal.SIGTERM]), *[b""] * 5]
    n_read = []

    def wait(until: float) -> tuple[bytes, bool]:
        if not turns:
            raise TimeoutError
        n_read.append(supervisor._session.n_read)
        assert len(n_read) > 4 or until <= time.monotonic(), "the rest of the log is read without a pause"
        return turns.pop(0), False

    monkeypatch.setattr(supervisor._wakeups, "wait", wait)
    ignores = ["sh", "-c", "trap '' TERM; echo; exec sleep 60"]  # the process still exists at each check
    with subprocess.Popen(ignores, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        supervisor._running = {process.pid: replace(supervisor._running[1], pid=process.pid)}
        with pytest.raises(TimeoutError):
            supervisor.run()
        (running,) = supervisor._running.values()
        process.kill()
    assert n_read == [0, 0, 0, 0, 3, 3, 3], "the supervisor received the notice before it had read the whole log"
    assert page.ending_at is not None
    assert running.ending == "signal", "an order in an unfinished log blocks nothing yet"


@pytest.mark.parametrize("is_leaving", [False, True])
@pytest.mark.parametrize("why", ["its time limit", "its cancel marker", "the log", "nobody who watches"])
def test_a_process_that_runs_its_exit_functions_is_not_interrupted(why: str, is_leaving: bool, tmp_path: Path) -> None:
    supervisor, attempt, page = supervised(tmp_path)
    page.left_at = time.monotonic() if is_leaving else 0.0
    with subprocess.Popen(["sleep", "60"]) as process:
        running = supervisor._running[1]
        running.pid = process.pid
        supervisor._session.note_start(attempt)
        if why == "its time limit":
            running.deadline = 0.0
            supervisor._enforce_deadlines()
        elif why == "its cancel marker":
            attempt.request_cancel()
            supervisor._check_store()
        elif why == "the log":
            order_cancel(DecisionLog(attempt.store, "run"), None, "enough")
            supervisor._session.read_log_soon()
            supervisor._advance_restarts()
        else:
            supervisor._end_abandoned("nobody watched")
        process.kill()
    assert (running.ending is None) is is_leaving
