"""Reads the `# /// script` block of a file (PEP 723): its dependencies, its Python version, and our settings."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from executors.errors import EntrypointError
from executors.task.command import Command
from executors.task.entrypoint import find_source

BLOCK = re.compile(r"(?m)^# /// script$\s(?P<content>(^#(| .*)$\s)+)^# ///$")  # copied from the PEP


def toml_of(text: str, place: str) -> dict[str, Any]:
    """Parse a TOML text.

    Args:
        text: the text.
        place: the name of the file, for the error.

    Raises:
        ValueError: the text is not TOML. The message has the place and the line.
    """
    import tomllib  # only here, because few launches read TOML

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        what, _, where = str(error).partition(" (at ")
        line = re.match(r"line (\d+)", where)
        at = f", line {line[1]}" if line else f", line {len(text.splitlines())}"  # without a line, it is at the end
        raise ValueError(f"{place}{at} is not TOML: {what}.") from None


def read_text(path: Path) -> str:
    """Return the text of a file of settings.

    Args:
        path: the file.

    Raises:
        ValueError: the file cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"The file {str(path)!r} cannot be read: {error.strerror}. Check its path.") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} cannot be read: it is not UTF-8.") from None


def script_of(entrypoint: str | Callable[..., Any]) -> Path | None:
    """Return the file that defines an entrypoint. None: it has no source file.

    Args:
        entrypoint: the callable, or its name.
    """
    if isinstance(entrypoint, str):
        with contextlib.suppress(EntrypointError):  # the check of the entrypoint reports this error
            found = find_source(entrypoint)
            return None if found is None else found[0]
        return None
    if isinstance(entrypoint, Command):
        return None
    file = getattr(sys.modules.get(str(getattr(entrypoint, "__module__", None))), "__file__", None)
    return Path(file) if file is not None and file.endswith(".py") else None


def script_header(file: Path) -> dict[str, Any]:
    """Return the `# /// script` block of a file. The result is empty if there is none.

    Args:
        file: the file.

    Raises:
        EntrypointError: the file has two such blocks, or the block is not TOML.
    """
    try:
        text = file.read_text(encoding="utf-8-sig", errors="replace")  # coding lines of Python are ignored
    except OSError:  # the file does not exist, as for a module in a zip
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
    """Check `requires-python` of a file against this Python, because replicas have the same minor version.

    Args:
        header: the header of the file.
        file: the file, for the error.

    Raises:
        EntrypointError: `requires-python` excludes this version, or cannot be parsed.
    """
    asked = header.get("requires-python")
    if asked is None:
        return
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        allowed = SpecifierSet(asked)
    except (InvalidSpecifier, TypeError, AttributeError):
        raise EntrypointError(
            f"{file}: requires-python must be a version specifier, as in '>=3.11', got {asked!r}."
        ) from None
    minor = "{}.{}".format(*sys.version_info)
    if not any(allowed.contains(f"{minor}.{patch}") for patch in range(100)):
        raise EntrypointError(
            f"{file} requires Python {asked}, and replicas get the launcher's minor version {minor}. Launch with "
            "another Python, or change requires-python in its '# /// script' block."
        )
