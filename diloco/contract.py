"""What all replicas of a rendezvous must have in common, and the sentence that says where one differs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from diloco.errors import ContributionError

MAX_WEIGHT = 1e30
"""Far beyond any number of tokens, and no sum of such weights overflows, which would make every share of a mean 0."""

Contract = Mapping[str, Any]
"""JSON. `tensors` maps each synchronised name to [shape, dtype, fragment]; the rest are settings."""


def check_contract(mine: Contract, agreed: Contract, *, run_id: str, author: int) -> None:
    """Refuse to join a run that trains something else, or otherwise.

    Raises:
        ContributionError: names the first difference.
    """
    difference = _first_difference(mine, agreed)
    if difference is not None:
        raise ContributionError(f"This replica does not fit run {run_id!r}, begun by rank {author}: {difference}.")


def check_weight(weight: float | Callable[[], float], rank: int, entry: int, *, may_be_zero: bool = False) -> float:
    """Return the weight of a contribution, asking for it where it is a callable.

    A scalar of torch or numpy is a number, too: tokens are often counted in one.

    Raises: ContributionError: it is not a positive number.
    """
    value: Any = weight() if callable(weight) else weight
    if hasattr(value, "item"):
        with contextlib.suppress(RuntimeError, ValueError):  # it has more than one element
            value = value.item()
    if may_be_zero and not isinstance(value, bool) and value == 0:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_WEIGHT:
        raise ContributionError(
            f"Contribution of rank {rank} for round {entry}: weight must be a positive number, at most "
            f"{MAX_WEIGHT:g}, got {value!r}."
        )
    return float(value)


def shape_problem(name: str, theirs: tuple[int, ...], mine: tuple[int, ...]) -> str:
    return f"{name!r} has shape {theirs}, this model has {mine}"


def _first_difference(mine: Contract, agreed: Contract) -> str | None:
    problem = _tensor_difference(mine["tensors"], agreed.get("tensors", {}))
    if problem is not None:
        return problem
    for setting in [*agreed, *(key for key in mine if key not in agreed)]:
        if setting != "tensors" and mine.get(setting) != agreed.get(setting):
            return f"{setting} is {agreed.get(setting)!r} there and {mine.get(setting)!r} here"
    return None


def _tensor_difference(mine: Mapping[str, Any], agreed: Mapping[str, Any]) -> str | None:
    for name, (shape, dtype, fragment) in agreed.items():
        if name not in mine:
            return f"{name!r} of shape {tuple(shape)} is missing in this model"
        my_shape, my_dtype, my_fragment = mine[name]
        if list(shape) != list(my_shape):
            return shape_problem(name, tuple(shape), tuple(my_shape))
        if dtype != my_dtype:
            return f"{name!r} is {dtype}, this model has {my_dtype}"
        if fragment != my_fragment:
            return f"{name!r} belongs to fragment {fragment} there and to {my_fragment} here"
    for name in mine:
        if name not in agreed:
            return f"{name!r} of shape {tuple(mine[name][0])} is only in this model"
    if list(mine) != list(agreed):
        return "the parameters come in another order"
    return None
