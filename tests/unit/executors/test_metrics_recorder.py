"""The reports of a replica become lines of write-once segments: not too many, no important one lost, and none twice."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from executors.errors import StoreError
from executors.metrics import recorder as module
from executors.metrics.recorder import Recorder
from executors.replica import Replica
from executors.store import MemoryStore
from executors.store.protocol import Data
from executors.worker.heartbeat import Heartbeat

ROUND = {"entry": 0, "verdict": "counted"}


class FailingStore(MemoryStore):
    """A store that fails while a test wants it to, before or after it has written."""

    fails: str | None = None

    def put_if_absent(self, key: str, data: Data) -> bool:
        if self.fails == "before":
            raise StoreError("the disk is full")
        created = super().put_if_absent(key, data)
        if self.fails == "after":
            raise StoreError("the reply was lost")
        return created


class Scene:
    """A recorder with a clock that the test sets."""

    def __init__(self, url: str = "memory://") -> None:
        self.now, self.store = 100.0, FailingStore()
        self.store._url = url
        self.store.put("run/run.json", b"{}")
        self.recorder = Recorder(self.store, "run", 3, 1, began=100.0, clock=lambda: self.now)
        self.replica = Replica(3, 4, "run", 1, url, recorder=self.recorder)

    def at(self, t: float) -> Scene:
        self.now = 100.0 + t
        return self

    def segments(self) -> list[list[dict[str, Any]]]:
        """Return the lines of each segment, except the lines about usage."""
        found = list(self.store.list("run/metrics/"))
        assert [entry.key for entry in found] == [f"run/metrics/0003/1/{n:06d}.jsonl" for n in range(len(found))]
        lines = [[json.loads(line) for line in bytes(self.store.get(e.key)).splitlines()] for e in found]
        return [[line for line in segment if "rss" not in line] for segment in lines]

    def lines(self) -> list[dict[str, Any]]:
        self.recorder.look(is_last=True)
        return [line for segment in self.segments() for line in segment]


def test_a_line_a_second_has_the_reports_since_the_previous_line() -> None:
    scene = Scene()
    scene.at(0.0).replica.report(step=1, loss=4.0)
    scene.at(0.2).replica.report(step=2, loss=3.0, eval_loss=9.0)
    scene.at(0.4).replica.report(step=3, loss=2.0)
    scene.at(1.1).replica.report(step=4, loss=1.0)
    scene.at(2.5).replica.report(step=5)
    assert scene.lines() == [
        {"t": 0.0, "step": 1, "loss": 4.0},
        {"t": 1.1, "step": 4, "loss": 1.0, "eval_loss": 9.0},
        {"t": 2.5, "step": 5},
    ]


def test_the_last_report_of_a_second_is_not_kept_back_until_the_next() -> None:
    scene = Scene()
    scene.at(0.0).replica.report(step=1)
    scene.at(0.5).replica.report(step=2)
    scene.at(3.0).recorder.look()
    scene.at(6.0).recorder.look()
    assert scene.segments() == [] or scene.segments()[0][-1] == {"t": 0.5, "step": 2}
    scene.at(9.0).recorder.look()
    assert scene.segments() == [[{"t": 0.0, "step": 1}, {"t": 0.5, "step": 2}]]


def test_the_first_two_reports_after_a_round_have_lines_of_their_own_however_soon_they_come() -> None:
    scene = Scene()
    scene.at(0.0).replica.report(loss=4.0)
    for n in range(3):
        scene.at(0.1 + n / 10).replica.record_round(scene.now, **{**ROUND, "entry": n})
        scene.at(0.15 + n / 10).replica.report(loss=n)
        scene.at(0.16 + n / 10).replica.report(loss=n + 0.5)
        scene.at(0.17 + n / 10).replica.report(loss=99.0)
    assert [line["loss"] for line in scene.lines() if "loss" in line] == [4.0, 0, 0.5, 1, 1.5, 2, 2.5, 99.0]


@pytest.mark.parametrize(
    ("url", "closed_at"),
    [("memory://", [5, 10, 15, 20]), ("s3://bucket", [5, 65, 125])],
    ids=["near", "a bucket, where each segment costs"],
)
def test_a_segment_is_closed_after_a_time_and_the_first_one_soon(url: str, closed_at: list[int]) -> None:
    scene, seen = Scene(url), list[int]()
    for t in range(closed_at[-1] + len(closed_at)):
        scene.at(t).replica.report(step=t)
        before = len(scene.segments())
        scene.recorder.look()
        seen += [t] if len(scene.segments()) > before else []
    assert [t - n for n, t in enumerate(seen)] == closed_at


def test_a_long_run_on_a_disk_has_fewer_segments() -> None:
    scene = Scene()
    scene.at(36_000.0).replica.report(step=1)
    scene.recorder.look()
    scene.at(36_059.0).recorder.look()
    assert scene.segments() == []
    scene.at(36_060.0).recorder.look()
    assert len(scene.segments()) == 1


def test_a_segment_is_closed_when_it_is_large_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", 100)
    scene = Scene()
    for step in range(8):
        scene.at(step).replica.report(step=step)
    scene.recorder.look()
    assert [len(segment) for segment in scene.segments()] == [5], "the remaining lines wait for the next segment"
    assert [line["step"] for line in scene.lines()] == list(range(8))


@pytest.mark.parametrize("fails", ["before", "after"])
def test_a_segment_that_cannot_be_written_waits_and_is_reported_once(
    fails: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = Scene()
    scene.store.fails = fails
    for t in range(30):
        scene.at(t).replica.report(step=t)
        scene.recorder.look()
    scene.store.fails = None
    assert [line["step"] for line in scene.at(40).lines()] == list(range(30)), "each line is written once"
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("replicas: rank 3: measurements wait in memory: ")


def test_waiting_lines_are_bounded_and_dropped_lines_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITING_BYTES", 1000)
    monkeypatch.setattr(module, "USAGE_S", 1e9)
    scene = Scene()
    scene.store.fails = "before"
    for t in range(2000):
        scene.at(2 * t).replica.report(step=t)
        scene.recorder.look()
        assert scene.recorder._n_bytes <= 1000
    scene.store.fails = None
    lines = scene.at(5000).lines()
    steps = [line["step"] for line in lines if "step" in line]
    assert steps[-1] == 1999
    assert len(steps) + sum(line.get("left_out", 0) for line in lines) == 2000


def test_a_very_long_attempt_has_fewer_and_fewer_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINES_PER_DOUBLING", 4)
    scene = Scene()
    for t in range(29):
        scene.at(t).replica.report(step=t)
    assert [line["step"] for line in scene.lines()] == [0, 1, 2, 3, 5, 7, 9, 11, 15, 19, 23, 27, 28]


def test_the_run_of_a_late_segment_is_not_made_again_when_it_was_deleted() -> None:
    scene = Scene()
    scene.replica.report(step=1)
    scene.store.delete("run/run.json")
    assert scene.at(9.0).lines() == []
    assert list(scene.store.list("")) == []


@pytest.mark.parametrize("name", ["t", "rank", "verdict", "rss", "left_out"])
def test_a_number_with_the_name_of_something_else_is_kept_under_another(name: str) -> None:
    scene = Scene()
    numbers: dict[str, Any] = {name: 7.0}
    scene.replica.report(**numbers)
    assert scene.lines() == [{"t": 0.0, f"{name}_": 7.0}]


def test_the_usage_of_a_process_is_recorded_every_half_minute_and_at_the_end() -> None:
    scene = Scene()
    for t in range(70):
        scene.at(t).recorder.measure()
        scene.recorder.look()
    scene.recorder.measure(is_last=True)
    scene.recorder.look(is_last=True)
    keys = [entry.key for entry in scene.store.list("run/metrics/")]
    lines = [json.loads(line) for key in keys for line in bytes(scene.store.get(key)).splitlines()]
    assert [line["t"] for line in lines] == [30.0, 60.0, 69.0]
    assert all(line["rss"] > 1 << 20 and line["cpu"] >= 0 for line in lines)


def test_the_recorded_use_is_that_of_the_gpus_with_memory_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved, percent = [0, 3 << 20, 1 << 20], [90, 20, 40]
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: len(reserved),
        memory_reserved=lambda device: reserved[device],
        utilization=lambda device=0: percent[device],
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert module._gpu_usage() == {"gpu_mem": 4 << 20, "gpu_use": 0.4}
    reserved[:] = [0, 0, 0]  # CUDA is initialized, and no tensor was made
    assert module._gpu_usage() == {"gpu_mem": 0, "gpu_use": 0.9}


@pytest.mark.parametrize("asker", ["the heartbeat", "the end"])
def test_a_gpu_that_never_answers_does_not_keep_an_attempt_from_ending(
    asker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, end = threading.Event(), threading.Event()

    def utilization(device: int) -> int:
        asked.set()
        assert end.wait(60)
        return 0

    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 1,
        memory_reserved=lambda device: 1,
        utilization=utilization,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    scene = Scene()
    scene.replica.__dict__["store"] = scene.store  # a cached property
    heartbeat = Heartbeat(scene.replica)
    if asker == "the heartbeat":
        scene.at(31.0)
        heartbeat.start()
        assert asked.wait(30)
    scene.at(40.0).replica.report(step=7)
    stopping = threading.Thread(target=heartbeat.stop, daemon=True)
    stopping.start()
    stopping.join(30)
    is_stopped = not stopping.is_alive()
    end.set()
    assert is_stopped
    assert asked.is_set()
    assert scene.segments() == [[{"t": 40.0, "step": 7}]]


def test_reporting_asks_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()

    def refuse(*_: object) -> Any:
        raise AssertionError("the training's thread asked the store")

    calls: list[Callable[..., Any]] = [scene.store.put, scene.store.put_if_absent, scene.store.get, scene.store.list]
    for call in calls:
        monkeypatch.setattr(scene.store, call.__name__, refuse)
    for step in range(1000):
        scene.at(step).replica.report(step=step)
        scene.replica.record_round(scene.now, **ROUND)
        scene.replica.record_left(name="main", work=1.0)
