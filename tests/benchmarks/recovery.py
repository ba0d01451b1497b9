"""Recovery with a large state (R9): SIGKILL until the next optimizer step, from a directory and from a bucket.

The bucket is behind a link of 1 Gbit/s. The goal is the time in which that link passes the bytes that the next attempt
reads, plus one second. For a directory, the time of the link is the time in which this machine reads the same number of
bytes from its page cache into new memory. Reading and proving run while other parts are loaded, so the seconds of
"loading" are those in which neither ran.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from .far import running_bucket
from .harness import Comparison, Options
from .launch import scratch_folder, state_of_its_own

sys.path.insert(0, str(Path(__file__).parents[1]))  # the servers of the tests

from servers.slow_link import slow_link

FILE = Path(__file__).with_name("recovery_replica.py")
SIZES = (100_000_000, 1_000_000_000, 4_000_000_000)
LINK_BYTES_PER_S = 125e6
PIECE_BYTES = 64 << 20
PATIENCE_S = 600.0
ROUNDS_BEFORE = 3
"""The kill comes after this number of rounds, so that snapshots and attached state of a round are in the store."""
PARTS = ("a new process", "the model", "reading", "proving", "loading", "the step")


def recovery(options: Options) -> list[Comparison]:
    """R9: one replica with 0.1, 1 and 4 GB of parameters and AdamW state."""
    sizes: tuple[int, ...] = (2_000_000,) if options.quick else SIZES
    if options.seconds:  # with less memory, `--seconds 1` leaves the larger states out
        sizes = tuple(size for size in sizes if size <= options.seconds * 1e9)
    found = []
    for size in sizes:
        for where in ("a directory", "a bucket behind 1 Gbit/s"):
            parts: dict[str, list[float]] = {}
            for _ in range(options.repetitions(3 if size < 4e9 else 1)):
                for part, seconds in _recover(size, where).items():
                    parts.setdefault(part, []).append(seconds)
            note = f"bytes read: {parts.pop('bytes')[0] / 1e9:.2f} GB"
            title = f"SIGKILL to the next optimizer step, {size / 1e9:g} GB of parameters and AdamW state, {where}"
            print(f"{title}: {parts}, {note}", file=sys.stderr, flush=True)
            goal = "goal: bytes / link + 1 s"
            found.append(Comparison("R9", title, "s", parts, goal, {"all": 1.0}, note=note))
    return found


def _recover(size: int, where: str) -> dict[str, float]:
    """Return the seconds of a restart and of its parts, and the bytes that the next attempt read."""
    from executors import launch

    with state_of_its_own(), scratch_folder("recovery-") as folder, _store(where, folder) as store:
        arguments = {"folder": folder, "state_bytes": size}
        run = launch("local", f"{FILE}:train", 1, args=arguments, rendezvous=store, restarts="9,oom=9")
        try:
            pid = _wait_for(Path(folder, "rounds"), lambda found: found["rounds"] >= ROUNDS_BEFORE)["pid"]
            killed = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            times = _wait_for(Path(folder, "1"), lambda found: True)
        finally:
            Path(folder, "stop").touch()
        run.wait(PATIENCE_S)
    if times["rounds"] < ROUNDS_BEFORE - 1:
        raise RuntimeError(f"The next attempt began at round {times['rounds']}.")
    opening_s = times["opened"] - times["built"]
    return {
        "all": times["stepped"] - killed,
        "a new process": times["entered"] - killed,
        "the model": times["built"] - times["entered"],
        "reading": times["reading"],
        "proving": times["proving"],
        "loading": opening_s - times["either"],
        "the step": times["stepped"] - times["opened"],
        "goal: bytes / link + 1 s": 1.0 + _link_s(times["bytes"], where),
        "bytes": times["bytes"],
    }


@contextmanager
def _store(where: str, folder: str) -> Iterator[str]:
    if where == "a directory":
        yield f"{folder}/store"
        return
    with running_bucket() as server, slow_link(server.endpoint_url, LINK_BYTES_PER_S) as url:
        yield replace(server, endpoint_url=url).url("recovery")


def _link_s(n_bytes: int, where: str) -> float:
    """Return the seconds in which the link passes some bytes."""
    if where != "a directory":
        return n_bytes / LINK_BYTES_PER_S
    with tempfile.TemporaryFile(buffering=0) as file:
        file.write(bytes(PIECE_BYTES))
        began = time.perf_counter()
        kept = []
        for _ in range(n_bytes // PIECE_BYTES + 1):
            kept.append(bytearray(PIECE_BYTES))  # new memory, as in a new process
            file.seek(0)
            file.readinto(kept[-1])
        return (time.perf_counter() - began) * n_bytes / (len(kept) * PIECE_BYTES)


def _wait_for(path: Path, is_there: Any) -> dict[str, Any]:
    """Wait until a file has fields that fulfill a condition, and return them."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if path.exists():
            found: dict[str, Any] = json.loads(path.read_text())
            if is_there(found):
                return found
        time.sleep(0.01)
    raise TimeoutError(f"{path.name} did not come within {PATIENCE_S} s.")
