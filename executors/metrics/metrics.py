"""What the replicas of a run measured, read from its segments and put on one clock."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from executors.errors import CorruptObjectError, StoreError
from executors.metrics.ledger import Ledger, simple_ledger
from executors.metrics.rows import KEY, Numbers, Round, Row, Usage, parse_line
from executors.protocol import Outcome
from executors.store import Store
from executors.store.records import get_at_most
from executors.task.record import RunRecord

MAX_SEGMENT_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class AttemptSpan:
    """When an attempt lived, on the run's time line."""

    rank: int
    attempt: int
    started_s: float
    ended_s: float | None
    """None: it has not ended."""
    outcome: Outcome | None


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """What the replicas of a run measured: iterable row by row, by rank, attempt and time."""

    run_id: str
    world_size: int
    began_at: float
    """Unix time of second 0 of the time line: the first claim."""
    as_of_s: float
    """The last moment known, on the time line."""
    attempts: Sequence[AttemptSpan]
    """By rank and attempt."""
    rows: Sequence[Row]
    problems: Sequence[str]
    """What is missing or could not be read, in sentences."""
    origins: dict[tuple[int, int], float] = field(repr=False)
    """By rank and attempt, the second of the time line at which it claimed its attempt."""

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def numbers(self) -> list[Numbers]:
        return [row for row in self.rows if isinstance(row, Numbers)]

    @cached_property
    def rounds(self) -> list[Round]:
        return [row for row in self.rows if isinstance(row, Round)]

    @cached_property
    def usage(self) -> list[Usage]:
        return [row for row in self.rows if isinstance(row, Usage)]

    @cached_property
    def ledger(self) -> Ledger:
        """What became of the work that the replicas did."""
        return simple_ledger(self.rounds)

    def at(self, row: Row) -> float:
        """Return a row's second on the run's time line."""
        return self.origins[row.rank, row.attempt] + row.t

    def names(self) -> list[str]:
        """Return the names of reported numbers: "step", "loss", and the others in the order of the alphabet."""
        found = {name for row in self.numbers for name in row.values}
        return sorted(found, key=lambda name: (name != "step", name != "loss", name))

    def to_dict(self) -> dict[str, list[Any]]:
        """Return columns, with None where a row has no such value: `pandas.DataFrame(run.metrics().to_dict())`."""
        kinds = {Numbers: "numbers", Round: "round", Usage: "usage"}
        rows = [
            {"kind": kinds[type(row)], "rank": row.rank, "attempt": row.attempt, "s": self.at(row)}
            | (dict(row.values) if isinstance(row, Numbers) else asdict(row))
            for row in self.rows
        ]
        columns = dict.fromkeys(("kind", "rank", "attempt", "s", *self.names()))
        columns |= dict.fromkeys(name for row in rows for name in row if name != "t")
        return {name: [row.get(name) for row in rows] for name in columns}


def read_metrics(store: Store, run_id: str, record: RunRecord) -> Metrics:
    """Read what the replicas of a run measured.

    What cannot be read is left out, and named in `problems`.
    """
    prefix, rows, problems = f"{run_id}/metrics/", list[Row](), list[str]()
    for entry in store.list(prefix):
        found = KEY.fullmatch(entry.key, len(prefix))
        if found is None:
            problems.append(f"{entry.key!r} is not a segment.")
            continue
        rank, attempt = int(found[1]), int(found[2])
        try:
            for number, line in enumerate(bytes(get_at_most(store, entry.key, MAX_SEGMENT_BYTES)).splitlines(), 1):
                row = parse_line(json.loads(line), rank, attempt, f"{entry.key}, line {number}")
                if isinstance(row, Numbers | Round | Usage):
                    rows.append(row)
        except (StoreError, CorruptObjectError, ValueError) as error:
            problems.append(str(error))
    rows.sort(key=lambda row: (row.rank, row.attempt, row.t))
    origins = {(row.rank, row.attempt): 0.0 for row in rows}
    spans = [
        AttemptSpan(rank=rank, attempt=attempt, started_s=origin, ended_s=None, outcome=None)
        for (rank, attempt), origin in sorted(origins.items())
    ]
    return Metrics(
        run_id=run_id,
        world_size=record.world_size,
        began_at=record.created_at,
        as_of_s=max((row.t for row in rows), default=0.0),
        attempts=spans,
        rows=rows,
        problems=problems,
        origins=origins,
    )
