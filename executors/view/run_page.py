"""Makes the page of a run from its view: as one JSON document, or as one HTML file."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, cast

from executors.attempt.handles import page_of_job
from executors.errors import BackendError, StoreError
from executors.metrics.metrics import read_metrics
from executors.metrics.segments import ParsedSegments, SegmentBudget
from executors.status import RunStatus
from executors.view.report.document_types import ReportDocument
from executors.view.report.event_reader import Event, EventReader
from executors.view.run_events import events_of, open_events
from executors.view.run_view import RunView


class ReportReader:
    """Makes the document of one run again and again. It reads each event once.

    Args:
        view: the run.
        budget: the room for the parsed measurements, which are then parsed once. None: they are parsed at each read.

    Example:
        reader = ReportReader(view_of(attach("first-try")))
        reader.read()["run_id"]
    """

    def __init__(self, view: RunView, budget: SegmentBudget | None = None) -> None:
        self._view = view
        self._parsed = None if budget is None else ParsedSegments(budget)
        self._events = list[Event]()
        self._reader: EventReader | None = None
        self._problems = dict[str, None]()

    def read(self, now: RunStatus | None = None) -> ReportDocument:
        """Return everything that the page of the run shows, as one JSON document with finite numbers.

        Args:
            now: the state of the run, if the caller has just read it. None: it is read.

        Raises:
            StoreError, BackendError: the state of the run cannot be read.
        """
        from executors.task.stored import read_task
        from executors.view.report.document import Subject, document

        view = self._view
        given, now = now, view.status() if now is None else now
        problems = self._problems.copy()
        metrics = read_metrics(view.store, view.run_id, view.record, parsed=self._parsed)
        if given is None:
            events = list(events_of(view, note=lambda words: problems.update({words: None})))
        else:
            events = self._events_until(now)
            problems |= self._problems
        task, pages = None, list[str | None]()
        try:
            task = read_task(view.store, view.run_id).record
        except StoreError as error:  # the other parts of the page are still useful
            problems[str(error)] = None
        with contextlib.suppress(BackendError):  # if the backend is not installed here, the page has no links to jobs
            pages = list(map(page_of_job, view.handles))
        subject = Subject(
            url=view.url, record=view.record, task=task, now=now, metrics=metrics, events=events, pages=pages,
            problems=list(problems),
        )  # fmt: skip
        made: Any = document(subject)  # tests compare each document with its schema
        return cast(ReportDocument, made)

    def forget(self) -> None:
        """Free the memory of the parsed measurements."""
        if self._parsed is not None:
            self._parsed.forget()

    def _events_until(self, now: RunStatus) -> list[Event]:
        """Return the events so far, and read only those that are new."""
        reader = self._reader
        if reader is None or now.is_terminal:
            # The reader of a run that has ended is not used again, because a resumed run has another end.
            self._events = []
            reader = open_events(self._view, note=lambda words: self._problems.update({words: None}))
            self._reader = None if now.is_terminal else reader
        self._view.reader.share_log(reader.log)
        self._events += reader.new(self._view.reader.records.inventory, now)
        self._events.sort(key=lambda event: event.at)
        return self._events


def report_document(view: RunView) -> ReportDocument:
    """Return everything that the page of a run shows, as one JSON document with finite numbers.

    Args:
        view: the run.

    Raises:
        StoreError, BackendError: the state of the run cannot be read.

    Example:
        report_document(view_of(attach("first-try")))["run_id"]
    """
    return ReportReader(view).read()


def write_report(view: RunView, path: Path) -> Path:
    """Write the current state of the run as one self-contained HTML page, and return the path of the file.

    Args:
        view: the run.
        path: the file. An existing file is replaced.

    Raises:
        OSError: the folder does not exist or cannot be written.
        StoreError, BackendError: the state of the run cannot be read.

    Example:
        write_report(view_of(attach("first-try")), Path("run.html"))
    """
    from executors.view.report.page import write_page

    return write_page(report_document(view), path)
