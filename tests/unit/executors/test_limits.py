"""What a supervisor makes of a page: limits, and when they are over. The time is a number here; no rank is ended."""

from __future__ import annotations

import math
import os
import random

import pytest

from executors.attempt import Attempt
from executors.native import RunSpec
from executors.replica.shared_page import SharedPage
from executors.store.memory import MemoryStore
from executors.task.policy import HangLimits
from executors.worker import limits as rules
from executors.worker.limits import Finding, Watchdog
from executors.worker.ranks import NEVER, Running

START = 1000.0
INF = math.inf


def watchdog_of(page: SharedPage, limits: str = "auto", *, ends: bool = True) -> Watchdog:
    page.since = page.beat = page.tick = START
    return Watchdog(
        page,
        os.getpid(),
        HangLimits.parse(limits),
        ends=ends,
        term_grace_s=5.0,
        spec=RunSpec("RUN", "memory://limits", "00", 8, (3,)),
        rank=3,
    )


def looked(watchdog: Watchdog, page: SharedPage, until: float, *, ticks: bool = True) -> list[tuple[float, Finding]]:
    """Look whenever it is time, at a rank whose threads go on; return when something was found."""
    found = []
    while (now := watchdog.next_look_at) <= until:
        if ticks:
            page.beat = page.tick = now
        if (finding := watchdog.look(now)) is not None:
            found.append((round(now - START, 1), finding))
            if finding.is_kill:
                break
    return found


@pytest.mark.parametrize(
    ("limits", "marks", "longest_s", "section", "soft_s", "killed_s"),
    [
        ("auto", 0, 0, None, 1800, None),
        ("auto", 1, 0, None, 1800, 3600),
        ("auto", 5, 2, None, 1800, 3600),
        ("auto", 6, 2, None, 60, 120),
        ("auto", 6, 100, None, 500, 1000),
        ("120s", 0, 0, None, 1200, 1800),
        ("120s", 1, 500, None, 120, 180),
        ("120s:10m", 9, 500, None, 120, 600),
        ("off", 9, 1, None, None, None),
        ("off", 9, 1, 30.0, None, None),
        ("auto", 9, 1, 30.0, 30, 45),
        ("auto", 9, 1, INF, None, None),
        ("10s", 9, 1, INF, None, None),
        ("120s", 9, 500, 30.0, 30, 45),
        ("120s", 0, 0, 30.0, 30, 45),
    ],
)
def test_a_rank_without_progress_is_named_at_its_soft_limit_and_killed_at_its_hard_one(
    limits: str, marks: int, longest_s: float, section: float | None, soft_s: float | None, killed_s: float | None
) -> None:
    page = SharedPage()
    for _ in range(marks):
        page.progress()
    if section is not None:
        page.enter("evaluate", section)
    row = page._row
    page._numbers[row] = longest_s
    found = looked(watchdog_of(page, limits), page, START + 5000)
    if soft_s is None:
        assert found == []
        return
    assert soft_s <= found[0][0] <= soft_s + 0.3
    assert found[0][1].sentence == (
        f"Replica 3 of 8 made no progress for {soft_s:.0f} s (limit {soft_s:.3g} s): running, without progress."
    ), "no stacks: it is not ready"
    assert [at for at, finding in found if finding.is_kill] == ([] if killed_s is None else [killed_s])
    assert bool(page.diagnosis) == (killed_s is not None)


@pytest.mark.parametrize(("limits", "ends"), [("auto", False), ("60s", True)])
def test_a_learned_limit_ends_nothing_unless_it_is_asked_for(limits: str, *, ends: bool) -> None:
    page = SharedPage()
    for _ in range(6):
        page.progress()
    found = looked(watchdog_of(page, limits, ends=False), page, START + 5000)
    assert len([finding for _, finding in found if not finding.is_kill]) == 2
    assert any(finding.is_kill for _, finding in found) is ends


@pytest.mark.parametrize("seed", range(20))
def test_a_rank_that_makes_progress_within_half_its_limit_is_never_suspected(seed: int) -> None:
    rng, page = random.Random(seed), SharedPage()
    page.progress()
    watchdog = watchdog_of(page, "20s")
    now = mark = START
    for _ in range(2000):
        now += rng.choice([0.01, 0.5, 3.0])
        if now - mark > rng.uniform(0, 10):
            page.marks += 1
            page.since = mark = now
        assert watchdog.look(now) is None
        assert watchdog.next_look_at <= now + 1.0


def test_what_a_rank_goes_on_after_counts_anew() -> None:
    page = SharedPage()
    page.progress()
    watchdog = watchdog_of(page, "20s:40s")
    assert [at for at, _ in looked(watchdog, page, START + 20.5)] == [20.2]
    page.since = START + 20.6
    assert [at for at, _ in looked(watchdog, page, START + 60)] == pytest.approx([40.8, 41.8], abs=0.1)


def test_a_rank_that_is_not_to_be_judged_is_not() -> None:
    page = SharedPage()
    page.progress()
    page.unwatched = 1
    watchdog = watchdog_of(page, "20s")
    assert looked(watchdog, page, START + 500) == []


def test_time_in_which_nobody_looked_counts_for_nothing() -> None:
    page = SharedPage()
    page.progress()
    watchdog = watchdog_of(page, "20s")
    assert looked(watchdog, page, START + 10) == []
    assert watchdog.look(START + 500) is None, "the machine was asleep"
    found = looked(watchdog, page, START + 600)
    assert found[0][0] == pytest.approx(509.2, abs=1)


def test_what_waits_for_others_is_judged_by_its_calls_alone() -> None:
    page = SharedPage()
    page.progress()
    page.enter("round", INF)
    watchdog = watchdog_of(page, "5s")
    assert looked(watchdog, page, START + 5000) == []
    assert page.tick == START + 5000
    (at, finding), *_ = looked(watchdog, page, START + 6000, ticks=False)
    assert 5015 <= at <= 5016.5
    assert "the GIL is held by a call that waits" in finding.sentence


def test_a_rank_that_is_atomic_is_spared_for_sixty_seconds() -> None:
    page = SharedPage()
    page.progress()
    page.atomic_since = START + 5
    found = looked(watchdog_of(page, "20s:40s"), page, START + 200)
    assert [at for at, finding in found if finding.is_kill] == [65.0]


def test_a_rank_that_has_raised_has_its_grace() -> None:
    page = SharedPage()
    page.progress()
    watchdog = watchdog_of(page, "20s:60s")
    assert len(looked(watchdog, page, START + 22)) == 2
    page.hang_raised_at = START + 22
    page.since = START + 22.1  # reports of its cleaning up change nothing
    assert [at for at, _ in looked(watchdog, page, START + 60)] == [pytest.approx(27, abs=1)]


def test_where_the_kernel_shows_nothing_the_page_alone_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "activity", lambda _: None)
    page = SharedPage()
    page.progress()
    found = looked(watchdog_of(page, "20s"), page, START + 60, ticks=False)
    assert "the GIL is held by a call." in found[0][1].sentence


def test_stacks_are_kept_under_names_that_the_outcome_has() -> None:
    page, attempt = SharedPage(), Attempt(MemoryStore("memory://stacks"), "run", 3, 1)
    Running(0, attempt, page, watchdog_of(page), 0.0, NEVER, stacks=["first", "second"]).keep_stacks()
    assert page.told()["stacks"] == ("stacks/0.txt", "stacks/1.txt")
    assert bytes(attempt.store.get(attempt.key("stacks/1.txt"))) == b"second"
