"""Tests how a supervisor handles the ends of its processes, also while its store fails."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.hostile_records import run_json
from support.new_runs import run_spec

from executors.attempt import Attempt
from executors.errors import StoreError
from executors.protocol import Outcome
from executors.replica.shared_page import SharedPage
from executors.restarts.decision_log import Decision, DecisionLog
from executors.restarts.orders import order_stop
from executors.settings.policy import HangLimits
from executors.store import MemoryStore
from executors.store.protocol import Data, Entry
from executors.store.records import to_bytes
from executors.supervisor import exits, processes, supervisor
from executors.supervisor.members import MemberGroup
from executors.supervisor.processes import NEVER, STUCK_S, RunningAttempt
from executors.supervisor.supervisor import Supervisor
from executors.supervisor.watchdog import Watchdog, WatchdogReport

TERMINATED = -15


class Bucket(MemoryStore):
    """A store that can fail, and counts how often it did."""

    fails = False
    fails_n_times = 0
    n_failed = 0

    def _asked(self) -> None:
        if self.fails or self.n_failed < self.fails_n_times:
            self.n_failed += 1
            raise StoreError("no")

    def get(self, key: str, *, start: int = 0, size: int | None = None) -> memoryview:
        self._asked()
        return super().get(key, start=start, size=size)

    def put(self, key: str, data: Data) -> None:
        self._asked()
        super().put(key, data)

    def put_if_absent(self, key: str, data: Data) -> bool:
        self._asked()
        return super().put_if_absent(key, data)

    def list(self, prefix: str) -> Iterator[Entry]:
        self._asked()
        return super().list(prefix)


class NoProcesses:
    """Ranks whose processes are not started, and whose logs are copied."""

    n_copied = 0

    def __init__(self) -> None:
        self.given_up: list[Attempt] = []

    def prepare(self, attempt: Attempt) -> None: ...

    def begin(self, attempt: Attempt) -> bool:
        return True

    def count_members(self, attempt: Attempt) -> int:
        return 1

    def start(
        self, attempt: Attempt, pages: Sequence[SharedPage], close: Iterable[int], group: MemberGroup | None = None
    ) -> list[int]:
        raise OSError("no more processes")

    def prepare_same_process(self, attempt: Attempt) -> None: ...

    def output_file(self, attempt: Attempt) -> None: ...

    def output_tail(self, attempt: Attempt) -> str:
        return ""

    def note_output(self, attempt: Attempt, *, is_whole: bool = False) -> None: ...

    def write_log(self, attempt: Attempt, words: str) -> None: ...

    def give_up_process(self, attempt: Attempt) -> None:
        self.given_up.append(attempt)

    def copy_log(self, asked: Attempt, claimed: Attempt) -> int | None:
        self.n_copied += 1
        return -self.n_copied


class Scene:
    """A supervisor of some ranks that run, all in one process, and of others that wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pid: int, n: int = 16, n_waiting: int = 0) -> None:
        self.store, self.n = Bucket(), n + n_waiting
        self.store.put("run/run.json", to_bytes(run_json(world_size=self.n)))
        monkeypatch.setattr(supervisor, "impatient_store", lambda *_: self.store)
        spec = run_spec("run", "s3://bucket", "", self.n, tuple(range(self.n)))
        self.ranks = NoProcesses()
        self.supervisor = Supervisor(
            spec, self.ranks, max_parallel=n, timeout_s=None, term_grace_s=5.0, launcher_end=None
        )
        self.running = [Attempt(self.store, "run", rank) for rank in range(n)]
        for attempt in self.running:
            page = SharedPage()
            watchdog = Watchdog(page, pid, HangLimits(), ends=True, term_grace_s=1, spec=spec, rank=attempt.rank)
            running = RunningAttempt(pid, attempt, page, watchdog, time.time(), NEVER)
            self.supervisor._running[attempt.rank] = running
        self.supervisor._waiting.extend(Attempt(self.store, "run", n + rank) for rank in range(n_waiting))

    def undo_start(self, *, fails_n_times: int) -> list[Outcome | None]:
        """Undo the start of all waiting ranks, while the store fails at first. Return their outcomes."""
        self.store.fails_n_times = fails_n_times
        failed = self.supervisor._waiting[0]
        self.supervisor._undo_start(failed, OSError("no more processes"))
        return self.outcomes()

    def end_all(self) -> None:
        """End all running ranks by SIGTERM, and let their logs be copied."""
        while self.supervisor._running:
            self.supervisor._conclude(self.supervisor._running.popitem()[1], TERMINATED)
        while self.supervisor._copying:
            self.supervisor._record_end(*self.supervisor._copying.popitem()[1])

    def outcomes(self) -> list[Outcome | None]:
        return [Attempt(self.store, "run", rank).outcome() for rank in range(self.n)]


