"""The product's advice on outer settings follows the measurement, and the pages show the numbers of the file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from support.examples import load_example

from diloco.outer_defaults import LONG_ROUND_OUTER, LONG_ROUND_STEPS, PAPER_OUTER, SHORT_PLAN_OUTER, default_outer

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results" / "outer_settings.json"
PLAIN, PAPER, NO_TOTAL = "plain averaging", "no ramp, no final average", "total_steps=None"
LOWER, HIGHER, LOWEST = "outer_momentum=0.8", "outer_momentum=0.9", "outer_lr=1.0, outer_momentum=0.5"
OF_LONG_ROUNDS, DEFAULT = "outer_lr=1.0, outer_momentum=0.8", "the default"
ALONE = "one replica alone"


@pytest.fixture(scope="module")
def script() -> Any:
    """Return the module of the script that measured."""
    return load_example("measure_outer_settings.py")


@pytest.fixture(scope="module")
def measured(script: Any) -> list[Any]:
    """Return all points of the results."""
    points: list[Any] = script.read_results(RESULTS)
    return points


def losses(measured: list[Any], setting: str, inner_steps: int, n: int = 2) -> dict[Any, float]:
    """Return the mean loss over the seeds, by model and rounds, for n replicas."""
    of_plan: dict[Any, list[float]] = {}
    for one in measured:
        point = one.point
        if (point.n, point.inner_steps) == (n, inner_steps) and setting in one.losses:
            of_plan.setdefault((point.task, point.rounds), []).append(one.losses[setting])
    return {plan: fmean(of_seeds) for plan, of_seeds in of_plan.items()}


def above_alone(measured: list[Any], setting: str) -> dict[Any, float]:
    """Return by how many percent the mean loss over the seeds is above that of one replica alone, by plan."""
    of_plan: dict[Any, list[dict[str, float]]] = {}
    for one in measured:
        of_plan.setdefault(replace(one.point, seed=0), []).append(one.losses)
    names = {plan: default_of(plan) if setting == DEFAULT else setting for plan in of_plan}
    return {
        plan: 100 * (fmean(one[names[plan]] for one in of_seeds) / fmean(one[ALONE] for one in of_seeds) - 1)
        for plan, of_seeds in of_plan.items()
    }


def default_of(plan: Any) -> str:
    """Return the name of the setting that `DiLoCo` has in a plan without arguments."""
    return {SHORT_PLAN_OUTER: LOWEST, LONG_ROUND_OUTER: OF_LONG_ROUNDS}[default_outer(plan.inner_steps, plan.rounds)]


@pytest.fixture(scope="module")
def wins(measured: list[Any]) -> Callable[[str, str, int], float]:
    """Return a function. It returns the share of plans, among those with a number of inner steps, in which one setting
    ends below another.
    """

    def share(one: str, other: str, inner_steps: int) -> float:
        ours, theirs = losses(measured, one, inner_steps), losses(measured, other, inner_steps)
        return fmean(loss < theirs[plan] for plan, loss in ours.items())

    return share


def test_every_plan_of_the_grid_was_measured_with_three_seeds(script: Any, measured: list[Any]) -> None:
    assert {one.point for one in measured} == set(script.grid(3, list(script.TASKS)))


def test_the_pages_show_the_numbers_of_the_file(script: Any, measured: list[Any]) -> None:
    assert "\n".join(script.summary(measured)) in (ROOT / "docs/explanation/diloco-in-practice.md").read_text()
    assert RESULTS.with_suffix(".md").read_text() == script.page(measured, RESULTS.name)


def test_plain_averaging_is_not_advised_if_momentum_measured_better(wins: Callable[..., float]) -> None:
    """With plain averaging, a run of few rounds lost most of the gain of the second replica."""
    for inner_steps in (10, 50):
        assert wins(LOWER, PLAIN, inner_steps) > 0.8
        assert wins(HIGHER, PLAIN, inner_steps) > 0.5


@pytest.mark.parametrize(
    ("setting", "better", "mean", "worst"),
    [
        (DEFAULT, 55, -10.28, -0.23),
        (LOWEST, 55, -9.86, -0.23),
        (OF_LONG_ROUNDS, 48, -9.72, 4.33),
        (LOWER, 52, -11.21, 0.81),
        (HIGHER, 44, -8.67, 6.04),
        (PLAIN, 55, -5.41, -0.05),
    ],
)
def test_the_default_of_short_plans_never_measured_worse_than_one_replica_alone(
    measured: list[Any], setting: str, better: int, mean: float, worst: float
) -> None:
    """The numbers of ADRs 0058 and 0092. Of the settings that are never worse, the default gains most on average."""
    found = above_alone(measured, setting)
    assert (len(found), sum(above < 0 for above in found.values())) == (55, better)
    assert (round(fmean(found.values()), 2), round(max(found.values()), 2)) == (mean, worst)


def test_more_momentum_than_in_short_rounds_measured_lower_in_long_rounds_only(
    measured: list[Any], wins: Callable[..., float]
) -> None:
    assert wins(OF_LONG_ROUNDS, LOWEST, LONG_ROUND_STEPS) >= 0.8
    assert wins(OF_LONG_ROUNDS, ALONE, LONG_ROUND_STEPS) == 1
    shorter = {plan: above for plan, above in above_alone(measured, OF_LONG_ROUNDS).items() if plan.inner_steps < 50}
    assert sum(above > 0 for above in shorter.values()) > 3


def test_a_momentum_of_08_gains_more_than_05_from_20_rounds_on(measured: list[Any]) -> None:
    """It gains less in 10 rounds, and in rounds of 5 steps."""
    default, more = above_alone(measured, LOWEST), above_alone(measured, LOWER)
    for rounds in {plan.rounds for plan in default}:
        kinds = {(plan.n, plan.inner_steps) for plan in default if plan.rounds == rounds and rounds >= 20}
        for n, inner_steps in kinds:
            plans = [p for p in default if (p.rounds, p.n, p.inner_steps) == (rounds, n, inner_steps)]
            assert fmean(more[plan] for plan in plans) < fmean(default[plan] for plan in plans)
    for plans in ([p for p in default if p.rounds == 10], [p for p in default if p.inner_steps == 5]):
        assert fmean(default[plan] for plan in plans) < fmean(more[plan] for plan in plans)


def test_the_default_of_short_plans_is_used_up_to_the_longest_measured_plan(script: Any, measured: list[Any]) -> None:
    first, second, *_ = (tuple(given.values()) for given in script.SETTINGS.values())
    assert (first, second) == (SHORT_PLAN_OUTER, LONG_ROUND_OUTER)
    longest = max(one.point.steps for one in measured)
    for inner_steps in (1, 5, 10, 50, 500):
        found = [
            script.settings_of({"total_steps": total}, inner_steps=inner_steps, rounds=1, n=2).outer
            for total in (longest, longest + 1)
        ]
        assert found == [LONG_ROUND_OUTER if inner_steps >= LONG_ROUND_STEPS else SHORT_PLAN_OUTER, PAPER_OUTER]


def test_settings_with_a_warning_are_worse_than_the_settings_it_names(wins: Callable[..., float]) -> None:
    assert wins(HIGHER, ALONE, 5) < 0.7
    assert wins(LOWEST, ALONE, 5) == 1
    assert wins(LOWEST, HIGHER, 5) > 0.7


def test_the_ramp_and_the_final_average_are_worth_their_defaults(wins: Callable[..., float]) -> None:
    for inner_steps in (5, 10, 50):
        assert wins(PAPER, HIGHER, inner_steps) < 0.2
    for inner_steps in (10, 50):
        assert wins(NO_TOTAL, HIGHER, inner_steps) < 0.2


def test_statistics_of_a_batch_norm_fit_after_a_final_average_only(measured: list[Any]) -> None:
    def gains(setting: str) -> list[float]:
        """Return by how many percent new statistics lower the loss."""
        both = [(one.losses, one.with_new_statistics) for one in measured if one.with_new_statistics]
        return [100 * (1 - new[setting] / old[setting]) for old, new in both if setting in old]

    assert fmean(gains(PAPER)) > 3 * fmean(gains(LOWEST))
    assert max(gains(PAPER)) > 20
    assert fmean(gains(LOWEST)) < 2


def test_the_page_on_slow_links_shows_the_bytes_that_the_planner_computes() -> None:
    table = "\n".join(load_example("compare_wires.py").bytes_table())
    assert table in (ROOT / "docs/how-to/slow-links.md").read_text()


def test_the_page_on_slow_links_shows_the_losses_of_long_runs_that_the_file_has() -> None:
    example = load_example("compare_wires.py")
    runs = [run for run in example.read_results(RESULTS.with_name("wires.json")) if run.steps == 2000]
    assert "\n".join(example.table(runs, [20])) in (ROOT / "docs/how-to/slow-links.md").read_text()
