"""Ending a run before its planned end: one replica asks for it, and all end after the same round.

The wish travels with a contribution. The seal that counts the contribution names who wished it, and a seal is the same
for everybody: so every replica ends the plan at that entry, whatever it had planned. The record of the end is for
replicas that load a newer snapshot and so never read that seal.
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
    """Where a run ends that a replica has stopped.

    Args:
        entry: the first of the last entries; each other fragment has one more, at the same step.
        ranks: the replicas that asked for it.

    Example:
        EarlyEnd(12, (3,)).data(keys.end(), proof)
    """

    entry: int
    ranks: tuple[int, ...]

    def data(self, key: str, proof: Proof) -> bytes:
        """Return the record as it is stored."""
        return frame({"entry": self.entry, "ranks": list(self.ranks)}, key, proof)

    @classmethod
    def parse(cls, data: Buffer, key: str, proof: Proof) -> EarlyEnd:
        """Read a record.

        Raises:
            BadRecordError: these bytes are not the record of an end.
        """
        fields, _, _ = unframe(data, key, proof)
        with reading("early end of a run"):
            entry, ranks = typed(int, fields["entry"]), tuple(typed(int, rank) for rank in typed(list, fields["ranks"]))
            if entry < 0 or not ranks or len(ranks) > MAX_RANK or not all(0 <= rank <= MAX_RANK for rank in ranks):
                raise ValueError("an entry or ranks that cannot be")
        return cls(entry, ranks)


def find_early_end(store: RetryingStore, keys: Keys, proof: Proof) -> EarlyEnd | None:
    """Return where the run ends that a replica has stopped; None if none has, or the record cannot be read."""
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
    """EarlyEnd a plan where the record of the run's end says; without a record, leave it as it is."""
    if (end := find_early_end(store, keys, proof)) is not None:
        plan.end_after(end.entry, end.ranks)


def apply_sealed_end(seal: Seal, entry: int, plan: RoundPlan, store: RetryingStore, keys: Keys, proof: Proof) -> None:
    """EarlyEnd a plan with the entry whose seal says that a replica wants to stop, and record it.

    Call it before the entry is applied: the outer step of a last round is a plain average.
    """
    if seal.stops and plan.end_after(entry, seal.stops):
        key = keys.end()
        store.create(key, EarlyEnd(entry, seal.stops).data(key, proof))
