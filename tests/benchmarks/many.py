"""Measures what the number of replicas costs. It makes docs/results/many.json.

    python -m tests.benchmarks.many --write docs/results/many.json

Simulated replicas run the real code of the rounds against a bucket that takes 30 ms for each answer. The clock and the
training are simulated, so a round of 60 s with 512 replicas takes seconds. Requests, bytes and simulated seconds do
not depend on this machine. `replicas status` and the page of a run read records that this benchmark writes into a
store in memory, and their seconds are real.

An exponent is the slope between the two largest sizes: 1 grows like N, 2 grows like N squared.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

from greenlet import getcurrent  # type: ignore[import-untyped]

from .harness import machine

sys.path.insert(0, str(Path(__file__).parents[1]))  # the simulation and the supports of the tests

from simulation.scenario import CALM
from simulation.simulation import Simulation
from simulation.world import SimulatedStore
from support.made_up_runs import Scene, made_up
from support.new_runs import create_run

from diloco.rendezvous.frames import MAX_SHARDS
from diloco.rendezvous.retrying_store import THREADS
from diloco.rendezvous.round import Layout, Limits
from diloco.wires import FP32, WIRES
from executors.attempt import Attempt
from executors.store import Entry, MemoryStore
from executors.store.records import to_bytes
from executors.view.report.document import document
from executors.view.report.page import page
from executors.view.run_view import RunView

T = TypeVar("T")
R = TypeVar("R")
COMMAND = "python -m tests.benchmarks.many --write docs/results/many.json"
ANSWER_S, PHASE_S, SPREAD_S = 0.03, 60.0, 1.5
"""Seconds for an answer of the bucket, for the training between two rounds, and the spread of that time."""
ROUNDS = 3
PAGE_KEYS = 1000
"""Keys in one answer to a list request of S3."""
WRITES_PER_S, READS_PER_S = 3500, 5500
"""Requests in a second that S3 promises for one prefix.

