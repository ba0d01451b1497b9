"""Makes Pythons that find the dependencies of this project but not the project itself, like the Python on a replica's
machine.
"""

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
    """Return the `bin` folder of an environment that all servers of this process share.

    It is removed when the process ends.
    """
    folder = Path(tempfile.mkdtemp(prefix="python-without-the-project-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return python_without_the_project(folder)


def python_without_the_project(folder: Path) -> Path:
    """Make a virtual environment that finds the packages of this environment except the project. Return its `bin`
    folder.

    It omits the files that installing the project put beside the other packages: the project's packages, or the path
    file or finder of an editable installation.
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
    """Make a virtual environment in which pip can install packages, and return its `python`.

    It finds the packages of this environment by a plain folder on its path. Python ignores `.pth` files in such a
    folder, so an editable installation of the project is not found. Packages that its pip installs go into the new
    environment itself.
    """
    home = folder / "isolated python"
    venv.create(home, symlinks=True, with_pip=False)
    paths = sysconfig.get_paths("venv", {"base": str(home), "platbase": str(home)})
    dependencies = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (Path(paths["purelib"]) / "dependencies.pth").write_text("".join(f"{path}\n" for path in sorted(dependencies)))
    return home / "bin" / "python"
