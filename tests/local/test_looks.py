"""Tests the number of requests of a look at a run, and its result if the store's lists are late."""

from __future__ import annotations

import functools
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from servers.s3.server import BUCKET, S3Server, running_server
from support.hostile_records import local_handle, outcome_json, run_json

from executors import LocalProcessExecutor, Run, attach, launch, list_runs
from executors.attempt import WARNED, Attempt, replica_key
from executors.attempt.handles import keep_handles
from executors.backend import Observation, PendingReplica
from executors.errors import CorruptObjectError, ReplicaLostError
from executors.registry.run_index import remember
from executors.restarts.decision_log import Decision
from executors.run.resume import resume
from executors.run.run import view_of
from executors.store import Store, open_store
from executors.store.inventory import Inventory
from executors.store.memory import MemoryStore
from executors.store.protocol import Entry
from executors.store.url import existing_store
from executors.testing.executor_contract import task

ELSEWHERE = "another-host 0-0 1"
SIZES = (1, 8, 64)


@pytest.fixture(scope="module")
def _small_server() -> Iterator[S3Server]:
    with running_server(module="servers.s3.small") as server:
        yield server


@pytest.fixture
def bucket(_small_server: S3Server, s3: S3Server) -> S3Server:
    """A bucket that counts its requests. The fixture of the other bucket sets the credentials."""
    _small_server.empty()
    return _small_server


def write(store: Store, rank: int, name: str, value: object, attempt: int = 0) -> None:
    store.put(replica_key("wide", rank, attempt, f"{name}.json"), json.dumps(value).encode())


def write_run(store: Store, n: int) -> None:
    """Write a run whose replicas all train, on a machine that cannot be looked at from here."""
    store.put("wide/run.json", json.dumps(run_json(world_size=n)).encode())
    for rank in range(n):
        write(store, rank, "handle", local_handle(rank, run_id="wide", store_url=store.url, machine=ELSEWHERE))
        write(store, rank, "started", {"nonce": f"nonce {rank}"})
        write(store, rank, "heartbeat", {"at": time.time(), "step": rank})
    keep_handles(store, "wide", 0, [Attempt(store, "wide", rank).handle("local") for rank in range(n)])


def cost(bucket: S3Server, act: Callable[[], object]) -> int:
    """Call a function, and return its number of requests."""
    before = len(bucket.requests())
    act()
    return len(bucket.requests()) - before


@pytest.mark.parametrize("n", SIZES)
def test_a_look_at_a_run_is_one_list_and_the_heartbeats(bucket: S3Server, n: int) -> None:
    store = open_store(bucket.url("runs"))
    write_run(store, n)
    run = attach("wide", rendezvous=store.url)
    assert view_of(run).world_size == n
    assert cost(bucket, run.status) == 2 + n, (
        "status makes one list, reads the object with all handles, and reads each heartbeat"
    )
    assert cost(bucket, run.status) == 1 + n
    assert [state.reported["step"] for state in run.status().replicas] == list(range(n))
    assert cost(bucket, lambda: run.wait(timeout=0)) == 1
    assert cost(bucket, run.outcomes) == 1


def test_warnings_cost_status_no_request_and_one_read_for_each_attempt(bucket: S3Server) -> None:
    store, n = open_store(bucket.url("runs")), 8
    write_run(store, n)
    for rank in range(n):
        one = {"text": f"of {rank}", "at": 2000.0 + rank, "last_at": 2000.0 + rank, "count": 2}
        write(store, rank, "warnings", {"warnings": [one]})
        count = {"count": 1, "first": f"of {rank}", "first_at": 2000.0 + rank}
        write(store, rank, "heartbeat", {"at": time.time(), "step": rank, WARNED: count})
    run = attach("wide", rendezvous=store.url)
    assert view_of(run).world_size == n
    assert cost(bucket, run.status) == 2 + n, (
        "status makes one list, reads the object with all handles, and reads each heartbeat"
    )
    assert cost(bucket, run.status) == 1 + n
    assert (run.status().n_warnings, run.status().warnings[0].text) == (n, "of 0")
    assert cost(bucket, lambda: run.wait(timeout=0)) == 1
    assert cost(bucket, run.warnings) == 1 + n, (
        "warnings() makes one list, and reads one record for each attempt with warnings"
    )
    assert [(each.rank, each.text, each.count) for each in run.warnings()][:2] == [(0, "of 0", 2), (1, "of 1", 2)]


