"""Reads the records about rules of an attempt: rules that were broken, and rules that could not be judged."""

from __future__ import annotations

from executors.attempt import Attempt
from executors.settings.rule_finding import BROKEN, UNJUDGED, RuleFinding, rule_record_name
from executors.store import Store


def find_finding(store: Store, run_id: str, key: tuple[int, int, int, bool]) -> RuleFinding | None:
    """Return one record about a rule. None: it was deleted, or it is not about the attempt in its name.

    Args:
        store: the store of the run.
        run_id: the run.
        key: the rank, the attempt, the number of the rule, and True if the rule was broken, as an inventory has them.

    Raises:
        StoreError: the store does not answer, or the record cannot be parsed.

    Example:
        [find_finding(store, "brave-otter-7f3a", key) for key in inventory.rules]
    """
    rank, number, rule, is_broken = key
    name = rule_record_name(rule, BROKEN if is_broken else UNJUDGED)
    found = Attempt(store, run_id, rank, number).find(name, RuleFinding.parse)
    is_own = found is not None and (found.rank, found.attempt, found.index, found.is_broken) == key
    return found if is_own else None
