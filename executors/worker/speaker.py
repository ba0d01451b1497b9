"""The process of a command that reports for its replica: the first one that asks for `current_replica()`.

It writes heartbeats and measurements in the place of the worker, because only it knows them. The worker is silent while
this process lives.
"""

from __future__ import annotations

import atexit
import fcntl
import os
from collections.abc import Mapping

from executors.metrics.recorder import Recorder, segments_prefix
from executors.process import start_time
from executors.replica import PAGE, Replica
from executors.replica.shared_page import SharedPage
from executors.worker.heartbeat import Heartbeat
from executors.worker.watched import be_watched


def speak_for(replica: Replica, environ: Mapping[str, str] = os.environ) -> None:
    """Let this process report for a replica, unless another living process does, or its worker has ended.

    Args:
        replica: the replica of this process, from its environment.
        environ: the environment. Default: the environment of this process.

    Example:
        speak_for(current_replica())
    """
    try:
        file = os.open(environ[PAGE], os.O_RDWR | os.O_CLOEXEC)
    except (OSError, KeyError):  # the worker has ended, or its files are not visible here
        return
    # Held until `open` closes the file, so that one of two processes that ask at the same time gets the page.
    fcntl.lockf(file, fcntl.LOCK_EX)
    page = SharedPage.open(file, keeps=True)
    before = int(page.speaker)
    if is_speaking(page):
        page.close_file()
        return
    page.speaker = os.getpid()
    page.close_file()
    replica.page = page
    # Another process of this attempt may have written the first segments. They are write-once.
    prefix = segments_prefix(replica.run_id, replica.rank, replica.attempt)
    n_before = sum(1 for _ in replica.store.list(prefix)) if before else 0
    replica.recorder = Recorder(
        replica.store, replica.run_id, replica.rank, replica.attempt, began=page.began, n_segments=n_before
    )
    if page.reports is not None:
        replica.recorder.on_gpu = page.reports.note_gpu
    heartbeat = Heartbeat(replica, is_speaker=True, is_watched=be_watched(page))
    heartbeat.start()
    atexit.register(_stop, heartbeat, os.getpid())
    os.register_at_fork(after_in_child=page.detach)


def is_speaking(page: SharedPage) -> bool:
    """Return True if a living process of the command reports in the place of the worker.

    Args:
        page: the page of the replica.

    Example:
        is_speaking(page)
    """
    return page.speaker > 0 and start_time(int(page.speaker)) is not None


def _stop(heartbeat: Heartbeat, pid: int) -> None:
    if os.getpid() == pid:  # a forked helper runs the functions at exit, too
        heartbeat.stop()
