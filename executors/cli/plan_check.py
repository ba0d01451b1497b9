"""Stores the measured links of this machine to stores, and compares the rounds of a run with the plan."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from executors.cli.documents import PlanComparisonDocument, PlanLink
from executors.errors import ReplicasError, StoreError
from executors.process import usable_cores
from executors.registry.run_index import local_store
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

PLANNERS = "replicas.planner"  # the group of entry points that names the planner of rounds
LINKS = ".links"  # a run id never begins with a dot, so this key is free
RATE = number(1e-3, 1e15)
PARTS = ("encode", "accumulate", "decode", "step")
MEASURED_RANKS = 4
LAST_ROUNDS = 20  # the number of newest rounds of each rank that are compared


def rates_of(value: Any) -> dict[str, float]:
    """Read the speeds in a record: bytes a second for each part of the work.

    Args:
        value: the value in the record.

    Raises:
        ValueError: the value is not such an object.
    """
    return {name: RATE(rate) for name, rate in json_object(value).items() if name in PARTS}


@dataclass(frozen=True, kw_only=True)
class MeasuredLink(Record):
    """The link of one replica to a store, as `replicas plan --probe` measured it, or as it is assumed."""

    url: str = checked(text())
    n: int = checked(integer(1, 10**7))
    """The number of replicas of the measurement, which share the speed of a store on this machine."""
    at: float = checked(number(LONG_AGO, FAR_AHEAD))
    up: float = checked(RATE)
    """Bytes a second that one replica sends."""
    down: float = checked(RATE)
    latency_s: float = checked(number(0.0, 1e5))
    processor: Mapping[str, float] = checked(rates_of, {})
    """The speed of an idle processor in bytes a second, for each part of the work that was measured."""

    def shared_by(self, n: int) -> MeasuredLink:
        """Return the link of one of n replicas.

        Args:
            n: the number of replicas, at least 1.
        """
        if not is_near(self.url):
            return replace(self, n=n)
        share, cores = self.n / n, min(1.0, usable_cores() / n)
        processor = {name: rate * cores for name, rate in self.processor.items()}
        return replace(self, n=n, up=self.up * share, down=self.down * share, processor=processor)


def load_planner(name: str = "default") -> Any:
    """Return the planner of rounds. An installed package announces it, because `executors` knows nothing about
    training.

    Args:
        name: "default" for the module with the planner, "processor" for the function that measures this machine.

    Raises:
        ReplicasError: no installed package announces a planner.
    """
    from importlib.metadata import entry_points

    found = list(entry_points(group=PLANNERS, name=name))
    if not found:
        raise ReplicasError(
            f"No installed package has a planner (group {PLANNERS!r}). Install serverless-replicas again."
        )
    return found[0].load()


def save_link(measured: MeasuredLink) -> None:
    """Save a measurement for plans without --probe, and for `replicas status`.

    Args:
        measured: the measurement.
    """
    local_store().put(link_key(measured.url), to_bytes(asdict(measured)))


def find_link(url: str, n: int) -> MeasuredLink | None:
    """Return the measured link to a store, or None if this machine has no measurement.

    Args:
        url: the address of the store.
        n: the number of replicas that share the link.
    """
    try:
        found = find_record(local_store(), link_key(url), MeasuredLink.parse)
    except StoreError:  # another version wrote the record, or the file is incomplete
        return None
    return None if found is None else found.shared_by(n)


def link_key(url: str) -> str:
    """Return the key of the measurement of a store, in the store of this user.

    Args:
        url: the address of the store.
    """
    return f"{LINKS}/{hashlib.sha256(located_url(url).encode()).hexdigest()[:16]}.json"


@dataclass(frozen=True, kw_only=True)
class PlanComparison:
    """The duration of a run's rounds, and the duration that the planner computes for the same rounds and the measured
    link.
    """

    round_s: float
    planned_s: float
    link: MeasuredLink

    @property
    def ratio(self) -> float:
        return self.round_s / self.planned_s

    def to_json(self) -> PlanComparisonDocument:
        link = cast(PlanLink, asdict(self.link))
        return {"round_s": self.round_s, "planned_s": self.planned_s, "link": link, "ratio": self.ratio}

    def describe(self) -> str:
        """Return the comparison as a line: `rounds take 2.1x the plan: 30.1 s, planned 14.3 s …`."""
        how = f"{describe_link(self.link)}, measured {time.strftime('%Y-%m-%d %H:%M', time.gmtime(self.link.at))}"
        return f"rounds take {self.ratio:.1f}x the plan: {self.round_s:.3g} s, planned {self.planned_s:.3g} s ({how})"


def compare_with_plan(run: Run) -> PlanComparison | None:
    """Compare the newest rounds of a run with the plan.

    Args:
        run: the run.

    Returns:
        The comparison. None if this machine has not measured the link, or the run has no measured round.

    Example:
        compare_with_plan(attach("brave-otter-7f3a"))
    """
    from executors.metrics.segments import newest_rounds
    from executors.run.run import view_of

    view = view_of(run)
    link = find_link(view.store.url, view.record.world_size)
    if link is None:
        return None
    try:
        rounds = newest_rounds(view.store, run.run_id, _measured(view.reader.records.inventory), LAST_ROUNDS)
        rounds = [row for row in rounds if row.busy_s and row.elements and row.wire]
        if not rounds:
            return None
        planner = load_planner()
        way = planner.Link(up=link.up, down=link.down, latency_s=link.latency_s)
        processor, n = planner.Processor(**link.processor), view.record.world_size
        planned = [
            planner.cost_of_round(row.elements, n, row.wire, row.mean_wire, way, processor).seconds for row in rounds
        ]
    # the wire is from another version, or a segment of measurements cannot be read
    except (ReplicasError, ValueError, TypeError):
        return None
    took = [row.busy_s for row in rounds if row.busy_s]
    return PlanComparison(round_s=statistics.median(took), planned_s=statistics.median(planned), link=link)


def _measured(inventory: Inventory) -> list[tuple[int, int]]:
    """Return the newest attempts of the ranks whose rounds are compared. Attempts that still run come first."""
    begun = {rank for rank, _, name in inventory.records if name == "started"}
    newest = [(rank, inventory.newest(rank)) for rank in sorted(begun)]
    return sorted(newest, key=lambda each: inventory.has(each[0], each[1], "outcome"))[:MEASURED_RANKS]


def describe_link(link: Any) -> str:
    """Return a link in short form: `48 ms, 210 MB/s up, 260 MB/s down`.

    Args:
        link: an object with `latency_s`, `up` and `down`.
    """
    from executors.view.report.text import name_size

    latency = f"{link.latency_s:.3g} s" if link.latency_s >= 1 else f"{link.latency_s * 1e3:.3g} ms"
    return f"{latency}, {name_size(link.up)}/s up, {name_size(link.down)}/s down"
