"""What this machine has measured of the ways to stores, and how the rounds of a run compare with what was planned."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from executors.errors import ReplicasError, StoreError
from executors.process import usable_cores
from executors.run.run_index import local_store
from executors.store.inventory import Inventory
from executors.store.records import (
    FAR_AHEAD,
    LONG_AGO,
    Record,
    checked,
    find_record,
    integer,
    json_object,
    number,
    text,
    to_bytes,
)
from executors.store.url import is_near, located_url

if TYPE_CHECKING:
    from executors.run.run import Run

PLANNERS = "replicas.planner"  # the group of entry points that names who plans rounds
LINKS = ".links"  # no run id begins so
RATE = number(1e-3, 1e15)
PARTS = ("encode", "accumulate", "decode", "step")
MEASURED_RANKS = 4
LAST_ROUNDS = 20  # of each


def rates_of(value: Any) -> dict[str, float]:
    """Expect bytes a second, by what is done."""
    return {name: RATE(rate) for name, rate in json_object(value).items() if name in PARTS}


@dataclass(frozen=True, kw_only=True)
class MeasuredLink(Record):
    """What one replica has of the way to a store: as `replicas plan --probe` found it, or as it is assumed."""

    url: str = checked(text())
    n: int = checked(integer(1, 10**7))
    """How many replicas it was measured for: a near store's speed is shared by them."""
    at: float = checked(number(LONG_AGO, FAR_AHEAD))
    up: float = checked(RATE)
    """Bytes a second, of one replica."""
    down: float = checked(RATE)
    latency_s: float = checked(number(0.0, 1e5))
    processor: Mapping[str, float] = checked(rates_of, {})
    """Bytes that a free one works through in a second, by what it does, as far as that was measured."""

    def shared_by(self, n: int) -> MeasuredLink:
        """Return what one of n replicas has."""
        if not is_near(self.url):
            return replace(self, n=n)
        share, cores = self.n / n, min(1.0, usable_cores() / n)
        processor = {name: rate * cores for name, rate in self.processor.items()}
        return replace(self, n=n, up=self.up * share, down=self.down * share, processor=processor)


def load_planner(name: str = "default") -> Any:
    """Return what plans rounds, which an installed package announces: executors know nothing of training.

    Args:
        name: "default": the module. "processor": what measures this machine's.

    Raises:
        ReplicasError: no package does.
    """
    from importlib.metadata import entry_points

    found = list(entry_points(group=PLANNERS, name=name))
    if not found:
        raise ReplicasError(f"No installed package plans rounds (group {PLANNERS!r}): install this one again.")
    return found[0].load()


def save_link(measured: MeasuredLink) -> None:
    """Keep a measurement, for plans without a probe and for `replicas status`."""
    local_store().put(link_key(measured.url), to_bytes(asdict(measured)))


def find_link(url: str, n: int) -> MeasuredLink | None:
    """Return what was measured of a store, for one of n replicas; None: nothing."""
    try:
        found = find_record(local_store(), link_key(url), MeasuredLink.parse)
    except StoreError:  # of another version, or half a file
        return None
    return None if found is None else found.shared_by(n)


def link_key(url: str) -> str:
    return f"{LINKS}/{hashlib.sha256(located_url(url).encode()).hexdigest()[:16]}.json"


@dataclass(frozen=True, kw_only=True)
class PlanComparison:
    """The rounds of a run, and the plan for the same rounds at the measured link."""

    round_s: float
    planned_s: float
    link: MeasuredLink

    @property
    def ratio(self) -> float:
        return self.round_s / self.planned_s

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}

    def describe(self) -> str:
        """Say it in a line: `rounds take 2.1x the plan: 30.1 s, 14.3 s were planned …`."""
        how = f"{describe_link(self.link)}, measured {time.strftime('%Y-%m-%d %H:%M', time.gmtime(self.link.at))}"
        return f"rounds take {self.ratio:.1f}x the plan: {self.round_s:.3g} s, planned {self.planned_s:.3g} s ({how})"


def compare_with_plan(run: Run) -> PlanComparison | None:
    """Return how the newest rounds of a run compare with the plan; None: no link was measured here, or no round was."""
    from executors.metrics.segments import newest_rounds
    from executors.run.run import view_of

    view = view_of(run)
    link = find_link(view.store.url, view.record.world_size)
    if link is None:
        return None
    try:
        rounds = newest_rounds(view.store, run.run_id, _measured(view.reader.inventory), LAST_ROUNDS)
        rounds = [row for row in rounds if row.busy_s and row.elements and row.wire]
        if not rounds:
            return None
        planner = load_planner()
        way = planner.Link(up=link.up, down=link.down, latency_s=link.latency_s)
        processor, n = planner.Processor(**link.processor), view.record.world_size
        planned = [
            planner.cost_of_round(row.elements, n, row.wire, row.mean_wire, way, processor).seconds for row in rounds
        ]
    except (ReplicasError, ValueError, TypeError):  # a wire that this version does not know; a segment that is away
        return None
    took = [row.busy_s for row in rounds if row.busy_s]
    return PlanComparison(round_s=statistics.median(took), planned_s=statistics.median(planned), link=link)


def _measured(inventory: Inventory) -> list[tuple[int, int]]:
    """Return the newest attempts of the ranks whose rounds are compared: some that run, before those that do not."""
    begun = {rank for rank, _, name in inventory.records if name == "started"}
    newest = [(rank, inventory.newest(rank)) for rank in sorted(begun)]
    return sorted(newest, key=lambda each: inventory.has(each[0], each[1], "outcome"))[:MEASURED_RANKS]


def describe_link(link: Any) -> str:
    """Write what a link has: `48 ms, 210 MB/s up, 260 MB/s down`."""
    from executors.report.words import name_size

    latency = f"{link.latency_s:.3g} s" if link.latency_s >= 1 else f"{link.latency_s * 1e3:.3g} ms"
    return f"{latency}, {name_size(link.up)}/s up, {name_size(link.down)}/s down"
