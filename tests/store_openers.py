"""How another process opens a store in a test."""

from __future__ import annotations

import os

from executors.store import Store, open_store


def open_without_anonymous_files(url: str) -> Store:
    """Open a directory as on a file system that has no O_TMPFILE."""
    del os.O_TMPFILE
    return open_store(url)
