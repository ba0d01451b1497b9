"""The packages that a replica on another machine needs: our own dependencies as installed here, and the user's.

The user's are those given by hand, else those of the `# /// script` block of the entrypoint's file, else those of the
workspace's `requirements.txt`, else those of its `pyproject.toml`. Whatever the user names replaces our pin of it. An
index to install from travels as one of them: `--extra-index-url=https://…`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from executors.errors import EntrypointError
from executors.shipping.script_header import read_text, script_header, toml_of
from executors.task.stored import installed_version

# The packages that our code imports inside a replica. A launcher needs more.
OURS = ("torch", "numpy", "xxhash", "blake3", "tenacity", "cloudpickle", "inotify_simple", "boto3", "platformdirs")
DISTRIBUTION = "serverless-replicas"  # travels with the code, as it is here
INDEX = re.compile(r"--(?P<option>index-url|extra-index-url|find-links)(?:\s*=\s*|\s+)(?P<value>\S+)")
SHORT = {"-i": "--index-url", "-f": "--find-links"}
INCLUDE = re.compile(r"(?:-r|--requirement)(?:\s*=\s*|\s+|(?<=-r))(?P<file>\S+)")


def requirements_of(
    pip: Sequence[str], root: Path, script: Path | None = None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what is installed in a replica: ours, pinned to the versions installed here, and the user's.

    Args:
        pip: the user's requirements; when empty, those that the workspace's files name.
        root: the workspace.
        script: the entrypoint's file.

    Raises:
        EntrypointError: a file cannot be read, or holds an option that is not taken, or a version that no index has.
    """
    if pip:
        users = given_requirements(pip)
    elif script is not None and (in_header := _of_header(script)) is not None:
        users = in_header
    elif (root / "requirements.txt").is_file():
        users = _read(root / "requirements.txt")
    else:
        project = _project(root)
        is_ours = canonicalize_name(str(project.get("name", ""))) == DISTRIBUTION  # and what it names is a launcher's
        users = [] if is_ours else [_check(line, "pyproject.toml") for line in project.get("dependencies", [])]
    pins = {canonicalize_name(name): f"{name}=={version}" for name in OURS if (version := installed_version(name))}
    users = _without_ours(users)
    named = {name_of(line) for line in users}
    if not any(INDEX.fullmatch(line) for line in users) and (local := next(filter(_is_local, users), None)):
        public = re.sub(r"\+[\w.-]+", "", local)
        raise EntrypointError(
            f"The requirement {local!r} names a local version, and PyPI has none. Name the index that has it, in "
            f"requirements.txt or pip=: '--extra-index-url URL'; or ask for {public!r}."
        )
    return tuple(pin for name, pin in pins.items() if name not in named), tuple(users)


def given_requirements(pip: Sequence[str]) -> list[str]:
    """Return requirements that the user gave, as a task has them.

    Raises:
        EntrypointError: one is an option that is not taken, or holds credentials.
    """
    return _without_ours(_check(line, "pip=") for line in pip)


def name_of(requirement: str) -> str | None:
    """Return the normalized name of the package that a requirement asks for, or None for a path or a bare url."""
    try:
        return canonicalize_name(Requirement(requirement).name)
    except InvalidRequirement:
        return None


def _without_ours(lines: Iterable[str]) -> list[str]:
    return [line for line in dict.fromkeys(lines) if name_of(line) != DISTRIBUTION]


def _is_local(line: str) -> bool:
    """Tell whether a requirement asks for a version with a local part, as in `torch==2.13.0+cpu`."""
    try:
        return any("+" in each.version for each in Requirement(line).specifier)
    except InvalidRequirement:
        return False


def _project(root: Path) -> dict[str, Any]:
    """Return the table [project] of the workspace's pyproject.toml; empty without one."""
    path = root / "pyproject.toml"
    if not path.is_file():
        return {}
    try:
        return dict(toml_of(read_text(path), str(path)).get("project", {}))
    except ValueError as error:
        raise EntrypointError(f"{error} Correct it, or give pip=.") from error


def _of_header(script: Path) -> list[str] | None:
    """Return the requirements of a script's header; None where it names none."""
    header = script_header(script)
    others = [name for name in header if name not in ("dependencies", "requires-python", "tool")]
    tools = header.get("tool")
    others += [f"tool.{name}" for name in (tools if isinstance(tools, dict) else ()) if name != "replicas"]
    if others:
        names = ", ".join(f"[{name}]" for name in others)
        print(f"replicas: {script}: of its '# /// script' block, {names} is not taken to replicas", file=sys.stderr)
    lines = header.get("dependencies")
    if lines is None:
        return None
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise EntrypointError(f"{script}: dependencies is a list of strings, as in ['einops'], got {lines!r}.")
    return [_check(line, script.name) for line in lines]


def _read(path: Path, *including: Path) -> list[str]:
    """Read a requirements file and those it includes."""
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
    """Return a requirement.

    Raises:
        EntrypointError: it is an option of pip's, or would show credentials.
    """
    line = line.strip()
    if re.search(r"https?://[^/\s]*@", line):
        raise EntrypointError(
            f"{place}: the requirement {name_of(line) or 'of a url'!r} holds credentials. Requirements are stored with "
            "the run: install such a package in the image that the replicas start from."
        )
    if index := INDEX.fullmatch(re.sub(r"^(-i|-f)\b", lambda short: SHORT[short[1]], line)):
        return f"--{index['option']}={index['value']}"
    option = line if line.startswith("-") else next(iter(re.findall(r"\s(--?[A-Za-z].*)", line)), "")
    if option or not line:
        raise EntrypointError(
            f"{place}: the option {option!r} is not taken to replicas, only requirements, '-r FILE' and the options of "
            "an index are. Install such packages in the image that the replicas start from, or give pip= without them."
        )
    return line
