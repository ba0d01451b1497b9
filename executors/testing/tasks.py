"""The entrypoints of the replicas of `ExecutorContract`. Plain functions that need nothing but Python."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any, NoReturn


def echo(**args: Any) -> dict[str, Any]:
    """Return the rank and the arguments."""
    return {"rank": int(os.environ["REPLICA_RANK"]), "args": args}


def variables(names: list[str]) -> dict[str, str | None]:
    """Return environment variables."""
    return {name: os.environ.get(name) for name in names}


def large(n_bytes: int) -> str:
    """Return a large result."""
    return "x" * n_bytes


def fail(message: str) -> NoReturn:
    """Raise, as training code does."""
    raise RuntimeError(f"rank {os.environ['REPLICA_RANK']}: {message}")


def fail_on(rank: int) -> str:
    """Raise on one rank, return on the others."""
    if int(os.environ["REPLICA_RANK"]) == rank:
        raise RuntimeError(f"rank {rank} was to fail")
    return "fine"


def no_json() -> dict[str, Any]:
    """Return something that is not a JSON value, deep inside."""
    return {"loss": [0.5, 0.25, 0.125, object()]}


def leave(code: int | None, how: str) -> None:
    """End the process before there is a result."""
    if how == "os":
        os._exit(code or 0)
    sys.exit(code)


def hang() -> NoReturn:
    """Say so, and never end by itself."""
    print("hanging", flush=True)
    while True:
        time.sleep(60)


def hang_deaf() -> NoReturn:
    """Never end, and ignore SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hang()


def hang_on(rank: int) -> str:
    """Hang on one rank, return on the others."""
    if int(os.environ["REPLICA_RANK"]) == rank:
        hang()
    return "done"


def talk(n_lines: int) -> str:
    """Print numbered lines, by turns to stdout and stderr."""
    for number in range(n_lines):
        print(f"line {number}", file=(sys.stdout, sys.stderr)[number % 2], flush=True)
    return "said"


def not_callable_with_these(needed: int) -> int:
    """Take one argument."""
    return needed
