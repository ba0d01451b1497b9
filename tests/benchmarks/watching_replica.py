"""The tasks of replicas in the benchmarks of watching. Also a script: `watching_replica.py SECONDS WATCHED`."""

from __future__ import annotations

import contextlib
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from executors import current_replica

LONGEST_IDLE_S = 40.0
"""The longest wait without any activity. The limit on idle ranks ends a wait of a minute."""


def hold_gil(folder: str) -> None:
    """Make progress, print the time, and hold the GIL."""
    from executors.worker.chaos import HANGS

    replica = current_replica()
    replica.report(step=1)
    Path(folder, str(replica.rank)).write_text(str(time.time()))
    HANGS["gil"]()


def step_for(seconds: float, evaluation_s: float = 120.0, steps_s: float = 30.0) -> None:
    """Make progress for a while, with evaluations in between that report nothing, and one more evaluation after the
    end.
    """
    until, replica = time.monotonic() + seconds, current_replica()
    step = n_evaluations = 0
    while time.monotonic() < until:
        pause_at = time.monotonic() + steps_s
        while time.monotonic() < min(pause_at, until):
            step += 1
            replica.report(step=step)
            time.sleep(0.05)
        n_evaluations += 1
        EVALUATIONS[(n_evaluations + replica.rank) % len(EVALUATIONS)](evaluation_s)


def compute(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(1000))


def compute_in_a_process(seconds: float) -> None:
    subprocess.run([sys.executable, __file__, "compute", str(seconds)], check=True)


def save(seconds: float) -> None:
    until = time.monotonic() + seconds
    with tempfile.TemporaryFile() as file:
        while time.monotonic() < until:
            file.seek(0)
            file.write(b"x" * (1 << 17))
            file.flush()
            time.sleep(1.0)


def wait_for_an_answer(seconds: float) -> None:
    """Wait for a server that answers late, as a service that evaluates a model."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        client.settimeout(min(seconds, LONGEST_IDLE_S))
        with contextlib.suppress(TimeoutError):
            client.recv(1)


def wait_for_a_loader(seconds: float) -> None:
    """Wait without a time limit for a thread that waits between two tries, as a data loader does."""
    items = queue.SimpleQueue[int]()

    def load() -> None:
        threading.Event().wait(min(seconds, LONGEST_IDLE_S))
        items.put(1)

    threading.Thread(target=load).start()
    items.get()


def wait_for_a_process(seconds: float) -> None:
    """Wait for a program that waits."""
    subprocess.run(["sleep", str(min(seconds, LONGEST_IDLE_S))], check=True)


EVALUATIONS = (compute, wait_for_a_loader, compute_in_a_process, wait_for_an_answer, save, wait_for_a_process)
"""Work without reports, which uses the processor in this process or in another one, or a disk, or which waits."""


def beat_for(seconds: float, is_watched: bool) -> float:
    """Return the processor time that this process uses while it waits."""
    if is_watched:
        from executors.replica.shared_page import SharedPage
        from executors.worker.watched import start_watch

        start_watch(SharedPage())
    began, until = time.process_time(), time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.25)
    return time.process_time() - began


if __name__ == "__main__":
    if sys.argv[1] == "compute":
        compute(float(sys.argv[2]))
    else:
        print(beat_for(float(sys.argv[1]), bool(int(sys.argv[2]))))
