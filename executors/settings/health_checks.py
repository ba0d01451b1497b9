"""Names the health checks that ship: the values of `--health-check` besides functions of the user."""

from __future__ import annotations

import re
from collections.abc import Mapping

from executors.errors import unknown_name

ALL = "all"
LIMITS_S: Mapping[str, float] = {
    "gpu": 90.0,  # a matrix product whose result is known, free memory, ECC errors and throttling; also loads torch
    "disk": 30.0,  # free space where logs and temporary files go
    "store": 60.0,  # write, read and delete 4 MiB
    "clock": 60.0,  # the difference to the clock of the store
}
"""The checks that ship, in the order in which they run, each with its time limit in seconds."""
NAME = re.compile(r"[A-Za-z0-9_-]*")


def shipped_checks(text: str) -> tuple[str, ...]:
    """Return the names of the checks that ship, in a text such as `gpu,disk`. Empty: the text names a function.

    Args:
        text: the value of `--health-check`.

    Raises:
        ValueError: a name is neither a check that ships nor a function. The message has the nearest valid name.

    Example:
        shipped_checks("all")  # ("gpu", "disk", "store", "clock")
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) == 1 and not NAME.fullmatch(parts[0]):
        return ()
    for part in parts:
        if part not in (*LIMITS_S, ALL):
            what = unknown_name("health check", part, (*LIMITS_S, ALL))
            raise ValueError(f"health_check: {what} A function has the form checks.py:gpu or pkg.mod:f.")
    return tuple(name for name in LIMITS_S if name in parts or ALL in parts)


def limit_of(text: str, default_s: float) -> float:
    """Return the time limit of a health check, in seconds: of all checks that a text names, together.

    Args:
        text: the value of `--health-check`.
        default_s: the limit of a function.

    Example:
        limit_of("gpu,disk", 60.0)  # 120.0
    """
    return sum(LIMITS_S[name] for name in shipped_checks(text)) or default_s