def test_the_log_of_decisions_is_read_once_another_process_has_ended_and_from_where_it_was_read_to(
    bucket: S3Server,
) -> None:
    store = open_store(bucket.url("runs"))
    write_run(store, 2)
    store.put("wide/run.json", json.dumps(run_json(world_size=2, restarts="3")).encode())
    run = attach("wide", rendezvous=store.url)
    run.wait(timeout=0)
    assert cost(bucket, lambda: run.wait(timeout=0)) == 1, "no rank has ended, so a look is one list"
    write(store, 0, "outcome", outcome_json(0, status="failed", reason="signal"))
    assert cost(bucket, lambda: run.wait(timeout=0)) == 3, (
        "a look makes one list, reads the outcome, and asks once for new decisions"
    )
    store.put("wide/decisions/000000.json", Decision(kind="restart", rank=0, ended=0, start={0: 1}).to_bytes())
    assert [cost(bucket, lambda: run.wait(timeout=0)) for _ in range(2)] == [3, 2]
    assert run.status().replicas[0].status == "pending"


def test_ls_of_a_bucket_does_not_list_the_measurements_of_runs(
    bucket: S3Server, state_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(bucket.url("runs"))
    for number in range(3):
        store.put(f"run-{number}/run.json", json.dumps(run_json(created_at=3000.0 - number)).encode())
        for segment in range(40):
            store.put(f"run-{number}/metrics/0000/0/{segment:06d}.jsonl", b"")
    store.put("broken/run.json", b"{half a rec")
    store.put("plan/probe", b"")
    store.put("Odd_Name/run.json", b"")
    client = existing_store(store.url)._client  # type: ignore[attr-defined]
    in_pages = functools.partial(client.list_objects_v2, MaxKeys=10)
    monkeypatch.setattr(client, "list_objects_v2", in_pages)
    found: list[Run] = []
    n_requests = cost(bucket, lambda: found.extend(list_runs(store.url)))
    assert {run.run_id for run in found} == {"run-0", "run-1", "run-2", "broken"}
    assert [run.run_id for run in found if run.run_id != "broken"] == ["run-2", "run-1", "run-0"], "oldest first"
    assert n_requests <= 1 + 5 + 2, "ls makes one list, reads the records, and reads the unreadable one twice more"


def test_runs_that_this_machine_knows_at_a_bucket_are_asked_for_at_once(
    bucket: S3Server, state_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(bucket.url("runs"))
    for number in range(30):
        run_id = f"run-{number}"
        store.put(f"{run_id}/run.json", json.dumps(run_json(created_at=number)).encode())
        remember(run_id, store.url)
    at_once: list[int] = []

    def in_turn(act: Callable[[object], object], items: Sequence[object]) -> list[object]:
        at_once.append(len(items))
        return [*map(act, items)]

    monkeypatch.setattr("executors.store.parallel.in_parallel", in_turn)
    assert [run.run_id for run in list_runs()] == [f"run-{number}" for number in range(30)]
    assert at_once == [29], "all records but the first are requested at the same time"


def test_reading_events_costs_a_listing_the_claims_the_first_reports_and_the_log(bucket: S3Server) -> None:
    store = open_store(bucket.url("runs"))
    write_run(store, 8)
    for rank in range(8):
        write(store, rank, "started", {"nonce": f"nonce {rank}", "at": 2000.0 + rank})
        store.put(f"wide/metrics/{rank:04d}/0/000000.jsonl", b'{"t": 1.5, "step": 1}\n')
    run = attach("wide", rendezvous=store.url)
    assert view_of(run).world_size == 8
    kinds: list[str] = []
    assert cost(bucket, lambda: kinds.extend(event.kind for event in run.events())) == 2 + 8 + 8 + 1
    assert sorted(kinds) == ["claimed"] * 8 + ["first_progress"] * 8 + ["launched"]


def test_a_process_that_launches_or_resumes_at_a_bucket_leaves_the_handles_together(
    bucket: S3Server, local: LocalProcessExecutor
) -> None:
    run = launch(local, task("fail"), 2, args={"message": "no"}, run_id="wide", rendezvous=bucket.url("runs"))
    for number in (0, 1):
        assert run.wait(60)
        other = attach(run.url)
        assert view_of(other).world_size == 2
        before = len(bucket.requests("GET", "handle"))
        assert [handle.metadata["attempt"] for handle in other.handles] == [number] * 2
        asked = [row["path"] for row in bucket.requests("GET", "handle")[before:]]  # supervisors still read others
        assert asked == [f"/{BUCKET}/runs/wide/handles/{number}.json"], "attach reads the object with all handles"
        run = resume(other) if number == 0 else run


def test_handles_that_cannot_be_read_together_are_read_one_by_one(bucket: S3Server) -> None:
    store = open_store(bucket.url("runs"))
    write_run(store, 2)
    handles = attach("wide", rendezvous=store.url).handles
    theirs = [{**local_handle(rank, run_id="another", attempt=7)} for rank in (0, 0)]
    for copy in (5, {"handles": [5]}, {"handles": [{**theirs[0], "backend_name": "x"}]}):
        store.put("wide/handles/0.json", json.dumps(copy).encode())
        assert attach("wide", rendezvous=store.url).handles == handles
    store.put("wide/handles/0.json", json.dumps({"handles": theirs}).encode())
    first, second = attach("wide", rendezvous=store.url).handles
    place = {"store_url": store.url, "run_id": "wide", "attempt": 0}
    assert first.metadata.items() >= place.items(), "the place of a handle decides which replica it belongs to"
    assert second == handles[1]


@pytest.mark.parametrize("n", SIZES)
def test_records_of_ended_ranks_are_read_once(bucket: S3Server, n: int) -> None:
    store = open_store(bucket.url("runs"))
    write_run(store, n)
    run = attach("wide", rendezvous=store.url)
    run.status()
    for rank in range(n):
        write(store, rank, "outcome", outcome_json(rank))
    assert cost(bucket, run.status) == 1 + 2 * n, (
        "status makes one list, and reads the outcomes and the last heartbeats"
    )
    assert cost(bucket, run.status) == 1
    assert cost(bucket, run.results) == 2, "results() makes two requests: one for the wait, and one for new resumes"


def test_sixty_four_replicas_watched_for_an_hour_are_at_most_60_000_requests(bucket: S3Server) -> None:
    n, until_s = 64, 3600.0
    store = open_store(bucket.url("runs"))
    write_run(store, n)
    run = attach("wide", rendezvous=store.url)
    first, each = (cost(bucket, run.status) for _ in range(2))
    times = itertools.takewhile(lambda at: at < until_s, itertools.accumulate(view_of(run).reader.pauses()))
    assert first + each * sum(1 for _ in times) <= 60_000


def test_a_directory_is_looked_at_often(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write_run(store, 1)
    assert sum(itertools.islice(view_of(Run(store, "wide")).reader.pauses(), 20)) < 10


class CountingExecutor(LocalProcessExecutor):
    """An executor that records which replicas it is asked about."""

    def __init__(self) -> None:
        super().__init__(preload=())
        self.asked: list[list[tuple[int, int]]] = []

    def observe(self, replicas: Sequence[PendingReplica]) -> list[Observation]:
        self.asked.append([(each.handle.rank, each.attempt) for each in replicas])
        return [Observation(doing="scheduling") for _ in replicas]


def test_the_backend_is_asked_once_a_look_about_all_that_have_not_ended() -> None:
    store, executor = MemoryStore.named("asked-once"), CountingExecutor()
    write_run(store, 4)
    write(store, 1, "outcome", outcome_json(1))
    write(store, 2, "started", {"nonce": "a second copy"}, attempt=1)
    run = Run(store, "wide", executor=executor)
    run.status()
    run.wait(timeout=0)
    assert executor.asked == [[(0, 0), (2, 1), (3, 0)]] * 2


def test_the_reason_for_a_replicas_wait_is_shown() -> None:
    store = MemoryStore.named("doing")
    write_run(store, 1)
    store.delete("wide/replicas/0000/0/started.json")
    run = Run(store, "wide", executor=CountingExecutor())
    assert (run.status().replicas[0].status, run.status().replicas[0].note) == ("pending", "scheduling")
    write(store, 0, "boot", {"at": time.time(), "doing": "installing"})
    assert run.status().to_json()["replicas"][0]["doing"] == "installing"
    write(store, 0, "started", {"nonce": "it runs"})
    assert run.status().replicas[0].note != "installing"


def test_a_newer_attempt_is_seen_with_its_own_handle() -> None:
    store, executor = MemoryStore.named("newer"), CountingExecutor()
    write_run(store, 1)
    write(store, 0, "outcome", outcome_json(0, status="failed", reason="lost"))
    run = Run(store, "wide", executor=executor)
    assert run.status().status == "failed"
    metadata = {"run_id": "wide", "store_url": store.url, "machine": ELSEWHERE, "attempt": 1}
    write(store, 0, "handle", local_handle(0, **metadata), attempt=1)
    assert (run.status().status, view_of(run).reader.handles.of(0).metadata["attempt"]) == ("pending", 1)
    assert executor.asked == [[(0, 1)]]


class HeldStore(MemoryStore):
    """A store that delays its first list until the test allows it."""

    def __init__(self) -> None:
        super().__init__("memory://held")
        self.is_listed, self.may_go = threading.Event(), threading.Event()

    def list(self, prefix: str) -> Iterator[Entry]:
        found = list(super().list(prefix))
        if not self.is_listed.is_set():
            self.is_listed.set()
            assert self.may_go.wait(30)
        return iter(found)


def test_of_two_threads_that_look_at_the_same_time_neither_removes_records_that_the_other_found() -> None:
    store = HeldStore()
    write_run(store, 1)
    run = Run(store, "wide", executor=CountingExecutor())
    early = threading.Thread(target=run.status)  # as run.show() does during run.wait()
    early.start()
    assert store.is_listed.wait(30)
    write(store, 0, "outcome", outcome_json(0, status="failed", reason="lost"))
    write(store, 0, "intent", {"nonce": "n", "by": "another", "at": time.time()}, attempt=1)
    assert view_of(run).newest_attempt(0).number == 1
    store.may_go.set()
    early.join(30)
    assert view_of(run).reader.records.attempt(0).number == 1


class LateStore(MemoryStore):
    """A store whose lists do not show the newest objects."""

    listed: list[Entry] | None = None

    def list(self, prefix: str) -> Iterator[Entry]:
        return super().list(prefix) if self.listed is None else iter(self.listed)


def test_a_late_list_takes_nothing_back() -> None:
    store = LateStore("late")
    write_run(store, 2)
    run = Run(store, "wide", executor=CountingExecutor())
    early = list(store.list("wide/replicas/0000/"))
    write(store, 0, "outcome", outcome_json(0, status="failed", reason="lost"))
    write(store, 1, "started", {"nonce": "a second copy"}, attempt=1)
    now = [(state.status, state.attempt) for state in run.status().replicas]
    store.listed = early
    assert [(state.status, state.attempt) for state in run.status().replicas] == now == [("failed", 0), ("running", 1)]


def test_an_inventory_knows_the_records_and_no_other_key() -> None:
    store = MemoryStore("foreign")
    for key in (
        "0000/0/started.json",
        "0000/0/artifacts/0000/0/outcome.json",
        "00001/0/started.json",
        "0002/00/started.json",
        "0003/0/started.json/more",
        "0004/\N{ARABIC-INDIC DIGIT ONE}/started.json",
        "0005/0/else.json",
        "0006/12345/outcome.json",
        "0007/2/outcome.json",
        "12345678/0/outcome.json",
        "10000/0/intent.json",
    ):
        store.put(f"wide/replicas/{key}", b"{}")
    found = Inventory.of(store, "wide")
    assert found.records == {(0, 0, "started"), (7, 2, "outcome"), (10_000, 0, "intent")}
    assert (found.newest(7), found.newest_launched(7), found.newest_launched(10_000)) == (0, None, 0)


@pytest.fixture
def damaged() -> Run:
    """A run of four ranks: one has succeeded, one has a damaged outcome, one a foreign handle, and one trains without a
    handle.
    """
    store = MemoryStore("damaged")
    write_run(store, 4)
    write(store, 0, "outcome", outcome_json(0))
    write(store, 1, "outcome", {"rank": 1})
    store.put(replica_key("wide", 2, 0, "handle.json"), b'{"rank": 2, "backend_name": "modal", "metadata": {}}')
    return Run(store, "wide", executor=CountingExecutor())


def test_one_unreadable_record_does_not_hide_the_other_ranks(damaged: Run) -> None:
    first, second, third, fourth = damaged.status().replicas
    assert (first.status, second.status, third.status, fourth.status) == ("succeeded", "failed", "running", "running")
    assert "'wide/replicas/0001/0/outcome.json' in memory:" in second.note
    assert "'wide/replicas/0002/0/handle.json' in memory:" in third.note
    assert "'attempt' is missing" in second.to_json()["note"]
    assert not fourth.is_over
    write(view_of(damaged).store, 3, "outcome", outcome_json(3))
    assert damaged.wait(60), "wait() returns, because the rank that cannot be read counts as ended"
    assert damaged.status().status == "failed"
    assert [outcome.status for outcome in damaged.outcomes()] == ["succeeded", "failed", "failed", "succeeded"]
    with pytest.raises(ReplicaLostError, match=r"wide/replicas/0001/0/outcome\.json"):
        damaged.results()
    write(view_of(damaged).store, 2, "outcome", outcome_json(2))
    assert damaged.status().replicas[2].status == "succeeded", "status shows the outcome that was written later"


def test_a_handle_that_cannot_be_read_is_named_once_the_others_were_cancelled(damaged: Run) -> None:
    cancelled = []
    view_of(damaged).executor.cancel = lambda handle: cancelled.append(handle.rank)  # type: ignore[method-assign]
    with pytest.raises(CorruptObjectError, match=r"0002/0/handle\.json"):
        damaged.cancel()
    assert cancelled == [3]
