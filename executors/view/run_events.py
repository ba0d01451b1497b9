"""Reads the events and the warnings of a run, ordered by time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from executors.attempt import Attempt
from executors.errors import CorruptObjectError
from executors.patience import BRIEF, FOLLOWER, retry
from executors.restarts.decision_log import DecisionLog
from executors.status import FoundWarning
from executors.store.run_key import find_key
from executors.view.report.event_reader import Event, EventReader, read_failed_notices, read_warnings
from executors.view.run_view import RunView

log = logging.getLogger(__name__)


def events_of(view: RunView, *, follow: bool = False, note: Callable[[str], None] = log.warning) -> Iterator[Event]:
    """Yield the events of a run, ordered by time: launches, ends, hangs, decisions.

    Args:
        view: the run.
        follow: True: continue with later events, until the run has ended. Default: False.
        note: called with a message for each record that cannot be read. Default: the module's log.

    Raises:
        StoreError: the store cannot be read.

    Example:
        for event in events_of(view_of(attach("first-try"))):
            print(event.kind, event.rank)
    """
    events = open_events(view, note=note)
    for pause_s in view.reader.pauses():
        # With `follow`, a temporary outage of the store is tolerated. Without it, the caller wants an error soon.
        now = retry(lambda: view.status(reports=False), FOLLOWER if follow else BRIEF, "the rendezvous")
        view.reader.share_log(events.log)  # so that each entry of the decision log is read once, and not twice
        yield from events.new(view.reader.records.inventory, now)
        if not follow or now.is_terminal:
            return
        time.sleep(pause_s)


def open_events(view: RunView, *, note: Callable[[str], None] = log.warning) -> EventReader:
    """Return a reader of the run's events, which yields each event once.

    Args:
        view: the run.
        note: called with a message for each record that cannot be read. Default: the module's log.

    Example:
        open_events(view).new(view.reader.records.inventory, view.status(reports=False))
    """
    key = view.record.key_id and find_key(view.run_id, view.record.key_id)
    decisions = DecisionLog(view.store, view.run_id, key=key)
    return EventReader(decisions, view.record, map_over=view.reader.records.map, note=note)


def warnings_of(view: RunView, note: Callable[[str], None] = log.warning) -> list[FoundWarning]:
    """Return the warnings of all attempts and of the run as a whole, the oldest first.

    Each text of an attempt is listed once, with its number of occurrences. The call makes one read for each attempt
    that has a warning.

    Args:
        view: the run.
        note: called with a message for each record that cannot be read. Default: the module's log.

    Raises:
        StoreError: the store cannot be read.

    Example:
        for warning in warnings_of(view_of(attach("first-try"))):
            print(warning.rank, warning.text)
    """
    now = view.status(reports=False)
    attempts = [Attempt(view.store, view.run_id, *key) for key in sorted(view.reader.records.inventory.warnings)]

    def read(attempt: Attempt) -> list[FoundWarning]:
        try:
            return read_warnings(attempt)
        except CorruptObjectError as error:
            note(str(error))
            return []

    found = [each for some in view.reader.records.map(read, attempts) for each in some]
    found += [each for each in now.warnings if each.rank is None] + now.unjudged
    if view.record.settings.notify_on is not None:
        found += read_failed_notices(view.store, view.run_id)
    return sorted(found, key=lambda each: each.at)
