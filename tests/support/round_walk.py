"""Traces one round of DiLoCo in a launched replica: which files and functions it passes, and how deep the store is."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from diloco import DiLoCo
from executors import current_replica

ROOT = Path(__file__).parents[2]
PRODUCT = tuple(f"{ROOT / package}/" for package in ("diloco", "executors"))
STORES = f"{ROOT / 'executors' / 'store'}/"
STORE_CALLS = ("get", "put", "put_if_absent", "put_if_absent_streamed", "delete", "list")
INLINED = ("<listcomp>", "<setcomp>", "<dictcomp>")
"""Frames of Python 3.11 that Python 3.12 no longer has."""
ENTRIES = (("outer.py", "step"), ("round_thread.py", "_work"))
"""The functions in which a round begins: `DiLoCo.step`, and the main function of the thread of the rounds."""


@dataclass
class Walk:
    """The files, functions and calls of the store that a round passes.

    Example:
        walk = Walk()
        with_profile(walk.profile, diloco.step)
        walk.deepest
    """

    is_on: bool = False
    functions: set[tuple[str, str]] = field(default_factory=set)
    """Files below the root of the repository, and the qualified names of functions in them."""
    deepest: list[str] = field(default_factory=list)
    """The longest chain of calls from the begin of a round to a call of the store, both included."""

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        """Record a call; this is a profile function of `sys.setprofile`."""
        code = frame.f_code
        if not self.is_on or event != "call" or not _is_counted(frame):
            return
        chain = _chain(frame)
        if chain is None:
            return
        self.functions.add((str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname))
        if code.co_filename.startswith(STORES) and code.co_name in STORE_CALLS and len(chain) > len(self.deepest):
            self.deepest = chain

    def to_json(self) -> dict[str, Any]:
        """Return the walk as JSON."""
        return {"functions": sorted(map(list, self.functions)), "deepest": self.deepest}


def _is_counted(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(PRODUCT) and frame.f_code.co_name not in INLINED


def _chain(frame: FrameType | None) -> list[str] | None:
    """Return the calls from the begin of a round to this frame; None if no round led to it."""
    chain: list[str] = []
    while frame is not None:
        if _is_counted(frame):
            chain.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_qualname}")
            if (Path(frame.f_code.co_filename).name, frame.f_code.co_name) in ENTRIES:
                return chain[::-1]
        frame = frame.f_back
    return None


def walk_of_a_round(traced: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train a small model with DiLoCo, and return the walk of one of its rounds as JSON.

    The gradient is constant, and differs between the replicas. So one step after a merge takes back little of it.
    Then `StaleCopies` has no suspicion, and its search for copies of the weights does not begin.

    Args:
        traced: the number of the round, from 1. All steps after the previous round are traced.
        options: for `DiLoCo`, besides 20 inner steps per round and five rounds.
    """
    torch.set_num_threads(1)
    walk, model = Walk(), nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    threading.setprofile(walk.profile)
    diloco = DiLoCo(model, inner_steps=20, total_steps=100, grace_s=300.0, **options)
    for _ in diloco.steps():
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 + current_replica().rank)
        optimizer.step()
        walk.is_on = diloco.rounds == traced - 1
        with_profile(walk.profile, diloco.step)
    threading.setprofile(None)
    walk.is_on = False
    diloco.close()
    return walk.to_json()


def with_profile(profile: Callable[[FrameType, str, Any], object], act: Callable[[], object]) -> None:
    """Call something with a profile function set in this thread."""
    sys.setprofile(profile)
    try:
        act()
    finally:
        sys.setprofile(None)
