"""Finds where one piece of a log continues another, for logs that arrive late, are cut off, or show only the last
lines.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Sequence

BREAK = "=== here the log broke off; lines may be missing ==="
LAST_LINES = 3  # a single line may be empty or repeated, so it identifies no place


def completed(log: str, kept: str) -> str:
    """Return a log, completed with later lines from the replica's outcome.

    Services deliver lines some seconds late, and may cut off an answer. The log may also contain lines of other
    processes. A line that is printed repeatedly may appear twice.

    Args:
        log: the last lines, as the service returned them.
        kept: the end of the replica's output, from its outcome.
    """
    whole, newline, partial = log.rpartition("\n")
    lines = kept.removesuffix("\n").split("\n")
    numbers = [number for number, line in enumerate(lines) if _key(line)]
    place = place_after(list(map(_key, whole.split("\n"))), [_key(lines[number]) for number in numbers])
    missing = lines[numbers[place - 1] + 1 if place else 0 :]
    if not any(map(_key, missing)):
        return log
    if partial and not _key(missing[0]).startswith(_key(partial)):
        partial += "\n"
    else:
        partial = ""  # the begin of the first missing line
    return f"{whole}{newline}{partial}" + "\n".join(missing) + "\n"


def completed_bytes(log: bytes, kept: str) -> bytes:
    """Return a log as bytes, completed as by `completed`. The existing part of the log is not changed."""
    text = log.decode(errors="replace")
    if (whole := completed(text, kept) if kept else text) == text:
        return log
    return log[: log.rfind(b"\n") + 1] + whole[text.rfind("\n") + 1 :].encode()


def goes_on(seen: Sequence[str], lines: Sequence[str]) -> bool:
    """Return True if `lines` contain the last seen lines without a gap, so that no line between them is missing."""
    n = min(LAST_LINES, len(seen))
    text = "\n".join(["", *seen[len(seen) - n :], ""])
    return text in "\n".join(["", *lines, ""])


def come_late(seen: Sequence[str], lines: Sequence[str]) -> list[str] | None:
    """Return the `lines` that were not seen yet. A line that occurs more often in `lines` than it was seen is returned
    as well.

    None if `lines` begin after the seen lines.

    It is for logs in which some lines arrive late, before lines that have already been seen.
    """
    text, first = "\n".join(["", *seen, ""]), "\n".join(["", *lines[:LAST_LINES], ""])
    if (place := text.find(first)) < 0:
        return None
    left, late = Counter(seen[text[:place].count("\n") :]), []
    for line in lines:
        if left[line] <= 0:
            late.append(line)
        left[line] -= 1
    return late


def place_after(seen: Sequence[str], lines: Sequence[str]) -> int:
    """Return the number of `lines` up to and including the last seen line.

    Only seen lines that occur in `lines` count. The function searches the
    last of them as one block without a gap, and takes the longest block that it finds. If the block occurs several
    times, the first place counts.
    """
    known = set(lines)
    common = [line for line in seen if line in known]
    text = "\n".join(["", *lines, ""])

    def ending(n: int) -> str:
        return "\n".join(["", *common[len(common) - n :], ""])

    n = bisect(range(1, len(common) + 1), False, key=lambda n: ending(n) not in text)
    return text[: text.index(ending(n))].count("\n") + n if n else 0


def _key(line: str) -> str:
    """Return the part of a line that is reliable.

    A service may cut within a character, or at each `\\r` of a progress bar.
    """
    last = line.rstrip("\r").rpartition("\r")[2].strip()
    return last.encode("ascii", "ignore").decode() or last
