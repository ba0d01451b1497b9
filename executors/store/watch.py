"""Waits for a change in a store without asking the store all the time.

For a `FileStore` on this machine the kernel reports changes within 0.1 ms (inotify). It does not report changes that
other machines make, and other stores report nothing. So a wait always ends after its time limit, and the caller looks
into the store again. Look *after* each wait: the first wait for a prefix only starts to watch it, and returns at once.
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
MAX_WATCHES = 64  # beyond this, the oldest folder is dropped; a user has 8,192 inotify watches or more


class Watch:
    """Waits for changes below key prefixes of a directory store. For other stores, a wait is a sleep.

    Args:
        root: the directory of the store. None: another kind of store.

    Example:
        watch = open_watch(store)
        watch.wait(1.0, ["otter/diloco/main/seal/"])
    """

    def __init__(self, root: Path | None) -> None:
        self._root = root
        self._watched: dict[str, int] = {}
        self._inotify: Any = None
        if root is not None:
            with contextlib.suppress(OSError):  # without inotify every wait is a sleep, which is slower but correct
                self._inotify = open_inotify()

    def wait(self, timeout_s: float, prefixes: Sequence[str]) -> None:
        """Return when something changes below a prefix, or when the time has passed.

        Args:
            timeout_s: the longest wait, in seconds.
            prefixes: the folders to watch, each as a key with a `/` at its end.
        """
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
            if event.mask & (flags.IGNORED | flags.DELETE_SELF):  # the folder was removed: watch its successor again
                self._watched = {prefix: number for prefix, number in self._watched.items() if number != event.wd}

    def close(self) -> None:
        """Stop watching, and free the kernel's resources."""
        if self._inotify is not None:
            self._inotify.close()

    def _add(self, prefix: str) -> bool:
        """Watch a folder, and return True if that worked. Errors are ignored, because the store reports them."""
        from inotify_simple import flags

        assert self._root is not None
        assert self._inotify is not None
        mask = flags.CREATE | flags.MOVED_TO | flags.DELETE_SELF | flags.ONLYDIR
        for _ in range(TRIES):
            try:
                make_folder(str(self._root), str(self._root / prefix))
                self._watched[prefix] = self._inotify.add_watch(self._root / prefix, mask)
                break
            except FileNotFoundError:  # another process removed the folder between the two calls
                continue
            except OSError:  # the disk is full, or the user has no watches left, which is the same error
                return False
        else:
            return False
        if len(self._watched) > MAX_WATCHES:
            with contextlib.suppress(OSError):
                self._inotify.rm_watch(self._watched.pop(next(iter(self._watched))))
        return True


def open_watch(store: Store) -> Watch:
    """Return a watch for a store.

    Args:
        store: the store.

    Example:
        open_watch(store).wait(1.0, ["otter/diloco/main/seal/"])
    """
    while isinstance(store, FaultyStore):  # it injects faults into calls, and not into reports of changes
        store = store.store
    return Watch(store.root if isinstance(store, FileStore) else None)
