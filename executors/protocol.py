"""The protocol of an executor: five methods that start ranked replicas on a backend and report their status.

No class inherits from it. `launch()` and `replicas launch --backend pkg.mod:Class` take any class with these five
methods and two attributes. The class imports nothing of this package. `executors.testing.ExecutorContract` tests
whether a class conforms.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NotRequired, Protocol, TypedDict, get_args, runtime_checkable

Reason = Literal[
    "exception",  # the entrypoint raised
    "hang",  # it made no progress within its limit
    "rule",  # a rule of its run with the action `restart` was broken
    "timeout",  # it reached the time limit of its launch
    "signal",  # it was ended by a signal that `replicas` did not send
    "oom",  # the kernel killed it because memory was short
    "lost",  # it ended together with its supervisor, and no reason is known
    "preempted",  # the backend took the machine back
    "fenced",  # a newer attempt of this rank replaced it; not a failure
    "no_result",  # the process ended by itself before the entrypoint returned
    "result_not_serializable",  # the entrypoint returned something that is not a JSON value
    "cancelled",
    "stopped",  # it ended at its next round, because of a stop order
    "start_failed",  # the backend could not start it
]
REASONS: tuple[str, ...] = get_args(Reason)
BY_USER = "cancelled by the user"
STOPPED = "stopped by the user"


class ReplicaStatus(StrEnum):
    """The state of a replica. It equals its string, so an executor may return the plain string.

    Example:
        assert ReplicaStatus.RUNNING == "running"
    """

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        """True if the replica has ended. A terminal status never changes."""
        return self not in (ReplicaStatus.PENDING, ReplicaStatus.RUNNING)


ENDED = tuple(str(status) for status in ReplicaStatus if status.is_terminal)


@dataclass(frozen=True)
class ReplicaHandle:
    """Identifies one replica, as plain JSON, for any process that has the same backend and store.

    Example:
        text = handle.to_json()
        handle = ReplicaHandle.from_json(text)  # in another process
        executor.poll(handle)
    """

    rank: int
    """The rank of the replica."""
    backend_name: str
    """The name of the backend that runs it."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The data with which the executor finds the replica again. No other code reads it."""

    def __post_init__(self) -> None:
        # A copy, because the caller may change its mapping later.
        object.__setattr__(self, "metadata", dict(self.metadata))

    def __hash__(self) -> int:
        return hash(self.to_json())

    def to_json(self) -> str:
        """Write the handle as one line of JSON."""
        return json.dumps({"rank": self.rank, "backend_name": self.backend_name, "metadata": self.metadata})

    @classmethod
    def from_json(cls, text: str) -> ReplicaHandle:
        """Read a handle that `to_json` wrote.

        Args:
            text: the JSON text.

        Raises:
            ValueError: the text is not a handle.
        """
        try:
            record = json.loads(text)
            return cls(int(record["rank"]), str(record["backend_name"]), dict(record["metadata"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"Not a replica handle: {text[:200]!r} ({error!r}).") from None


@runtime_checkable
class ServerlessExecutor(Protocol):
    """Starts N ranked replicas on one backend.

    The status of a replica is terminal if and only if the replica has an outcome.

    Example:
        handles = executor.launch_replicas(4, "train.py:main", {"steps": 200})
        rows = executor.collect(handles)
    """

    @property
    def backend_name(self) -> str:
        """The name in the registry: "local", "modal", "hf", or your own name, which is also the name of its entry
        point.
        """

    @property
    def supports_inter_replica_network(self) -> bool:
        """True if replicas can open connections to each other. `replicas` itself never needs it."""

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: str | Callable[..., Any],
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: int = 3600,
    ) -> list[ReplicaHandle]:
        """Start `n_replicas` replicas and return their handles in rank order.

        Each replica calls the entrypoint once, with `entrypoint_args` as keyword arguments and its rank in the variable
        `REPLICA_RANK`. A replica that calls `sys.exit(0)` or `sys.exit()` has succeeded with the result None. If a
        replica cannot be started, the others are cancelled, and the error names it.

        Args:
            n_replicas: the number of replicas, at least 1.
            entrypoint: a callable, or `pkg.mod:f`, `pkg.mod.f`, `path/file.py:f`, `path/file.py` (its `main`).
            entrypoint_args: the keyword arguments. They must be JSON values if the entrypoint is a string. The key
                `rank_env` is not passed: it names an additional environment variable for the rank.
            gpu: the GPUs of each replica, as `"H100"` or `"H100:2"`. None: no GPU.
            timeout: the longest run of each replica in seconds. Then it is ended as `failed` with reason `timeout`.
        """

    def poll(self, handle: ReplicaHandle) -> str:
        """Return the replica's `ReplicaStatus` without waiting.

        Args:
            handle: a handle that `launch_replicas` returned.
        """

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        """Return the last lines of the replica's output so far, without waiting.

        Args:
            handle: a handle that `launch_replicas` returned.
            n_lines: the largest number of lines.
        """

    def cancel(self, handle: ReplicaHandle) -> None:
        """End a replica and its child processes. Repeated calls, and calls after its end, have no effect.

        Args:
            handle: a handle that `launch_replicas` returned.
        """

    def collect(self, handles: list[ReplicaHandle], *, timeout: int | None = None) -> list[dict[str, Any]]:
        """Wait until all replicas have ended, at most `timeout` seconds.

        Return one dictionary per handle, in their order.

        Each dictionary has `rank, status, exit_code, error, result, reason`. After the timeout, each has the
        current status of its replica, and nothing is ended. The method may be called again.

        Args:
            handles: handles that `launch_replicas` returned.
            timeout: the longest wait in seconds. None: no limit.
        """


@dataclass(frozen=True)
class Standstill:
    """A round of a signed run that waits until the user deletes an object that is not signed with the run's key."""

    round: int
    """The number of the round. 0: the first anchor, which comes before the first round."""
    key: str
    """The key of the object in the run's store."""
    n_more: int = 0
    """The number of further objects for which the round waits."""


@dataclass(frozen=True)
class WarningCount:
    """The number of warnings of an attempt so far, and the first warning."""

    count: int
    """The number of warnings in the run's events: one for each different text, and one more if some warnings are in the
    log only.
    """
    first: str
    """The text of the first warning, cut to 200 characters."""
    first_at: float
    """The Unix time of the first warning, by the clock of the replica's host."""
    standstill: Standstill | None = None
    """The round that waits now until the user deletes an object. None: the rounds continue."""


class OutcomeRow(TypedDict):
    """The end of a replica as plain JSON."""

    rank: int
    """The rank of the replica."""
    status: ReplicaStatus
    """The status of the replica's newest attempt."""
    exit_code: int | None
    """The exit status of the replica's process; minus the signal's number if a signal ended it. Null: not known."""
    error: str | None
    """A traceback, or a sentence about the end. Null: the replica succeeded, or has not ended."""
    result: Any
    """The value that the entrypoint returned. Null: there is none."""
    reason: Reason | None
    """The reason of the end, as the page of outcomes lists them. Null: success, or no end yet."""
    unproven: NotRequired[bool]
    """True: the run is signed, and its key does not prove this outcome."""


@dataclass(frozen=True)
class MemberEnd:
    """The end of one process of a replica that has several."""

    pid: int
    """The number of the process at its machine."""
    exit_code: int | None = None
    """The exit status; minus the signal's number when a signal ended the process. None: it is not known."""
    signal: str | None = None
    """The signal that ended the process, as in "SIGKILL". None: no signal did."""
    error: str | None = None
    """The line that begins the exception of the process, if the process recorded an exception."""

    def describe(self) -> str:
        """Return the end in a line: `pid 4711, exit code 1: ValueError: no luck`.

        Example:
            MemberEnd(4711, -9, "SIGKILL").describe()  # "pid 4711, ended by SIGKILL"
        """
        end = "its end is not known" if self.exit_code is None else f"exit code {self.exit_code}"
        end = end if self.signal is None else f"ended by {self.signal}"
        return ": ".join(filter(None, (f"pid {self.pid}, {end}", self.error)))


@dataclass(frozen=True)
class Outcome:
    """The end of one attempt of one rank.

    Example:
        outcome = run.outcomes()[0]
        print(outcome.status, outcome.reason, outcome.headline)
        row = outcome.to_row()  # a row as `collect` returns it
        assert Outcome.of_row(outcome.rank, outcome.attempt, row).status is outcome.status
    """

    rank: int
    """The rank of the replica."""
    attempt: int
    """The number of the attempt, from 0."""
    status: ReplicaStatus
    """The status of the attempt."""
    reason: Reason | None = None
    """The reason of the end, as the page of outcomes lists them. None: success, or no end yet."""
    exit_code: int | None = None
    """The exit status; minus the signal's number when a signal ended the process."""
    signal: str | None = None
    """The signal that ended the process, as in "SIGKILL". None: no signal did."""
    error: str | None = None
    """A traceback, or a sentence about the end."""
    error_line: str | None = None
    """The line that begins the exception, if the error is a traceback."""
    error_place: str | None = None
    """The last place in the user's code that an exception passed, as in `train.py:12`."""
    result: Any = None
    """The value that the entrypoint returned. None: there is none."""
    host: str = ""
    """The name of the replica's machine."""
    pid: int | None = None
    """The number of the replica's process. None: it is not known."""
    started_at: float | None = None
    """Unix time of the start, by the clock of the replica's machine. None: it is not known."""
    finished_at: float = 0.0
    """Seconds since the epoch, by the clock of the process that recorded the outcome. For a replica that another
    process found lost, this is the time of the last heartbeat, by the replica's clock.
    """
    output_tail: str = ""
    """The end of the output of the replica."""
    reported: Mapping[str, float] | None = None
    """The last report of the replica. None: the last heartbeat has the report."""
    reached: Mapping[str, float] | None = None
    """The `round` and the `step` that the replica reported last."""
    progress_marks: int = 0
    """The number of marks of progress."""
    saved_marks: int = 0
    """The number of times that the replica saved work that the next attempt need not repeat."""
    fingerprint: str | None = None
    """A text that identifies the error and its place. Two ends by the same error at the same place have the same
    text.
    """
    how: str | None = None
    """The way in which the attempt was started, as in "process", "fork" or "spare:0". None: by a launch, or by the
    user.
    """
    notice: str | None = None
    """The signal that announced the end of the machine. None: no signal did."""
    stacks: tuple[str, ...] = ()
    """The names of the dumps of the stacks of the attempt's threads."""
    was_refused: bool = False
    """True if the attempt was not started because its service gave it no machine, so that no code of it ran."""
    warned: WarningCount | None = None
    """The warnings of the attempt. None if there are none, or if the last heartbeat has them."""
    trained_alone: bool = False
    """True if the replica made an optimizer of torch, but neither asked for its rank nor created a DiLoCo."""
    own_models: Mapping[str, float] | None = None
    """For each DiLoCo whose model the script changed after `close()`: its name, and a number that identifies the
    changed model.
    """
    member: int | None = None
    """The process that failed first, in a replica of several processes. None: the replica has one process, or no
    process failed.
    """
    members: tuple[MemberEnd, ...] = ()
    """The ends of the processes of a replica that has several, by their numbers."""
    goes_on: bool = False
    """True if the process of the attempt stays, to run the next attempt; see `restartable`."""
    unproven: bool = False
    """True if the run is signed and the run's key does not prove this outcome."""

    @classmethod
    def of_row(cls, rank: int, attempt: int, row: Mapping[str, Any]) -> Outcome:
        """Return the outcome for a row that an executor's `collect` returned.

        Args:
            rank: the rank of the replica.
            attempt: the number of the attempt, from 0.
            row: the row. A status that is not a `ReplicaStatus` counts as running.
        """
        status = as_status(row.get("status"))
        reason: Any = row.get("reason") if status is not ReplicaStatus.CANCELLED else "cancelled"
        code, error, result = (row.get(name) for name in ("exit_code", "error", "result"))
        return cls(rank, attempt, status, reason, code, error=error, result=result)

    @property
    def was_told_to_end(self) -> bool:
        """True if the owner of the machine ended the replica, and the reason is not known."""
        return self.reason == "signal" and self.notice is not None

    @property
    def headline(self) -> str:
        """The error in one line."""
        return self.error_line or (self.error or "").strip().rpartition("\n")[2]

    def describe_members(self) -> list[str]:
        """Return a line about the end of each process of a failed replica that has several. Empty: it has not failed.

        Example:
            for line in run.outcomes()[0].describe_members():
                print(line)  # "member 1 of 2 failed first: pid 4711, exit code 1: ValueError: no luck"
        """
        if self.status is not ReplicaStatus.FAILED:
            return []
        return [
            f"member {number} of {len(self.members)}{' failed first' * (number == self.member)}: {end.describe()}"
            for number, end in enumerate(self.members)
        ]

    def to_row(self) -> OutcomeRow:
        """Return the dictionary that `collect` reports for this replica.

        An outcome that the run's key does not prove has `"unproven": True`.
        """
        row: OutcomeRow = {
            "rank": self.rank,
            "status": self.status,
            "exit_code": self.exit_code,
            "error": self.error,
            "result": self.result,
            "reason": self.reason,
        }
        return {**row, "unproven": True} if self.unproven else row


def as_status(text: Any) -> ReplicaStatus:
    """Return the status for an answer of `poll`. An unknown word counts as running, never as success."""
    try:
        return ReplicaStatus(str(text))
    except ValueError:
        return ReplicaStatus.RUNNING
