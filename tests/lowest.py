"""Run a selection of the tests with each dependency at its lower bound: `make test-lowest`.

The bounds in `pyproject.toml` are promises: a user who has an older release of a package keeps it if the bound permits.
This command installs each package at exactly its bound into `.venv-lowest`. It runs the tests of units, contracts, the
command, clouds, local launches and training that `make test` runs, too. It leaves out the tests of documents, servers
and simulations.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
import venv
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".venv-lowest"
TOOLS = (
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
    "greenlet",
    "safetensors",
    "moto",
    "jsonschema",
    "griffelib",
    "hydra-core",
    "fire",
    "torchdata",
)
"""The packages of the tests. They are no dependencies of the product, and are as new as in `constraints.txt`."""
UNPINNED_TOOLS = ("datasets",)
"""Packages of the tests that need, in the version of `constraints.txt`, more than a lower bound of the product."""
SELECTION = ("tests/unit", "tests/contract", "tests/cli", "tests/jobs", "tests/local", "tests/training")
# An old release beside new ones of the packages that it needs: their advice to its authors is not about the product.
IGNORED = ("DeprecationWarning", "PendingDeprecationWarning", "FutureWarning")


def lower_bounds() -> dict[str, str]:
    """Return the lower bound of each package that the product or one of its extras needs.

    Raises:
        ValueError: A requirement has no lower bound.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    texts = [*project["dependencies"], *(text for name, texts in extras.items() if name != "dev" for text in texts)]
    found: dict[str, str] = {}
    for requirement in map(Requirement, texts):
        if requirement.name == project["name"]:
            continue
        bounds = [each.version for each in requirement.specifier if each.operator == ">="]
        if len(bounds) != 1:
            raise ValueError(f"{requirement} has no lower bound. Write it as NAME>=VERSION in pyproject.toml.")
        found[canonicalize_name(requirement.name)] = bounds[0]
    return found


def tool_requirements() -> list[str]:
    """Return the requirements of the tests' own packages.

    Each has the extras of the extra `dev`, and the version in `constraints.txt`. The packages of `UNPINNED_TOOLS` have
    the bound of the extra `dev` instead.
    """
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    pins: dict[str, str] = {canonicalize_name(line.partition("==")[0]): line.partition("==")[2] for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    dev: dict[str, Requirement] = {
        canonicalize_name(each.name): each for each in map(Requirement, project["optional-dependencies"]["dev"])
    }
    found = []
    for name in TOOLS:
        extras = ",".join(sorted(dev[name].extras))
        found.append(f"{name}{f'[{extras}]' if extras else ''}=={pins[name]}")
    return [*found, *(str(dev[name]) for name in UNPINNED_TOOLS)]


def main(arguments: list[str]) -> int:
    """Install the packages, run the tests, and return the exit code of pytest.

    Args:
        arguments: Arguments for pytest, instead of the selection. Empty: the selection.
    """
    venv.create(FOLDER, with_pip=True, symlinks=True)
    python = str(FOLDER / "bin" / "python")
    constraints = FOLDER / "constraints.txt"
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in lower_bounds().items()))
    install = [
        python,
        "-m",
        "pip",
        "install",
        "--progress-bar",  # with --quiet, pip would not name the bounds that exclude each other
        "off",
        "--disable-pip-version-check",
        "--constraint",
        str(constraints),
    ]
    subprocess.run([*install, "--editable", ".[all]", *tool_requirements()], cwd=ROOT, check=True)
    ignored = [word for name in IGNORED for word in ("-W", f"ignore::{name}")]
    selection = arguments or [*SELECTION, "-m", "not slow and not live and not slurm", "-n", "2", "--dist", "loadfile"]
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", *ignored, *selection]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
