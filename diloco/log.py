"""Reading the log of seals: what was decided about each entry, and what that means for the work of this process."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from diloco.keys import Keys
from diloco.membership import Identity
from diloco.patience import PatientStore, backoff
from diloco.records import BadRecordError, Seal
from diloco.rounds import READ_TRIES, Pace
from diloco.work import Settled


class Log:
    """The seals of a rendezvous, as one replica reads them."""

    def __init__(
        self,
        store: PatientStore,
        keys: Keys,
        me: Identity,
        pace: Pace,
        sizes: Sequence[int],
        *,
        clock: Callable[[], float],
        wait: Callable[[float, Sequence[str]], None],
        rng: random.Random,
    ) -> None:
        self._store = store
        self._keys = keys
        self._me = me
        self._timeout_s = pace.round_timeout_s
        self._sizes = sizes
        self._clock = clock
        self._wait = wait
        self._rng = rng
        self._bad_readings: dict[int, int] = {}
        self._newest: tuple[int, Seal] | None = None
        """What was read last: it never changes."""

    def seal(self, entry: int) -> Seal | None:
        """Return the entry's seal; None: there is none, or no reading it just now."""
        if self._newest is not None and self._newest[0] == entry:
            return self._newest[1]
        data = self._store.look(self._keys.seal(entry))
        if data is None:
            return None
        try:
            size_bytes = self._sizes[entry % len(self._sizes)]
            seal = Seal.parse(data, size_bytes=size_bytes, whole=not self.is_rotten(entry))
        except BadRecordError:
            self._bad_readings[entry] = self._bad_readings.get(entry, 0) + 1
            return None
        if seal.lost_mean is None:
            self._newest = entry, seal
        return seal

    def is_rotten(self, entry: int) -> bool:
        """Tell whether what stands there is not what was written, whatever it says the next time."""
        return self._bad_readings.get(entry, 0) >= READ_TRIES

    def insist_on_seal(self, entry: int) -> Seal | None:
        """Read a seal that is known to stand; None: it is rotten."""
        began, pauses = self._clock(), backoff(self._rng)
        while (seal := self.seal(entry)) is None:
            if self.is_rotten(entry) and (seal := self.seal(entry)) is None:
                return None
            if self._clock() - began > self._timeout_s:
                return None
            self._wait(next(pauses), ())
        return seal

    def settle(self, seal: Seal) -> Settled:
        """Tell what became of this process's work in an entry; a seal that gives it no weight has counted nothing."""
        member = seal.members.get(self._me.rank)
        if member is None or (member.nonce == self._me.nonce and not member.weight):
            return Settled.KEPT
        return Settled.COUNTED if member.nonce == self._me.nonce else Settled.DROPPED

    def verdicts(self, first: int, end: int, n_fragments: int) -> list[Settled | None]:
        """Tell by fragment what became of this process's work in entries jumped over; None: there were none."""
        verdicts: list[Settled | None] = [None] * n_fragments
        for entry in range(first, end):
            seal = self.insist_on_seal(entry)
            settled = Settled.DROPPED if seal is None else self.settle(seal)  # not known: never count it twice
            if settled is not Settled.KEPT or verdicts[entry % n_fragments] is None:
                verdicts[entry % n_fragments] = settled
        return verdicts
