"""The log of a local replica: the file on the machine that runs it, or what its supervisor put into the rendezvous."""

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

PAUSE_S = 15.0  # a supervisor puts its object every 60 s
PIECE_BYTES = 1 << 20
COLLECTED = "`replicas collect --out DIR` writes all that its copy in the rendezvous holds"


def open_local_log(attempt: Attempt, path: Path | None, runs_here: bool) -> Log:
    """Return the log of an attempt: this machine's file where it can be read, else what is in the rendezvous.

    Args:
        path: where the file is, if this machine launched the run.
        runs_here: whether the attempt was launched by this machine, so that its file may still come.
    """
    if path is not None:
        try:
            with open(path, "rb"):
                return FileLog(path)
        except FileNotFoundError:
            if runs_here and not attempt.has(NAME):
                return FileLog(path)
        except OSError as error:
            return StoredLog(attempt, f"{path} cannot be read ({error.strerror})")
    return StoredLog(attempt)


class StoredLog(TailedLog):
    """The end of a log, as the supervisor put it into the rendezvous a while ago.

    Args:
        why: why the file itself is not read, if this machine should have it.
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
        """Where the log is read and how old that is."""
        why = f"{self._why}; " if self._why else ""
        where = f"{why}read from {self._key!r} in {self._store.url}"
        if (entry := self._entry or self._look()) is None:
            return f"{where}, where nothing is yet."
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
        """Return why the copy is not all of the log; empty if it is."""
        if entry is None:
            return self._why
        if entry.size_bytes not in (LIVE_BYTES, FINAL_BYTES):
            return ""
        return f"these are the last {entry.size_bytes >> 10:,} KiB, and its copy in the rendezvous holds no more"

    def _read_object(self, n_lines: int) -> str:
        entry = self._look()
        if entry is not None and entry != self._entry:
            try:
                self._text = self._end_of(entry)
            except StoreError:  # replaced by a shorter one since
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
