"""The entrypoints of replicas in the tests of the local executor. They need only Python and `executors`."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any, NoReturn

from executors.process import usable_cores

SLEEP = "import time; time.sleep(600)"


def mark(path: Path, text: str = "") -> None:
    """Write a text for the test into a file, in one step."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}~")
    unfinished.write_text(text)
    unfinished.rename(path)


def hang(path: str | None = None) -> NoReturn:
    """Never end. Write the pid into the file `<path>.<rank>`."""
    if path is not None:
        mark(Path(f"{path}.{os.environ['REPLICA_RANK']}"), str(os.getpid()))
    while True:
        time.sleep(60)


def hang_with_helpers(folder: str, deaf: bool = False) -> NoReturn:
    """Start helpers of all kinds, write their pids into files, and hang."""
    where = Path(folder)
    start_helpers(where, deaf)
    hang(str(where / "rank"))


def return_with_helpers(folder: str) -> str:
    """Start helpers that outlive their replica, and return."""
    start_helpers(Path(folder), deaf=True)
    return "returned"


def start_helpers(folder: Path, deaf: bool) -> None:
    """Start a child, a child in its own session, an orphaned grandchild, and an orphan in its own session."""
    code = ("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " if deaf else "") + SLEEP
    child = subprocess.Popen([sys.executable, "-c", code])
    session = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    mark(folder / "child", str(child.pid))
    mark(folder / "session", str(session.pid))
    for name, own_session in (("orphan", False), ("daemon", True)):
        reader, writer = os.pipe()
        if os.fork() == 0:
            if own_session:
                os.setsid()
            orphan = subprocess.Popen([sys.executable, "-c", code])
            os.write(writer, str(orphan.pid).encode())
            os._exit(0)
        mark(folder / name, os.read(reader, 100).decode())
        os.wait()


LAUNCHER = """
import subprocess, sys
workers = [subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2], str(number)]) for number in range(4)]
for worker in workers:
    worker.wait()
"""
SAVES = """
import signal, sys, time
from pathlib import Path

folder, number = Path(sys.argv[1]), sys.argv[2]

def save(*_):
    time.sleep(0.3)
    (folder / ("saved-" + number)).touch()
    sys.exit()

signal.signal(signal.SIGTERM, save)
(folder / number).touch()
while True:
    time.sleep(60)
"""


def run_a_launcher(folder: str) -> None:
    """Run a launcher like torchrun with four processes. Each of them saves its work at SIGTERM."""
    subprocess.run([sys.executable, "-c", LAUNCHER, SAVES, folder], check=True)


def die_by(signal_number: int) -> NoReturn:
    """Print a line, and end by a signal."""
    print("last words", flush=True)
    os.kill(os.getpid(), signal_number)
    time.sleep(60)
    raise AssertionError("still here")


def segfault() -> None:
    ctypes.string_at(0)


def take_memory(group: str) -> None:
    """Take more memory than a control group of this replica's own allows."""
    Path(group, "cgroup.procs").write_text(str(os.getpid()))
    Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    taken = [bytearray(b"x" * (16 << 20)) for _ in range(64)]
    raise AssertionError(f"got {len(taken)} blocks")


def clean_up(path: str) -> NoReturn:
    """Hang. When `finally` runs, record that in a file."""
    try:
        hang(path)
    finally:
        mark(Path(f"{path}.cleaned"))


def clean_up_slowly(path: str) -> NoReturn:
    """Never finish cleaning up."""
    try:
        hang(path)
    finally:
        mark(Path(f"{path}.cleaning"))
        while True:
            time.sleep(60)


def swallow_sigterm(path: str) -> str:
    """Catch the exception that SIGTERM raises, and return a result in spite of it."""
    try:
        hang(path)
    except SystemExit:
        return "came through"


