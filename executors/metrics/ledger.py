"""Computes what happened to the work of replicas (counted, dropped, lost), and the goodput of the run.

A unit of work is an inner step, or the unit of a callable `weight`. With P fragments, each unit is divided equally
among P entries of the log.

- *counted*: a seal includes the work. The rounds of each replica record this. If a seal names a rank that was killed
  before it recorded the round, its work is estimated: all its remaining work, but at most its usual work per
  contribution.
- *dropped*: the rounds record that the work was dropped.
- *carried*: work in no round, of a replica that is alive or ended well.
- *lost*: work in no round, of a replica that failed or was cancelled.

A replica records its work in no round when its DiLoCo is closed. For a killed or live replica, this work is estimated.
The estimate has two parts: the work that its last round carried over, and its work since its last contribution, by its
own speed. It is at most the usual work per contribution. Steps that were made while a contribution was sent
(`overlap_steps`) belong to the next row with `merge="carry"`. With other merges they belong to no row, because they are
mixed in or replaced.

    goodput = counted / (replicas x longest x speed)

`replicas` is the number of replicas that were launched or joined. `longest` is the total running time, in seconds, of
the replica that ran longest. `speed` is the mean of the replicas' own speeds, which differ if rounds go by the clock. A
replica's speed is the median of its counted work per second in undisturbed minutes. In such a minute each round counted
the replica, and the same other replicas as the round before. The first round of an attempt is left out, because the
attempt starts before it. If no undisturbed stretch lasts a minute, shorter ones are used. If there is none, all rounds
are used.

Goodput is not the mean of the seals' weights divided by the usual weight, because weights are capped at 1. A replica
that returns with the work of two rounds counts as one there. So that mean is lower, by 0.02 to 0.05 in runs with a kill
every 5 to 30 seconds.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from statistics import fmean, median

from executors.metrics.rows import Round

MINUTE_S = 60.0
FATES = ("counted", "carried", "dropped", "lost")


@dataclass(frozen=True, kw_only=True)
class Work:
    """Units of work, divided into counted, dropped, carried and lost."""

    counted: float = 0.0
    """Work in a round whose seal includes it."""
    carried: float = 0.0
    """Work that is in no round, of a replica that is alive or succeeded."""
    dropped: float = 0.0
    """Work that a round discarded."""
    lost: float = 0.0
    """Work that is in no round, of a replica that failed or was cancelled."""

    @property
    def made(self) -> float:
        """The sum of all units."""
        return float(sum(getattr(self, fate) for fate in FATES))

    @classmethod
    def sum_of(cls, parts: Iterable[Work]) -> Work:
        parts = list(parts)
        return cls(**{fate: sum(getattr(part, fate) for part in parts) for fate in FATES})


@dataclass(frozen=True, kw_only=True)
class Ledger(Work):
    """The work of all replicas, and their goodput. The docstring of the module defines both."""

    goodput: float | None = None
    """Share of the work of undisturbed replicas that was counted. None if no round shows it."""
    by_rank: Mapping[int, Work] = field(default_factory=dict)
    """The work of each rank, divided into counted, carried, dropped and lost."""


@dataclass(frozen=True, kw_only=True)
class Life:
    """The rounds of one attempt in one DiLoCo, with times by the attempt's clock."""

    rank: int
    attempt: int
    started_s: float
    """The time of the claim, in seconds on the run's time line."""
    alive_s: float
    """The seconds from the claim of the attempt to its end, or to its last sign of life."""
    has_failed: bool
    """True if the attempt has ended without success."""
    left: float | None
    """The amount of work that was in no round when the DiLoCo was closed. None if it was not closed."""
    rounds: Sequence[Round]
    """The rounds, in the order of time."""


