"""The source lines of pickled functions, so that a traceback shows them on machines without the file."""

from __future__ import annotations

import inspect
import linecache
import os
from collections.abc import Callable, Iterator, Mapping
from types import CellType, CodeType, FunctionType
from typing import Any

MAX_CHARACTERS = 1 << 20


def sources_of(function: Callable[..., Any], pickled: bytes) -> dict[str, str]:
    """Return the source lines of the functions in a pickle, by file or notebook cell.

    All other lines are empty. So a token elsewhere in a cell does not leave this machine.

    Args:
        function: the pickled function.
        pickled: the pickle.
    """
    found: dict[str, list[str]] = {}
    for code in _codes(function, set()):
        if code.co_filename.encode(errors="surrogatepass") in pickled:
            try:
                lines, first = inspect.getsourcelines(code)
            except Exception:  # noqa: BLE001 - the source is missing, or was edited since: tracebacks have no lines then
                continue
            text = found.setdefault(code.co_filename, [])
            text += ["\n"] * (first - 1 + len(lines) - len(text))
            text[first - 1 : first - 1 + len(lines)] = lines
    sources = {file: "".join(lines) for file, lines in sorted(found.items())}
    return sources if sum(map(len, sources.values())) <= MAX_CHARACTERS else {}


def _codes(value: Any, seen: set[int]) -> Iterator[CodeType]:
    """Yield the code of a function or of a class's methods, and of functions of the same module that they use."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, type):
        for member in vars(value).values():
            is_wrapped = isinstance(member, classmethod | staticmethod)
            yield from _codes(member.__func__ if is_wrapped else member, seen)
    elif isinstance(value, FunctionType):
        yield value.__code__
        inner = [value.__code__]
        for code in inner:
            inner += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
            for name in code.co_names:
                yield from _codes(value.__globals__.get(name), seen)
        for cell in value.__closure__ or ():
            if cell != CellType():  # an empty cell has no contents to read
                yield from _codes(cell.cell_contents, seen)


def show_sources(sources: Mapping[str, Any]) -> None:
    """Make tracebacks show these sources for files that do not exist on this machine.

    Args:
        sources: the text of each file, by its name.
    """
    for file, text in sources.items():
        if isinstance(text, str) and not os.path.exists(file):
            linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
