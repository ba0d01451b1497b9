"""The supervisor of a container: its first process, the parent of the one rank that runs there.

What its rank cannot leave behind itself, it leaves: the outcome of a process that holds the GIL, is out of memory, or
was killed. It hears first that the container is to end, and passes that on in time. A sandbox with a kernel of its own
may show little of its processes and control groups: what cannot be seen is not judged.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import io
import os
import re
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

from executors.attempt import Attempt, Beat
from executors.attempt.outcome import describe_end
from executors.errors import StoreError
from executors.patience import BRIEF, CONTAINER, LAST_WORDS, START, Patience, retry
from executors.process import (
    be_killed_first,
    die_with_parent,
    fork,
    threads_lost_by_a_fork,
    usable_cores,
)
from executors.protocol import Reason
from executors.replica.shared_page import SharedPage
from executors.restarts.lease import LeaseWatch
from executors.settings.run_spec import RunSpec
from executors.store import store_at
from executors.store.record_names import HEARTBEAT, OUTCOME, run_folder_was_deleted
from executors.supervisor.memory_kills import of_this_container
from executors.supervisor.new_process import describe_threads, received, start_python
from executors.supervisor.processes import RunningAttempt, how_started, leave_supervisor, read_task_ahead
from executors.supervisor.supervisor import Supervisor
from executors.task.stored import StoredTask
from executors.worker.main import Assignment, main
from executors.worker.surroundings import await_gpu_release

BE_REPLICA = "from executors.supervisor.container import ContainerStarter; ContainerStarter.be_replica()"
NOTICES = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
TIMED_OUT = 124  # as the command `timeout` leaves
NOTICE_S = 25.0  # of the 30 s that services leave between the notice and the end
BEAT_S = 10.0
BEAT_LATE_S = 15.0  # a rank that has had no GIL, or no answer of the store, for so long does not beat itself
PRELOAD = ("torch", "torch._dynamo")
IMPORTS_TORCH = re.compile(r"^\s*(?:import|from)\s+(?:torch|diloco)\b", re.MULTILINE)


class ContainerSupervisor(Supervisor):
    """Runs the rank of a container to its end.

    Args:
        timeout_s: seconds from its first start on.
        term_grace_s: seconds between SIGTERM and SIGKILL.
        notice_s: seconds that are left when the container is told to end.
    """

    count_memory_kills = staticmethod(of_this_container)

    def __init__(
        self, spec: RunSpec, starter: ContainerStarter, *, timeout_s: float | None, term_grace_s: float, notice_s: float
    ) -> None:
        super().__init__(
            spec, starter, max_parallel=1, timeout_s=timeout_s, term_grace_s=term_grace_s, launcher_pidfd=None
        )
        self._wakeups.signals += NOTICES
        self._notice_s = notice_s
        self._notice: int | None = None
        self._beaten_at = 0.0
        self._lease = (
            None if spec.lease_s is None else LeaseWatch(self._store, spec.run_id, spec.lease_s, name=spec.lease_name)
        )
        self.exit_code = 1
        """That of the rank's last process, as a shell would say it."""

    @property
    def _patience(self) -> Patience:
        """How long to wait for the store with nothing else to do: the container is paid for, or is about to go."""
        if self._notice is not None:
            return BRIEF
        return CONTAINER if self._session.may_follow else LAST_WORDS

    def _hear(self, signals: bytes) -> None:
        """Pass on that the container is to end; from then on nothing is started: its machine goes."""
        super()._hear(signals)
        notice = next((number for number in signals if number in NOTICES), None)
        if notice is None or self._notice is not None:
            return
        self._notice = notice
        self._session.stop_deciding()
        self._waiting.clear()
        self._cancel_poller.soon()  # what was cancelled is not given the time of a notice
        end_at = time.monotonic() + self._notice_s
        for running in self._running.values():
            running.page.announce(end_at, notice)
            running.end_by(end_at - self._term_grace_s, "signal")

    def _look(self) -> None:
        super()._look()
        if self._lease is not None and self._lease.has_expired():
            self._end_abandoned(self._lease.why)
        if time.monotonic() - self._beaten_at >= BEAT_S:
            for running in self._running.values():
                if time.monotonic() - min(running.page.beat, running.page.beaten) > BEAT_LATE_S:
                    self._beat_for(running)

    def _beat_for(self, running: RunningAttempt) -> None:
        """Beat in place of a rank that holds its GIL or waits for the store, so that it looks busy and not lost."""
        self._beaten_at = time.monotonic()
        attempt = running.attempt
        if run_folder_was_deleted(attempt.store, attempt.run_id):
            return
        with contextlib.suppress(StoreError):
            beat = attempt.beat()
            beat = Beat(0.0, {}) if beat is None else beat
            attempt.store.put(attempt.key(HEARTBEAT), replace(beat, at=time.time()).to_bytes())

    def _give_up_process(self, running: RunningAttempt) -> None:
        """Leave the container, which its service takes back: the next process would be stuck as well."""
        self._session.stop_deciding()
        super()._give_up_process(running)

    def _conclude(self, running: RunningAttempt, exit_code: int) -> None:
        killed = TIMED_OUT if running.ending == "timeout" else 128 - exit_code
        self.exit_code = exit_code if exit_code >= 0 else killed
        super()._conclude(running, exit_code)

    def _tell(self, running: RunningAttempt, reason: Reason, error: str | None) -> None:
        """Write into the log of the container how its rank ended, as the rank would have."""
        if reason == "cancelled":
            error = describe_end("cancelled", running.asked.rank, self._spec.world_size)
        self._starter.write_log(running.asked, str(error))


