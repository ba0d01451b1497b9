"""The first failure ends a run, as long as nobody has had a round: what others would train, they would train alone."""

from __future__ import annotations

import re

from executors.attempt import Attempt, Beat
from executors.protocol import Outcome, ReplicaStatus
from executors.store.records import find_record

OBJECT = re.compile(r"(\d{4,6})/(\d{1,5})/([a-z]+)\.json")
MAX_WHY = 2000  # characters


def end_others(failed: Attempt, outcome: Outcome, world_size: int) -> None:
    """Leave the cancel markers of a failed rank's peers, unless any of the run's replicas has reported a round.

    Raises:
        StoreError: the store does not answer; some peers may have a marker.
    """
    if outcome.status is not ReplicaStatus.FAILED:
        return
    prefix = f"{failed.run_id}/replicas/"
    newest: dict[int, int] = dict.fromkeys(range(world_size), 0)
    heartbeats = []
    ended: set[tuple[int, int]] = set()
    for entry in failed.store.list(prefix):
        parts = OBJECT.fullmatch(entry.key.removeprefix(prefix))
        if parts is None or int(parts[1]) not in newest:
            continue
        rank, number, name = int(parts[1]), int(parts[2]), parts[3]
        newest[rank] = max(newest[rank], number)
        if name == "heartbeat":
            heartbeats.append(entry.key)
        if name in ("outcome", "cancel"):
            ended.add((rank, number))
    for key in heartbeats:
        beat = find_record(failed.store, key, Beat.parse)
        if beat is not None and "round" in beat.reported:
            return
    why = f"rank {failed.rank} failed before the first round: {outcome.headline[:MAX_WHY]}"
    for peer in newest.items():
        if peer[0] != failed.rank and peer not in ended:
            Attempt(failed.store, failed.run_id, *peer).request_cancel(why)
