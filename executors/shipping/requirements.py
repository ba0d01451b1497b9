"""Finds the packages that a replica on another machine needs: our dependencies as installed here, and the user's.

The user's requirements come from the first of these sources that has any: the option `--pip`, the `# /// script` block
of the entrypoint's file, the workspace's `requirements.txt`, its `pyproject.toml`. A requirement of the user replaces
our pin of the same package. An index to install from counts as a requirement: `--extra-index-url=https://…`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from executors.errors import EntrypointError, packages_of
from executors.shipping.script_header import read_text, script_header, toml_of
from executors.task.stored import installed_version

# The packages that our code imports inside a replica. A launcher needs further packages.
OURS = ("torch", "numpy", "xxhash", "blake3", "tenacity", "cloudpickle", "inotify_simple", "boto3", "platformdirs")
DISTRIBUTION = "serverless-replicas"  # never installed, because the package of code contains this project itself
INDEX = re.compile(r"--(?P<option>index-url|extra-index-url|find-links)(?:\s*=\s*|\s+)(?P<value>\S+)")
SHORT = {"-i": "--index-url", "-f": "--find-links"}
INCLUDE = re.compile(r"(?:-r|--requirement)(?:\s*=\s*|\s+|(?<=-r))(?P<file>\S+)")


def requirements_of(
    pip: Sequence[str], root: Path, script: Path | None = None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the requirements of a replica: our dependencies, pinned to the versions here, and the user's requirements.

    Args:
        pip: the user's requirements. Empty: the requirements in the files of the workspace.
        root: the workspace.
        script: the entrypoint's file. None, the default: the entrypoint has no file.

    Raises:
        EntrypointError: a file cannot be read, or has an option that replicas do not accept, or a version that no index
            has.
    """
    if pip:
        users = given_requirements(pip)
    elif script is not None and (in_header := _of_header(script)) is not None:
        users = in_header
    elif (root / "requirements.txt").is_file():
        users = _read(root / "requirements.txt")
    else:
        project = _project(root)
        # In a checkout of this project, the dependencies are the launcher's, and not the user's.
        is_ours = canonicalize_name(str(project.get("name", ""))) == DISTRIBUTION
        users = [] if is_ours else [_check(line, "pyproject.toml") for line in project.get("dependencies", [])]
    pins = {canonicalize_name(name): f"{name}=={version}" for name in OURS if (version := installed_version(name))}
    users = _without_ours(users)
    named = {package_name_of(line) for line in users}
    if "torch" in named:
        # A machine that only launches may have no torch. Then replicas need the other packages of the extra as well.
        for line in packages_of("diloco"):
            pins.setdefault(canonicalize_name(Requirement(line).name), line)
    if not any(INDEX.fullmatch(line) for line in users) and (local := next(filter(_is_local, users), None)):
        public = re.sub(r"\+[\w.-]+", "", local)
        raise EntrypointError(
            f"The requirement {local!r} has a local version, and PyPI has no local versions. Ask for {public!r}, or "
            "add the index that has it to requirements.txt or pip=, as in '--extra-index-url URL'."
        )
    return tuple(pin for name, pin in pins.items() if name not in named), tuple(users)


def given_requirements(pip: Sequence[str]) -> list[str]:
    """Return the checked requirements that the user gave.

    Args:
        pip: the requirements.

    Raises:
        EntrypointError: a requirement is an option that replicas do not accept, or has credentials.
    """
    return _without_ours(_check(line, "pip=") for line in pip)


def package_name_of(requirement: str) -> str | None:
    """Return the normalized name of the package that a requirement asks for. None: it is a path or a bare url.

    Args:
        requirement: the requirement.
    """
    try:
        return canonicalize_name(Requirement(requirement).name)
    except InvalidRequirement:
        return None


def _without_ours(lines: Iterable[str]) -> list[str]:
    return [line for line in dict.fromkeys(lines) if package_name_of(line) != DISTRIBUTION]


def _is_local(line: str) -> bool:
    """Return True if a requirement asks for a version with a local part, as in `torch==2.13.0+cpu`."""
    try:
        return any("+" in each.version for each in Requirement(line).specifier)
    except InvalidRequirement:
        return False


def _project(root: Path) -> dict[str, Any]:
    """Return the table [project] of the workspace's pyproject.toml. The result is empty if there is none."""
    path = root / "pyproject.toml"
    if not path.is_file():
        return {}
    try:
        return dict(toml_of(read_text(path), str(path)).get("project", {}))
    except ValueError as error:
        raise EntrypointError(f"{error} Correct it, or give pip=.") from error


def _of_header(script: Path) -> list[str] | None:
    """Return the requirements of a script's header. None: the header has no requirements."""
    header = script_header(script)
    others = [name for name in header if name not in ("dependencies", "requires-python", "tool")]
    tools = header.get("tool")
    others += [f"tool.{name}" for name in (tools if isinstance(tools, dict) else ()) if name != "replicas"]
    if others:
        names = ", ".join(f"[{name}]" for name in others)
        print(f"replicas: {script}: replicas ignore {names} of its '# /// script' block", file=sys.stderr)
    lines = header.get("dependencies")
    if lines is None:
        return None
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise EntrypointError(f"{script}: dependencies must be a list of strings, as in ['einops'], got {lines!r}.")
    return [_check(line, script.name) for line in lines]


def _read(path: Path, *including: Path) -> list[str]:
    """Return the requirements of a file and of the files that it includes."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise EntrypointError(f"{path} cannot be read: {error}.") from error
    found: list[str] = []
    for line in re.sub(r"\\\r?\n", "", text).splitlines():
        line = re.sub(r"(^|\s)#.*", "", line).strip()
        if not line:
            continue
        if include := INCLUDE.fullmatch(line):
            file = (path.parent / include["file"]).resolve()
            if file in (*including, path.resolve()):
                raise EntrypointError(f"{path} includes itself: {line!r}.")
            found += _read(file, *including, path.resolve())
        else:
            found.append(_check(line, path.name))
    return found


def _check(line: str, place: str) -> str:
    """Return a checked requirement.

    Raises:
        EntrypointError: the line is an option of pip, or has credentials.
    """
    line = line.strip()
    if re.search(r"https?://[^/\s]*@", line):
        raise EntrypointError(
            f"{place}: the requirement {package_name_of(line) or 'of a url'!r} has credentials, and requirements are "
            "stored with the run. Install such a package in the image of the replicas."
        )
    if index := INDEX.fullmatch(re.sub(r"^(-i|-f)\b", lambda short: SHORT[short[1]], line)):
        return f"--{index['option']}={index['value']}"
    option = line if line.startswith("-") else next(iter(re.findall(r"\s(--?[A-Za-z].*)", line)), "")
    if option or not line:
        raise EntrypointError(
            f"{place}: replicas accept only requirements, '-r FILE' and options of an index, got {option!r}. Install "
            "such packages in the image of the replicas, or give pip= without them."
        )
    return line
