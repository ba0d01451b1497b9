"""Every unit of work has exactly one fate: the sum of the ledger is the work that was done, however replicas were
killed.
"""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executors.metrics.ledger import Life, Work, make_ledger
from executors.metrics.rows import Round, Verdict

START_S, MOVE_S = 3.0, 0.5
"""Seconds until replicas train, and seconds of a round in addition to its wait."""


def a_round(entry: int, t: float, verdict: Verdict = "counted", weight: float = 10.0, **more: Any) -> Round:
    given: dict[str, Any] = {"train_s": 10.0, "wait_s": 0.0, "ranks": (0, 1), "fragment": 0} | more
    return Round(
        rank=0, attempt=0, t=t, entry=entry, verdict=verdict, weight=weight, up=0, down=0,
        move_s=MOVE_S, reduce_s=0.0, step_s=0.0, **given,
    )  # fmt: skip


def a_life(*rounds: Round, alive_s: float, has_failed: bool = False, left: float | None = None, rank: int = 0) -> Life:
    return Life(rank=rank, attempt=0, started_s=0.0, alive_s=alive_s, has_failed=has_failed, left=left, rounds=rounds)


@dataclass
class Trainer:
    """A replica that does one unit of work a second, and reports its rounds."""

    rank: int
    n_fragments: int
    attempt: int
    started_s: float
    t: float = START_S
    made: float = 0.0
    open: list[float] = field(default_factory=list)
    fates: dict[str, float] = field(default_factory=lambda: {"counted": 0.0, "dropped": 0.0})
    rounds: list[Round] = field(default_factory=list)
    trained_s: float = 0.0

    def __post_init__(self) -> None:
        self.open = [0.0] * self.n_fragments

    def train(self, seconds: float) -> None:
        self.t += seconds
        self.trained_s += seconds
        self.made += seconds
        self.open = [units + seconds for units in self.open]

    def round(self, entry: int, ranks: tuple[int, ...], verdict: Verdict, wait_s: float) -> None:
        fragment = entry % self.n_fragments
        self.t += wait_s + MOVE_S
        work = self.open[fragment]
        if verdict != "carried":
            self.fates[verdict] += work / self.n_fragments
            self.open[fragment] = 0.0
        self.rounds.append(
            Round(
                rank=self.rank, attempt=self.attempt, t=self.t, entry=entry, fragment=fragment, ranks=ranks,
                verdict=verdict, weight=work, up=0, down=0, train_s=self.trained_s, wait_s=wait_s, move_s=MOVE_S,
                reduce_s=0.0, step_s=0.0,
            )
        )  # fmt: skip
        self.trained_s = 0.0

    def life(self, *, has_failed: bool, is_closed: bool) -> Life:
        left = sum(self.open) / self.n_fragments if is_closed else None
        return Life(
            rank=self.rank, attempt=self.attempt, started_s=self.started_s, alive_s=self.t, has_failed=has_failed,
            left=left, rounds=self.rounds,
        )  # fmt: skip


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, list[tuple[Life, Work]]]:
    """Draw a random run, in which some replicas carry or drop work, die in training or after sending, and come back."""
    n_ranks, n_fragments = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    steps_s = draw(st.sampled_from([4.0, 12.0]))
    trainers, now = {rank: Trainer(rank, n_fragments, 0, -START_S) for rank in range(n_ranks)}, 0.0
    attempts, ended, away = dict.fromkeys(trainers, 0), list[tuple[Life, Work]](), dict[int, int]()

    def end(rank: int, *, has_failed: bool, is_closed: bool, was_sent: float = 0.0) -> None:
        it = trainers.pop(rank)
        rest = sum(it.open) / n_fragments - was_sent
        fates = {**it.fates, "counted": it.fates["counted"] + was_sent, "lost" if has_failed else "carried": rest}
        ended.append((it.life(has_failed=has_failed, is_closed=is_closed), Work(**fates)))

    n_entries = draw(st.integers(3 * n_fragments, 12))
    for entry in range(n_entries):
        for rank, until in [*away.items()]:
            if until <= entry:
                del away[rank]
                attempts[rank] += 1
                trainers[rank] = Trainer(rank, n_fragments, attempts[rank], now - START_S)
        events: dict[int, Any] = {
            rank: draw(st.sampled_from([*["counted"] * 6, "carried", "dropped", "killed", "sent"])) for rank in trainers
        }
        events[min(trainers)] = "counted"  # at least one replica must read the seal
        for rank in trainers:
            trainers[rank].train(steps_s)
        wait_s = draw(st.sampled_from([0.0, 2.0]))
        named = tuple(sorted(rank for rank, event in events.items() if event in ("counted", "sent")))
        for rank, event in events.items():
            it = trainers[rank]
            if event in ("killed", "sent"):
                sent = it.open[entry % n_fragments] / n_fragments if event == "sent" else 0.0
                end(rank, has_failed=True, is_closed=False, was_sent=sent)
                away[rank] = entry + draw(st.integers(1, 3))
            else:
                it.round(entry, named, event, wait_s)
        now += steps_s + wait_s + MOVE_S
    for rank in [*trainers]:
        trainers[rank].train(draw(st.sampled_from([0.0, 1.0, 3.0])))
        end(rank, has_failed=draw(st.booleans()), is_closed=draw(st.booleans()))
    return n_ranks, ended


