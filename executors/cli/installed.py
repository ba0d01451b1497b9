"""Checks for `replicas doctor`: packages whose versions are too old, and another package that uses our folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

OUR_NAME = "serverless-replicas"
FOLDER = "executors"
"""The folder of this project's first package. The public index has another package of this name."""


def packages_below_bounds() -> Iterator[tuple[str, str]]:
    """Yield each installed package whose version this project does not accept, with the command that installs a
    right one.

    Packages that are not installed are left out, because most belong to backends that the user does not use.

    Yields: the found version in words, such as `boto3 1.30.0; replicas needs boto3>=1.38.46`, and the command.

    Example:
        for problem, command in packages_below_bounds():
            print(problem, command)
    """
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name
    from packaging.version import InvalidVersion

    try:
        texts = metadata.requires(OUR_NAME) or []
    except metadata.PackageNotFoundError:
        return  # a copied folder names no versions
    seen = set[str]()
    for text in texts:
        try:
            requirement = Requirement(text)
            name = canonicalize_name(requirement.name)
            # Tools of developers are not checked: they are in the extra dev alone, and no command uses them.
            if name in seen or name == OUR_NAME or _is_for_developers(requirement):
                continue
            found = metadata.version(requirement.name)
            is_right = requirement.specifier.contains(found, prereleases=True)
        except (InvalidRequirement, InvalidVersion, metadata.PackageNotFoundError):
            continue
        seen.add(name)
        if not is_right:
            wanted = f"{requirement.name}{requirement.specifier}"
            yield f"{requirement.name} {found}; replicas needs {wanted}", f"pip install '{wanted}'"


def _is_for_developers(requirement: object) -> bool:
    marker = getattr(requirement, "marker", None)
    return marker is not None and "dev" in _extras_of(str(marker))


def _extras_of(marker: str) -> list[str]:
    """Return the names of extras that a marker of a requirement names, as in `extra == "dev"`."""
    import re

    return re.findall(r"extra == ['\"]([\w-]+)['\"]", marker)


def foreign_executors() -> tuple[str, str] | None:
    """Return a description of another package that has files in our folder `executors`. None: there is none.

    The public index has a package called `executors`. Both install a folder of this name, so the one that was installed
    last overwrites files of the other.

    Returns: the description, and the remedy.
    """
    ours = Path(__file__).parents[1].absolute()
    remedy = (
        f"pip uninstall {FOLDER}, and install this project again. If another program needs that package, give it a "
        "virtual environment of its own."
    )
    for distribution in metadata.distributions(name=FOLDER):
        return (
            f"The package {FOLDER} {distribution.version} is installed at {distribution.locate_file('')}. It is not a "
            f"part of this project, and uses the same folder",
            remedy,
        )
    # A folder or file of this name that comes earlier on the path wins in the user's scripts, and not in this command.
    for entry in sys.path:
        folder = Path(entry or ".").absolute()
        for candidate in (folder / FOLDER, folder / f"{FOLDER}.py"):
            if candidate == ours:
                return None
            if candidate.is_file() or (candidate / "__init__.py").is_file():
                return (
                    f"`import {FOLDER}` finds {candidate}, and not this project at {ours}",
                    "Rename or remove it, or start Python in another folder.",
                )
    return None
