"""Reads the log of a local replica: the file on this machine, or the copy that its supervisor put into the store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from executors.attempt import Attempt
from executors.errors import StoreError
from executors.logs import EVERY_LINE, LIMITED, MAX_READ_BYTES, last_of
from executors.logs.log import Log
from executors.logs.readers import FileLog, TailedLog
from executors.store.protocol import Entry
from executors.worker.log_copy import FINAL_BYTES, LIVE_BYTES, NAME

PAUSE_S = 15.0  # between two reads of the copy of a log, which the supervisor writes every 60 s
PIECE_BYTES = 1 << 20
COLLECTED = "`replicas collect --out DIR` writes all lines of its copy in the rendezvous"


def open_local_log(attempt: Attempt, path: Path | None, runs_here: bool) -> Log:
    """Return the log of an attempt: this machine's file if it can be read, or else the copy in the run's store.

    Args:
        attempt: the attempt.
        path: the path of the file. None: this machine did not launch the run.
        runs_here: True if this machine launched the attempt, so that its file may still be created.

    Example:
        open_local_log(attempt, log_file(state_path(), attempt), runs_here=True).tail(100)
    """
    if path is not None:
        try:
            with open(path, "rb"):
                return FileLog(path)
        except FileNotFoundError:
            if runs_here and not attempt.has(NAME):
                return FileLog(path)
        except OSError as error:
            return CopiedLog(attempt, f"{path} cannot be read ({error.strerror})")
    return CopiedLog(attempt)


class CopiedLog(TailedLog):
    """The copy of the end of a log, which the supervisor writes into the run's store now and then.

    Args:
        attempt: the attempt that has the log.
        why: the reason why the file itself is not read. Default: this machine does not have the file.

    Example:
        CopiedLog(attempt).tail(100)
    """

    pause_s = PAUSE_S

    def __init__(self, attempt: Attempt, why: str = "") -> None:
        super().__init__(self._read_object, EVERY_LINE)
        self._store = attempt.store
        self._key = attempt.key(NAME)
        self._why = why
        self._entry: Entry | None = None
        self._text = ""

    @property
    def note(self) -> str:
        """A text with the place where the log is read, and its age."""
        why = f"{self._why}; " if self._why else ""
        where = f"{why}read from {self._key!r} in {self._store.url}"
        if (entry := self._entry or self._look()) is None:
            return f"{where}, which does not exist yet."
        return f"{where}, {max(0.0, time.time() - entry.modified_at):.0f} s old."

    def tail(self, n_lines: int) -> str:
        text, self.cut = super().tail(n_lines), ""
        n_shown = text.count("\n") + (text != "" and not text.endswith("\n"))
        if n_shown < n_lines:
            self.cut = self._held(self._entry)
            if self._entry is not None and self._entry.size_bytes > MAX_READ_BYTES:
                self.cut = LIMITED if not self.cut else f"these are the last {MAX_READ_BYTES >> 20} MiB; {COLLECTED}"
        return text

    def pieces(self) -> Iterator[bytes]:
        entry = self._look()
        self.cut = self._held(entry)
        size_bytes = 0 if entry is None else entry.size_bytes
        for start in range(0, size_bytes, PIECE_BYTES):
            yield bytes(self._store.get(self._key, start=start, size=min(PIECE_BYTES, size_bytes - start)))

    def _held(self, entry: Entry | None) -> str:
        """Return the reason why the copy is not the whole log. Empty if it is."""
        if entry is None:
            return self._why
        if entry.size_bytes not in (LIVE_BYTES, FINAL_BYTES):
            return ""
        return f"these are the last {entry.size_bytes >> 10:,} KiB, and its copy in the rendezvous has no more"

    def _read_object(self, n_lines: int) -> str:
        entry = self._look()
        if entry is not None and entry != self._entry:
            try:
                self._text = self._end_of(entry)
            except StoreError:  # a shorter copy has replaced it since
                entry = self._look()
                self._text = "" if entry is None else self._end_of(entry)
            self._entry = entry
        return last_of(self._text, n_lines)

    def _look(self) -> Entry | None:
        return next((entry for entry in self._store.list(self._key) if entry.key == self._key), None)

    def _end_of(self, entry: Entry) -> str:
        start = max(0, entry.size_bytes - MAX_READ_BYTES)
        data = self._store.get(self._key, start=start, size=entry.size_bytes - start)
        return bytes(data).decode(errors="replace")
