"""The Python that sandboxes run: that of the tests, with its packages, but without this project.

A real sandbox has the interpreter and the packages of its image; the project's own code reaches it only if somebody
sends it. The tests' environment has the project installed, so sandboxes get an environment beside it: the same
interpreter, and a link to every installed package except what this distribution installed (its code, its `.pth` file
when it is editable, its metadata with the entry points).
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import sysconfig
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

DISTRIBUTION = "serverless-replicas"


@functools.cache
def bin_folder_of_sandboxes() -> Path:
    """Return the directory that holds `python`; made once, and removed when this process ends."""
    folder = tempfile.TemporaryDirectory(prefix="python-of-sandboxes-")
    atexit.register(folder.cleanup)
    return make_environment(Path(folder.name))


def make_environment(folder: Path) -> Path:
    """Make the environment in a folder; return the directory that holds `python`."""
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    interpreter = Path(os.path.realpath(sys.executable))
    (folder / "pyvenv.cfg").write_text(f"home = {interpreter.parent}\ninclude-system-site-packages = false\n")
    for name in ("python", "python3", f"python3.{sys.version_info.minor}"):
        (bin_folder / name).symlink_to(interpreter)
    site_packages = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    site_packages.mkdir(parents=True)
    ours = names_of_our_own()
    for installed in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(installed).iterdir():
            if entry.name not in ours:
                (site_packages / entry.name).symlink_to(entry)
    return bin_folder


def names_of_our_own() -> set[str]:
    """Return what this project's distribution has put into the folder of installed packages."""
    try:
        files = distribution(DISTRIBUTION).files or []
    except PackageNotFoundError:
        files = []
    return {file.parts[0] for file in files if file.parts[0] != ".."}
