"""The `# /// script` block of a file (PEP 723): what it needs installed, and settings of ours."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from executors.errors import EntrypointError
from executors.task.entrypoint import find_source

BLOCK = re.compile(r"(?m)^# /// script$\s(?P<content>(^#(| .*)$\s)+)^# ///$")  # as the PEP has it


def toml_of(text: str, place: str) -> dict[str, Any]:
    """Return a TOML text as a table.

    Raises:
        ValueError: it is none; the message names the place and the line.
    """
    import tomllib  # here, because few launches read any

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        what, _, where = str(error).partition(" (at ")
        line = re.match(r"line (\d+)", where)
        at = f", line {line[1]}" if line else f", line {len(text.splitlines())}"  # else: at the end
        raise ValueError(f"{place}{at} is not TOML: {what}.") from None


def read_text(path: Path) -> str:
    """Return what a file of settings holds.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"The file {str(path)!r} cannot be read: {error.strerror}. Check its path.") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} cannot be read: it is not UTF-8.") from None


def script_of(entrypoint: str | Callable[..., Any]) -> Path | None:
    """Return the file that an entrypoint is defined in; None where there is none to see."""
    if isinstance(entrypoint, str):
        with contextlib.suppress(EntrypointError):  # the search for the entrypoint reports what is wrong with the file
            found = find_source(entrypoint)
            return None if found is None else found[0]
        return None
    file = getattr(sys.modules.get(str(getattr(entrypoint, "__module__", None))), "__file__", None)
    return Path(file) if file is not None and file.endswith(".py") else None


def script_header(file: Path) -> dict[str, Any]:
    """Return the `# /// script` block of a file; empty where it has none.

    Raises:
        EntrypointError: there are two of them, or it is not TOML.
    """
    try:
        text = file.read_text(encoding="utf-8-sig", errors="replace")  # Python's own coding lines are not looked at
    except OSError:  # there is none to read, as in a zip
        return {}
    try:
        blocks = list(BLOCK.finditer(text))
        if len(blocks) > 1:
            raise ValueError(f"{file} has {len(blocks)} blocks '# /// script'. Keep one of them.")
        if not blocks:
            return {}
        lines_before = text.count("\n", 0, blocks[0].start("content"))
        content = re.sub(r"(?m)^# ?", "", blocks[0]["content"])
        return toml_of("\n" * lines_before + content, str(file))
    except ValueError as error:
        raise EntrypointError(str(error)) from None


def check_python(header: Mapping[str, Any], file: Path) -> None:
    """Check that replicas, which have the minor version of this Python, have one that the file asks for.

    Raises:
        EntrypointError: `requires-python` excludes it.
    """
    asked = header.get("requires-python")
    if asked is None:
        return
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        allowed = SpecifierSet(asked)
    except (InvalidSpecifier, TypeError, AttributeError):
        raise EntrypointError(
            f"{file}: requires-python is a version specifier, as in '>=3.11', got {asked!r}."
        ) from None
    minor = "{}.{}".format(*sys.version_info)
    if not any(allowed.contains(f"{minor}.{patch}") for patch in range(100)):
        raise EntrypointError(
            f"{file} requires Python {asked}, and replicas get this one's minor version, {minor}. Launch with another "
            "Python, or change requires-python in its '# /// script' block."
        )
