"""`added/<k>.json`: ranks that were added to a run after its launch. The first, second, … are dense; each is final.

A replica reads them as it looks for joiners: an added rank that never starts hides no other, and a joiner takes none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from executors.store.records import Fields, Record, checked, integer, list_of, text

MAX_RANK = 10**6
MAX_ADDED = 10_000
"""Ranks of one addition, and additions to one run."""
RANKS = list_of(integer(0, MAX_RANK))


def added_key(run_id: str, number: int) -> str:
    """Name the record of an addition."""
    return f"{run_id}/added/{number}.json"


@dataclass(frozen=True, kw_only=True)
class AddedRanks(Record):
    """Which ranks an addition has taken."""

    ranks: tuple[int, ...] = checked(RANKS)
    nonce: str = checked(text(100))
    """Tells this addition from any other."""

    @classmethod
    def parse(cls, data: Any, key: str = "added/0.json", url: str = "") -> Self:
        """Parse what the store holds under the key."""
        added = super().parse(data, key, url)
        if not 0 < len({*added.ranks}) == len(added.ranks) <= MAX_ADDED:
            raise Fields({}, key, url).refusal(f"'ranks' are 1 to {MAX_ADDED} ranks, each once")
        return added
