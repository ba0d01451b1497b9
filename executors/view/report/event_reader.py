"""Builds the list of a run's events from its records: launches, claims, hangs, ends, decisions and warnings.

Each replica also writes its warnings into the record `warnings.json` of its attempt, which is read here.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypedDict, TypeVar

from executors.attempt import Attempt, Claim, Intent
from executors.attempt.outcome import says_alive
from executors.attempt.rule_record import find_finding
from executors.attempt.warning_record import NAME as WARNINGS
from executors.attempt.warning_record import RecordedWarnings
from executors.errors import CorruptObjectError, StoreError
from executors.protocol import Outcome, ReplicaStatus
from executors.restarts.decision_log import Decision, DecisionLog
from executors.restarts.decision_text import RestartTally, describe_decision
from executors.settings.policy import Restarts
from executors.settings.rule_finding import RuleFinding
from executors.status import FoundWarning, RunStatus
from executors.store import Store
from executors.store.inventory import Inventory
from executors.store.record_names import CLAIM, INTENT
from executors.store.records import FAR_AHEAD, find_record, get_at_most, number
from executors.task.notice_record import read_failures
from executors.task.record import RunRecord

KINDS = (
    "launched", "claimed", "first_progress", "warning", "hang_suspected", "stacks", "works_again", "notice", "ended",
    "rule_broken", "decided", "cancelled", "gave_up", "stopped", "finished",
)  # fmt: skip
USUAL = ("launched", "claimed", "first_progress", "finished")
OF_DECISIONS = {"cancel": "cancelled", "give_up": "gave_up", "stop": "stopped"}
# Names of lines in segments that the training code did not report itself.
NO_PROGRESS = ("rss", "left_with", "left_out")
SEGMENT_BYTES = 4 << 20
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0  # seconds between two reads that search the first report of an attempt
SUSPICION_S = 10.0  # stack dumps with less than this time between them belong to one suspected hang
MORE = "more warnings of this attempt are in its log only."
HEAD_BYTES = 2000  # the start of a dump, which contains its diagnosis in the first line
MAX_DUMP_BYTES = 4 << 20
T = TypeVar("T")
R = TypeVar("R")


class EventDocument(TypedDict):
    """One event as plain JSON."""

    kind: str
    """The kind: `launched`, `claimed`, `first_progress`, `warning`, `hang_suspected`, `stacks`, `works_again`,
    `notice`, `ended`, `rule_broken`, `decided`, `cancelled`, `gave_up`, `stopped` or `finished`."""
    at: float
    """The time in Unix time, by the clock of the process that recorded the event."""
    rank: int | None
    """The rank. Null: the event concerns the whole run."""
    attempt: int | None
    """The number of the attempt, from 0. Null: the event concerns no attempt."""
    actor: str
    """The process or host that caused or noticed the event. Empty: not known."""
    reason: str | None
    """The reason of an end, or of the end that a decision follows. Null: success, or no end."""
    why: str
    """An explanation. Empty: there is none."""
    duration_s: float | None
    """Seconds: the life of an attempt, the time to its first progress, the wait before a restart, or the run's time."""
    count: int
    """The number of times that the event had happened when it was read. Only warnings come several times."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """One event of a run, or of one attempt of a rank.

    Example:
        [event.rank for event in run.events() if event.kind == "ended"]
        lines = [json.dumps(event.to_json()) for event in run.events()]
    """

    kind: str
    """One of `KINDS`."""
    at: float
    """Unix time, by the clock of the process that recorded it."""
    rank: int | None = None
    """The rank. None: the event concerns the whole run."""
    attempt: int | None = None
    """The number of the attempt, from 0. None: the event concerns no single attempt."""
    actor: str = ""
    """The process or host that caused or noticed the event."""
    reason: str | None = None
    """The reason of an end, or of the end that a decision follows."""
    why: str = ""
    """An explanation for the user."""
    duration_s: float | None = None
    """Seconds: the life of an attempt, the time to its first progress, the wait before a restart, or the run's time."""
    count: int = 1
    """The number of times that the event had happened when it was read. Only warnings come several times."""

    @property
    def is_usual(self) -> bool:
        """True if runs without failures also have such events."""
        return self.kind in USUAL or (self.kind == "ended" and self.reason == "succeeded")

    def to_json(self) -> EventDocument:
        """Return all fields of the event as plain JSON."""
        return {
            "kind": self.kind,
            "at": self.at,
            "rank": self.rank,
            "attempt": self.attempt,
            "actor": self.actor,
            "reason": self.reason,
            "why": self.why,
            "duration_s": self.duration_s,
            "count": self.count,
        }


