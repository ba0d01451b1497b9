"""The record `added/<k>.json`: the ranks that were added to a run after its launch.

The records are numbered 0, 1, 2 … without gaps, and none is ever changed. A replica reads them when it looks for
replicas that join. So an added rank that never starts does not hide the ranks after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from executors.store.records import Fields, Record, checked, integer, list_of, text

MAX_RANK = 10**6
MAX_ADDED = 10_000
"""The most ranks in one addition, and the most additions to one run."""
RANKS = list_of(integer(0, MAX_RANK))


def added_key(run_id: str, number: int) -> str:
    """Return the key of the record of an addition.

    Args:
        run_id: the run.
        number: the number of the addition in the run, counted from 0.

    Example:
        added_key("brave-otter-7f3a", 0)
    """
    return f"{run_id}/added/{number}.json"


@dataclass(frozen=True, kw_only=True)
class AddedRanks(Record):
    """The ranks that one addition has taken.

    Example:
        find_record(store, added_key("brave-otter-7f3a", 0), AddedRanks.parse)
    """

    ranks: tuple[int, ...] = checked(RANKS)
    nonce: str = checked(text(100))
    """A random text by which the process that wrote the record recognizes it."""

    @classmethod
    def parse(cls, data: Any, key: str = "added/0.json", url: str = "") -> Self:
        """Make the record of an object; see `Record.parse`.

        Args:
            data: the object's bytes, or the decoded object.
            key: the key of the object, for messages.
            url: the url of its store, for messages.

        Raises:
            CorruptObjectError: the object is not such a record, has no rank, or names a rank twice.
        """
        added = super().parse(data, key, url)
        if not 0 < len({*added.ranks}) == len(added.ranks) <= MAX_ADDED:
            raise Fields({}, key, url).refusal(f"'ranks' must be 1 to {MAX_ADDED} different ranks")
        return added
