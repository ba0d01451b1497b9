"""Formats texts and numbers for a terminal, a notebook or a page, and removes what a terminal would execute."""

from __future__ import annotations

import re
import time

# First colors and cursor movements, then titles and links.
ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?")
COLORS = re.compile(r"(\x1b\[[0-9;:]*m)")
NO_COLOR = "\x1b[0m"
MAX_CHARACTERS = 300
SIZES = ("kB", "MB", "GB", "TB")


def inert(text: str) -> str:
    """Return the text without control sequences of terminals, which any record may contain. Line ends are kept."""
    return "\n".join(_printable(line) for line in text.split("\n"))


def colored(text: str) -> str:
    """Return the text without control sequences of terminals, except colors and tabs. Colors are reset at the end."""
    kept = "\n".join("".join(map(_colored, COLORS.split(line.rstrip("\r")))) for line in text.split("\n"))
    return f"{kept}{NO_COLOR}" if COLORS.search(kept) else kept


def _colored(part: str) -> str:
    return part if COLORS.fullmatch(part) else "\t".join(map(_printable, part.split("\t")))


def _printable(line: str) -> str:
    return "".join(char if char.isprintable() else " " for char in ESCAPES.sub("", line))


def one_line(text: str, max_characters: int = MAX_CHARACTERS) -> str:
    """Return the text as one line without control characters. A long text is cut."""
    return _cut(_printable(text[: 4 * max_characters]).strip(), max_characters)


def _cut(text: str, max_characters: int) -> str:
    return text if len(text) <= max_characters else f"{text[: max_characters - 1]}…"


def name_age(seconds: float) -> str:
    """Return an age, rounded down to one unit: `12 s`, `5 min`, `3 h`, `2 d`."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"


def last_lines(text: str, max_lines: int, max_characters: int = MAX_CHARACTERS) -> str:
    """Return the last lines of a text without control sequences.

    Long lines are cut, and overwritten progress bars are left out.
    """
    # Usually enough characters for `max_lines` whole lines.
    text = text[-max_lines * 40 * max_characters :].rstrip("\n")
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    kept = [_cut(_printable(line[: 4 * max_characters]).rstrip(), max_characters) for line in lines[-max_lines:]]
    more = len(lines) - len(kept)
    return "\n".join([f"… {more} lines before", *kept] if more else kept)


def name_moment(at: float) -> str:
    """Return a time as text: `2026-11-22 09:51:13 UTC`."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def name_size(size_bytes: float) -> str:
    """Return a number of bytes as text, in steps of 1000: `137 B`, `68.7 MB`."""
    unit = "B"
    for larger in SIZES:
        if size_bytes < 999.5:
            break
        size_bytes, unit = size_bytes / 1000, larger
    return f"{size_bytes:.3g} {unit}"


def name_number(value: float) -> str:
    """Return a number with four significant digits. Large numbers have separators: `0.01235`, `1,234,567`."""
    if value == value and 1000 <= abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def name_share(share: float) -> str:
    """Return a share as a percentage: `2.8 %`, `57 %`, `99.7 %`."""
    percent = 100 * share
    if 0 < percent < 0.1 or 99.9 < percent < 100:
        return "< 0.1 %" if percent < 1 else "> 99.9 %"
    return f"{percent:.0f} %" if 10 <= percent <= 99 or percent in (0, 100) else f"{percent:.1f} %"
