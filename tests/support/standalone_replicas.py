"""Runs replicas as a service would: with the bootstrap's command, a Python without this project, and an empty
directory.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from servers.isolation.python import isolated_python
from servers.s3.server import CREDENTIALS

from executors import open_store
from executors.attempt import Attempt
from executors.protocol import Outcome
from executors.settings.run_spec import RunSpec
from executors.settings.settings import DEFAULTS
from executors.shipping.package import bootstrap_command, make_package, replica_environment
from executors.task.code_package import Package
from executors.task.command import Command
from support.new_runs import create_run
from support.processes import MARK

LIMIT_S = 100
TASKS = """
import ctypes, multiprocessing, os, signal, subprocess, sys, threading, time
from pathlib import Path
from executors import current_replica, restartable

HOME = Path(os.environ["HOME"])

def fails():
    print("about to fail")
    raise ValueError("the user's own words")

def leaves():
    print("usage: job.py\\njob.py: error: no --lr")
    sys.exit(5)

def waits():
    current_replica().report(step=7)
    try:
        print("waiting", flush=True)
        threading.Event().wait()
    finally:
        (HOME / "cleaned up").touch()

def cleans_slowly():
    try:
        print("waiting", flush=True)
        threading.Event().wait()
    finally:
        print("cleaning", flush=True)
        while not (HOME / "go on").exists():
            time.sleep(0.01)

def ignores():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    current_replica().report(step=7)
    (HOME / "helper").write_text(str(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid))
    print("ignoring", flush=True)
    threading.Event().wait()

def half_a_line(ignores_sigterm):
    if ignores_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("a line")
    print("half a line", end="")
    threading.Event().wait()

def talks():
    sys.stdout.write("x" * 100_000 + "\\n")
    sys.stdout.buffer.write(b"as bytes\\n")
    sys.stdout.flush()
    print("on stderr: \\N{OTTER}", file=sys.stderr)
    print("no newline", end="")
    return sys.stdin.read()

def spawns():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.map(twice, [1, 2])

def twice(x):
    return 2 * x

def dies(how):
    print("the last words")
    sys.stdout.write("half a line")
    if how == "segfault":
        ctypes.string_at(0)
    os.kill(os.getpid(), signal.SIGKILL)

def holds_the_gil(times=1):
    current_replica().report(step=7)
    if current_replica().attempt >= times:
        return "came back"
    print("holding", flush=True)
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)

def takes_memory():
    print("taking", flush=True)
    bytearray(1 << 30)

def shows():
    return [Path("/proc/self/oom_score_adj").read_text().strip(), os.getppid() != 0]

def comes_back(times):
    attempt = current_replica().attempt
    print("attempt", attempt, flush=True)
    if attempt < times:
        os.kill(os.getpid(), signal.SIGKILL)
    return attempt

@restartable()
def goes_on(times):
    replica = current_replica()
    print("attempt", replica.attempt, flush=True)
    replica.report(step=replica.attempt + 1)
    if replica.attempt < times:
        raise ValueError("boom")
    return replica.previous_failure
"""
# the notice is as long as the grace of a replica, so the replica gets SIGTERM at once
NOTICE = {"REPLICA_NOTICE_S": "5"}


class Cloud:
    """A service on this machine, with one directory for each replica."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.python = python
        self.folder = folder
        self._processes: list[subprocess.Popen[str]] = []

    def start(
        self,
        spec: RunSpec,
        rank: int = 0,
        *,
        timeout_s: float | None = None,
        environ: Mapping[str, str] | None = None,
        within: Sequence[str] = (),
    ) -> subprocess.Popen[str]:
        """Start a replica, as a service would. `within` is a command that runs another command."""
        directory = self.folder / f"machine of {rank}"
        directory.mkdir(parents=True, exist_ok=True)
        told = {**self.environ(), **replica_environment(spec, rank, timeout_s), **(environ or {})}
        process = subprocess.Popen(
            [*within, str(self.python), *bootstrap_command()[1:]],
            cwd=directory,
            env=told,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        return process

    def environ(self) -> dict[str, str]:
        """Return the environment of a container: without PYTHONPATH and without variables of this user."""
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "AWS_EC2_METADATA_DISABLED": "true",
            MARK: os.environ[MARK],
            **CREDENTIALS,
        }

    def stop(self) -> None:
        """Kill all replicas that still run."""
        for process in self._processes:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def running_cloud(folder: Path) -> Iterator[Cloud]:
    cloud = Cloud(isolated_python(folder), folder / "machines")
    try:
        yield cloud
    finally:
        cloud.stop()


def ship(
    rendezvous: str | Path,
    workspace: Path,
    entrypoint: str | Command | Callable[..., Any],
    args: Mapping[str, Any] | None = None,
    n: int = 1,
    *,
    package: Package | None = None,
    run_id: str = "otter",
) -> RunSpec:
    """Write a run and the code of its replicas."""
    package = package or make_package(entrypoint, root=workspace)
    store = open_store(rendezvous)
    return create_run(store, run_id, entrypoint, args or {}, n, backend="cloud", package=package)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for the end of a replica's process, and return its exit code, its stdout and its stderr."""
    out, err = process.communicate(timeout=LIMIT_S)
    return process.returncode, out, err


def outcome_of(spec: RunSpec, rank: int = 0) -> Outcome:
    """Return the outcome that a replica has left."""
    found = Attempt(open_store(spec.store_url), spec.run_id, rank, spec.attempt).outcome()
    assert found is not None
    return found


def wait_for_line(process: subprocess.Popen[str], line: str) -> None:
    """Read a process's stdout up to a line."""
    assert process.stdout is not None
    for printed in process.stdout:
        if printed.rstrip("\n") == line:
            return
    pytest.fail(f"the replica ended with {process.wait()} and never printed {line!r}: {process.communicate()[1]}")


def write_files(folder: Path, **files: str) -> Path:
    """Write Python files, named by their stems, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


@dataclass
class StandaloneScene:
    """A cloud, the user's tasks, and a directory that both sides see."""

    cloud: Cloud
    workspace: Path
    shared: Path

    def start(
        self,
        task: str,
        rank: int = 0,
        *,
        args: Mapping[str, Any] | None = None,
        n: int = 1,
        timeout_s: float | None = None,
        run_id: str = "otter",
        within: Sequence[str] = (),
        **more: Any,
    ) -> tuple[RunSpec, subprocess.Popen[str]]:
        spec = ship(self.shared, self.workspace, f"tasks_of_user:{task}", args, n=n, run_id=run_id)
        settings = {name: more.pop(name) for name in DEFAULTS if name in more}
        spec = replace(spec, **more).with_settings(**settings)
        return spec, self.cloud.start(spec, rank, timeout_s=timeout_s, environ=NOTICE, within=within)


@pytest.fixture
def site(cloud: Cloud, workspace: Path, shared: Path) -> StandaloneScene:
    return StandaloneScene(cloud, workspace, shared)


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cloud]:
    with running_cloud(tmp_path) as cloud:
        yield cloud


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    return write_files(tmp_path / "work space", tasks_of_user=TASKS)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    return tmp_path / "shared directory"
