"""What a replica leaves behind: one write-once `outcome.json` per attempt, which decides its status.

Normally the worker writes it. When a process ends without one, whoever learns it first does. Whoever comes later
finds the key taken, so an outcome never changes.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from executors.attempt_records import MAX_ATTEMPTS, MAX_RANK, PID, Beat, CancelMarker
from executors.errors import CorruptObjectError
from executors.insisting import RETRY_S, insist
from executors.protocol import ReplicaStatus
from executors.records import (
    FAR_AHEAD,
    LONG_AGO,
    Fields,
    anything,
    exists,
    find_record,
    integer,
    nullable,
    number,
    one_of,
    text,
    to_bytes,
)
from executors.replica import replica_key
from executors.store import Store
from executors.waiting import as_status

Reason = Literal[
    "exception",  # the entrypoint raised
    "timeout",  # ran into the time limit of its launch
    "signal",  # ended by a signal nobody of us sent
    "oom",  # the kernel killed it for want of memory
    "lost",  # vanished with whoever watched it
    "preempted",  # the backend took the machine back
    "fenced",  # a newer attempt of this rank took over; neutral
    "no_result",  # the process ended by itself before the entrypoint returned
    "result_not_serializable",  # it returned something that is no JSON value
    "cancelled",
    "start_failed",  # the backend could not start it
]
REASONS: tuple[str, ...] = get_args(Reason)
ENDED = tuple(str(status) for status in ReplicaStatus if status.is_terminal)
BY_USER = "cancelled by the user"
OUTPUT_TAIL_BYTES = 64 * 1024
MAX_OUTCOME_BYTES = 32 << 20
MAX_ERROR = 1 << 20  # characters


@dataclass(frozen=True)
class Outcome:
    """How one attempt of one rank ended."""

    rank: int
    attempt: int
    status: ReplicaStatus
    reason: Reason | None = None
    exit_code: int | None = None
    """The exit status; minus the signal's number when a signal ended the process."""
    signal: str | None = None
    error: str | None = None
    """A traceback, or a sentence that says what happened."""
    error_line: str | None = None
    """The line that begins the exception, of an error that is a traceback."""
    result: Any = None
    host: str = ""
    pid: int | None = None
    started_at: float | None = None
    finished_at: float = 0.0
    """Seconds since the epoch, by the clock of whoever recorded the outcome."""
    output_tail: str = ""

    @classmethod
    def parse(cls, data: Any, key: str = "outcome.json", url: str = "") -> Outcome:
        """Read what stands under the key.

        Raises:
            CorruptObjectError: it is no outcome; the message names what of it does not fit.
        """
        fields = Fields(data, key, url)
        reason: Any = fields.take("reason", nullable(one_of(*REASONS)), None)
        return cls(
            rank=fields.take("rank", integer(0, MAX_RANK)),
            attempt=fields.take("attempt", integer(0, MAX_ATTEMPTS)),
            status=ReplicaStatus(fields.take("status", one_of(*ENDED))),
            reason=reason,
            exit_code=fields.take("exit_code", nullable(integer(-(2**31), 2**31)), None),
            signal=fields.take("signal", nullable(text(100)), None),
            error=fields.take("error", nullable(text(MAX_ERROR)), None),
            error_line=fields.take("error_line", nullable(text(MAX_ERROR)), None),
            result=fields.take("result", anything, None),
            host=fields.take("host", text(1000), ""),
            pid=fields.take("pid", nullable(PID), None),
            started_at=fields.take("started_at", nullable(number(LONG_AGO, FAR_AHEAD)), None),
            finished_at=fields.take("finished_at", number(LONG_AGO, FAR_AHEAD), 0.0),
            output_tail=fields.take("output_tail", text(MAX_ERROR), ""),
        )

    @classmethod
    def of_row(cls, rank: int, attempt: int, row: Mapping[str, Any]) -> Outcome:
        """Take what an executor's `collect` told of a replica."""
        status = as_status(row.get("status"))
        reason: Any = row.get("reason") if status is not ReplicaStatus.CANCELLED else "cancelled"
        code, error, result = (row.get(name) for name in ("exit_code", "error", "result"))
        return cls(rank, attempt, status, reason, code, error=error, result=result)

    @property
    def headline(self) -> str:
        """What went wrong, in one line."""
        return self.error_line or (self.error or "").strip().rpartition("\n")[2]

    def to_row(self) -> dict[str, Any]:
        """Return what `collect` tells of this replica."""
        return {
            "rank": self.rank,
            "status": self.status,
            "exit_code": self.exit_code,
            "error": self.error,
            "result": self.result,
            "reason": self.reason,
        }


