"""The log of decisions: what follows each end, as write-once records `decisions/<k>.json`, dense from 0.

Anybody may decide, because a decision is computed from records that never change; the create of entry k says who was
first. A later entry is computed again from the longer log.
"""

from __future__ import annotations

import hmac
import json
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from executors.errors import CorruptObjectError, StoreError
from executors.patience import retry
from executors.process import IDENTITY, has_ended, this_process
from executors.settings.policy import HangLimits, Restarts
from executors.store import Store
from executors.store.protocol import check_size
from executors.store.records import (
    FAR_AHEAD,
    LONG_AGO,
    SHA256,
    Record,
    checked,
    find_record,
    flag,
    integer,
    json_object,
    nullable,
    number,
    one_of,
    parsed,
    text,
    to_bytes,
)
from executors.store.run_key import parse_key, proof_of_fields
from executors.store.url import is_near

MAX_DECISIONS = 100_000
MAX_DECISION_BYTES, MAX_LOG_BYTES = 512 << 10, 64 << 20  # as objects they take eight times as much memory
MAX_RANK, MAX_ATTEMPT = 10**6, 10_000
MAX_STARTS = 20_000  # of one entry: a run has 10,000 ranks, and perhaps as many that were added
MAX_WORDS = 2000
MAX_TOTAL = 10**12  # steps or rounds of a run
MAX_TRIES = 1000  # of an append, each lost to another writer
ENDING, OTHERS = ("give_up", "stop", "cancel"), ("restart", "resume", "policy")
WHAT_ENDS = ("rank", "ended", "why", "words", "within_s", "by", "nonce")


NUMBER = re.compile("0|[1-9][0-9]{0,6}")


def _attempts(value: Any) -> dict[int, int]:
    """Expect an object from ranks to numbers of attempts."""
    rank_of, attempt_of = integer(0, MAX_RANK), integer(0, MAX_ATTEMPT)
    found = json_object(value)
    if len(found) > MAX_STARTS or not all(NUMBER.fullmatch(rank) for rank in found):
        raise ValueError(f"an object from at most {MAX_STARTS} ranks to attempts")
    return {rank_of(int(rank)): attempt_of(attempt) for rank, attempt in found.items()}


def _numbers(value: Any) -> dict[str, float]:
    """Expect an object of finite numbers."""
    each = number()
    return {text(100)(name): each(number) for name, number in json_object(value).items()}


@dataclass(frozen=True, kw_only=True)
class Decision(Record):
    """One entry of the log."""

    kind: str = checked(one_of(*ENDING, *OTHERS))
    rank: int | None = checked(nullable(integer(0, MAX_RANK)), None)
    """Whose end it answers; of a cancel, whose; None: nobody's in particular, or every rank's."""
    ended: int | None = checked(nullable(integer(0, MAX_ATTEMPT)), None)
    """The attempt whose end it answers."""
    start: dict[int, int] = checked(_attempts, {})
    """The attempts to start, by rank: of a restart or a resume."""
    how: str | None = checked(nullable(text(40)), None)
    charged: bool = checked(flag, False)
    strikes: int = checked(integer(0, MAX_ATTEMPT), 0)
    not_before: float = checked(number(LONG_AGO, FAR_AHEAD), 0.0)
    reason: str | None = checked(nullable(text(40)), None)
    """Of the end that it answers."""
    exit_code: int | None = checked(nullable(integer(-(2**31), 2**31)), None)
    fingerprint: str | None = checked(nullable(text(100)), None)
    reached: dict[str, float] = checked(_numbers, {})
    """How far that attempt came: `round` and `step`."""
    has_saved_marks: bool = checked(flag, False)
    """Whether it left something that its successor need not do again."""
    why: str = checked(text(MAX_WORDS), "")
    """Of give_up and stop: `deterministic`, `no_progress`, `budget`, `refused`, `min_replicas`, `asked`,
    `not_started`."""
    words: str = checked(text(MAX_WORDS), "")
    """The end in a few words, for people."""
    within_s: float | None = checked(nullable(number(0.0, FAR_AHEAD)), None)
    """Of a stop that was asked for: how long replicas have to come to a good place."""
    restarts: str | None = checked(nullable(parsed(Restarts.parse)), None)
    """Of a policy: the new one."""
    hang: str | None = checked(nullable(parsed(HangLimits.parse)), None)
    total_steps: int | None = checked(nullable(integer(1, MAX_TOTAL)), None)
    """The planned steps of the run after a policy that extends it."""
    total_rounds: int | None = checked(nullable(integer(1, MAX_TOTAL)), None)
    """The planned rounds, if the rounds of the run go by the clock."""
    by: str = checked(text(1000), "")
    process: str | None = checked(nullable(text(600, IDENTITY)), None)
    """The process that is about to start the attempts of a resume, as `identify_process` names it."""
    nonce: str = checked(text(100), "")
    at: float = checked(number(LONG_AGO, FAR_AHEAD), 0.0)
    """When it was made, by the clock of who made it; never before the entry before it, where both are proven."""
    proof: str | None = checked(nullable(text(64, SHA256)), None)
    """In a signed run, that who added it has the run's key."""

    @property
    def wait_s(self) -> float:
        """How long its attempts were to wait when it was made."""
        return max(0.0, self.not_before - self.at)

    @property
    def is_orphaned(self) -> bool:
        """Whether the process that was about to start its attempts is known to have ended."""
        return self.process is not None and has_ended(self.process)

    def left_s(self, now: float) -> float:
        """Return how long its attempts are still to wait by a clock: no longer than at first, whatever that says."""
        return min(max(0.0, self.not_before - now), self.wait_s)

    def to_bytes(self) -> bytes:
        """Write it as it is stored."""
        return to_bytes({**vars(self), "start": {str(rank): number for rank, number in self.start.items()}})

    def unproven(self, now: float) -> Decision:
        """Return what counts of it where nobody has proven it: what it ends. It starts nothing, nor changes a rule."""
        if self.kind not in ENDING:
            return Decision(kind="policy", by=self.by, at=min(self.at, now))
        said = {name: getattr(self, name) for name in WHAT_ENDS}
        return Decision(kind=self.kind, **said, at=min(self.at, now))


