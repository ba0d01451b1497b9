"""Describes an exception of the user's code for the outcome: the user's frames, the message, and a fingerprint."""

from __future__ import annotations

import contextlib
import os
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from executors.errors import CorruptObjectError, HangError, KeyNotFoundError, StoreError, UnsafeStoreError

OURS = tuple(str(Path(__file__).parents[2] / package) + os.sep for package in ("executors", "diloco"))
INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
# Counts, addresses and numbers, which are removed from a message before a comparison.
VARYING = re.compile(r"\d+ sub-exceptions?|0x[0-9a-fA-F]+|\d+")
ANSWERS_OF_STORES = (KeyNotFoundError, CorruptObjectError, UnsafeStoreError)
LAST_LINES, FEW_LINES, MAX_LAST_WORDS = 12, 6, 300
FRAME = " \t│╭╮╰╯─|+-"
NAMED_ERROR = re.compile(r"(?i)\berror\b\W*\s\w")  # includes `train.py: error: …` of argparse and `ERROR: …` of fire
MAX_MESSAGE = 10_000  # the characters of a message that are compared
GENERATED = "<string>"
"""The file of code that was made from a text, as by `exec` and `python -c`."""
NOTEBOOK = ("/ipykernel_", "<ipython-input-")


def describe_failure(error: BaseException) -> dict[str, str | None]:
    """Return the fields `error`, `error_line`, `error_place` and `fingerprint` of an outcome.

    Args:
        error: the exception that the entrypoint raised.
    """
    trace = error.__traceback__
    while trace is not None and str(trace.tb_frame.f_globals.get("__name__")).startswith("executors.worker."):
        trace = trace.tb_next
    first = trace
    while first is not None and not _is_users(first):
        first = first.tb_next
    if first is not None:
        trace = first  # frames of this project before the user's first frame do not help the user
    leaf, lines, place = error, [_first_line(error)], _place(trace)
    while isinstance(leaf, BaseExceptionGroup):  # the message of a group has only the number of its members
        leaf = leaf.exceptions[0]
        lines, place = [lines[0], _first_line(leaf)], _place(leaf.__traceback__) or place
    return {
        "error": "".join(traceback.format_exception(type(error), error, trace)).rstrip(),
        # The message of a HangError is a whole sentence, which needs no name of a class before it.
        "error_line": str(error) if isinstance(error, HangError) else ": ".join(lines),
        "error_place": place,
        "fingerprint": fingerprint_of(error),
    }


def last_error(printed: str) -> str:
    """Return the line in which a program prints its reason to exit: the last line with the word "error", or the last
    lines.

    Parsers of options print usage and advice around that line, and some print a frame. Hydra does not print the word.

    Args:
        printed: the end of the program's output.
    """
    lines = [line.strip(FRAME) for line in printed.splitlines()[-LAST_LINES:]]
    lines = [line for line in lines if line]
    named = [line for line in lines if NAMED_ERROR.search(line)]
    return (named[-1] if named else " ".join(lines[-FEW_LINES:]) or "nothing.")[-MAX_LAST_WORDS:]


def fingerprint_of(error: BaseException) -> str | None:
    """Return a hash of an exception. Two exceptions with the same hash differ at most in the numbers in their messages.

    The hash covers the type, message and place of the exception, of its causes, and of the members of a group. The
    message alone is not enough, because `raise … from` and a TaskGroup have the same message for every cause. The
    number and the order of members depend on chance, so they are not in the hash.

    Args:
        error: the exception.

    Returns: 64 hexadecimal digits. None for an error of a store. All replicas get such an error during an outage, so
        equal errors of this kind do not show that the next attempt would fail as well.
    """
    _, *others = errors = list(all_of(error))
    if any(map(is_store_failure, errors)):
        return None
    import hashlib  # only here, because it costs each start of a replica 2 ms

    parts = [_likeness(error), *sorted({*map(_likeness, others)})]
    return hashlib.sha256("\n".join(parts).encode(errors="replace")).hexdigest()


def _likeness(error: BaseException) -> str:
    """Return the message and the place of one exception without numbers and addresses."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users_file(frame.filename)]
    message = _only(error)[:MAX_MESSAGE]
    parts = [VARYING.sub("#", message)]
    parts += [f"{os.path.basename(frame.filename)} {frame.name} {frame.line}" for frame in frames]
    return "\n".join(parts)


def _only(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(type(error), error))


def _first_line(error: BaseException) -> str:
    return _only(error).strip().partition("\n")[0]


def all_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, its causes, and the members of groups, in the order of its traceback.

    Args:
        error: the exception.
    """
    seen, left = set[int](), [error]
    while left:
        error = left.pop()
        if id(error) in seen:
            continue
        seen.add(id(error))
        yield error
        cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        left += [cause] if cause is not None else []
        left += error.exceptions if isinstance(error, BaseExceptionGroup) else ()


def _place(trace: TracebackType | None) -> str | None:
    """Return the file and the line of the user's innermost frame. Deeper frames are in libraries."""
    found = None
    while trace is not None:
        # Libraries make functions from texts, such as the `__init__` of a dataclass. A file of the user says more.
        if _is_users(trace) and (found is None or trace.tb_frame.f_code.co_filename != GENERATED):
            found = trace
        trace = trace.tb_next
    if found is None:
        return None
    return shown_place(found.tb_frame.f_code.co_filename, found.tb_lineno)


def shown_place(file: str, line: int) -> str:
    """Return a file and a line as a message shows them: relative to the working directory, or the file's name alone.

    Args:
        file: the path, as in a frame.
        line: the number of the line.

    Example:
        shown_place("/home/me/project/train.py", 7)  # "train.py:7"
    """
    if any(mark in file for mark in NOTEBOOK):
        return f"a notebook's cell, line {line}"
    shown = os.path.basename(file)
    with contextlib.suppress(OSError):  # the working directory may be deleted
        if file.startswith(here := os.getcwd() + os.sep):
            shown = file.removeprefix(here)
    return f"{shown}:{line}"


def is_store_failure(error: BaseException | None) -> bool:
    """Return True if the error means that a store did not answer or did not accept a write.

    A later attempt may succeed.

    Args:
        error: any exception, or None.
    """
    return isinstance(error, StoreError) and not isinstance(error, ANSWERS_OF_STORES)


def is_users_file(file: str) -> bool:
    """Return True if a file belongs to the user: not to Python, to an installed package, or to this project.

    Args:
        file: the path, as in a frame.
    """
    return not file.startswith(("<frozen ", STANDARD_LIBRARY, *OURS)) and not any(mark in file for mark in INSTALLED)


def _is_users(trace: TracebackType) -> bool:
    return is_users_file(trace.tb_frame.f_code.co_filename)
