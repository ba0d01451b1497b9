"""How fast a store answers, sends and receives, measured by a few objects that are deleted again.

Processes of their own measure, in step with each other, because replicas that share a disk share its speed. A line on
stdin tells each to begin with its next part, and it ends when stdin is closed: nothing is left behind when the process
that asked is interrupted, or killed.
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
LEAST_S = 1e-6  # a clock may not see that anything took time
MAX_PROCESSES = 16
PATIENCE_S = 5.0  # for a process that is to delete what it wrote


def measure_link(url: str, n: int) -> dict[str, float]:
    """Measure the way to a store: by n processes at once where it is near, else by one.

    Returns: the share of one of n replicas, as bytes a second `up` and `down`, and the `latency_s` of a small request.

    Raises:
        ValueError: the url is wrong, or of a store that other processes do not see.
        StoreError: the store refuses a request, or does not keep what it confirmed.
    """
    if url.startswith("memory:"):
        raise ValueError(f"{url!r} is in one process's memory: there is no way to it that could be measured.")
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
                    start_new_session=True,  # Ctrl-C is for the one who asked
                )
            )  # fmt: skip
        while True:
            lines = [_heard_of(process, store.url) for process in processes]
            if lines[0] is not None:
                return lines  # type: ignore[return-value]
            for process in processes:
                _tell(process)
    finally:
        _end(store, prefix, processes)


def _heard_of(process: subprocess.Popen[str], url: str) -> dict[str, float] | None:
    """Return the measurements of a process. None if it waits for the others."""
    assert process.stdout is not None
    line = process.stdout.readline()
    said: dict[str, Any] = json.loads(line) if line else {"error": f"the process that measured {url} has ended."}
    if "error" in said:
        raise StoreError(said["error"], url=url)
    return said or None


def _tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended, as its stdout shows
        process.stdin.write("\n")
        process.stdin.flush()


def _end(store: Store, prefix: str, processes: Sequence[subprocess.Popen[str]]) -> None:
    """End the processes, and delete what they could not."""
    for process in processes:
        with contextlib.suppress(OSError):
            process.stdin.close()  # type: ignore[union-attr]
    deadline = time.monotonic() + PATIENCE_S
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
    """Measure a store by objects under these keys; `take_turn` waits for the others before each part."""

    def put_small(key: str) -> None:
        store.put_if_absent(key, bytes(SMALL_BYTES))

    small, large = keys[:N_SMALL], keys[N_SMALL:]
    bodies = {key: os.urandom(LARGE_BYTES) for key in large}  # nothing on the way can pack it
    take_turn()
    answers_s = [_seconds(act, key) for key in small for act in (put_small, store.get)]
    latency_s = statistics.median(answers_s)
    size_bytes = N_LARGE * LARGE_BYTES
    take_turn()
    up_s = _seconds(in_parallel, lambda key: store.put_if_absent(key, bodies[key]), large)
    take_turn()
    # Where a store maps a file, only looking at its bytes reads them.
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


class _LeftError(Exception):
    """The process that asked has gone."""


def _main(url: str, prefix: str, index: str, stdin: IO[str], stdout: IO[str]) -> int:
    def say(what: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(what), file=stdout, flush=True)

    def take_turn() -> None:
        say({})
        if not stdin.readline():
            raise _LeftError

    keys = _keys(prefix, int(index))
    try:
        store = open_store(url, is_known=True)
        try:
            said = _measure(store, keys, take_turn)
        finally:
            at_store(store, store.delete, keys)
    except StoreError as error:
        say({"error": str(error)})
        return 1
    except _LeftError:
        return 0
    say(said)
    return 0


def main() -> NoReturn:
    """Measure with the arguments of this process, and end the process."""
    sys.exit(_main(sys.argv[1], sys.argv[2], sys.argv[3], sys.stdin, sys.stdout))
