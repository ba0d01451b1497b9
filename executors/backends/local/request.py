"""The messages between a launcher and the supervisor of a local run, and the functions that send them."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from executors.attempt import Attempt, parse_handle
from executors.module_search import reserve_names, user_folders
from executors.process import start_time, this_machine, this_process
from executors.protocol import ReplicaHandle
from executors.settings.run_spec import NOTIFY, RunSpec
from executors.store import store_at
from executors.store.record_names import HANDLE
from executors.store.run_key import RUN_KEY
from executors.store.url import directory_of


def surroundings() -> dict[str, Any]:
    """Return what a replica inherits from its launcher: the working directory, the paths and the environment of now.

    Example:
        surroundings()["cwd"]
    """
    paths = [os.path.abspath(path) for path in sys.path]
    # This key is another run's, and the URLs of notifications are secrets of the launcher.
    environ = {name: value for name, value in os.environ.items() if name not in (RUN_KEY, NOTIFY)}
    return {"cwd": os.getcwd(), "sys_path": paths, "user_folders": user_folders(), "environ": environ}


def adopt(cwd: str, sys_path: list[str], users: Sequence[str], environ: Mapping[str, str]) -> None:
    """Give this process the working directory, the paths and the environment of a launcher.

    Args:
        cwd: the launcher's working directory.
        sys_path: the launcher's `sys.path`.
        users: the folders in `sys_path` with the user's modules. Reserved names are not searched for there.
        environ: the whole environment.

    Raises:
        OSError: the launcher's directory is gone.

    Example:
        adopt("/home/me", sys.path, ["/home/me"], {"PATH": "/usr/bin"})
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
    """A run and the options of this machine for it. It is sent to the supervisor as JSON, and never stored.

    Example:
        LocalLaunch(spec, state_dir="/home/me/.local/state/replicas", **surroundings())
    """

    spec: RunSpec
    state_dir: str
    """The user's directory of runs on this machine."""
    cwd: str
    """The launcher's working directory."""
    sys_path: list[str]
    """The launcher's `sys.path`."""
    environ: Mapping[str, str]
    """The launcher's environment."""
    user_folders: Sequence[str] = ()
    """The folders of `sys_path` in which reserved names are not searched for; see `module_search`."""
    preload: Sequence[str] | None = None
    """The modules that each replica imports first. Each replica then is a new process. None: replicas are forked from a
    process that has imported them."""
    timeout_s: float | None = None
    """The time limit of each replica in seconds. None: no limit."""
    max_parallel: int | None = None
    """The number of replicas that may run at the same time. None: all."""
    term_grace_s: float = 5.0
    """The seconds between SIGTERM and SIGKILL."""
    gpu: str | None = None
    """The GPU of each replica, as the launch names it."""
    gpu_slots: list[str] | None = None
    """The values of `CUDA_VISIBLE_DEVICES` for replicas. None: the variable is not changed."""
    nonce: str = field(default_factory=lambda: os.urandom(16).hex())
    """A random text by which the launch recognizes the attempts that it has begun."""
    by: str = field(default_factory=this_process)
    """The launcher, for messages."""
    launcher_pid: int = field(default_factory=os.getpid)
    """The pid of the launcher. An attached run ends with this process."""
    launcher_started: int | None = field(default_factory=lambda: start_time(os.getpid()))
    """The start time of the launcher in clock ticks. It distinguishes processes that had the same pid."""

    def to_json(self) -> dict[str, Any]:
        """Return the launch as plain JSON."""
        return {**asdict(self), "spec": self.spec.to_json()}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> LocalLaunch:
        """Return the launch from the plain JSON that `to_json` made.

        Args:
            record: the plain JSON.
        """
        return cls(**{**record, "spec": RunSpec.from_json(record["spec"])})

    def for_a_rank(self) -> LocalLaunch:
        """Return the launch without the URLs of notifications, for the process of a rank, which sends none."""
        return replace(self, spec=self.spec.without_notify())

    @property
    def n_parallel(self) -> int:
        """The number of replicas of this launch that run at the same time."""
        return min(self.max_parallel or len(self.spec.ranks), len(self.spec.ranks))

    def torch_threads(self, cores: int) -> int:
        """Return the number of torch threads of each replica: its share of the cores.

        All ranks of the run count, and not only the ranks of this launch. If one is resumed, the others still run.

        Args:
            cores: the number of cores.
        """
        return max(1, cores // min(self.max_parallel or self.spec.world_size, self.spec.world_size))

    @property
    def copies_logs(self) -> bool:
        """True if the run's store does not have this machine's logs, so that other readers need a copy."""
        directory = directory_of(self.spec.store_url)
        return directory is None or os.path.realpath(directory) != os.path.realpath(self.state_dir)

    @property
    def log_folder(self) -> Path:
        """The folder of the run on this machine."""
        return Path(self.state_dir) / self.spec.run_id

    def log_file(self, attempt: Attempt) -> Path:
        """Return the path of an attempt's log.

        Args:
            attempt: the attempt.
        """
        return log_file(Path(self.state_dir), attempt)

    def attempt(self, rank: int) -> Attempt:
        """Return the attempt of a rank that this launch starts.

        Args:
            rank: the rank.
        """
        return Attempt(store_at(self.spec.store_url), self.spec.run_id, rank, self.spec.attempt)

    def handle(self, attempt: Attempt, supervisor_pid: int, supervisor_started: int | None) -> ReplicaHandle:
        """Return the handle of an attempt.

        Args:
            attempt: the attempt.
            supervisor_pid: the pid of the supervisor.
            supervisor_started: the start time of the supervisor in clock ticks.
        """
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
        """Begin an attempt by creating its handle. Return the handle that exists afterwards.

        If several processes want to start an attempt, only the process whose handle exists may do so.

        Args:
            attempt: the attempt.
            handle: the handle to create.
        """
        if attempt.create(HANDLE, handle.to_json().encode()):
            return handle
        # The existing handle may be the same one, if the reply to an earlier creation was lost.
        return attempt.read(HANDLE, parse_handle)


def log_file(state_dir: Path, attempt: Attempt) -> Path:
    """Return the path of a local replica's output. It is on this machine, whatever the run's store is.

    Args:
        state_dir: the user's directory of runs on this machine.
        attempt: the attempt.

    Example:
        log_file(state_path(), attempt).read_text()
    """
    return state_dir / attempt.key("output.log")


def send_json(connection: socket.socket, message: Any) -> None:
    """Send a message as a line of JSON.

    Args:
        connection: the connection.
        message: the message, as JSON values.

    Example:
        send_json(connection, {"do": "answer"})
    """
    connection.sendall(json.dumps(message).encode() + b"\n")


def receive_json(connection: socket.socket) -> Any:
    """Receive a message. The other side waits for the answer before it sends another message.

    Args:
        connection: the connection.

    Raises:
        EOFError: the other side has closed the connection.

    Example:
        request = receive_json(connection)
    """
    received = bytearray()
    while not received.endswith(b"\n"):
        part = connection.recv(1 << 20)
        if not part:
            raise EOFError("The other side closed the connection.")
        received += part
    return json.loads(received)
