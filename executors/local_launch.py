"""What the launcher tells a supervisor about one local run."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from executors.attempt_records import parse_handle
from executors.process import this_machine
from executors.protocol import ReplicaHandle
from executors.records import read_record
from executors.replica import replica_key
from executors.store import Store
from executors.task import RunSpec


@dataclass(frozen=True)
class LocalLaunch:
    """Everything a supervisor is told: a run, and how to run it on this machine. Plain JSON, never stored."""

    spec: RunSpec
    state_dir: str
    cwd: str
    sys_path: list[str]
    environ: Mapping[str, str]
    timeout_s: float | None = None
    max_parallel: int | None = None
    term_grace_s: float = 5.0
    gpu_slots: list[str] | None = None
    """`CUDA_VISIBLE_DEVICES` of each place that a replica can run in; None leaves it alone."""
    nonce: str = field(default_factory=lambda: os.urandom(16).hex())
    """Tells this launch from any other that asks for the same attempts."""
    by: str = field(default_factory=lambda: f"{socket.gethostname()}:{os.getpid()}")
    """The launcher, for people."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> LocalLaunch:
        spec = record["spec"]
        spec = RunSpec(**{**spec, **{name: tuple(spec[name]) for name in ("ranks", "secret_names", "chaos")}})
        return cls(**{**record, "spec": spec})

    @property
    def places(self) -> int:
        """How many replicas of this launch run at the same time."""
        return min(self.max_parallel or len(self.spec.ranks), len(self.spec.ranks))

    def torch_threads(self, cores: int) -> int:
        """Return each replica's share of the cores.

        It is counted over the run, not over this launch: the others still run beside a rank that is resumed alone.
        """
        return max(1, cores // min(self.max_parallel or self.spec.world_size, self.spec.world_size))

    def handle(self, rank: int, supervisor_pid: int, supervisor_started: int | None) -> ReplicaHandle:
        """Make the handle of a rank; the supervisor is named by its pid and when it started, in clock ticks."""
        metadata = {
            "run_id": self.spec.run_id,
            "store_url": self.spec.store_url,
            "attempt": self.spec.attempt,
            "nonce": self.nonce,
            "by": self.by,
            "machine": this_machine(),
            "supervisor_pid": supervisor_pid,
            "supervisor_started": supervisor_started,
            "term_grace_s": self.term_grace_s,
        }
        return ReplicaHandle(rank, "local", metadata)

    @property
    def log_folder(self) -> Path:
        """What this machine keeps of the run."""
        return Path(self.state_dir) / self.spec.run_id

    def log_file(self, rank: int) -> Path:
        return log_file(Path(self.state_dir), self.spec.run_id, rank, self.spec.attempt)


def begin_attempt(store: Store, handle: ReplicaHandle) -> ReplicaHandle:
    """Begin an attempt by creating its handle, unless that was done; return the handle that stands.

    Of all who would start an attempt, the one whose handle stands may.
    """
    metadata = handle.metadata
    key = replica_key(metadata["run_id"], handle.rank, metadata["attempt"], "handle.json")
    if store.put_if_absent(key, handle.to_json().encode()):
        return handle
    return read_record(store, key, parse_handle)  # perhaps ours, by a create whose reply was lost


def log_file(state_dir: Path, run_id: str, rank: int, attempt: int) -> Path:
    """Where a local replica's output lies. Always on this machine, whatever the run's store."""
    return state_dir / replica_key(run_id, rank, attempt, "output.log")
