"""The protocol of an executor: five verbs that start ranked replicas somewhere and report their status.

Nobody inherits from it: any class with these five methods and two attributes works in `launch()` and in
`replicas launch --backend pkg.mod:Class`, without importing anything of this package.
`executors.testing.ExecutorContract` is its executable form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from executors.replica_log import Log

Reason = Literal[
    "exception",  # the entrypoint raised
    "timeout",  # ran into the time limit of its launch
    "signal",  # ended by a signal that `replicas` did not send
    "oom",  # the kernel killed it for want of memory
    "lost",  # vanished with whoever watched it
    "preempted",  # the backend took the machine back
    "fenced",  # a newer attempt of this rank took over; neutral
    "no_result",  # the process ended by itself before the entrypoint returned
    "result_not_serializable",  # it returned something that is not a JSON value
    "cancelled",
    "start_failed",  # the backend could not start it
]
REASONS: tuple[str, ...] = get_args(Reason)
BY_USER = "cancelled by the user"
GATHER_S = 600.0


class ReplicaStatus(StrEnum):
    """The state of a replica. Compares equal to its plain string, which is what an executor may return as well."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        """Whether the replica has ended; a terminal status never changes."""
        return self not in (ReplicaStatus.PENDING, ReplicaStatus.RUNNING)


ENDED = tuple(str(status) for status in ReplicaStatus if status.is_terminal)


@dataclass(frozen=True)
class ReplicaHandle:
    """A claim ticket for one replica: plain JSON, good in any process that has the same backend and store."""

    rank: int
    backend_name: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What the executor needs to find the replica again. Opaque to everybody else."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "metadata", dict(self.metadata))  # the caller's mapping may change later

    def __hash__(self) -> int:
        return hash(self.to_json())

    def to_json(self) -> str:
        """Write the handle as one line of JSON."""
        return json.dumps({"rank": self.rank, "backend_name": self.backend_name, "metadata": self.metadata})

    @classmethod
    def from_json(cls, text: str) -> ReplicaHandle:
        """Read what `to_json` wrote.

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

    The status of a replica is terminal exactly when it has left an outcome, and then never changes.
    """

    backend_name: str
    """The name in the registry: "local", "modal", "hf", or your own."""
    supports_inter_replica_network: bool
    """Whether replicas can open connections to each other. `replicas` itself never needs it."""

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

        Each calls the entrypoint once with `entrypoint_args` as keyword arguments, and with its rank in
        `REPLICA_RANK`. One that leaves by `sys.exit(0)` or `sys.exit()` has succeeded with the result None. If one
        cannot be started, those already started are cancelled and an error names it.

        Args:
            n_replicas: how many, at least 1.
            entrypoint: a callable, or `pkg.mod:f`, `pkg.mod.f`, `path/file.py:f`, `path/file.py` (its `main`).
            entrypoint_args: keyword arguments; JSON values for an entrypoint given as a string. `rank_env` is
                taken out: it names one more environment variable that holds the rank.
            gpu: a GPU per replica, as `"H100"` or `"H100:2"`.
            timeout: seconds each replica may run; then it is ended as `failed` with reason `timeout`.
        """

    def poll(self, handle: ReplicaHandle) -> str:
        """Return the replica's `ReplicaStatus`, at once."""

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        """Return the last lines of the replica's output so far, at once."""

    def cancel(self, handle: ReplicaHandle) -> None:
        """End a replica and its helpers; nothing happens to one that has ended. Idempotent."""

    def collect(self, handles: list[ReplicaHandle], *, timeout: int | None = None) -> list[dict[str, Any]]:
        """Wait until all have ended, at most `timeout` seconds, and return how each ended, in the order of `handles`.

        Each dictionary has `rank, status, exit_code, error, result, reason`. When the time is over it returns
        what is known, and ends nothing. May be called any number of times.
        """


