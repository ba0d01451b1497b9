"""What is left of a run's `max_cost` for one more container of a rank.

Each replica has an equal share of the money, and with it of the time. A rank that is started again gets what its
earlier attempts left of that.
"""

from __future__ import annotations

from collections.abc import Callable

from executors.attempt import Attempt, Beat, Claim
from executors.durations import name_duration
from executors.errors import MaxCostSpentError
from executors.native import RunSpec
from executors.status import name_ranks
from executors.store import store_at
from executors.task.record import LaunchedWith

LEAST_S = 60.0  # less is not worth a container


def limits_left(
    run: RunSpec,
    launched: LaunchedWith | None,
    timeout_s: float | None,
    usd_per_hour: Callable[[], float | None],
    *,
    together: bool,
) -> dict[int, float | None]:
    """Return how long each rank of a start may run: no longer than `timeout_s`, nor than what is left of its share.

    What was added to the run, and spares, have that limit alone: a spare's container has a share of its own.

    Args:
        launched: what the run was launched with.
        usd_per_hour: what a replica costs. None: its service does not tell now; the time limit of the launch counts.
        together: whether all have one limit: then it is the least.

    Raises:
        MaxCostSpentError: the share of a rank is used up.
    """
    limits: dict[int, float | None] = dict.fromkeys(run.ranks, timeout_s)
    if launched is None or launched.max_cost is None or run.attempt == 0 or run.is_of_spares:
        return limits
    share_s = launched.timeout_s
    if price := usd_per_hour():
        share_s = launched.max_cost / (launched.world_size + launched.spares) / price * 3600
    store, spent = store_at(run.store_url), list[int]()
    for rank in run.ranks:
        if share_s is None or rank >= launched.world_size:
            continue
        left_s = share_s - used_s(Attempt(store, run.run_id, rank, run.attempt))
        limits[rank] = left_s if timeout_s is None else min(timeout_s, left_s)
        spent += [rank] if left_s < LEAST_S else []
    if spent and share_s is not None:
        raise MaxCostSpentError(
            f"max_cost={launched.max_cost:g} of run {run.run_id!r} is spent: {name_ranks(spent)} ran for the "
            f"{name_duration(share_s)} that each replica may. A new run from its snapshot has a max_cost of its own: "
            f"replicas resume {run.run_id} --from-snapshot",
            ranks=spent,
        )
    if together:
        least_s = min((limit_s for limit_s in limits.values() if limit_s is not None), default=None)
        limits = dict.fromkeys(limits, least_s)
    return limits


def used_s(attempt: Attempt) -> float:
    """Return how long the containers of a rank's earlier attempts ran, by their own clocks, from the first claim on."""
    total_s, began_at, seen_at = 0.0, 0.0, 0.0
    for number in range(attempt.number):
        earlier = attempt.at(number)
        claim = earlier.find("started.json", Claim.parse)
        if claim is None or claim.at is None:
            continue
        if earlier.has("intent.json"):  # a container of its own; else a process after another, in one container
            total_s += max(0.0, seen_at - began_at)
            began_at = seen_at = claim.at
        seen_at = max(seen_at, claim.at, _last_seen(earlier, claim))
    return total_s + max(0.0, seen_at - began_at)


def _last_seen(attempt: Attempt, claim: Claim) -> float:
    """Return when an attempt was last known to run; of one whose end others found, that is its heartbeat."""
    beat, outcome = attempt.find("heartbeat.json", Beat.parse), attempt.outcome()
    is_told_there = outcome is not None and outcome.host == claim.host
    return max(beat.at if beat else 0.0, outcome.finished_at if outcome is not None and is_told_there else 0.0)
