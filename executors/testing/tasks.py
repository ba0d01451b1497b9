"""The entrypoints that the replicas of `ExecutorContract` run. They are plain functions that need only Python."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any, NoReturn


def echo(**args: Any) -> dict[str, Any]:
    """Return the rank and the arguments.

    Args:
        args: any arguments.

    Example:
        echo(a=1)
    """
    return {"rank": int(os.environ["REPLICA_RANK"]), "args": args}


def variables(names: list[str]) -> dict[str, str | None]:
    """Return the values of environment variables. None for a variable that is not set.

    Args:
        names: the names of the variables.

    Example:
        variables(["REPLICA_RANK"])
    """
    return {name: os.environ.get(name) for name in names}


def large(n_bytes: int) -> str:
    """Return a text of a given size.

    Args:
        n_bytes: the size in bytes.

    Example:
        large(1 << 20)
    """
    return "x" * n_bytes


def fail(message: str) -> NoReturn:
    """Raise an error.

    Args:
        message: the message of the error.

    Raises:
        RuntimeError: always.

    Example:
        fail("no luck")
    """
    raise RuntimeError(f"rank {os.environ['REPLICA_RANK']}: {message}")


def fail_on(rank: int) -> str:
    """Raise an error on one rank, and return "fine" on the others.

    Args:
        rank: the rank that raises.

    Raises:
        RuntimeError: this is the rank.

    Example:
        fail_on(1)
    """
    if int(os.environ["REPLICA_RANK"]) == rank:
        raise RuntimeError(f"rank {rank} fails on purpose")
    return "fine"


def no_json() -> dict[str, Any]:
    """Return a value that is not JSON, because an object deep inside is not.

    Example:
        no_json()
    """
    return {"loss": [0.5, 0.25, 0.125, object()]}


def leave(code: int | None, how: str) -> None:
    """End the process before the entrypoint returns a result.

    Args:
        code: the exit code. None: no code is given.
        how: "os" for `os._exit`, or "sys" for `sys.exit`.

    Example:
        leave(3, "sys")
    """
    if how == "os":
        os._exit(code or 0)
    sys.exit(code)


def hang() -> NoReturn:
    """Print "hanging", and never end.

    Example:
        hang()
    """
    print("hanging", flush=True)
    while True:
        time.sleep(60)


def hang_deaf() -> NoReturn:
    """Ignore SIGTERM, print "hanging", and never end.

    Example:
        hang_deaf()
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hang()


def hang_on(rank: int) -> str:
    """Hang on one rank, and return "done" on the others.

    Args:
        rank: the rank that hangs.

    Example:
        hang_on(1)
    """
    if int(os.environ["REPLICA_RANK"]) == rank:
        hang()
    return "done"


def talk(n_lines: int) -> str:
    """Print numbered lines, alternately to stdout and stderr.

    Args:
        n_lines: the number of lines.

    Example:
        talk(100)
    """
    for number in range(n_lines):
        print(f"line {number}", file=(sys.stdout, sys.stderr)[number % 2], flush=True)
    return "said"


def not_callable_with_these(needed: int) -> int:
    """Return an argument. Tests call this with wrong arguments.

    Args:
        needed: the required argument.

    Example:
        not_callable_with_these(1)
    """
    return needed
