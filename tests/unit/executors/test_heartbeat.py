"""The heartbeat ends when it is stopped, so nothing is written after the outcome."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from executors.attempt import Attempt
from executors.errors import StoreError
from executors.protocol import ReplicaStatus
from executors.replica import Replica
from executors.replica.shared_page import SharedPage
from executors.store import MemoryStore, open_store
from executors.store.protocol import Data
from executors.worker.heartbeat import Heartbeat
from executors.worker.log_copy import LogCopy


class GatedStore(MemoryStore):
    """A store that delays every `put` until the gate is opened."""

    def __init__(self) -> None:
        super().__init__("memory://gated")
        self.entered, self.gate = threading.Event(), threading.Event()
        self.puts = 0

    def put(self, key: str, data: Data) -> None:
        self.entered.set()
        assert self.gate.wait(30)
        super().put(key, data)
        self.puts += 1


def test_nothing_is_written_after_a_heartbeat_was_stopped() -> None:
    store = GatedStore()
    replica = Replica(0, 1, "run", 0, store.url, claimed_nonce="n")
    replica.__dict__["store"] = store  # a cached property
    heartbeat = Heartbeat(replica)
    puts_when_stopped: list[int] = []

    def stop() -> None:
        heartbeat.stop()
        puts_when_stopped.append(store.puts)

    beating = threading.Thread(target=heartbeat.beat)
    stopping = threading.Thread(target=stop)
    beating.start()
    assert store.entered.wait(30)
    stopping.start()
    stopping.join(0.1)  # a `stop` that wrongly does not wait would return now
    store.gate.set()
    for thread in (beating, stopping):
        thread.join(30)
    heartbeat.beat()
    assert puts_when_stopped == [1]
    assert store.puts == 1


def test_a_beat_counts_when_the_store_has_it_and_not_when_it_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    replica = Replica(0, 1, "run", 0, store.url, claimed_nonce="n")
    replica.__dict__["store"] = store
    replica.page = page = SharedPage()
    heartbeat = Heartbeat(replica)
    page.beaten = 0.0
    with monkeypatch.context() as patch:
        patch.setattr(store, "put", fail)
        heartbeat.beat()
    assert page.beaten == 0.0
    heartbeat.beat()
    assert page.beaten > 0.0


def fail(key: str, data: Data) -> None:
    raise StoreError("down")


def test_the_folder_of_a_deleted_run_is_not_made_again(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    attempt, log = Attempt(store, "run", 0), tmp_path / "log"
    store.put(attempt.key("started.json"), b"{}")
    log.write_text("printed")
    replica = Replica(0, 1, "run", 0, store.url, claimed_nonce="n")
    heartbeat = Heartbeat(replica)
    heartbeat.beat()
    assert attempt.has("heartbeat.json")
    shutil.rmtree(tmp_path / "run")
    replica.report(step=1)
    heartbeat.beat()
    heartbeat.stop()
    LogCopy(attempt, log).put(100)
    ended = attempt.new_outcome(ReplicaStatus.SUCCEEDED)
    assert attempt.record(ended).status == "succeeded"
    assert not (tmp_path / "run").exists()


def test_the_last_report_of_a_process_that_began_to_report_during_a_read_is_taken_too() -> None:
    page, first, second = SharedPage(), 1001, 1002

    class Store(MemoryStore):
        def get(self, key: str, *, start: int = 0, size: int | None = None) -> memoryview:
            found = super().get(key, start=start, size=size)
            page.speaker = second
            return found

    store = Store()
    replica = Replica(0, 1, "run", 0, store.url, claimed_nonce="n")
    replica.__dict__["store"] = store
    writer = Replica(0, 1, "run", 0, store.url, claimed_nonce="n")
    writer.__dict__["store"] = store
    replica.page = page
    page.speaker = first
    heartbeat = Heartbeat(replica)
    for step in (1, 2):
        writer.report(step=step)
        Heartbeat(writer, is_speaker=True).beat()
        heartbeat.take_reports()
    assert page.speaker == second
    assert replica.reported["step"] == 2
