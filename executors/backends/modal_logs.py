"""What sandboxes of one Modal app write."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from executors.backends.jobs.timed_log import Entry, SharedLog, TimedLog
from executors.backends.modal_client import in_thread, modal

MOST_ENTRIES = 20_000  # as many as the SDK returns at once


class ModalLogs:
    """Logs of the sandboxes of an app.

    Args:
        app: looks the app up.
    """

    def __init__(self, app: Callable[[], Any]) -> None:
        self._app = app
        self._known: dict[str, Any] = {}  # by sandbox; each remembers what the SDK would else ask for every time

    def open(self, sandbox_id: str) -> TimedLog:
        """Return what one sandbox writes, also before it is scheduled, and after its end."""

        @in_thread
        def fetch(since: datetime | None, n_entries: int) -> list[Entry]:
            try:
                logs = self._known.get(sandbox_id) or modal.Sandbox.from_id(sandbox_id).logs
                # With `tail` alone the SDK asks up to four times, of the last hour to the last month.
                found = list(logs.fetch(since=since) if since else logs.tail(min(MOST_ENTRIES, n_entries)))
            except modal.exception.LogsFetchError:  # more in a moment than it fetches at once
                found = list(logs.tail(MOST_ENTRIES))
            except (modal.exception.NotFoundError, modal.exception.ExecutionError):
                return []  # unknown, or with a GPU: it waits to be scheduled, or never was
            self._known[sandbox_id] = logs
            return _entries(found)

        return TimedLog(fetch, self._shared)

    @functools.cached_property
    def _shared(self) -> SharedLog:
        """What all sandboxes of the app write: two requests, however many there are."""

        @in_thread
        def fetch(since: datetime) -> list[Entry]:
            return _entries(self._app().logs.fetch(since=since))

        return SharedLog(fetch)


def _entries(found: Iterable[Any]) -> list[Entry]:
    """Return entries of the SDK; the last of their context is the container."""
    return [Entry(each.timestamp, each.source, each.message, ["", *each.context_ids][-1]) for each in found]
