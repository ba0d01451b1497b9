"""Reads parts of log files that may be huge and still growing: the last lines, or the bytes after an offset."""

from __future__ import annotations

import os
from pathlib import Path

BLOCK_BYTES = 64 * 1024
MAX_READ_BYTES = 4 * 1024 * 1024  # a reader holds at most this much, for lines of any length
LIMITED = f"these are the last {MAX_READ_BYTES >> 20} MiB; `replicas collect --out DIR` writes all"
EVERY_LINE = 1 << 40


def tail_text(path: Path, n_bytes: int) -> str:
    """Return the last bytes of a file as text, or an empty text if it cannot be read.

    Args:
        path: the file.
        n_bytes: the number of bytes.
    """
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - n_bytes))
            return file.read(n_bytes).decode(errors="replace")
    except OSError:
        return ""


def tail_lines(path: Path, n_lines: int) -> tuple[bytes, int]:
    """Return the last lines of a file, at most 4 MiB, and the offset of their end. Reads backwards from the end.

    Args:
        path: the file.
        n_lines: the number of lines.
    """
    try:
        with open(path, "rb") as file:
            start = end = file.seek(0, os.SEEK_END)
            newlines = 0
            while start > 0 and newlines <= n_lines and end - start < MAX_READ_BYTES:
                step = min(BLOCK_BYTES, start)
                start -= step
                file.seek(start)
                newlines += file.read(step).count(b"\n")
            file.seek(start)
            data = file.read(end - start)
    except FileNotFoundError:
        return b"", 0
    lines = data.split(b"\n")  # not splitlines(): the \r of a progress bar does not end a line
    unfinished = 0 if lines[-1] else 1
    return b"\n".join(lines[max(0, len(lines) - n_lines - unfinished) :]) if n_lines > 0 else b"", end


def read_from(path: Path, offset: int, max_bytes: int = MAX_READ_BYTES) -> tuple[bytes, int]:
    """Return the bytes of a growing file from an offset on, and the offset for the next call.

    Args:
        path: the file.
        offset: the position of the first byte.
        max_bytes: the largest number of bytes.
    """
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read(max_bytes)
    except FileNotFoundError:
        return b"", offset
    return data, offset + len(data)


def last_of(text: str, n_lines: int) -> str:
    """Return the last lines of a text.

    Args:
        text: the text.
        n_lines: the number of lines.
    """
    lines = text.split("\n")  # not splitlines(): the \r of a progress bar does not end a line
    unfinished = 0 if lines[-1] else 1
    return "\n".join(lines[max(0, len(lines) - n_lines - unfinished) :]) if n_lines > 0 else ""
