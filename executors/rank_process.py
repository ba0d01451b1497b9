"""Turning a process that the supervisor just forked into a replica.

Whatever is the same for all ranks is done before the fork: what a child only reads costs it nothing.
"""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
from collections.abc import Iterable
from typing import NoReturn

from executors.local_launch import LocalLaunch
from executors.process import become_subreaper
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


def become_rank(
    launch: LocalLaunch, rank: int, slot: int, *, output: int, supervisor_pid: int, close: Iterable[int]
) -> NoReturn:
    """Be a replica: nothing of the supervisor's is left but the watch on it.

    Args:
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
        if launch.gpu_slots is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = launch.gpu_slots[slot]
        assignment = _assignment(launch, rank, supervisor_pid)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)  # a forked child must never return into the supervisor
    main(assignment)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _assignment(launch: LocalLaunch, rank: int, supervisor_pid: int) -> Assignment:
    spec = launch.spec
    return Assignment(
        store_url=spec.store_url,
        run_id=spec.run_id,
        rank=rank,
        world_size=spec.world_size,
        attempt=spec.attempt,
        task_digest=spec.task_digest,
        supervisor_pid=supervisor_pid,
        log_file=launch.log_file(rank),
        term_grace_s=launch.term_grace_s,
        torch_threads=max(1, len(os.sched_getaffinity(0)) // launch.places),
        chaos=spec.chaos,
    )
