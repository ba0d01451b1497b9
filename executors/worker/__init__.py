"""What runs inside a replica's process."""

from __future__ import annotations

from typing import Any


def call(run: str) -> Any:
    """Run one replica inside a third party's process; see `main.call`."""
    from executors.worker import main

    return main.call(run)
