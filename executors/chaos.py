"""Faults on demand, to see a run survive them: `replicas launch --chaos SPEC`.

    kill:rank=1,round=3                      SIGKILL rank 1 when it is about to send its contribution to round 3
    kill:rank=1,at=seal,count=2,when=after   … when it has just tried to create its second seal
    store:lost=0.02,delay=0.3                2 % of all store calls are done and then fail; each waits up to 0.3 s first

The chaos of a run is part of its launch: recorded in `run.json`, handed to the replicas by their executor, and injected
where a worker opens the run's store. Other processes that open the store, such as a helper, get no faults.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from executors.errors import unknown_name
from executors.store.faulty import FaultPoint, FaultyStore
from executors.store.memory import MemoryStore
from executors.store.protocol import Store

ENTRY_POINTS = "replicas.fault_points"
EVERY_REPLICA: Mapping[str, FaultPoint] = {
    "claim": FaultPoint("put_if_absent", "*/replicas/{rank:04d}/*/started.json"),
    "claim-read": FaultPoint("get", "*/replicas/{rank:04d}/*/started.json"),
    "outcome": FaultPoint("put_if_absent", "*/replicas/{rank:04d}/*/outcome.json"),
}


@functools.cache
def fault_points() -> Mapping[str, FaultPoint]:
    """Return the store calls that have a name: those of every replica, and those of the tables that installed packages
    announce under the entry point group `replicas.fault_points`."""
    from importlib.metadata import entry_points

    tables: list[Mapping[str, FaultPoint]] = [table.load() for table in entry_points(group=ENTRY_POINTS)]
    return {name: point for table in (*tables, EVERY_REPLICA) for name, point in table.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """SIGKILL for a replica's own process, at a call to the store."""

    rank: int | None = None
    round: int | None = None
    """1, 2, 3, …, as in the table; of a snapshot, how many rounds are behind it."""
    at: str = "contribution"
    count: int = 1
    """Which of such calls it is."""
    when: Literal["before", "after"] = "before"
    """Before the call is done, or after it and before the replica knows; a read that finds nothing is not done."""
    attempt: int = 0

    def around(self, store: Store, seed: str) -> FaultyStore:
        """Return a store at which its replica dies.

        Raises:
            ValueError: the fields make no sense.
        """
        if self.rank is None:
            raise ValueError("whom? Give a rank, as in kill:rank=1,round=3.")
        if self.at not in fault_points():
            raise ValueError(unknown_name("fault point", self.at, fault_points()))
        if self.when not in ("before", "after"):
            raise ValueError(unknown_name("time", self.when, ("before", "after")))
        point = fault_points()[self.at]
        if self.round is not None and not ("{round}" in point.key or "{index}" in point.key):
            raise ValueError(f"at={self.at} belongs to no round, got round={self.round}.")
        if self.round == 0 and "{index}" in point.key:
            raise ValueError("rounds count from 1, got round=0.")
        number, index = ("*", "*") if self.round is None else (self.round, self.round - 1)
        key = point.key.format(rank=self.rank, round=number, index=index)
        before, after = (self.die, None) if self.when == "before" else (None, self.die)
        deadly = FaultyStore(store, seed=0)
        deadly.fail_at(point.verb, key=key, inside=point.inside, count=self.count, before=before, after=after)
        return deadly

    def die(self) -> None:
        which = "" if self.round is None else f" of round {self.round}"
        try:
            print(
                f"chaos: rank {self.rank} dies {self.when} {self.at} {self.count}{which}", file=sys.stderr, flush=True
            )
        finally:  # whatever the user made of stderr
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFaults:
    """A store that fails at random, as `FaultyStore` does: rates of its calls, and seconds of delay."""

    lost: float = 0.0
    error: float = 0.0
    corrupt: float = 0.0
    truncate: float = 0.0
    delay: float = 0.0
    seed: int = 0
    rank: int | None = None
    """The one whose store fails; None: all."""

    def around(self, store: Store, seed: str) -> FaultyStore:
        """Return the store with these faults.

        Raises:
            ValueError: the fields make no sense.
        """
        if not any((self.lost, self.error, self.corrupt, self.truncate, self.delay)):
            raise ValueError("this does nothing: give lost, error, corrupt, truncate (rates) or delay (seconds).")
        return FaultyStore(
            store,
            seed=random.Random(f"{self.seed} {seed}").getrandbits(32),
            delay_s=self.delay,
            lost=self.lost,
            error=self.error,
            corrupt=self.corrupt,
            truncate=self.truncate,
        )


KINDS: Mapping[str, type[Kill] | type[StoreFaults]] = {"kill": Kill, "store": StoreFaults}


def check_chaos(specs: Iterable[str], n: int) -> tuple[str, ...]:
    """Return the specs, if they make sense for a run of `n` replicas.

    Raises:
        ValueError: one does not; names the nearest word that does, and the known ones.
    """
    checked = tuple(specs)
    for spec in checked:
        rank = parse(spec).rank
        if rank is not None and rank >= n:
            raise ValueError(f"chaos {spec!r}: the run has the ranks 0 to {n - 1}, got rank={rank}.")
    return checked


def parse(spec: str) -> Kill | StoreFaults:
    """Read one spec: `kill:…` or `store:…`, with `name=value` separated by commas.

    Raises:
        ValueError: the spec is not one.
    """
    try:
        name, _, rest = spec.partition(":")
        if name not in KINDS:
            raise ValueError(unknown_name("chaos", name, KINDS))
        types = {field.name: str(field.type) for field in dataclasses.fields(KINDS[name])}
        values: dict[str, Any] = {}
        for text in filter(None, rest.split(",")):
            key, equals, value = text.partition("=")
            if key not in types:
                raise ValueError(unknown_name(f"setting of {name}", key, types))
            if not equals or key in values:
                raise ValueError(f"{key!r} needs one value, as in {key}=1.")
            values[key] = _value(key, value, types[key])
        found = KINDS[name](**values)
        found.around(MemoryStore(), seed="")  # raises what is wrong with the values
    except ValueError as error:
        raise ValueError(f"chaos {spec!r}: {error}") from None
    return found


def inject_faults(store: Store, specs: Sequence[str], rank: int, attempt: int) -> Store:
    """Return the store as one attempt of a rank gets it."""
    chaos = [(parse(spec), f"{number} {rank} {attempt}") for number, spec in enumerate(specs)]
    # Kills are innermost: a call whose reply is lost has been done, and so counts.
    for kind in (Kill, StoreFaults):
        for spec, seed in chaos:
            is_here = spec.rank in (None, rank) and (not isinstance(spec, Kill) or spec.attempt == attempt)
            if isinstance(spec, kind) and is_here:
                store = spec.around(store, seed)
    return store


def _value(name: str, text: str, kind: str) -> Any:
    if not kind.startswith(("int", "float")):
        return text
    is_integer = kind.startswith("int")
    try:
        value = int(text) if is_integer else float(text)
    except ValueError:
        raise ValueError(f"{name} is {'an integer' if is_integer else 'a number'}, got {name}={text}.") from None
    if name in ("rank", "round", "attempt") and value < 0:
        raise ValueError(f"{name} must be at least 0, got {name}={value}.")
    return value
