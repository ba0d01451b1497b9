"""The records that the replicas of a run have left in its store, from one list. No object is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from executors.store import Store, record_names
from executors.store.run_key import held_key, secret_name

RECORD = re.compile(
    r"([0-9]{4}|[1-9][0-9]{4,6})/(0|[1-9][0-9]{0,3})/(boot|started|handle|intent|outcome|heartbeat)\.json"
)
SIGNED = re.compile(
    r"([0-9]{4}|[1-9][0-9]{4,6})/(0|[1-9][0-9]{0,3})/(started|handle|intent|outcome)-([0-9a-f]{16})\.json"
)
STACKS = re.compile(r"([0-9]{4}|[1-9][0-9]{4,6})/(0|[1-9][0-9]{0,3})/stacks/(0|[1-9][0-9]{0,3})\.txt")
WARNINGS = re.compile(r"([0-9]{4}|[1-9][0-9]{4,6})/(0|[1-9][0-9]{0,3})/warnings\.json")
BEGINNINGS = tuple(name.removesuffix(".json") for name in record_names.BEGINNINGS)


@dataclass(frozen=True)
class Inventory:
    """The records that exist, by attempt. Other objects of the run are left out."""

    records: frozenset[tuple[int, int, str]] = frozenset()
    """Rank, attempt, and the record's name."""
    stacks: frozenset[tuple[int, int, int, float]] = frozenset()
    """Rank, attempt, number and time of each dump of stacks."""
    warnings: Mapping[tuple[int, int], tuple[float, int]] = field(default_factory=dict)
    """By rank and attempt, the time and the size of its warnings: they change when the record is written again."""
    plain: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """The sizes of the `outcome.json` in a signed run whose key is known, by rank and attempt. They prove nothing."""
    signed: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """The sizes of the outcomes under the names that only the key predicts, by rank and attempt."""
    copies: frozenset[tuple[int, int, str]] = frozenset()
    """The plain names of records that begin an attempt, in a signed run whose key is known. They prove nothing."""

    @classmethod
    def of(cls, store: Store, run_id: str) -> Inventory:
        """List the replicas of a run.

        In a signed run whose key this process holds, what begins or ends an attempt counts only under the name that the
        key predicts. No other process can have created an object of that name.

        Args:
            store: the run's store.
            run_id: the run.

        Raises:
            StoreError: the store does not answer.

        Example:
            Inventory.of(run.store, run.run_id).newest(0)
        """
        prefix = f"{run_id}/replicas/"
        records, stacks = set[tuple[int, int, str]](), set[tuple[int, int, int, float]]()
        copies = set[tuple[int, int, str]]()
        warnings = dict[tuple[int, int], tuple[float, int]]()
        plain, signed = dict[tuple[int, int], int](), dict[tuple[int, int], int]()
        run_key = held_key(store.url, run_id)
        for entry in store.list(prefix):
            if found := RECORD.fullmatch(entry.key, len(prefix)):
                if run_key is not None and found[3] == "outcome":
                    plain[int(found[1]), int(found[2])] = entry.size_bytes
                elif run_key is not None and found[3] in BEGINNINGS:
                    copies.add((int(found[1]), int(found[2]), found[3]))
                else:
                    records.add((int(found[1]), int(found[2]), found[3]))
            elif run_key is not None and (found := SIGNED.fullmatch(entry.key, len(prefix))):
                if found[4] == secret_name(run_key, f"{prefix}{found[1]}/{found[2]}/{found[3]}.json"):
                    records.add((int(found[1]), int(found[2]), found[3]))
                    if found[3] == "outcome":
                        signed[int(found[1]), int(found[2])] = entry.size_bytes
            elif found := STACKS.fullmatch(entry.key, len(prefix)):
                stacks.add((int(found[1]), int(found[2]), int(found[3]), entry.modified_at))
            elif found := WARNINGS.fullmatch(entry.key, len(prefix)):
                warnings[int(found[1]), int(found[2])] = (entry.modified_at, entry.size_bytes)
        return cls(frozenset(records), frozenset(stacks), warnings, plain, signed, frozenset(copies))

    def __or__(self, other: Inventory) -> Inventory:
        """Return what either knows of: a record is never taken back, and a list may be older than one before it."""
        warnings = {
            key: max(each for each in (self.warnings.get(key), other.warnings.get(key)) if each)
            for key in self.warnings.keys() | other.warnings.keys()
        }
        plain, signed = {**self.plain, **other.plain}, {**self.signed, **other.signed}
        records, stacks, copies = self.records | other.records, self.stacks | other.stacks, self.copies | other.copies
        return Inventory(records, stacks, warnings, plain, signed, copies)

    @property
    def dubious(self) -> dict[tuple[int, int], int]:
        """The sizes of the plain outcomes that are not copies of signed ones, by rank and attempt."""
        return {key: size for key, size in self.plain.items() if self.signed.get(key) != size}

    @property
    def unmatched(self) -> frozenset[tuple[int, int, str]]:
        """The plain names of records that begin an attempt, without the signed record that is created before them."""
        return self.copies - self.records

    def has(self, rank: int, attempt: int, name: str) -> bool:
        """Tell whether an attempt has left a record, such as `started`."""
        return (rank, attempt, name) in self.records

    def newest(self, rank: int) -> int:
        """Return the number of the rank's newest attempt that was launched or claimed; attempts are dense."""
        number = 0
        while any(self.has(rank, number + 1, name) for name in BEGINNINGS):
            number += 1
        return number

    def launched(self, rank: int) -> list[int]:
        """Return the numbers of its attempts with a handle, or the intent to ask for one."""
        numbers = range(self.newest(rank) + 1)
        return [number for number in numbers if self.has(rank, number, "handle") or self.has(rank, number, "intent")]

    def newest_launched(self, rank: int) -> int | None:
        """Return the rank's newest attempt that has a handle or an intent to ask for one. None if there is none."""
        return next(reversed(self.launched(rank)), None)

    def added(self, world_size: int) -> list[int]:
        """Return the ranks beyond the first world that a process has begun to start, in their order."""
        return sorted({rank for rank, _, name in self.records if rank >= world_size and name in ("handle", "intent")})

    def ranks(self, world_size: int) -> list[int]:
        """Return the ranks that were launched, and those that were added and begun since."""
        return [*range(world_size), *self.added(world_size)]

    def joined(self, world_size: int) -> set[int]:
        """Return the ranks beyond the first world that take part."""
        return {rank for rank, number, name in self.records if rank >= world_size and (number, name) == (0, "started")}
