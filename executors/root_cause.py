"""From the outcomes of a run to the one error that tells what went wrong."""

from __future__ import annotations

from collections.abc import Sequence

from executors.errors import (
    ReplicaCancelledError,
    ReplicaError,
    ReplicaFailedError,
    ReplicaLostError,
    ReplicaTimeoutError,
)
from executors.outcome import Outcome
from executors.protocol import ReplicaStatus

_KINDS: dict[str | None, type[ReplicaError]] = {
    "timeout": ReplicaTimeoutError,
    "cancelled": ReplicaCancelledError,
    "signal": ReplicaLostError,
    "oom": ReplicaLostError,
    "lost": ReplicaLostError,
    "preempted": ReplicaLostError,
}


def raise_root_cause(outcomes: Sequence[Outcome]) -> None:
    """Raise the error of the earliest failure; do nothing if every replica succeeded.

    A cancelled or fenced replica is the cause only when nothing else failed: it was told to end.

    Raises:
        ReplicaError: the kind that fits the reason; its message is the remote traceback, its notes the other failures.
    """
    bad = [outcome for outcome in outcomes if outcome.status is not ReplicaStatus.SUCCEEDED]
    if not bad:
        return
    cause, *others = sorted(bad, key=lambda outcome: (outcome.reason in ("cancelled", "fenced"), outcome.finished_at))
    error = _KINDS.get(cause.reason, ReplicaFailedError)(
        cause.error or f"Replica {cause.rank} is {cause.status}.", rank=cause.rank, attempt=cause.attempt, outcome=cause
    )
    error.add_note(f"This is rank {cause.rank} of {len(outcomes)} (attempt {cause.attempt}), reason: {cause.reason}.")
    for other in others:
        error.add_note(f"Rank {other.rank} (attempt {other.attempt}) {other.status}, {other.reason}: {other.headline}")
    raise error
