"""Helpers for tests of stores: time that passes only by sleeping, and an opener for another process."""

from __future__ import annotations

import os

from executors.store import Store, open_store


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept_s: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds


def open_without_anonymous_files(url: str) -> Store:
    """Open a directory as on a file system that has no O_TMPFILE."""
    del os.O_TMPFILE
    return open_store(url)
