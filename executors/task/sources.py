"""The source of what travels by value, so that a traceback shows its lines where its files are not."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

MAX_CHARACTERS = 1 << 20


def sources_of(function: Callable[..., Any], pickled: bytes) -> dict[str, str]:
    """Return the text of each file and notebook cell that a pickled function, or what it needs, was defined in."""
    code = getattr(function, "__code__", None)
    # A notebook's cells are in this cache, under names of their own.
    candidates = {*linecache.cache, getattr(code, "co_filename", ""), getattr(sys.modules["__main__"], "__file__", "")}
    named = [file for file in candidates if file and file.encode(errors="surrogatepass") in pickled]
    found = {file: "".join(linecache.getlines(file)) for file in sorted(named)}
    return found if sum(map(len, found.values())) <= MAX_CHARACTERS else {}


def show_sources(sources: Mapping[str, Any]) -> None:
    """Have tracebacks show these texts, where there is no file of that name."""
    for file, text in sources.items():
        if isinstance(text, str) and not os.path.exists(file):
            linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
