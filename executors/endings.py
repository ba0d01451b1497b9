"""The outcome that a replica's worker writes of itself, for each way in which an entrypoint can end."""

from __future__ import annotations

import os
import traceback
from dataclasses import replace
from types import TracebackType
from typing import Any

from executors.errors import ReplicasError, ResultError
from executors.outcome import Outcome, Reason
from executors.protocol import ReplicaStatus
from executors.replica import Replica
from executors.result import to_json_value

TERMINATED = 143  # 128 + SIGTERM, as a shell says it


def outcome_of_value(replica: Replica, started_at: float, value: Any) -> Outcome:
    """It returned: a success, unless what it returned is no JSON value."""
    try:
        result = to_json_value(value)
    except ResultError as error:
        return _failed(replica, started_at, "result_not_serializable", str(error), 1)
    return Outcome(
        replica.rank,
        replica.attempt,
        ReplicaStatus.SUCCEEDED,
        exit_code=0,
        result=result,
        pid=os.getpid(),
        started_at=started_at,
    )


def outcome_of_error(replica: Replica, started_at: float, error: BaseException, trace: TracebackType | None) -> Outcome:
    """It raised, or left by `SystemExit`."""
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        said = f" ({error.code})" if isinstance(error.code, str) else ""
        text = f"The entrypoint ended its process with exit code {code}{said} instead of returning a result."
        return _failed(replica, started_at, "no_result", text, code)
    while trace is not None and trace.tb_frame.f_globals.get("__name__") == "executors.worker":
        trace = trace.tb_next  # the user's frames are enough
    text = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    reason: Any = error.outcome_reason if isinstance(error, ReplicasError) else "exception"
    line = "".join(traceback.format_exception_only(type(error), error)).strip().partition("\n")[0]
    return replace(_failed(replica, started_at, reason, text, 1), error_line=line)


def outcome_of_termination(replica: Replica, started_at: float, had_supervisor: bool, was_cancelled: bool) -> Outcome:
    """It was told to end (SIGTERM), and not by its supervisor, which is gone if it had one.

    Args:
        was_cancelled: its cancel marker stands, so that the outcome will be recorded as a cancellation.
    """
    who = f"Replica {replica.rank} of {replica.world_size}"
    if had_supervisor:
        who = f"{who} (attempt {replica.attempt})"
        text = f"{who} was lost: its supervisor is gone (was it killed?). `replicas resume` brings it back."
        return replace(_failed(replica, started_at, "lost", text, TERMINATED), signal="SIGTERM")
    text = f"{who} was told to end (SIGTERM), {'since it was cancelled' if was_cancelled else 'by nobody of ours'}."
    return replace(_failed(replica, started_at, "signal", text, TERMINATED), signal="SIGTERM")


def outcome_of_timeout(replica: Replica, started_at: float, limit_s: float, exit_code: int) -> Outcome:
    """It ran into its time limit, which this process enforces itself."""
    who = f"Replica {replica.rank} of {replica.world_size}"
    text = f"{who} ran into its time limit of {limit_s:g} s."
    return _failed(replica, started_at, "timeout", text, exit_code)


def _failed(replica: Replica, started_at: float, reason: Reason, error: str, exit_code: int) -> Outcome:
    return Outcome(
        replica.rank,
        replica.attempt,
        ReplicaStatus.FAILED,
        reason,
        exit_code,
        error=error,
        pid=os.getpid(),
        started_at=started_at,
    )
