"""Tests the content of a run's page without a browser: numbers, thinning, the time line, and hostile text."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shutil
import subprocess
import tarfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.made_up_runs import HOSTILE, SCENES, Scene, calm, failed_at_once, hostile, made_up, with_kills

from executors.metrics.rows import Numbers, Round, Row
from executors.view.report.document import ANCHOR, MAX_WARNINGS, Subject, document
from executors.view.report.page import ASSETS, page, write_page
from executors.view.report.scalars import scalars
from executors.view.report.text import last_lines, name_number, name_share, name_size, one_line
from executors.view.report.timeline import MAX_SPANS

Document = dict[str, Any]


class Elements(HTMLParser):
    """Counts the elements of a page, and keeps their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def texts_of(made: Document) -> list[str]:
    return [each["text"] for each in made["in_short"]]


# Rounds and the time line


@pytest.fixture(scope="module")
def kills() -> tuple[Subject, Document]:
    made = with_kills()
    return made, document(made)


def test_the_rank_that_came_last_is_charged_with_the_additional_wait_of_the_others(
    kills: tuple[Subject, Document],
) -> None:
    subject, made = kills
    rounds: dict[int, list[Round]] = {}
    for row in subject.metrics.rounds:
        rounds.setdefault(row.entry, []).append(row)
    waited = sum(row.wait_s for row in subject.metrics.rounds)
    cost = {row["rank"]: row["cost_s"] for row in made["replicas"]}
    assert sum(cost.values()) <= waited
    assert made["notable"][0] == 3
    assert cost[3] > 10 * max(cost[0], cost[2])
    by_hand = sum(
        sum(row.wait_s for row in rows) - len(rows) * min(row.wait_s for row in rows)
        for rows in rounds.values()
        if min(rows, key=lambda row: row.wait_s).rank == 3
    )
    assert cost[3] == pytest.approx(by_hand, abs=0.01)


def test_a_missing_rank_is_charged_with_the_wait_of_all_others(kills: tuple[Subject, Document]) -> None:
    _, made = kills
    row = next(row for row in made["replicas"] if row["rank"] == 1)
    assert (row["missing"], row["attempt"], row["cost_s"] > 15) == (2, 2, True), (
        "three replicas waited 3 s in two rounds"
    )
    texts = [each["text"] for each in made["in_short"]]
    assert any(text.startswith("Rank 3 delayed the others by ") for text in texts)
    assert texts[-2:] == ["Rank 1 was ended by signal 9 (SIGKILL), and came back.", "0.3 % of the work was lost."]


def test_ranks_that_train_on_the_same_data_are_named_on_top() -> None:
    made = made_up(Scene(n=3, rounds=10))
    for row in made.metrics.rounds:
        if row.rank < 2 and row.entry < 4:
            object.__setattr__(row, "same", (0, 1))
    texts = [each["text"] for each in document(made)["in_short"]]
    assert "Ranks 0-1 sent identical work in 4 of 10 rounds: they train on the same data." in texts


def test_a_norm_that_drifts_is_marked_in_its_round(kills: tuple[Subject, Document]) -> None:
    _, made = kills
    drifting = {row["round"]: [*row["drifting"]] for row in made["rounds"]["table"] if row["drifting"]}
    assert drifting == {17: ["3"], 34: ["3"], 51: ["3"], 68: ["3"]}


@pytest.mark.parametrize("scene", SCENES)
def test_the_spans_of_a_lane_leave_no_gap_between_its_beginning_and_the_end(scene: str) -> None:
    made = document(SCENES[scene]())
    timeline = made["timeline"]
    for lane in timeline["lanes"]:
        spans = lane["spans"]
        assert all(before[2] == pytest.approx(after[1], abs=0.002) for before, after in pairwise(spans))
        if made["status"] != "succeeded" or made["numbers"]["restarts"]:
            assert spans[-1][2] == pytest.approx(timeline["end_s"], abs=0.5)


