"""Tests the events of a run, its uptime, and the ranks that need attention, with invented records."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import pytest
from support.made_up_runs import decision_of
from support.new_runs import run_json

from executors.attempt import Attempt
from executors.attempt.outcome import encode_outcome
from executors.cli.events import line_of_event
from executors.errors import StoreError
from executors.protocol import Outcome, ReplicaStatus
from executors.restarts.decision_log import Decision, DecisionLog
from executors.settings.rule_finding import BROKEN, RuleFinding
from executors.status import ReplicaState, RestartState, RunStatus
from executors.store.inventory import Inventory
from executors.store.memory import MemoryStore
from executors.store.records import to_bytes
from executors.task.record import RunRecord
from executors.view.report.event_reader import MORE, Event, EventReader
from executors.view.report.uptime import uptime_document, wants_attention

RECORD = RunRecord.parse(run_json(created_at=1000.0, created_by="me@host:1", restarts="3"))
FAILED, SUCCEEDED = ReplicaStatus.FAILED, ReplicaStatus.SUCCEEDED


class MadeUp:
    """A run in memory."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.notes: list[str] = []
        self.now = 100.0
        self.reader = self.new_reader()

    def new_reader(self) -> EventReader:
        def in_turn(act: Any, items: Any) -> list[Any]:
            return list(map(act, items))

        log = DecisionLog(self.store, "run")
        return EventReader(log, RECORD, map_over=in_turn, note=self.notes.append, clock=lambda: self.now)

    def attempt(self, rank: int, number: int = 0) -> Attempt:
        return Attempt(self.store, "run", rank, number)

    def claim(self, rank: int, number: int, at: float, *rows: Mapping[str, float]) -> None:
        self.store.put(self.attempt(rank, number).key("started.json"), to_bytes({"nonce": "n", "at": at, "host": "h"}))
        if rows:
            self.measure(rank, number, 0, *rows)

    def measure(self, rank: int, number: int, segment: int, *rows: Mapping[str, float]) -> None:
        lines = b"".join(map(to_bytes, rows))
        self.store.put(f"run/metrics/{rank:04d}/{number}/{segment:06d}.jsonl", lines)

    def end(self, rank: int, number: int, at: float, **more: Any) -> Outcome:
        outcome = Outcome(rank, number, more.pop("status", FAILED), finished_at=at, host="h", **more)
        self.store.put(self.attempt(rank, number).key("outcome.json"), encode_outcome(outcome))
        return outcome

    def decide(self, **entry: Any) -> None:
        log = DecisionLog(self.store, "run", clock=lambda: entry.pop("at"))
        log.append(lambda _: Decision(**{name: value for name, value in entry.items() if name != "at"}))

    def look(self, *states: ReplicaState) -> list[Event]:
        return self.reader.new(Inventory.of(self.store, "run"), self.status(*states))

    def status(self, *states: ReplicaState, at: float = 1100.0) -> RunStatus:
        return RunStatus("run", "local", states or (ReplicaState(0, 0, ReplicaStatus.RUNNING),), at=at)


@pytest.fixture
def run() -> MadeUp:
    """A run whose rank 1 is killed at 1040 s and comes back at 1050 s."""
    made = MadeUp()
    made.claim(0, 0, 1010.0, {"t": 0.5, "cpu": 1, "rss": 1}, {"t": 2.5, "step": 1, "loss": 3.0})
    made.claim(1, 0, 1011.0)
    made.end(1, 0, 1040.0, reason="signal", signal="SIGKILL", error="killed", notice="SIGTERM")
    made.decide(
        kind="restart", rank=1, ended=0, start={1: 1}, charged=True, reason="signal", words="signal", not_before=1043.0,
        at=1041.0,
    )  # fmt: skip
    made.claim(1, 1, 1050.0)
    return made


def warn(made: MadeUp, rank: int, *texts: str, number: int = 0, left_out: int = 0) -> None:
    rows = [{"text": text, "at": 1012.0 + n, "last_at": 1013.0, "count": n + 1} for n, text in enumerate(texts)]
    made.store.put(made.attempt(rank, number).key("warnings.json"), to_bytes({"warnings": rows, "left_out": left_out}))


