"""Who takes part: claims, who is expected in a round, and who is gone.

Nothing here looks at clocks, heartbeats or modification times: expected are the members of the newest seal, and gone
is who said bye or left an outcome.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from diloco.keys import Keys
from diloco.patience import PatientStore
from diloco.records import Contribution, Seal


@dataclass(frozen=True, slots=True)
class Identity:
    """One process as a replica of a run."""

    rank: int
    world_size: int
    attempt: int
    nonce: str


def claim(
    store: PatientStore, keys: Keys, rank: int | None, world_size: int, nonce: str, pause: Callable[[], None]
) -> Identity:
    """Take the next free attempt of a rank. Returns when the claim that stands is this one.

    Args:
        rank: None: a joiner, which takes the next free rank beyond the first world.
    """
    joins = rank is None
    rank, attempt = world_size if rank is None else rank, 0
    while True:
        key = keys.claim(rank, attempt)
        owner = _owner(store.look(key))
        if owner is None:
            store.create(key, json.dumps({"nonce": nonce}).encode())
            owner = _owner(store.look(key))
        if owner is None:
            pause()
        elif owner == nonce:
            return Identity(rank, world_size, attempt, nonce)
        elif joins:
            rank += 1
        else:
            attempt += 1


def _owner(claimed: memoryview | None) -> str | None:
    """Return the nonce in a claim; None when there is no claim, or no reading it just now."""
    try:
        return None if claimed is None else str(json.loads(bytes(claimed))["nonce"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


_claimed: dict[tuple[str, str, int | None], str] = {}
_claimed_lock = threading.Lock()


def process_nonce(url: str, run_id: str, rank: int | None) -> str:
    """Return this process's one nonce for a rank (None: a joiner) of a run: several DiLoCos share one claim."""
    with _claimed_lock:
        return _claimed.setdefault((url, run_id, rank), secrets.token_hex(8))


class Membership:
    """Knows who is expected, who is gone, and who of those that the newest seal names lives.

    A *named process* is a member of the newest adopted seal; before the first seal, a first attempt of the launch's
    world. Expected are ranks, whichever of their attempts sends something.
    """

    def __init__(self, store: PatientStore, keys: Keys, me: Identity) -> None:
        self._store = store
        self._keys = keys
        self._me = me
        self._gone: set[tuple[int, int]] = set()
        self._dead: set[tuple[int, int]] = set()
        self.frontier = me.world_size
        """The first rank beyond the first world that nobody has claimed, as far as was looked."""
        self.seal: Seal | None = None
        """The newest seal that was adopted."""

    @property
    def expected(self) -> Mapping[int, int]:
        """The attempts of the named processes, by rank."""
        if self.seal is None:
            return dict.fromkeys(range(self._me.world_size), 0)
        return {rank: member.attempt for rank, member in self.seal.members.items()}

    def names(self, rank: int, attempt: int, nonce: str) -> bool:
        """Tell whether this is a named process."""
        if self.seal is None:
            return rank < self._me.world_size and attempt == 0
        member = self.seal.members.get(rank)
        return member is not None and member.nonce == nonce

    @property
    def names_me(self) -> bool:
        return self.names(self._me.rank, self._me.attempt, self._me.nonce)

    def look_for_joiners(self) -> None:
        """Find out which ranks beyond the first world were claimed; they are dense."""
        while self._is_claimed(self.frontier, 0):
            self.frontier += 1

    def someone_lives(self) -> bool:
        """Tell whether a named process of another rank lives, as far as can be seen: who is not named is behind it."""
        return any(self.lives(rank) for rank in self.expected if rank != self._me.rank)

    def lives(self, rank: int) -> bool:
        """Tell whether the named process of a rank has neither ended nor been replaced by a newer attempt."""
        named = (rank, self.expected[rank])
        if named in self._dead:
            return False
        if self._has_left(*named) or self._is_claimed(rank, named[1] + 1):
            self._dead.add(named)
            return False
        return True

    def still_expected(self, good: Mapping[int, Contribution]) -> set[int]:
        """Return the ranks to wait for.

        Those of the newest seal, less who is gone; when all of them are gone, as in a run that was resumed as a whole,
        the newer attempts of these ranks that have claimed and not ended.

        Args:
            good: the contributions that stand, by rank.
        """
        expected = self.expected
        if expected.keys() <= good.keys():
            return set(expected)
        here = {rank for rank in expected if self._sent_by_named(rank, good) or not self.is_gone(rank)}
        return here or {rank for rank in expected if self._newer_lives(rank)}

    def _sent_by_named(self, rank: int, good: Mapping[int, Contribution]) -> bool:
        return rank in good and self.names(rank, good[rank].attempt, good[rank].nonce)

    def is_gone(self, rank: int, attempt: int | None = None) -> bool:
        """Tell whether an attempt of this rank has said bye or left an outcome.

        Args:
            attempt: or a later one; None: the named process's.
        """
        attempt = self.expected.get(rank, 0) if attempt is None else attempt
        if (rank, attempt) in self._gone:
            return True
        newest = attempt
        while not self._has_ended(rank, newest):
            newest += 1
            if not self._is_claimed(rank, newest):
                return False
        self._gone.add((rank, attempt))
        return True

    def _newer_lives(self, rank: int) -> bool:
        """Tell whether a newer attempt than the named one has not left; the newest of them is the rank."""
        named = newest = self.expected[rank]
        while self._is_claimed(rank, newest + 1):
            newest += 1
        return newest > named and not self._has_left(rank, newest)

    def _has_ended(self, rank: int, attempt: int) -> bool:
        """Tell whether an attempt took part and has left: an outcome without a claim is of one that never began."""
        return self._has_left(rank, attempt) and self._is_claimed(rank, attempt)

    def _has_left(self, rank: int, attempt: int) -> bool:
        keys = self._keys
        return (
            self._store.look(keys.outcome(rank, attempt), size=1) is not None
            or self._store.look(keys.bye(rank, attempt)) is not None
        )

    def _is_claimed(self, rank: int, attempt: int) -> bool:
        return self._store.look(self._keys.claim(rank, attempt), size=0) is not None
