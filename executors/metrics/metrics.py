"""Reads the measurements of all replicas of a run, and puts them on one time line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from executors.attempt import Attempt
from executors.metrics.clocks import Lived, clocks_ahead, read_life, sightings
from executors.metrics.ledger import Ledger, Life, make_ledger
from executors.metrics.rows import Left, Numbers, Round, Row, Usage
from executors.metrics.segments import AttemptKey, ParsedSegments, read_segments
from executors.protocol import Outcome, ReplicaStatus
from executors.store import Store
from executors.store.inventory import Inventory
from executors.store.parallel import at_store
from executors.task.record import RunRecord

MAX_PROBLEMS = 100
KINDS = {Numbers: "numbers", Round: "round", Usage: "usage"}


@dataclass(frozen=True, kw_only=True)
class AttemptSpan:
    """The start and the end of an attempt, on the run's time line."""

    rank: int
    attempt: int
    started_s: float
    ended_s: float | None
    """The end of the attempt, in seconds on the time line. None: the attempt has not ended."""
    outcome: Outcome | None


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """The measurements of the replicas of a run. Iteration yields all rows, ordered by rank, attempt and time.

    Example:
        metrics = run.metrics()
        losses = [row.values["loss"] for row in metrics.numbers if "loss" in row.values]
        seconds = [metrics.at(row) for row in metrics.rows]
        assert "loss" in metrics.names()
        first = metrics.record(metrics.rows[0])  # {"kind": …, "rank": 0, "attempt": 0, "s": …, and its values}
        frame = pandas.DataFrame(metrics.to_dict())
    """

    run_id: str
    """The id of the run."""
    world_size: int
    """The number of launched replicas."""
    began_at: float
    """Unix time of second 0 of the time line: the first claim."""
    as_of_s: float
    """The time of the last known event, in seconds on the time line."""
    attempts: Sequence[AttemptSpan] = field(repr=False)
    """The start and the end of each attempt, in the order of rank and attempt."""
    rows: Sequence[Row] = field(repr=False)
    """All rows, in the order of rank, attempt and time."""
    problems: Sequence[str]
    """A sentence for each part that is missing or could not be read."""
    origins: Mapping[tuple[int, int], float] = field(repr=False)
    """The time at which each attempt was claimed, by rank and attempt, in seconds on the time line."""
    left: Sequence[Left] = field(default=(), repr=False)
    """The work that was in no round when a DiLoCo was closed."""
    is_whole: bool = True
    """False if there are too many rows, so that some are left out, evenly over each attempt. Sums then count only the
    rows that are here.
    """

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def numbers(self) -> list[Numbers]:
        """The numbers that replicas reported."""
        return [row for row in self.rows if isinstance(row, Numbers)]

    @cached_property
    def rounds(self) -> list[Round]:
        """The rounds, as each replica measured them."""
        return [row for row in self.rows if isinstance(row, Round)]

    @cached_property
    def usage(self) -> list[Usage]:
        """The resources that the processes used: memory, processor and GPU."""
        return [row for row in self.rows if isinstance(row, Usage)]

    @cached_property
    def ledger(self) -> Ledger:
        """The work of the replicas, divided by what happened to it. There is no goodput if some rows are missing."""
        rounds = dict[tuple[str, int, int], list[Round]]()
        for row in self.rounds:
            rounds.setdefault((row.name, row.rank, row.attempt), []).append(row)
        left = {(each.name, each.rank, each.attempt): each.left_with for each in self.left}
        last = {(row.rank, row.attempt): row.t for row in self.rows}  # the rows are ordered by time
        names = sorted({name for name, _, _ in (*rounds, *left)})

        def life(name: str, span: AttemptSpan) -> Life:
            key = (span.rank, span.attempt)
            is_over = span.outcome is not None
            return Life(
                rank=span.rank,
                attempt=span.attempt,
                started_s=span.started_s,
                alive_s=last.get(key, 0.0) if span.ended_s is None else span.ended_s - span.started_s,
                has_failed=is_over and span.outcome.status is not ReplicaStatus.SUCCEEDED,  # type: ignore[union-attr]
                left=left.get((name, *key)),
                rounds=rounds.get((name, *key), []),
            )

        made = make_ledger(self.world_size, {name: [life(name, span) for span in self.attempts] for name in names})
        return made if self.is_whole else replace(made, goodput=None)

    def at(self, row: Row) -> float:
        """Return the time of a row on the run's time line, in seconds.

        Args:
            row: one of the rows.
        """
        return self.origins[row.rank, row.attempt] + row.t

    def names(self) -> list[str]:
        """Return the names of reported numbers: "step", "loss", and then the others in alphabetical order."""
        found = {name for row in self.numbers for name in row.values}
        return sorted(found, key=lambda name: (name != "step", name != "loss", name))

    def record(self, row: Row) -> dict[str, Any]:
        """Return a row as a dictionary: its kind, rank, attempt, second on the time line, and values.

        Args:
            row: one of the rows.
        """
        values = dict(row.values) if isinstance(row, Numbers) else asdict(row)
        head = {"kind": KINDS[type(row)], "rank": row.rank, "attempt": row.attempt, "s": self.at(row)}
        # Given twice: the first use sets the order of the keys, and the last one protects them against a reported name
        # such as "rank".
        return head | values | head

    def to_dict(self) -> dict[str, list[Any]]:
        """Return all rows as columns, with None if a row has no value: `pandas.DataFrame(run.metrics().to_dict())`."""
        rows = list(map(self.record, self.rows))
        columns = dict.fromkeys(("kind", "rank", "attempt", "s", *self.names()))
        columns |= dict.fromkeys(name for row in rows for name in row if name != "t")
        return {name: [row.get(name) for row in rows] for name in columns}


