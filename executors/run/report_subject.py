"""What the page of a run is made of."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from executors.errors import BackendError, StoreError
from executors.metrics.metrics import Metrics
from executors.native import page_of_job
from executors.report.document import Subject
from executors.status import RunStatus
from executors.store import Store
from executors.store.url import address_of
from executors.supervision.events import Event
from executors.task.record import RunRecord
from executors.task.stored import read_task


def subject_of(
    store: Store,
    record: RunRecord,
    now: RunStatus,
    metrics: Metrics,
    handles: Sequence[Any],
    events: Callable[[Callable[[str], None]], Iterable[Event]],
) -> Subject:
    """Return a run as it is now, with what of it cannot be read.

    Args:
        events: returns what happened, given what is told of each record that cannot be read.
    """
    task, pages, problems = None, list[str | None](), list[str]()
    happened = list(events(problems.append))
    try:
        task = read_task(store, now.run_id).record
    except StoreError as error:
        problems.append(str(error))
    with contextlib.suppress(BackendError):  # of a backend that is not installed here, which may have no pages
        pages = list(map(page_of_job, handles))
    url = address_of(store.url, now.run_id)
    return Subject(
        url=url,
        record=record,
        task=task,
        now=now,
        metrics=metrics,
        events=happened,
        pages=pages,
        problems=list(dict.fromkeys(problems)),
    )