def test_times_in_the_time_line_are_those_that_replicas_measured(kills: tuple[Subject, Document]) -> None:
    subject, made = kills
    waited = sum(b - a for lane in made["timeline"]["lanes"] for kind, a, b, _ in lane["spans"] if kind == "waiting")
    assert waited == pytest.approx(sum(row.wait_s for row in subject.metrics.rounds), rel=0.01)
    (lane,) = [lane for lane in made["timeline"]["lanes"] if lane["rank"] == 1]
    assert [kind for kind, _, _ in lane["marks"]] == ["hang", "fail", "restart"] * 2
    assert lane["marks"][2][2] == "restarting rank 1 as attempt 1 (1 of 3): signal, SIGKILL"
    told = [event for event in made["events"] if event["rank"] == 1 and not event["is_usual"]]
    assert [(event["kind"], event["attempt"]) for event in told] == [
        (kind, attempt) for attempt in (0, 1) for kind in ("hang_suspected", "ended", "decided")
    ]
    assert [kind for kind, *_ in lane["spans"]].count("dead") == 2


def test_rounds_are_merged_where_there_are_many_spans_and_their_times_are_kept() -> None:
    subject = made_up(Scene(n=8, rounds=400, inner=2))
    timeline = document(subject)["timeline"]
    spans = [span for lane in timeline["lanes"] for span in lane["spans"]]
    assert timeline["merged"] == 3
    assert len(spans) <= MAX_SPANS
    waited = sum(b - a for kind, a, b, _ in spans if kind == "waiting")
    assert waited == pytest.approx(sum(row.wait_s for row in subject.metrics.rounds), rel=0.02)


def test_the_six_numbers_are_sums_over_the_rows(kills: tuple[Subject, Document]) -> None:
    subject, made = kills
    six, rounds = made["numbers"], subject.metrics.rounds
    alive = sum((span.ended_s or 0) - span.started_s for span in subject.metrics.attempts)
    assert six["waiting"] == pytest.approx(sum(row.wait_s for row in rounds) / alive)
    assert six["in_rounds"] == pytest.approx(sum(row.move_s + row.reduce_s + row.step_s for row in rounds) / alive)
    assert (six["bytes_up"], six["restarts"]) == (sum(row.up for row in rounds) / 4, 2)
    assert six["data_parallel_bytes"] == pytest.approx(3_000_000 * 800, rel=0.001)
    assert six["work"]["lost"] == pytest.approx(10, rel=0.05), "half a round was lost twice"


def test_rounds_of_replicas_that_never_lived_are_shown_without_shares_of_their_time() -> None:
    subject = SCENES["beside"]()
    unborn = [replace(span, ended_s=span.started_s) for span in subject.metrics.attempts]
    rows = [replace(row, t=0.0) for row in subject.metrics.rounds]  # a hostile owner of the bucket may write this
    made = document(replace(subject, metrics=replace(subject.metrics, attempts=unborn, rows=rows)))
    assert (made["numbers"]["waiting"], made["rounds"]["n"] > 0) == (None, True)
    assert "<dt>Waiting for others</dt><dd>—</dd>" in page(made)


def test_the_page_of_a_part_of_the_measurements_sets_none_of_it_against_the_whole() -> None:
    subject = SCENES["beside"]()
    part = replace(subject.metrics, is_whole=False, problems=["300 of 600 segments are left out."])
    made = document(replace(subject, metrics=part))
    assert {"text": "300 of 600 segments are left out.", "tone": "bad"} in made["in_short"]
    assert [text for text in texts_of(made) if "of the time" in text or "of their time" in text] == []
    shown = page(made)
    for name in ("Goodput", "Time in rounds", "Waiting for others"):
        assert f"<dt>{name}</dt><dd>—</dd><dd>not known</dd>" in shown
    for name in ("Moved per replica", "Work counted"):
        assert re.search(rf"<dt>{name}</dt>\s*<dd>—</dd>", shown)
    assert {(row["lost"], row["bytes_up"], row["bytes_down"]) for row in made["replicas"]} == {(None, None, None)}


def test_a_report_of_a_part_does_not_report_that_no_work_was_lost() -> None:
    subject = SCENES["kills"]()
    assert [text for text in texts_of(document(subject)) if "work was lost" in text]
    part = replace(subject, metrics=replace(subject.metrics, is_whole=False))
    assert [text for text in texts_of(document(part)) if "work was lost" in text] == []