def read_metrics(
    store: Store,
    run_id: str,
    record: RunRecord,
    kept: dict[str, memoryview] | None = None,
    parsed: ParsedSegments | None = None,
) -> Metrics:
    """Read the measurements of the replicas of a run.

    A part that cannot be read is left out, and named in `problems`.

    Args:
        kept: the segments that earlier calls have read, by key. They are not read again. This call adds the segments
            that it reads, and removes segments that it leaves out.
        parsed: the segments that earlier calls have parsed. Default: each segment is parsed.

    Raises:
        StoreError: the store does not answer.
    """
    measured = read_segments(store, run_id, kept, parsed)
    found, problems = measured.lines, measured.problems
    left_by = dict[AttemptKey, set[str]]()
    for rank, number, name in Inventory.of(store, run_id).records:
        left_by.setdefault((rank, number), set()).add(name)
    keys = sorted(found.keys() | {key for key, names in left_by.items() if "started" in names})
    rows = {key: found[key].rows if key in found else [] for key in keys}

    def read(key: AttemptKey) -> Lived:
        return read_life(Attempt(store, run_id, *key), left_by.get(key, ()), rows[key])

    lives = dict(zip(keys, at_store(store, read, keys), strict=True))
    problems += [problem for lines in found.values() for problem in lines.problems]
    problems += [life.problem for life in lives.values() if life.problem]
    if len(problems) > MAX_PROBLEMS:
        problems[MAX_PROBLEMS:] = [f"{len(problems) - MAX_PROBLEMS} more problems."]
    claims = {key: life.claimed_at or record.created_at for key, life in lives.items()}
    ahead = clocks_ahead(
        {key: sightings(rows[key], claims[key]) for key in keys}, {key: life.host for key, life in lives.items()}
    )
    began_at = min((claims[key] - ahead[key] for key in keys), default=record.created_at)
    origins = {key: claims[key] - ahead[key] - began_at for key in keys}
    ends = {key: origins[key] + life.last_t for key, life in lives.items()}
    return Metrics(
        run_id=run_id,
        world_size=record.world_size,
        began_at=began_at,
        as_of_s=max(ends.values(), default=0.0),
        attempts=[
            AttemptSpan(
                rank=key[0],
                attempt=key[1],
                started_s=origins[key],
                ended_s=None if (outcome := lives[key].outcome) is None else ends[key],
                outcome=outcome,
            )
            for key in keys
        ],
        rows=[row for key in keys for row in rows[key]],
        problems=problems,
        origins=origins,
        left=[left for lines in found.values() for left in lines.left],
        is_whole=measured.is_whole,
    )