@pytest.fixture
def pid() -> Iterator[int]:
    """Return a process that may be sent any signal."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process.pid
        process.kill()


def test_each_rank_of_an_abandoned_run_says_why_it_ended_although_there_was_no_time_to_mark_it(
    monkeypatch: pytest.MonkeyPatch, pid: int
) -> None:
    scene = Scene(monkeypatch, pid, n_waiting=2)
    scene.running[3].request_cancel("enough")
    monkeypatch.setattr(exits, "MARKERS_S", 0.0)
    scene.supervisor._end_abandoned("nobody watched")
    scene.end_all()
    why = ["nobody watched", "enough"]
    expected = [("cancelled", f"Replica {rank} was ended: {why[rank == 3]}.") for rank in range(scene.n)]
    assert [outcome and (outcome.reason, outcome.error) for outcome in scene.outcomes()] == expected


def test_many_ends_at_once_ask_a_store_that_fails_only_once(monkeypatch: pytest.MonkeyPatch, pid: int) -> None:
    """If the store does not answer, each request takes seconds, and no rank can be killed meanwhile."""
    scene = Scene(monkeypatch, pid)
    scene.store.fails = True
    scene.end_all()
    assert scene.store.n_failed == 1
    scene.store.fails = False
    monkeypatch.setattr(scene.supervisor._outcomes, "_clock", lambda: time.monotonic() + exits.SILENT_S)
    scene.supervisor._outcomes.try_again()
    assert [outcome and outcome.reason for outcome in scene.outcomes()] == ["signal"] * scene.n


@pytest.mark.parametrize("fails_n_times", [0, 5])
def test_each_rank_of_a_launch_that_failed_has_an_outcome_although_the_store_fails_for_a_moment(
    fails_n_times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(monkeypatch, 0, n=0, n_waiting=3)
    found = scene.undo_start(fails_n_times=fails_n_times)
    assert [outcome and outcome.error for outcome in found] == ["Rank 0 could not be started: no more processes"] * 3


def test_a_start_that_fails_ends_no_others_of_a_run_that_fails_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that asked for the start ends its ranks. The other ranks of the run continue."""
    scene = Scene(monkeypatch, 0, n=0, n_waiting=2)
    monkeypatch.setattr(scene.supervisor, "_spec", scene.supervisor._spec.with_settings(fail_fast=True))
    monkeypatch.setattr(supervisor, "end_others", lambda *_: pytest.fail("others are ended"))
    assert None not in scene.undo_start(fails_n_times=0)


def test_a_rank_that_no_signal_ends_has_an_outcome_anyway(monkeypatch: pytest.MonkeyPatch, pid: int) -> None:
    """The rank's main thread is in a call of a dead disk or driver, which SIGKILL does not interrupt."""
    scene = Scene(monkeypatch, pid, n=1)
    (running,) = scene.supervisor._running.values()
    scene.supervisor._running = {pid: running}
    sent, now = list[int](), [1000.0]
    monkeypatch.setattr(processes, "os", SimpleNamespace(kill=lambda pid, number: sent.append(number)))
    monkeypatch.setattr(processes, "kill_descendants", lambda *_, **__: [])
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    running.ending, running.error, running.kill_at, running.asked_at = "hang", "It hangs.", 1000.0, -NEVER
    while now[0] < 1000.0 + STUCK_S:
        scene.supervisor._enforce_deadlines()
        assert scene.supervisor._running, "the supervisor still waits for the process to end"
        now[0] += 1.0
    assert sent.count(signal.SIGKILL) > 5
    scene.supervisor._enforce_deadlines()
    scene.end_all()
    (outcome,) = scene.outcomes()
    assert outcome is not None
    assert (outcome.reason, outcome.signal) == ("hang", "SIGKILL")
    assert outcome.error == "It hangs. Its process cannot be killed: it is stuck in the kernel."
    assert not scene.supervisor._is_busy
    assert scene.ranks.given_up == scene.running, "the GPU of a process that cannot be killed is not free"