def newest_attempt(store: Store, run_id: str, rank: int, at_least: int = 0) -> int:
    """Return the number of the rank's newest attempt that was launched or claimed, or `at_least` when none is newer.

    Attempts are dense: launched ones have a handle, or on a cloud an intent at least; a second copy of a launched one
    has a claim alone, and one whose launch was interrupted an outcome alone.
    """
    names = ("started.json", "handle.json", "intent.json", "outcome.json")
    attempt = at_least
    while any(exists(store, replica_key(run_id, rank, attempt + 1, name)) for name in names):
        attempt += 1
        if attempt > MAX_ATTEMPTS:
            raise CorruptObjectError(f"Rank {rank} of run {run_id!r} has more than {MAX_ATTEMPTS} attempts.")
    return attempt


def count_joined(store: Store, run_id: str, world_size: int) -> int:
    """Return how many ranks beyond those that were launched have joined the run since; their numbers are dense."""
    joined = 0
    while joined < MAX_RANK and exists(store, replica_key(run_id, world_size + joined, 0, "started.json")):
        joined += 1
    return joined


def find_outcome(store: Store, run_id: str, rank: int, attempt: int) -> Outcome | None:
    """Read the outcome of one attempt; None while it has none."""
    key = replica_key(run_id, rank, attempt, "outcome.json")
    found = find_record(store, key, Outcome.parse, MAX_OUTCOME_BYTES)
    if found is not None and (found.rank, found.attempt) != (rank, attempt):
        whose = f"rank {found.rank}, attempt {found.attempt}"
        raise CorruptObjectError(f"{key!r} in {store.url} is the outcome of {whose}.", key=key, url=store.url)
    return found


def record_outcome(store: Store, run_id: str, outcome: Outcome) -> Outcome:
    """Write the outcome unless one stands, and return the one that stands.

    What ends after its cancel marker was written is `cancelled`, however it ended.
    """
    marker = find_record(store, replica_key(run_id, outcome.rank, outcome.attempt, "cancel.json"), CancelMarker.parse)
    if marker is not None:
        told = None if outcome.reason == "signal" else outcome.error  # the signal was the cancellation's
        error = told or f"Replica {outcome.rank} was ended: {marker.why.rstrip('.')}."
        outcome = replace(outcome, status=ReplicaStatus.CANCELLED, reason="cancelled", result=None, error=error)
    outcome = replace(
        outcome, host=outcome.host or socket.gethostname(), finished_at=outcome.finished_at or time.time()
    )
    store.put_if_absent(replica_key(run_id, outcome.rank, outcome.attempt, "outcome.json"), _encode(outcome))
    standing = find_outcome(store, run_id, outcome.rank, outcome.attempt)
    return standing if standing is not None else outcome


def request_cancel(store: Store, run_id: str, rank: int, attempt: int, why: str = BY_USER) -> None:
    """Leave the cancel marker of an attempt, so that whatever ends it now is a cancellation. Idempotent."""
    marker = {"by": f"{socket.gethostname()}:{os.getpid()}", "why": why, "at": time.time()}
    store.put_if_absent(replica_key(run_id, rank, attempt, "cancel.json"), to_bytes(marker))


def insist_on_outcome(store: Store, run_id: str, outcome: Outcome, limit_s: float = RETRY_S) -> Outcome:
    """Write the outcome as `record_outcome` does, trying again while the store fails, `limit_s` seconds at most.

    Raises:
        StoreError: what the store said last.
    """
    return insist(lambda: record_outcome(store, run_id, outcome), limit_s)


def record_loss(store: Store, run_id: str, rank: int, attempt: int, world_size: int, who_says: str) -> Outcome:
    """Write the outcome of a replica that vanished without one.

    Args:
        who_says: as in "its supervisor is gone" or "Modal reports it gone".
    """
    beat = find_record(store, replica_key(run_id, rank, attempt, "heartbeat.json"), Beat.parse)
    age = f" Its last heartbeat was {time.time() - beat.at:.0f} s ago." if beat else " It never sent a heartbeat."
    error = f"Replica {rank} of {world_size} (attempt {attempt}) was lost: {who_says} and it left no outcome.{age}"
    return record_outcome(store, run_id, Outcome(rank, attempt, ReplicaStatus.FAILED, "lost", error=error))


def _encode(outcome: Outcome) -> bytes:
    """Encode an outcome within the bounds that its readers keep."""
    if outcome.error is not None and len(outcome.error) > MAX_ERROR:
        half = MAX_ERROR // 2 - 10  # of a traceback: where it came from, and what it says
        outcome = replace(outcome, error=f"{outcome.error[:half]}\n…\n{outcome.error[-half:]}")
    if outcome.error_line is not None and len(outcome.error_line) > MAX_ERROR:
        outcome = replace(outcome, error_line=outcome.error_line[:MAX_ERROR])
    data = to_bytes(asdict(outcome))
    if len(data) <= MAX_OUTCOME_BYTES:
        return data
    error = (
        f"The result has {len(data) >> 20} MiB as JSON, more than {MAX_OUTCOME_BYTES >> 20}. Keep it as a file with "
        "current_replica().save_artifact(name, path)."
    )
    failed = replace(
        outcome, status=ReplicaStatus.FAILED, reason="result_not_serializable", exit_code=1, error=error, result=None
    )
    return to_bytes(asdict(failed))