def test_each_warning_is_one_event_also_if_its_record_is_written_again(run: MadeUp) -> None:
    def look() -> list[tuple[int | None, int | None, float, str, int]]:
        found = [event for event in run.look() if event.kind == "warning"]
        return [(event.rank, event.attempt, event.at, event.why, event.count) for event in found]

    warn(run, 1, "a")
    assert look() == [(1, 0, 1012.0, "a", 1)]
    assert look() == []
    warn(run, 1, "a", "b", left_out=3)
    assert look() == [(1, 0, 1013.0, "b", 2), (1, 0, 1013.0, f"3 {MORE}", 1)]
    warn(run, 1, "a", "b", left_out=40)
    warn(run, 1, "a", number=1)
    assert look() == [(1, 1, 1012.0, "a", 1)]
    assert look() == []
    event = Event(kind="warning", at=1042.0, rank=1, attempt=1, why="a\x1b[31m\nb", count=12)
    assert line_of_event(event, 1000.0) == "[   42 s] rank 1 warning (attempt 1): a b (12 times)"
    assert not event.is_usual


def test_a_record_of_warnings_that_cannot_be_read_is_named_and_hides_no_other(run: MadeUp) -> None:
    run.store.put(run.attempt(0).key("warnings.json"), b'{"warnings": 5}')
    warn(run, 1, "a")
    assert [event.why for event in run.look() if event.kind == "warning"] == ["a"]
    (told,) = run.notes
    assert "run/replicas/0000/0/warnings.json" in told


def test_the_warning_of_a_run_comes_once_it_has_ended(run: MadeUp) -> None:
    ends = [run.end(rank, 0, 1090.0, status=SUCCEEDED, trained_alone=True) for rank in (0, 1)]
    over = [ReplicaState(end.rank, 0, SUCCEEDED, end) for end in ends]
    assert [(event.kind, event.rank) for event in run.look(*over)][-2:] == [("warning", None), ("finished", None)]


@pytest.mark.parametrize(
    ("rounds", "words"),
    [
        ([70, 102], ["from rank 0 after round 70 to rank 1 after round 102", "total_steps"]),
        ([102, 70, 71, 70], ["from ranks 1, 3 after round 70 to rank 0 after round 102"]),
        ([70, 70], []),
        ([70, None], []),
        ([70, float("inf")], []),
    ],
)
def test_replicas_that_succeed_after_different_rounds_have_different_models(
    run: MadeUp, rounds: list[float | None], words: list[str]
) -> None:
    over = []
    for rank, number in enumerate(rounds):
        end = run.end(rank, 0, 1090.0, status=SUCCEEDED, reached={} if number is None else {"round": number})
        over.append(ReplicaState(rank, 0, SUCCEEDED, end))
    told = [each.text for each in RunStatus("run", "local", over).warnings]
    assert len(told) == bool(words)
    assert all(word in text for text in told for word in words), told
    one_goes_on = [*over[:-1], ReplicaState(len(over) - 1, 0, ReplicaStatus.RUNNING)]
    assert RunStatus("run", "local", one_goes_on).warnings == []
    failed = run.end(1, 1, 1090.0, status=ReplicaStatus.FAILED, reached={"round": 1})
    one_failed = [over[0], ReplicaState(1, 1, ReplicaStatus.FAILED, failed)]
    assert RunStatus("run", "local", one_failed).warnings == []


def test_each_record_is_reported_once_in_the_order_of_time(run: MadeUp) -> None:
    first = run.look()
    assert [(event.kind, event.rank, event.attempt, event.at, event.duration_s) for event in first] == [
        ("launched", None, None, 1000.0, None),
        ("claimed", 0, 0, 1010.0, None),
        ("claimed", 1, 0, 1011.0, None),
        ("first_progress", 0, 0, 1012.5, 2.5),
        ("notice", 1, 0, 1040.0, None),
        ("ended", 1, 0, 1040.0, 29.0),
        ("decided", 1, 0, 1041.0, 2.0),
        ("claimed", 1, 1, 1050.0, None),
    ]
    assert [line_of_event(event, 1000.0) for event in first[-4:]] == [
        "[   40 s] rank 1 notice: SIGTERM",
        "[   40 s] rank 1 ended after 29 s: signal: killed",
        "[   41 s] restarting rank 1 as attempt 1 (1 of 3): signal",
        "[   50 s] rank 1 claimed (attempt 1) by h",
    ]
    assert run.look() == []
    run.end(0, 0, 1090.0, status=SUCCEEDED)
    run.decide(kind="give_up", rank=1, ended=1, reason="hang", why="budget", words="hang", at=1095.0)
    over = [ReplicaState(0, 0, SUCCEEDED, run.attempt(0).outcome())]
    assert [(event.kind, event.at, event.reason) for event in run.look(*over)] == [
        ("ended", 1090.0, "succeeded"),
        ("gave_up", 1095.0, "hang"),
        ("finished", 1095.0, "succeeded"),
    ]
    assert all(json.loads(json.dumps(event.to_json())) == asdict(event) for event in first)


