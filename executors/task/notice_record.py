"""A notice: one event of a run that the user wants to hear of, and its records in the store."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from executors.errors import CorruptObjectError
from executors.process import IDENTITY
from executors.settings.notify import KINDS
from executors.store import Store
from executors.store.records import (
    FAR_AHEAD,
    LONG_AGO,
    Record,
    checked,
    find_record,
    integer,
    list_of,
    nullable,
    number,
    one_of,
    text,
    to_bytes,
)
from executors.store.run_key import held_key, secret_name

FOLDER = "notices"
UNCONFIRMED_S = 120.0  # other processes have sent the notice again by then
MAX_TEXT = 2000
MAX_ALSO = 1000
MAX_TRIES = 100
ID = re.compile(r"[a-z0-9_-]{1,150}")
NAME = re.compile(rf"({ID.pattern}?)(?:\.([1-9][0-9]?))?(\.sent)?(?:-([0-9a-f]{{16}}))?\.json")


@dataclass(frozen=True, kw_only=True)
class Notice(Record):
    """One event of a run. Each process that sees the event makes the same notice, with the same id.

    Example:
        Notice(id="given_up-3-2", kind="given_up", text="rank 3 given up: …", rank=3, at=time.time())
    """

    id: str = checked(text(150, ID))
    """The name of the event, as in "hang-3-0". It follows from the event alone."""
    kind: str = checked(one_of(*KINDS))
    text: str = checked(text(MAX_TEXT))
    """The event in sentences for the user."""
    rank: int | None = checked(nullable(integer(0, 10**7)), None)
    """The rank. None: the event is about the whole run."""
    attempt: int | None = checked(nullable(integer(0, 10_000)), None)
    """The number of the attempt. None: the event is about no single attempt."""
    at: float = checked(number(LONG_AGO, FAR_AHEAD))
    """The Unix time of the event, by the clock of the process that recorded it."""


@dataclass(frozen=True, kw_only=True)
class NoticeClaim(Notice):
    """`notices/<id>.json`: the process that sends a notice. The process creates the record before it sends."""

    claimed_at: float = checked(number(LONG_AGO, FAR_AHEAD))
    """The Unix time of the claim, by the clock of the sender."""
    also: Sequence[str] = checked(list_of(text(150, ID)), ())
    """The ids of further notices that the same message counts, because a rank gets one message a minute."""
    by: str = checked(text(600))
    """The sender's host and pid."""
    process: str = checked(text(600, IDENTITY))
    """The sender, as `executors.process.identify_process` names it."""

    def to_bytes(self) -> bytes:
        """Return the record as it is stored: one line of JSON."""
        return to_bytes(asdict(self))


@dataclass(frozen=True, kw_only=True)
class NoticeResult(Record):
    """`notices/<id>.sent.json`: the notice was sent, or could not be sent. No process sends it again."""

    at: float = checked(number(LONG_AGO, FAR_AHEAD))
    """The Unix time at which the sender was done."""
    failures: Sequence[str] = checked(list_of(text(MAX_TEXT)), ())
    """A sentence for each URL to which the notice could not be sent. The sentences do not contain the URL."""

    def to_bytes(self) -> bytes:
        """Return the record as it is stored: one line of JSON."""
        return to_bytes(asdict(self))


def notices_prefix(run_id: str) -> str:
    """Return the prefix of the keys of a run's notices.

    Args:
        run_id: the run.
    """
    return f"{run_id}/{FOLDER}/"


def notice_key(store_url: str, run_id: str, notice_id: str, number: int = 0, *, sent: bool = False) -> str:
    """Return the key of a claim, or of the result of a notice.

    In a signed run, only a process with the key can predict the name. So no other process can suppress a notice.

    Args:
        store_url: the store of the run.
        run_id: the run.
        notice_id: the id of the notice.
        number: 0, the default, is the first claim. Later claims follow senders that died.
        sent: True: the key of the result. Default False.
    """
    again = f".{number}" if number else ""
    plain = f"{notices_prefix(run_id)}{notice_id}{again}{'.sent' if sent else ''}.json"
    key = held_key(store_url, run_id)
    return plain if key is None else f"{plain.removesuffix('.json')}-{secret_name(key, plain)}.json"


def parse_name(store_url: str, run_id: str, key: str) -> tuple[str, int, bool] | None:
    """Return the id, the number of the claim, and True for a result, from a key. None: it is not such a key.

    Args:
        store_url: the store of the run.
        run_id: the run.
        key: the key from a listing.
    """
    found = NAME.fullmatch(key.removeprefix(notices_prefix(run_id)))
    if found is None:
        return None
    name, number, is_result = found[1], int(found[2] or 0), bool(found[3])
    is_ours = key == notice_key(store_url, run_id, name, number, sent=is_result)
    return (name, number, is_result) if is_ours else None


def shorten(words: str, most: int = MAX_TEXT) -> str:
    """Return a text without control characters, cut to a number of characters.

    Args:
        words: the text, which may come from a foreign record.
        most: the largest number of characters.
    """
    inert = "".join(char if char.isprintable() else " " for char in words[: 2 * most]).strip()
    return inert if len(inert) <= most else f"{inert[: most - 1]}…"


def as_document(notice: Notice) -> dict[str, Any]:
    """Return a notice as plain JSON, for another process.

    Args:
        notice: the notice.
    """
    return {name: value for name, value in asdict(notice).items() if name in Notice.__dataclass_fields__}


def read_failures(store: Store, run_id: str, now: float | None = None) -> list[tuple[str, NoticeResult]]:
    """Return the notices of a run that could not be sent, with their results, the oldest first.

    A notice without a result counts after two minutes, because its sender has then died and no process has followed.

    Args:
        store: the store of the run.
        run_id: the run.
        now: Unix time. None, the default: the system's clock.

    Raises:
        StoreError: the store cannot be read.

    Example:
        for notice_id, result in read_failures(run.store, run.run_id):
            print(notice_id, result.failures)
    """
    found, claims, done = list[tuple[str, NoticeResult]](), dict[str, NoticeClaim](), set[str]()
    for entry in store.list(notices_prefix(run_id)):
        name = parse_name(store.url, run_id, entry.key)
        if name is None:
            continue
        notice_id, _, is_result = name
        try:
            if is_result:
                done.add(notice_id)
                result = find_record(store, entry.key, NoticeResult.parse)
                found += [(notice_id, result)] if result is not None and result.failures else []
            elif (claim := find_record(store, entry.key, NoticeClaim.parse)) is not None:
                claims[notice_id] = claim
        except CorruptObjectError:
            continue
    late = (time.time() if now is None else now) - UNCONFIRMED_S
    for notice_id in claims.keys() - done:
        if claims[notice_id].claimed_at < late:
            words = f"Its sender {shorten(claims[notice_id].by, 200)} ended before the service confirmed it"
            found.append((notice_id, NoticeResult(at=claims[notice_id].claimed_at, failures=(words,))))
    return sorted(found, key=lambda each: each[1].at)
