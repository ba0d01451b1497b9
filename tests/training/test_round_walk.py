"""The calls from `DiLoCo.step()` to the store stay few enough to be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.round_walk import walk_of_a_round

from executors import launch

MOST_FRAMES = 10
"""Calls of product functions between the begin of a round and a call of the store.

A usual round has 9. If a replica is late, the others ask whether it has left, which is one call deeper.
"""
MOST_FILES = {"in turn": 22, "in a round thread": 23}
"""Files of `diloco/` that a round passes: one more if there is a round thread."""


@pytest.mark.parametrize(("name", "options"), [("in turn", {}), ("in a round thread", {"background": True})])
def test_a_round_of_two_replicas_passes_few_files_and_frames(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    args = {"traced": 2, "options": options}
    walks = launch("local", walk_of_a_round, 2, args=args, rendezvous=tmp_path.as_uri()).results()
    for walk in walks:
        between = walk["deepest"][1:-1]
        assert walk["deepest"], "the round has called the store"
        assert len(between) <= MOST_FRAMES, " | ".join(between)
    files = sorted({file for walk in walks for file, _ in walk["functions"] if file.startswith("diloco/")})
    assert len(files) <= MOST_FILES[name], files