def test_dumps_that_lie_close_together_are_one_suspicion(run: MadeUp, monkeypatch: pytest.MonkeyPatch) -> None:
    run.look()
    times = {0: 1060.0, 1: 1061.0, 2: 1080.0}
    for number in times:
        run.store.put(run.attempt(1, 1).key(f"stacks/{number}.txt"), b"Replica 1 waits: recv\nThread ...\n")
    found = Inventory.of(run.store, "run")
    found = replace(found, stacks=frozenset((1, 1, number, at) for number, at in times.items()))
    events = run.reader.new(found, run.status())
    assert [(event.kind, event.at, event.why) for event in events] == [
        ("hang_suspected", 1060.0, "Replica 1 waits: recv"),
        ("stacks", 1060.0, "stacks/0.txt"),
        ("stacks", 1061.0, "stacks/1.txt"),
        ("hang_suspected", 1080.0, "Replica 1 waits: recv"),
        ("stacks", 1080.0, "stacks/2.txt"),
    ]


def test_a_rank_that_works_again_is_an_event_and_no_new_suspicion(run: MadeUp) -> None:
    run.look()
    times = {0: 1060.0, 1: 1061.0, 2: 1080.0}
    for number in times:
        text = b"Replica 1 works again." if number == 2 else b"Replica 1 waits: recv\nThread ...\n"
        run.store.put(run.attempt(1, 1).key(f"stacks/{number}.txt"), text)
    found = Inventory.of(run.store, "run")
    found = replace(found, stacks=frozenset((1, 1, number, at) for number, at in times.items()))
    kinds = [event.kind for event in run.reader.new(found, run.status())]
    assert kinds == ["hang_suspected", "stacks", "stacks", "works_again"]


def test_a_look_at_a_run_in_which_nothing_happens_is_one_request(run: MadeUp, monkeypatch: pytest.MonkeyPatch) -> None:
    run.look()
    inventory, asked = Inventory.of(run.store, "run"), list[str]()
    get = run.store.get

    def counted(key: str, **more: Any) -> memoryview:
        asked.append(key)
        return get(key, **more)

    monkeypatch.setattr(run.store, "get", counted)
    for _ in range(3600):
        run.now += 1
        assert run.reader.new(inventory, run.status()) == []
    others = [key for key in asked if key != "run/decisions/000001.json"]
    assert len(asked) - len(others) == 3600
    assert set(others) == {"run/metrics/0001/1/000000.jsonl"}, (
        "only segments of replicas that run and have not reported are read"
    )
    assert len(others) <= 70
    run.claim(1, 1, 1050.0, {"t": 3000, "step": 1})
    run.now += 60
    assert [event.kind for event in run.reader.new(inventory, run.status())] == ["first_progress"]


def test_a_record_that_cannot_be_read_is_named_and_costs_no_other(run: MadeUp) -> None:
    run.store.put(run.attempt(0).key("outcome.json"), b"{")
    run.store.put("run/metrics/0001/0/000000.jsonl", b'{"t": "soon"}\n[1]\nx\n')
    run.store.put("run/decisions/000001.json", b'{"kind": "odd"}')
    kinds = [event.kind for event in run.look()]
    assert (kinds.count("claimed"), kinds.count("ended"), kinds.count("decided")) == (3, 1, 0)
    assert [note.split(" in ")[0] for note in run.notes] == [
        "'run/replicas/0000/0/outcome.json'",
        "'run/decisions/000001.json'",
    ]


