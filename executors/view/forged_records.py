"""Finds forged records: outcomes, intents and claims of a signed run that were not made with its key."""

from __future__ import annotations

import contextlib

from executors.attempt import Attempt
from executors.errors import StoreError
from executors.view.replica_records import ReplicaRecords


class ForgedRecords:
    """Finds forged records of a run, as of the last look. Each suspicious record is judged once.

    Args:
        records: the records of the replicas.

    Example:
        ForgedRecords(reader.records).outcomes()
    """

    def __init__(self, records: ReplicaRecords) -> None:
        self._records = records
        self._judged: dict[tuple[int, int, int], bool] = {}
        """True if an `outcome.json` without a signed original is forged, by rank, attempt and size of the object."""
        self._judged_starts: set[tuple[int, int, str]] = set()
        """Rank, attempt and name of each intent or claim that is not signed with the run's key."""

    def outcomes(self) -> list[tuple[int, int]]:
        """Return the attempts whose `outcome.json` is not signed with the run's key, as of the last look."""
        found = sorted((*key, size) for key, size in self._records.inventory.dubious.items())
        new = [each for each in found if each not in self._judged]
        attempts = [Attempt(self._records.store, self._records.run_id, *each[:2]) for each in new]

        def is_forged(attempt: Attempt) -> bool | None:
            with contextlib.suppress(StoreError):  # the store did not answer; the next look asks again
                return attempt.has_forged_outcome
            return None

        answers = zip(new, self._records.map(is_forged, attempts), strict=True)
        self._judged.update({each: answer for each, answer in answers if answer is not None})
        return [each[:2] for each in found if self._judged.get(each)]

    def starts(self) -> list[tuple[int, int]]:
        """Return the attempts whose intent or claim is not signed with the run's key, as of the last look."""
        found = self._records.inventory.unmatched
        new = [each for each in sorted(found) if each not in self._judged_starts]

        def is_forged(each: tuple[int, int, str]) -> bool:
            rank, number, name = each
            with contextlib.suppress(StoreError):  # the next look asks again
                # A list takes a while, so it may show the copy and not yet the signed record, although the signed
                # record is created first.
                return not Attempt(self._records.store, self._records.run_id, rank, number).has(f"{name}.json")
            return False

        self._judged_starts |= {
            each for each, is_one in zip(new, self._records.map(is_forged, new), strict=True) if is_one
        }
        return sorted({(rank, number) for rank, number, _ in found & self._judged_starts})
