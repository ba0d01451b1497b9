"""Ends a run before its planned end: one replica asks for it, and all replicas end after the same round.

A replica sends its request with a contribution. The seal that counts the contribution names the replicas that asked.
All replicas read the same seal, so all of them end the plan at that entry. A replica that loads a newer snapshot never
reads that seal, so the end is also stored in a record of its own.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from diloco.rendezvous.envelope import BadRecordError, Proof, frame, reading, typed, unframe
from diloco.rendezvous.frames import MAX_RANK, READ_TRIES, Seal
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.phase import RoundPlan
from diloco.rendezvous.retrying_store import RetryingStore
from executors.store import Buffer


@dataclass(frozen=True, slots=True)
class EarlyEnd:
    """The stored end of a run that a replica has stopped.

    Args:
        entry: the entry of the first fragment that ends. Each other fragment has one more entry, at the same step.
        ranks: the replicas that asked for the end.

    Example:
        EarlyEnd(12, (3,)).data(keys.end(), proof)
    """

    entry: int
    ranks: tuple[int, ...]

    def data(self, key: str, proof: Proof) -> bytes:
        """Return the record as bytes for the store.

        Args:
            key: the key of the record. A signature covers the key.
            proof: signs the record or adds a checksum.
        """
        return frame({"entry": self.entry, "ranks": list(self.ranks)}, key, proof)

    @classmethod
    def parse(cls, data: Buffer, key: str, proof: Proof) -> EarlyEnd:
        """Read a record from bytes of the store.

        Args:
            data: the bytes.
            key: the key of the record.
            proof: checks the signature or the checksum.

        Raises:
            BadRecordError: the bytes are not the record of an early end.
        """
        fields, _, _ = unframe(data, key, proof)
        with reading("early end of a run"):
            entry, ranks = typed(int, fields["entry"]), tuple(typed(int, rank) for rank in typed(list, fields["ranks"]))
            if entry < 0 or not ranks or len(ranks) > MAX_RANK or not all(0 <= rank <= MAX_RANK for rank in ranks):
                raise ValueError("an entry or a rank is out of range")
        return cls(entry, ranks)


def find_early_end(store: RetryingStore, keys: Keys, proof: Proof) -> EarlyEnd | None:
    """Return the stored early end of a run. None if there is none, or if its record cannot be read.

    Args:
        store: the store of the run.
        keys: the keys of the rendezvous.
        proof: checks the record.
    """
    key = keys.end()
    for _ in range(READ_TRIES):
        data = store.peek(key)
        if not data:
            return None
        with suppress(BadRecordError):
            return EarlyEnd.parse(data, key, proof)
        store.record_misread(key, data)
    return None


def apply_recorded_end(plan: RoundPlan, store: RetryingStore, keys: Keys, proof: Proof) -> None:
    """End a plan at the stored early end of its run. If there is none, the plan stays as it is.

    Args:
        plan: the plan of this replica, which is changed.
        store: the store of the run.
        keys: the keys of the rendezvous.
        proof: checks the record.
    """
    if (end := find_early_end(store, keys, proof)) is not None:
        plan.end_after(end.entry, end.ranks)


def apply_sealed_end(seal: Seal, entry: int, plan: RoundPlan, store: RetryingStore, keys: Keys, proof: Proof) -> None:
    """End a plan at an entry if its seal names a replica that asks for the end, and store that end.

    Call this function before the entry is applied, because the outer step of a last round is a plain average.

    Args:
        seal: the seal of the entry.
        entry: the index of the entry in the log.
        plan: the plan of this replica, which is changed.
        store: the store of the run.
        keys: the keys of the rendezvous.
        proof: signs the record or adds a checksum.
    """
    if seal.stops and plan.end_after(entry, seal.stops):
        key = keys.end()
        store.create(key, EarlyEnd(entry, seal.stops).data(key, proof))
