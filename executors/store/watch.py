"""Waiting for a change in a store without asking it all the time.

On a local `FileStore` the kernel reports changes (inotify, 0.1 ms), but not those made on other machines; other stores
report nothing. So a wait always ends after its time, and the caller looks again. Look *after* a wait returned: the
first wait for a prefix only starts watching it, and returns at once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from executors.process import open_inotify
from executors.store.faulty import FaultyStore
from executors.store.file import FileStore, make_folder
from executors.store.protocol import Store

TRIES = 8
MAX_WATCHES = 64  # old rounds' folders are forgotten beyond this; a user has 8,192 inotify watches or more


class Watch:
    """Notices changes below key prefixes of a directory store; for other stores, a wait is a sleep."""

    def __init__(self, root: Path | None) -> None:
        self._root = root
        self._watched: dict[str, int] = {}
        self._inotify: Any = None
        if root is not None:
            with contextlib.suppress(OSError):  # no inotify, or none left: sleeping is slower and as correct
                self._inotify = open_inotify()

    def wait(self, timeout_s: float, prefixes: Sequence[str]) -> None:
        """Return when something changed below a prefix (a folder: `runs/a/seal/`), or after `timeout_s`."""
        if self._inotify is None:
            time.sleep(timeout_s)
            return
        new = [prefix for prefix in prefixes if prefix not in self._watched]
        added = [self._add(prefix) for prefix in new]
        if any(added):
            return
        if not self._watched.keys() & set(prefixes):  # no more watches are available
            time.sleep(timeout_s)
            return
        from inotify_simple import flags

        for event in self._inotify.read(timeout=max(0, int(timeout_s * 1000))):
            if event.mask & (flags.IGNORED | flags.DELETE_SELF):  # the folder was pruned; watch the next one afresh
                self._watched = {prefix: number for prefix, number in self._watched.items() if number != event.wd}

    def close(self) -> None:
        """Release what the watch holds."""
        if self._inotify is not None:
            self._inotify.close()

    def _add(self, prefix: str) -> bool:
        """Watch a folder, and return whether that is possible. The store reports errors, so the watch need not."""
        from inotify_simple import flags

        assert self._root is not None
        assert self._inotify is not None
        mask = flags.CREATE | flags.MOVED_TO | flags.DELETE_SELF | flags.ONLYDIR
        for _ in range(TRIES):
            try:
                make_folder(str(self._root), str(self._root / prefix))
                self._watched[prefix] = self._inotify.add_watch(self._root / prefix, mask)
                break
            except FileNotFoundError:  # pruned between the two calls
                continue
            except OSError:  # of a full disk, or, with the same words, of a user who has no watches left
                return False
        else:
            return False
        if len(self._watched) > MAX_WATCHES:
            with contextlib.suppress(OSError):
                self._inotify.rm_watch(self._watched.pop(next(iter(self._watched))))
        return True


def open_watch(store: Store) -> Watch:
    """Return the best watch there is for a store."""
    while isinstance(store, FaultyStore):  # faults are of calls, not of news
        store = store.store
    return Watch(store.root if isinstance(store, FileStore) else None)
