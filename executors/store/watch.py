"""Waiting for a change in a store without asking it all the time.

On a local `FileStore` the kernel tells (inotify, 0.1 ms); it says nothing of writers on other machines, and other
stores say nothing at all, so a wait always ends after its time and the caller looks again. Look *after* a wait
returned: the first wait for a prefix only starts watching it, and returns at once.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from executors.store.faulty import FaultyStore
from executors.store.file import FileStore
from executors.store.protocol import Store

MAX_WATCHES = 64  # old rounds' folders are forgotten beyond this; a user has 8,192 inotify watches or more


class Watch(Protocol):
    """Something that notices changes below key prefixes."""

    def wait(self, timeout_s: float, prefixes: Sequence[str]) -> None:
        """Return when something changed below a prefix (a folder: `runs/a/seal/`), or after `timeout_s`."""

    def close(self) -> None:
        """Release what the watch holds."""


class _Sleep:
    """A watch for stores that notify nobody."""

    def wait(self, timeout_s: float, prefixes: Sequence[str]) -> None:
        time.sleep(timeout_s)

    def close(self) -> None:
        pass


class _Inotify:
    def __init__(self, root: Path) -> None:
        from inotify_simple import INotify

        self._root = root
        self._inotify = INotify()
        self._watched: dict[str, int] = {}

    def wait(self, timeout_s: float, prefixes: Sequence[str]) -> None:
        new = [prefix for prefix in prefixes if prefix not in self._watched]
        for prefix in new:
            self._add(prefix)
        if new:
            return
        from inotify_simple import flags

        for event in self._inotify.read(timeout=max(0, int(timeout_s * 1000))):
            if event.mask & (flags.IGNORED | flags.DELETE_SELF):  # the folder was pruned; watch the next one afresh
                self._watched = {prefix: number for prefix, number in self._watched.items() if number != event.wd}

    def close(self) -> None:
        self._inotify.close()

    def _add(self, prefix: str) -> None:
        from inotify_simple import flags

        folder = self._root / prefix
        mask = flags.CREATE | flags.MOVED_TO | flags.DELETE_SELF | flags.ONLYDIR
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # pruned between the two calls
                self._watched[prefix] = self._inotify.add_watch(folder, mask)
                break
        if len(self._watched) > MAX_WATCHES:
            oldest = next(iter(self._watched))
            with contextlib.suppress(OSError):
                self._inotify.rm_watch(self._watched.pop(oldest))


def open_watch(store: Store) -> Watch:
    """Open the best watch there is for a store."""
    while isinstance(store, FaultyStore):  # what it does to calls, it does not do to news
        store = store.store
    if isinstance(store, FileStore) and sys.platform == "linux":
        with contextlib.suppress(OSError):  # out of inotify instances: sleeping is slower and as correct
            return _Inotify(store.root)
    return _Sleep()
