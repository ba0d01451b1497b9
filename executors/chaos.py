"""Faults on demand, to see a run survive them: `replicas launch --chaos SPEC`.

    kill:rank=1,round=3                      SIGKILL rank 1 when it is about to send its contribution to round 3
    kill:rank=1,at=seal,count=2,when=after   … when it has just tried to create its second seal
    store:lost=0.02,delay=0.3                2 % of all store calls are done and then fail; each waits up to 0.3 s first

The chaos of a run is part of its launch: recorded in `run.json`, handed to the replicas by their executor, and let in
where a worker opens the run's store. What opens the store by itself, such as a helper process, does not suffer.
"""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from executors.store import Store

if TYPE_CHECKING:
    from executors.store.faulty import Verb


@dataclass(frozen=True, slots=True)
class Point:
    """Calls of a replica to the store that have a name: a verb, and a pattern of keys."""

    verb: Verb
    key: str
    """With `{rank}` for the replica's own and `{round}` for one round; a shell's pattern in all else."""
    inside: bool | None = None
    """Whether a read begins inside the object. None: whichever."""

    @property
    def has_round(self) -> bool:
        return "{round}" in self.key


POINTS: Mapping[str, Point] = {
    "claim": Point("put_if_absent", "*/replicas/{rank:04d}/*/started.json"),
    "claim-read": Point("get", "*/replicas/{rank:04d}/*/started.json"),
    "part": Point("put", "*/diloco/*/part/{round}/*"),
    "part-read": Point("get", "*/diloco/*/part/{round}/*"),
    "part-delete": Point("delete", "*/diloco/*/part/{round}/*"),
    "pointer": Point("put_if_absent", "*/diloco/*/snapshot/{round}"),
    "pointer-read": Point("get", "*/diloco/*/snapshot/{round}"),
    "contribution": Point("put_if_absent", "*/diloco/*/r{round}/contribution/{rank}"),
    "contribution-read": Point("get", "*/diloco/*/r{round}/contribution/*", inside=False),
    "contribution-delete": Point("delete", "*/diloco/*/r{round}/contribution/{rank}"),
    "input-read": Point("get", "*/diloco/*/r{round}/contribution/*", inside=True),
    "seal": Point("put_if_absent", "*/diloco/*/seal/{round}"),
    "seal-read": Point("get", "*/diloco/*/seal/{round}"),
    "mean": Point("put_if_absent", "*/diloco/*/r{round}/mean/*"),
    "mean-read": Point("get", "*/diloco/*/r{round}/mean/*"),
    "mean-delete": Point("delete", "*/diloco/*/r{round}/mean/*"),
    "own": Point("put", "*/diloco/*/own/{rank}/{round}/*"),
    "own-read": Point("get", "*/diloco/*/own/{rank}/{round}/*"),
    "list": Point("list", "*/diloco/*"),
    "bye": Point("put", "*/diloco/*/bye/{rank}/*"),
    "outcome": Point("put_if_absent", "*/replicas/{rank:04d}/*/outcome.json"),
}
"""Where a replica can be killed. The keys are those that the README documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """SIGKILL for a replica's own process, at a call to the store."""

    rank: int
    round: int | None = None
    at: str = "contribution"
    count: int = 1
    """Which of such calls it is."""
    when: Literal["before", "after"] = "before"
    """Before the call is done, or after it and before the replica knows; a read that finds nothing is not done."""
    attempt: int = 0

    def check(self) -> None:
        if self.at not in POINTS:
            raise ValueError(_unknown("fault point", self.at, POINTS))
        if self.when not in ("before", "after"):
            raise ValueError(_unknown("time", self.when, ("before", "after")))
        if self.round is not None and not POINTS[self.at].has_round:
            raise ValueError(f"at={self.at} belongs to no round, got round={self.round}.")
        if self.count < 1:
            raise ValueError(f"count must be at least 1, got count={self.count}.")
        _check_not_negative(self, "rank", "round", "attempt")


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
    """The one that suffers; None: all."""

    def check(self) -> None:
        for name in ("lost", "error", "corrupt", "truncate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a rate from 0 to 1, got {name}={getattr(self, name)}.")
        if not 0 <= self.delay < float("inf"):
            raise ValueError(f"delay is a number of seconds, got delay={self.delay}.")
        if not (self.lost or self.error or self.corrupt or self.truncate or self.delay):
            raise ValueError("this does nothing: give lost, error, corrupt, truncate (rates) or delay (seconds).")
        _check_not_negative(self, "rank")


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
        ValueError: it is none.
    """
    try:
        name, _, rest = spec.partition(":")
        if name not in KINDS:
            raise ValueError(_unknown("chaos", name, KINDS))
        fields = {field.name: str(field.type) for field in dataclasses.fields(KINDS[name])}
        values: dict[str, Any] = {}
        for text in filter(None, rest.split(",")):
            key, equals, value = text.partition("=")
            if key not in fields:
                raise ValueError(_unknown(f"setting of {name}", key, fields))
            if not equals or key in values:
                raise ValueError(f"{key!r} needs one value, as in {key}=1.")
            values[key] = _value(key, value, fields[key])
        if name == "kill" and "rank" not in values:
            raise ValueError("whom? Give a rank, as in kill:rank=1,round=3.")
        found = KINDS[name](**values)
        found.check()
    except ValueError as error:
        raise ValueError(f"chaos {spec!r}: {error}") from None
    return found


def troubled(store: Store, specs: Sequence[str], rank: int, attempt: int) -> Store:
    """Return the store as one attempt of a rank is to see it."""
    from executors.store.faulty import FaultyStore

    chaos = [parse(spec) for spec in specs]
    deadly = FaultyStore(store, seed=0)
    kills = [each for each in chaos if isinstance(each, Kill) and (each.rank, each.attempt) == (rank, attempt)]
    for spec in kills:
        point = POINTS[spec.at]
        key = point.key.format(rank=rank, round="*" if spec.round is None else spec.round)
        die = _Die(spec)
        deadly.fail_at(
            point.verb,
            key=key,
            inside=point.inside,
            count=spec.count,
            before=die if spec.when == "before" else None,
            after=die if spec.when == "after" else None,
        )
    seen: Store = deadly if kills else store
    for number, faults in enumerate(chaos):
        if isinstance(faults, StoreFaults) and faults.rank in (None, rank):
            seen = FaultyStore(
                seen,
                seed=random.Random(f"{faults.seed} {number} {rank} {attempt}").getrandbits(32),
                delay_s=faults.delay,
                lost=faults.lost,
                error=faults.error,
                corrupt=faults.corrupt,
                truncate=faults.truncate,
            )
    return seen


@dataclass(frozen=True, slots=True)
class _Die:
    spec: Kill

    def __call__(self) -> None:
        spec, which = self.spec, "" if self.spec.round is None else f" of round {self.spec.round}"
        try:
            print(
                f"chaos: rank {spec.rank} dies {spec.when} {spec.at} {spec.count}{which}", file=sys.stderr, flush=True
            )
        finally:  # whatever the user made of stderr
            os.kill(os.getpid(), signal.SIGKILL)


def _value(key: str, text: str, kind: str) -> Any:
    is_word = not kind.startswith(("int", "float"))
    try:
        return text if is_word else int(text) if kind.startswith("int") else float(text)
    except ValueError:
        what = "an integer" if kind.startswith("int") else "a number"
        raise ValueError(f"{key} is {what}, got {key}={text}.") from None


def _check_not_negative(spec: object, *names: str) -> None:
    for name in names:
        if (value := getattr(spec, name)) is not None and value < 0:
            raise ValueError(f"{name} must be at least 0, got {name}={value}.")


def _unknown(what: str, word: str, known: Iterable[str]) -> str:
    import difflib

    near = difflib.get_close_matches(word, known := list(known), n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return f"No {what} {word!r}. {hint}Known: {', '.join(sorted(known))}."