class DecisionLog:
    """The log of one run, as this process has read it.

    Args:
        key: of a signed run. Without it all entries are believed, and what is added counts for what it ends alone.
        n_skipped: how many entries its reader does without. `entries` begins behind them, and nothing can be added.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        clock: Callable[[], float] = time.time,
        *,
        key: str | None = None,
        n_skipped: int = 0,
    ) -> None:
        self.store = store
        self.run_id = run_id
        self._clock = clock
        self._key = None if key is None else parse_key(key)
        self._n_skipped = n_skipped
        self._is_near = is_near(store.url)
        self.entries: list[Decision] = []
        self._n_bytes = 0
        """Of all entries that were read."""
        self._n_at_end = 0
        """How many entries had been read when the end was seen last."""
        self._ahead: dict[int, memoryview | StoreError | None] = {}
        """What was asked for at once and is still to be read, or why it could not be had; None: it is not there."""

    def key(self, index: int) -> str:
        """Name an entry."""
        return f"{self.run_id}/decisions/{index:06d}.json"

    def read(self) -> Sequence[Decision]:
        """Read what was added since, and return all.

        Raises:
            StoreError: the store does not answer, or holds something else there. What was read before it is kept.
        """
        self.read_for(math.inf)
        return self.entries

    def read_for(self, limit_s: float) -> bool:
        """Do the same for some seconds, and return whether that was all; the next call goes on from there."""
        until = time.monotonic() + limit_s
        self._ahead = {}  # what was not there then may be there now
        while (entry := self._find(self._n_skipped + len(self.entries))) is not None:
            self.entries.append(entry)
            if not self._ahead and time.monotonic() >= until:
                return False
        self._ahead = {}
        self._n_at_end = len(self.entries)
        return True

    def take_over(self, other: DecisionLog) -> None:
        """Take over what another log of the same run has read, if it has the same key and so believes the same."""
        if self._key == other._key and len(other.entries) > len(self.entries):
            self.entries += other.entries[len(self.entries) :]
            self._n_at_end, self._n_bytes = len(self.entries), max(self._n_bytes, other._n_bytes)

    def append(self, compute: Callable[[Sequence[Decision]], Decision | None]) -> Decision | None:
        """Add an entry that is computed from the whole log before it; return it, None when there is none to add.

        Args:
            compute: called again whenever somebody else's entry stands first. Its entries need no nonce, by and at.

        Raises:
            StoreError: the store does not answer; the entry may stand or not.
        """
        assert not self._n_skipped, "an entry is computed from the whole log"
        begin, nonce = len(self.entries), os.urandom(8).hex()
        for _ in range(MAX_TRIES):
            self.read()
            for standing in self.entries[begin:]:
                if standing.nonce == nonce:  # it was put, and then not found at first
                    return standing
            entry = compute(self.entries)
            if entry is None:
                return None
            index, last_at = len(self.entries), self.entries[-1].at if self.entries else 0.0
            entry = replace(entry, nonce=nonce, by=this_process(), at=max(self._clock(), last_at))
            data = replace(entry, proof=self._proof(entry.to_bytes(), self.key(index))).to_bytes()
            problem: StoreError | None = None
            check_size(self.key(index), self.store.url, len(data), MAX_DECISION_BYTES)
            Decision.parse(data, self.key(index))  # what nobody could read would be the end of the log
            try:
                self.store.put_if_absent(self.key(index), data)
            except StoreError as error:  # perhaps done: only what stands decides
                problem = error
            if len(retry(self.read)) == index and problem is not None:
                raise problem
        raise StoreError(f"No decision could be added to run {self.run_id!r}: others were always first.")

    def _find(self, index: int) -> Decision | None:
        if index not in self._ahead:
            self._ahead = self._ask_from(index)
        data = self._ahead.pop(index)
        if isinstance(data, StoreError):
            raise data
        return None if data is None else self._parse(data, self.key(index), self.store.url)

    def _ask_from(self, index: int) -> dict[int, memoryview | StoreError | None]:
        """Ask for the next entry, of which there is mostly none.

        Where there are many, and each takes a round trip, for as many more at once as were found so far. What fails
        behind the end does not matter.
        """
        n_found = len(self.entries) - self._n_at_end
        if self._is_near or n_found < 2:
            return {index: self._get(index)}
        from executors.store.parallel import MAX_THREADS, at_store  # its threads need modules that few replicas use

        indices = range(index, index + min(n_found, MAX_THREADS))
        return dict(zip(indices, at_store(self.store, self._try_to_get, indices), strict=True))

    def _try_to_get(self, index: int) -> memoryview | StoreError | None:
        try:
            return self._get(index)
        except StoreError as error:
            return error

    def _get(self, index: int) -> memoryview | None:
        if index >= MAX_DECISIONS:
            raise CorruptObjectError(f"Run {self.run_id!r} has more than {MAX_DECISIONS} decisions.")
        return find_record(self.store, self.key(index), lambda data, *_: data, MAX_DECISION_BYTES)

    def _parse(self, data: Any, key: str, url: str) -> Decision:
        if self._n_bytes + len(data) > MAX_LOG_BYTES:
            words = f"{key!r} in {url}: the decisions up to it have more than {MAX_LOG_BYTES} bytes."
            raise CorruptObjectError(words, key=key, url=url)
        entry = Decision.parse(data, key, url)
        self._n_bytes += len(data)
        is_proven = self._key is None or hmac.compare_digest(entry.proof or "", self._proof(data, key) or "")
        return entry if is_proven else entry.unproven(self._clock())

    def _proof(self, data: Any, key: str) -> str | None:
        """Return the proof of an entry under its key: of all that it says, also what only a later version reads."""
        if self._key is None:
            return None
        return proof_of_fields(self._key, "decision", key, json.loads(bytes(data)))


def is_blocked(log: Sequence[Decision], rank: int) -> bool:
    """Return whether a stop, or a cancel of this rank, stands: no resume of the rank came after it."""
    return blocking_order(log, rank) is not None


def blocking_order(log: Sequence[Decision], rank: int) -> Decision | None:
    """Return the stop, or the cancel of this rank, that stands: no resume of the rank came after it."""
    for entry in reversed(log):
        if entry.kind == "resume" and rank in entry.start:
            return None
        if entry.kind == "stop" or (entry.kind == "cancel" and entry.rank in (None, rank)):
            return entry
    return None


def decision_on(log: Sequence[Decision], rank: int, attempt: int) -> Decision | None:
    """Return what answers the end of an attempt: the entry that starts a later one of the rank, or gives it up."""
    for entry in reversed(log):
        if entry.start.get(rank, -1) > attempt:
            return entry
        if entry.kind == "resume" and rank in entry.start:
            return None  # what was decided before it no longer counts
        if entry.kind in ("give_up", "stop") and entry.rank == rank and (entry.ended or 0) >= attempt:
            return entry
    return None


def policy_of(log: Sequence[Decision], launched: Restarts | None) -> Restarts | None:
    """Return the policy that counts now: the last one in the log, else the launch's. None: nothing restarts."""
    for entry in reversed(log):
        if entry.kind == "policy" and entry.restarts is not None:
            # Readers ask whether there is a policy at all, so the one that answers no end is none to them.
            return None if (found := Restarts.parse(entry.restarts)).nothing else found
    return launched


def hang_of(log: Sequence[Decision], launched: HangLimits) -> HangLimits:
    """Return which limits on hanging count now: the last in the log, else the launch's."""
    for entry in reversed(log):
        if entry.kind == "policy" and entry.hang is not None:
            return HangLimits.parse(entry.hang)
    return launched


def extensions_of(log: Sequence[Decision]) -> dict[str, list[int]]:
    """Return the totals that a run was extended to, in their order, by what they count: steps and rounds."""
    totals: dict[str, list[int]] = {"total_steps": [], "total_rounds": []}
    for entry in log:
        for name, found in totals.items():
            total = getattr(entry, name)
            if entry.kind == "policy" and total is not None and total > max(found, default=0):
                found.append(total)
    return totals
