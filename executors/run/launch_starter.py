"""Starts attempts of single ranks through the run's executor. The launcher and `replicas watch` use it for restarts."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from executors.attempt import Attempt
from executors.backend import Backend
from executors.errors import MaxCostSpentError, ReplicasError, StoreError
from executors.protocol import ReplicaStatus
from executors.restarts.decision_log import DecisionLog, rules_of
from executors.run.start_attempts import StartPlan, start_attempts
from executors.settings.run_spec import RunSpec, StartSpec
from executors.store import store_at

AGAIN_S = 10.0  # the pause after a failed start
GATHER_S = 3600.0  # each rank is started alone, so this wait for other ranks never ends a start


class LaunchStarter:
    """Starts attempts in the background. An attempt that another process has claimed is not started.

    Args:
        backend: the placements of the run.
        start_specs: the values that start the ranks. Other ranks are not started.
        say: called with one sentence for each failed start.
    """

    how = "launch"

    def __init__(self, backend: Backend, start_specs: Sequence[StartSpec], say: Callable[[str], None]) -> None:
        self.backend = backend
        self.free: Mapping[int, int] = {}
        """The newest attempts, by rank, whose supervisor has ended or leaves the restart to other processes."""
        self.log: DecisionLog | None = None
        """The decision log of the run, as far as it was read. None: the rules of the launch are in force."""
        self.say = say
        self._start_specs = [*start_specs]
        self._busy: set[tuple[int, int]] = set()
        """The ranks and attempts that this process is starting."""
        self._again_at: dict[int, float] = {}

    def learn(self, start_specs: Sequence[StartSpec]) -> None:
        """Add more ranks that this process can start.

        Args:
            start_specs: the values that start the additional ranks.
        """
        self._start_specs += start_specs

    def knows(self, rank: int) -> bool:
        """Return True if this process has the values to start a rank.

        Args:
            rank: the rank.
        """
        return any(rank in start_spec.ranks for start_spec in self._start_specs)

    def may_start(self, rank: int) -> bool:
        """Return True if this process can start a rank now; see `AttemptStarter.may_start`."""
        if rank not in self.free or time.monotonic() < self._again_at.get(rank, 0.0):
            return False
        # A rank whose newer attempt has ended was started, so this process may start its next attempt.
        return not any(each == rank and number > self.free[rank] for each, number in [*self._busy])

    @property
    def is_busy(self) -> bool:
        """True while a start is under way."""
        return bool(self._busy)

    def start(self, attempts: Mapping[int, int]) -> None:
        """Start attempts, by rank, in the background."""
        for number, known in itertools.product(sorted(set(attempts.values())), self._start_specs):
            ranks = tuple(rank for rank, its in attempts.items() if its == number and rank in known.ranks)
            if not ranks:
                continue
            self._busy.update((rank, number) for rank in ranks)
            rules = rules_of(() if self.log is None else self.log.entries, known.spec.settings.rules)
            order = known.with_spec(ranks=ranks, attempt=number)
            order = order.with_settings(min_replicas=1, gather_s=GATHER_S, rules=rules)
            name = f"replicas-restart-{number}"
            threading.Thread(target=self._start, args=(order,), name=name, daemon=True).start()

    def _start(self, order: StartSpec) -> None:
        spec = order.spec
        try:
            # Without `undo`, because this process tries to start the same attempts again, under the same lease.
            start_attempts(StartPlan(store=store_at(spec.store_url), backend=self.backend, orders=[order]))
        except (ReplicasError, OSError) as error:
            self._again_at |= dict.fromkeys(spec.ranks, time.monotonic() + AGAIN_S)
            if isinstance(error, MaxCostSpentError):
                self._end(spec, error)
            else:
                self.say(f"attempt {spec.attempt} could not be started: {error}")
        finally:
            self._busy.difference_update((rank, spec.attempt) for rank in spec.ranks)

    def _end(self, spec: RunSpec, error: MaxCostSpentError) -> None:
        """Record outcomes for attempts that no process will start, so that no other process waits for them."""
        self.say(f"attempt {spec.attempt} is not started: {error}")
        with contextlib.suppress(StoreError):  # this process tries the record again later
            for rank in error.ranks:
                attempt = Attempt(store_at(spec.store_url), spec.run_id, rank, spec.attempt)
                if not attempt.has_intent():  # otherwise another process has claimed the start
                    attempt.record(attempt.new_outcome(ReplicaStatus.FAILED, "timeout", error=str(error)))