class ContainerStarter:
    """The attempts of a container's rank, as its supervisor starts them."""

    def __init__(self, spec: RunSpec, *, term_grace_s: float, gpu: str | None) -> None:
        self._spec = spec
        self._term_grace_s = term_grace_s
        self._gpu = gpu
        self._torch_threads = usable_cores()
        self._task: StoredTask | None = None
        self._page: SharedPage | None = None
        self._last_pid: int | None = None
        self._imported: tuple[str, ...] = ()
        self._has_told = False

    def prepare(self, attempt: Attempt) -> None:
        """Read the task, and import torch if the user's code does: each attempt then has it from the start."""
        if self._task is None:
            self._task = read_task_ahead(self._spec)
        if self._task is not None and attempt.number == self._spec.attempt:
            self._imported = preload(self._task)

    def begin(self, attempt: Attempt) -> bool:
        """Begin an attempt: its process claims it. One that has ended is over, though its service starts it again."""
        with contextlib.suppress(StoreError):
            if attempt.number == self._spec.attempt and retry(functools.partial(attempt.has, OUTCOME), START):
                what = f"attempt {attempt.number} of rank {attempt.rank}"
                print(f"replicas: {what} has ended; it is not begun again", flush=True)
                return False
        return True

    def start(self, attempt: Attempt, page: SharedPage, close: Iterable[int]) -> int:
        """Start an attempt's process, by a fork unless that would lose threads; return its pid."""
        self._page = page
        parent = os.getpid()
        if threads := threads_lost_by_a_fork():
            if not self._has_told:
                self._has_told = True
                print(f"replicas: {describe_threads(threads, self._imported)}", file=sys.stderr, flush=True)
            pid = self._start_python(attempt, page)
        else:
            gc.freeze()  # the rank's garbage collector then skips the supervisor's objects, and so copies no pages
            pid = fork()
            if pid == 0:
                self._become_rank(attempt, page, parent, close)
        self._last_pid = pid
        return pid

    def _start_python(self, attempt: Attempt, page: SharedPage) -> int:
        """Start an attempt's process as a new Python; return its pid."""
        shared = page.share()
        message = {
            "spec": asdict(replace(self._spec, attempt=attempt.number)),
            "term_grace_s": self._term_grace_s,
            "gpu": self._gpu,
            "last_pid": self._last_pid,
            "how": how_started(self._spec, attempt),
            "parent": os.getpid(),
        }
        try:
            return start_python(BE_REPLICA, message, {"page": shared})
        finally:
            os.close(shared)

    def output_tail(self, attempt: Attempt) -> str:
        """Return the end of what an attempt printed."""
        return "" if self._page is None else self._page.tail()

    def note_output(self, attempt: Attempt, *, is_whole: bool = False) -> None:
        """Note nothing: the service knows when a line came."""

    def write_log(self, attempt: Attempt, words: str) -> None:
        """Add to what an attempt prints."""
        half_a_line = self.output_tail(attempt).rpartition("\n")[2]
        line = "\n" * bool(half_a_line) + f"{words.rstrip()}\n"
        if self._page is not None:
            self._page.write_tail(line.encode())
        with contextlib.suppress(OSError):  # nobody reads it any more
            os.write(1, line.encode())

    def give_up_process(self, attempt: Attempt) -> None:
        """Do nothing: nothing is started beside its process; see `ProcessStarter.give_up_process`."""

    def copy_log(self, asked: Attempt, claimed: Attempt) -> None:
        """Copy nothing: the service has the log."""

    def _become_rank(self, attempt: Attempt, page: SharedPage, parent: int, close: Iterable[int]) -> NoReturn:
        """Be a replica, in a forked process: nothing of the supervisor's is left but the watch on it."""
        try:
            leave_supervisor(close)
            self._settle(page)
            assignment = self._assignment(attempt, page, parent, how_started(self._spec, attempt))
        except BaseException:  # noqa: BLE001 - a forked child must never return into the supervisor
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        main(assignment)

    def _settle(self, page: SharedPage) -> None:
        """Make this process a replica's: it ends with its supervisor, and its output is kept."""
        with contextlib.suppress(OSError):
            die_with_parent()
        be_killed_first()
        gc.enable()
        keep_output(page)
        if self._gpu is not None and self._last_pid is not None:
            await_gpu_release(self._last_pid)

    def _assignment(self, attempt: Attempt, page: SharedPage, parent: int, how: str | None) -> Assignment:
        return Assignment(
            replace(self._spec, attempt=attempt.number),
            attempt.rank,
            task=self._task,
            supervisor_pid=parent,
            output_tail=page.tail,
            term_grace_s=self._term_grace_s,
            torch_threads=self._torch_threads,
            gpu=self._gpu,
            page=page,
            how=how,
        )

    @classmethod
    def be_replica(cls) -> NoReturn:
        """Be a replica, in a new Python that its supervisor has started."""
        try:
            message, shares = received()
            spec = RunSpec.from_json(message["spec"])
            ranks = cls(spec, term_grace_s=message["term_grace_s"], gpu=message["gpu"])
            ranks._last_pid = message["last_pid"]
            page = SharedPage.open(shares["page"])
            leave_supervisor([])
            ranks._settle(page)
            store = retry(lambda: store_at(spec.store_url), START)
            attempt = Attempt(store, spec.run_id, spec.ranks[0], spec.attempt)
            assignment = ranks._assignment(attempt, page, message["parent"], message["how"])
        except BaseException:  # noqa: BLE001 - as in a forked child
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        main(assignment)


