"""The code for a replica on another machine: a package in the store, a short script that fetches it, an environment.

A service is asked to run `bootstrap_command()` with `replica_environment(...)` and the credentials of the
store as its secrets. The image needs nothing but Python 3.11 or later and pip.
"""

from __future__ import annotations

import base64
import json
import os
import shlex
import sys
import sysconfig
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from executors import replica as environment
from executors.errors import EntrypointError
from executors.settings.run_spec import ATTACHED_LEASE, RunSpec
from executors.shipping.requirements import requirements_of
from executors.shipping.script_header import script_of
from executors.shipping.workspace import OURS, snapshot_workspace
from executors.task.code_package import Package
from executors.task.entrypoint import describe, named_by, parse_entrypoint, shown
from executors.task.pickles import is_by_value
from executors.task.stored import installed_version


def make_package(entrypoint: str | Callable[..., Any], *, root: Path | None = None, pip: Sequence[str] = ()) -> Package:
    """Pack the workspace for replicas that run this entrypoint. Names on stderr, in one line, what it leaves out.

    Args:
        root: the workspace. None: the current directory.
        pip: requirements; when empty, those that the entrypoint's file or the workspace's files name.

    Raises:
        EntrypointError: the workspace is too large or cannot be read, or the entrypoint's file does not travel.
    """
    root = (root or Path.cwd()).resolve()
    package = snapshot_workspace(root)
    _check_shipped(entrypoint, root, package.files)
    if package.left_out:
        print(f"replicas: not shipped to the replicas: {', '.join(package.left_out)}", file=sys.stderr)
    ours, users = requirements_of(pip, root, script_of(entrypoint))
    return replace(package, requirements=(*ours, *users), pins=ours, paths=_paths(root, package.files))


def _check_shipped(entrypoint: str | Callable[..., Any], root: Path, files: Sequence[str]) -> None:
    """Check that the file of an entrypoint is one of those that travel, where there is one.

    A callable is looked for where its module lies, unless it is pickled by value: one of `__main__`, a local function.

    Raises:
        EntrypointError: it does not travel; the message says why, and what to do.
    """
    what = shown(describe(entrypoint))
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
        better = shown(f"{relative}:{named.function}")
        raise EntrypointError(f"Entrypoint {what!r}: replicas find files by their path in the workspace. Use {better}")
    if relative not in files:
        raise EntrypointError(
            f"Entrypoint {what!r} is not shipped to replicas: git ignores {relative!r}. Take it out of .gitignore, or "
            "move it."
        )


def _file_of(function: Any) -> Path | None:
    """Return the file from which a replica would have to import a callable; None when it needs none of the user's."""
    named = named_by(function)
    module = sys.modules.get(str(getattr(named, "__module__", None)))
    file = getattr(module, "__file__", None)
    if module is None or file is None or module is sys.modules.get("__main__"):
        return None
    if "<" in named.__qualname__ or is_by_value(module.__name__):  # cloudpickle, for <locals> and <lambda>
        return None
    path = Path(file).resolve()
    ours = Path(__file__).resolve().parents[2]
    installed = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed += [ours / package for package in OURS]
    return None if any(path.is_relative_to(folder) for folder in installed) else path


def replica_environment(
    run: RunSpec, rank: int, timeout_s: float | None = None, gpu: str | None = None
) -> dict[str, str]:
    """Return the variables that a replica starts with, besides `run.env` and credentials.

    The rendezvous is the launcher's url: an adapter replaces it by the one that `remote_access` returns.
    """
    found = {
        environment.RANK: str(rank),
        environment.WORLD_SIZE: str(run.world_size),
        environment.RUN_ID: run.run_id,
        environment.ATTEMPT: str(run.attempt),
        environment.RENDEZVOUS: run.store_url,
        environment.TASK_DIGEST: run.task_digest,
    }
    for_the_worker = {
        environment.TIMEOUT_S: timeout_s,
        environment.GPU: gpu,
        environment.SETTINGS: json.dumps(run.settings.to_json()),
        environment.LAUNCHED_AT: run.launched_at,
        environment.LEASE_S: run.lease_s,
        environment.LEASE_NAME: None if run.lease_name == ATTACHED_LEASE else run.lease_name,
        environment.ENV: ",".join(sorted(run.env)) or None,
        environment.SPARE: "1" if run.is_of_spares else None,
        environment.TASK_FOLDER: None if run.task_folder == "task" else run.task_folder,
    }
    found |= {name: str(value) for name, value in for_the_worker.items() if value is not None}
    if version := installed_version("boto3"):
        found[environment.BOTO3] = f"boto3=={version}"
    return found


def bootstrap_command() -> tuple[str, ...]:
    """Return the command that starts a replica from the store, wherever there is a Python 3.11 and pip.

    It carries no secret and is the same for every run: what differs is in its environment.
    """
    return ("python", "-c", Path(__file__).with_name("bootstrap.py").read_text(encoding="utf-8"))


def layer_command(requirements: Sequence[str], pins: Sequence[str]) -> str:
    """Return the shell command that installs what an image lacks, for a service that builds layers on top of images.

    It is the same for the same requirements, so such a service builds the layer once.

    Args:
        requirements: what to install, as pip takes it.
        pins: those of them that are ours: an image that has a later version keeps it.

    Example:
        layer_command(["torch==2.13.0"], ["torch==2.13.0"])
    """
    script = Path(__file__).with_name("bootstrap.py").read_bytes()
    # One line without a quote of its own: each line of a Dockerfile is a command.
    packed = base64.b64encode(zlib.compress(script, 9)).decode()
    run = f"import base64,zlib;exec(zlib.decompress(base64.b64decode('{packed}')))"
    asked = json.dumps({"requirements": list(requirements), "pins": list(pins)})
    return shlex.join(["python", "-c", run, "layer", asked])


def _paths(root: Path, files: Sequence[str]) -> tuple[str, ...]:
    """Return the folders on `sys.path` that lie in the workspace, below its root, and travel."""
    found: dict[str, None] = {}  # a set that keeps the order
    for entry in sys.path:
        path = Path(os.path.abspath(entry))
        if path != root and path.is_relative_to(root):
            relative = path.relative_to(root).as_posix()
            if any(name.startswith(f"{relative}/") for name in files):
                found[relative] = None
    return tuple(found)
