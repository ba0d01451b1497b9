"""Snapshots of a running log, and what may be deleted once they stand.

At every `snapshot_every`-th entry one replica, picked by hash, copies its state before it steps. The copy is believed
when the seals of the entries in which each fragment is next used were made for the same state; then its parts are put
in the background and its pointer is created. If that replica dies, or its copy is wrong, the next multiple serves.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diloco.keys import Keys
from diloco.membership import Identity
from diloco.patience import PatientStore
from diloco.records import BadRecordError, Seal, hash_order
from diloco.snapshot import Arrays, Pointer, put_parts
from diloco.work import Work
from executors.errors import StoreError

log = logging.getLogger(__name__)

PUT_TRIES = 5
OWN = re.compile(r"(\d+)/(\d{1,15})/(\d{1,15})/[^/]+$")
"""What a rank keeps for its next attempts; anything else below that prefix is somebody else's."""

Background = Callable[[Callable[[], None]], None]
"""Runs something beside the training; returns at once."""


@dataclass(frozen=True, slots=True)
class Copy:
    """The state before an entry, as this replica had it."""

    entry: int
    arrays: Arrays
    state: Sequence[str]


class Keeper:
    """Takes this replica's share of the snapshots."""

    def __init__(
        self,
        store: PatientStore,
        keys: Keys,
        me: Identity,
        work: Work,
        *,
        snapshot_every: int,
        background: Background,
    ) -> None:
        self._store = store
        self._keys = keys
        self._me = me
        self._work = work
        self._n_fragments = len(work.sizes())
        self._every = snapshot_every
        self._background = background
        self._copy: Copy | None = None
        self._busy = False
        self._possible = True

    def before_step(self, entry: int, seal: Seal) -> None:
        """Copy the state if it is this replica's turn, and publish the copy once the seals agree with it."""
        if entry and entry % self._every == 0 and self._possible and not self._busy and self._is_picked(entry, seal):
            self._take_copy(entry)
        copy = self._copy
        if copy is None:
            return
        last = copy.entry + self._n_fragments - 1
        if entry > last or not self._agrees(copy, entry, seal):
            self._copy = None
        elif entry == last:
            self._copy = None
            self._busy = True
            self._background(lambda: self._publish(copy))

    def _is_picked(self, entry: int, seal: Seal) -> bool:
        return hash_order(seal.members, "snapshot", entry)[0] == self._me.rank

    def _take_copy(self, entry: int) -> None:
        try:
            arrays, state = self._work.capture()
        except TypeError as error:
            self._possible = False
            log.warning("rank %s takes no snapshots: %s", self._me.rank, error)
        else:
            self._copy = Copy(entry, arrays, state)

    def _agrees(self, copy: Copy, entry: int, seal: Seal) -> bool:
        """Tell whether the entry was made from the state that was copied, as far as its fragment goes."""
        return seal.anchor == copy.state[entry % self._n_fragments]

    def _publish(self, copy: Copy) -> None:
        store = self._store.apart()
        try:
            for _ in range(PUT_TRIES):
                digests = put_parts(store, self._keys, copy.entry, self._me.nonce, copy.arrays)
                if digests is not None:
                    pointer = Pointer(self._me.nonce, self._me.rank, digests, tuple(copy.state), {})
                    store.create(self._keys.snapshot(copy.entry), pointer.data())
                    collect_garbage(store, self._keys, copy.entry, self._every)
                    break
        except StoreError as error:
            log.warning("rank %s could not keep the snapshot of round %s: %s", self._me.rank, copy.entry, error)
        finally:
            self._busy = False


def collect_garbage(store: PatientStore, keys: Keys, newest: int, snapshot_every: int) -> None:
    """Delete what nobody needs any more: payloads of entries before the second newest snapshot.

    Whoever is still behind that finds them gone and jumps to a snapshot. Records that decide are never deleted.
    """
    if not _pointer_stands(store, keys, newest):
        return
    for horizon in range(newest - snapshot_every, -1, -snapshot_every):
        if _pointer_stands(store, keys, horizon):
            break
    else:
        return
    numbered = re.compile(rf"{re.escape(keys.rounds())}(\d+)/|{re.escape(keys.parts())}(\d+)/")
    for key in [*store.found(keys.rounds()), *store.found(keys.parts())]:
        found = numbered.match(key)
        if found and int(found[1] or found[2]) < horizon:
            store.remove(key)
    _collect_own(store, keys, horizon)


def _pointer_stands(store: PatientStore, keys: Keys, entry: int) -> bool:
    data = store.look(keys.snapshot(entry))
    if data is None:
        return False
    try:
        Pointer.parse(data)
    except BadRecordError:
        return False
    return True


def _collect_own(store: PatientStore, keys: Keys, horizon: int) -> None:
    """Delete what ranks kept before the horizon, but for the newest of each: a rank may come back after long."""
    prefix = keys.own()
    kept: dict[str, dict[tuple[int, int], list[str]]] = {}
    for key in store.found(prefix):
        if ours := OWN.match(key.removeprefix(prefix)):
            kept.setdefault(ours[1], {}).setdefault((int(ours[2]), int(ours[3])), []).append(key)
    for records in kept.values():
        whole = [when for when, names in records.items() if any(name.endswith("/record") for name in names)]
        newest = max(whole, default=None)
        for when, names in records.items():
            if when[0] < horizon and newest is not None and when < newest:
                for name in names:
                    store.remove(name)