def swallow_in_callback(path: str, by_weakref: bool) -> NoReturn:
    """Let Python ignore the exception of the first SIGTERM, then hang. When `finally` runs, record that in a file."""

    def hang_here(*_: object) -> None:
        mark(Path(f"{path}.in callback"))
        while True:
            time.sleep(60)

    class Watched:
        def __del__(self) -> None:
            if not by_weakref:
                hang_here()

    watched = Watched()
    watcher = weakref.ref(watched, hang_here) if by_weakref else None
    try:
        del watched
        mark(Path(f"{path}.after callback"), str(watcher))
        hang()
    finally:
        mark(Path(f"{path}.cleaned"))


def surroundings(names: list[str]) -> dict[str, Any]:
    """Return the surroundings of a replica: its working directory, variables, arguments and streams."""
    return {
        "cwd": os.getcwd(),
        "path": sys.path,
        "variables": {name: os.environ.get(name) for name in names},
        "stdin": sys.stdin.read(),
        "umask": f"{os.umask(0):o}",
        "session": os.getsid(0) == os.getpid(),
        "signals": {
            name: repr(signal.getsignal(getattr(signal, name))) for name in ("SIGINT", "SIGCHLD", "SIGPIPE", "SIGUSR1")
        },
        "descriptors": {
            number: os.readlink(f"/proc/self/fd/{number}")
            for number in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{number}")
        },
        "main": getattr(sys.modules["__main__"], "__file__", None),
        "modules": sorted(sys.modules),
    }


def random_numbers() -> list[float]:
    """Draw a number from each random generator."""
    import random

    drawn = [random.random()]
    if "numpy" in sys.modules:
        drawn.append(float(sys.modules["numpy"].random.random()))
    if "torch" in sys.modules:
        drawn.append(float(sys.modules["torch"].rand(())))
    return drawn


def threads() -> dict[str, Any]:
    import torch

    return {"torch": torch.get_num_threads(), "omp": os.environ.get("OMP_NUM_THREADS")}


def cores() -> int:
    return usable_cores()


def matmul() -> float:
    """Use torch's threads, which hang forever in a child that was forked at the wrong time."""
    import torch

    a = torch.ones(600, 600)
    return float((a @ a).sum())


def rank() -> int:
    return int(os.environ["REPLICA_RANK"])


def meet(folder: str, n: int) -> int:
    """Wait until all ranks have called this function."""
    mark(Path(folder, str(rank())))
    while len([path for path in Path(folder).iterdir() if path.name.isdigit()]) < n:
        time.sleep(0.01)
    return rank()


def report_and_keep(path: str) -> str:
    """Report progress, and save an artifact."""
    from executors import current_replica

    me = current_replica()
    me.report(step=7, loss=0.25, tokens=1e6)
    me.save_artifact("model/weights.bin", path)
    return me.run_id


def step_on(path: str) -> None:
    """Report the steps of a training of a million steps, until a file exists."""
    from executors import current_replica

    me = current_replica()
    me.report(total_steps=1e6)
    step = 0
    while not Path(path).exists():
        step += 1
        me.report(step=step)
        time.sleep(0.01)


def fail_or_hang(rank: int) -> NoReturn:
    """Fail on one rank, hang on the others."""
    if int(os.environ["REPLICA_RANK"]) == rank:
        raise RuntimeError(f"rank {rank} was to fail")
    hang()


def fail_after_a_round() -> str:
    """Report a round on rank 0, fail on rank 1 when the store has the report, and wait on rank 0 for that failure."""
    from executors import current_replica
    from executors.testing import eventually
    from support.records import find_json

    me = current_replica()
    beat, outcome = (f"{me.run_id}/replicas/{name}" for name in ("0000/0/heartbeat.json", "0001/0/outcome.json"))
    if me.rank == 1:
        eventually(lambda: "round" in (find_json(me.store, beat) or {}))
        raise RuntimeError("rank 1 was to fail")
    me.report(round=1)
    eventually(lambda: find_json(me.store, outcome))
    return "went on"
