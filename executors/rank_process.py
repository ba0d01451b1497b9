"""Turning a process that the supervisor just forked into a replica.

Whatever is the same for all ranks is done before the fork: what a child only reads costs it nothing.
"""

from __future__ import annotations

import functools
import gc
import io
import os
import signal
import sys
from collections.abc import Iterable
from typing import NoReturn

from executors.errors import ReplicasError
from executors.local_launch import LocalLaunch
from executors.logs import tail_text
from executors.outcome import OUTPUT_TAIL_BYTES
from executors.process import become_subreaper
from executors.store import store_at
from executors.task import RunSpec, StoredTask, read_task
from executors.worker import Assignment, main


def adopt_surroundings(launch: LocalLaunch) -> None:
    """Take over the launcher's environment, path and directory: once, in the supervisor, for all ranks it forks.

    Raises:
        OSError: the launcher's directory is gone.
    """
    wanted = {**launch.environ, **launch.spec.env}
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    sys.path[:] = launch.sys_path
    os.chdir(launch.cwd)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        # Unbuffered, as under `python -u`: what a rank printed before a SIGKILL is in its log.
        raw = io.FileIO(descriptor, "w", closefd=False)
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def assign_all(launch: LocalLaunch) -> list[Assignment]:
    """Say what each rank is to do. Called by their supervisor, before it forks them."""
    spec = launch.spec
    task = _find_task(spec)
    torch_threads = launch.torch_threads(cores=len(os.sched_getaffinity(0)))
    return [
        Assignment(
            store_url=spec.store_url,
            run_id=spec.run_id,
            rank=rank,
            world_size=spec.world_size,
            attempt=spec.attempt,
            task_digest=spec.task_digest,
            task=task if place < launch.places else None,  # who has to wait looks again what stands
            supervisor_pid=os.getpid(),
            output_tail=functools.partial(tail_text, launch.log_file(rank), OUTPUT_TAIL_BYTES),
            term_grace_s=launch.term_grace_s,
            torch_threads=torch_threads,
            chaos=spec.chaos,
        )
        for place, rank in enumerate(spec.ranks)
    ]


def _find_task(spec: RunSpec) -> StoredTask | None:
    """Read a run's task once for all ranks. None when it cannot be read: each rank tries again, and says why."""
    try:
        task = read_task(store_at(spec.store_url), spec.run_id, spec.task_digest)
        task.prepare()
    except (ReplicasError, ValueError):
        return None
    return task


def become_rank(assignment: Assignment, *, gpus: str | None, output: int, close: Iterable[int]) -> NoReturn:
    """Be a replica: nothing of the supervisor's is left but the watch on it.

    Args:
        gpus: its `CUDA_VISIBLE_DEVICES`; None leaves it alone.
        output: the descriptor of the open log file.
        close: the supervisor's other descriptors.
    """
    try:
        os.setsid()
        become_subreaper()
        _reset_signals()
        for descriptor in close:
            os.close(descriptor)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        gc.enable()
        if gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)  # a forked child must never return into the supervisor
    main(assignment)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
