"""Copies the end of a replica's output into the run's store, for readers on other machines."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from executors.attempt import Attempt
from executors.errors import StoreError
from executors.store.record_names import run_folder_was_deleted

NAME = "output.log"
LIVE_BYTES = 256 << 10  # the bytes that are copied while the replica runs
FINAL_BYTES = 16 << 20  # the bytes that are copied at the end of the replica


class LogCopy:
    """Copies the end of a log file into a run's store.

    Args:
        attempt: the attempt that gets the copy.
        path: the log file.
    """

    def __init__(self, attempt: Attempt, path: Path) -> None:
        self._attempt = attempt
        self._path = path
        self._copied: tuple[int, int] | None = None

    def put(self, n_bytes: int) -> None:
        """Copy the last bytes of the file, unless the store already has them. A failure is ignored, because another
        copy follows.

        Args:
            n_bytes: the most bytes to copy.
        """
        if run_folder_was_deleted(self._attempt.store, self._attempt.run_id):
            return
        with contextlib.suppress(StoreError, OSError), open(self._path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            if self._copied != (size, min(n_bytes, size)):
                file.seek(max(0, size - n_bytes))
                self._attempt.store.put(self._attempt.key(NAME), file.read(n_bytes))
                self._copied = (size, min(n_bytes, size))
