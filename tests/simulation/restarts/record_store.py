"""The store of a simulated run, with an index of its attempts and outcomes, and its decision log."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from executors.attempt import replica_key
from executors.attempt.outcome import parse_outcome
from executors.errors import KeyNotFoundError, StoreError
from executors.protocol import Outcome, ReplicaStatus
from executors.restarts.decision_log import Decision, DecisionLog
from simulation.world import SimulatedStore

if TYPE_CHECKING:
    from simulation.restarts.simulation import RestartSimulation

RUN = "run"
_parsed: dict[bytes, Decision] = {}


class RecordStore(SimulatedStore):
    """A simulated store that keeps an index of attempts, claims and outcomes, which saves lists of keys."""

    def __init__(self, simulation: RestartSimulation) -> None:
        super().__init__(simulation.world, answer_s=0.01)
        self._simulation = simulation
        self.outcomes: list[Outcome] = []
        """All outcomes. An object in the store has only the index of its outcome in this list."""
        self.begun: dict[tuple[int, int], float] = {}
        self.newest: dict[int, int] = {}
        self.ends: dict[tuple[int, int], Outcome] = {}
        self.claims: dict[tuple[int, int], bytes] = {}

    def _set(self, key: str, value: bytes) -> bool:
        super()._set(key, value)
        _, folder, *rest = key.split("/")
        if folder == "decisions":
            self._simulation.decided(parse_entry(value, key))
            return True
        rank, number, name = int(rest[0]), int(rest[1]), rest[2]
        if name == "cancel.json":
            return True
        self.begun.setdefault((rank, number), self._world.now)
        while (rank, self.newest.get(rank, -1) + 1) in self.begun:
            self.newest[rank] = self.newest.get(rank, -1) + 1
        if name == "outcome.json":
            found = self.outcomes[int(value)] if value.isdigit() else parse_outcome(value)
            self.ends[rank, number] = found
        elif name == "started.json":
            self.claims[rank, number] = value
        return True

    def record(self, outcome: Outcome) -> None:
        """Record an outcome, unless there is one. The outcome of a canceled attempt is "cancelled"."""
        key = functools.partial(replica_key, RUN, outcome.rank, outcome.attempt)
        if self.has(key("cancel.json")):
            outcome = Outcome(outcome.rank, outcome.attempt, ReplicaStatus.CANCELLED, "cancelled")
        self.outcomes.append(outcome)
        self.put_if_absent(key("outcome.json"), b"%d" % (len(self.outcomes) - 1))

    def has(self, key: str) -> bool:
        try:
            self.get(key)
        except KeyNotFoundError:
            return False
        return True

    def wins(self, key: str, value: bytes) -> bool:
        """Try to create an object, and return True if the store has this object now."""
        for _ in range(3):
            try:
                self.put_if_absent(key, value)
            except StoreError:
                continue
            break
        return bytes(self.get(key)) == value

    def point(self, what: str) -> None:
        """Pass a point at which a fault outside the store may happen."""
        self._before("do", what)
        if self._world.happens(self._world.faults.refused):
            raise StoreError(f"{what}: refused")


class CachedLog(DecisionLog):
    """The real decision log, which parses each entry only once."""

    def _find(self, index: int) -> Decision | None:
        key = self.key(index)
        try:
            return parse_entry(bytes(self.store.get(key)), key)
        except KeyNotFoundError:
            return None


def parse_entry(data: bytes, key: str) -> Decision:
    if data not in _parsed:
        if len(_parsed) > 10_000:
            _parsed.clear()
        _parsed[data] = Decision.parse(data, key)
    return _parsed[data]
