"""`fail_fast`: the first failure ends a run before its first round, as the other replicas would train alone.

It is an order and not a part of `decide`. `decide` follows ends under a policy of restarts; `fail_fast` also holds for
runs without one, and reads heartbeats, which change. The rule itself is `executors.status.fails_early`, which the
process that waits for a run asks as well.
"""

from __future__ import annotations

from executors.attempt import Attempt
from executors.protocol import Outcome, ReplicaStatus
from executors.restarts.decision_log import DecisionLog, is_blocked
from executors.restarts.orders import order_cancel
from executors.status import describe_early_failure, fails_early
from executors.store.inventory import Inventory
from executors.task.record import find_run_record


def end_others(failed: Attempt, outcome: Outcome, world_size: int) -> bool:
    """Block the run, and leave the cancel markers of a failed rank's peers, unless a replica has reported a round.

    Args:
        failed: the attempt that failed.
        outcome: its end.
        world_size: the number of ranks of the launch.

    Returns: True if it did.

    Raises:
        StoreError: the store does not answer; some peers may have a marker.
    """
    if outcome.status is not ReplicaStatus.FAILED:
        return False
    record = find_run_record(failed.store, failed.run_id)
    found = Inventory.of(failed.store, failed.run_id)
    living = [Attempt(failed.store, failed.run_id, *each[:2]) for each in found.records if each[2] == "heartbeat"]
    beats = (attempt.beat() for attempt in living)
    min_replicas = None if record is None else record.settings.min_replicas
    if not fails_early(outcome, min_replicas, (beat.reported for beat in beats if beat is not None)):
        return False
    why = describe_early_failure(failed.rank, outcome)
    log, ranks = DecisionLog(failed.store, failed.run_id), found.ranks(world_size)
    entries = log.read()
    if not all(is_blocked(entries, rank) for rank in ranks):  # another that failed has not done it
        order_cancel(log, None, why)
    for rank in ranks:
        peer = Attempt(failed.store, failed.run_id, rank, found.newest(rank))
        if rank != failed.rank and not found.has(rank, peer.number, "outcome"):
            peer.request_cancel(why)
    return True