def test_a_round_while_training_continues_holds_it_up_for_as_long_as_it_is_late() -> None:
    subject = SCENES["beside"]()
    made, rounds = document(subject), subject.metrics.rounds
    six, alive = made["numbers"], made["numbers"]["alive_s"]
    late = sum(row.late_s or 0.0 for row in rounds)
    hidden = sum(row.busy_s or 0.0 for row in rounds) - late
    assert (six["late"], six["hidden"]) == (pytest.approx(late / alive), pytest.approx(hidden / alive))
    assert six["in_rounds"] + six["waiting"] == pytest.approx(six["late"]), (
        "time in which training continued does not count as waiting"
    )
    of_ranks = [row["in_rounds_s"] + row["waiting_s"] for row in made["replicas"]]
    assert (sum(of_ranks), sum(row["hidden_s"] for row in made["replicas"])) == pytest.approx((late, hidden))
    spent = Counter[str]()
    for lane in made["timeline"]["lanes"]:
        for kind, since, to, _ in lane["spans"] + lane["beside"]:
            spent[kind] += to - since
    assert spent["moving"] + spent["waiting"] + spent["reducing"] == pytest.approx(late, rel=0.02)
    assert spent["beside"] == pytest.approx(hidden, rel=0.02)
    assert "Training waited for rounds for 11 % of the time; 42 % more ran while training continued." in texts_of(made)
    held, took = (sum(line["y"]) for line in reversed(made["rounds"]["waited"]["lines"]))
    assert (held, took) == pytest.approx((late, late + hidden), rel=0.001)
    assert ANCHOR not in made["curves"]["shown"][0]["above"], (
        "the anchor has no curve, because no replica continues from it"
    )
    assert "of a contribution as int8, 0.8 % is left for the next" in page(made)
    told = {f"round/{name}" for name in ("late_s", "busy_s", "stale_steps", "wire_error")}
    assert told < scalars(rounds[0])[1].keys()


@pytest.mark.parametrize(("part", "beside"), [(1.0, ""), (0.999, "; < 0.1 % more ran while training continued")])
def test_rounds_that_hold_training_up_are_shown_as_bad_news(part: float, beside: str) -> None:
    subject = SCENES["beside"]()
    rows = [replace(row, late_s=part * (row.busy_s or 0.0)) for row in subject.metrics.rounds]
    made = document(replace(subject, metrics=replace(subject.metrics, rows=rows)))
    tones = {each["text"]: each["tone"] for each in made["in_short"]}
    assert tones[f"Training waited for rounds for 53 % of the time{beside}."] == "bad"
    assert [text for text in tones if text.startswith("Replicas waited")] == []


def test_a_page_of_rounds_that_moved_nothing_is_written() -> None:
    subject = made_up(Scene(n=2, rounds=10))
    still = [replace(row, up=0, down=0) for row in subject.metrics.rounds]
    made = document(replace(subject, metrics=replace(subject.metrics, rows=[*still, *subject.metrics.numbers])))
    assert made["numbers"]["times_less"] is None
    assert ("data-parallel: about" in page(made), "times as much" in page(made)) == (True, False)


