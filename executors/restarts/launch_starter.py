"""Starting attempts of single ranks of a run, as a keeper does that is not their supervisor."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from executors.attempt import INTENT, Attempt
from executors.attempt.handles import keep_handles
from executors.errors import MaxCostSpentError, ReplicasError, StoreError
from executors.native import NativeExecutor
from executors.protocol import ReplicaStatus, ServerlessExecutor
from executors.settings.run_spec import RunSpec
from executors.store import store_at

AGAIN_S = 10.0  # after a start that failed
GATHER_S = 3600.0  # each rank is started for itself: none waits for the others


@dataclass(frozen=True)
class Recipe:
    """What starts attempts of some ranks: a run with the values that are never recorded, entrypoint and limits.

    The launch has one, and each addition: what one was given is nothing that another gets.
    """

    spec: RunSpec
    """Its `ranks` are those that are started with it."""
    entrypoint: Any
    limits: Mapping[str, Any]


class LaunchHands:
    """Starts attempts through the run's executor, each in the background; one that another process began is left alone.

    Args:
        executor: returns the executor of all ranks, which is native.
        recipes: what this process was given to start ranks with; it starts no others.
        say: gets a sentence on each start that failed.
    """

    how = "launch"

    def __init__(
        self, executor: Callable[[], ServerlessExecutor], recipes: Sequence[Recipe], say: Callable[[str], None]
    ) -> None:
        self._executor = executor
        self.free: Mapping[int, int] = {}
        """The newest attempts, by rank, whose supervisors are gone, or have left their ends to others."""
        self.say = say
        self._recipes = [*recipes]
        self._busy: set[tuple[int, int]] = set()
        """The ranks and attempts that are being started."""
        self._again_at: dict[int, float] = {}

    @property
    def executor(self) -> NativeExecutor:
        """The executor of all ranks."""
        executor = self._executor()
        assert isinstance(executor, NativeExecutor)
        return executor

    def learn(self, recipes: Sequence[Recipe]) -> None:
        """Start other ranks, too."""
        self._recipes += recipes

    def knows(self, rank: int) -> bool:
        """Return whether this process was given what a rank is started with."""
        return any(rank in recipe.spec.ranks for recipe in self._recipes)

    def may_start(self, rank: int) -> bool:
        """Return whether this process can start that rank now."""
        if rank not in self.free or time.monotonic() < self._again_at.get(rank, 0.0):
            return False
        # One that has ended since was started, whether or not those that were asked for with it are.
        return not any(each == rank and number > self.free[rank] for each, number in [*self._busy])

    @property
    def is_busy(self) -> bool:
        """Whether a start is under way."""
        return bool(self._busy)

    def start(self, attempts: Mapping[int, int]) -> None:
        """Start attempts, by rank, in the background."""
        for number, recipe in itertools.product(sorted(set(attempts.values())), self._recipes):
            ranks = tuple(rank for rank, its in attempts.items() if its == number and rank in recipe.spec.ranks)
            if not ranks:
                continue
            self._busy.update((rank, number) for rank in ranks)
            spec = replace(recipe.spec, ranks=ranks, attempt=number)
            spec = spec.with_settings(min_replicas=1, gather_s=GATHER_S)
            name = f"replicas-restart-{number}"
            threading.Thread(target=self._start, args=(replace(recipe, spec=spec),), name=name, daemon=True).start()

    def _start(self, recipe: Recipe) -> None:
        spec = recipe.spec
        try:
            handles = self.executor.launch_replicas(len(spec.ranks), recipe.entrypoint, {}, **recipe.limits, run=spec)
            keep_handles(store_at(spec.store_url), spec.run_id, spec.attempt, handles)
        except (ReplicasError, OSError) as error:
            self._again_at |= dict.fromkeys(spec.ranks, time.monotonic() + AGAIN_S)
            if isinstance(error, MaxCostSpentError):
                self._end(spec, error)
            else:
                self.say(f"attempt {spec.attempt} could not be started: {error}")
        finally:
            self._busy.difference_update((rank, spec.attempt) for rank in spec.ranks)

    def _end(self, spec: RunSpec, error: MaxCostSpentError) -> None:
        """End attempts that nobody will start, so that nobody waits for them."""
        self.say(f"attempt {spec.attempt} is not started: {error}")
        with contextlib.suppress(StoreError):  # then it is tried again
            for rank in error.ranks:
                attempt = Attempt(store_at(spec.store_url), spec.run_id, rank, spec.attempt)
                if not attempt.has(INTENT):  # of somebody who begins it all the same
                    attempt.record(attempt.ended(ReplicaStatus.FAILED, "timeout", error=str(error)))
