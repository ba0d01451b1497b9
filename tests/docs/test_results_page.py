"""The page of results shows the figures of its data files, each with its machine and its command."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest

from docs.generate import results, scaling
from docs.pictures.drawing import THEMES, WIDTH

DOCS = scaling.DATA.parents[1]
DOCUMENT: results.Document = {
    "title": "What a test costs",
    "about": "One sentence.",
    "command": "python -m tests.benchmarks X",
    "machine": "a processor",
    "tables": [
        {
            "caption": "A table:",
            "columns": {"n": "replicas", "s": "seconds", "ok": "holds"},
            "rows": [{"n": 4096, "s": 0.12345, "ok": True}, {"n": 8, "s": None, "ok": False}],
        }
    ],
}


def test_a_data_file_with_tables_needs_no_code() -> None:
    text = results.plain_section(DOCUMENT)
    assert "| replicas | seconds | holds |\n| --- | --- | --- |\n| 4,096 | 0.123 | yes |\n| 8 |  | no |" in text
    assert text.startswith("## What a test costs\n\nOne sentence.\n\nA table:")
    assert "Measured on: a processor. Command: `python -m tests.benchmarks X`." in text


def test_each_data_file_has_a_section_with_its_machine_and_its_command() -> None:
    page, files = results.results_page(), results.data_files()
    assert page.count("\n## ") == len(files) == page.count("Measured on: ")
    for path in files.values():
        assert json.loads(path.read_text())["command"] in page


@pytest.mark.parametrize("name", sorted(set(results.data_files()) - set(results.SECTIONS)))
def test_each_data_file_without_a_function_has_the_keys_of_a_document(name: str) -> None:
    found = json.loads(results.data_files()[name].read_text())
    assert set(results.Document.__required_keys__) <= set(found)
    for each in found["tables"]:
        assert set(each) == {"caption", "columns", "rows"}
        assert not {key for row in each["rows"] for key in row} - set(each["columns"])


# -- the size of the model ---------------------------------------------------------------------------------------------


PLAN = ("size", "way", "n", "inner_steps", "wire", "seed", "steps", "pretrained", "outer")
ROW = ("curve", "corpus", "tokens", "n_parameters", "bytes_up", "machine")


CURVE = ((0, 5.0), (50, 3.0))


def a_run(loss: float, **changed: Any) -> scaling.Run:
    usual = scaling.Run("0.14M", "diloco", 4, 50, "fp32", 0, 100, 0, "1.0,0.8", "text", CURVE, 400, 137, 9, "here")
    return replace(usual, curve=(*CURVE, (100, loss)), **changed)


def data_parallel(loss: float, **changed: Any) -> scaling.Run:
    return a_run(loss, way="data-parallel", inner_steps=0, wire="", outer="", **changed)


def test_a_run_is_compared_with_the_data_parallel_run_of_the_same_batches() -> None:
    run = a_run(2.2)
    others = [data_parallel(1.0, **{name: value}) for name, value in
              {"n": 2, "seed": 1, "steps": 200, "corpus": "other", "size": "1M"}.items()]  # fmt: skip
    assert scaling.above_data_parallel(run, others) is None
    assert scaling.above_data_parallel(run, [*others, data_parallel(2.0)]) == pytest.approx(10)


@pytest.mark.parametrize(
    ("make", "changed", "row"),
    [
        (scaling.by_rounds, {"n": 2}, "| 0.14M | 100 | none | 2 | +5.0 % |"),
        (scaling.by_rounds, {"inner_steps": 10, "outer": "1.0,0.5"}, "| 0.14M | 100 | none | 4 | +5.0 % |"),
        (scaling.by_wire, {"wire": "int4"}, "| 0.14M | 100 | none | 1.0,0.8 | +5.0 % |"),
        (scaling.by_outer, {"outer": "0.7,0.9", "pretrained": 50}, "| 0.14M | 100 | 50 | 4 | 50 | +5.0 % | +20.0 % |"),
    ],
)
def test_a_table_shows_the_mean_over_the_seeds(
    make: Callable[[list[scaling.Run]], str], changed: dict[str, Any], row: str
) -> None:
    n = changed.get("n", 4)
    runs = [data_parallel(2.0, n=n), data_parallel(4.0, n=n, seed=1)]
    runs += [a_run(2.0, **changed), a_run(4.4, seed=1, **changed)]
    if make is scaling.by_outer:  # its rows compare two settings
        runs.append(a_run(2.4, pretrained=50))
    assert make(runs).splitlines()[-1] == row


@pytest.mark.skipif(not scaling.DATA.exists(), reason="nothing was measured yet")
@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: str(theme.name))
def test_the_picture_has_a_curve_for_each_run_of_its_panels_and_cuts_no_text(theme: Any) -> None:
    runs = scaling.runs_of(json.loads(scaling.DATA.read_text()))
    drawing = scaling.drawing(theme, runs)
    assert ElementTree.fromstring(drawing.svg()).tag == "{http://www.w3.org/2000/svg}svg"
    for words, left, right, _ in drawing.texts:
        assert left >= 0, words
        assert right <= WIDTH, words
    panels = [scaling.curves_of(runs, size) for size in dict.fromkeys(run.size for run in runs)]
    n_lines = sum(len(curves) + 1 for curves in panels if len(curves) > 1)  # each panel has one line for both axes
    assert sum(part.startswith("<polyline") for part in drawing.parts) == n_lines > 2


def data_of(rows: list[scaling.Run]) -> dict[str, Any]:
    """Return the data file of runs."""
    runs = [
        {"plan": {name: getattr(row, name) for name in PLAN}, **{name: getattr(row, name) for name in ROW}}
        for row in rows
    ]
    return {"command": "python examples/scaling.py", "runs": runs}


@pytest.mark.parametrize(("loss", "words"), [(2.02, "reached"), (2.2, "missed"), (None, "No run for this goal")])
def test_the_section_reports_whether_the_goal_was_reached(loss: float | None, words: str) -> None:
    rows = [data_parallel(2.0, size="10M"), *([] if loss is None else [a_run(loss, size="10M")])]
    assert words in scaling.section(data_of(rows))


def test_a_run_with_other_outer_settings_than_the_default_is_not_in_the_table_of_the_defaults() -> None:
    table = scaling.by_rounds([data_parallel(2.0), a_run(2.1), a_run(4.0, outer="1.0,0.5")])
    assert table.splitlines()[-1] == "| 0.14M | 100 | none | 4 | +5.0 % |"


def test_the_section_says_which_plans_have_a_single_round() -> None:
    rows = [data_parallel(2.0), a_run(2.1), a_run(2.2, pretrained=50), a_run(2.3, pretrained=50, wire="int8")]
    section = scaling.section(data_of(rows))
    assert section.count("are a single round") == 1
    assert "With 100 steps and 50 of them pretrained, rounds of 50 steps are a single round" in section


def test_the_figure_of_the_goal_is_of_one_wire_and_one_plan() -> None:
    rows = [data_parallel(2.0), a_run(2.02), a_run(2.2, wire="top8"), a_run(2.4, pretrained=50)]
    section = scaling.section(data_of([replace(row, size="10M") for row in rows]))
    assert "With 100 steps and none pretrained, the goal was reached. By" in section
    assert "+1.0 % with 1.0,0.8 (the default)." in section
    assert "With 100 steps and 50 of them pretrained, the goal was missed. By" in section
    assert "+20.0 % with 1.0,0.8 (the default)." in section


def test_the_page_on_practice_shows_the_figures_of_the_data_file() -> None:
    page = " ".join((DOCS / "explanation" / "diloco-in-practice.md").read_text().split())
    runs = scaling.runs_of(json.loads(scaling.DATA.read_text()))

    def pretrained(*values: Any) -> scaling.Run:
        """Return the run with this size, number of replicas, inner steps and outer settings."""
        kind = (*values, "fp32")
        (found,) = [
            run for run in runs if run.pretrained and (run.size, run.n, run.inner_steps, run.outer, run.wire) == kind
        ]
        return found

    four, eight = (scaling.above_data_parallel(pretrained("10M", n, 50, "1.0,0.8"), runs) for n in (4, 8))
    assert f"it ended {four:.1f} % above data-parallel training, and with eight replicas {eight:.1f} %" in page
    lower = [
        f"{100 * (1 - pretrained(size, n, 10, '1.0,0.8').loss / pretrained(size, n, 10, '1.0,0.5').loss):.1f}"
        for size, n in [("0.14M", 2), ("0.14M", 4), ("0.14M", 8), ("1M", 8)]
    ]
    assert f"two, four and eight replicas then ended {lower[0]}, {lower[1]} and {lower[2]} % lower" in page
    assert f"and eight replicas of 1M parameters {lower[3]} % lower" in page
