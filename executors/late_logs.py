"""A vendor's log that ends early: it comes seconds after what it tells of, or its answer broke off.

What a replica of ours printed last stands in its outcome, so that once there is one, the rest is known.
"""

from __future__ import annotations

from collections import Counter


def completed(log: str, kept: str, n_lines: int) -> str:
    """Return a log with the end that it lacks: the last lines that its replica kept, and that it does not hold yet.

    The log may hold lines that the replica did not keep, of other processes. Of a line printed over and over, some
    may stay missing; none is told twice.

    Args:
        log: the last `n_lines` lines, as the vendor gives them.
        kept: the end of what the replica printed.
    """
    whole, newline, partial = log.rpartition("\n")
    held = Counter(map(_key, whole.split("\n"))) if newline else Counter[str]()
    lines = kept.removesuffix("\n").split("\n")[-n_lines:]
    printed = Counter(map(_key, lines))
    n_missing = 0
    for key in map(_key, reversed(lines)):
        if key and printed[key] <= held[key]:
            break
        printed[key] -= 1
        n_missing += 1
    missing = lines[len(lines) - n_missing :]
    if not any(map(_key, missing)):
        return log
    if partial and not _key(missing[0]).startswith(_key(partial)):
        partial += "\n"
    else:
        partial = ""  # the first of the missing lines, cut short
    return f"{whole}{newline}{partial}" + "\n".join(missing) + "\n"


def _key(line: str) -> str:
    """Return what of a line comes through: a vendor may cut within a character, or a progress bar at each `\\r`."""
    last = line.rstrip("\r").rpartition("\r")[2].strip()
    return last.encode("ascii", "ignore").decode() or last