def make_ledger(world_size: int, by_name: Mapping[str, Sequence[Life]]) -> Ledger:
    """Add up the work of all attempts, by the name of the DiLoCo."""
    parts, goodputs = dict[int, list[Work]](), list[float]()
    for lives in by_name.values():
        book, alive_s, counted = _Book(lives), defaultdict[int, float](float), 0.0
        for life in lives:
            work = book.work_of(life)
            parts.setdefault(life.rank, []).append(work)
            alive_s[life.rank] += life.alive_s
            counted += work.counted
        speed, longest = book.speed(), max(alive_s.values(), default=0.0)
        if speed and longest:
            goodputs.append(counted / (max(world_size, len(alive_s)) * longest * speed))
    by_rank = {rank: Work.sum_of(works) for rank, works in sorted(parts.items())}
    total = Work.sum_of(by_rank.values())
    return Ledger(**vars(total), goodput=fmean(goodputs) if goodputs else None, by_rank=by_rank)


class _Book:
    """All attempts in one DiLoCo."""

    def __init__(self, lives: Sequence[Life]) -> None:
        self._lives = lives
        rounds = [row for life in lives for row in life.rounds]
        self._n_fragments = 1 + max((row.fragment for row in rounds), default=0)
        paces = [pace for life in lives if (pace := self._pace(life.rounds))]
        self._usual_pace = median(paces) if paces else 0.0
        self._usual_work = _usual_work(lives)
        begun = [_began(life.rounds[0]) for life in lives if life.rounds]
        self._usual_start = median(begun) if begun else 0.0
        self._missing = self._find_missing(rounds)

    def work_of(self, life: Life) -> Work:
        """Return the units of an attempt's work, divided into counted, dropped, carried and lost."""
        fates = dict.fromkeys(("counted", "dropped"), 0.0)
        for row in life.rounds:
            if row.verdict != "carried":
                fates[row.verdict] += row.weight / self._n_fragments
        n_missing = Counter(entry % self._n_fragments for entry in self._missing.get((life.rank, life.attempt), []))
        pace, usual, rest = self._pace(life.rounds) or self._usual_pace, self._usual_work, 0.0
        last, later_s = dict[int, tuple[Round, float]](), 0.0
        for row in reversed(life.rounds):
            last.setdefault(row.fragment, (row, later_s))
            later_s += row.round_s
        told, began = last.keys() | n_missing.keys(), _began(life.rounds[0]) if life.rounds else self._usual_start
        for fragment, n_alike in [*((each, 1) for each in told), (-1, self._n_fragments - len(told))]:
            before, rounds_s = last.get(fragment, (None, later_s))
            carried = before.weight if before is not None and before.verdict == "carried" else 0.0
            made = pace * max(0.0, life.alive_s - (began if before is None else before.t - before.hidden_s) - rounds_s)
            undecided = carried + min(made, usual * (1 + n_missing[fragment])) if life.left is None else life.left
            sent = min(undecided, carried + usual * n_missing[fragment]) if n_missing[fragment] else 0.0
            fates["counted"] += n_alike * sent / self._n_fragments
            rest += n_alike * (undecided - sent) / self._n_fragments
        return Work(**fates, **({"lost": rest} if life.has_failed else {"carried": rest}))

    def speed(self) -> float | None:
        """Return the counted work per second in undisturbed minutes. None if no round was counted."""
        stretches = [(life.rank, stretch) for life in self._lives for stretch in self._undisturbed(life)]
        speeds = [(rank, *alike) for rank, stretch in stretches for alike in _speeds(stretch)]
        speeds = speeds or [(rank, (done[-1] - done[0]) / (at[-1] - at[0]), 1) for rank, (at, done) in stretches]
        if not speeds:
            lives = [life for life in self._lives if life.rounds]
            spans = [(life, life.rounds[-1].t - _began(life.rounds[0])) for life in lives]
            works = [(life.rank, self.work_of(life).counted / span_s) for life, span_s in spans if span_s > 0]
            speeds = [(rank, speed, 1) for rank, speed in works if speed]
        by_rank = defaultdict[int, list[tuple[float, int]]](list)
        for rank, speed, n_minutes in speeds:
            by_rank[rank].append((speed, n_minutes))
        return fmean(map(_median, by_rank.values())) if by_rank else None

    def _find_missing(self, rounds: Sequence[Round]) -> dict[tuple[int, int], list[int]]:
        """Return for each attempt the entries that count its work although it has no row for them."""
        sealed_s, of_rank = dict[int, float](), dict[int, list[Life]]()
        for life in sorted(self._lives, key=lambda life: life.attempt):
            of_rank.setdefault(life.rank, []).append(life)
            for row in life.rounds:
                sealed_s[row.entry] = min(sealed_s.get(row.entry, math.inf), life.started_s + row.t)
        # Rows of one round usually name the same ranks. With many ranks it takes too long to go through all names.
        lists = {(row.entry, row.ranks) for row in rounds}
        named = {(rank, entry) for entry, ranks in lists for rank in of_rank.keys() & ranks}
        found = dict[tuple[int, int], list[int]]()
        for rank, entry in sorted(named - {(row.rank, row.entry) for row in rounds}):
            lives = of_rank[rank]
            trained = [life for life in lives if life.started_s + self._usual_start < sealed_s[entry]] or lives[:1]
            found.setdefault((rank, trained[-1].attempt), []).append(entry)
        return found

    def _pace(self, rounds: Sequence[Round]) -> float:
        """Return the units of work per second of training. 0 if the speed is not known."""
        trained_s, decided, until_last = 0.0, 0.0, dict[int, float]()
        for row in rounds:
            trained_s += row.train_s
            if row.verdict != "carried":
                decided += row.weight
                until_last[row.fragment] = max(0.0, trained_s - row.hidden_s)  # work after that was not sent
        return decided / sum(until_last.values()) if any(until_last.values()) else 0.0

    def _undisturbed(self, life: Life) -> Iterator[tuple[list[float], list[float]]]:
        """Yield stretches of undisturbed rounds: the start time, and for each round its end time and the work
        counted until then.
        """
        times, work = list[float](), list[float]()
        for before, row in pairwise(life.rounds):
            if before.verdict == row.verdict == "counted" and before.ranks == row.ranks and row.t > before.t:
                if not times:
                    times, work = [before.t], [0.0]
                times.append(row.t)
                work.append(work[-1] + row.weight / self._n_fragments)
            elif times:
                yield times, work
                times, work = [], []
        if times:
            yield times, work


