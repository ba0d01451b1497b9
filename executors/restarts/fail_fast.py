"""The first failure ends a run, as long as nobody has had a round: what others would train, they would train alone."""

from __future__ import annotations

from executors.attempt import Attempt
from executors.protocol import Outcome, ReplicaStatus
from executors.restarts.decision_log import DecisionLog, is_blocked
from executors.restarts.orders import order_cancel
from executors.status import FAILED_EARLY, is_failure
from executors.store.inventory import Inventory
from executors.task.record import find_run_record

MAX_WHY = 2000  # characters


def end_others(failed: Attempt, outcome: Outcome, world_size: int) -> bool:
    """Bar the run, and leave the cancel markers of a failed rank's peers, unless a replica has reported a round.

    Returns: whether it did.

    Raises:
        StoreError: the store does not answer; some peers may have a marker.
    """
    if outcome.status is not ReplicaStatus.FAILED:
        return False
    record = find_run_record(failed.store, failed.run_id)
    if not is_failure(outcome, None if record is None else record.settings.min_replicas):
        return False
    found = Inventory.of(failed.store, failed.run_id)
    living = [Attempt(failed.store, failed.run_id, *each[:2]) for each in found.records if each[2] == "heartbeat"]
    if any("round" in beat.reported for beat in (attempt.beat() for attempt in living) if beat is not None):
        return False
    why = f"rank {failed.rank} {FAILED_EARLY}: {outcome.headline[:MAX_WHY]}"
    log, ranks = DecisionLog(failed.store, failed.run_id), found.ranks(world_size)
    entries = log.read()
    if not all(is_blocked(entries, rank) for rank in ranks):  # another that failed has not done it
        order_cancel(log, None, why)
    for rank in ranks:
        peer = Attempt(failed.store, failed.run_id, rank, found.newest(rank))
        if rank != failed.rank and not found.has(rank, peer.number, "outcome"):
            peer.request_cancel(why)
    return True
