"""The log of decisions of a run: write-once records `decisions/<k>.json`, numbered from 0 without gaps.

Any process may decide, because a decision is computed from records that never change. The store creates entry k only
once, so the first writer wins. A process that lost computes its entry again, from the longer log.
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
from executors.settings.watch_rules import MAX_RULES, rule_text
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
    list_of,
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
MAX_DECISION_BYTES, MAX_LOG_BYTES = 512 << 10, 64 << 20  # parsed objects take eight times as much memory as these bytes
MAX_RANK, MAX_ATTEMPT = 10**6, 10_000
MAX_STARTS = 20_000  # ranks in one entry: a launch has at most 10,000, and more may be added
MAX_WORDS = 2000
MAX_TOTAL = 10**12  # the most steps or rounds of a run
MAX_TRIES = 1000  # tries to append one entry; in each try, another writer may be first
ENDING, OTHERS = ("give_up", "stop", "cancel"), ("restart", "resume", "policy")
UNPROVEN_FIELDS = ("rank", "ended", "why", "words", "within_s", "by", "nonce")
"""The fields of an entry that count without a proof. They only end ranks: they start nothing and change no rule."""


NUMBER = re.compile("0|[1-9][0-9]{0,6}")


def _attempts(value: Any) -> dict[int, int]:
    """Parse an object that maps ranks to numbers of attempts."""
    rank_of, attempt_of = integer(0, MAX_RANK), integer(0, MAX_ATTEMPT)
    found = json_object(value)
    if len(found) > MAX_STARTS or not all(NUMBER.fullmatch(rank) for rank in found):
        raise ValueError(f"an object from at most {MAX_STARTS} ranks to attempts")
    return {rank_of(int(rank)): attempt_of(attempt) for rank, attempt in found.items()}


def _numbers(value: Any) -> dict[str, float]:
    """Parse an object of finite numbers."""
    each = number()
    return {text(100)(name): each(number) for name, number in json_object(value).items()}


def _rules(value: Any) -> tuple[str, ...]:
    """Parse a list of rules."""
    found = list_of(parsed(rule_text))(value)
    if len(found) > MAX_RULES:
        raise ValueError(f"a list of at most {MAX_RULES} rules")
    return found


@dataclass(frozen=True, kw_only=True)
class Decision(Record):
    """One entry of the log."""

    kind: str = checked(one_of(*ENDING, *OTHERS))
    rank: int | None = checked(nullable(integer(0, MAX_RANK)), None)
    """The rank that the entry is about. None: the entry is about all ranks, or about no single rank."""
    ended: int | None = checked(nullable(integer(0, MAX_ATTEMPT)), None)
    """The number of the ended attempt that the entry decides on."""
    start: dict[int, int] = checked(_attempts, {})
    """The numbers of the attempts that a restart or a resume starts, by rank."""
    how: str | None = checked(nullable(text(40)), None)
    """The way of the start, as in "process", "fork", "launch" or "spare:0"."""
    charged: bool = checked(flag, False)
    """True if the restart counts against the budget."""
    strikes: int = checked(integer(0, MAX_ATTEMPT), 0)
    """The number of charged attempts of the rank in a row that made no progress."""
    not_before: float = checked(number(LONG_AGO, FAR_AHEAD), 0.0)
    """The Unix time before which the attempts do not start."""
    reason: str | None = checked(nullable(text(40)), None)
    """The reason of the outcome that the entry decides on, as in "exception"."""
    exit_code: int | None = checked(nullable(integer(-(2**31), 2**31)), None)
    fingerprint: str | None = checked(nullable(text(100)), None)
    """The same for two ends by the same error at the same place."""
    reached: dict[str, float] = checked(_numbers, {})
    """The `round` and the `step` that the ended attempt reported last."""
    has_saved_marks: bool = checked(flag, False)
    """True if the ended attempt left work that the next attempt need not repeat."""
    why: str = checked(text(MAX_WORDS), "")
    """The rule behind a give_up or a stop: `deterministic`, `no_progress`, `budget`, `refused`, `min_replicas`, `asked`
    or `not_started`."""
    words: str = checked(text(MAX_WORDS), "")
    """The end in a few words, for the user."""
    within_s: float | None = checked(nullable(number(0.0, FAR_AHEAD)), None)
    """The seconds that replicas have to end by themselves after a stop that the user asked for."""
    restarts: str | None = checked(nullable(parsed(Restarts.parse)), None)
    """The new restart policy of an entry of kind `policy`."""
    hang: str | None = checked(nullable(parsed(HangLimits.parse)), None)
    """The new limits on hanging of an entry of kind `policy`."""
    rules: Sequence[str] | None = checked(nullable(_rules), None)
    """The new rules of an entry of kind `policy`, as `--rule` takes them. They are in force for
    processes that start later. Empty: no rules.
    """
    total_steps: int | None = checked(nullable(integer(1, MAX_TOTAL)), None)
    """The planned steps of the run after a policy that extends it."""
    total_rounds: int | None = checked(nullable(integer(1, MAX_TOTAL)), None)
    """The planned rounds, if the rounds of the run go by the clock."""
    by: str = checked(text(1000), "")
    process: str | None = checked(nullable(text(600, IDENTITY)), None)
    """The process that is about to start the attempts of a resume, as `identify_process` names it."""
    nonce: str = checked(text(100), "")
    at: float = checked(number(LONG_AGO, FAR_AHEAD), 0.0)
    """The Unix time of the entry, by its writer's clock. Among proven entries, the times never decrease.
    """
    proof: str | None = checked(nullable(text(64, SHA256)), None)
    """In a signed run, the proof that the writer of the entry has the run's key."""

    @property
    def wait_s(self) -> float:
        """The seconds that the entry's attempts had to wait at the time of the decision."""
        return max(0.0, self.not_before - self.at)

    @property
    def is_orphaned(self) -> bool:
        """True if the process that was about to start the entry's attempts is known to have ended."""
        return self.process is not None and has_ended(self.process)

    def left_s(self, now: float) -> float:
        """Return the seconds that the entry's attempts still have to wait, at most the wait at the time of the
        decision.

        Args:
            now: Unix time, by a clock that may differ from the writer's.
        """
        return min(max(0.0, self.not_before - now), self.wait_s)

    def to_bytes(self) -> bytes:
        """Return the entry as it is stored: one line of JSON."""
        return to_bytes({**vars(self), "start": {str(rank): number for rank, number in self.start.items()}})

    def unproven(self, now: float) -> Decision:
        """Return the part of an entry that counts without a proof. Such an entry can end ranks, but never start any.

        Args:
            now: Unix time. An unproven entry cannot be from the future.
        """
        if self.kind not in ENDING:
            # An empty policy keeps the entry's place in the log and has no effect.
            return Decision(kind="policy", by=self.by, at=min(self.at, now))
        fields = {name: getattr(self, name) for name in UNPROVEN_FIELDS}
        return Decision(kind=self.kind, **fields, at=min(self.at, now))


