"""Tests the passes of a controller: its decisions, the attempts that it starts, and the times of both."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.hostile_records import run_json

from executors.attempt import Attempt
from executors.errors import BackendError, CorruptObjectError
from executors.protocol import STOPPED, Outcome, ReplicaStatus
from executors.restarts.controller import CARRY_S, LEAVE_S, RestartContext, RestartController, RunSnapshot
from executors.restarts.decision_log import Decision, DecisionLog
from executors.restarts.orders import order_cancel, order_stop
from executors.run.canceller import Canceller
from executors.run.external_controller import ExternalController
from executors.settings.policy import Restarts
from executors.store import Store
from executors.store.memory import MemoryStore
from executors.task.record import RunRecord
from executors.testing import eventually

POLICY = Restarts.parse("3,backoff=4s:8s")


class FakeStarter:
    """Records the attempts that it should start."""

    def __init__(self, how: str = "fork", ranks: range = range(4)) -> None:
        self.how, self.ranks = how, ranks
        self.started: list[Mapping[int, int]] = []

    def may_start(self, rank: int) -> bool:
        return rank in self.ranks

    def start(self, attempts: Mapping[int, int]) -> None:
        self.started.append(dict(attempts))


class Scene:
    """One run, a clock, and controllers that look at it."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.now = 100.0
        self._added: set[str] = set()

    def controller(
        self,
        starter: FakeStarter | None,
        policy: Restarts | None = POLICY,
        *,
        min_replicas: int | None = None,
        has_wider: bool = False,
    ) -> RestartController:
        def clock() -> float:
            return self.now

        log = DecisionLog(self.store, "run", clock)
        context = RestartContext(policy, 4, 0.0, min_replicas)
        return RestartController(log, context, starter=starter, has_wider=has_wider, clock=clock, monotonic=clock)

    @property
    def told(self) -> list[Decision]:
        """The entries that controllers have added to the log."""
        return [entry for entry in DecisionLog(self.store, "run").read() if entry.nonce not in self._added]

    def add(self, entry: Decision, ahead_s: float = 0.0) -> None:
        added = DecisionLog(self.store, "run", lambda: self.now + ahead_s).append(lambda _: entry)
        assert added is not None
        self._added.add(added.nonce)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def snapshot(*ends: Outcome, has_progress: bool = True, **newest: int) -> RunSnapshot:
    found = {end.rank: end.attempt for end in ends}
    return RunSnapshot({**dict.fromkeys(range(4), 0), **found}, {end.rank: end for end in ends}, has_progress)


def end(rank: int = 0, attempt: int = 0, reason: str = "signal", **more: Any) -> Outcome:
    return Outcome(rank, attempt, ReplicaStatus.FAILED, reason, **more)  # type: ignore[arg-type]


def test_an_attempt_with_progress_is_restarted_in_the_same_pass(scene: Scene) -> None:
    controller = scene.controller(starter := FakeStarter())
    assert controller.advance(snapshot(end(saved_marks=1))) is None
    assert starter.started == [{0: 1}]
    assert [(entry.kind, entry.how) for entry in scene.told] == [("restart", "fork")]


def test_an_attempt_without_progress_is_restarted_after_its_wait(scene: Scene) -> None:
    controller = scene.controller(starter := FakeStarter())
    wait_s = controller.advance(snapshot(end()))
    assert wait_s is not None
    assert 2.0 <= wait_s <= 4.0
    assert starter.started == []
    scene.now += wait_s
    controller.advance(snapshot(end()))
    assert starter.started == [{0: 1}]


def test_a_failure_before_any_progress_is_decided_after_a_last_look(scene: Scene) -> None:
    controller = scene.controller(FakeStarter())
    ends = [end(rank, reason="exception", fingerprint="same") for rank in range(2)]
    assert controller.advance(snapshot(ends[0], has_progress=False)) == 1.0
    assert scene.told == []
    scene.now += 1.0
    controller.advance(snapshot(*ends, has_progress=False))
    assert [(entry.kind, entry.why) for entry in scene.told] == [("stop", "deterministic")]


def test_a_failure_of_the_only_rank_is_decided_at_once(scene: Scene) -> None:
    controller = scene.controller(starter := FakeStarter(), policy=Restarts.parse("3,backoff=0s:0s"))
    controller.advance(RunSnapshot({0: 0}, {0: end(reason="exception")}, has_progress=False))
    assert starter.started == [{0: 1}]


def test_a_cancel_that_came_after_the_decision_is_seen_before_the_start(scene: Scene) -> None:
    controller = scene.controller(starter := FakeStarter())
    scene.now += controller.advance(snapshot(end())) or 0.0
    scene.add(Decision(kind="cancel"))
    assert controller.advance(snapshot(end())) is None
    assert starter.started == []
    assert controller.blocking_order(3) is not None


