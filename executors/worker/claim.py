"""Claims an attempt for a process. If several processes were started for one rank, each gets an attempt of its own."""

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
    """The attempt was cancelled before its process had started."""


def claim_attempt(asked: Attempt, n_decisions: int = 0, key: str | None = None) -> tuple[Attempt, str]:
    """Claim the attempt that was asked for, or the next free one, because a service may start the same job twice.

    Args:
        asked: the attempt that the process was started for.
        n_decisions: the number of entries at the begin of the log that are known not to block the rank. Default 0.
        key: the key of a signed run. None, the default: the run is not signed.

    Returns: the claimed attempt, and the nonce of its claim.

    Raises:
        CancelledBeforeStart: the requested attempt or a later one was cancelled, or the log blocks the rank.
    """
    nonce, claim = _new_claim()
    for attempt in map(asked.at, itertools.count(asked.number)):
        if retry(functools.partial(attempt.has, CANCEL), START):
            _end_before_start(attempt)
        if retry(functools.partial(_nonce_that_counts, attempt, claim), START) == nonce:
            # The log is read after the claim. A canceller looks for claims after it has added its entry to the log. So
            # at least one of the two sees the other.
            log = DecisionLog(attempt.store, attempt.run_id, key=key, n_skipped=n_decisions)
            if (entry := blocking_order(retry(log.read, START), attempt.rank)) is not None:
                retry(functools.partial(attempt.request_cancel, stop_reason(entry)), START)
                _end_before_start(attempt)
            return attempt, nonce
    raise AssertionError("unreachable")


def claim_alone(attempt: Attempt) -> bool:
    """Claim exactly this attempt. Return True if this process has it.

    Args:
        attempt: the attempt.
    """
    nonce, claim = _new_claim()
    return retry(functools.partial(_nonce_that_counts, attempt, claim), START) == nonce


def _new_claim() -> tuple[str, bytes]:
    """Return a claim of this process, and its nonce."""
    nonce, pid, now = os.urandom(16).hex(), os.getpid(), time.time()
    claim = {"nonce": nonce, "pid": pid, "pid_started": start_time(pid), "host": socket.gethostname(), "at": now}
    return nonce, to_bytes(claim)


def _end_before_start(attempt: Attempt) -> NoReturn:
    cancelled = attempt.new_outcome(ReplicaStatus.CANCELLED, "cancelled", pid=os.getpid(), started_at=time.time())
    attempt.record(cancelled, tolerance=START)
    raise CancelledBeforeStart(f"Attempt {attempt.number} of rank {attempt.rank} was cancelled before it started.")


def _nonce_that_counts(attempt: Attempt, claim: bytes) -> str:
    """Create a claim, and return the nonce of the claim that is in the store afterwards.

    The function may be called again after a lost reply.
    """
    # A create may succeed although its reply is lost, so the read decides.
    attempt.create(CLAIM, claim)
    return attempt.read(CLAIM, Claim.parse).nonce
