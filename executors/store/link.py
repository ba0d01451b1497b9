"""Measures the latency and the speed of a store by a few objects, which are deleted again.

Several processes measure at the same time, because replicas that share a disk share its speed. A line on stdin starts
each part of the measurement in a process. The process ends when its stdin is closed. So it also ends, and deletes its
objects, when the caller is interrupted or killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import IO, Any, NoReturn

from executors.errors import StoreError
from executors.module_search import new_python
from executors.store.parallel import at_store, in_parallel
from executors.store.protocol import Store
from executors.store.url import directory_of, is_near, open_store

N_LARGE, LARGE_BYTES = 3, 8 << 20
N_SMALL, SMALL_BYTES = 20, 100
LEAST_S = 1e-6  # a clock may show that a request took no time
MAX_PROCESSES = 16
CLEANUP_S = 5.0  # how long a process may take to delete its objects


def measure_link(url: str, n: int) -> dict[str, float]:
    """Measure how fast one of n replicas reads and writes in a store.

    A directory is measured by n processes at the same time. A bucket is measured by one process, because each replica
    has its own connection.

    Args:
        url: the url of the store.
        n: the number of replicas.

    Returns:
        `up` and `down` in bytes a second for each replica, and `latency_s`, the seconds that a small request takes.

    Raises:
        ValueError: the url is wrong, or names a store that other processes cannot see.
        StoreError: the store refuses a request, or loses an object that it has confirmed.

    Example:
        measure_link("s3://bucket/runs", 8)["down"]
    """
    if url.startswith("memory:"):
        raise ValueError(f"{url!r} is in the memory of one process, so its speed cannot be measured. Use a directory.")
    directory = directory_of(url)
    made = [] if directory is None else [path for path in (directory, *directory.parents) if not os.path.exists(path)]
    store = open_store(url)
    n_processes = min(n, MAX_PROCESSES) if is_near(store.url) else 1
    prefix = f"plan-{secrets.token_hex(8)}"
    try:
        found = _measure_together(store, prefix, n_processes)
    finally:
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()
    share = min(1.0, n_processes / n) if is_near(store.url) else 1.0
    median = {name: statistics.median(each[name] for each in found) for name in found[0]}
    return {**median, "up": share * median["up"], "down": share * median["down"]}


def _measure_together(store: Store, prefix: str, n_processes: int) -> list[dict[str, float]]:
    command = new_python(f"from {__name__} import main\nmain()", store.url, prefix)
    processes: list[subprocess.Popen[str]] = []
    try:
        for index in range(n_processes):
            processes.append(
                subprocess.Popen(
                    [*command, str(index)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                    start_new_session=True,  # Ctrl-C reaches the caller alone, which then closes stdin
                )
            )  # fmt: skip
        while True:
            lines = [_next_report(process, store.url) for process in processes]
            if lines[0] is not None:
                return lines  # type: ignore[return-value]
            for process in processes:
                _start_next_part(process)
    finally:
        _end(store, prefix, processes)


def _next_report(process: subprocess.Popen[str], url: str) -> dict[str, float] | None:
    """Return the measurements that a measuring process prints. None: it waits for the other processes."""
    assert process.stdout is not None
    line = process.stdout.readline()
    report: dict[str, Any] = json.loads(line) if line else {"error": f"The process that measured {url} has ended."}
    if "error" in report:
        raise StoreError(report["error"], url=url)
    return report or None


def _start_next_part(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the process has ended, and the next read of its stdout reports that
        process.stdin.write("\n")
        process.stdin.flush()


def _end(store: Store, prefix: str, processes: Sequence[subprocess.Popen[str]]) -> None:
    """End the processes, and delete the objects that they could not delete."""
    for process in processes:
        with contextlib.suppress(OSError):
            process.stdin.close()  # type: ignore[union-attr]
    deadline = time.monotonic() + CLEANUP_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()  # type: ignore[union-attr]
    if any(process.returncode for process in processes):
        at_store(store, store.delete, [key for index in range(len(processes)) for key in _keys(prefix, index)])


def _keys(prefix: str, index: int) -> list[str]:
    sizes = (("small", N_SMALL), ("large", N_LARGE))
    return [f"{prefix}/{index}-{size}-{number}" for size, n in sizes for number in range(n)]


def _measure(store: Store, keys: Sequence[str], take_turn: Callable[[], None]) -> dict[str, float]:
    """Measure a store by objects under these keys. `take_turn` waits for the other processes before each part."""

    def put_small(key: str) -> None:
        store.put_if_absent(key, bytes(SMALL_BYTES))

    small, large = keys[:N_SMALL], keys[N_SMALL:]
    bodies = {key: os.urandom(LARGE_BYTES) for key in large}  # random, so that no connection can compress them
    take_turn()
    answers_s = [_seconds(act, key) for key in small for act in (put_small, store.get)]
    latency_s = statistics.median(answers_s)
    size_bytes = N_LARGE * LARGE_BYTES
    take_turn()
    up_s = _seconds(in_parallel, lambda key: store.put_if_absent(key, bodies[key]), large)
    take_turn()
    # A directory store only maps the file into memory. `bytes` reads it.
    down_s = _seconds(in_parallel, lambda key: len(bytes(store.get(key))), large)
    return {
        "up": size_bytes / max(LEAST_S, up_s - latency_s),
        "down": size_bytes / max(LEAST_S, down_s - latency_s),
        "latency_s": latency_s,
    }


def _seconds(act: Callable[..., Any], *arguments: Any) -> float:
    began = time.perf_counter()
    act(*arguments)
    return time.perf_counter() - began


class _CallerEndedError(Exception):
    """Raised if the process that asked for the measurement has ended."""


def _main(url: str, prefix: str, index: str, stdin: IO[str], stdout: IO[str]) -> int:
    def report(record: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(record), file=stdout, flush=True)

    def take_turn() -> None:
        report({})
        if not stdin.readline():
            raise _CallerEndedError

    keys = _keys(prefix, int(index))
    try:
        store = open_store(url, is_known=True)
        try:
            measured = _measure(store, keys, take_turn)
        finally:
            at_store(store, store.delete, keys)
    except StoreError as error:
        report({"error": str(error)})
        return 1
    except _CallerEndedError:
        return 0
    report(measured)
    return 0


def main() -> NoReturn:
    """Run one measuring process: url, prefix and index are its arguments."""
    sys.exit(_main(sys.argv[1], sys.argv[2], sys.argv[3], sys.stdin, sys.stdout))
