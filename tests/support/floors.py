"""The floors of `executors`: the order of its folders and files (rooms). A room imports only from lower floors."""

from __future__ import annotations

FLOORS: tuple[tuple[str, ...], ...] = (
    ("protocol", "process", "module_search", "masking"),
    ("errors",),
    ("patience",),
    ("store",),
    ("settings",),
    ("status",),
    ("logs", "attempt", "task"),
    ("backend",),
    ("metrics", "restarts", "registry"),
    ("view",),
    ("notices",),
    ("run", "replica"),
    ("worker", "shipping"),
    ("supervisor",),
    ("launcher", "backends", "dashboard"),
    ("cli", "testing", ""),
)
"""The rooms of `executors`, the lowest floor first. "" is `executors/__init__.py`."""
