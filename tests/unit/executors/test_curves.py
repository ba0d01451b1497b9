"""Tests the curves of a run's page: how they are thinned, the mean line, and the number of values."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace

import pytest
from support.made_up_runs import Scene, made_up

from executors.metrics.rows import Numbers, Round
from executors.view.report.curves import MAX_VALUES, Line, middle, thin
from executors.view.report.document import ANCHOR, Subject, curves, document
from executors.view.report.page import page


def noisy(rank: int, n: int = 10_000) -> Line:
    rng = random.Random(rank)
    return Line.of(rank, 0, [(step, math.exp(-step / n) + rng.gauss(0, 0.1)) for step in range(n)])


def test_a_thinned_line_keeps_the_least_and_the_greatest_value_of_each_bin() -> None:
    lines = [noisy(0), noisy(1)]
    thinned = thin(lines, 100)
    assert (len(thinned["x"]), thinned["bins"], thinned["points"]) == (100, 50, 20_000)
    for line, drawn in zip(lines, thinned["lines"], strict=True):
        for number in range(50):
            ys = line.ys[[step * 50 // 9999 == number or (number == 49 and step == 9999) for step in range(10_000)]]
            kept = drawn["y"][2 * number : 2 * number + 2]
            assert sorted(kept) == pytest.approx([ys.min(), ys.max()], rel=1e-4)
            assert (kept[0] < kept[1]) == (ys.argmin() < ys.argmax())


def test_a_short_line_stays_as_it_is_without_values_that_are_not_finite() -> None:
    lines = [Line.of(0, 0, [(3, 0.5), (1, 2.0), (2, math.nan)]), Line.of(1, 0, [(2, 1.0), (4, math.inf)])]
    thinned = thin(lines, above={"middle": [(2.4, 7.0)]})
    assert thinned["x"] == [1, 2, 2.4, 3]
    assert [line["y"] for line in thinned["lines"]] == [[2, None, None, 0.5], [None, 1, None, None]]
    assert (thinned["above"], thinned["bins"]) == ({"middle": [None, None, 7, None]}, None)


def test_the_middle_is_the_median_of_ranks_where_most_of_them_are() -> None:
    lines = [Line.of(rank, 0, [(x, float(rank * rank)) for x in range(100 if rank else 10)]) for rank in range(5)]
    assert {round(y, 3) for x, y in middle(lines) if x > 10} == {6.5}  # the median of 1, 4, 9 and 16
    assert middle(lines)[0][1] == 4
    assert all(y == pytest.approx(3 * x) for x, y in middle([Line.of(0, 0, [(x * x, 3.0 * x * x) for x in range(90)])]))


def test_a_loss_that_was_computed_before_a_round_is_not_called_the_first_after_it() -> None:
    made = made_up(Scene(n=2, rounds=10))
    shown = document(made)["curves"]["shown"]
    assert list(shown[0]["above"]) == [ANCHOR]
    rows = made.metrics.numbers
    sparse = [row for row in rows if row.values["step"] % 10 == 0]  # loops that report after a round have such values
    object.__setattr__(made.metrics, "rows", [*sparse, *made.metrics.rounds])
    made.metrics.__dict__.pop("numbers", None)
    assert list(curves(made.metrics)["shown"][0]["above"]) == ["median of replicas"]


def test_a_run_with_few_reports_shows_the_course_of_its_loss() -> None:
    made = made_up(Scene(n=2, rounds=1, inner=3))
    rows = list(made.metrics.numbers)
    told = document(replace(made, metrics=replace(made.metrics, rows=rows)))
    assert told["curves"]["shown"][0]["above"] == {}, "a median of one point is not drawn"
    assert re.fullmatch(r"Loss \S+ → \S+ over steps 1 to 3 \(rank 0\)\.", told["in_short"][0]["text"])


def with_attempts(made: Subject, n: int) -> Subject:
    """Return a run as if each rank had this number of attempts, one after the other."""
    metrics, n_rounds = made.metrics, 1 + max(row.entry for row in made.metrics.rounds)
    last = max(row.values["step"] for row in metrics.numbers)

    def attempt_of(row: Round | Numbers) -> int:
        done = row.entry / n_rounds if isinstance(row, Round) else row.values["step"] / (last + 1)
        return int(n * done)

    rows = [replace(row, attempt=attempt_of(row)) for row in metrics.rows if isinstance(row, Round | Numbers)]
    origins = {(rank, number): began for (rank, _), began in metrics.origins.items() for number in range(n)}
    spans = [replace(span, attempt=number) for span in metrics.attempts for number in range(n)]
    rows.sort(key=lambda row: (row.rank, row.attempt, row.t))
    return replace(made, metrics=replace(metrics, rows=rows, origins=origins, attempts=spans))


def test_all_curves_of_a_page_keep_the_limit_with_ten_attempts_of_each_rank() -> None:
    names = [f"number_{index}" for index in range(4)]
    scene = Scene(n=64, rounds=400, inner=1, more=lambda step: dict.fromkeys(names, step % 7))
    made = document(with_attempts(made_up(scene), 10))
    norms, shown = made["rounds"]["norms"], made["curves"]["shown"]
    assert sum(len(line["y"]) for each in (norms, *shown) for line in each["lines"]) <= MAX_VALUES
    assert [line["rank"] for line in norms["lines"]] == [*range(64)], "the attempts of a rank are one line"
    assert None not in norms["lines"][0]["y"]
    assert [each["name"] for each in shown] == ["loss", *names]
    assert len(page(made)) < 3_000_000


def test_numbers_whose_curves_do_not_fit_are_named() -> None:
    names = [f"number_{index:02}" for index in range(20)]
    scene = Scene(n=32, rounds=40, inner=5, more=lambda step: dict.fromkeys(names, step))
    found = curves(with_attempts(made_up(scene), 10).metrics)
    shown = [each["name"] for each in found["shown"]]
    assert shown[0] == "loss"
    assert sum(len(line["y"]) for each in found["shown"] for line in each["lines"]) <= MAX_VALUES
    assert [*shown, *found["left_out"]] == ["loss", *names]
    assert found["n_left_out"] == len(found["left_out"]) > 0
