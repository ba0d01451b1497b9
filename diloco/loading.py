"""Where a replica's state comes from: the newest snapshot that can be used, and at the very beginning somebody's model.

Bootstrapping, jumping ahead and taking the state from the log again are the same thing. The head of the log is found
without a listing, because seals are dense and never deleted; pointers stand at multiples of `snapshot_every` alone.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from diloco.contract import check_contract
from diloco.errors import QuorumTimeoutError
from diloco.keys import Keys
from diloco.membership import Identity
from diloco.patience import PatientStore, backoff
from diloco.records import BadRecordError, Reading
from diloco.rounds import READ_TRIES, Pace
from diloco.snapshot import Arrays, Pointer, get_parts, put_parts
from diloco.work import Work

log = logging.getLogger(__name__)

CONTRACT_TRIES = 3 * READ_TRIES
"""How often the contract is read before a replica goes without: longer than for what has another copy."""


class Loader:
    """Loads snapshots into the work."""

    def __init__(
        self,
        store: PatientStore,
        keys: Keys,
        me: Identity,
        work: Work,
        pace: Pace,
        *,
        snapshot_every: int,
        clock: Callable[[], float],
        wait: Callable[[float, Sequence[str]], None],
        rng: random.Random,
        check_abort: Callable[[], None],
    ) -> None:
        self._store = store
        self._keys = keys
        self._me = me
        self._work = work
        self._pace = pace
        self._every = snapshot_every
        self._clock = clock
        self._wait = wait
        self._rng = rng
        self._check_abort = check_abort
        self._may_offer = True
        """Until something was loaded: parts that were put again from another state would spoil the first anchor."""
        self._fits = False
        """Whether this replica's contract was compared with the run's."""
        self._misfits: set[int] = set()
        """Entries whose snapshots can be read and not be loaded."""
        self._contract_misread = 0
        """How often the run's contract was read, and was not what somebody had written."""

    def load(self, above: int) -> int | None:
        """Load the newest usable snapshot before an entry after `above`; -1: any, however long it takes.

        Returns: the entry before which the state now is; None: there is no such snapshot, and nothing has changed.
        """
        began, pauses = self._clock(), backoff(self._rng)
        while True:
            for entry in self._candidates(above):
                state = self._read(entry)
                if state is None:
                    continue
                pointer, arrays = state
                self._may_offer = False
                try:
                    with Reading("snapshot of this model"):
                        self._work.load(arrays)
                except BadRecordError as error:
                    if entry not in self._misfits:
                        log.warning("rank %s: %s (%s)", self._me.rank, error, self._keys.snapshot(entry))
                    self._misfits.add(entry)
                else:
                    if pointer.state == tuple(self._work.digest(f) for f in range(len(self._work.sizes()))):
                        return entry
                above = -1  # what was there before is lost now
            if above >= 0:
                return None
            waited_s = self._clock() - began
            patience_s = self._me.rank * self._pace.patience_s  # by then every lower rank is held to be dead
            if self._may_offer and waited_s >= patience_s and not self._store.stands(self._keys.snapshot(0)):
                self._offer_first_anchor()
                continue
            if waited_s > self._pace.round_timeout_s:
                raise QuorumTimeoutError(
                    f"Rank {self._me.rank} found no snapshot of run {self._keys.run_id!r} that can be read in "
                    f"{self._pace.round_timeout_s:g} s."
                )
            self._check_abort()
            self._wait(next(pauses), [self._keys.folder_of(self._keys.snapshot(0))])

    def _candidates(self, above: int) -> Iterator[int]:
        """Yield the entries before which a snapshot may stand, newest first."""
        head = self._head(max(above, 0))
        yield from range(head - head % self._every, above, -self._every)

    def _head(self, entry: int) -> int:
        """Return the first entry without a seal, at least `entry`; perhaps an earlier one."""
        sealed, step = entry - 1, 1
        while self._is_sealed(sealed + step):
            sealed += step
            step *= 2
        while step > 1:
            step //= 2
            if self._is_sealed(sealed + step):
                sealed += step
        return sealed + 1

    def _is_sealed(self, entry: int) -> bool:
        return self._store.look(self._keys.seal(entry), size=0) is not None

    def _read(self, entry: int) -> tuple[Pointer, Arrays] | None:
        pointer = self._pointer(entry)
        if pointer is None or not self._check_fit(pointer if entry == 0 else None):
            return None
        arrays = get_parts(self._store, self._keys, entry, pointer)
        return None if arrays is None else (pointer, arrays)

    def _pointer(self, entry: int) -> Pointer | None:
        for _ in range(READ_TRIES):
            data = self._store.look(self._keys.snapshot(entry))
            if data is None:
                return None
            with suppress(BadRecordError):
                return Pointer.parse(data)
            self._contract_misread += entry == 0
        return None

    def _check_fit(self, first: Pointer | None) -> bool:
        """Compare the contracts, once; return False while the run's is not to be seen.

        A contract that has rotted is not the end of a run whose snapshots are well: digests tell misfits apart, too.

        Raises: ContributionError: names the first difference.
        """
        if not self._fits:
            first = first or self._pointer(0)
            if first is None:
                is_rotten = self._contract_misread >= CONTRACT_TRIES
                if is_rotten:
                    key = self._keys.snapshot(0)
                    log.warning("rank %s: the run's contract (%s) is not what was written.", self._me.rank, key)
                return is_rotten
            check_contract(self._work.contract(), first.contract, run_id=self._keys.run_id, author=first.rank)
            self._fits = True
        return True

    def _offer_first_anchor(self) -> None:
        """Put one's own initial model under one's own nonce; the pointer that stands then decides."""
        digests = put_parts(self._store, self._keys, 0, self._me.nonce, self._work.arrays())
        if digests is not None:
            state = tuple(self._work.digest(f) for f in range(len(self._work.sizes())))
            pointer = Pointer(self._me.nonce, self._me.rank, digests, state, self._work.contract())
            self._store.create(self._keys.snapshot(0), pointer.data())
