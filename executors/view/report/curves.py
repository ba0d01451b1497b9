"""Reduces curves to the number of points that a page can draw, and keeps the lowest and the highest values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_POINTS = 1500  # the largest number of points of one line
MAX_VALUES = 220_000  # the largest number of points of all curves of a page together
N_MIDDLE = 150  # points of the line that shows the median of the other lines
Array = NDArray[np.float64]
Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """The finite values of one number that a rank reported. A line covers one attempt, or all attempts of the rank."""

    rank: int
    attempt: int
    xs: Array
    ys: Array

    @classmethod
    def of(cls, rank: int, attempt: int, points: Iterable[Point]) -> Line:
        """Return a line of these points. They may be in any order."""
        found = np.array(list(points), dtype=np.float64).reshape(-1, 2)
        return cls.over(rank, attempt, found[:, 0], found[:, 1])

    @classmethod
    def over(cls, rank: int, attempt: int, xs: Array, ys: Array) -> Line:
        """Return a line of these x and y values. They may be in any order."""
        is_finite = np.isfinite(xs) & np.isfinite(ys)
        xs, ys = xs[is_finite], ys[is_finite]
        order = np.argsort(xs, kind="stable")
        return cls(rank, attempt, xs[order], ys[order])


def max_points_of(n_lines: int, share: float) -> int:
    """Return the largest number of points that each line of a group may have.

    Args:
        n_lines: the number of lines in the group.
        share: the part of a page's values that the group may use, from 0 to 1.
    """
    return min(MAX_POINTS, max(2, int(share * MAX_VALUES) // max(1, n_lines)))


def thin(
    lines: Sequence[Line], max_points: int = MAX_POINTS, above: Mapping[str, Sequence[Point]] | None = None
) -> dict[str, Any]:
    """Return lines over one common x axis, as JSON. A line without a value at an x has null there.

    Lines are unchanged if they have at most `max_points` different x together. Otherwise x is cut into `max_points / 2`
    bins. In each bin, a line keeps its lowest and its highest value, in the order of x.

    Args:
        lines: the lines to draw.
        max_points: the largest number of different x.
        above: more lines, by name, which have few points. If x is cut into bins, each of their points moves to the
            nearest remaining x.
    """
    lines = [line for line in lines if len(line.xs)]
    if not lines:
        return {"x": [], "lines": [], "above": {}, "bins": None, "points": 0}
    more = {name: np.array(points).T for name, points in (above or {}).items() if points}
    grid = np.unique(np.concatenate([line.xs for line in lines]))
    bins = None
    if len(grid) <= max_points:
        grid = np.unique(np.concatenate([grid, *(xs for xs, _ in more.values())]))
        laid = [_laid_on(grid, line.xs, line.ys) for line in lines]
    else:
        bins = max_points // 2
        edges = np.linspace(grid[0], grid[-1], bins + 1)
        grid = (edges[:-1, None] + np.diff(edges)[:, None] * [0.25, 0.75]).ravel()
        laid = [_extremes(edges, line) for line in lines]
    drawn = zip(lines, laid, strict=True)
    return {
        "x": _plain(grid, 7),
        "lines": [{"rank": line.rank, "attempt": line.attempt, "y": _plain(ys)} for line, ys in drawn],
        "above": {name: _plain(_laid_on(grid, xs, ys)) for name, (xs, ys) in more.items()},
        "bins": bins,
        "points": sum(len(line.xs) for line in lines),
    }


def middle(lines: Sequence[Line], n_points: int = N_MIDDLE) -> list[Point]:
    """Return one line for all ranks: for each bin, the median of the ranks' means.

    At least half of the ranks must have a value in the bin.
    """
    lines = [line for line in lines if len(line.xs)]
    if not lines:
        return []
    n_bins = max(1, min(n_points, int(np.median([len(line.xs) for line in lines])) // 2))
    edges = np.linspace(min(line.xs[0] for line in lines), max(line.xs[-1] for line in lines), n_bins + 1)
    ranks = sorted({line.rank for line in lines})
    sums, x_sums, counts = np.zeros((3, len(ranks), n_bins))
    for line in lines:
        which = _bins(edges, line.xs)
        sums[ranks.index(line.rank)] += np.bincount(which, line.ys, minlength=n_bins)
        x_sums[ranks.index(line.rank)] += np.bincount(which, line.xs, minlength=n_bins)
        counts[ranks.index(line.rank)] += np.bincount(which, minlength=n_bins)
    means = np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)  # (ranks, bins)
    full = np.flatnonzero((2 * (counts > 0).sum(axis=0) >= len(ranks)) & counts.any(axis=0))
    xs = x_sums.sum(axis=0)[full] / counts.sum(axis=0)[full]
    return [(float(x), float(np.nanmedian(means[:, i]))) for x, i in zip(xs, full, strict=True)]


def _bins(edges: Array, xs: Array) -> NDArray[np.int64]:
    return np.clip(np.searchsorted(edges, xs, side="right") - 1, 0, len(edges) - 2)


def _laid_on(grid: Array, xs: Array, ys: Array) -> Array:
    """Return a line on a grid: each value moves to the nearest x of the grid. An x without a value gets NaN."""
    right = np.clip(np.searchsorted(grid, xs), 0, len(grid) - 1)
    left = np.maximum(right - 1, 0)
    laid = np.full(len(grid), np.nan)
    laid[np.where(np.abs(grid[left] - xs) < np.abs(grid[right] - xs), left, right)] = ys
    return laid


def _extremes(edges: Array, line: Line) -> Array:
    """Return the lowest and the highest value of each bin, in the order of x."""
    which = _bins(edges, line.xs)
    order = np.lexsort((line.ys, which))
    ends = np.flatnonzero(np.diff(which[order], append=-1))  # indexes into `order` of the highest value of each bin
    starts = np.concatenate([[0], ends[:-1] + 1])
    low, high = order[starts], order[ends]
    laid = np.full((len(edges) - 1, 2), np.nan)
    laid[which[low]] = line.ys[np.sort(np.stack([low, high], axis=1))]
    laid[which[low[low == high]], 1] = np.nan
    return laid.ravel()


def _plain(values: Array, digits: int = 5) -> list[float | None]:
    """Return numbers for JSON, rounded to `digits` significant digits. NaN becomes None."""
    texts = (f"{value:.{digits}g}" for value in values.tolist())
    return [None if text == "nan" else int(text) if text.lstrip("-").isdecimal() else float(text) for text in texts]
