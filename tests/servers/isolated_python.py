"""A Python that sees the dependencies of this project and not the project: what a replica's machine has."""

from __future__ import annotations

import sysconfig
import venv
from pathlib import Path


def isolated_python(folder: Path) -> Path:
    """Make a virtual environment in `folder`, and return its `python`.

    The packages installed here are on its path as a plain folder, in which no `.pth` file is obeyed: an editable
    install is such a file. What pip installs with it goes into the environment itself.
    """
    home = folder / "isolated python"
    venv.create(home, symlinks=True, with_pip=False)
    paths = sysconfig.get_paths("venv", {"base": str(home), "platbase": str(home)})
    dependencies = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (Path(paths["purelib"]) / "dependencies.pth").write_text("".join(f"{path}\n" for path in sorted(dependencies)))
    return home / "bin" / "python"
