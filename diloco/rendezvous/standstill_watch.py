"""Finds and reports the object that blocks a round of a signed run, because it is not signed with the run's key.

Replicas ignore such an object, but it occupies the key of one of their objects, and an object can be created only once.
The round continues when the user deletes the object. So a waiting replica reports its key.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from diloco.rendezvous.frames import READ_TRIES, Contribution
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.membership import Identity, Membership
from diloco.rendezvous.retrying_store import RetryingStore
from executors.store.standstill import Standstill, describe_standstill

log = logging.getLogger(__name__)

STANDS_AFTER_S = 5.0
"""The wait in seconds before a report, or `grace_s` if that is shorter."""
LOOK_S = 1.0
"""The seconds between two checks whether the object still exists. Each check costs a request."""


class StandstillWatch:
    """Finds the forged object that makes this replica wait, and reports it once.

    Args:
        store: the store of the run.
        keys: the keys of the rendezvous.
        me: the identity of the replica that waits.
        members: finds out which replicas take part.
        report: called with the standstill when it begins, and with None when it has ended.
        clock: returns seconds.
        after_s: the wait in seconds before a report.

    Example:
        watch = StandstillWatch(store, keys, me, members, link.stand_still, monotonic, after_s=5.0)
        watch.look(11, began_s=monotonic(), good={}, blocked=None)
    """

    def __init__(
        self,
        store: RetryingStore,
        keys: Keys,
        me: Identity,
        members: Membership,
        report: Callable[[Standstill | None], None],
        clock: Callable[[], float],
        after_s: float,
    ) -> None:
        self._store = store
        self._keys = keys
        self._me = me
        self._members = members
        self._report = report
        self._clock = clock
        self._after_s = after_s
        self._look_at = 0.0
        self.found: Standstill | None = None
        """The standstill that was reported and has not ended."""
        self._warned: set[str] = set()

    def look(self, entry: int, began_s: float, good: Mapping[int, Contribution], blocked: str | None) -> None:
        """Look for the objects that block a round. Call this again and again while this replica waits for the round.

        Args:
            entry: the entry of the round in the log.
            began_s: the time at which the wait began, by the argument `clock`.
            good: the contributions that are proven, by rank.
            blocked: the key of an object that the mean needs and that could not be read. None: there is none.
        """
        self._look(entry + 1, began_s, lambda: self._objects_of(entry, good, blocked))

    def look_at_start(self, began_s: float) -> None:
        """Look whether a forged pointer of the first snapshot blocks the beginning of the training.

        Args:
            began_s: the time at which the wait began, by the argument `clock`.
        """
        self._look(0, began_s, lambda: [self._keys.snapshot(0)])

    def end(self) -> None:
        """Report that the round continues, if a standstill was reported before."""
        if self.found is not None:
            self.found = None
            self._report(None)

    def _look(self, round: int, began_s: float, needed: Callable[[], Sequence[str]]) -> None:
        now = self._clock()
        if now - began_s < self._after_s or now < self._look_at:
            return
        self._look_at = now + LOOK_S
        keys = [key for key in needed() if not self._store.is_missing(key)]
        if not keys:
            self.end()
            return
        found = Standstill(round=round, key=keys[0], n_more=len(keys) - 1)
        if found != self.found:
            self.found = found
            self._report(found)
        if found.key not in self._warned:
            self._warned.add(found.key)
            log.warning("rank %s: %s", self._me.rank, describe_standstill(found, self._store.store.url))

    def _objects_of(self, entry: int, good: Mapping[int, Contribution], blocked: str | None) -> list[str]:
        """Return the keys of objects that are not proven. Empty if the round also waits for something else."""
        keys, expected = self._keys, self._members.expected
        found = [key for key in (keys.seal(entry), blocked) if key is not None and self._is_bad(key)]
        ranks = [rank for rank in sorted({*expected, self._me.rank}) if rank not in good]
        bad = {rank: key for rank in ranks if self._is_bad(key := keys.contribution(entry, rank))}
        # If the round also waits for a late replica, the user need not act yet.
        if bad and not self._members.misses_any(good, others=bad):
            found += bad.values()
        return list(dict.fromkeys(found))

    def _is_bad(self, key: str) -> bool:
        return self._store.count_misreads(key) >= READ_TRIES
