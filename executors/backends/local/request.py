"""The messages between a launcher and the supervisor of a local run, and their transport."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from executors.attempt import Attempt, parse_handle
from executors.module_search import reserve_names, user_folders
from executors.process import start_time, this_machine, this_process
from executors.protocol import ReplicaHandle
from executors.settings.run_spec import RunSpec
from executors.store import store_at
from executors.store.record_names import HANDLE
from executors.store.run_key import RUN_KEY
from executors.store.url import directory_of


def surroundings() -> dict[str, Any]:
    """Return what a replica inherits of its launcher: as it is now, not as it was when the zygote started."""
    paths = [os.path.abspath(path) for path in sys.path]
    environ = {name: value for name, value in os.environ.items() if name != RUN_KEY}  # it would be another run's
    return {"cwd": os.getcwd(), "sys_path": paths, "user_folders": user_folders(), "environ": environ}


def adopt(cwd: str, sys_path: list[str], users: Sequence[str], environ: Mapping[str, str]) -> None:
    """Take over a launcher's surroundings.

    Args:
        cwd: the launcher's working directory.
        sys_path: the launcher's `sys.path`.
        users: the folders of it that hold the user's modules. Reserved names are not searched for there.
        environ: the environment, as a whole.

    Raises:
        OSError: the launcher's directory is gone.
    """
    reserve_names(users)
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    for name, value in environ.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    sys.path[:] = sys_path
    os.chdir(cwd)


@dataclass(frozen=True)
class LocalLaunch:
    """A run, and how to run it on this machine. Plain JSON, sent to the supervisor and never stored."""

    spec: RunSpec
    state_dir: str
    cwd: str
    sys_path: list[str]
    environ: Mapping[str, str]
    user_folders: Sequence[str] = ()
    """Folders of `sys_path` in which reserved names are not searched for; see `module_search`."""
    preload: Sequence[str] | None = None
    """The modules that each replica imports first, as a new process. None: it is forked from a process that has
    them."""
    timeout_s: float | None = None
    max_parallel: int | None = None
    term_grace_s: float = 5.0
    gpu: str | None = None
    """The GPU of each replica, as the launch names it."""
    gpu_slots: list[str] | None = None
    """`CUDA_VISIBLE_DEVICES` of each replica that the machine has GPUs for; None leaves it alone."""
    nonce: str = field(default_factory=lambda: os.urandom(16).hex())
    """Tells this launch from any other that asks for the same attempts."""
    by: str = field(default_factory=this_process)
    """The launcher, for people."""
    launcher_pid: int = field(default_factory=os.getpid)
    launcher_started: int | None = field(default_factory=lambda: start_time(os.getpid()))
    """With the pid it names one process: an attached run has ended with it."""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "spec": self.spec.to_json()}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> LocalLaunch:
        return cls(**{**record, "spec": RunSpec.from_json(record["spec"])})

    @property
    def n_parallel(self) -> int:
        """How many replicas of this launch run at the same time."""
        return min(self.max_parallel or len(self.spec.ranks), len(self.spec.ranks))

    def torch_threads(self, cores: int) -> int:
        """Return each replica's share of the cores.

        It is counted over the run, not over this launch: the others still run beside a rank that is resumed alone.
        """
        return max(1, cores // min(self.max_parallel or self.spec.world_size, self.spec.world_size))

    @property
    def copies_logs(self) -> bool:
        """Whether the run's store is another place than this machine's logs, so that its readers may not see these."""
        directory = directory_of(self.spec.store_url)
        return directory is None or os.path.realpath(directory) != os.path.realpath(self.state_dir)

    @property
    def log_folder(self) -> Path:
        """The folder of the run on this machine."""
        return Path(self.state_dir) / self.spec.run_id

    def log_file(self, attempt: Attempt) -> Path:
        return log_file(Path(self.state_dir), attempt)

    def attempt(self, rank: int) -> Attempt:
        """Return the attempt of a rank that is asked for."""
        return Attempt(store_at(self.spec.store_url), self.spec.run_id, rank, self.spec.attempt)

    def handle(self, attempt: Attempt, supervisor_pid: int, supervisor_started: int | None) -> ReplicaHandle:
        """Make the handle of an attempt; the supervisor is named by its pid and when it started, in clock ticks."""
        metadata = {
            "run_id": self.spec.run_id,
            "store_url": self.spec.store_url,
            "attempt": attempt.number,
            "nonce": self.nonce,
            "by": self.by,
            "machine": this_machine(),
            "supervisor_pid": supervisor_pid,
            "supervisor_started": supervisor_started,
            "term_grace_s": self.term_grace_s,
            **attempt.named_key,
        }
        if not self.spec.settings.detach:
            metadata |= {"launcher_pid": self.launcher_pid, "launcher_started": self.launcher_started}
        return ReplicaHandle(attempt.rank, "local", metadata)

    def begin(self, attempt: Attempt, handle: ReplicaHandle) -> ReplicaHandle:
        """Begin an attempt by creating its handle, unless one exists; return the handle that exists.

        If several processes would start an attempt, the one whose handle exists may.
        """
        if attempt.create(HANDLE, handle.to_json().encode()):
            return handle
        # Perhaps the same one, by a create whose reply was lost.
        return attempt.read(HANDLE, parse_handle)


def log_file(state_dir: Path, attempt: Attempt) -> Path:
    """Return where a local replica's output is. Always on this machine, whatever the run's store."""
    return state_dir / attempt.key("output.log")


def send(connection: socket.socket, message: Any) -> None:
    """Send one message, a line of JSON."""
    connection.sendall(json.dumps(message).encode() + b"\n")


def receive(connection: socket.socket) -> Any:
    """Receive one message; the other side sends no second one before it has an answer.

    Raises:
        EOFError: the other side is gone.
    """
    received = bytearray()
    while not received.endswith(b"\n"):
        part = connection.recv(1 << 20)
        if not part:
            raise EOFError("The other side closed the connection.")
        received += part
    return json.loads(received)
