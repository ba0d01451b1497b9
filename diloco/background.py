"""Uploads data while training continues: `BackgroundThread` runs one job at a time in a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

WAITING = 2
"""The number of jobs that may wait. Each job holds a copy of its data, so the caller of one more job must wait."""


class BackgroundThread:
    """Runs jobs one after another. The thread ends with the process, even in the middle of a job.

    Args:
        name: the name of the thread, which also begins its log messages.

    Example:
        uploads = BackgroundThread("diloco main of rank 0")
        uploads(lambda: store.put(key, data))
        uploads.finish()
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(WAITING)
        self._thread: threading.Thread | None = None

    def __call__(self, job: Callable[[], None]) -> None:
        """Queue a job. Wait first if too many jobs are waiting.

        Args:
            job: the job. An error that it raises is logged.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def finish(self) -> None:
        """Wait until all jobs are done. A second call does nothing."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                log.exception("%s: an upload failed", self._name)
            del job  # so that the copy of the data that the job holds is freed
