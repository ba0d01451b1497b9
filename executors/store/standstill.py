"""Describes a round of a signed run that cannot continue until the user deletes an object."""

from __future__ import annotations

from collections.abc import Sequence

from executors.protocol import Standstill, WarningCount
from executors.store.url import command_to_delete

__all__ = ["Standstill", "describe_standstill", "standstill_lines"]

MAX_LINES = 3  # lines about one run: each names an object


def describe_standstill(found: Standstill, store_url: str, *, has_ended: bool = False) -> str:
    """Return a line that names the object that blocks a round, and the command that deletes the object.

    Args:
        found: the standstill, which another user may have written. The caller must escape the text for its output.
        store_url: the url of the run's store.
        has_ended: True if the replica ended while the round was blocked.

    Example:
        describe_standstill(Standstill(round=12, key="otter/diloco/main/seal/11"), "file:///data/runs")
    """
    name = f"Round {found.round}" if found.round else "The first anchor"
    state = "made no progress when the replica ended" if has_ended else "makes no progress"
    more = f" (and {found.n_more} more)" if found.n_more else ""
    command = command_to_delete(store_url, found.key)
    return (
        f"{name} {state}: the object {found.key!r}{more} was made without the run's key, or is damaged. "
        f"Delete it{f': {command}' if command else ' in the store.'}"
    )


def standstill_lines(counts: Sequence[tuple[WarningCount | None, bool]], run_id: str, store_url: str) -> list[str]:
    """Return a line on each round that cannot continue, the earliest first. Replicas that wait for one object share it.

    Args:
        counts: for each replica its count of warnings, and True if the replica has ended.
        run_id: the run. Objects of other runs are not named, because another user may have written the record.
        store_url: the url of the run's store.

    Example:
        standstill_lines([(outcome.warned, True) for outcome in run.outcomes()], run.run_id, run.store.url)
    """
    found: dict[Standstill, bool] = {}
    for count, has_ended in counts:
        each = None if count is None else count.standstill
        if each is not None and each.key.startswith(f"{run_id}/"):
            found[each] = found.get(each, True) and has_ended
    ordered = sorted(found.items(), key=lambda item: (item[0].round, item[0].key))
    return [describe_standstill(each, store_url, has_ended=has_ended) for each, has_ended in ordered[:MAX_LINES]]