def test_a_restart_that_another_controller_decided_is_carried_out_a_minute_after_it_was_seen(scene: Scene) -> None:
    scene.controller(FakeStarter("launch")).advance(snapshot(end(saved_marks=1)))
    controller = scene.controller(starter := FakeStarter("launch"))
    assert controller.advance(snapshot(end(saved_marks=1))) == CARRY_S
    scene.now += CARRY_S
    controller.advance(snapshot(end(saved_marks=1)))
    assert starter.started == [{0: 1}]
    assert controller.advance(snapshot(replace(end(), rank=0, attempt=1, status=ReplicaStatus.SUCCEEDED))) is None


def test_a_wait_that_somebodys_clock_made_long_is_the_longest_of_the_policy(scene: Scene) -> None:
    far = Decision(kind="restart", rank=0, ended=0, start={0: 1}, how="fork", not_before=1e6)
    scene.add(far, ahead_s=1e6 - scene.now)
    assert scene.controller(FakeStarter()).advance(snapshot(end())) == POLICY.backoff_s[1]


def test_a_policy_that_waits_less_shortens_no_wait_that_was_decided(scene: Scene) -> None:
    scene.add(Decision(kind="restart", rank=0, ended=0, start={0: 1}, how="fork", not_before=scene.now + 5.0))
    scene.add(Decision(kind="policy", restarts="3,backoff=0s"))
    assert scene.controller(FakeStarter()).advance(snapshot(end())) == 5.0


def test_a_clock_that_is_ahead_makes_no_one_wait_longer(scene: Scene) -> None:
    scene.add(Decision(kind="policy", restarts=str(POLICY)), ahead_s=86400.0)
    wait_s = scene.controller(FakeStarter()).advance(snapshot(end()))
    assert wait_s is not None
    assert wait_s <= 4.0
    assert scene.told[0].at == scene.now + 86400.0


def test_without_a_policy_nothing_is_answered_until_the_log_has_one(scene: Scene) -> None:
    controller = scene.controller(starter := FakeStarter(), policy=None)
    assert controller.advance(snapshot(end(saved_marks=1))) is None
    scene.add(Decision(kind="policy", restarts="1"))
    controller.advance(snapshot(end(saved_marks=1)))
    assert starter.started == [{0: 1}]


@pytest.mark.parametrize(
    ("found", "policy"),
    [
        (end(reason="start_failed"), "3"),
        (end(reason="lost"), "3"),
        (end(reason="preempted"), "3"),
        (end(saved_marks=1), "3,how=launch"),
    ],
)
def test_a_fork_leaves_a_start_that_it_cannot_make_to_a_controller_that_can(
    scene: Scene, found: Outcome, policy: str
) -> None:
    controller = scene.controller(starter := FakeStarter(), policy=Restarts.parse(policy))
    assert controller.advance(snapshot(found)) is None
    wider = scene.controller(launches := FakeStarter("launch"), policy=Restarts.parse(policy))
    scene.now += wider.advance(snapshot(found)) or 0.0
    wider.advance(snapshot(found))
    assert launches.started[-1] == {0: 1}
    assert controller.advance(snapshot(found)) is None
    assert starter.started == []


@pytest.mark.parametrize("has_wider", [True, False])
def test_after_two_strikes_a_fork_leaves_its_machine_if_another_process_can_start_another(
    scene: Scene, has_wider: bool
) -> None:
    controller = scene.controller(FakeStarter(), policy=Restarts.parse("9,backoff=0s"), has_wider=has_wider)
    for attempt in range(3):
        controller.advance(snapshot(end(attempt=attempt)))
    assert len(scene.told) == (2 if has_wider else 3)


def test_a_rank_of_another_supervisor_is_left_to_it(scene: Scene) -> None:
    controller = scene.controller(starter := FakeStarter(ranks=range(2)), policy=Restarts.parse("3,together"))
    controller.advance(snapshot(end(3, saved_marks=1)))
    assert scene.told == []
    controller.advance(snapshot(end(0, saved_marks=1)))
    assert starter.started == [{0: 1, 1: 1}]
    other = scene.controller(its := FakeStarter(ranks=range(2, 4)), policy=Restarts.parse("3,together"))
    other.advance(snapshot(end(0, saved_marks=1)))
    assert its.started == [{2: 1, 3: 1}]


def test_a_fork_leaves_ranks_that_a_user_resumes_to_the_process_of_the_user(scene: Scene) -> None:
    scene.add(Decision(kind="resume", start={0: 1}))
    scene.controller(starter := FakeStarter()).advance(snapshot(end()))
    assert starter.started == []


