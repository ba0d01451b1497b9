"""Tests how a DiLoCo finds its run: by the replica of its process, by its arguments, or in memory if it is alone."""

from __future__ import annotations

from typing import Any

import pytest

from diloco.errors import DiLoCoError
from diloco.rendezvous.run_location import find_location


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"run_id": "mine", "rank": 0, "world_size": 2}, "store is missing"),
        ({"world_size": 2}, "store and run_id and rank are missing"),
        ({"store": "memory://here", "rank": "join"}, "run_id and world_size are missing"),
    ],
)
def test_part_of_a_place_is_refused_outside_a_replica(given: dict[str, Any], missing: str) -> None:
    values: Any = {"store": None, "run_id": None, "rank": None, "world_size": None, **given}
    with pytest.raises(DiLoCoError, match=missing):
        find_location(**values)
