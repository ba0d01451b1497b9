"""Uploads beside the training: one thread, one job at a time."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

WAITING = 2
"""Jobs that may wait; each holds a copy of its data, so a caller that brings one more waits."""


class BackgroundThread:
    """Does jobs in their order. The thread ends with the process, also in the midst of a job."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(WAITING)
        self._thread: threading.Thread | None = None

    def __call__(self, job: Callable[[], None]) -> None:
        """Do a job when those before it are done."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def finish(self) -> None:
        """Return when all jobs are done. Safe to call again."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                log.exception("%s: what was to be kept could not be", self._name)
            del job  # and the copy that it holds
