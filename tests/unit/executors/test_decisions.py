"""Tests the decision log: reading, appending, and the decisions that follow an end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from support.hostile_records import BAD_DECISIONS

from executors.errors import CorruptObjectError, KeyNotFoundError, StoreError
from executors.protocol import Outcome, ReplicaStatus
from executors.restarts.decision_log import ENDING, OTHERS, Decision, DecisionLog
from executors.restarts.rules import RunFacts, decide
from executors.settings.policy import HangLimits, Restarts
from executors.store import Data
from executors.store.faulty import FaultyStore
from executors.store.memory import MemoryStore

FACTS = RunFacts(run_id="run", world_size=4, launched_at=0.0, has_progress=True)


def end(rank: int = 0, attempt: int = 0, reason: str = "signal", **more: object) -> Outcome:
    return Outcome(rank, attempt, ReplicaStatus.FAILED, reason, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "3",
        "0",
        "3/3600s",
        "3,oom=0,timeout=2,75=inf,42=0,-9=1",
        "2,run=5,backoff=2s:30s,within=60s,together,how=launch",
        "2,backoff=0.25s:0.5s,no_progress=7",
        "1/0.001s",
    ],
)
def test_a_policy_reads_as_it_is_written(text: str) -> None:
    assert str(Restarts.parse(text)) == text
    assert Restarts.parse(text) == Restarts.parse(str(Restarts.parse(text)))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("three", "begin with a number"),
        ("3,oon=1", "Did you mean 'oom'"),
        ("3,cancelled=1", "never restarted"),
        ("3,oom", "needs a value"),
        ("3,together=1", "Write 'together' in restarts without a value, got 'together=1'"),
        ("3,oom=1,oom=2", "given twice"),
        ("-1", "begin with a number"),
        ("3/0s", "at least 0.001 s"),
        ("3,how=proces", "way"),
        ("\u0663", "begin with a number"),
        ("3,oom=" + "9" * 300, "whole number"),
        ("3,\u00b2=1", "setting"),
        ("3,075=1", "setting"),
        ("3,run=-1", "whole number"),
        ("3,within=1e9", "not a duration"),
        ("3,backoff=9s:1s", "backoff must be FIRST:LONGEST"),
        ("1000001", "from 0 to 1,000,000"),
        ("", "begin with a number"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Restarts.parse(text)


def test_a_hang_limit_alone_has_a_hard_one_of_one_and_a_half_times() -> None:
    assert HangLimits.parse("2m") == HangLimits(120.0, 180.0)
    assert [str(HangLimits.parse(text)) for text in ("auto", "off", "90s:2m")] == ["auto", "off", "90s:120s"]
    for hang, start in ((None, None), ("off", "1h"), ("90s:2m", 20.5), (60, "auto"), ("auto", "20m")):
        limits = HangLimits.of(hang, start)
        assert HangLimits.parse(str(limits)) == limits, "the text of the limits is parsed to the same value"


def test_new_limits_on_hanging_leave_those_that_are_not_given_as_they_are() -> None:
    launched = HangLimits.of("2m:3m", "20m")
    assert launched.changed() == launched
    assert str(launched.changed(start_timeout="1h")) == "120s:180s,start=3600s"
    assert str(launched.changed("off")) == "off,start=1200s"
    assert str(launched.changed("1m", "auto")) == "60s:90s"


@pytest.mark.parametrize(
    "text", ["auto,", "auto,20m", "auto,begin=20m", "2m,start=soon", "2m,start=0", "2m,start=-5", "auto,start=1e12"]
)
def test_a_record_with_other_limits_on_hanging_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"hanging|start_timeout"):
        HangLimits.parse(text)


def test_the_second_of_two_writers_computes_again_after_the_first() -> None:
    store = MemoryStore()
    first, second = DecisionLog(store, "run"), DecisionLog(store, "run")
    seen = []

    def answer(log: object) -> Decision | None:
        seen.append(len(second.entries))
        if len(seen) == 1:
            first.append(lambda _: Decision(kind="cancel"))
        return decide(second.entries, end(), [], Restarts(), FACTS, now=1.0)

    assert second.append(answer) is None
    assert seen == [0, 1]


class LateReader(MemoryStore):
    """A store that shows each object only at the second look after it was written."""

    def __init__(self) -> None:
        super().__init__()
        self.late: set[str] = set()

    def put_if_absent(self, key: str, data: Data) -> bool:
        self.late.add(key)
        return super().put_if_absent(key, data)

    def get(self, key: str, *, start: int = 0, size: int | None = None) -> memoryview:
        if key in self.late:
            self.late.discard(key)
            raise KeyNotFoundError("not yet", key=key)
        return super().get(key, start=start, size=size)


def test_an_entry_that_is_read_late_is_recognized_as_its_own() -> None:
    log = DecisionLog(LateReader(), "run")
    entry = log.append(lambda entries: Decision(kind="stop") if not entries else None)
    assert entry is not None
    assert log.entries == [entry]


def test_an_entry_whose_answer_was_lost_counts_and_one_that_was_not_written_is_an_error() -> None:
    store = FaultyStore(MemoryStore(), seed=0)
    store.fail_at("put_if_absent", action="lost")
    log = DecisionLog(store, "run")
    assert log.append(lambda entries: Decision(kind="stop")) is not None
    store.fail_at("put_if_absent", action="error")
    with pytest.raises(StoreError, match="Injected"):
        log.append(lambda entries: Decision(kind="stop"))
    assert len(DecisionLog(store, "run").read()) == 1


def test_entries_are_never_older_than_those_before_them() -> None:
    store = MemoryStore()
    DecisionLog(store, "run", lambda: 9.0).append(lambda entries: Decision(kind="cancel"))
    DecisionLog(store, "run", lambda: 5.0).append(lambda entries: Decision(kind="cancel", start={3: 1}))
    assert [(entry.at, entry.start) for entry in DecisionLog(store, "run").read()] == [(9.0, {}), (9.0, {3: 1})]


def test_in_a_signed_run_an_unproved_order_ends_ranks_but_starts_none() -> None:
    store, key = MemoryStore(), "ab" * 32
    full: dict[str, Any] = {"rank": 1, "start": {0: 3}, "charged": True, "restarts": "9", "hang": "1h", "words": "why"}

    def forge(kind: str) -> None:
        DecisionLog(store, "run", lambda: 7e9).append(lambda _: Decision(kind=kind, **full))

    for kind in (*ENDING, *OTHERS):
        forge(kind)
    genuine = DecisionLog(store, "run", key=key).append(lambda _: Decision(kind="resume", start={0: 1}))
    assert genuine is not None
    store.put("run/decisions/000007.json", store.get("run/decisions/000006.json"))  # a replay of entry 6
    entries = DecisionLog(store, "run", lambda: 9.0, key=key).read()
    assert [entry.kind for entry in entries[:3]] == [*ENDING]
    assert {(entry.rank, entry.words, entry.at) for entry in entries[:3]} == {(1, "why", 9.0)}
    assert [(entry.start, entry.charged, entry.restarts, entry.hang) for entry in entries[:6]] == [
        ({}, False, None, None)
    ] * 6
    assert [entry.start for entry in entries[6:]] == [{0: 1}, {}]
    assert [entry.start for entry in DecisionLog(store, "run").read()] == [{0: 3}] * 6 + [{0: 1}] * 2
    altered = bytes(store.get("run/decisions/000006.json")).replace(b'{"0": 1}', b'{"0": 2}')
    store.put("run/decisions/000006.json", altered)
    assert DecisionLog(store, "run", key=key).read()[6].start == {}


@pytest.mark.parametrize("name", BAD_DECISIONS)
def test_an_entry_that_is_invalid_is_refused_by_its_key(name: str) -> None:
    store = MemoryStore()
    store.put("run/decisions/000000.json", b'{"kind": "stop", "rank": null, "color": "red"}')
    store.put("run/decisions/000001.json", BAD_DECISIONS[name])
    log = DecisionLog(store, "run")
    for _ in range(2):
        with pytest.raises(CorruptObjectError, match=r"run/decisions/000001\.json"):
            log.read()
    assert [entry.kind for entry in log.entries] == ["stop"]


def test_a_log_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(MemoryStore):
        def get(self, key: str, *, start: int = 0, size: int | None = None) -> memoryview:
            return memoryview(b'{"kind": "cancel"}')

    monkeypatch.setattr("executors.restarts.decision_log.MAX_DECISIONS", 50)
    with pytest.raises(CorruptObjectError, match="more than 50 decisions"):
        DecisionLog(Endless(), "run").read()
    monkeypatch.setattr("executors.restarts.decision_log.MAX_LOG_BYTES", 20 * len(b'{"kind": "cancel"}'))
    with pytest.raises(CorruptObjectError, match=r"run/decisions/000020\.json"):
        DecisionLog(Endless(), "run").read()


class Bucket(MemoryStore):
    """A distant store with a log of n decisions. It counts requests, and can fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, n_decisions: int) -> None:
        super().__init__()
        self._url = "s3://bucket"
        self.asked: list[str] = []
        self.at_once: list[int] = []
        self.fails: set[str] = set()
        for index in range(n_decisions):
            self.put(f"run/decisions/{index:06d}.json", Decision(kind="cancel", rank=index).to_bytes())
        monkeypatch.setattr("executors.store.parallel.in_parallel", self._in_parallel)

    def _in_parallel(self, act: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        before = len(self.asked)
        found = [*map(act, items)]
        self.at_once.append(len(self.asked) - before)
        return found

    @property
    def n_round_trips(self) -> int:
        return len(self.asked) - sum(self.at_once) + len(self.at_once)

    def get(self, key: str, *, start: int = 0, size: int | None = None) -> memoryview:
        self.asked.append(key)
        if key in self.fails:
            raise StoreError("no", key=key)
        return super().get(key, start=start, size=size)


def test_a_long_log_of_decisions_takes_few_round_trips(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Bucket(monkeypatch, 500)
    log = DecisionLog(store, "run")
    assert [entry.rank for entry in log.read()] == [*range(500)]
    assert store.n_round_trips <= 20
    assert max(store.at_once) <= 64, "a reader makes at most 64 requests at once"
    assert len(store.asked) <= 500 + 64, "at most 64 requests are for missing entries"


def test_a_look_at_a_log_to_which_nothing_was_added_is_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Bucket(monkeypatch, 100)
    log, other = DecisionLog(store, "run"), DecisionLog(store, "run")
    log.read()
    other.take_over(log)
    for each in (log, other):
        store.asked.clear()
        assert [entry.rank for entry in each.read()] == [*range(100)]
        assert len(store.asked) == 1
    log.append(lambda _: Decision(kind="cancel", rank=100))
    store.asked.clear()
    assert len(other.read()) == 101
    assert len(store.asked) == 2


def test_a_log_whose_reading_fails_half_way_is_read_on_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Bucket(monkeypatch, 100)
    log = DecisionLog(store, "run", n_skipped=10)
    store.fails = {"run/decisions/000070.json"}
    with pytest.raises(StoreError, match="no"):
        log.read()
    assert [entry.rank for entry in log.entries] == [*range(10, 70)]
    store.fails = {f"run/decisions/{index:06d}.json" for index in range(101, 200)}
    store.asked.clear()
    assert [entry.rank for entry in log.read()] == [*range(10, 100)], "requests beyond the end of the log may fail"
    assert min(store.asked) == "run/decisions/000070.json"


def test_a_log_takes_over_entries_of_another_log_only_if_both_have_the_same_key() -> None:
    store = MemoryStore()
    DecisionLog(store, "run").append(lambda _: Decision(kind="resume", start={0: 1}))
    believing, signed = DecisionLog(store, "run"), DecisionLog(store, "run", key="ab" * 32)
    believing.read()
    signed.take_over(believing)
    assert signed.entries == []
    assert signed.read()[0].start == {}


def test_a_restart_after_a_preemption_is_free() -> None:
    answer = decide([], end(reason="preempted"), [], Restarts(per_replica=0), FACTS, now=1.0)
    assert answer is not None
    assert (answer.kind, answer.charged, answer.not_before) == ("restart", False, 1.0)
    assert Restarts().cap("preempted", None) == ("preempted", math.inf)
