"""The protocol of an executor: five verbs that start ranked replicas somewhere and tell how they fare.

Nobody inherits from it: any class with these five methods and two attributes works in `launch()` and in
`replicas launch --backend pkg.mod:Class`, without importing anything of ours.
`executors.testing.ExecutorContract` is its executable form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable


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
            ValueError: the text is no handle.
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
        `REPLICA_RANK`. If one cannot be started, those already started are cancelled and an error names it.

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
        """Wait until all have ended, at most `timeout` seconds, and tell how each ended, in the order of `handles`.

        Each dictionary has `rank, status, exit_code, error, result, reason`. When the time is over it tells what
        is known, and ends nothing. May be called any number of times.
        """