def test_steps_during_a_round_are_lost_if_the_replica_is_killed_after_its_contribution_was_counted() -> None:
    times = [START_S + 10 * k + 4 for k in (1, 2, 3)]  # a round takes 4 of 10 seconds, while training continues
    rounds = [
        a_round(k, t, train_s=10.0 if k else 14.0, late_s=0.0, busy_s=4.0, stale_steps=4) for k, t in enumerate(times)
    ]
    ledger = make_ledger(1, {"main": [a_life(*rounds, alive_s=times[-1] + 2, has_failed=True)]})
    assert ledger.counted == 30.0
    assert ledger.lost == pytest.approx(6.0)


@settings(max_examples=300, deadline=None)
@given(worlds())
def test_counted_carried_dropped_and_lost_work_add_up_to_all_work(
    world: tuple[int, list[tuple[Life, Work]]],
) -> None:
    n_ranks, told = world
    ledger = make_ledger(n_ranks, {"main": [life for life, _ in told]})
    truth = Work.sum_of(work for _, work in told)
    for fate in ("counted", "carried", "dropped", "lost", "made"):
        assert getattr(ledger, fate) == pytest.approx(getattr(truth, fate)), fate
    assert Work.sum_of(ledger.by_rank.values()) == Work(**{f: getattr(ledger, f) for f in vars(truth)})


def rank_of_two(
    rank: int, n: int, *, every_s: float = 12.0, alive_s: float | None = None, alone_from: int = 999
) -> Life:
    """A replica that has a round every twelve seconds. From a given round on, its peer takes no part."""
    rounds = [a_round(k, (k + 1) * every_s, ranks=(0, 1) if k < alone_from else (0,), train_s=10.0) for k in range(n)]
    return a_life(*rounds, alive_s=alive_s or n * every_s, rank=rank)


@pytest.mark.parametrize(
    ("lives", "goodput"),
    [
        ([rank_of_two(0, 60), rank_of_two(1, 60)], 1.0),
        ([rank_of_two(0, 60, alone_from=30), rank_of_two(1, 30)], 0.75),
        ([rank_of_two(0, 60)], 0.5),
        ([rank_of_two(0, 60, alone_from=2), rank_of_two(1, 2, every_s=24.0)], 0.5 + 1 / 60),
        ([rank_of_two(0, 2), rank_of_two(1, 2)], 1.0),
        ([rank_of_two(0, 1), rank_of_two(1, 1)], 0.875),
        ([rank_of_two(0, 60, alive_s=960.0), rank_of_two(1, 60)], 0.75),
        ([a_life(alive_s=60.0)], None),
        ([a_life(a_round(0, 30.0, "carried"), alive_s=60.0)], None),
        ([], None),
    ],
    ids=["undisturbed", "one dies half-way", "one never came", "one dies after slow rounds", "less than a minute",
         "one round", "long start", "no round", "none counted", "nobody"],
)  # fmt: skip
def test_goodput_is_the_share_that_undisturbed_replicas_would_have_had_counted(
    lives: list[Life], goodput: float | None
) -> None:
    found = make_ledger(2, {"main": lives} if lives else {}).goodput
    assert found == (None if goodput is None else pytest.approx(goodput))


@given(st.lists(st.tuples(st.sampled_from([0.5, 20.0, 60.0, 90.0, 3e3]), st.floats(1.0, 9.0)), min_size=3, max_size=9))
@settings(max_examples=50)
def test_the_usual_speed_is_the_median_of_all_minutes(rounds: list[tuple[float, float]]) -> None:
    times = [sum(span_s for span_s, _ in rounds[:n]) for n in range(1, len(rounds) + 1)]
    work = [sum(units for _, units in rounds[1:n]) for n in range(1, len(rounds) + 1)]

    def done(at: float) -> float:
        n = next(n for n in range(1, len(times)) if at <= times[n] or n == len(times) - 1)
        return work[n - 1] + (at - times[n - 1]) / (times[n] - times[n - 1]) * (work[n] - work[n - 1])

    minutes = range(int((times[-1] - times[0]) / 60))
    speeds = [(done(times[0] + 60 * (k + 1)) - done(times[0] + 60 * k)) / 60 for k in minutes]
    speed = median(speeds or [(work[-1] - work[0]) / (times[-1] - times[0])])
    life = a_life(*(a_round(n, times[n], weight=units) for n, (_, units) in enumerate(rounds)), alive_s=times[-1])
    ledger = make_ledger(1, {"main": [life]})
    assert ledger.goodput == pytest.approx(ledger.counted / times[-1] / speed)


def test_two_rounds_that_lie_months_apart_take_no_memory() -> None:
    life = a_life(a_round(0, 1.0), a_round(1, 1e7), alive_s=1e7)
    tracemalloc.start()
    try:
        assert make_ledger(1, {"main": [life]}).goodput == pytest.approx(2.0)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 20


def test_replicas_of_different_speeds_that_lose_nothing_have_had_all_they_could_counted() -> None:
    lives = [
        a_life(*(a_round(k, 12.0 * (k + 1), weight=weight) for k in range(60)), alive_s=720.0, rank=rank)
        for rank, weight in enumerate([4.0, 10.0, 10.0])
    ]
    assert make_ledger(3, {"main": lives}).goodput == pytest.approx(1.0)


def test_replicas_that_joined_could_have_had_work_counted_as_well() -> None:
    assert make_ledger(1, {"main": [rank_of_two(0, 60), rank_of_two(1, 60)]}).goodput == pytest.approx(1.0)


def test_the_works_of_two_models_are_added_up() -> None:
    lives = [rank_of_two(0, 60), rank_of_two(1, 60)]
    one, both = make_ledger(2, {"main": lives}), make_ledger(2, {"critic": lives, "main": lives})
    assert (both.counted, both.goodput) == (2 * one.counted, one.goodput)
