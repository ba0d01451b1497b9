"""Versions of Python and torch, here and where a run was launched."""

from __future__ import annotations

import sys
from collections.abc import Mapping


def installed_version(distribution: str) -> str | None:
    """Return the public part of an installed version (`2.13.0` of `2.13.0+cpu`); None when it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(distribution).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None


def versions_here() -> dict[str, str | None]:
    """Return what a task tells of its launcher."""
    return {"python_version": sys.version.split()[0], "torch": installed_version("torch")}


def difference(python_version: str, torch: str | None) -> str | None:
    """Say how this replica's versions differ from its launcher's; None when they do not."""
    here = _in_words(versions_here())
    there = _in_words({"python_version": python_version, "torch": torch})
    return None if here == there else f"replicas: this replica runs {here}, the launcher {there}."


def _in_words(versions: Mapping[str, str | None]) -> str:
    minor = ".".join(str(versions["python_version"]).split(".")[:2])
    return f"Python {minor} and {'torch ' + versions['torch'] if versions['torch'] else 'no torch'}"
