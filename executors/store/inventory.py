"""Inventory: the records that exist in a run's store, by rank and attempt, from one listing. No object is read."""

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
RULES = re.compile(r"([0-9]{4}|[1-9][0-9]{4,6})/(0|[1-9][0-9]{0,3})/rules/(0|[1-9][0-9]{0,2})(\.unjudged)?\.json")
WARNINGS = re.compile(r"([0-9]{4}|[1-9][0-9]{4,6})/(0|[1-9][0-9]{0,3})/warnings\.json")
BEGINNINGS = tuple(name.removesuffix(".json") for name in record_names.BEGINNINGS)


@dataclass(frozen=True)
class Inventory:
    """The records of the attempts of a run. Other objects of the run are left out.

    Example:
        Inventory.of(run.store, run.run_id).newest(0)
    """

    records: frozenset[tuple[int, int, str]] = frozenset()
    """The rank, the attempt and the name of each record, as in (3, 0, "outcome")."""
    stacks: frozenset[tuple[int, int, int, float]] = frozenset()
    """The rank, the attempt, the number and the time of each dump of stacks."""
    warnings: Mapping[tuple[int, int], tuple[float, int]] = field(default_factory=dict)
    """The time and the size of the warnings of each rank and attempt. They show whether the record has changed."""
    rules: frozenset[tuple[int, int, int, bool]] = frozenset()
    """The rank, the attempt and the number of the rule of each record about a rule, and True if the rule was broken."""
    plain: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """The sizes of the objects `outcome.json` by rank and attempt, in a signed run whose key is known.

    Any process can write an object of this name, so these outcomes prove nothing.
    """
    signed: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """The sizes of the outcomes whose names only a process with the key can predict, by rank and attempt."""
    copies: frozenset[tuple[int, int, str]] = frozenset()
    """The records that begin an attempt, found under their plain names, in a signed run whose key is known.

    Any process can write an object of such a name, so these records prove nothing.
    """

    @classmethod
    def of(cls, store: Store, run_id: str) -> Inventory:
        """List the records of a run's replicas.

        If the run is signed and this process holds its key, a record that begins or ends an attempt counts only under
        the name that the key predicts. No process without the key can have created an object of that name.

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
        copies, rules = set[tuple[int, int, str]](), set[tuple[int, int, int, bool]]()
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
            elif found := RULES.fullmatch(entry.key, len(prefix)):
                rules.add((int(found[1]), int(found[2]), int(found[3]), found[4] is None))
            elif found := WARNINGS.fullmatch(entry.key, len(prefix)):
                warnings[int(found[1]), int(found[2])] = (entry.modified_at, entry.size_bytes)
        return cls(frozenset(records), frozenset(stacks), warnings, frozenset(rules), plain, signed, frozenset(copies))

    def __or__(self, other: Inventory) -> Inventory:
        """Return the records of both inventories.

        Records are never removed. So the union of two listings is right, even if the later listing is out of date.
        """
        warnings = {
            key: max(each for each in (self.warnings.get(key), other.warnings.get(key)) if each)
            for key in self.warnings.keys() | other.warnings.keys()
        }
        plain, signed = {**self.plain, **other.plain}, {**self.signed, **other.signed}
        records, stacks, copies = self.records | other.records, self.stacks | other.stacks, self.copies | other.copies
        return Inventory(records, stacks, warnings, self.rules | other.rules, plain, signed, copies)

    @property
    def dubious(self) -> dict[tuple[int, int], int]:
        """The sizes of the plain outcomes that are not copies of signed outcomes, by rank and attempt."""
        return {key: size for key, size in self.plain.items() if self.signed.get(key) != size}

    @property
    def unmatched(self) -> frozenset[tuple[int, int, str]]:
        """The plain records that begin an attempt and have no signed record, which a real copy would have."""
        return self.copies - self.records

    def has(self, rank: int, attempt: int, name: str) -> bool:
        """Return True if an attempt has a record.

        Args:
            rank: the rank.
            attempt: the number of the attempt.
            name: the record's name without `.json`, such as "started".
        """
        return (rank, attempt, name) in self.records

    def newest(self, rank: int) -> int:
        """Return the number of a rank's newest attempt that was launched or claimed. 0 if there is none.

        Args:
            rank: the rank.
        """
        number = 0  # attempts are numbered without gaps, so the first missing one ends the search
        while any(self.has(rank, number + 1, name) for name in BEGINNINGS):
            number += 1
        return number

    def launched(self, rank: int) -> list[int]:
        """Return the numbers of a rank's attempts that have a handle or an intent.

        Args:
            rank: the rank.
        """
        numbers = range(self.newest(rank) + 1)
        return [number for number in numbers if self.has(rank, number, "handle") or self.has(rank, number, "intent")]

    def newest_launched(self, rank: int) -> int | None:
        """Return the number of a rank's newest attempt that has a handle or an intent. None if there is none.

        Args:
            rank: the rank.
        """
        return next(reversed(self.launched(rank)), None)

    def added(self, world_size: int) -> list[int]:
        """Return the ranks that were added after the launch and that a process has begun to start, sorted.

        Args:
            world_size: the number of ranks at the launch.
        """
        return sorted({rank for rank, _, name in self.records if rank >= world_size and name in ("handle", "intent")})

    def ranks(self, world_size: int) -> list[int]:
        """Return the ranks of the launch, and the added ranks that a process has begun to start, sorted.

        Args:
            world_size: the number of ranks at the launch.
        """
        return [*range(world_size), *self.added(world_size)]

    def joined(self, world_size: int) -> set[int]:
        """Return the added ranks whose first attempt has started.

        Args:
            world_size: the number of ranks at the launch.
        """
        return {rank for rank, number, name in self.records if rank >= world_size and (number, name) == (0, "started")}
