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
    except (ValueError, KeyError, TypeError):
        return None


_claimed: dict[tuple[str, str, int | None], str] = {}
_claimed_lock = threading.Lock()


def process_nonce(url: str, run_id: str, rank: int | None) -> str:
    """Return this process's one nonce for a rank (None: a joiner) of a run: several DiLoCos share one claim."""
    with _claimed_lock:
        return _claimed.setdefault((url, run_id, rank), secrets.token_hex(8))


class Membership:
    """Knows who is expected and who is gone."""

    def __init__(self, store: PatientStore, keys: Keys, world_size: int) -> None:
        self._store = store
        self._keys = keys
        self._gone: set[tuple[int, int]] = set()
        self.frontier = world_size
        """The first rank beyond the first world that nobody has claimed, as far as was looked."""
        self.expected: Mapping[int, int] = dict.fromkeys(range(world_size), 0)
        """Attempt by rank: the members of the newest seal, before the first the launch's world."""

    def look_for_joiners(self) -> None:
        """Find out which ranks beyond the first world were claimed; they are dense."""
        while self._store.look(self._keys.claim(self.frontier, 0), size=0) is not None:
            self.frontier += 1

    def is_gone(self, rank: int) -> bool:
        """Tell whether an attempt of this rank, not older than the expected one, has said bye or left an outcome."""
        attempt = self.expected.get(rank, 0)
        if (rank, attempt) in self._gone:
            return True
        newest = attempt
        while not self._has_ended(rank, newest):
            newest += 1
            if self._store.look(self._keys.claim(rank, newest)) is None:
                return False
        self._gone.add((rank, attempt))
        return True

    def _has_ended(self, rank: int, attempt: int) -> bool:
        keys = self._keys
        return (
            self._store.look(keys.outcome(rank, attempt), size=1) is not None
            or self._store.look(keys.bye(rank, attempt)) is not None
        )
