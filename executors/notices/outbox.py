"""Sends each notice once, among all processes that see it, and again if the sender has died.

A process creates `notices/<id>.json` before it sends, so one process sends. After the send it creates
`notices/<id>.sent.json`. A claim without that result for a minute, or whose process is known to have ended, is taken
over with `notices/<id>.1.json`, and so on. So a message may come twice, and is not lost while any process lives.

Each rank gets one message a minute. Notices that wait are joined into the next message, which names and counts them.
The end of the run does not wait, and joins everything that does.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from executors.errors import CorruptObjectError, StoreError
from executors.process import has_ended, identify_process, this_process
from executors.settings.notify import KINDS
from executors.store import Store
from executors.store.record_names import run_folder_was_deleted
from executors.store.records import find_record
from executors.store.staleness import StalenessTracker
from executors.store.url import address_of
from executors.task.notice_record import (
    MAX_ALSO,
    MAX_TRIES,
    Notice,
    NoticeClaim,
    NoticeResult,
    as_document,
    notice_key,
    notices_prefix,
    parse_name,
    shorten,
)

MINUTE_S = 60.0
"""The least time between two messages about a rank."""
DEAD_S = 60.0
"""After this time a claim without a result is taken over, if the sender is on another machine."""
LIST_S = 30.0  # between two lists of claims if this process itself has nothing to send


@dataclass
class _Sending:
    """A message that a thread is sending."""

    claim: NoticeClaim
    began: float
    failures: list[str] | None = None
    """The result. None: the thread is not done."""


def _urgency(notice: Notice) -> tuple[int, float]:
    """Return the place of a notice in a message. The first one is the subject."""
    return [*KINDS].index(notice.kind), -notice.at


class Outbox:
    """Claims notices, sends them in threads, and records the results. One thread calls all methods.

    Args:
        store: the store of the run.
        run_id: the run.
        send: sends a message, and returns a sentence for each URL that failed. It runs in a thread of its own.
        limit_s: the seconds after which a message that is still being sent counts as failed.
        on_failure: called with each sentence about a message that could not be sent. Default: nothing is called.
        clock: returns the seconds of a monotonic clock. Default: the system's clock.
        now: returns Unix time. Default: the system's clock.

    Example:
        outbox = Outbox(store, "brave-otter-7f3a", send)
        outbox.offer(notices)
        outbox.advance()
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        send: Callable[[Mapping[str, Any]], list[str]],
        *,
        limit_s: float = 30.0,
        on_failure: Callable[[str], None] = lambda words: None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._send = send
        self._limit_s = limit_s
        self._on_failure = on_failure
        self._clock = clock
        self._now = now
        self._me = identify_process()
        self._waiting: dict[str, Notice] = {}
        self._claims: dict[str, dict[int, NoticeClaim | None]] = defaultdict(dict)
        """The claims by id and number. None: the record is damaged."""
        self._covered = set[str]()
        """The ids that the message of another claim counts."""
        self._done = set[str]()
        """The ids with a result."""
        self._sending: dict[str, _Sending] = {}
        self._unrecorded: dict[str, NoticeResult] = {}
        """Results that the store has not taken yet."""
        self._stale = StalenessTracker(clock)
        self._listed_at = -LIST_S

    def offer(self, notices: Iterable[Notice]) -> None:
        """Note notices that must be sent, unless another process sends them.

        Args:
            notices: the notices. Those that were offered before are ignored.
        """
        for notice in notices:
            if not self._is_claimed(notice.id):
                self._waiting.setdefault(notice.id, notice)

    @property
    def is_idle(self) -> bool:
        """True if nothing waits, nothing is being sent, and no claim of any process is without its result."""
        return not (self._waiting or self._sending or self._unrecorded or self._open_ids())

    @property
    def has_own_work(self) -> bool:
        """True if this process must still send or record something itself."""
        return bool(self._waiting or self._sending or self._unrecorded)

    def advance(self, *, is_last: bool = False) -> None:
        """Do everything that is due: read new claims, claim and send, take over, record results.

        Args:
            is_last: True: notices that wait for their minute are sent now, because this process ends. Default False.

        Raises:
            StoreError: the store does not answer. The next call continues.
        """
        self._collect()
        if not (self._waiting or self._open_ids()) and self._clock() - self._listed_at < LIST_S:
            return
        self._read_claims()
        for group in self._due_groups(is_last):
            self._claim(group)
        self._take_over()
        self._collect()

    # Reading

    def _is_claimed(self, notice_id: str) -> bool:
        return notice_id in self._done or notice_id in self._covered or notice_id in self._claims

    def _open_ids(self) -> list[str]:
        return [each for each in self._claims if each not in self._done]

    def _read_claims(self) -> None:
        for entry in self._store.list(notices_prefix(self._run_id)):
            name = parse_name(self._store.url, self._run_id, entry.key)
            if name is None:
                continue
            notice_id, number, is_result = name
            if is_result:
                self._done.add(notice_id)
            elif number not in self._claims[notice_id]:
                try:
                    claim = find_record(self._store, entry.key, NoticeClaim.parse)
                except CorruptObjectError:
                    claim = None
                self._claims[notice_id][number] = claim
                self._covered.update(() if claim is None else claim.also)
        self._listed_at = self._clock()
        self._waiting = {name: each for name, each in self._waiting.items() if not self._is_claimed(name)}

    # Claiming

    def _due_groups(self, is_last: bool) -> list[list[Notice]]:
        """Return the groups of notices that are each sent as one message now."""
        groups: dict[int | None, list[Notice]] = defaultdict(list)
        for notice in self._waiting.values():
            if notice.kind != "end":
                groups[notice.rank].append(notice)
        now = self._now()
        due = [rank for rank in groups if is_last or now >= self._next_at(rank, now)]
        found = [sorted(groups.pop(rank), key=_urgency) for rank in due]
        ends = sorted((each for each in self._waiting.values() if each.kind == "end"), key=lambda each: -each.at)
        if ends:
            found.append([*ends, *(each for group in groups.values() for each in group)])
        return found

    def _next_at(self, rank: int | None, now: float) -> float:
        """Return the Unix time from which a rank may get its next message."""
        sent = [
            claim.claimed_at
            for claims in self._claims.values()
            for claim in claims.values()
            # A sender with a wrong clock must not delay messages.
            if claim is not None and claim.rank == rank and claim.claimed_at <= now + MINUTE_S
        ]
        return max(sent) + MINUTE_S if sent else 0.0

    def _claim(self, group: Sequence[Notice]) -> None:
        first, *others = group[: MAX_ALSO + 1]
        also = tuple(each.id for each in others)
        claim = self._new_claim(first, also, self._with_others(first, others))
        for each in (first, *others):
            self._waiting.pop(each.id, None)
        try:
            is_mine = self._create(claim, 0)
        except StoreError:
            # The claim may exist. If it does, it has the name of this process, and `_take_over` sends it.
            for each in (first, *others):
                self._waiting.setdefault(each.id, each)
            raise
        if is_mine:
            if others:
                claim = self._without_claimed(claim, first, others)
            self._start(claim)
            return
        # Another process was first, and its message may not count the same notices.
        for each in others:
            self._waiting.setdefault(each.id, each)

    def _new_claim(self, notice: Notice, also: Sequence[str], words: str) -> NoticeClaim:
        values = {**as_document(notice), "text": words}
        return NoticeClaim(**values, claimed_at=self._now(), also=also, by=this_process(), process=self._me)

    def _without_claimed(self, claim: NoticeClaim, first: Notice, others: Sequence[Notice]) -> NoticeClaim:
        """Return a claim that does not count notices for which another process sends a message of their own.

        The other process may have claimed such a notice after this process read the claims.
        """
        self._read_claims()
        left = [each for each in others if each.id not in self._claims]
        return replace(claim, also=tuple(each.id for each in left), text=self._with_others(first, left))

    @staticmethod
    def _with_others(first: Notice, others: Sequence[Notice]) -> str:
        """Return the text of a message that also counts other notices."""
        if not others:
            return first.text
        kinds: dict[str, int] = {}
        for each in others:
            kinds[each.kind] = kinds.get(each.kind, 0) + 1
        n = len(others)
        names = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        return shorten(f"{first.text} And {n} more event{'s' * (n != 1)} since the last message: {names}.")

    def _create(self, claim: NoticeClaim, number: int) -> bool:
        if run_folder_was_deleted(self._store, self._run_id):
            return False
        key = notice_key(self._store.url, self._run_id, claim.id, number)
        is_mine = self._store.put_if_absent(key, claim.to_bytes())
        if is_mine:
            self._claims[claim.id][number] = claim
            self._covered.update(claim.also)
        return is_mine

    def _take_over(self) -> None:
        """Send the notices whose senders have died."""
        for notice_id in self._open_ids():
            claims = self._claims[notice_id]
            number = max(claims)
            claim = claims[number]
            unchanged_s = self._stale.note(notice_id, number)
            if claim is None or notice_id in self._sending or notice_id in self._unrecorded:
                continue
            if claim.process == self._me:  # this process has created it, and the reply was lost
                self._start(claim)
            elif (has_ended(claim.process) or unchanged_s >= DEAD_S) and number < MAX_TRIES - 1:
                again = self._new_claim(claim, claim.also, claim.text)
                if self._create(again, number + 1):
                    self._start(again)

    # Sending

    def _start(self, claim: NoticeClaim) -> None:
        sending = self._sending[claim.id] = _Sending(claim, self._clock())
        document = self.document(claim, len(claim.also))

        def send() -> None:
            try:
                sending.failures = self._send(document)
            except Exception as error:  # noqa: BLE001 - the name of its type cannot contain a URL, its text may
                sending.failures = [f"notification: {type(error).__name__}"]

        threading.Thread(target=send, daemon=True, name=f"notice-{claim.id}").start()

    def document(self, notice: Notice, n_left_out: int = 0) -> dict[str, Any]:
        """Return the message about a notice, as JSON.

        Args:
            notice: the notice.
            n_left_out: the number of further notices that the message counts. Default 0.
        """
        about = f" rank {notice.rank}" if notice.rank is not None else ""
        return {
            "title": f"{self._run_id}:{about} {notice.kind.replace('_', ' ')}",
            "text": notice.text,
            "event": notice.id,
            "kind": notice.kind,
            "run_id": self._run_id,
            "run_url": address_of(self._store.url, self._run_id),
            "rank": notice.rank,
            "attempt": notice.attempt,
            "at": notice.at,
            "left_out": n_left_out,
        }

    def _collect(self) -> None:
        """Record the results of messages that were sent."""
        now = self._clock()
        for notice_id, sending in list(self._sending.items()):
            failures = sending.failures
            if failures is None and now - sending.began > self._limit_s:
                failures = [f"the notification was not sent in {self._limit_s:g} s"]
            if failures is not None:
                del self._sending[notice_id]
                self._unrecorded[notice_id] = NoticeResult(
                    at=self._now(), failures=tuple(shorten(each, 500) for each in failures[:20])
                )
                for words in failures:
                    self._on_failure(f"notice {notice_id}: {words}")
        for notice_id, result in list(self._unrecorded.items()):
            if not run_folder_was_deleted(self._store, self._run_id):
                key = notice_key(self._store.url, self._run_id, notice_id, sent=True)
                self._store.put_if_absent(key, result.to_bytes())
            del self._unrecorded[notice_id]
            self._done.add(notice_id)