def test_an_end_is_answered_again_after_a_resume_that_came_late(scene: Scene) -> None:
    """A user's resume read the log, waited for long, and then named attempt 1.

    Meanwhile that attempt had ended, and a decision had followed its end.
    """
    controller = scene.controller(starter := FakeStarter())
    controller.advance(snapshot(end(attempt=1, saved_marks=1)))
    scene.add(Decision(kind="resume", start={0: 1}))
    controller.advance(snapshot(end(attempt=1, saved_marks=1)))
    assert [entry.kind for entry in DecisionLog(scene.store, "run").read()] == ["restart", "resume", "restart"]
    assert starter.started == [{0: 2}, {0: 2}]


def test_an_attempt_that_was_decided_and_never_begun_leaves_no_hole(scene: Scene) -> None:
    scene.add(Decision(kind="restart", rank=1, ended=0, start={0: 2}, how="fork"))
    scene.controller(starter := FakeStarter()).advance(snapshot(end()))
    assert starter.started == [{0: 2}]
    skipped = Attempt(scene.store, "run", 0, 1).outcome()
    assert skipped is not None
    assert skipped.reason == "fenced"


def test_a_missing_attempt_stays_open_until_the_process_before_it_has_claimed(scene: Scene) -> None:
    scene.add(Decision(kind="restart", rank=1, ended=0, start={0: 2}, how="fork"))
    controller = scene.controller(starter := FakeStarter())
    before = Attempt(scene.store, "run", 0, 0)
    assert controller.advance(snapshot()) == 1.0
    assert (starter.started, before.at(1).outcome()) == ([], None)
    scene.store.put(before.key("started.json"), b"{}")
    controller.advance(snapshot())
    assert starter.started == [{0: 2}]


def test_a_rank_that_no_one_launched_is_not_started(scene: Scene) -> None:
    scene.add(Decision(kind="restart", rank=99, ended=0, start={99: 1}, how="fork"))
    scene.controller(starter := FakeStarter(ranks=range(100))).advance(snapshot())
    assert starter.started == []


def test_an_entry_that_could_not_be_parsed_is_not_added(scene: Scene) -> None:
    """An entry that no reader can parse would stop all later decisions."""
    controller = scene.controller(FakeStarter())
    with pytest.raises(CorruptObjectError, match="'start' is an object"):
        controller.advance(snapshot(end(attempt=10_000, saved_marks=1)))
    controller.advance(snapshot(end(1, reached={"x" * 1000: 1.0, "step": math.inf, "round": 2.0})))
    assert [entry.reached for entry in DecisionLog(scene.store, "run").read()] == [{"round": 2.0}]


def test_the_run_is_stopped_when_too_few_can_succeed(scene: Scene) -> None:
    controller = scene.controller(FakeStarter(), policy=Restarts.parse("0"), min_replicas=4)
    controller.advance(snapshot(end()))
    assert [(entry.kind, entry.why) for entry in scene.told] == [("give_up", "budget"), ("stop", "min_replicas")]


def test_a_pass_in_which_nothing_follows_is_one_request(scene: Scene) -> None:
    controller = scene.controller(FakeStarter(), policy=Restarts.parse("0"))
    found = snapshot(*(end(rank) for rank in range(3)), end(3, reason="preempted"))
    controller.advance(found)
    asked: list[str] = []

    class Listening(MemoryStore):
        def get(self, key: str, *, start: int = 0, size: int | None = None) -> memoryview:
            asked.append(key)
            return super().get(key, start=start, size=size)

    scene.store.__class__ = Listening
    controller.advance(found)
    assert asked == ["run/decisions/000003.json"]


def test_a_sight_is_taken_from_the_records_of_a_run() -> None:
    store = MemoryStore()
    for rank in range(3):
        store.put(Attempt(store, "run", rank).key("handle.json"), b"{}")
    Attempt(store, "run", 0).record(end(0))
    store.put(Attempt(store, "run", 0, 1).key("started.json"), b"{}")
    Attempt(store, "run", 1).record(end(1))
    found = RunSnapshot.of(store, "run", 3)
    assert (found.newest, {*found.ends}, found.has_progress) == ({0: 1, 1: 0, 2: 0}, {1}, False)
    store.put(Attempt(store, "run", 2).key("heartbeat.json"), b'{"at": 1.0, "step": 1}')
    assert RunSnapshot.of(store, "run", 3).has_progress


def observer(store: Store, ended: Outcome | None = None, **other: Any) -> Any:
    """Return a reader of the state of a run. By default the run has one replica.

    The backend cannot report on its supervisor, which therefore counts as alive.
    """

    def handle(rank: int, insists: bool) -> None:
        raise BackendError("the service does not answer")

    looks: dict[str, Any] = {
        "store": store,
        "run_id": "run",
        "record": RunRecord.parse(run_json(restarts="3")),
        "ranks": [0],
        "outcome": lambda rank: ended,
        "attempt": lambda rank: Attempt(store, "run", rank),
        "map": lambda act, things: [act(thing) for thing in things],
        "share_log": lambda log: None,
    }
    found = SimpleNamespace(**looks | other)
    found.records, found.handles = found, SimpleNamespace(of=handle)
    return found