class EventReader:
    """Makes events from the records of a run. It reads each record once.

    Args:
        log: the run's decision log. It is read when it is needed.
        record: the record of the run.
        map_over: applies a function to several items and returns the results. It works in parallel threads if the store
            is remote.
        note: called with a message for each record that cannot be read.
        clock: returns the seconds of a monotonic clock.
    """

    def __init__(
        self,
        log: DecisionLog,
        record: RunRecord,
        *,
        map_over: Callable[[Callable[[T], R], Iterable[T]], list[R]],
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = log.store
        self._run_id = log.run_id
        self._record = record
        self._map: Any = map_over
        self._note = note
        self._clock = clock
        self.log = log
        """The decision log, as far as it was read."""
        self._n_decisions = 0
        self._earlier = RestartTally(Restarts.of(record.settings.restarts))
        """Counts the restarts among the decisions that were yielded."""
        self._seen = set[tuple[Any, ...]]()
        self._claimed = dict[tuple[int, int], float]()
        self._ask = defaultdict[tuple[int, int], tuple[float, float]](lambda: (0.0, FIRST_PAUSE_S))
        """The time of the next search for a first report, and the pause after that search, by rank and attempt."""
        self._has_yielded_launch = False
        self._read_warnings = dict[tuple[int, int], tuple[float, int]]()
        """The version of `warnings.json` that was read last, by rank and attempt."""

    def new(self, inventory: Inventory, now: RunStatus) -> list[Event]:
        """Return the events since the last call, ordered by time.

        Args:
            inventory: the current list of the replicas' records.
            now: the status of the run, which must not be newer than `inventory`.
        """
        record, found = self._record, list[Event]()
        if not self._has_yielded_launch:
            self._has_yielded_launch = True
            why = ", ".join(f"{len(place.ranks)} on {place.backend}" for place in record.placements)
            found.append(Event(kind="launched", at=record.created_at, actor=record.created_by, why=why))
        # Claims come before outcomes, because the duration of an attempt is counted from its claim.
        for name, read in (("intent", self._intent), ("started", self._claim), ("outcome", self._end)):
            keys = sorted(each for each in inventory.records if each[2] == name and each not in self._seen)
            found += self._read(read, {key: Attempt(self._store, self._run_id, *key[:2]) for key in keys})
        found += self._first_progress(inventory)
        found += self._hangs(inventory)
        found += self._warnings(inventory)
        found += self._rules(inventory)
        found += self._decisions()
        found.sort(key=lambda event: event.at)
        if now.is_terminal:
            found += [event_of_warning(each) for each in now.warnings if each.rank is None]
            if record.settings.notify_on is not None:
                found += self._failed_notices()
            at = max([now.last_at, *(entry.at for entry in self.log.entries[-1:])])
            took_s, status = max(0.0, at - record.created_at), str(now.status)
            found.append(Event(kind="finished", at=at, reason=status, why=now.counts, duration_s=took_s))
        return found

    def _read(self, read: Callable[[T], list[Event] | None], items: Mapping[tuple[Any, ...], T]) -> Iterator[Event]:
        """Yield the events in some records, and note the records as seen.

        A record that the store does not return now is not noted, so a later call reads it. A damaged record stays
        damaged.

        Args:
            read: returns the events in a record. None: a later call must read it again.
            items: the arguments of `read`, by the names under which the records are noted.
        """

        def read_or_note(name: tuple[Any, ...]) -> list[Event] | None:
            try:
                return read(items[name])
            except StoreError as error:
                self._note(str(error))
                return [] if isinstance(error, CorruptObjectError) else None

        for name, events in zip(items, self._map(read_or_note, items), strict=True):
            if events is not None:
                self._seen.add(name)
                yield from events

    def _intent(self, attempt: Attempt) -> list[Event]:
        intent = attempt.find(INTENT, Intent.parse)
        is_of_launch = attempt.number == 0 and attempt.rank < self._record.world_size
        if intent is None or is_of_launch:  # the launch has an event of its own
            return []
        return [Event(kind="launched", at=intent.at, rank=attempt.rank, attempt=attempt.number, actor=intent.by)]

    def _claim(self, attempt: Attempt) -> list[Event]:
        claim = attempt.find(CLAIM, Claim.parse)
        if claim is None or claim.at is None:
            return []
        self._claimed[attempt.rank, attempt.number] = claim.at
        actor = claim.host if claim.pid is None else f"{claim.host}:{claim.pid}"
        return [Event(kind="claimed", at=claim.at, rank=attempt.rank, attempt=attempt.number, actor=actor)]

    def _end(self, attempt: Attempt) -> list[Event]:
        outcome = attempt.outcome()
        return [] if outcome is None else events_of_end(outcome, self._claimed.get((attempt.rank, attempt.number)))

    def _first_progress(self, inventory: Inventory) -> Iterator[Event]:
        """Yield the event of the first report of each attempt.

        The first segment has this report, some seconds after it was made.
        """
        waiting = [key for key in self._claimed if ("progress", *key) not in self._seen]
        over, now = {key for key in waiting if inventory.has(*key, "outcome")}, self._clock()
        waiting = [key for key in waiting if key in over or self._ask[key][0] <= now]
        for key in waiting:  # the pauses grow, because this reads an attempt that never reports until its end
            pause_s = self._ask[key][1]
            self._ask[key] = now + pause_s, min(2 * pause_s, LONGEST_PAUSE_S)

        def read(key: tuple[int, int]) -> list[Event] | None:
            after_s = self._seconds_to_progress(*key)
            if after_s is None:
                return [] if key in over else None
            at = self._claimed[key] + after_s
            return [Event(kind="first_progress", at=at, rank=key[0], attempt=key[1], duration_s=after_s)]

        return self._read(read, {("progress", *key): key for key in waiting})

    def _seconds_to_progress(self, rank: int, attempt: int) -> float | None:
        key = f"{self._run_id}/metrics/{rank:04d}/{attempt}/000000.jsonl"
        found = find_record(self._store, key, lambda data, *_: progress_in(data), SEGMENT_BYTES)
        return None if found is None else next(found, None)

    def _hangs(self, inventory: Inventory) -> Iterator[Event]:
        before: tuple[int, int, int, float] | None = None
        new = dict[tuple[Any, ...], tuple[int, int, int, float, bool]]()
        for dump in sorted(inventory.stacks):
            is_next = before is not None and before[:2] == dump[:2] and dump[3] - before[3] < SUSPICION_S
            before = dump
            if ("stacks", *dump[:3]) not in self._seen:
                new["stacks", *dump[:3]] = (*dump, not is_next)

        def read(dump: tuple[int, int, int, float, bool]) -> list[Event]:
            rank, attempt, number, at, is_first = dump
            where = Attempt(self._store, self._run_id, rank, attempt)
            diagnosis = read_stacks(where, number)[:HEAD_BYTES].partition("\n")[0]
            if says_alive(diagnosis):
                return [Event(kind="works_again", at=at, rank=rank, attempt=attempt, why=diagnosis)]
            event = Event(kind="stacks", at=at, rank=rank, attempt=attempt, why=f"stacks/{number}.txt")
            return [*([replace(event, kind="hang_suspected", why=diagnosis)] if is_first else []), event]

        return self._read(read, new)

    def _warnings(self, inventory: Inventory) -> Iterator[Event]:
        """Yield an event for each new warning text. A record is read again only if it has changed."""
        fresh = sorted(key for key, version in inventory.warnings.items() if self._read_warnings.get(key) != version)

        def read(key: tuple[int, int]) -> list[Event]:
            try:
                found = [event_of_warning(each) for each in read_warnings(Attempt(self._store, self._run_id, *key))]
            except CorruptObjectError:  # it is read again only if it changes
                self._read_warnings[key] = inventory.warnings[key]
                raise
            self._read_warnings[key] = inventory.warnings[key]
            return found

        for event in self._read(read, {("warnings", *key): key for key in fresh}):
            # the same text may come again, with a larger number at its beginning
            text = MORE if event.why.endswith(MORE) else event.why
            identity = ("warning", event.rank, event.attempt, text)
            if identity not in self._seen:
                self._seen.add(identity)
                yield event

    def _rules(self, inventory: Inventory) -> Iterator[Event]:
        """Yield an event for each new record about a rule."""
        new = sorted(key for key in inventory.rules if ("rule", *key) not in self._seen)

        def read(key: tuple[int, int, int, bool]) -> list[Event]:
            found = find_finding(self._store, self._run_id, key)
            return [] if found is None else [event_of_rule(found)]

        return self._read(read, {("rule", *key): key for key in new})

    def _failed_notices(self) -> list[Event]:
        try:
            return [event_of_warning(each) for each in read_failed_notices(self._store, self._run_id)]
        except StoreError as error:
            self._note(str(error))
            return []

    def _decisions(self) -> Iterator[Event]:
        try:
            log = self.log.read()
        except StoreError as error:
            self._note(str(error))
            return
        for entry in log[self._n_decisions :]:
            yield event_of_decision(entry, describe_decision(entry, self._earlier, self._run_id))
            self._earlier.add(entry)
        self._n_decisions = len(log)


def read_warnings(attempt: Attempt) -> list[FoundWarning]:
    """Return the different warnings of an attempt, ordered by the time of their first occurrence. Empty if there are
    none.

    Args:
        attempt: an attempt of any run. Its record is untrusted, so its size and types are checked.

    Raises:
        StoreError: the record cannot be read.
    """
    kept = attempt.find(WARNINGS, RecordedWarnings.parse)
    if kept is None:
        return []
    place: Any = {"rank": attempt.rank, "attempt": attempt.number}
    found = [FoundWarning(text=each.text, at=each.at, count=each.count, **place) for each in kept.warnings]
    if kept.left_out:
        at = max((each.last_at for each in kept.warnings), default=0.0)
        found.append(FoundWarning(text=f"{kept.left_out} {MORE}", at=at, **place))
    return found


def read_failed_notices(store: Store, run_id: str) -> list[FoundWarning]:
    """Return a warning for each notification that could not be sent.

    Args:
        store: the store of the run.
        run_id: the run.

    Raises:
        StoreError: the store cannot be read.

    Example:
        [each.text for each in read_failed_notices(store, "brave-otter-7f3a")]
    """
    return [
        FoundWarning(text=f"A notification ({notice_id}) could not be sent. {words}.", at=result.at)
        for notice_id, result in read_failures(store, run_id)
        for words in result.failures
    ]


def event_of_rule(found: RuleFinding) -> Event:
    """Return the event of a broken rule, or the warning about a rule that could not be judged.

    Args:
        found: the record.
    """
    kind = "rule_broken" if found.is_broken else "warning"
    return Event(kind=kind, at=found.at, rank=found.rank, attempt=found.attempt, why=found.sentence)


def event_of_warning(found: FoundWarning) -> Event:
    """Return the event of a warning."""
    return Event(kind="warning", at=found.at, rank=found.rank, attempt=found.attempt, why=found.text, count=found.count)


def events_of_end(outcome: Outcome, claimed_at: float | None = None) -> list[Event]:
    """Return the events of an attempt's end. If a service announced the end, the announcement is an event of its own.

    Args:
        outcome: the outcome of the attempt.
        claimed_at: Unix time of its claim, from which the duration counts. None: it counts from the start in the
            outcome.
    """
    began_at = outcome.started_at if claimed_at is None else claimed_at
    has_ended = outcome.status is ReplicaStatus.SUCCEEDED
    end = Event(
        kind="ended",
        at=outcome.finished_at,
        rank=outcome.rank,
        attempt=outcome.attempt,
        actor=outcome.host,
        reason=str(outcome.status) if has_ended else outcome.reason or str(outcome.status),
        why=outcome.headline,
        duration_s=None if began_at is None else max(0.0, outcome.finished_at - began_at),
    )
    if outcome.notice is None:
        return [end]
    return [replace(end, kind="notice", reason=outcome.notice, why="", duration_s=None), end]


def event_of_decision(entry: Decision, words: str) -> Event:
    """Return the event of an entry in the decision log.

    Args:
        entry: the entry.
        words: the sentence that describes the entry.
    """
    return Event(
        kind=OF_DECISIONS.get(entry.kind, "decided"),
        at=entry.at,
        rank=entry.rank,
        attempt=entry.ended,
        actor=entry.by,
        reason=entry.reason,
        why=words,
        duration_s=entry.wait_s if entry.kind == "restart" else None,
    )


def read_stacks(attempt: Attempt, number: int) -> str:
    """Return one stack dump of an attempt. Its first line is the diagnosis.

    Args:
        attempt: the attempt.
        number: the number of the dump within the attempt.

    Raises:
        StoreError: the dump cannot be read.
    """
    key = attempt.key(f"stacks/{number}.txt")
    return bytes(get_at_most(attempt.store, key, MAX_DUMP_BYTES)).decode(errors="replace")


def progress_in(segment: Any) -> Iterator[float]:
    """Yield the times at which the training code reported something, in seconds since the claim.

    Args:
        segment: the bytes of a segment of measurements.
    """
    return (t for t, is_progress in lines_in(segment) if is_progress)


def lines_in(segment: Any) -> Iterator[tuple[float, bool]]:
    """Yield the time of each line in seconds since the claim, and True if the training code reported the line.

    Args:
        segment: the bytes of a segment of measurements.
    """
    for text in bytes(segment).splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            line = json.loads(text)
            if isinstance(line, dict):
                yield number(0.0, FAR_AHEAD)(line.get("t")), not any(name in line for name in NO_PROGRESS)
