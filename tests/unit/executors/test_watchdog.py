"""The limits of each state, and the steps at a limit. The time is a number here, and no rank is ended."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Collection

import pytest
from support.new_runs import run_spec

from executors.attempt import Attempt
from executors.process import Activity
from executors.replica.shared_page import SharedPage
from executors.settings.policy import HangLimits
from executors.store.memory import MemoryStore
from executors.supervisor import watchdog as rules
from executors.supervisor.processes import NEVER, RunningAttempt
from executors.supervisor.watchdog import Watchdog, WatchdogReport

START = 1000.0
INF = math.inf


class FakeMeter:
    """A meter that reports at each sample whether the rank is active, as the test decides."""

    window_s = every_s = 10.0

    def __init__(self, is_active: Callable[[float], bool], is_stuck: Callable[[float], bool] | None = None) -> None:
        self.is_active, self.next_at, self.n_samples = is_active, 0.0, 0
        self.is_stuck, self.waits_inside = is_stuck or never, False

    def reset(self, next_at: float = 0.0) -> None:
        self.next_at = next_at

    def look(self, now: float, _: Collection[int]) -> bool | None:
        if now < self.next_at:
            return None
        self.next_at, self.n_samples = now + self.window_s / 5, self.n_samples + 1
        is_active = self.is_active(now - START)
        self.waits_inside = not is_active and self.is_stuck(now - START)
        return is_active


def never(_: float) -> bool:
    return False


def always(_: float) -> bool:
    return True


def watchdog_of(
    page: SharedPage,
    limits: str = "auto",
    *,
    ends: bool = True,
    is_active: Callable[[float], bool] = never,
    is_stuck: Callable[[float], bool] = never,
) -> Watchdog:
    page.since = page.beat = page.tick = START
    watchdog = Watchdog(
        page,
        os.getpid(),
        HangLimits.parse(limits),
        ends=ends,
        term_grace_s=5.0,
        spec=run_spec("RUN", "memory://limits", "00", 8, (3,)),
        rank=3,
    )
    watchdog._meter = FakeMeter(is_active)  # type: ignore[assignment]
    watchdog._stuck_meter = FakeMeter(is_active, is_stuck)  # type: ignore[assignment]
    return watchdog


def looked(
    watchdog: Watchdog, page: SharedPage, until: float, *, ticks: bool = True
) -> list[tuple[float, WatchdogReport]]:
    """Check a rank with running threads at each due time, and return the times of findings."""
    found = []
    while (now := watchdog.next_look_at) <= until:
        if ticks:
            page.beat = page.tick = now
        if (report := watchdog.look(now)) is not None:
            found.append((round(now - START, 1), report))
            if report.is_kill:
                break
    return found


def page_with(marks: int, longest_s: float = 0.0, idle_s: float = 0.0) -> SharedPage:
    """Return the page of a rank that has made some marks."""
    page = SharedPage()
    for _ in range(marks):
        page.progress()
    page._numbers[page._row] = longest_s
    page.note_idle(page._row, idle_s)
    return page


H, M = 3600.0, 60.0


@pytest.mark.parametrize(
    ("limits", "state", "idle", "active"),
    [
        # No mark yet.
        ("auto", "start", (30 * M, 31 * M), None),
        ("auto", "opened", (30 * M, 31 * M), (30 * M, 31 * M)),
        ("auto,start=100s", "start", (100, 150), (100, 150)),
        ("auto,start=100s", "opened", (100, 150), (100, 150)),
        ("off,start=100s", "start", (100, 150), (100, 150)),
        ("off", "start", None, None),
        ("4s:6s", "start", (60, 90), (60, 90)),
        ("120s", "start", (900, 1350), (900, 1350)),
        ("1h:2h", "start", (2 * H, 3 * H), (2 * H, 3 * H)),
        ("4s:6s,start=10m", "start", (600, 900), (600, 900)),
        # Between two marks.
        ("auto", "few marks", (30 * M, 31 * M), (30 * M, 31 * M)),
        ("auto", "marks", (60, 120), (30 * M, 31 * M)),
        ("auto", "idle for 20 s before", (100, 160), (30 * M, 31 * M)),
        ("auto", "an interval of 10 min before", (60, 120), (50 * M, 51 * M)),
        ("120s:10m", "marks", (120, 600), (120, 600)),
        ("off", "marks", None, None),
        ("off,start=100s", "marks", None, None),
        # In a section.
        ("auto", "section", (30 * M, 31 * M), (30 * M, 31 * M)),
        ("auto", "known section", (60, 120), (30 * M, 31 * M)),
        ("auto", "section of 30 s", (30, 45), (30, 45)),
        ("120s", "section of 30 s", (30, 45), (30, 45)),
        ("off", "section of 30 s", None, None),
        ("auto", "section of 30 s at the start", (30, 45), (30, 45)),
        # The rank waits for others, and its main thread ticks.
        ("auto", "waits", None, None),
        ("10s", "waits", None, None),
        ("auto,start=100s", "waits at the start", None, None),
        # Every DiLoCo has ended.
        ("auto", "finished", (30 * M, 31 * M), None),
        ("120s:10m", "finished", (30 * M, 31 * M), None),
        ("120s:10m", "a mark after that", (120, 600), (120, 600)),
        ("auto", "finished without a mark", (30 * M, 31 * M), None),
        ("auto", "unwatched", None, None),
    ],
)
def test_each_state_has_the_limits_of_the_table(
    limits: str, state: str, idle: tuple[float, float] | None, active: tuple[float, float] | None
) -> None:
    for is_active, expected in ((never, idle), (always, active)):
        page = page_in(state)
        found = looked(watchdog_of(page, limits, is_active=is_active), page, START + 4 * H)
        if expected is None:
            assert found == []
            continue
        soft_s, killed_s = expected
        assert soft_s <= found[0][0] <= soft_s + 2.5, "the hang is reported at the soft limit"
        assert [at for at, report in found if report.is_kill] == [pytest.approx(killed_s, abs=2.5)]
        assert page.diagnosis, "the rank raises an error before it is killed"


def page_in(state: str) -> SharedPage:
    """Return the page of a rank in one of the states of the table."""
    if state in ("start", "opened", "section of 30 s at the start", "waits at the start", "finished without a mark"):
        page = SharedPage()
    else:
        idle_s = {"idle for 20 s before": 20.0, "idle for 2 s before": 2.0}.get(state, 0.0)
        longest_s = 600.0 if state == "an interval of 10 min before" else 1.0
        n_marks = {"few marks": 5, "steady": 40, "idle for 2 s before": 40, "idle for 20 s before": 40}.get(state, 9)
        page = page_with(n_marks, longest_s, idle_s)
    if state == "opened":
        page.open_training()
        page.opened_at = START
    if state.startswith(("finished", "a mark after")):
        page.finish_training()
    if state == "a mark after that":
        page.progress()
    if state == "unwatched":
        page.unwatched = 1
    if state == "known section":
        for _ in range(6):
            page.enter("evaluate")
            page.leave()
    if "section" in state or state.startswith("waits"):
        page.enter("evaluate", INF if "waits" in state else 30.0 if "30 s" in state else None)
    return page


@pytest.mark.parametrize(
    ("limits", "state", "is_active", "sentence"),
    [
        (
            "auto", "marks", never,
            "Replica 3 of 8 was idle for 60 s (limit 60 s): the main thread runs Python code. "
            'replica.section("evaluate", limit_s=…), replica.progress() or --hang-timeout allow more time.',
        ),
        (
            "auto", "known section", never,
            "Replica 3 of 8 was idle for 60 s in section 'evaluate' (limit 60 s): the main thread runs Python code. "
            'replica.section("evaluate", limit_s=…), replica.progress() or --hang-timeout allow more time.',
        ),
        (
            "auto", "marks", always,
            "Replica 3 of 8 worked without progress for 1800 s (limit 1800 s): the main thread runs Python code. "
            'replica.section("evaluate", limit_s=…), replica.progress() or --hang-timeout allow more time.',
        ),
        (
            "120s", "marks", always,
            "Replica 3 of 8 made no progress for 120 s (limit 120 s, --hang-timeout): the main thread runs Python code."
            ' A longer --hang-timeout, replica.section("evaluate", limit_s=…) or replica.progress() allow more time.',
        ),
        (
            "120s", "section of 30 s", always,
            "Replica 3 of 8 made no progress for 30 s (limit 30 s, limit_s of section 'evaluate'): the main "
            "thread runs Python code. A larger limit_s allows more time.",
        ),
        (
            "120s", "start", always,
            "Replica 3 of 8 made no first progress for 900 s (limit 900 s, implied by --hang-timeout): the "
            "main thread runs Python code. --start-timeout allows more time.",
        ),
    ],
)  # fmt: skip
def test_a_report_has_the_observation_the_limit_and_the_remedy(
    limits: str, state: str, is_active: Callable[[float], bool], sentence: str
) -> None:
    page = page_in(state)
    (_, report), *_ = looked(watchdog_of(page, limits, is_active=is_active), page, START + 4 * H)
    assert report.sentence == sentence
    assert report.stacks is None, "the report has no stacks, because they are not ready"


@pytest.mark.parametrize(("limits", "ends"), [("auto", False), ("60s", True), ("auto,start=60s", False)])
def test_only_limits_that_the_user_gave_end_a_rank_without_restarts(limits: str, *, ends: bool) -> None:
    page = page_with(6)
    found = looked(watchdog_of(page, limits, ends=False), page, START + 5000)
    assert len([report for _, report in found if not report.is_kill]) == 2
    assert any(report.is_kill for _, report in found) is ends


def test_the_idle_limit_counts_from_the_last_activity() -> None:
    page = page_with(9)
    found = looked(watchdog_of(page, is_active=lambda at: at < 1000), page, START + 2000)
    assert 1058 <= found[0][0] <= 1062


@pytest.mark.parametrize(
    ("limits", "state", "limit"),
    [
        ("auto", "steady", (4, 8)),
        ("auto", "idle for 2 s before", (10, 14)),
        ("auto", "idle for 20 s before", (60, 64)),
        ("auto", "marks", (60, 120)),  # too few to know that the loop is steady
        ("auto", "start", (60, 64)),
        ("auto", "opened", (60, 64)),
        # A number that the user gave is not replaced.
        ("120s:10m", "steady", (120, 600)),
        ("auto,start=100s", "start", (100, 150)),
        ("auto", "section of 30 s", (30, 45)),
        ("off", "steady", None),
        ("auto", "waits", None),
        ("auto", "unwatched", None),
        ("auto", "finished", (30 * M, 31 * M)),
    ],
)
def test_a_rank_that_only_waits_for_its_own_locks_is_ended_soon(
    limits: str, state: str, limit: tuple[float, float] | None
) -> None:
    page = page_in(state)
    found = looked(watchdog_of(page, limits, is_stuck=always), page, START + H)
    if limit is None:
        assert found == []
        return
    soft_s, killed_s = limit
    assert soft_s <= found[0][0] <= soft_s + 2.5
    assert [at for at, report in found if report.is_kill] == [pytest.approx(killed_s, abs=2.5)]


def test_a_process_of_several_is_not_stuck_alone() -> None:
    page, other = page_in("steady"), page_in("steady")
    dogs = [watchdog_of(each, is_stuck=always) for each in (page, other)]
    rules.introduce(dogs)
    assert 60 <= looked(dogs[0], page, START + 200)[0][0] <= 62.5


def test_after_a_stuck_rank_the_next_attempt_waits_longer_up_to_the_idle_limit() -> None:
    page, limits_s = page_in("steady"), []
    for _ in range(4):
        found = looked(watchdog_of(page, is_stuck=always), page, START + 300)
        limits_s.append(round(found[0][0]))
        page = SharedPage(after=page)
        for _ in range(9):
            page.progress()
        page._numbers[page._row] = 0.05
    assert limits_s == [pytest.approx(limit_s, abs=2) for limit_s in (4, 20, 60, 60)]


def test_a_sample_that_shows_another_wait_begins_the_limit_anew() -> None:
    page = page_in("steady")
    found = looked(watchdog_of(page, is_stuck=lambda at: int(at) % 3 != 0 or at > 30), page, START + 60)
    assert 33 <= found[0][0] <= 36.5


@pytest.mark.parametrize("seed", range(5))
def test_an_hour_of_heavy_tailed_pauses_raises_no_alarm(seed: int) -> None:
    """Pauses as of evaluations, saves, slow reads, compilations and waits for a processor, in a loop of 50 ms steps.

    Nine in ten pauses last less than a second, and the longest a minute. In a pause the rank is active, waits for
    something outside, or waits for its own locks, which never takes long in a rank that works.
    """
    rng, page = random.Random(seed), page_in("steady")
    kind, longest = "steps", 0.0
    watchdog = watchdog_of(page, is_active=lambda _: kind == "active", is_stuck=lambda _: kind == "locks")
    now, mark, pause_s = START, START, 0.05
    while now < START + H:
        now = min(watchdog.next_look_at, mark + pause_s)
        if now >= mark + pause_s:
            page.progress_marks += 1
            page.since = mark = now
            kind = rng.choices(["steps", "active", "outside", "locks"], [0.9, 0.04, 0.04, 0.02])[0]
            pause_s = {"steps": 0.5, "active": 300.0, "outside": 55.0, "locks": 3.0}[kind]
            pause_s = min(pause_s, 0.05 * rng.paretovariate(0.7))
            longest = max(longest, pause_s)
        page.beat = page.tick = now
        assert watchdog.look(now) is None, (kind, pause_s)
    assert longest > 30, "the trace has no long pause"


def test_an_idle_time_that_ended_is_learned_and_a_longer_one_is_allowed() -> None:
    page = page_with(9)
    watchdog = watchdog_of(page, is_active=lambda at: not 100 <= at < 150 and at < 400)
    found = looked(watchdog, page, START + 2000)
    assert page.longest_idle_s == pytest.approx(50, abs=4)
    assert found[0][0] == pytest.approx(400 + 5 * 50, abs=20)


def test_a_mark_that_ends_an_idle_time_teaches_it() -> None:
    page = page_with(9)
    watchdog = watchdog_of(page)
    assert looked(watchdog, page, START + 40) == []
    page.since = START + 40.5
    assert looked(watchdog, page, START + 43) == []
    assert page.longest_idle_s == pytest.approx(40.5)
    following = SharedPage(after=page)
    assert following.longest_idle_s == pytest.approx(40.5), "the page of the next attempt has the idle time, too"


def test_a_rank_that_steps_is_not_sampled() -> None:
    page = page_with(9)
    watchdog = watchdog_of(page)
    for second in range(1, 500):
        page.since = START + second
        looked(watchdog, page, START + second + 0.5)
    assert watchdog._meter.n_samples == 0  # type: ignore[attr-defined]


def test_a_rank_that_becomes_active_while_its_stacks_are_taken_is_not_ended() -> None:
    page = page_with(9)
    found = looked(watchdog_of(page, is_active=lambda at: at >= 60.5), page, START + 200)
    assert not any(report.is_kill for _, report in found)
    assert found[-1][1].sentence == "Replica 3 of 8 works again."


def test_a_rank_that_is_only_reported_and_works_again_is_reported_again() -> None:
    page = page_with(9)
    page.n_stacks = 1
    watchdog = watchdog_of(page, ends=False, is_active=lambda at: 90 <= at < 100)
    found = looked(watchdog, page, START + 98)
    assert [report.stacks for _, report in found] == [None, None, "Replica 3 of 8 works again."]
    assert 90 <= found[-1][0] <= 92


@pytest.mark.parametrize("late_s", [3.0, 30.0])
def test_a_late_supervisor_treats_no_rank_as_idle(late_s: float) -> None:
    page = page_with(9)
    watchdog = watchdog_of(page, is_active=always)
    while (now := watchdog.next_look_at + late_s) < START + 1700:
        assert watchdog.look(now) is None


def test_waiting_for_others_is_not_part_of_the_start() -> None:
    page = SharedPage()
    watchdog = watchdog_of(page, "auto,start=100s")
    page.enter("first anchor", INF)
    assert looked(watchdog, page, START + 500) == []
    page.leave()
    page.since = START
    found = looked(watchdog, page, START + 700)
    assert found[0][0] == pytest.approx(600, abs=2)


def test_sections_do_not_prolong_the_start() -> None:
    page = SharedPage()
    watchdog = watchdog_of(page, "auto,start=100s")
    for second in range(99):
        page.enter("read")
        page.since = START + second
        assert looked(watchdog, page, START + second + 0.9) == []
        page.leave()
    assert looked(watchdog, page, START + 102) != []


@pytest.mark.parametrize("seed", range(20))
def test_a_rank_that_makes_progress_within_half_its_limit_is_never_suspected(seed: int) -> None:
    rng, page = random.Random(seed), SharedPage()
    page.progress()
    watchdog = watchdog_of(page, "20s")
    now = mark = START
    for _ in range(2000):
        now += rng.choice([0.01, 0.5, 3.0])
        if now - mark > rng.uniform(0, 10):
            page.progress_marks += 1
            page.since = mark = now
        assert watchdog.look(now) is None
        assert watchdog.next_look_at <= now + 1.0


def test_limits_count_again_from_the_moment_a_rank_continues() -> None:
    page = SharedPage()
    page.progress()
    watchdog = watchdog_of(page, "20s:40s")
    assert [at for at, _ in looked(watchdog, page, START + 20.5)] == [20.0]
    page.since = START + 20.6
    found = looked(watchdog, page, START + 60)
    assert [at for at, _ in found] == pytest.approx([21, 40.8, 41.8], abs=0.3)
    assert found[0][1].sentence == "Replica 3 of 8 works again."


def test_a_rank_that_is_not_to_be_judged_is_not() -> None:
    page = SharedPage()
    page.progress()
    page.unwatched = 1
    watchdog = watchdog_of(page, "20s")
    assert looked(watchdog, page, START + 500) == []


def test_unobserved_time_does_not_count() -> None:
    page = SharedPage()
    page.progress()
    watchdog = watchdog_of(page, "20s")
    assert looked(watchdog, page, START + 10) == []
    assert watchdog.look(START + 500) is None, "the machine was asleep"
    found = looked(watchdog, page, START + 600)
    assert found[0][0] == pytest.approx(509.2, abs=1)


def test_a_rank_that_waits_for_others_is_judged_by_its_calls_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asleep = Activity(is_stopped=False, is_traced=False, cpu_s=0.0)
    monkeypatch.setattr(rules, "activity", lambda _: asleep)
    page = SharedPage()
    page.progress()
    page.enter("round", INF)
    watchdog = watchdog_of(page, "5s")
    assert looked(watchdog, page, START + 5000) == []
    assert page.tick == START + 5000
    (at, report), *_ = looked(watchdog, page, START + 6000, ticks=False)
    assert 5015 <= at <= 5016.5
    assert "the GIL is held by a call that waits" in report.sentence


def test_a_rank_that_is_atomic_is_spared_for_sixty_seconds() -> None:
    page = SharedPage()
    page.progress()
    page.atomic_since = START + 5
    found = looked(watchdog_of(page, "20s:40s"), page, START + 200)
    assert [at for at, report in found if report.is_kill] == [65.0]


def test_a_rank_that_has_raised_has_its_grace() -> None:
    page = SharedPage()
    page.progress()
    watchdog = watchdog_of(page, "20s:60s")
    assert len(looked(watchdog, page, START + 22)) == 2
    page.hang_raised_at = START + 22
    page.since = START + 22.1  # progress that the rank reports while it cleans up changes nothing
    assert [at for at, _ in looked(watchdog, page, START + 60)] == [pytest.approx(27, abs=1)]


def test_without_data_of_the_kernel_the_page_alone_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "activity", lambda _: None)
    page = SharedPage()
    page.progress()
    found = looked(watchdog_of(page, "20s"), page, START + 60, ticks=False)
    assert "the GIL is held by a call." in found[0][1].sentence


def test_stacks_are_kept_under_names_that_the_outcome_has() -> None:
    page, attempt = SharedPage(), Attempt(MemoryStore("memory://stacks"), "run", 3, 1)
    RunningAttempt(0, attempt, page, watchdog_of(page), 0.0, NEVER, stacks=["first", "second"]).keep_stacks()
    assert page.outcome_fields()["stacks"] == ("stacks/0.txt", "stacks/1.txt")
    assert bytes(attempt.store.get(attempt.key("stacks/1.txt"))) == b"second"