class DecisionLog:
    """The log of one run, as far as this process has read it.

    Args:
        store: the store of the run.
        run_id: the run.
        clock: returns Unix time in seconds. Default: the system's clock.
        key: the key of a signed run. Default None: all entries count, but other processes treat the entries that this
            process adds as unproven.
        n_skipped: the number of entries at the begin of the log that are not read. Then no entry can be added. Default
            0.
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
        """The size of all entries that were read."""
        self._n_at_end = 0
        """The number of entries that had been read when the end of the log was last reached."""
        self._ahead: dict[int, memoryview | StoreError | None] = {}
        """Entries that were fetched together and are not parsed yet, by index: the bytes, the error of the read, or
        None if there is no such entry."""

    def key(self, index: int) -> str:
        """Return the key of an entry in the store."""
        return f"{self.run_id}/decisions/{index:06d}.json"

    def read(self) -> Sequence[Decision]:
        """Read the entries that were added since the last read, and return all entries.

        Raises:
            StoreError: the store does not answer, or holds an entry that cannot be parsed. Entries before it are kept.
        """
        self.read_for(math.inf)
        return self.entries

    def read_for(self, limit_s: float) -> bool:
        """Read entries for a limited time. Return True if the end of the log was reached.

        The next call continues after the last entry that was read.

        Args:
            limit_s: the limit in seconds. At least one entry is read.

        Raises:
            StoreError: the store does not answer, or holds an entry that cannot be parsed.
        """
        until = time.monotonic() + limit_s
        self._ahead = {}  # an entry that did not exist at the last read may exist now
        while (entry := self._find(self._n_skipped + len(self.entries))) is not None:
            self.entries.append(entry)
            if not self._ahead and time.monotonic() >= until:
                return False
        self._ahead = {}
        self._n_at_end = len(self.entries)
        return True

    def take_over(self, other: DecisionLog) -> None:
        """Copy the entries that another log object of the same run has read.

        Args:
            other: the other log. If it has another key, nothing is taken over, because it judges proofs differently.
        """
        if self._key == other._key and len(other.entries) > len(self.entries):
            self.entries += other.entries[len(self.entries) :]
            self._n_at_end, self._n_bytes = len(self.entries), max(self._n_bytes, other._n_bytes)

    def append(self, compute: Callable[[Sequence[Decision]], Decision | None]) -> Decision | None:
        """Add an entry that is computed from the whole log before it.

        Args:
            compute: returns the entry to add, given all entries, or None to add none. It is called again whenever
                another process has added an entry first. It need not set `nonce`, `by` and `at`.

        Returns: the entry as it was added. None: `compute` returned None.

        Raises:
            StoreError: the store does not answer. The entry may have been added.
        """
        assert not self._n_skipped, "an entry is computed from the whole log"
        begin, nonce = len(self.entries), os.urandom(8).hex()
        for _ in range(MAX_TRIES):
            self.read()
            for standing in self.entries[begin:]:
                if standing.nonce == nonce:  # an earlier try wrote the entry, but its reply was lost
                    return standing
            entry = compute(self.entries)
            if entry is None:
                return None
            index, last_at = len(self.entries), self.entries[-1].at if self.entries else 0.0
            entry = replace(entry, nonce=nonce, by=this_process(), at=max(self._clock(), last_at))
            data = replace(entry, proof=self._proof(entry.to_bytes(), self.key(index))).to_bytes()
            problem: StoreError | None = None
            check_size(self.key(index), self.store.url, len(data), MAX_DECISION_BYTES)
            Decision.parse(data, self.key(index))  # an entry that no reader can parse would be the end of the log
            try:
                self.store.put_if_absent(self.key(index), data)
            except StoreError as error:  # the entry may have been written: only a read shows which entry exists
                problem = error
            if len(retry(self.read)) == index and problem is not None:
                raise problem
        raise StoreError(
            f"No decision could be added to run {self.run_id!r}: another process was first in all of {MAX_TRIES} tries."
        )

    def _find(self, index: int) -> Decision | None:
        if index not in self._ahead:
            self._ahead = self._ask_from(index)
        data = self._ahead.pop(index)
        if isinstance(data, StoreError):
            raise data
        return None if data is None else self._parse(data, self.key(index), self.store.url)

    def _ask_from(self, index: int) -> dict[int, memoryview | StoreError | None]:
        """Fetch the next entry, which usually does not exist.

        At a far store a long log would take one round trip per entry. So the number of entries that are fetched
        together doubles with each fetch that finds them all. Errors of reads beyond the end of the log are ignored.
        """
        n_found = len(self.entries) - self._n_at_end
        if self._is_near or n_found < 2:
            return {index: self._get(index)}
        # imported only here, because threads need modules that few replicas use
        from executors.store.parallel import MAX_THREADS, at_store

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
        """Return the proof of an entry at its place in the log. The proof also covers fields that only later versions
        know.
        """
        if self._key is None:
            return None
        return proof_of_fields(self._key, "decision", key, json.loads(bytes(data)))


def is_blocked(log: Sequence[Decision], rank: int) -> bool:
    """Return True if a stop, or a cancel of the rank, blocks a rank: no resume of the rank came after it.

    Args:
        log: the entries of the log.
        rank: the rank.
    """
    return blocking_order(log, rank) is not None


def blocking_order(log: Sequence[Decision], rank: int) -> Decision | None:
    """Return the stop or cancel that blocks a rank. None: there is none, or a resume of the rank came after it.

    Args:
        log: the entries of the log.
        rank: the rank.
    """
    for entry in reversed(log):
        if entry.kind == "resume" and rank in entry.start:
            return None
        if entry.kind == "stop" or (entry.kind == "cancel" and entry.rank in (None, rank)):
            return entry
    return None


def decision_on(log: Sequence[Decision], rank: int, attempt: int) -> Decision | None:
    """Return the entry that decided on the end of an attempt: it starts a later attempt of the rank, or gives the
    rank up.

    Args:
        log: the entries of the log.
        rank: the rank.
        attempt: the number of the ended attempt.

    Returns: the entry. None: no process has decided yet.
    """
    for entry in reversed(log):
        if entry.start.get(rank, -1) > attempt:
            return entry
        if entry.kind == "resume" and rank in entry.start:
            return None  # a resume resets the decisions before it
        if entry.kind in ("give_up", "stop") and entry.rank == rank and (entry.ended or 0) >= attempt:
            return entry
    return None


def policy_of(log: Sequence[Decision], launched: Restarts | None) -> Restarts | None:
    """Return the restart policy in force: the last one in the log, otherwise the launch's policy.

    Args:
        log: the entries of the log.
        launched: the policy of the launch.

    Returns: the policy. None: nothing restarts.
    """
    for entry in reversed(log):
        if entry.kind == "policy" and entry.restarts is not None:
            # Callers test for None to know whether anything restarts, so a policy that restarts nothing becomes None.
            return None if (found := Restarts.parse(entry.restarts)).nothing else found
    return launched


def hang_of(log: Sequence[Decision], launched: HangLimits) -> HangLimits:
    """Return the limits on hanging in force: the last ones in the log, otherwise the launch's limits.

    Args:
        log: the entries of the log.
        launched: the limits of the launch.
    """
    for entry in reversed(log):
        if entry.kind == "policy" and entry.hang is not None:
            return HangLimits.parse(entry.hang)
    return launched


def rules_of(log: Sequence[Decision], launched: Sequence[str]) -> tuple[str, ...]:
    """Return the rules of attempts that start now: the last ones in the log, otherwise the launch's rules.

    Args:
        log: the entries of the log.
        launched: the rules of the launch.
    """
    for entry in reversed(log):
        if entry.kind == "policy" and entry.rules is not None:
            return tuple(entry.rules)
    return tuple(launched)


def extensions_of(log: Sequence[Decision]) -> dict[str, list[int]]:
    """Return the totals that a run was extended to, oldest first.

    Args:
        log: the entries of the log.

    Returns: two lists of totals, under `total_steps` and `total_rounds`.
    """
    totals: dict[str, list[int]] = {"total_steps": [], "total_rounds": []}
    for entry in log:
        for name, found in totals.items():
            total = getattr(entry, name)
            if entry.kind == "policy" and total is not None and total > max(found, default=0):
                found.append(total)
    return totals
