"""Groups of values that share a scale: what the wires of whole numbers have in common."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from diloco.wires.wire import Floats, NotFiniteError

LEAST = np.float32(2.0**-100)
"""Groups of smaller values are zero: no product becomes so small that processors round it in different ways."""


def scales_of(block: memoryview, n: int, group: int, start: int, end: int) -> Floats:
    """Return the scales in a block of `n` values of the groups of some of them."""
    scales: Floats = np.frombuffer(block, np.float32, -(-n // group))
    return scales[start // group : -(-end // group)]


def to_whole(values: Floats, group: int, most: int, scales: Floats) -> float:
    """Replace values by whole numbers from -most to most, and set their scales.

    Returns: the sum of the squares of the products of both.

    Raises: NotFiniteError: a value is not finite, or so large that a product might not be.
    """
    square = 0.0
    for rows, of in _rows(values, group):
        # As whole numbers, the bits of positive floats are in the order of the floats; numpy finds those sooner.
        top = np.maximum.reduce(rows.view(np.int32) & 0x7FFFFFFF, axis=1).view(np.float32)
        scale = top * np.float32(1 / most)
        scale[top < LEAST] = 0.0
        if not are_finite(scale, most):
            raise NotFiniteError
        inverse = np.divide(np.float32(most), top, out=np.zeros_like(top), where=scale > 0)
        np.multiply(rows, inverse[:, None], out=rows)
        np.rint(rows, out=rows)  # top * inverse is never half a unit more than most
        scales[of] = scale
        wholes = np.einsum("ij,ij->i", rows, rows)  # exact: less than 2**24
        square += float(np.dot(wholes.astype(np.float64), np.square(scale, dtype=np.float64)))
    return square


def times_scales(whole: Floats, group: int, scales: Floats) -> None:
    """Multiply whole numbers by their scales, in place; each product is rounded once."""
    for rows, of in _rows(whole, group):
        np.multiply(rows, scales[of, None], out=rows)


def are_finite(scales: Floats, most: int) -> bool:
    """Return whether every value of groups with these scales is finite, also the one below -most."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(scales * np.float32(most + 1)).all())


def _rows(values: Floats, group: int) -> Iterator[tuple[npt.NDArray[np.float32], slice]]:
    """Yield the whole groups as rows, and the rest as one more, each with the slice of its scales."""
    n_whole = len(values) // group
    if n_whole:
        yield values[: n_whole * group].reshape(n_whole, group), slice(n_whole)
    if len(values) > n_whole * group:
        yield values[n_whole * group :].reshape(1, -1), slice(n_whole, n_whole + 1)
