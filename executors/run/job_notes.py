"""Notes the ids of jobs that this machine started, so that they can be ended if the run's store is lost.

A job is noted as soon as its service has answered. The note survives a crash of the process and a power cut. For each
job, one line of JSON is appended. So two processes that start jobs of one run do not overwrite each other's notes, and
a line that was cut off affects no other line. Only this user can read the file, because options of a backend may
contain private names.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from executors.attempt.outcome import MAX_ATTEMPTS, MAX_RANK
from executors.errors import CorruptObjectError, StoreError
from executors.registry.run_index import folder_of_run, locate, remember, state_dir, sync
from executors.store.records import FAR_AHEAD, Record, checked, flag, integer, json_object, number, text
from executors.store.state_folder import state_path
from executors.store.url import check_run_id

JOBS = "jobs.jsonl"
MAX_BYTES = 64 << 20  # enough for about 100,000 jobs

_waiting: list[tuple[str, str, bytes]] = []
"""Lines that no thread has written yet, each with the run's id and store."""
_queueing, _writing = threading.Lock(), threading.Lock()
_has_warned: set[str] = set()


@dataclass(frozen=True, kw_only=True)
class NotedJob(Record):
    """This machine's note on a job that it started.

    Other users cannot write it, although they may write the run's records.
    """

    backend: str = checked(text(100))
    executor: str = checked(text(1000), "")
    """The class of the executor, as in "pkg.mod:Class". Empty if the backend's name is enough to find the class."""
    options: Mapping[str, Any] = checked(json_object, {})
    """The options of the executor that are JSON."""
    store_url: str = checked(text())
    launched_at: float = checked(number(0.0, FAR_AHEAD), 0.0)
    rank: int = checked(integer(0, MAX_RANK))
    attempt: int = checked(integer(0, MAX_ATTEMPTS))
    is_spare: bool = checked(flag, False)
    job: Mapping[str, Any] = checked(json_object)
    """The id of the job, as its service needs it."""


def note_jobs(run_id: str, jobs: Sequence[NotedJob]) -> None:
    """Write notes on jobs that were just started. After the call, the notes are on the disk.

    Many threads may call this at the same time. The first thread writes the lines of all waiting threads, which saves
    waits for the disk. If this machine cannot write notes, one warning is printed and the launch continues.

    Args:
        run_id: the run of the jobs.
        jobs: the jobs.

    Example:
        note_jobs("brave-otter-7f3a", [NotedJob(backend="hf", store_url=url, rank=0, attempt=0, job={"id": "1"})])
    """
    mine = [(run_id, job.store_url, (json.dumps(asdict(job)) + "\n").encode()) for job in jobs]
    with _queueing:
        _waiting.extend(mine)
    with _writing:  # the thread that held this lock may have written our lines, too
        with _queueing:
            lines, _waiting[:] = list(_waiting), []
        for place in dict.fromkeys((run, url) for run, url, _ in lines):
            try:
                _append(*place, b"".join(line for run, url, line in lines if (run, url) == place))
            except (OSError, StoreError) as error:
                if place[0] not in _has_warned:
                    _has_warned.add(place[0])
                    said = getattr(error, "strerror", None) or error
                    print(f"replicas: this machine cannot note the jobs of run {place[0]}: {said}", file=sys.stderr)


def noted_jobs(run_id: str, store_url: str | None = None) -> list[NotedJob]:
    """Return the noted jobs of a run, oldest first. Lines that cannot be read are left out.

    Args:
        run_id: the run.
        store_url: the store of the run. None: the store that this machine knows for the run id.

    Example:
        [job.job for job in noted_jobs("brave-otter-7f3a")]
    """
    found: list[NotedJob] = []
    with contextlib.suppress(OSError, StoreError):
        with open(_file(run_id), "rb") as file:
            lines = file.read(MAX_BYTES).splitlines()
        for line in filter(None, lines):
            # A line that was cut off, by a power cut or by another program.
            with contextlib.suppress(CorruptObjectError):
                found.append(NotedJob.parse(line, JOBS))
    return [job for job in found if store_url in (None, job.store_url)]


def _append(run_id: str, store_url: str, lines: bytes) -> None:
    if locate(run_id) is None:
        remember(run_id, store_url)  # from now on, the id alone finds the run on this machine
    elif folder_of_run(run_id, store_url) is None:
        return  # the folder of this id belongs to another run
    path = _file(run_id)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    is_new = not path.exists()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, b"\n" + lines)  # the newline ends an earlier line that was cut off
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if is_new:  # the name of a new file must be on the disk as well
        sync(path.parent)
        sync(state_dir())


def _file(run_id: str) -> Path:
    return state_path() / check_run_id(run_id) / JOBS