def _began(row: Round) -> float:
    return row.t - row.train_s - row.round_s


def _usual_work(lives: Iterable[Life]) -> float:
    """Return the usual amount of work in a contribution.

    The first contribution of a fragment has less, and one after a carried round has more.
    """
    all_, steady = list[float](), list[float]()
    for life in lives:
        before = dict[int, str]()
        for row in life.rounds:
            if row.verdict != "carried" and row.weight:
                all_.append(row.weight)
                steady += [row.weight] if before.get(row.fragment) == "counted" else []
            before[row.fragment] = row.verdict
    return median(steady or all_) if all_ else 0.0


def _speeds(stretch: tuple[list[float], list[float]]) -> Iterator[tuple[float, int]]:
    """Yield the work per second in the whole minutes of a stretch. Each value comes with the number of minutes that it
    represents.

    There are never more values than rounds, even if the rounds are many minutes apart.
    """
    times, work = stretch

    def done(at: float) -> float:
        n = max(1, bisect_left(times, at))
        share = (at - times[n - 1]) / (times[n] - times[n - 1]) if times[n] > times[n - 1] else 1.0
        return work[n - 1] + share * (work[n] - work[n - 1])

    ended = [int((at - times[0]) / MINUTE_S) for at in times]  # the number of whole minutes until each round
    marks = sorted({min(ended[-1], each) for n in ended for each in (n, n + 1)})
    works = [done(min(times[-1], times[0] + k * MINUTE_S)) for k in marks]
    for (first, before), (end, after) in pairwise(zip(marks, works, strict=True)):
        yield (after - before) / (end - first) / MINUTE_S, end - first


def _median(groups: list[tuple[float, int]]) -> float:
    """Return the median of values. Each value comes with the number of times that it counts."""
    groups = sorted(groups)
    until = [*accumulate(n for _, n in groups)]
    low, high = (groups[bisect_right(until, at)][0] for at in ((until[-1] - 1) // 2, until[-1] // 2))
    return (low + high) / 2
