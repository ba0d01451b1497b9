"""A launch on several backends at once: `slurm:4,modal:4`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from executors.backend import as_backend, as_executor
from executors.protocol import ServerlessExecutor
from executors.registry import describe_executor
from executors.run.placements import PlacedBackend, Placements, check_single_ranks
from executors.task.record import Placement

PART = re.compile(r"(.+):([0-9]{1,6})")


def parts_of(backend: str) -> dict[str, int]:
    """Return how many replicas each backend is to have, of a text as `slurm:4,modal:4`; empty: it names one alone.

    Raises:
        ValueError: one of several has no number, or none but 0, or is named twice.
    """
    pieces = [piece.strip() for piece in backend.split(",")]
    found = [PART.fullmatch(piece) for piece in pieces]
    if found == [None]:
        return {}
    parts = {each[1]: int(each[2]) for each in found if each is not None}
    if len(parts) < len(pieces) or not all(parts.values()):
        raise ValueError(
            f"backend {backend!r}: several backends are named once each, with their numbers of replicas, as in "
            "'slurm:4,modal:4'."
        )
    return parts


def name_of(backend: str) -> str:
    """Return the name of a backend that is given alone, with its number or without; of several the text.

    Raises:
        ValueError: the text is not one.
    """
    parts = parts_of(backend)
    return next(iter(parts)) if len(parts) == 1 else backend


def total_of(backend: str, n: int | None) -> int | None:
    """Return how many replicas a launch has: `n`, or the sum of its parts.

    Raises:
        ValueError: these differ.
    """
    parts = parts_of(backend)
    if parts and n not in (None, sum(parts.values())):
        raise ValueError(
            f"backend {backend!r} has {sum(parts.values())} replicas, got n={n}. Leave n away, or mend it."
        )
    return sum(parts.values()) if parts else n


def executor_of(backend: str, make: Callable[[str], ServerlessExecutor]) -> ServerlessExecutor:
    """Return the executor of a backend, or the placements of several.

    Args:
        backend: the name of one, or several with their numbers of replicas, as in "slurm:4,modal:4".
        make: returns the executor of one backend.

    Raises:
        ValueError: the text names no backend, or one twice.
        BackendError: one of several cannot start single ranks.
    """
    parts = parts_of(backend)
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
    """Return the options of each backend: of several they are named as `slurm.partition`.

    Raises:
        ValueError: an option says of none of them that it is its.
    """
    parts = parts_of(backend)
    if len(parts) < 2:
        return {name_of(backend): dict(options)}
    found: dict[str, dict[str, Any]] = {name: {} for name in parts}
    for key, value in options.items():
        name, _, option = key.rpartition(".")
        if name not in found:
            known = " or ".join(f"{each}.{option}" for each in parts)
            raise ValueError(f"Option {key!r} does not say of which backend it is: write {known}.")
        found[name][option] = value
    return found
