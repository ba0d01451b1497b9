"""The rest of a run's `max_cost` for one more container of a rank.

Each replica has an equal share of the money, and with it of the time. A rank that is started again gets what its
earlier attempts left of that, each at the price of the container that it had.
"""

from __future__ import annotations

from typing import Any

from executors.attempt import Attempt, Claim
from executors.errors import MaxCostSpentError
from executors.settings.run_spec import RunSpec
from executors.status import name_ranks
from executors.store import store_at
from executors.store.record_names import CLAIM, HANDLE
from executors.store.records import FAR_AHEAD, Fields, json_object, nullable, number
from executors.task.record import LaunchedWith

LEAST_S = 60.0  # less is not worth a container
PRICE = nullable(number(0.0, FAR_AHEAD))


def limits_left(
    run: RunSpec,
    launched: LaunchedWith | None,
    timeout_s: float | None,
    usd_per_hour: float | None,
    *,
    together: bool,
) -> dict[int, float | None]:
    """Return how long each rank of a start may run: no longer than `timeout_s`, nor than its share still pays for.

    Added replicas and spares have that limit alone: a spare's container has a share of its own.

    Args:
        launched: the arguments of the launch.
        usd_per_hour: the price of a replica. None: its service gives no price now, so the launch's time limit counts.
        together: whether all have one limit: then it is the least.

    Raises:
        MaxCostSpentError: the share of a rank is used up.
    """
    limits: dict[int, float | None] = dict.fromkeys(run.ranks, timeout_s)
    settings = None if launched is None else launched.settings
    if settings is None or settings.max_cost is None or run.attempt == 0 or run.is_of_spares:
        return limits
    share_usd = settings.max_cost / (settings.n + settings.spares)
    # The launch's limit is no longer than what the share paid for, so its containers cost no more than this.
    at_launch = share_usd / settings.timeout * 3600 if settings.timeout else None
    price = usd_per_hour or at_launch
    if price is None:
        return limits
    store, spent = store_at(run.store_url), list[int]()
    for rank in run.ranks:
        if rank >= settings.n:
            continue
        left_usd = share_usd - spent_usd(Attempt(store, run.run_id, rank, run.attempt), at_launch or price)
        left_s = left_usd / price * 3600
        limits[rank] = left_s if timeout_s is None else min(timeout_s, left_s)
        spent += [rank] if left_s < LEAST_S else []
    if spent:
        raise MaxCostSpentError(
            f"max_cost={settings.max_cost:g} of run {run.run_id!r} is spent: {name_ranks(spent)} ran for the "
            f"${share_usd:.2f} that each replica may cost. A new run from its snapshot has a max_cost of its own: "
            f"replicas resume {run.run_id} --from-snapshot",
            ranks=spent,
        )
    if together:
        least_s = min((limit_s for limit_s in limits.values() if limit_s is not None), default=None)
        limits = dict.fromkeys(limits, least_s)
    return limits


def spent_usd(attempt: Attempt, usd_per_hour: float) -> float:
    """Return what the containers of a rank's earlier attempts cost.

    Args:
        usd_per_hour: of those whose handles do not say what they cost.
    """
    costs = []
    for launched, seconds in used_s(attempt).items():
        noted = attempt.at(launched).find(HANDLE, _parse_price)
        costs.append(seconds / 3600 * (usd_per_hour if noted is None else noted))
    return sum(costs)


def used_s(attempt: Attempt) -> dict[int, float]:
    """Return how long the containers of a rank's earlier attempts ran, by the attempt that each was launched for.

    By their own clocks, from the start of their installation if they had one, else from the first claim on.
    """
    found: dict[int, float] = {}
    container, began_at, seen_at = 0, 0.0, 0.0
    for number_of_it in range(attempt.number):
        earlier = attempt.at(number_of_it)
        claim = earlier.find(CLAIM, Claim.parse)
        if claim is None or claim.at is None:
            continue
        if not found or earlier.has_intent():  # a container of its own; else another process in the same one
            boot = earlier.boot()
            container, seen_at = number_of_it, claim.at
            began_at = claim.at if boot is None else min(claim.at, boot.at)
        seen_at = max(seen_at, claim.at, _last_seen(earlier, claim))
        found[container] = max(0.0, seen_at - began_at)
    return found


def _parse_price(data: Any, key: str, url: str) -> float | None:
    metadata = Fields(data, key, url).take("metadata", json_object)
    return Fields(metadata, key, url).take("usd_per_hour", PRICE, None)


def _last_seen(attempt: Attempt, claim: Claim) -> float:
    """Return when an attempt was last known to run; of one whose end others found, that is its heartbeat."""
    beat, outcome = attempt.beat(), attempt.outcome()
    is_told_there = outcome is not None and outcome.host == claim.host
    return max(beat.at if beat else 0.0, outcome.finished_at if outcome is not None and is_told_there else 0.0)
