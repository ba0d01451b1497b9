"""Looks at a run without its executor: the records in its store, and its processes on this machine."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from executors import LocalProcessExecutor, ReplicaHandle, Run, current_replica, launch, open_store
from executors.attempt import Attempt
from executors.run.run import view_of
from executors.testing import eventually
from executors.testing.helpers import environment
from support import launchers
from support.processes import is_alive
from support.records import find_json

GONE_WITHIN_S = 10.0


def key_of(handle: ReplicaHandle, name: str) -> str:
    meta = handle.metadata
    return f"{meta['run_id']}/replicas/{handle.rank:04d}/{meta['attempt']}/{name}"


def record_of(handle: ReplicaHandle, name: str) -> Any:
    """Return a JSON record of a replica. None: it does not exist."""
    return find_json(open_store(handle.metadata["store_url"]), key_of(handle, name))


def pid_of(handle: ReplicaHandle) -> int:
    """Wait for a replica to start, and return its pid."""
    return int(eventually(lambda: record_of(handle, "started.json"), f"{handle} starts")["pid"])


def log_of(handle: ReplicaHandle, state_home: Path) -> Path:
    """Return the path of a local replica's output."""
    return state_home / "replicas" / key_of(handle, "output.log")


def folder_of(url: str) -> Path:
    return Path(unquote(urlsplit(url).path))


def lose_store() -> None:
    """Make the store of this replica's attempt fail every read and write. `without_store` repairs it."""
    me = current_replica()
    mine = folder_of(me.store.url) / me.key("")
    mine.rename(mine.with_name("away"))
    mine.write_text("")  # a file in place of the folder, so no object below it can be read or written


def without_store(executor: LocalProcessExecutor, folder: Path, state_home: Path, until: str, **how: Any) -> Run:
    """Return a run whose store refuses writes from the end of its entrypoint until its log has a line.

    Args:
        how: `gives_up_s`, and the `error` that the entrypoint raises. Without an error it returns.
    """

    def entrypoint(gives_up_s: float, error: str | None = None) -> str:
        from executors import patience

        lose_store()
        vars(patience).update(SCALE=gives_up_s / patience.OUTCOME.seconds, FIRST_WORD_S=0.0, AGAIN_S=math.inf)
        if error is not None:
            raise ValueError(error)
        return "the result"

    run = launch(executor, entrypoint, 1, args=how, rendezvous=folder, timeout=120)
    output = log_of(run.handles[0], state_home)
    eventually(lambda: output.exists() and until in output.read_text(), until)
    mine = folder_of(view_of(run).store.url) / Attempt(view_of(run).store, run.run_id, 0).key("")
    mine.unlink()
    mine.with_name("away").rename(mine)
    return run


@contextlib.contextmanager
def launcher(name: str, *args: str, start_new_session: bool = False) -> Iterator[subprocess.Popen[bytes]]:
    """Run a launcher of `launchers.py`."""
    command = [sys.executable, launchers.__file__, name, *args]
    with subprocess.Popen(command, env=environment(), start_new_session=start_new_session) as process:
        try:
            yield process
        finally:
            process.kill()


def text_said(path: Path) -> str:
    """Wait until a process has written a file, and return its text. The file is empty for a moment before that."""
    return eventually(lambda: path.exists() and path.read_text(), f"{path.name} is said") or ""


def said(path: Path) -> dict[str, Any]:
    return dict(json.loads(text_said(path)))


def pid_said(path: Path) -> int:
    """Wait until a process has written its pid into a file, and return the pid."""
    return int(text_said(path))


def handles_of(launched: dict[str, Any]) -> list[ReplicaHandle]:
    return [ReplicaHandle.from_json(text) for text in launched["handles"]]


def pids_said(folder: Path, pattern: str, n: int) -> list[int]:
    """Wait for n files with a pid each, and return the pids."""
    eventually(lambda: len(list(folder.glob(pattern))) == n, f"{n} processes have written their pids")
    return [pid_said(path) for path in folder.glob(pattern)]


def all_gone(pids: list[int]) -> None:
    eventually(lambda: not any(is_alive(pid) for pid in pids), "all processes are gone", within_s=GONE_WITHIN_S)