Recordable = Mapping[str, type | re.Pattern[str]]
"""The options of a backend that readers take from a record, each with its type, or the pattern of its string.

They say where replicas are and how large. What decides what runs, and what it gets to know, is not among them.
"""


@dataclass(frozen=True)
class RunSpec:
    """What a native executor needs to know of the run its replicas belong to. JSON; never stored."""

    run_id: str
    store_url: str
    task_digest: str
    world_size: int
    ranks: tuple[int, ...]
    attempt: int = 0
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Additional environment of the replicas: reaches them and is never recorded."""
    secret_names: tuple[str, ...] = ()
    detach: bool = False
    chaos: tuple[str, ...] = ()
    """Faults that the replicas are to suffer; see `chaos.py`."""
    min_replicas: int | None = None
    """How many of `ranks` are enough when the others cannot be started. None: all."""
    gather_s: float = GATHER_S
    """How long the others are waited for."""
    fail_fast: bool = False
    """Whether the first failure ends the run, as long as nobody has had a round."""


@dataclass(frozen=True)
class Package:
    """What a replica on another machine gets: the user's code and this package's, and what to install."""

    archive: bytes = field(repr=False)
    """A tar.gz with the folders `workspace` and `packages`."""
    sha256: str
    """Of the archive."""
    n_files: int
    """How many of them are the user's."""
    size_bytes: int
    """The size of the user's files together, unpacked."""
    commit: str | None = None
    """What is checked out; None outside a git repository."""
    dirty: bool | None = None
    """Whether the files differ from that commit."""
    files: tuple[str, ...] = field(default=(), repr=False)
    """The user's files, by their paths in the workspace."""
    left_out: tuple[str, ...] = ()
    """What git would take and the archive lacks, with the reason in brackets."""
    requirements: tuple[str, ...] = ()
    """What to install."""
    pins: tuple[str, ...] = ()
    """Those of them that are ours: an image that has a later version keeps it."""
    paths: tuple[str, ...] = ()
    """Folders of the workspace from which the launcher imports, such as `src`: its `sys.path`, made relative."""

    @property
    def about(self) -> dict[str, Any]:
        """What `run.json` says of the code."""
        return {name: getattr(self, name) for name in ("sha256", "size_bytes", "n_files", "commit", "dirty")}


@runtime_checkable
class KeepsOptions(Protocol):
    """An executor that is made again with the same options when its run is followed or resumed later."""

    recordable_options: Recordable

    @property
    def options_to_keep(self) -> Mapping[str, Any]:
        """The options with which the executor was made: what this machine notes of a launch, as far as it is JSON."""


@runtime_checkable
class KnowsPrices(Protocol):
    """An executor that can say what its machines cost."""

    def price_per_hour(self, gpu: str | None) -> float | None:
        """Return what an hour of one replica costs in US dollars; None: its service does not tell."""


@dataclass(frozen=True)
class Unfinished:
    """A replica that has left no outcome, as the records of its run show it."""

    handle: ReplicaHandle
    """The newest that it has."""
    attempt: int
    """Its newest attempt: the handle's, or a later one that was claimed since."""


@dataclass(frozen=True)
class Observation:
    """What a backend sees of a replica that has left no outcome."""

    outcome: Outcome | None = None
    """How it ended: its process or job was found gone, and this is on record now."""
    doing: str = ""
    """In a few words for people, what it does or waits for before its entrypoint runs, as in "installing"."""


