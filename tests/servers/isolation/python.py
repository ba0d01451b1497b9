"""A Python that sees the dependencies of this project and not the project: what a replica's machine has."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.metadata
import shutil
import sysconfig
import tempfile
import venv
from pathlib import Path

PROJECT = "serverless-replicas"


@functools.cache
def shared_python() -> Path:
    """Return the `bin` of one environment for all servers of this process; it is removed with the process."""
    folder = Path(tempfile.mkdtemp(prefix="python-without-the-project-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return python_without_the_project(folder)


def python_without_the_project(folder: Path) -> Path:
    """Lay out a virtual environment in `folder` that sees this one's packages, but not the project; return its `bin`.

    Left out is whatever the project's installation put beside the other packages: the packages themselves, or the
    path file (or the finder) of an editable installation.
    """
    venv.EnvBuilder(symlinks=True, clear=True).create(folder)
    hidden: set[str] = set()
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        hidden = {file.parts[0] for file in importlib.metadata.files(PROJECT) or ()}
    here = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", "venv", vars=here))
    for source in {Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib"))}:
        for entry in source.iterdir():
            if entry.name not in hidden and not (packages / entry.name).exists():
                (packages / entry.name).symlink_to(entry)
    return folder / "bin"


def isolated_python(folder: Path) -> Path:
    """Make a virtual environment in `folder` into which pip can install, and return its `python`.

    The packages installed here are on its path as a plain folder, in which no `.pth` file is obeyed: an editable
    install is such a file. Packages that its pip installs go into the environment itself.
    """
    home = folder / "isolated python"
    venv.create(home, symlinks=True, with_pip=False)
    paths = sysconfig.get_paths("venv", {"base": str(home), "platbase": str(home)})
    dependencies = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (Path(paths["purelib"]) / "dependencies.pth").write_text("".join(f"{path}\n" for path in sorted(dependencies)))
    return home / "bin" / "python"
