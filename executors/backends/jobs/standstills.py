"""Standstills: whether what a process writes has stood still for so long that the process is gone."""

from __future__ import annotations

import time
from collections.abc import Callable

CLOCKS_DIFFER_S = 900.0  # at most, between machines that write to one bucket: S3 refuses requests beyond that


class Standstills:
    """Measures by this process's own clock how long records stand still; those of other machines may be wrong.

    A process that looks but once goes by the time that is in the record, with a margin for what clocks may differ by.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[float | None, float]] = {}
        """When the record of a place was written, by its writer's clock, and since when it is seen here as it is."""

    def is_new(self, place: str, limit_s: float) -> bool:
        """Whether a record was first seen as it is less than `limit_s` ago: then there is no need to read it again."""
        return place in self._seen and self._clock() - self._seen[place][1] < limit_s

    def is_over(self, place: str, written_at: float | None, limit_s: float) -> bool:
        """Note when a record was written, None: never, and tell whether it has stood still for `limit_s`."""
        now, (was, since) = self._clock(), self._seen.get(place, (None, None))
        if since is None or was != written_at:
            since = now
        self._seen[place] = (written_at, since)
        return now - since >= limit_s or (
            written_at is not None and time.time() - written_at > limit_s + CLOCKS_DIFFER_S
        )

    def forget(self, place: str) -> None:
        """Begin anew with a place: there is another sign of life."""
        self._seen.pop(place, None)