def test_data_parallel_is_gradients_of_float32_whatever_travels_here() -> None:
    subject = made_up(Scene(n=2, rounds=10))
    small = [replace(row, up=row.up // 8, down=row.down // 4, wire="int4") for row in subject.metrics.rounds]
    metrics = replace(subject.metrics, rows=[*small, *subject.metrics.numbers])
    alike, made = document(subject)["numbers"], document(replace(subject, metrics=metrics))
    assert made["numbers"]["data_parallel_bytes"] == alike["data_parallel_bytes"] == 3_000_000 * 100
    assert made["numbers"]["times_less"] > 5 * alike["times_less"]


def test_nothing_is_said_to_continue_while_training_continues_where_each_round_holds_it_up(
    kills: tuple[Subject, Document],
) -> None:
    _, made = kills
    assert not any("while training continued" in text for text in texts_of(made))
    assert "while training continued" not in re.sub("<script.*?</script>", "", page(made), flags=re.DOTALL)


def test_rounds_that_count_a_rank_which_was_killed_before_it_wrote_a_line_are_its_rounds(
    kills: tuple[Subject, Document],
) -> None:
    subject, made = kills
    unwritten = [row for row in subject.metrics.rows if (row.rank, row.attempt) != (1, 0)]
    left = document(replace(subject, metrics=replace(subject.metrics, rows=unwritten)))
    assert left["replicas"][1]["rounds"]["counted"] == made["replicas"][1]["rounds"]["counted"] > 50


def test_two_dilocos_are_not_taken_for_one() -> None:
    subject = made_up(Scene(n=2, rounds=10))
    rounds = subject.metrics.rounds
    other = [replace(row, name="other", entry=entry) for row in rounds if (entry := row.entry - 5) >= 0]
    both = document(replace(subject, metrics=replace(subject.metrics, rows=[*subject.metrics.rows, *other])))
    alone = document(subject)
    assert both["numbers"]["data_parallel_bytes"] == 2 * alone["numbers"]["data_parallel_bytes"]
    trained_s = [made["replicas"][0]["training_s"] for made in (alone, both)]
    assert trained_s[1] <= trained_s[0], "the time of training is counted once"
    first, second = (made["curves"]["shown"][0] for made in (alone, both))
    assert second["above"][ANCHOR] == first["above"][ANCHOR], "the rounds of both DiLoCos were at the same steps"


def test_a_run_that_failed_at_once_begins_with_its_cause() -> None:
    made = document(failed_at_once())
    assert made["in_short"][0] == {
        "tone": "bad",
        "text": "ValueError: no shard 'corpus-0003' (ranks 0-3 of 4, data.py:12).",
    }
    text = page(made)
    assert text.index("<h2>Failures") < text.index("<h2>Time line")
    assert "last words" in text
    assert "No replica reported a number." in text


def test_a_loss_that_is_not_a_number_any_more_is_neither_the_last_one_nor_good() -> None:
    def read(row: Row) -> Row:
        if not isinstance(row, Numbers) or row.rank > 1 or not 300 <= row.values["step"] < 500 + 500 * row.rank:
            return row
        line = {**row.values, "t": row.t, "loss": math.nan}
        return Numbers.of(line, row.rank, row.attempt, "a line", Counter())

    subject = calm()
    made = document(replace(subject, metrics=replace(subject.metrics, rows=[*map(read, subject.metrics.rows)])))
    assert [row["loss"] is None for row in made["replicas"]] == [False, True, False, False], "rank 0 recovered"
    tones = {each["text"]: each["tone"] for each in made["in_short"] if "oss" in each["text"]}
    assert tones.pop("The loss of rank 1 is not finite since step 300.") == "bad"
    assert [*tones.values()] == ["bad"], "a loss that becomes NaN is marked as bad, although it fell before"
    assert page(made).count("<td>not finite</td>") == 1


def test_a_young_run_is_not_reported_to_have_reported_nothing() -> None:
    lone = SCENES["lone"]()
    text = page(document(replace(lone, metrics=replace(lone.metrics, rows=[]))))
    assert "Nothing that replicas reported is written down yet." in text


# The page


@pytest.mark.parametrize("scene", SCENES)
def test_a_page_is_strict_json_and_html_of_bounded_size_that_asks_for_nothing(scene: str) -> None:
    made = document(SCENES[scene]())
    json.dumps(made, allow_nan=False)
    text = page(made)
    assert len(text) < 3_000_000
    elements = Elements(text)
    assert {name for _, attributes in elements.found for name in attributes if name.startswith("on")} == set()
    assert not any("style" in attributes or "src" in attributes for _, attributes in elements.found)
    assert [link["href"] for link in elements.of("link")] == ["data:,"]
    assert [script.get("type") for script in elements.of("script")] == ["application/json", None, None]


def test_the_policy_of_a_page_names_exactly_its_own_scripts_and_styles() -> None:
    text = page(document(failed_at_once()))
    (policy,) = [meta["content"] for meta in Elements(text).of("meta") if "http-equiv" in meta]
    assert policy is not None
    for what, element in (("script-src", "<script>"), ("style-src", "<style>")):
        found = re.findall(f"{element}(.*?)</{element[1:]}", text, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in found]
        assert " ".join([what, *(f"'sha256-{digest}'" for digest in digests)]) + ";" in policy
    assert policy.startswith("default-src 'none'; img-src data:;")


def test_hostile_text_is_inert_and_bounded_wherever_it_comes_from() -> None:
    made = document(hostile())
    text = page(made)
    assert len(text) < 200_000
    assert "<script>window" not in text
    assert "<img" not in text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e]", text)
    assert "\\u003cscript" in text, "the name of the number is escaped in the block of JSON"
    (link,) = Elements(text).of("a")
    assert link.keys() == {"rel", "href"}


def test_warnings_are_on_the_page_each_text_once_and_leave_room_for_other_events(
    kills: tuple[Subject, Document],
) -> None:
    _, made = kills
    (row,) = made["warnings"]
    assert (row["ranks"], row["count"], made["n_warnings"]) == ([0, 2], 4, 2)
    assert "2 warnings, the first: ranks 0, 2: 5 steps of this replica" in " ".join(texts_of(made))
    text = page(made)
    assert "<h2>Warnings</h2>" in text
    assert text.count("in no average. (2 times)") == 2, "the warnings are in the list of events, too"
    crowded = document(hostile())
    assert (crowded["n_warnings"], len(crowded["warnings"])) == (500, MAX_WARNINGS)
    assert {"launched", "claimed", "ended"} <= {event["kind"] for event in crowded["events"]}
    assert "<h2>Warnings</h2>" not in page(document(calm()))


def test_a_page_is_written_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    made = document(failed_at_once())
    assert write_page(made, tmp_path / "run.html").read_text() == page(made)
    broken: Mapping[str, Any] = {**made, "timeline": None}
    with pytest.raises(TypeError):
        write_page(broken, tmp_path / "run.html")
    with pytest.raises(OSError, match="Is a directory"):
        write_page(made, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["run.html"]
    assert (tmp_path / "run.html").read_text() == page(made)


def test_texts_and_numbers_are_written_for_people() -> None:
    assert [name_size(each) for each in (0, 999, 68_700_000, 1e15)] == ["0 B", "999 B", "68.7 MB", "1e+03 TB"]
    assert [name_share(each) for each in (0, 0.0004, 0.028, 0.5, 0.997, 0.99995, 1)] == [
        "0 %", "< 0.1 %", "2.8 %", "50 %", "99.7 %", "> 99.9 %", "100 %"
    ]  # fmt: skip
    assert [name_number(each) for each in (0.012345, 1.5, 1234567)] == ["0.01235", "1.5", "1,234,567"]
    assert (
        last_lines("a\n 10 %\r 99 %\r\n\x1b[31mred\n" + "b" * 999, 3, 20)
        == "… 1 lines before\n 99 %\nred\n" + "b" * 19 + "…"
    )
    assert one_line(f" {HOSTILE} ").endswith("onerror='window.pwned = 2'>")


# Vendored files

UPLOT, VERSION = ASSETS / "uplot", "1.6.32"


def test_the_vendored_uplot_has_its_recorded_sha256() -> None:
    lines = [line.split() for line in (UPLOT / "SHA256SUMS").read_text().splitlines()]
    recorded = {name: digest for digest, name in lines}
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in UPLOT.iterdir() if path.name in recorded
    }
    assert found == recorded
    assert {path.name for path in UPLOT.iterdir()} == {*recorded, "SHA256SUMS"}
    assert f"(v{VERSION})" in (UPLOT / "uPlot.iife.min.js").read_text()[:100]
    assert "MIT" in (UPLOT / "LICENSE").read_text()


@pytest.mark.slow
def test_the_vendored_uplot_is_the_npm_packages(tmp_path: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("there is no npm")
    done = subprocess.run([npm, "pack", f"uplot@{VERSION}"], cwd=tmp_path, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"npm does not reach its registry: {done.stderr[-200:]}")
    with tarfile.open(tmp_path / f"uplot-{VERSION}.tgz") as archive:
        archive.extractall(tmp_path, filter="data")
    for path in UPLOT.iterdir():
        if path.name != "SHA256SUMS":
            folder = tmp_path / "package" / ("" if path.name == "LICENSE" else "dist")
            assert path.read_bytes() == (folder / path.name).read_bytes(), path.name
