"""Reads the records about rules of a run: broken rules, and rules that could not be judged."""

from __future__ import annotations

from collections.abc import Sequence

from executors.attempt.rule_record import find_finding
from executors.errors import CorruptObjectError, StoreError
from executors.settings.rule_finding import RuleFinding
from executors.status import DecisionLine
from executors.store.inventory import Inventory
from executors.view.replica_records import ReplicaRecords

MAX_READ = 1000
"""The most records that are read of one run, because each costs a request."""


class RuleFindings:
    """The records about rules that this process has read. Each record is read once.

    Args:
        records: the records of the run.

    Example:
        for finding in RuleFindings(records).read():
            print(finding.sentence)
    """

    def __init__(self, records: ReplicaRecords) -> None:
        self._records = records
        self._seen = set[tuple[int, int, int, bool]]()
        self._found = list[RuleFinding]()
        self._n_decided = self._n_listed = 0
        self._lines = list[DecisionLine]()

    def read(self) -> Sequence[RuleFinding]:
        """Read the records that are new in the inventory, and return all that were read, in the order of reading.

        A damaged record is left out. The events of the run name it. A record that the store does not return now is read
        by a later call.
        """
        inventory: Inventory = self._records.inventory
        new = sorted(inventory.rules - self._seen)[: max(0, MAX_READ - len(self._seen))]
        put_off = set[tuple[int, int, int, bool]]()

        def read(key: tuple[int, int, int, bool]) -> RuleFinding | None:
            try:
                return find_finding(self._records.store, self._records.run_id, key)
            except CorruptObjectError:
                return None
            except StoreError:
                put_off.add(key)
                return None

        found = [each for each in self._records.map(read, new) if each is not None]
        self._seen |= {*new} - put_off
        self._found += sorted(found, key=lambda each: each.at)
        return tuple(self._found)

    def lines(self, decided: Sequence[DecisionLine]) -> list[DecisionLine]:
        """Return the lines about decisions and about broken rules, in the order in which they became known.

        A later call only adds lines at the end, because a live view prints each line once.

        Args:
            decided: the lines about all decisions so far.
        """
        new = [
            DecisionLine(each.at, f"rank {each.rank}: {each.sentence}")
            for each in self._found[self._n_listed :]
            if each.is_broken
        ]
        self._lines += sorted([*decided[self._n_decided :], *new], key=lambda line: line.at)
        self._n_decided, self._n_listed = len(decided), len(self._found)
        return list(self._lines)