@pytest.mark.parametrize("ahead_s", [-3600.0, 0.0, 3600.0])
def test_a_stop_has_its_time_independent_of_the_clock_of_a_controller(
    ahead_s: float, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = list[str]()
    starter: Any = SimpleNamespace(how="launch", free={}, may_start=lambda rank: False)
    log = DecisionLog(scene.store, "run")
    controller = ExternalController(log, observer(scene.store), starter, ended.append, lambda rank: True)
    order_stop(DecisionLog(scene.store, "run", lambda: time.time() - ahead_s), within_s=600.0)
    began = time.monotonic()

    def ended_after(passed_s: float) -> list[str]:
        monkeypatch.setattr(time, "monotonic", lambda: began + passed_s)
        controller.advance([])
        return [*ended]

    assert ended_after(1.0) == ended_after(600.0) == [], "supervisors end what runs"
    assert ended_after(602.0 + LEAVE_S) == ended_after(700.0 + LEAVE_S) == [STOPPED]


@pytest.mark.parametrize(("ranks_elsewhere", "kind"), [([2, 3], "restart"), ([1, 2, 3], "stop")])
def test_a_controller_outside_knows_which_ranks_are_at_which_backend(
    ranks_elsewhere: list[int], kind: str, scene: Scene
) -> None:
    ends = {rank: end(rank, reason="exception", fingerprint="same") for rank in range(2)}
    here = [rank for rank in range(4) if rank not in ranks_elsewhere]
    placements = [{"backend": "local", "ranks": here}, {"backend": "modal", "ranks": ranks_elsewhere}]
    looks = observer(
        scene.store,
        record=RunRecord.parse(run_json(restarts="3", world_size=4, placements=placements)),
        ranks=range(4),
        outcome=ends.get,
        handle=lambda rank, insists: None,
        with_reports=lambda states: [],
    )
    starter: Any = SimpleNamespace(how="launch", free={}, may_start=lambda rank: True, start=lambda attempts: None)
    controller = ExternalController(
        DecisionLog(scene.store, "run"), looks, starter, lambda why: None, lambda rank: True
    )

    def decided() -> bool:
        controller.advance([])
        return bool(scene.told)

    eventually(decided, "the controller has decided")
    assert scene.told[0].kind == kind


@pytest.mark.parametrize("ahead_s", [-3600.0, 0.0, 61.0, 3600.0])
def test_an_end_is_left_to_its_supervisor_for_15_s_independent_of_the_clock_of_the_controller(
    ahead_s: float, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = replace(end(saved_marks=1), finished_at=time.time() - ahead_s)
    starter: Any = SimpleNamespace(how="launch", free={}, may_start=lambda rank: rank in starter.free, start=dict)
    log = DecisionLog(scene.store, "run")
    controller = ExternalController(log, observer(scene.store, ended), starter, list[str]().append, lambda rank: True)
    began = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began)
    assert controller.advance([]) == pytest.approx(LEAVE_S), "a single pass waits for LEAVE_S"
    assert log.entries == []
    monkeypatch.setattr(time, "monotonic", lambda: began + LEAVE_S)
    controller.advance([])
    assert [(entry.kind, entry.how, entry.start) for entry in log.entries] == [("restart", "launch", {0: 1})]


@pytest.mark.parametrize("ahead_s", [-3600.0, 0.0, 3600.0])
def test_a_second_stop_takes_no_time_from_the_first_whatever_the_clocks_say(ahead_s: float) -> None:
    store = MemoryStore()
    order_stop(DecisionLog(store, "run", lambda: time.time() + ahead_s), within_s=600.0)
    given = [order_stop(DecisionLog(store, "run"), within_s).within_s for within_s in (900.0, 60.0, 600.0)]
    assert given == [600.0, 60.0, 60.0]


@pytest.mark.parametrize("ahead_s", [-3600.0, 0.0, 3600.0])
def test_a_process_that_asks_for_a_stop_waits_as_long_as_it_gives_whatever_clock_wrote_to_the_log_before(
    ahead_s: float,
) -> None:
    store, waited = MemoryStore(), list[float]()
    order_cancel(DecisionLog(store, "run", lambda: time.time() + ahead_s), [0], "by another machine")
    observer: Any = SimpleNamespace(records=SimpleNamespace(store=store, run_id="run"))

    def wait(for_s: float) -> bool:
        waited.append(for_s)
        return True

    Canceller(observer).stop(60.0, wait)
    assert waited == [60.0]
