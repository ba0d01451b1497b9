"""Replicas as a service would run them: the bootstrap's command, a Python without this project, an empty directory."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from servers.isolation.python import isolated_python
from servers.s3.server import CREDENTIALS

from executors import open_store
from executors.attempt import Attempt
from executors.native import Package, RunSpec
from executors.protocol import Outcome
from executors.shipping.package import bootstrap_command, make_package, replica_environment
from support.new_runs import create_run
from support.processes import MARK

LIMIT_S = 100


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
        """Start a replica, as a service would. `within`: a command that runs another one."""
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
        """Return what a container has: no PYTHONPATH, nothing of this user's."""
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "AWS_EC2_METADATA_DISABLED": "true",
            MARK: os.environ[MARK],
            **CREDENTIALS,
        }

    def stop(self) -> None:
        """Kill what still runs."""
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
    entrypoint: str | Callable[..., Any],
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
    """Wait for a replica's process; return its exit code and what it said on stdout and stderr."""
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
    for said in process.stdout:
        if said.rstrip("\n") == line:
            return
    pytest.fail(f"the replica ended with {process.wait()} and never said {line!r}: {process.communicate()[1]}")


def write_files(folder: Path, **files: str) -> Path:
    """Write Python files, named by their stems, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder
