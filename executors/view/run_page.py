"""Makes the page of a run from its view: as one JSON document, or as one HTML file."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, cast

from executors.attempt.handles import page_of_job
from executors.errors import BackendError, StoreError
from executors.metrics.metrics import read_metrics
from executors.view.report.document_types import ReportDocument
from executors.view.run_events import events_of
from executors.view.run_view import RunView


def report_document(view: RunView) -> ReportDocument:
    """Return everything that the page of a run shows, as one JSON document with finite numbers.

    Args:
        view: the run.

    Raises:
        StoreError, BackendError: the state of the run cannot be read.

    Example:
        report_document(view_of(attach("first-try")))["run_id"]
    """
    from executors.task.stored import read_task
    from executors.view.report.document import Subject, document

    now, metrics, handles = view.status(), read_metrics(view.store, view.run_id, view.record), view.handles
    task, pages, problems = None, list[str | None](), list[str]()
    events = list(events_of(view, note=problems.append))
    try:
        task = read_task(view.store, view.run_id).record
    except StoreError as error:  # the other parts of the page are still useful
        problems.append(str(error))
    with contextlib.suppress(BackendError):  # if the backend is not installed here, the page has no links to jobs
        pages = list(map(page_of_job, handles))
    subject = Subject(
        url=view.url, record=view.record, task=task, now=now, metrics=metrics, events=events, pages=pages,
        problems=list(dict.fromkeys(problems)),
    )  # fmt: skip
    made: Any = document(subject)  # tests compare each document with its schema
    return cast(ReportDocument, made)


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
