"""Starting attempts of single ranks of a run, as a keeper does that is not their supervisor."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from executors.errors import ReplicasError
from executors.native import NativeExecutor, RunSpec
from executors.protocol import ServerlessExecutor
from executors.run.handles import keep_handles
from executors.store import store_at

AGAIN_S = 10.0  # after a start that failed
GATHER_S = 3600.0  # each rank is started for itself: none waits for the others


@dataclass(frozen=True)
class Recipe:
    """What starts an attempt: a run with the values that are never recorded, its entrypoint and its limits."""

    spec: RunSpec
    entrypoint: Any
    limits: Mapping[str, Any]


class LaunchHands:
    """Starts attempts through the run's executor, each in the background; one that another process began is left alone.

    Args:
        executor: returns the executor of all ranks, which is native.
        say: gets a sentence on each start that failed.
    """

    how = "launch"

    def __init__(self, executor: Callable[[], ServerlessExecutor], recipe: Recipe, say: Callable[[str], None]) -> None:
        self._executor = executor
        self.free: frozenset[int] = frozenset()
        """The ranks whose supervisors are gone, or have left their ends to others."""
        self.say = say
        self._recipe = recipe
        self._busy: set[int] = set()
        self._again_at: dict[int, float] = {}

    @property
    def executor(self) -> NativeExecutor:
        """The executor of all ranks."""
        executor = self._executor()
        assert isinstance(executor, NativeExecutor)
        return executor

    def may_start(self, rank: int) -> bool:
        """Return whether this process can start that rank now."""
        return rank in self.free and rank not in self._busy and time.monotonic() >= self._again_at.get(rank, 0.0)

    @property
    def is_busy(self) -> bool:
        """Whether a start is under way."""
        return bool(self._busy)

    def start(self, attempts: Mapping[int, int]) -> None:
        """Start attempts, by rank, in the background."""
        for number in sorted(set(attempts.values())):
            ranks = tuple(rank for rank, its in attempts.items() if its == number)
            self._busy.update(ranks)
            spec = replace(self._recipe.spec, ranks=ranks, attempt=number, min_replicas=1, gather_s=GATHER_S)
            threading.Thread(target=self._start, args=(spec,), name=f"replicas-restart-{number}", daemon=True).start()

    def _start(self, spec: RunSpec) -> None:
        try:
            recipe = self._recipe
            handles = self.executor.launch_replicas(len(spec.ranks), recipe.entrypoint, {}, **recipe.limits, run=spec)
            keep_handles(store_at(spec.store_url), spec.run_id, spec.attempt, handles)
        except (ReplicasError, OSError) as error:
            self._again_at |= dict.fromkeys(spec.ranks, time.monotonic() + AGAIN_S)
            self.say(f"attempt {spec.attempt} could not be started; trying again: {error}")
        finally:
            self._busy.difference_update(spec.ranks)
