"""Several requests at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

MAX_THREADS = 64  # no store's connections are fewer
T = TypeVar("T")
R = TypeVar("R")


def in_parallel(act: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Act on several items at once."""
    with ThreadPoolExecutor(min(MAX_THREADS, max(1, len(items)))) as pool:
        return list(pool.map(act, items))
