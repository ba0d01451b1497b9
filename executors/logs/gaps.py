"""Finds where one piece of a log continues in another, for logs that come late, are cut off, or seen in a window."""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Sequence

BREAK = "=== here the log broke off; lines may be missing ==="
LAST_LINES = 3  # one alone may be empty, or one that is printed over and over


def completed(log: str, kept: str) -> str:
    """Return a log with the lines that its replica kept and printed after the last one that both hold.

    Services deliver lines seconds late, and responses get cut off. The log may also hold lines of other processes. A
    line that is printed over and over may show twice.

    Args:
        log: the last lines, as the service gives them.
        kept: the end of what the replica printed, from its outcome.
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
        partial = ""  # the beginning of the first missing line
    return f"{whole}{newline}{partial}" + "\n".join(missing) + "\n"


def completed_bytes(log: bytes, kept: str) -> bytes:
    """Return the end of a log completed as `completed` does, and else as it was written."""
    text = log.decode(errors="replace")
    if (whole := completed(text, kept) if kept else text) == text:
        return log
    return log[: log.rfind(b"\n") + 1] + whole[text.rfind("\n") + 1 :].encode()


def goes_on(seen: Sequence[str], lines: Sequence[str]) -> bool:
    """Return whether the last lines that were seen lie together in `lines`, so that none is missing after them."""
    n = min(LAST_LINES, len(seen))
    text = "\n".join(["", *seen[len(seen) - n :], ""])
    return text in "\n".join(["", *lines, ""])


def come_late(seen: Sequence[str], lines: Sequence[str]) -> list[str] | None:
    """Return those of `lines` that were not seen, or less often; None if `lines` do not begin within what was seen.

    For lines some of which came late, before others that were seen already.
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
    """Return the number of `lines` up to the last ones that were seen.

    Take the seen lines that occur in `lines`. The longest run of the last of them that is contiguous in `lines` counts.
    If there are several such places, the first one counts.
    """
    known = set(lines)
    common = [line for line in seen if line in known]
    text = "\n".join(["", *lines, ""])

    def ending(n: int) -> str:
        return "\n".join(["", *common[len(common) - n :], ""])

    n = bisect(range(1, len(common) + 1), False, key=lambda n: ending(n) not in text)
    return text[: text.index(ending(n))].count("\n") + n if n else 0


def _key(line: str) -> str:
    """Return what of a line comes through: a service may cut within a character, or a progress bar at each `\\r`."""
    last = line.rstrip("\r").rpartition("\r")[2].strip()
    return last.encode("ascii", "ignore").decode() or last