Source: docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance.html
"""
READING = ("get", "list")
LINK_BYTES_PER_S = 125e6
GOAL_N = 1024
REPORTS = 20
"""Rounds of the run whose page is measured."""
QUANTITIES = {
    "requests": "requests of a replica in a round",
    "sealer": "most requests of one replica in a round",
    "bucket_per_s": "requests to the bucket in a second, on average",
    "busiest_reads": "reads from the bucket in the busiest second of a round",
    "busiest_writes": "writes to the bucket in the second with most writes",
    "decide_s": "seconds from the last contribution until all replicas have the mean",
    "seal_kb": "kB of a seal",
    "read_kb": "kB that a replica reads in a round besides the model",
    "models": "models that the busiest replica reads in a round, of 1B parameters",
    "start": "requests of a replica before its first round",
    "keys": "keys in the list that cleans up after a snapshot",
    "status_requests": "requests of `replicas status`",
    "status_s": "seconds of processor time of `replicas status`",
    "page_mb": "MB of the page of a run",
    "page_s": "seconds to make the page of a run",
}


class CountingStore(SimulatedStore):
    """A simulated store that counts requests by process, and lets one process ask several questions at once."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.asked: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        """Requests by the kind of object: the part of the key before the numbers of a rank or of an entry."""
        self.read_bytes: Counter[str] = Counter()
        self.reads: Counter[int] = Counter()
        """Reads and lists by second of the simulation."""
        self.writes: Counter[int] = Counter()
        """Writes and deletions by second of the simulation."""
        self.longest_list = 0
        self._at_once: set[object] = set()
        """The processes that ask several questions at once. `map_at_once` waits for the answers of all of them."""

    def _before(self, verb: str, key: str, upload_s: float = 0.0) -> None:
        self.asked[self._world.who()] += 1
        self.kinds[next((part for part in reversed(key.split("/")) if part.isalpha()), key)] += 1
        if getcurrent() not in self._at_once:
            (self.reads if verb in READING else self.writes)[int(self._world.now)] += 1
            super()._before(verb, key, upload_s)

    def get(self, key: str, *, start: int = 0, size: int | None = None) -> memoryview:
        data = super().get(key, start=start, size=size)
        self.read_bytes[self._world.who()] += len(data)
        return data

    def list(self, prefix: str) -> Iterator[Entry]:
        found = list(super().list(prefix))
        self.longest_list = max(self.longest_list, len(found))
        for _ in range(-(-len(found) // PAGE_KEYS) or 1):
            self._before("list", prefix)
        return iter(found)

    def map_at_once(self, act: Callable[[T], R], things: Iterable[T]) -> Iterator[R]:
        """Apply a function that reads to several arguments, as `ParallelMap` does with its threads.

        Args:
            act: the function.
            things: the arguments.
        """
        me, before, listed = getcurrent(), self.asked[self._world.who()], list(things)
        self._at_once.add(me)
        found = [act(thing) for thing in listed]
        self._at_once.discard(me)
        asked = self.asked[self._world.who()] - before
        self.reads.update(int(self._world.now + number // THREADS * self._answer_s) for number in range(asked))
        self._world.sleep(self._answer_s * math.ceil(asked / THREADS))
        return iter(found)


def rounds_of(n: int) -> dict[str, float]:
    """Simulate rounds of n replicas, and return their cost.

    Args:
        n: the number of replicas.
    """
    scenario = replace(
        CALM, world_size=n, entries=[ROUNDS] * n, sharded=False, step_s=(PHASE_S - SPREAD_S, PHASE_S + SPREAD_S),
        answer_s=ANSWER_S, snapshot_every=2, until_s=20 * PHASE_S,
    )  # fmt: skip
    run = Simulation(scenario, is_traced=False)
    run.store = store = CountingStore(run.world, answer_s=ANSWER_S)
    run.map = store.map_at_once
    marks: list[tuple[dict[str, int], dict[str, int]]] = []
    for entry in range(ROUNDS):
        store.when_created(f"seal/{entry}", lambda: marks.append((dict(store.asked), dict(store.read_bytes))))
    run.run()
    if run.live or run.failures:
        raise RuntimeError(f"{len(run.live)} of {n} replicas did not finish: {run.failures[:1]}")
    names = [process.name for process in run.processes]
    (first, _), (asked, read), (asked_later, read_later) = marks[0], marks[-2], marks[-1]
    in_round = [asked_later.get(name, 0) - asked.get(name, 0) for name in names]
    seal = store.objects[run.keys.seal(ROUNDS - 1)]
    sent = [run.keys.contribution(ROUNDS - 2, rank) for rank in range(n)]
    if missing := [key for key in sent if key not in store.created_s]:
        raise RuntimeError(f"{len(missing)} of {n} replicas sent no work in a round, such as {missing[0]}.")
    sent_s = max(store.created_s[key] for key in sent)
    seconds = range(*(int(store.created_s[run.keys.seal(entry)]) for entry in (ROUNDS - 2, ROUNDS - 1)))
    adopted_s = max(process.adopted_s[ROUNDS - 2] for process in run.processes)
    return {
        "requests": fmean(in_round),
        "sealer": max(in_round),
        "bucket_per_s": sum(in_round) / PHASE_S,
        "busiest_reads": max(store.reads[second] for second in seconds),
        "busiest_writes": max(store.writes[second] for second in seconds),
        "decide_s": adopted_s - sent_s,
        "seal_kb": len(seal) / 1e3,
        "read_kb": fmean(read_later.get(name, 0) - read.get(name, 0) for name in names) / 1e3,
        "models": models_read(n),
        "start": median(first.get(name, 0) for name in names),
        "keys": store.longest_list,
    }


def bytes_read(n: int, layout: Layout) -> float:
    """Return the bytes that the busiest replica reads in a round.

    It averages one shard of all contributions, and reads the other shards of the mean.

    Args:
        n: the number of replicas.
        layout: the layout of the model.
    """
    n_shards = layout.n_shards(n)
    assert n_shards <= MAX_SHARDS
    return ((n - 1) * layout.size_bytes + (n_shards - 1) * layout.mean_bytes) / n_shards


def models_read(n: int) -> float:
    """Return how many times the size of a model of 1B parameters the busiest replica reads in a round.

    Args:
        n: the number of replicas.
    """
    layout = Layout(10**9, Limits(), FP32, FP32)
    return bytes_read(n, layout) / layout.size_bytes


class CountingMemory(MemoryStore):
    """A store in memory that counts requests."""

    def __init__(self) -> None:
        super().__init__("many")
        self.requests = 0

    def get(self, key: str, *, start: int = 0, size: int | None = None) -> memoryview:
        self.requests += 1
        return super().get(key, start=start, size=size)

    def list(self, prefix: str) -> Iterator[Entry]:
        found = list(super().list(prefix))
        self.requests += -(-len(found) // PAGE_KEYS) or 1
        return iter(found)


def views_of(n: int) -> dict[str, float]:
    """Read the state of a run of n replicas, make its page, and return the cost.

    Args:
        n: the number of replicas.
    """
    store = CountingMemory()
    create_run(store, "many", "job.py:main", {}, n, backend="local")
    for rank in range(n):
        attempt = Attempt(store, "many", rank, 0)
        attempt.store.put_if_absent(attempt.key("claim.json"), to_bytes({"nonce": f"n{rank}"}))
        attempt.store.put_if_absent(attempt.key("started.json"), to_bytes({"nonce": f"n{rank}", "host": "far"}))
        attempt.store.put(attempt.key("heartbeat.json"), to_bytes({"at": time.time(), "step": 7, "loss": 0.5}))
    taken_s = []
    for _ in range(3):
        view = RunView(store, "many")
        before, began = store.requests, time.process_time()
        view.status(reports=True)
        status_requests = store.requests - before
        taken_s.append(time.process_time() - began)
    made = made_up(Scene(n=n, rounds=REPORTS, inner=10, every=10))
    began = time.process_time()
    text = page(document(made))
    return {
        "status_requests": status_requests,
        "status_s": median(taken_s),
        "page_mb": len(text.encode()) / 1e6,
        "page_s": time.process_time() - began,
    }


@dataclass(frozen=True)
class Cost:
    """One quantity at all sizes.

    Attributes:
        name: its key in `QUANTITIES`.
        values: the values by number of replicas.
    """

    name: str
    values: dict[int, float]

    @property
    def exponent(self) -> float | None:
        """The slope between the two largest sizes, on logarithmic axes. None: there is one size, or nothing grows."""
        known = sorted(n for n, value in self.values.items() if value > 0)
        if len(known) < 2:
            return None
        few, many = known[-2:]
        slope = math.log(self.values[many] / self.values[few]) / math.log(many / few)
        return slope if slope >= 0 else None


def costs(rounds_at: Sequence[int], views_at: Sequence[int]) -> list[Cost]:
    """Measure all quantities.

    Args:
        rounds_at: the numbers of replicas whose rounds are simulated.
        views_at: the numbers of replicas of the runs that are looked at.
    """
    found: dict[str, dict[int, float]] = {name: {} for name in QUANTITIES}
    for measure, sizes in ((rounds_of, rounds_at), (views_of, views_at)):
        for n in sizes:
            began = time.process_time()
            for name, value in measure(n).items():
                found[name][n] = value
            print(f"{measure.__name__}({n}) took {time.process_time() - began:.1f} s of a core", file=sys.stderr)
    return [Cost(name, values) for name, values in found.items()]


def results(found: Sequence[Cost]) -> dict[str, Any]:
    """Return the content of `docs/results/many.json`.

    Args:
        found: all quantities.
    """
    sizes = sorted({n for cost in found for n in cost.values})
    rows = [
        {
            "cost": QUANTITIES[cost.name],
            **{str(n): value for n, value in cost.values.items()},
            "exponent": cost.exponent,
        }
        for cost in found
    ]
    where = machine()
    return {
        "title": "What N costs",
        "about": about(found),
        "command": COMMAND,
        "machine": f"{where['cpu']}, {where['cores']} cores, load {where['load_1m']:.0f}, Python {where['python']}",
        "tables": [
            {
                "caption": f"Rounds of {PHASE_S:g} s, a bucket that answers in {ANSWER_S * 1e3:g} ms, {THREADS} reads "
                "at once. A quantity with the exponent 1 grows like N, and one with 2 like N squared. The exponent is "
                "the slope between the two largest sizes, and empty if nothing grows. Other empty cells were not "
                "measured:",
                "columns": {"cost": "cost", **{str(n): f"N = {n:,}" for n in sizes}, "exponent": "exponent"},
                "rows": rows,
            }
        ],
    }


def about(found: Sequence[Cost]) -> str:
    """Return the text of the section.

    Args:
        found: all quantities.
    """
    by_name = {cost.name: cost for cost in found}
    largest = max(by_name["bucket_per_s"].values)
    names = ("bucket_per_s", "busiest_reads", "busiest_writes", "decide_s")
    per_s, reads, writes, decide_s = (by_name[name].values[largest] for name in names)
    end = math.floor(min(READS_PER_S / reads, WRITES_PER_S / writes) * largest)
    is_promised = reads <= READS_PER_S and writes <= WRITES_PER_S
    return (
        "Simulated replicas run the real code of the rounds, from one seed. Their clock and their training are "
        "simulated, and a contribution is small. So requests, bytes and the seconds of a round do not depend on the "
        "machine. The seconds of processor time do.\n\n"
        f"The goal is that N = {GOAL_N:,} is comfortable on an ordinary bucket. N = {largest:,} makes {per_s:,.0f} "
        f"requests in a second on average. In the busiest seconds of a round there are {reads:,.0f} reads or "
        f"{writes:,.0f} writes. All replicas have the mean {decide_s:.1f} s after the last contribution. S3 promises "
        f"{READS_PER_S:,} reads and {WRITES_PER_S:,} writes in a second for each prefix, so these requests are "
        f"{'within' if is_promised else 'above'} its promise. If they grow like N, the promise ends at about "
        f"N = {end:,}. Above it, S3 asks replicas to slow down, and they ask again later.\n\n"
        f"A mean has at most {MAX_SHARDS} shards, so with more replicas the busiest replica of a round reads about "
        f"N / {MAX_SHARDS} models and one more: {models_read(GOAL_N):.0f} models at N = {GOAL_N:,}. With `int4` and "
        f"1 Gbit/s, this takes {models_s(GOAL_N, 10**8):.0f} s of a round of {PHASE_S:g} s for 100M parameters, and "
        f"{models_s(GOAL_N, 10**9):.0f} s for 1B. A longer round, a shorter wire or a faster link moves this end."
    )


def models_s(n: int, n_parameters: int) -> float:
    """Return the seconds in which the busiest replica of a round with `wire="int4"` reads its objects at 1 Gbit/s.

    Args:
        n: the number of replicas.
        n_parameters: the parameters of the model.
    """
    return bytes_read(n, Layout(n_parameters, Limits(), WIRES["int4"], WIRES["int8"])) / LINK_BYTES_PER_S


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure what the number of replicas costs.")
    parser.add_argument("--rounds-at", nargs="*", type=int, default=[8, 32, 128, 512, 1024], metavar="N")
    parser.add_argument("--views-at", nargs="*", type=int, default=[8, 32, 128, 512, 1024, 4096], metavar="N")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the results to this file")
    chosen = parser.parse_args(arguments)
    logging.disable(logging.WARNING)  # dead replicas cause warnings on purpose
    try:
        text = json.dumps(results(costs(chosen.rounds_at, chosen.views_at)), indent=1) + "\n"
    finally:
        logging.disable(logging.NOTSET)
    if chosen.write is None:
        print(text)
    else:
        chosen.write.write_text(text)


if __name__ == "__main__":
    main()