def test_a_process_that_reaps_a_rank_does_not_wait_for_another_that_no_signal_ends(
    monkeypatch: pytest.MonkeyPatch, pid: int
) -> None:
    scene = Scene(monkeypatch, pid, n=2)
    stuck, other = scene.supervisor._running.values()
    scene.supervisor._running = {pid: stuck}
    scene.supervisor._give_up_process(stuck)
    monkeypatch.setattr(supervisor, "children", lambda _: [pid])  # other tests may have left a zygote
    monkeypatch.setattr(supervisor, "kill_descendants", lambda *_, **__: pytest.fail("waits for killed processes"))
    with subprocess.Popen(["true"]) as process:
        scene.supervisor._running[process.pid] = replace(other, pid=process.pid)
        while scene.supervisor._running:
            scene.supervisor._reap()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_supervisor_leaves_a_rank_that_a_launch_has_taken_over_alone_when_the_run_is_stopped_or_it_ends_again(
    is_stopped: bool, monkeypatch: pytest.MonkeyPatch, pid: int
) -> None:
    """Rank 0 continues in another supervisor, which decides about its next end.

    Rank 1 still belongs to this supervisor.
    """
    scene = Scene(monkeypatch, pid, n=2)
    for attempt in scene.running:
        scene.supervisor._session.note_start(attempt)
    scene.supervisor._record_end(scene.supervisor._running.pop(0), scene.running[0], TERMINATED)
    log = DecisionLog(scene.store, "run")
    log.append(lambda _: Decision(kind="restart", rank=0, ended=0, start={0: 1}, how="launch"))
    taken_over = scene.running[0].at(1)
    taken_over.create_intent("another supervisor's")
    if is_stopped:
        order_stop(log, within_s=600)
    else:
        log.append(lambda _: Decision(kind="restart", rank=0, ended=1, start={0: 2}, how="fork"))
    for _ in range(2):
        scene.supervisor._session.read_log_soon()
        scene.supervisor._advance_restarts()
        first = scene.running[0].outcome()
        assert first is not None
        scene.supervisor._note_end(scene.running[0], first)  # the process of the rank may end late
    found = [taken_over.at(number).has(f"{name}.json") for number in (1, 2) for name in ("cancel", "outcome", "handle")]
    assert not any(found), "this supervisor leaves the rank to the other one"
    assert not scene.supervisor._waiting


@pytest.mark.parametrize("ends_before", [False, True])
def test_stacks_that_the_store_does_not_take_at_first_are_there_when_it_does(
    ends_before: bool, monkeypatch: pytest.MonkeyPatch, pid: int
) -> None:
    scene = Scene(monkeypatch, pid, n=1)
    (running,) = scene.supervisor._running.values()
    report, now = WatchdogReport("It hangs.", "It hangs.\nIn main."), time.monotonic()
    looks = [report, *[None] * 20]
    monkeypatch.setattr(running.watchdog, "look", lambda _: looks.pop(0))
    scene.store.fails = True
    running.watch(now, scene.ranks)
    n_asked = scene.store.n_failed
    running.watch(now + 1.0, scene.ranks)
    assert scene.store.n_failed == n_asked, "a store that does not answer is not asked again at once"
    scene.store.fails = False
    if ends_before:
        scene.end_all()
    else:
        running.watch(now + 60.0, scene.ranks)
    assert bytes(scene.store.get("run/replicas/0000/0/stacks/0.txt")) == b"It hangs.\nIn main."
    assert (running.page.n_stacks, running.stacks) == (1, [])
