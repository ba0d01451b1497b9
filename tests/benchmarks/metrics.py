"""Measuring: the cost of a report for the training (M1), and the time to read a long run's segments (M3)."""

from __future__ import annotations

import time
from pathlib import Path

from executors.metrics.metrics import read_metrics
from executors.metrics.recorder import Recorder
from executors.replica import Replica
from executors.store.file import FileStore
from executors.task.record import RunRecord

from .harness import Comparison, Options
from .launch import scratch_folder

STEP_S = 0.005
ROUND_S = 30
RECORD = {
    "entrypoint": "train.py:main", "task_digest": "0" * 64, "created_at": 1.7e9,
    "settings": {"n": 8}, "placements": [{"backend": "local", "ranks": [*range(8)]}],
}  # fmt: skip


class Clock:
    """A clock that the benchmark sets: eight hours take seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def metrics(options: Options) -> list[Comparison]:
    """M1 and M3."""
    with scratch_folder("metrics-") as name:
        return [*_reporting(Path(name), options), _reading(Path(name), options)]


def _replica(store: FileStore, rank: int, clock: Clock) -> Replica:
    store.put_if_absent("run/run.json", b"{}")
    recorder = Recorder(store, "run", rank, 0, began=0.0, clock=clock)
    return Replica(rank, 8, "run", 0, store.url, recorder=recorder)


def _reporting(folder: Path, options: Options) -> list[Comparison]:
    """M1: processor time, so that other programs are not counted."""
    clock, calls, shares = Clock(), list[float](), list[float]()
    replica = _replica(FileStore(folder / "reporting"), 0, clock)
    assert replica.recorder is not None
    n_steps = 200 if options.quick else round(10 / STEP_S)
    for _ in range(options.repetitions(5)):
        in_calls = beside = 0.0
        for step in range(n_steps):
            clock.now += STEP_S
            began = time.process_time()
            replica.report(step=step, loss=0.5, lr=1e-4)
            in_calls += time.process_time() - began
            if not step % round(1 / STEP_S):  # the heartbeat's thread does the same
                began = time.process_time()
                replica.recorder.look()
                beside += time.process_time() - began
        calls.append(1e6 * in_calls / n_steps)
        shares.append(100 * (in_calls + beside) / (n_steps * STEP_S))
    return [
        Comparison("M1", "report() at every step, a call", "us", {"report()": calls}, goals={"report()": 20.0}),
        Comparison("M1", "reporting at every step of 5 ms, with what is written", "% of a step",
                   {"report()": shares}, goals={"report()": 1.0}),
    ]  # fmt: skip


def _reading(folder: Path, options: Options) -> Comparison:
    """M3: segments like those that replicas write."""
    store = FileStore(folder / "reading")
    n_ranks, n_seconds = (2, 120) if options.quick else (8, 8 * 3600)
    for rank in range(n_ranks):
        clock = Clock()
        replica = _replica(store, rank, clock)
        assert replica.recorder is not None
        for second in range(n_seconds):
            clock.now = float(second)
            replica.report(step=second, loss=2.0 + 1 / (second + 1), lr=1e-4)
            if not second % ROUND_S:
                replica.record_round(
                    clock.now, entry=second // ROUND_S, fragment=0, ranks=[*range(n_ranks)], verdict="counted",
                    weight=500, up=10**6, down=10**6, train_s=29.0, wait_s=0.25, move_s=0.25, reduce_s=0.25,
                    step_s=0.25, norm=1.5, mean_norm=1.0,
                )  # fmt: skip
            replica.recorder.look()
        replica.recorder.look(is_last=True)
    seconds = []
    for _ in range(options.repetitions(3)):
        began = time.monotonic()
        found = read_metrics(store, "run", RunRecord.parse(RECORD))
        seconds.append(time.monotonic() - began)
        if found.problems or len(found.rounds) != n_ranks * n_seconds // ROUND_S:
            raise RuntimeError(f"{len(found.numbers)} lines were read: {found.problems}")
    n_segments = sum(1 for _ in store.list("run/metrics/"))
    title = (
        f"run.metrics() of {n_seconds / 3600:g} h of {n_ranks} replicas, {len(found):,} lines in {n_segments:,} files"
    )
    return Comparison("M3", title, "s", {"read_metrics": seconds}, goals={"read_metrics": 3.0})
