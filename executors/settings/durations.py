"""Parses and formats durations such as `1h30m`."""

from __future__ import annotations

import re

DURATIONS = "90, 90s, 5m, 2h, 1h30m"
_NUMBER = r"(\d+(?:\.\d+)?)"
_DURATION = re.compile(f"(?:{_NUMBER}h)?(?:{_NUMBER}m)?(?:{_NUMBER}s?)?")


def parse_duration(text: str) -> float:
    """Return the seconds of `90`, `90s`, `5m`, `2h` or `1h30m`.

    Raises:
        ValueError: the text is not a duration.
    """
    found = _DURATION.fullmatch(str(text).strip())
    if found is None or not any(found.groups()):
        raise ValueError(f"{text!r} is not a duration. Give seconds, or hours, minutes and seconds: {DURATIONS}.")
    hours, minutes, seconds = (float(part or 0) for part in found.groups())
    return hours * 3600 + minutes * 60 + seconds


def name_duration(seconds: float) -> str:
    """Return a duration as text: `0.8 s`, `42 s`, `3:05`, `2:10:00`."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
