"""What the launcher tells a supervisor about one local run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from executors.replica import replica_key
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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> LocalLaunch:
        spec = record["spec"]
        spec = RunSpec(**{**spec, **{name: tuple(spec[name]) for name in ("ranks", "secret_names", "chaos")}})
        return cls(**{**record, "spec": spec})

    @property
    def places(self) -> int:
        """How many replicas run at the same time."""
        return min(self.max_parallel or len(self.spec.ranks), len(self.spec.ranks))

    @property
    def log_folder(self) -> Path:
        """What this machine keeps of the run."""
        return Path(self.state_dir) / self.spec.run_id

    def log_file(self, rank: int) -> Path:
        return log_file(Path(self.state_dir), self.spec.run_id, rank, self.spec.attempt)


def log_file(state_dir: Path, run_id: str, rank: int, attempt: int) -> Path:
    """Where a local replica's output lies. Always on this machine, whatever the run's store."""
    return state_dir / replica_key(run_id, rank, attempt, "output.log")
