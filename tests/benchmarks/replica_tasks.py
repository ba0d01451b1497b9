"""The tasks of replicas in the launch benchmarks, for every launcher. Uses the standard library only.

A replica writes its own CLOCK_MONOTONIC time into a named pipe, and waits until the benchmark releases it. So the
replicas of a launch never compete with replicas that already end.

It is also a script, for launchers that start scripts: `replica_tasks.py STAGE ARRIVALS RELEASE`.
"""

from __future__ import annotations

import os
import struct
import sys
import time

ARRIVAL = struct.Struct("<qq")  # CLOCK_MONOTONIC in ns, pid


def come_up(arrivals: str, release: str) -> None:
    """Only start, and do nothing."""
    _arrive_and_hold(arrivals, release)


def first_line(arrivals: str, release: str) -> None:
    """Import torch and print a line."""
    import torch

    print("up", torch.__name__, flush=True)
    _arrive_and_hold(arrivals, release)


def first_step(arrivals: str, release: str) -> None:
    """Make one step of an inner optimizer."""
    import torch

    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    print("stepped", flush=True)
    _arrive_and_hold(arrivals, release)


STAGES = {task.__name__: task for task in (come_up, first_line, first_step)}


def _arrive_and_hold(arrivals: str, release: str) -> None:
    now = time.monotonic_ns()
    hold = os.open(release, os.O_RDONLY)
    reached = os.open(arrivals, os.O_WRONLY)
    # the pipe stays open, because its end of file reports the end of this process
    os.write(reached, ARRIVAL.pack(now, os.getpid()))
    os.read(hold, 1)  # the read returns when the benchmark closes its side or ends


if __name__ == "__main__":
    STAGES[sys.argv[1]](*sys.argv[2:])
