"""Makes the package of code for replicas on other machines, and the command and environment that start them.

A service runs `bootstrap_command()` with `replica_environment(...)`, and with the credentials of the store as secrets.
The image only needs Python 3.11 or later and pip.
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
    """Pack the workspace for replicas that run this entrypoint. One line on stderr has the files that are left out.

    Args:
        entrypoint: the callable, or its name.
        root: the workspace. None, the default: the current directory.
        pip: the requirements. Empty, the default: the requirements in the entrypoint's file or the workspace's files.

    Raises:
        EntrypointError: the workspace is too large or cannot be read, or the entrypoint's file is not in the package.
    """
    root = (root or Path.cwd()).resolve()
    package = snapshot_workspace(root)
    _check_shipped(entrypoint, root, package.files)
    if package.left_out:
        print(f"replicas: not sent to the replicas: {', '.join(package.left_out)}", file=sys.stderr)
    ours, users = requirements_of(pip, root, script_of(entrypoint))
    return replace(package, requirements=(*ours, *users), pins=ours, paths=_paths(root, package.files))


def _check_shipped(entrypoint: str | Callable[..., Any], root: Path, files: Sequence[str]) -> None:
    """Check that the file of an entrypoint is one of the packed files.

    The file of a callable is the file of its module. A callable that is pickled by value needs no file, such as a local
    function or a function of `__main__`.

    Raises:
        EntrypointError: the file is not packed. The message has the reason and a remedy.
    """
    what = shown(describe(entrypoint))
    named = None if callable(entrypoint) else parse_entrypoint(entrypoint)
    file = named.file if named else _file_of(entrypoint)
    if file is None:
        return
    inside = Path(os.path.normpath(root / file))
    if not inside.is_relative_to(root):
        raise EntrypointError(
            f"Entrypoint {what!r} is in {str(inside)!r}, outside of the workspace {str(root)!r} that replicas get. "
            "Launch from a folder that contains it."
        )
    relative = inside.relative_to(root).as_posix()
    if named is not None and file.is_absolute():
        better = shown(f"{relative}:{named.function}")
        raise EntrypointError(f"Entrypoint {what!r}: replicas find files by their path in the workspace. Use {better}")
    if relative not in files:
        raise EntrypointError(
            f"Entrypoint {what!r} is not sent to replicas, because git ignores {relative!r}. Remove it from "
            ".gitignore, or move the file."
        )


def _file_of(function: Any) -> Path | None:
    """Return the user's file from which a replica must import a callable. None: the callable needs no file."""
    named = named_by(function)
    module = sys.modules.get(str(getattr(named, "__module__", None)))
    file = getattr(module, "__file__", None)
    if module is None or file is None or module is sys.modules.get("__main__"):
        return None
    if "<" in named.__qualname__ or is_by_value(module.__name__):  # cloudpickle pickles <locals> and <lambda> by value
        return None
    path = Path(file).resolve()
    ours = Path(__file__).resolve().parents[2]
    installed = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed += [ours / package for package in OURS]
    return None if any(path.is_relative_to(folder) for folder in installed) else path


def replica_environment(
    run: RunSpec, rank: int, timeout_s: float | None = None, gpu: str | None = None
) -> dict[str, str]:
    """Return the environment variables of a replica, without `run.env` and without credentials.

    The rendezvous in them is the launcher's url. An adapter replaces it with the url that `remote_access` returns.

    Args:
        run: the run.
        rank: the rank.
        timeout_s: the time limit in seconds. None, the default: no limit.
        gpu: the GPU that the launch requests. None, the default: no GPU.
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
        environment.USD_PER_HOUR: run.usd_per_hour if run.notify else None,
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
    """Return the command that starts a replica from the store, in any image with Python 3.11 or later and pip.

    It is the same for every run and has no secret. All differences are in the environment.
    """
    return ("python", "-c", Path(__file__).with_name("bootstrap.py").read_text(encoding="utf-8"))


def layer_command(requirements: Sequence[str], pins: Sequence[str]) -> str:
    """Return the shell command that installs packages which an image lacks, for a service that builds layers of images.

    The command is the same for the same requirements, so such a service builds the layer once.

    Args:
        requirements: the packages to install, as requirements of pip.
        pins: the requirements of this package itself. An image that has a later version keeps it.

    Example:
        layer_command(["torch==2.13.0"], ["torch==2.13.0"])
    """
    script = Path(__file__).with_name("bootstrap.py").read_bytes()
    # One line without quotes, because each line of a Dockerfile is a command.
    packed = base64.b64encode(zlib.compress(script, 9)).decode()
    run = f"import base64,zlib;exec(zlib.decompress(base64.b64decode('{packed}')))"
    asked = json.dumps({"requirements": list(requirements), "pins": list(pins)})
    return shlex.join(["python", "-c", run, "layer", asked])


def _paths(root: Path, files: Sequence[str]) -> tuple[str, ...]:
    """Return the folders on `sys.path` that are below the root of the workspace and have packed files."""
    found: dict[str, None] = {}  # a set that keeps the order
    for entry in sys.path:
        path = Path(os.path.abspath(entry))
        if path != root and path.is_relative_to(root):
            relative = path.relative_to(root).as_posix()
            if any(name.startswith(f"{relative}/") for name in files):
                found[relative] = None
    return tuple(found)
