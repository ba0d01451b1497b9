"""Claiming an attempt: of several processes that would be a rank, which one is which, and whether it may run."""

from __future__ import annotations

import functools
import itertools
import os
import socket
import time
from typing import NoReturn

from executors.attempt import Attempt, Claim
from executors.errors import ReplicasError
from executors.patience import START, retry
from executors.process import start_time
from executors.protocol import ReplicaStatus
from executors.restarts.decision_log import DecisionLog, blocking_order
from executors.restarts.orders import stop_reason
from executors.store.record_names import CANCEL, CLAIM
from executors.store.records import to_bytes


class CancelledBeforeStart(ReplicasError):
    """The attempt was cancelled before its process came up."""


def claim(asked: Attempt, n_decisions: int = 0, key: str | None = None) -> tuple[Attempt, str]:
    """Claim the attempt asked for, or the next free one: a service may start the same input twice.

    Args:
        n_decisions: how many entries of the log are known not to bar the rank.
        key: of a signed run.

    Returns: the attempt, and the nonce of its claim.

    Raises:
        CancelledBeforeStart: an attempt on the way, from the one asked for on, was cancelled; or the log of decisions
            bars the rank, by a cancel or a stop that came before it.
    """
    nonce, claim = _new_claim()
    for attempt in map(asked.at, itertools.count(asked.number)):
        if retry(functools.partial(attempt.has, CANCEL), START):
            _end_before_start(attempt)
        if retry(functools.partial(_nonce_that_counts, attempt, claim), START) == nonce:
            # Behind the claim: who cancels looks for claims behind the entry, so one of the two sees the other.
            log = DecisionLog(attempt.store, attempt.run_id, key=key, n_skipped=n_decisions)
            if (entry := blocking_order(retry(log.read, START), attempt.rank)) is not None:
                retry(functools.partial(attempt.request_cancel, stop_reason(entry)), START)
                _end_before_start(attempt)
            return attempt, nonce
    raise AssertionError("unreachable")


def claim_alone(attempt: Attempt) -> bool:
    """Claim this attempt and no later one; return whether it is this process's."""
    nonce, claim = _new_claim()
    return retry(functools.partial(_nonce_that_counts, attempt, claim), START) == nonce


def _new_claim() -> tuple[str, bytes]:
    """Return a claim of this process, and its nonce."""
    nonce, pid, now = os.urandom(16).hex(), os.getpid(), time.time()
    claim = {"nonce": nonce, "pid": pid, "pid_started": start_time(pid), "host": socket.gethostname(), "at": now}
    return nonce, to_bytes(claim)


def _end_before_start(attempt: Attempt) -> NoReturn:
    cancelled = attempt.ended(ReplicaStatus.CANCELLED, "cancelled", pid=os.getpid(), started_at=time.time())
    attempt.record(cancelled, patience=START)
    raise CancelledBeforeStart(f"Attempt {attempt.number} of rank {attempt.rank} was cancelled before it started.")


def _nonce_that_counts(attempt: Attempt, claim: bytes) -> str:
    """Create a claim and return the nonce of the one that exists; safe to do again when a reply was lost."""
    # Whether the create succeeded is not the question: only what exists decides.
    attempt.create(CLAIM, claim)
    return attempt.read(CLAIM, Claim.parse).nonce
