"""How code reaches a replica on another machine: a package in the store, and a short script that fetches it.

An adapter asks its vendor to run `bootstrap_command()` with `replica_environment(run, rank, timeout_s)` and the
credentials of the store as the vendor's secrets. The image needs nothing else but Python 3.11 or later and pip.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from executors import replica as environment
from executors.entrypoint import parse_entrypoint
from executors.errors import EntrypointError
from executors.requirements import requirements_of
from executors.task import RunSpec, describe
from executors.workspace import LIMIT_BYTES, OURS, Workspace, snapshot_workspace


@dataclass(frozen=True)
class Package:
    """What a replica on another machine gets: the user's and our code, and what to install."""

    workspace: Workspace
    requirements: tuple[str, ...]
    paths: tuple[str, ...] = ()
    """Folders of the workspace from which the launcher imports, such as `src`: its `sys.path`, made relative."""


def make_package(
    entrypoint: str | Callable[..., Any],
    *,
    root: Path | None = None,
    pip: Sequence[str] = (),
    limit_bytes: int = LIMIT_BYTES,
) -> Package:
    """Pack the workspace for replicas that run this entrypoint. Says in one line on stderr what it leaves out.

    Args:
        root: the workspace. None: the current directory.
        pip: requirements; when empty, those that the workspace's files name.

    Raises:
        EntrypointError: the workspace is too large or cannot be read, or the entrypoint's file does not travel.
    """
    root = (root or Path.cwd()).resolve()
    workspace = snapshot_workspace(root, limit_bytes=limit_bytes)
    check_shipped(entrypoint, root, workspace)
    package = Package(workspace, requirements_of(pip, root), _paths(root, workspace))
    if workspace.left_out:
        print(f"replicas: not shipped to the replicas: {', '.join(workspace.left_out)}", file=sys.stderr)
    return package


def check_shipped(entrypoint: str | Callable[..., Any], root: Path, workspace: Workspace) -> None:
    """Check that the file of an entrypoint is one of those that travel, where there is one.

    A callable is looked for where its module lies, unless it is pickled by value: one of `__main__`, a local function.

    Raises:
        EntrypointError: it does not travel; the message says why, and what to do.
    """
    what = describe(entrypoint)
    named = None if callable(entrypoint) else parse_entrypoint(entrypoint)
    file = named.file if named else _file_of(entrypoint)
    if file is None:
        return
    inside = Path(os.path.normpath(root / file))
    if not inside.is_relative_to(root):
        raise EntrypointError(
            f"Entrypoint {what!r} lies outside the workspace {str(root)!r}, which is what replicas get: in "
            f"{str(inside)!r}. Launch from a folder that holds it."
        )
    relative = inside.relative_to(root).as_posix()
    if named is not None and file.is_absolute():
        raise EntrypointError(
            f"Entrypoint {what!r}: replicas find files by their path in the workspace. Use {relative}:{named.function}"
        )
    if relative not in workspace.files:
        raise EntrypointError(
            f"Entrypoint {what!r} is not shipped to replicas: git ignores {relative!r}. Take it out of .gitignore, or "
            "move it."
        )


def _file_of(function: object) -> Path | None:
    """Return the file from which a replica would have to import a callable; None when it needs none of the user's."""
    module = sys.modules.get(str(getattr(function, "__module__", None)))
    file = getattr(module, "__file__", None)
    by_value = "<" in getattr(function, "__qualname__", "<")  # cloudpickle, for <locals> and <lambda>
    if module is None or file is None or module.__name__ == "__main__" or by_value:
        return None
    path = Path(file).resolve()
    ours = Path(__file__).resolve().parent.parent
    installed = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed += [ours / package for package in OURS]
    return None if any(path.is_relative_to(folder) for folder in installed) else path


def replica_environment(run: RunSpec, rank: int, timeout_s: float | None = None) -> dict[str, str]:
    """Return the variables that a replica starts with, besides `run.env` and credentials.

    The store's url goes without its `profile`, which names something on the launcher's machine.
    """
    url = run.store_url
    if url.startswith("s3:"):
        from executors.store.s3_address import S3Address

        url = replace(S3Address.parse(url), profile=None).url
    found = {
        environment.RANK: str(rank),
        environment.WORLD_SIZE: str(run.world_size),
        environment.RUN_ID: run.run_id,
        environment.ATTEMPT: str(run.attempt),
        environment.RENDEZVOUS: url,
        environment.TASK_DIGEST: run.task_digest,
    }
    return found if timeout_s is None else {**found, environment.TIMEOUT_S: str(timeout_s)}


def bootstrap_command() -> tuple[str, ...]:
    """Return the command that starts a replica from the store, wherever there is a Python 3.11 and pip.

    It carries no secret and is the same for every run: what differs is in its environment.
    """
    return ("python", "-c", Path(__file__).with_name("bootstrap.py").read_text(encoding="utf-8"))


def _paths(root: Path, workspace: Workspace) -> tuple[str, ...]:
    """Return the folders on `sys.path` that lie in the workspace, below its root, and travel."""
    found: dict[str, None] = {}
    for entry in sys.path:
        path = Path(os.path.abspath(entry))
        if path != root and path.is_relative_to(root):
            relative = path.relative_to(root).as_posix()
            if any(name.startswith(f"{relative}/") for name in workspace.files):
                found[relative] = None
    return tuple(found)
