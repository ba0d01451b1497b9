"""Pages of runs with many ranks: quick ways of counting come to the same results as plain ones."""

from __future__ import annotations

import random
from statistics import median

import pytest

from executors.view.report.rounds import median_without


@pytest.mark.parametrize("seed", range(50))
def test_the_median_of_the_others_is_that_of_the_list_without_them(seed: int) -> None:
    rng = random.Random(seed)
    values = [float(rng.randrange(8)) for _ in range(rng.randrange(2, 40))]
    left_out = values[: rng.randrange(len(values))]
    assert median_without(sorted(values), left_out) == median(values[len(left_out) :])