def test_a_record_that_the_store_did_not_return_is_an_event_of_a_later_look(
    run: MadeUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    warn(run, 1, "a")
    run.store.put(run.attempt(1).key("stacks/0.txt"), b"stuck in a lock\n")
    finding = RuleFinding(rank=0, attempt=0, index=2, rule="loss > 8", verdict=BROKEN, evidence="loss is 9", at=1012.0)
    run.store.put(run.attempt(0).key(finding.name), finding.to_bytes())
    run.decide(kind="stop", why="asked", at=1060.0)
    expected = sorted(str(event) for event in run.look())
    assert {"hang_suspected", "rule_broken", "warning", "first_progress", "ended"} <= {
        event.kind for event in run.new_reader().new(Inventory.of(run.store, "run"), run.status())
    }

    get, refused = run.store.get, set[str]()

    def fails_once(key: str, **part: Any) -> memoryview:
        if key not in refused:
            refused.add(key)
            raise StoreError("The store does not answer.", key=key, url=run.store.url)
        return get(key, **part)

    monkeypatch.setattr(run.store, "get", fails_once)
    run.reader, found = run.new_reader(), list[Event]()
    for _ in range(8):
        run.now += 100
        found += run.look()
    assert sorted(map(str, found)) == expected
    assert run.notes, "each failure is named"


def test_the_downtime_of_a_rank_is_computed_from_its_ends_and_claims(run: MadeUp) -> None:
    running = [ReplicaState(0, 0, ReplicaStatus.RUNNING), ReplicaState(1, 1, ReplicaStatus.RUNNING)]
    found = uptime_document(run.status(*running), 1000.0, run.attempt)
    assert found == {
        "availability": pytest.approx(1 - 10 / 200),
        "flakiness": pytest.approx(1 / 3),
        "replicas": [{"attempts": 1, "down_s": 0.0}, {"attempts": 2, "down_s": 10.0}],
    }
    awaited = [running[0], ReplicaState(1, 1, ReplicaStatus.PENDING, restart=RestartState(is_awaited=True))]
    run.end(1, 1, 1070.0, reason="hang")
    assert uptime_document(run.status(*awaited), 1000.0, run.attempt)["replicas"][1] == {"attempts": 2, "down_s": 40.0}
    cancelled = Outcome(0, 0, ReplicaStatus.CANCELLED, "cancelled", finished_at=1030.0)
    one = run.status(ReplicaState(0, 0, ReplicaStatus.CANCELLED, cancelled))
    assert uptime_document(one, 1000.0, run.attempt) == {
        "availability": 1.0,
        "flakiness": 0.0,
        "replicas": [{"attempts": 1, "down_s": 0.0}],
    }


def test_uptime_reads_attempts_at_once(run: MadeUp, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a bucket, all attempts are read in parallel.

    Otherwise each of hundreds of attempts would cost separate round trips.
    """
    n_attempts, met = 10, threading.Barrier(20)
    for rank in (0, 1):
        for number in range(n_attempts):
            run.claim(rank, number, 1010.0 + 10 * number)
            run.end(rank, number, 1015.0 + 10 * number, reason="signal", output_tail="x" * 10_000)
    states = [ReplicaState(rank, n_attempts - 1, ReplicaStatus.FAILED) for rank in (0, 1)]
    near = uptime_document(run.status(*states, at=1110.0), 1000.0, run.attempt)
    assert [row["attempts"] for row in near["replicas"]] == [n_attempts] * 2
    get = run.store.get

    def counted(key: str, **part: Any) -> memoryview:
        if key.endswith("started.json"):
            met.wait(30)  # all reads are running
        return get(key, **part)

    monkeypatch.setattr(run.store, "get", counted)
    run.store._url = "s3://bucket"
    assert uptime_document(run.status(*states, at=1110.0), 1000.0, run.attempt) == near


def test_a_rank_that_is_found_lost_late_was_down_since_its_last_heartbeat(run: MadeUp) -> None:
    run.store.put(run.attempt(0).key("heartbeat.json"), to_bytes({"at": 1060.0}))
    lost = run.attempt(0).record_lost("its supervisor is gone")
    events = [event for event in run.look() if (event.rank, event.kind) == (0, "ended")]
    assert [(event.at, event.duration_s) for event in events] == [(1060.0, 50.0)]
    resumed = [ReplicaState(0, 1, ReplicaStatus.RUNNING), ReplicaState(1, 1, ReplicaStatus.RUNNING)]
    run.claim(0, 1, 1090.0)
    assert uptime_document(run.status(*resumed), 1000.0, run.attempt)["replicas"][0]["down_s"] == 30.0
    assert run.status(ReplicaState(0, 0, FAILED, lost)).last_at == 1060.0, "the run had ended then"


def test_ranks_that_hang_wait_for_a_controller_or_were_given_up_want_attention(run: MadeUp) -> None:
    given_up = RestartState(decision=decision_of("give_up"), note="given up: failed twice in the same way")
    states = [
        ReplicaState(0, 0, FAILED, Outcome(0, 0, FAILED, "exception"), restart=given_up),
        ReplicaState(1, 1, ReplicaStatus.RUNNING),
        ReplicaState(
            2, 0, ReplicaStatus.PENDING, restart=RestartState(note="waits for a controller: replicas watch run")
        ),
        ReplicaState(3, 0, FAILED, restart=RestartState(note="decisions/000000.json cannot be read")),
        ReplicaState(4, 0, FAILED),
    ]
    run.store.put(run.attempt(1, 1).key("stacks/0.txt"), b"Replica 1 waits: recv\nThread ...\n")

    def found() -> dict[int, str]:
        return wants_attention(run.status(*states), Inventory.of(run.store, "run"), lambda rank: run.attempt(rank))

    assert found() == {
        0: given_up.note,
        1: "may hang: Replica 1 waits: recv",
        2: states[2].restart.note,
        3: states[3].restart.note,
    }


class Suspected:
    """Rank 0 is claimed at 100,000 s by the store's clock, and its stacks are kept an hour later."""

    def __init__(self, run: MadeUp, monkeypatch: pytest.MonkeyPatch, ahead_s: float) -> None:
        self.run, self.monkeypatch = run, monkeypatch
        run.claim(0, 0, 100_000.0 + ahead_s)
        self.measure(0, 103_590, {"t": 3500, "step": 1}, {"t": 3580, "rss": 1})
        self.at(103_600)
        run.store.put(run.attempt(0).key("stacks/0.txt"), b"Replica 0 waits: recv\nThread ...\n")

    def at(self, now: float) -> None:
        self.monkeypatch.setattr(time, "time", lambda: float(now))

    def measure(self, segment: int, written_at: float, *rows: Mapping[str, float]) -> None:
        self.at(written_at)
        self.run.measure(0, 0, segment, *rows)

    @property
    def may_hang(self) -> bool:
        now = self.run.status(ReplicaState(0, 0, ReplicaStatus.RUNNING))
        found = wants_attention(now, Inventory.of(self.run.store, "run"), lambda rank: self.run.attempt(rank))
        assert found in ({}, {0: "may hang: Replica 0 waits: recv"})
        return bool(found)


CLOCKS = {"right": 0.0, "behind": -300.0, "ahead": 300.0, "asleep_for_8_h": -28_800.0, "set_since": -99_990.0}


@pytest.mark.parametrize("ahead_s", CLOCKS.values(), ids=CLOCKS)
def test_a_rank_that_continued_after_its_stacks_is_not_reported_to_hang_independent_of_its_clock(
    run: MadeUp, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    rank = Suspected(run, monkeypatch, ahead_s)
    rank.measure(1, 103_650, {"t": 3610, "rss": 1}, {"t": 3640, "rss": 1})
    assert rank.may_hang, "processor usage alone is not progress"
    rank.measure(2, 103_710, {"t": 3660, "step": 2}, {"t": 3670, "rss": 1}, {"t": 3700, "rss": 1})
    assert not rank.may_hang
    rank.measure(3, 103_770, {"t": 3730, "rss": 1}, {"t": 3760, "rss": 1})
    assert not rank.may_hang, "a report after the stacks shows that the rank continued"


@pytest.mark.parametrize("ahead_s", CLOCKS.values(), ids=CLOCKS)
def test_a_report_from_before_the_stacks_is_not_progress_independent_of_its_clock(
    run: MadeUp, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    rank = Suspected(run, monkeypatch, ahead_s)
    assert rank.may_hang
    rank.measure(1, 103_655, {"t": 3590, "step": 2}, {"t": 3610, "rss": 1}, {"t": 3640, "rss": 1})
    assert rank.may_hang


def test_a_rank_that_works_again_is_not_reported_to_hang(run: MadeUp, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Suspected(run, monkeypatch, 0.0)
    assert rank.may_hang
    rank.at(103_700)
    run.store.put(run.attempt(0).key("stacks/1.txt"), b"Replica 0 of 1 works again.")
    assert not rank.may_hang


def test_a_report_from_before_the_stacks_is_not_progress_even_if_it_arrives_after_an_outage(
    run: MadeUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Suspected(run, monkeypatch, 0.0)
    rank.measure(1, 104_000, {"t": 3590, "step": 2}, {"t": 3610, "rss": 1})
    rank.measure(2, 104_001, {"t": 3640, "rss": 1}, {"t": 3990, "rss": 1})
    assert rank.may_hang
