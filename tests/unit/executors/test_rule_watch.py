"""Tests how a supervisor judges rules: from the rings and pages of a rank, from its output, and with its own clock."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from executors.metrics import recorder
from executors.metrics.recorder import Recorder
from executors.replica import Replica
from executors.replica.report_ring import CAPACITY
from executors.replica.shared_page import TAIL_BYTES, SharedPage
from executors.settings.watch_rules import parse_rules, watched_numbers
from executors.store.memory import MemoryStore
from executors.supervisor import output_lines
from executors.supervisor.output_lines import MAX_LINE, OutputLines
from executors.supervisor.rule_watch import GPU_KNOWN_S, MATCH_CPU_S, RollingMedian, RuleVerdict, RuleWatch

NAN, INF = float("nan"), float("inf")


class Scene:
    """An attempt with its pages, and a supervisor that looks at it every second."""

    def __init__(self, *rules: str, n: int = 1, file: Path | None = None) -> None:
        parsed = parse_rules(rules)
        self.pages = [SharedPage(watched=watched_numbers(parsed)) for _ in range(n)]
        self.replicas = [Replica(0, 1, "run", 0, "memory:", page=page) for page in self.pages]
        self.now = self.began = time.monotonic()
        self.watch = RuleWatch(parsed, self.pages, OutputLines(self.pages, file), self.now)

    def report(self, name: str, *values: float, member: int = 0) -> None:
        for value in values:
            numbers: Any = {name: value}
            self.replicas[member].report(**numbers)

    def look(self, *, after_s: float = 1.0, is_last: bool = False) -> list[str]:
        return [_line_of(each) for each in self.found(after_s=after_s, is_last=is_last)]

    def found(self, *, after_s: float = 1.0, is_last: bool = False) -> list[RuleVerdict]:
        self.now += after_s
        return self.watch.look(self.now, is_last=is_last)


def _line_of(found: RuleVerdict) -> str:
    member = "" if found.member is None else f" in member {found.member}"
    return f"{'' if found.is_broken else 'unjudged: '}{found.rule}{member}: {found.evidence}"


def printed(page: SharedPage, *lines: str) -> None:
    for line in lines:
        page.write_tail(f"{line}\n".encode())


def test_a_number_breaks_a_rule_once_in_an_attempt_with_its_value_and_its_report() -> None:
    scene = Scene("loss > 8", "loss nan")
    scene.report("loss", 2.0, 3.0, 9.25, 9.5)
    assert scene.look() == ["loss > 8: loss is 9.25 in report 3"]
    scene.report("loss", 9.0, INF)
    assert scene.look() == ["loss nan: loss is inf in report 6"]
    scene.report("loss", 9.0, NAN)
    assert scene.look() == []


def test_for_counts_reports_in_a_row_also_over_several_looks() -> None:
    scene = Scene("loss > 8 for 5")
    for value in (9, 9, 9, 9, 1, 9, 9, NAN, 9, 9, 9):
        scene.report("loss", value)
        assert scene.look() == []
    scene.report("loss", 9, 9)
    assert scene.look() == ["loss > 8 for 5: loss is 9 in report 13, after 5 such reports in a row"]


def test_reports_of_other_numbers_do_not_end_a_row() -> None:
    scene = Scene("loss > 8 for 3", "gnorm > 1")
    for _ in range(3):
        scene.report("loss", 9.0)
        scene.report("gnorm", 0.5)
    assert scene.look() == ["loss > 8 for 3: loss is 9 in report 3, after 3 such reports in a row"]


def test_the_median_is_of_the_last_hundred_finite_reports_before_this_one() -> None:
    scene = Scene("gnorm > 10 * median")
    scene.report("gnorm", *[1.0] * 9, 100.0)
    assert scene.look() == [], "the median of nine reports is not known"
    scene.report("gnorm", *[NAN] * 5, *[3.0] * 100, 29.0)
    assert scene.look() == []
    scene.report("gnorm", 31.0)
    assert scene.look() == ["gnorm > 10 * median: gnorm is 31 in report 117, the median is 3"]
    median, values = RollingMedian(), [float(each * 7919 % 1000) for each in range(450)]
    for index, value in enumerate(values):
        median.add(value)
        recent = sorted(values[max(0, index - 99) : index + 1])
        assert index < 9 or median.value == (recent[(len(recent) - 1) // 2] + recent[len(recent) // 2]) / 2


def test_no_report_between_two_looks_is_missed_up_to_the_size_of_the_ring() -> None:
    scene = Scene("loss > 8 for 50")
    scene.report("loss", *[1.0] * (CAPACITY - 60), *[9.0] * 49, *[1.0] * 11)
    assert scene.look() == []
    scene.report("loss", *[9.0] * 50, *[1.0] * (CAPACITY - 50))
    assert scene.look() == [f"loss > 8 for 50: loss is 9 in report {CAPACITY + 50}, after 50 such reports in a row"]


def test_reports_that_no_supervisor_has_seen_are_told_once_and_break_no_rule() -> None:
    scene = Scene("loss > 8 for 50", "gnorm > 1")
    scene.report("loss", *[9.0] * 30)
    assert scene.look() == []
    scene.report("loss", *[9.0] * 10, *[1.0] * CAPACITY, *[9.0] * 30)
    told = "40 reports came faster than the supervisor could read them"
    assert scene.look() == [f"unjudged: loss > 8 for 50: {told}", f"unjudged: gnorm > 1: {told}"]
    scene.report("loss", *[1.0] * (CAPACITY + 30), *[9.0] * 19)
    assert scene.look() == [], "it is told once, and 30 and 19 reports are not 50 in a row"
    scene.report("loss", *[9.0] * 31)
    assert len(scene.look()) == 1


def unreported(rule: str, n: int) -> list[str]:
    name = rule.partition(" ")[0]
    return [f"unjudged: {rule}: {name!r} was not reported in any of the {n} reports"]


def test_a_rank_that_reports_often_is_looked_at_more_often() -> None:
    scene = Scene("loss > 8")
    scene.report("loss", *[1.0] * 10)
    scene.look()
    assert scene.watch.next_look_at == scene.now + 1.0
    scene.report("loss", *[1.0] * (CAPACITY // 4))
    scene.look()
    assert scene.watch.next_look_at == pytest.approx(scene.now + 0.1)


def test_a_number_that_is_never_reported_is_told_after_100_reports_or_at_the_end() -> None:
    scene = Scene("los > 8", "loss > 8")
    scene.report("loss", *[1.0] * 99)
    assert scene.look() == []
    scene.report("loss", 1.0)
    assert scene.look() == unreported("los > 8", 100)
    assert scene.look(is_last=True) == []
    scene = Scene("los > 8")
    scene.report("loss", 1.0)
    assert scene.look() == []
    assert scene.look(is_last=True) == unreported("los > 8", 1)
    scene = Scene("los > 8")
    assert scene.look(is_last=True) == ["unjudged: los > 8: 'los' was not reported because nothing was reported"]


def test_each_process_of_a_replica_has_its_own_row_and_its_own_median() -> None:
    scene = Scene("loss > 8 for 4", "gnorm > 10 * median", "los > 1", n=2)
    scene.report("loss", 9.0, 9.0, 9.0)
    scene.report("loss", 9.0, 9.0, 9.0, member=1)
    scene.report("gnorm", *[1.0] * 20)
    scene.report("gnorm", *[100.0] * 20, member=1)
    assert scene.look() == []
    scene.report("loss", 9.0, member=1)
    assert scene.look() == ["loss > 8 for 4 in member 1: loss is 9 in report 4, after 4 such reports in a row"]
    scene.report("loss", 9.0)
    assert scene.look() == [], "a rule is broken once in an attempt of a rank"
    assert scene.look(is_last=True) == unreported("los > 1", 24)


def test_the_next_attempt_of_the_same_process_begins_with_empty_rings() -> None:
    scene = Scene("loss > 8 for 2")
    scene.report("loss", 9.0)
    scene.pages[0].renew()
    watch = RuleWatch(parse_rules(["loss > 8 for 2"]), scene.pages, OutputLines(scene.pages, None), scene.now)
    scene.report("loss", 9.0)
    assert watch.look(scene.now + 1) == []
    scene.report("loss", 9.0)
    assert len(watch.look(scene.now + 2)) == 1


def test_a_process_that_opens_the_page_by_its_file_reports_into_the_same_rings() -> None:
    scene = Scene("loss > 8")
    scene.pages[0].keep_file()
    other = SharedPage.open(os.dup(scene.pages[0].file))
    Replica(0, 1, "run", 0, "memory:", page=other).report(loss=9.0)
    assert scene.look() == ["loss > 8: loss is 9 in report 1"]
    other.detach()  # as in a forked helper of the rank
    Replica(0, 1, "run", 0, "memory:", page=other).report(loss=9.0)
    assert scene.pages[0].reports is not None
    assert scene.pages[0].reports.n_reports == 1
    scene.pages[0].close_file()


def test_a_run_without_rules_has_no_rings() -> None:
    page = SharedPage()
    Replica(0, 1, "run", 0, "memory:", page=page).report(loss=9.0)
    assert page.reports is None


# Silence


def test_no_round_no_output_and_no_progress_count_from_the_start_and_from_the_last_one() -> None:
    scene = Scene("no round 10m", "no output 5m", "no progress 2m")
    (page,) = scene.pages
    assert scene.look(after_s=119) == []
    assert scene.look(after_s=1.01) == ["no progress 2m: no progress for 2:00"]
    printed(page, "hello")
    assert scene.look(after_s=100) == []
    assert scene.look(after_s=299) == []
    assert scene.look(after_s=1.01) == ["no output 5m: no output for 5:00"]
    page.progress(round_=7)
    assert scene.look(after_s=70) == []
    assert scene.look(after_s=599) == []
    assert scene.look(after_s=1.01) == ["no round 10m: no round for 10:00 since round 7"]
    assert scene.look(after_s=9999) == []


def test_silence_does_not_count_in_unwatched_code_after_the_last_round_and_after_the_end() -> None:
    scene = Scene("no round 10m", "no progress 2m")
    with scene.replicas[0].unwatched():
        assert scene.look(after_s=1000) == []
    assert scene.look(after_s=100) == []
    scene.pages[0].progress(round_=7)
    scene.pages[0].finish_training()
    assert [each.rule.name for each in scene.found(after_s=10_000)] == ["progress"]
    assert Scene("no round 10m", "no progress 2m").look(after_s=10_000, is_last=True) == []


def test_the_next_look_is_not_later_than_the_end_of_a_silence() -> None:
    scene = Scene("no round 10m")
    scene.look(after_s=599.5)
    assert scene.watch.next_look_at == pytest.approx(scene.began + 600)


# The GPU


def test_a_gpu_rule_needs_measurements_that_fit_for_the_whole_time() -> None:
    scene = Scene("gpu < 10% 15m")
    rings = scene.pages[0].reports
    assert rings is not None

    def measured(use: float, minutes: float) -> list[str]:
        found = []
        for _ in range(round(2 * minutes)):
            scene.now += 30
            rings._head[2], rings._head[3] = use, scene.now
            found += scene.look(after_s=0)
            scene.watch.next_look_at = 0.0
        return found

    assert measured(0.9, 60) == []
    assert measured(0.05, 14) == []
    assert measured(0.5, 1) == []
    assert measured(0.05, 15) == []
    assert measured(0.04, 0.5) == ["gpu < 10% 15m: the utilization has fitted for 15:00, the last is 4%"]


def test_a_gpu_without_measurements_is_told_once_and_a_gap_begins_the_time_again() -> None:
    scene = Scene("gpu < 10% 15m")
    assert scene.look(after_s=GPU_KNOWN_S) == []
    (told,) = scene.look(after_s=1)
    assert told.startswith(
        "unjudged: gpu < 10% 15m: no utilization is measured here: torch uses no GPU, or the package"
    )
    assert scene.look(after_s=1000) == []
    rings = scene.pages[0].reports
    assert rings is not None
    rings._head[2], rings._head[3] = 0.01, scene.now
    assert scene.look() == []
    assert scene.look(after_s=1000) == [], "measurements that stopped show nothing"
    rings._head[3] = scene.now
    assert scene.look() == []


def test_the_recorder_notes_the_utilization_that_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(recorder, "_gpu_usage", lambda: {"gpu_use": 0.25})
    made = Recorder(MemoryStore("memory://usage"), "run", 0, 0, began=0.0, clock=lambda: now[0])
    page = SharedPage(watched=())
    assert page.reports is not None
    made.on_gpu = page.reports.note_gpu
    assert page.reports.gpu == (0.0, 0.0)
    now[0] = 31.0
    made.measure()
    assert page.reports.gpu[0] == 0.25
    assert page.reports.gpu[1] > 0


# Output


@pytest.fixture(params=["file", "page"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path | None, Callable[[SharedPage, bytes], None]]:
    """A log on this machine, or the end of the output in a page, and a function that prints."""
    if request.param == "page":
        return None, lambda page, data: page.write_tail(data)
    file = tmp_path / "output.log"

    def write(page: SharedPage, data: bytes) -> None:
        with file.open("ab") as log:
            log.write(data)

    return file, write


Source = tuple[Path | None, Callable[[SharedPage, bytes], None]]


def test_a_line_is_judged_once_also_if_it_is_written_in_parts(source: Source) -> None:
    file, write = source
    scene = Scene("log /boom/ for 3 -> stop", "log /^end$/", file=file)
    (page,) = scene.pages
    write(page, b"boom 1\nall is well\nbo")
    assert scene.look() == []
    write(page, b"om 2")
    assert scene.look() == []
    write(page, b"\n")
    assert scene.look() == []
    write(page, b"fine\rboom \x1b[31m3\xff\r\nmore\nend")
    assert scene.look() == [
        "log /boom/ for 3 -> stop: the line 'boom  [31m3\N{REPLACEMENT CHARACTER}', after 3 such lines"
    ]
    assert scene.look(is_last=True) == ["log /^end$/: the line 'end'"]


def test_our_own_lines_about_rules_break_no_rule_and_long_lines_are_cut(source: Source) -> None:
    file, write = source
    scene = Scene("log /boom/", "log /late/", file=file)
    write(scene.pages[0], b"replicas: The rule 'log /boom/' is broken: the line 'boom'.\n")
    write(scene.pages[0], b"x" * (MAX_LINE - 4) + b"late" + b"y" * 10_000 + b"boom\n")
    (found,) = scene.look()
    assert found.startswith("log /late/: the line 'xxx")
    assert len(found) < 400


def test_a_log_that_was_truncated_or_replaced_is_read_from_its_begin(tmp_path: Path) -> None:
    file = tmp_path / "output.log"
    scene = Scene("log /boom/ for 4", "no output 5m", file=file)
    file.write_text("boom 1\n" * 1 + "padding\n" * 10)
    scene.look(after_s=200)
    file.write_text("boom 2\n")
    assert scene.look(after_s=200) == []
    file.rename(tmp_path / "output.log.1")
    assert scene.look(after_s=200) == []
    file.write_text("boom 3\n")
    assert scene.look(after_s=90) == []
    with file.open("a") as log:
        log.write("boom 4\n")
    assert scene.look() == ["log /boom/ for 4: the line 'boom 4', after 4 such lines"]


def test_output_that_no_supervisor_has_seen_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene("log /boom/")
    scene.pages[0].write_tail(b"boom\n" + b"x\n" * TAIL_BYTES)
    told = "unjudged: log /boom/: {} bytes of output came faster than they could be judged"
    assert scene.look() == [told.format(5 + TAIL_BYTES)]
    scene.pages[0].write_tail(b"x\n" * TAIL_BYTES)
    assert scene.look() == []
    monkeypatch.setattr(output_lines, "MOST_BEHIND", 1000)
    file = tmp_path / "output.log"
    scene = Scene("log /boom/", file=file)
    file.write_bytes(b"boom\n" + b"x\n" * 1000)
    assert scene.look() == [told.format(1005)]
    with file.open("ab") as log:
        log.write(b"boom\n")
    assert scene.look() == ["log /boom/: the line 'boom'"]


def test_an_expression_that_backtracks_is_given_up_and_other_rules_are_still_judged() -> None:
    before = signal.getsignal(signal.SIGVTALRM)
    scene = Scene("log /^(a+)+$/", "log /boom/", "loss > 8")
    scene.report("loss", 9.0)
    printed(scene.pages[0], "a" * 60 + "b", "boom", "a" * 70 + "b")
    began = time.thread_time()
    found = scene.look()
    assert time.thread_time() - began < 30 * MATCH_CPU_S, "without a limit this takes years"
    assert found[:1] == ["loss > 8: loss is 9 in report 1"]
    assert found[1].startswith(f"unjudged: log /^(a+)+$/: the expression took more than {MATCH_CPU_S:g} s for the line")
    found += scene.look(is_last=True)
    assert found[2:] == ["log /boom/: the line 'boom'"]
    assert signal.getsignal(signal.SIGVTALRM) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] == 0.0


def test_much_output_is_judged_in_several_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    from executors.supervisor import rule_watch

    monkeypatch.setattr(rule_watch, "LINES_CPU_S", 0.0)
    scene = Scene("log /boom/ for 3")
    printed(scene.pages[0], "boom", "boom", "boom")
    assert scene.look() == []
    assert scene.watch.next_look_at == pytest.approx(scene.now + 0.1)
    assert scene.look(after_s=0.2) == []
    assert scene.look(after_s=0.2) == ["log /boom/ for 3: the line 'boom', after 3 such lines"]


def test_the_lines_of_all_processes_count_together() -> None:
    scene = Scene("log /boom/ for 2", n=2)
    printed(scene.pages[0], "boom 0")
    printed(scene.pages[1], "boom 1")
    assert scene.look() == ["log /boom/ for 2: the line 'boom 1', after 2 such lines"]


def test_a_look_reads_only_what_is_new_also_across_the_end_of_the_ring() -> None:
    page = SharedPage(watched=("loss", "gnorm"))
    ring, n_read = page.reports, 0
    assert ring is not None
    for size in (1, 5000, 5000, 1, CAPACITY):
        for index in range(size):
            ring.note({"loss": float(index)} if index % 2 else {"gnorm": NAN, "loss": 0.5, "lr": 1.0})
        values, n_read, n_lost = ring.read(n_read)
        assert (len(values["loss"]), len(values["gnorm"]), n_lost) == (size, (size + 1) // 2, 0)
        assert values["loss"] == [float(index) if index % 2 else 0.5 for index in range(size)]
        assert all(value != value for value in values["gnorm"]), "a reported nan is not a number that is missing"
    assert ring.read(n_read) == ({}, n_read, 0)
