"""`python -m executors.worker`: a replica that a command started, on a machine of its own.

It reads its assignment from the environment, and keeps the end of its output for the outcome as it passes by: there is
no log file to read it from.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from executors import replica as environment
from executors.attempt.outcome import OUTPUT_TAIL_BYTES
from executors.errors import ReplicasError
from executors.native import RunSpec
from executors.process import become_subreaper, usable_cores
from executors.worker.main import Assignment
from executors.worker.main import main as run_replica

CANNOT_START = 78  # EX_CONFIG of sysexits.h, as the bootstrap leaves


def main() -> NoReturn:
    """Run the replica that the environment describes, and leave its process."""
    # The end of what Python prints is kept; what other processes and C code write is in the service's log alone.
    tail = Tail(OUTPUT_TAIL_BYTES)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        getattr(sys, name).flush()
        writer = _KeptWriter(descriptor, tail)
        # Written through: also half a line is kept at once, though the service gets it with the rest.
        stream = io.TextIOWrapper(
            writer, encoding="utf-8", errors="backslashreplace", line_buffering=True, write_through=True
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    try:
        assignment = read_assignment(os.environ, tail)
    except (ReplicasError, ValueError) as error:
        print(f"replicas: {error}", file=sys.stderr)
        sys.exit(CANNOT_START)
    os.dup2(1, 2)  # a service that reads two pipes does not know which line came first
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # a question would wait for ever
    os.close(nothing)
    with contextlib.suppress(OSError):  # a sandbox that does not know it: what is orphaned is then not ended by us
        become_subreaper()
    run_replica(assignment)


def read_assignment(environ: Mapping[str, str], tail: Tail) -> Assignment:
    """Read a replica's assignment.

    Raises:
        ReplicasError: something is missing.
        ValueError: a number is not one.
    """
    me = environment.replica_from(environ)
    digest, timeout_s = environ.get(environment.TASK_DIGEST), environ.get(environment.TIMEOUT_S)
    if not digest:
        raise ReplicasError(
            f"{environment.TASK_DIGEST} is not set: without it a replica would run whatever it finds. Start replicas "
            "with `replicas launch` or `replicas resume`, which set it."
        )
    fail_fast = environ.get(environment.FAIL_FAST) == "1"
    return Assignment(
        RunSpec(me.run_id, me.rendezvous, digest, me.world_size, (me.rank,), me.attempt, fail_fast=fail_fast),
        me.rank,
        timeout_s=float(timeout_s) if timeout_s else None,
        torch_threads=usable_cores(),
        gpu=environ.get(environment.GPU) or None,
        output_tail=tail.text,
    )


class Tail:
    """The last bytes that were written through any of the files that share it."""

    def __init__(self, n_bytes: int) -> None:
        self._n_bytes = n_bytes
        self._kept = bytearray()  # changed by single calls, so threads need no lock

    def add(self, data: Any) -> None:
        self._kept += memoryview(data).cast("B")[-self._n_bytes :]
        if len(self._kept) > 2 * self._n_bytes:
            del self._kept[: -self._n_bytes]

    def text(self) -> str:
        return self._kept[-self._n_bytes :].decode(errors="replace")


class _KeptWriter(io.BufferedWriter):
    """A descriptor, the end of whose output is kept."""

    def __init__(self, descriptor: int, tail: Tail) -> None:
        super().__init__(io.FileIO(descriptor, "w", closefd=False))
        self._tail = tail

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        finally:
            self._tail.add(data)
