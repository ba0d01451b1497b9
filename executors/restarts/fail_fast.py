"""`fail_fast`: ends the whole run if a replica fails before the first round, because the others would train alone.

The end is an order in the log, and not a rule of `decide`. The function `decide` applies a restart policy to records
that never change. In contrast, `fail_fast` also works without a policy, and it reads heartbeats, which change. The rule
itself is `executors.status.fails_early`. The process that waits for a run uses the same rule.
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
    """Cancel all ranks of a run after a failure, unless a replica has reported a round.

    Args:
        failed: the attempt that failed.
        outcome: its outcome.
        world_size: the number of ranks of the launch.

    Returns: True if the ranks were cancelled.

    Raises:
        StoreError: the store does not answer. Some ranks may have their cancel marker already.
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
    # otherwise another failed rank has already added the order
    if not all(is_blocked(entries, rank) for rank in ranks):
        order_cancel(log, None, why)
    for rank in ranks:
        peer = Attempt(failed.store, failed.run_id, rank, found.newest(rank))
        if rank != failed.rank and not found.has(rank, peer.number, "outcome"):
            peer.request_cancel(why)
    return True
