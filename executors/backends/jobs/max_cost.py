"""Limits the time of a restarted rank to the rest of its share of `max_cost`. `affordable_s` limits a new run.

Each replica has an equal share of the money. A rank that is started again gets the part of its share that its earlier
attempts did not spend. The price of each attempt is the price of the container that it had.
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

LEAST_S = 60.0  # a container is not started for a shorter time
PRICE = nullable(number(0.0, FAR_AHEAD))


def limits_left(
    run: RunSpec,
    launched: LaunchedWith | None,
    timeout_s: float | None,
    usd_per_hour: float | None,
    *,
    together: bool,
) -> dict[int, float | None]:
    """Return the time limit of each rank of a start in seconds: `timeout_s`, or less if the rest of its share pays
    for less.

    For added replicas and spares only `timeout_s` counts, because they have shares of their own.

    Args:
        run: the run, with the ranks that start.
        launched: the arguments of the launch. None: they are not known, so only `timeout_s` counts.
        timeout_s: the time limit of each replica in seconds. None: no limit.
        usd_per_hour: the price of a replica. None: the service gives no price now. Then the price follows from the time
            limit of the launch.
        together: True if the ranks start as a group, which has one limit. Then the smallest limit counts for all.

    Raises:
        MaxCostSpentError: a rank has spent its share.

    Example:
        limits_left(run, launched, 3600.0, 2.5, together=False)
    """
    limits: dict[int, float | None] = dict.fromkeys(run.ranks, timeout_s)
    settings = None if launched is None else launched.settings
    if settings is None or settings.max_cost is None or run.attempt == 0 or run.is_of_spares:
        return limits
    share_usd = settings.max_cost / (settings.n + settings.spares)
    # The launch chose a time limit for which the share pays, so its containers cost at most this price.
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
            f"${share_usd:.2f} that each replica may cost. To continue, start a new run with a max_cost of its own: "
            f"replicas resume {run.run_id} --from-snapshot",
            ranks=spent,
        )
    if together:
        least_s = min((limit_s for limit_s in limits.values() if limit_s is not None), default=None)
        limits = dict.fromkeys(limits, least_s)
    return limits


def spent_usd(attempt: Attempt, usd_per_hour: float) -> float:
    """Return the cost of the containers of a rank's earlier attempts, in US dollars.

    Args:
        attempt: the attempt that starts now.
        usd_per_hour: the price of containers whose handles have no price.

    Raises:
        StoreError: the store does not answer.

    Example:
        spent_usd(attempt, 2.5)
    """
    costs = []
    for launched, seconds in used_s(attempt).items():
        noted = attempt.at(launched).find(HANDLE, _parse_price)
        costs.append(seconds / 3600 * (usd_per_hour if noted is None else noted))
    return sum(costs)


def used_s(attempt: Attempt) -> dict[int, float]:
    """Return for how many seconds each container of a rank's earlier attempts ran.

    The key is the number of the attempt for which the container was launched. The time is measured by the container's
    clock. It begins with the installation of packages, or with the first claim if nothing is installed.

    Args:
        attempt: the attempt that starts now.

    Raises:
        StoreError: the store does not answer.

    Example:
        sum(used_s(attempt).values())
    """
    found: dict[int, float] = {}
    container, began_at, seen_at = 0, 0.0, 0.0
    for number_of_it in range(attempt.number):
        earlier = attempt.at(number_of_it)
        claim = earlier.find(CLAIM, Claim.parse)
        if claim is None or claim.at is None:
            continue
        if not found or earlier.has_intent():  # without an intent, the attempt was a new process in the same container
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
    """Return the last time at which an attempt is known to have run, by its own clock.

    If another machine recorded the outcome, the time in it is the time at which that machine noticed the end. So only
    the heartbeat is used.
    """
    beat, outcome = attempt.beat(), attempt.outcome()
    is_recorded_there = outcome is not None and outcome.host == claim.host
    return max(beat.at if beat else 0.0, outcome.finished_at if outcome is not None and is_recorded_there else 0.0)
