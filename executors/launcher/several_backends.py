"""Parse a text that names several backends with their numbers of replicas, such as `slurm:4,modal:4`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from executors.backend import as_backend, as_executor
from executors.protocol import ServerlessExecutor
from executors.registry import describe_executor
from executors.registry.placements import PlacedBackend, Placements, check_single_ranks
from executors.task.record import Placement

PART = re.compile(r"(.+):([0-9]{1,6})")


def parse_backends(backend: str) -> dict[str, int]:
    """Return the number of replicas of each backend that a text names. Empty: it names one backend without a number.

    Args:
        backend: the text, such as `slurm:4,modal:4`.

    Raises:
        ValueError: one of several backends has no number, or the number 0, or is named twice.

    Example:
        parse_backends("slurm:4,modal:4")  # {"slurm": 4, "modal": 4}
    """
    pieces = [piece.strip() for piece in backend.split(",")]
    found = [PART.fullmatch(piece) for piece in pieces]
    if found == [None]:
        return {}
    parts = {each[1]: int(each[2]) for each in found if each is not None}
    if len(parts) < len(pieces) or not all(parts.values()):
        raise ValueError(
            f"backend={backend!r} must name each of several backends once, with its number of replicas. "
            "Write, for example, slurm:4,modal:4."
        )
    return parts


def name_of(backend: str) -> str:
    """Return the name of a backend without its number. A text that names several backends is returned as it is.

    Args:
        backend: the text, such as `modal` or `modal:4`.

    Raises:
        ValueError: the text cannot be parsed; see `parse_backends`.

    Example:
        name_of("modal:4")  # "modal"
    """
    parts = parse_backends(backend)
    return next(iter(parts)) if len(parts) == 1 else backend


def total_replicas(backend: str, n: int | None) -> int | None:
    """Return how many replicas a launch has: `n`, or the sum of the numbers in the text.

    Args:
        backend: the text, such as `slurm:4,modal:4`.
        n: the number that the user gives. None: the user gives no number.

    Raises:
        ValueError: both are given, and differ.

    Example:
        total_replicas("slurm:4,modal:4", None)  # 8
    """
    parts = parse_backends(backend)
    if parts and n not in (None, sum(parts.values())):
        raise ValueError(f"backend {backend!r} has {sum(parts.values())} replicas, got n={n}. Remove n, or correct it.")
    return sum(parts.values()) if parts else n


def executor_of(backend: str, make: Callable[[str], ServerlessExecutor]) -> ServerlessExecutor:
    """Return the executor of a backend, or the placements of several.

    Args:
        backend: the name of one backend, or the names of several with their numbers of replicas, as in
            "slurm:4,modal:4".
        make: returns the executor of one backend.

    Raises:
        ValueError: the text names no backend, or names a backend twice.
        BackendError: one of several backends cannot start single ranks.

    Example:
        executor_of("slurm:4,modal:4", get_executor)
    """
    parts = parse_backends(backend)
    if len(parts) < 2:
        return make(name_of(backend))
    places, first = list[PlacedBackend](), 0
    for name, n in parts.items():
        one = check_single_ranks(as_backend(make(name)))
        place = Placement(**describe_executor(as_executor(one)), ranks=tuple(range(first, first + n)))
        if place.backend in {placed.placement.backend for placed in places}:
            raise ValueError(f"backend {backend!r} names {place.backend!r} twice.")
        places.append(PlacedBackend(place, lambda one=one: one))  # type: ignore[misc]
        first += n
    return Placements(places)


def options_by_part(backend: str, options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the options of each backend.

    Args:
        backend: the text that names the backends.
        options: the options by name. With several backends, each name begins with its backend, as `slurm.partition`.

    Raises:
        ValueError: the name of an option does not begin with one of the backends.

    Example:
        options_by_part("slurm:4,modal:4", {"slurm.partition": "gpu"})  # {"slurm": {"partition": "gpu"}, "modal": {}}
    """
    parts = parse_backends(backend)
    if len(parts) < 2:
        return {name_of(backend): dict(options)}
    found: dict[str, dict[str, Any]] = {name: {} for name in parts}
    for key, value in options.items():
        name, _, option = key.rpartition(".")
        if name not in found:
            known = " or ".join(f"{each}.{option}" for each in parts)
            raise ValueError(f"Option {key!r} does not name its backend: write {known}.")
        found[name][option] = value
    return found