@runtime_checkable
class NativeExecutor(ServerlessExecutor, KeepsOptions, Protocol):
    """What the executors of this package add to the five verbs.

    `launch`, `resume` and `Run` use it where an executor has all of it. One that has the five verbs alone (a
    third-party executor) is given a task that finds the run by its address, and starts all ranks or none.
    """

    needs_shared_rendezvous: bool
    """Whether its replicas see no directory of this machine."""
    default_timeout_s: float | None
    """The time limit of a launch that names none, in seconds. None: no limit."""

    def warm_up(self) -> None:
        """Begin what takes long and costs nothing, without waiting for it: a launch comes soon."""

    def check_launch(
        self,
        n_replicas: int,
        entrypoint: str | Callable[..., Any],
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: float | None = None,
        secrets: Sequence[str] = (),
    ) -> None:
        """Refuse what cannot work, before anything is written, started or paid for.

        Raises:
            ValueError: a bad argument.
            BackendError: the backend cannot be used.
            EntrypointError: the entrypoint cannot be found, or called with these arguments.
        """

    def package(self, entrypoint: str | Callable[..., Any]) -> Package | None:
        """Return what replicas need of this machine's code; None where they run on this machine."""

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: str | Callable[..., Any],
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: float | None = None,
        run: RunSpec | None = None,
        tell: Callable[[str], None] = lambda words: None,
    ) -> list[ReplicaHandle]:
        """Start replicas as `ServerlessExecutor.launch_replicas` does.

        Args:
            run: the run these replicas belong to, and which of its ranks they are; it is written already. None: a new
                run.

        Returns: the handles. Those of attempts that another process began first are left out, and left alone.
        """

    def describe_launch(
        self, run: RunSpec, *, gpu: str | None = None, timeout: float | None = None, requirements: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Return what `launch_replicas` would ask for, as JSON, values of secrets and of the environment masked."""

    def observe(self, replicas: Sequence[Unfinished]) -> list[Observation]:
        """Look at several replicas at once, in their order; the first to find one gone records its outcome.

        The caller has looked at the store: nothing is asked of it here, but about a replica that is gone.

        Raises:
            CorruptObjectError: a handle is not one of this backend.
            BackendError: the backend refuses the credentials.
        """

    def open_log(self, handle: ReplicaHandle) -> Log:
        """Return the log of the attempt that a handle names, and of no later one."""

    def find_handle(self, handle: ReplicaHandle) -> ReplicaHandle | None:
        """Find a replica whose launcher announced it, and died before it wrote the whole handle.

        Args:
            handle: one that has nothing but `store_url`, `run_id` and `attempt`.
        """


@runtime_checkable
class OffsetReader(Protocol):
    """An executor whose replicas' logs are files on this machine, which can be followed without gaps."""

    def read_logs(self, handle: ReplicaHandle, *, offset: int | None = None, n_lines: int = 200) -> tuple[bytes, int]:
        """Return output, and the offset behind it: from byte `offset` on, or the last `n_lines` when it is None."""


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
    error_place: str | None = None
    """The last place in the user's code that an exception passed, as in `train.py:12`."""
    result: Any = None
    host: str = ""
    pid: int | None = None
    started_at: float | None = None
    finished_at: float = 0.0
    """Seconds since the epoch, by the clock of whoever recorded the outcome."""
    output_tail: str = ""

    @classmethod
    def of_row(cls, rank: int, attempt: int, row: Mapping[str, Any]) -> Outcome:
        """Make an outcome from what an executor's `collect` returned for a replica."""
        status = as_status(row.get("status"))
        reason: Any = row.get("reason") if status is not ReplicaStatus.CANCELLED else "cancelled"
        code, error, result = (row.get(name) for name in ("exit_code", "error", "result"))
        return cls(rank, attempt, status, reason, code, error=error, result=result)

    @property
    def headline(self) -> str:
        """What went wrong, in one line."""
        return self.error_line or (self.error or "").strip().rpartition("\n")[2]

    def to_row(self) -> dict[str, Any]:
        """Return what `collect` reports of this replica."""
        return {
            "rank": self.rank,
            "status": self.status,
            "exit_code": self.exit_code,
            "error": self.error,
            "result": self.result,
            "reason": self.reason,
        }


def as_status(text: Any) -> ReplicaStatus:
    """Read what an executor's `poll` said; a word that is not a `ReplicaStatus` counts as running, never as success."""
    try:
        return ReplicaStatus(str(text))
    except ValueError:
        return ReplicaStatus.RUNNING