def preload(task: StoredTask) -> tuple[str, ...]:
    """Import torch if the user's code does; return what was asked for."""
    names = PRELOAD if imports_torch(task, Path.cwd()) else ()
    for name in names:
        with contextlib.suppress(Exception):  # not there, or not for this machine: the user's import says so
            importlib.import_module(name)
    return names


def imports_torch(task: StoredTask, workspace: Path) -> bool:
    """Tell whether a file of the workspace, or of what a pickled callable was defined in, imports torch or diloco."""
    if any(IMPORTS_TORCH.search(str(text)) for text in task.record.sources.values()):
        return True
    for file in workspace.rglob("*.py"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if IMPORTS_TORCH.search(file.read_text(encoding="utf-8")):
                return True
    return False


def keep_output(page: SharedPage) -> None:
    """Keep the end of what this process prints; what others and C code write is in the service's log alone."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        writer = _KeptWriter(descriptor, page)
        # Written through: also half a line is kept at once, though the service gets it with the rest.
        stream = io.TextIOWrapper(
            writer, encoding="utf-8", errors="backslashreplace", line_buffering=True, write_through=True
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


class _KeptWriter(io.BufferedWriter):
    """A descriptor, the end of whose output is kept."""

    def __init__(self, descriptor: int, page: SharedPage) -> None:
        super().__init__(io.FileIO(descriptor, "w", closefd=False))
        self._page = page

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        finally:
            self._page.write_tail(data)
