"""From a new process to a replica: one becomes the supervisor of a launch, and those it starts become its ranks.

Each is forked from the process before it. Work that is the same for all ranks is done before the fork, because data
that a child only reads costs it nothing. Where the first process has other threads, which a fork would lose, each is a
new Python instead (`LocalLaunch.preload`), and goes the same way from there on.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn

from executors.attempt import Attempt
from executors.attempt.outcome import OUTPUT_TAIL_BYTES
from executors.backends.local.gpu_slots import GpuSlot, take_slot
from executors.backends.local.preload import import_named
from executors.backends.local.request import LocalLaunch, adopt
from executors.errors import LaunchError, ReplicasError
from executors.logs import tail_text
from executors.logs.times import TimesWriter, times_of
from executors.process import become_subreaper, die_with_parent, fork, kill_descendants, start_time, usable_cores
from executors.protocol import ReplicaHandle
from executors.replica.shared_page import SharedPage
from executors.store import store_at
from executors.store.file import FULL
from executors.supervisor.new_process import receive_message, start_python
from executors.supervisor.processes import how_started, leave_supervisor, read_task_ahead
from executors.supervisor.supervisor import Supervisor
from executors.supervisor.supervisor_lock import hold, open_locks
from executors.task.stored import StoredTask
from executors.worker.log_copy import FINAL_BYTES, LogCopy
from executors.worker.main import Assignment, main
from executors.worker.surroundings import await_gpu_release

BECOME_REPLICA = "from executors.backends.local.rank import become_replica; become_replica()"
COPY_LIMIT_S = 8  # a log that takes longer to copy is not waited for
GUARD_S, GUARD_LOOK_S = 3.0, 0.05  # beyond their grace: a rank looks every second whether its supervisor lives


def become_supervisor(launch: LocalLaunch, launcher_pidfd: int, reply: int) -> NoReturn:
    """Be the supervisor of a launch, in a process just forked by the zygote. Answers on `reply`, then watches."""
    code = 1
    try:
        os.setsid()
        become_subreaper()
        try:
            _leave_guard([launcher_pidfd, reply], launch.term_grace_s + GUARD_S)
            become_subreaper()
            # First: the store may need the launcher's credentials.
            adopt(
                launch.cwd,
                launch.sys_path,
                launch.user_folders,
                {**launch.environ, **launch.spec.env, **launch.spec.credentials},
            )
            _unbuffer_streams()
            store_at(launch.spec.store_url)  # checked once for all ranks; the supervisor's own must not wait
            ranks = LocalStarter(launch, [launcher_pidfd, reply])
            supervisor = Supervisor(
                launch.spec,
                ranks,
                max_parallel=launch.n_parallel,
                timeout_s=launch.timeout_s,
                term_grace_s=launch.term_grace_s,
                launcher_pidfd=None if launch.spec.settings.detach else launcher_pidfd,
            )
        except (OSError, ReplicasError, ValueError) as error:
            os.write(reply, (json.dumps({"error": str(error), "rank": None}) + "\n").encode())
            os._exit(code)
        try:
            answer: dict[str, Any] = {"handles": [ranks.handle(attempt).to_json() for attempt in supervisor.start()]}
        except LaunchError as error:
            answer = {"error": str(error), "rank": error.rank}
        with contextlib.suppress(BrokenPipeError), os.fdopen(reply, "w") as pipe:
            pipe.write(json.dumps(answer) + "\n")
        ranks.private.remove(reply)
        if launch.spec.supervised_restarts is None:
            ranks.task = None  # a rank that had to wait reads it again
        gc.freeze()
        gc.enable()  # each request to a bucket leaves a cycle of objects: gigabytes in weeks
        supervisor.run()
        code = 0
    finally:
        os._exit(code)


def supervise() -> NoReturn:
    """Be the supervisor of a launch, in a new Python."""
    message, shares = receive_message()
    become_supervisor(LocalLaunch.from_json(message["launch"]), shares["launcher"], shares["reply"])


def become_replica() -> NoReturn:
    """Be a replica, in a new Python that its supervisor has started."""
    try:
        message, shares = receive_message()
        launch = LocalLaunch.from_json(message["launch"])
        page = SharedPage.open(shares["page"])
        ranks = LocalStarter(launch, [], message["supervisor_pid"])
        leave_supervisor([])
        _unbuffer_streams()
        for name in launch.preload or ():  # before the attempt is claimed, as in a forked replica
            import_named(name)
        attempt = launch.attempt(message["rank"]).at(message["attempt"])
        assignment = ranks.assignment(attempt, _Gpus(**message["gpus"]), page, None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    main(assignment)


@dataclass(frozen=True)
class _Gpus:
    """The GPUs of a replica's process."""

    devices: str | None = None
    """The value of `CUDA_VISIBLE_DEVICES`; None if the replica has no GPU."""
    wait_for: int | None = None
    """The process that was on them before, which may hold their memory for a while after its end."""


def _leave_guard(close: Iterable[int], wait_s: float) -> None:
    """Continue in a child. Its parent kills processes that a killed supervisor leaves, or that do not end.

    A rank that is stopped, or whose GIL is held, does not see that its supervisor is gone.

    Args:
        close: descriptors that the parent does not keep.
    """
    child = fork()
    if child == 0:
        return
    for descriptor in close:
        os.close(descriptor)
    os.waitpid(child, 0)
    deadline = time.monotonic() + wait_s
    with contextlib.suppress(ChildProcessError):  # nothing is left
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(GUARD_LOOK_S)
        kill_descendants(os.getpid())
    os._exit(0)


def _unbuffer_streams() -> None:
    """Write at once, as under `python -u`: what a rank printed before a SIGKILL is in its log."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        raw = _LogWriter(descriptor)
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


class _LogWriter(io.FileIO):
    """A log that leaves out what a full disk does not take: a `print` must not end hours of training.

    Args:
        descriptor: the log's file.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._n_lost = 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        try:
            if self._n_lost:
                super().write(f"\nreplicas: {self._n_lost} bytes of output were lost: the disk was full\n".encode())
                self._n_lost = 0
            return super().write(data)
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._n_lost += size
            return size


class LocalStarter:
    """The ranks of a launch, as their supervisor starts them on this machine.

    Args:
        launch: the run, and how to run it here.
        private: the supervisor's descriptors, which its ranks must not keep.
        supervisor_pid: the supervisor. None: this process.
    """

    def __init__(self, launch: LocalLaunch, private: list[int], supervisor_pid: int | None = None) -> None:
        self._launch = launch
        self.private = private
        self._torch_threads = launch.torch_threads(usable_cores())
        self._pid = os.getpid() if supervisor_pid is None else supervisor_pid
        self._started = start_time(self._pid)
        self._lock: int | None = None
        self._begun: set[tuple[int, int]] = set()
        """By rank and number, the attempts that are this process's."""
        self._times: dict[int, TimesWriter] = {}
        """By rank, of its newest attempt here."""
        self._last_on: dict[str, int] = {}
        """The last process on each slot of GPUs, which may hold their memory for a while after its end."""
        self._slots: dict[int, GpuSlot] = {}
        """By rank, of its newest attempt here."""
        self._stuck_on: list[str] = []
        """Slots of GPUs that a process has which nothing ends."""

    @functools.cached_property
    def task(self) -> StoredTask | None:
        """The run's task, if it could be read ahead for all ranks."""
        return read_task_ahead(self._launch.spec)

    def handle(self, attempt: Attempt) -> ReplicaHandle:
        """Make the handle of an attempt."""
        return self._launch.handle(attempt, self._pid, self._started)

    def prepare(self, attempt: Attempt) -> None:
        """Make the folder of an attempt, and open the locks."""
        if self._lock is None:
            folder = self._launch.log_folder
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = open_locks(folder)
            self.private.append(self._lock)
        os.makedirs(self._launch.log_file(attempt).parent, exist_ok=True, mode=0o700)

    def begin(self, attempt: Attempt) -> bool:
        """Begin an attempt, or find that this process has; False if it is another process's."""
        if attempt.number == self._launch.spec.attempt:  # a later one is tried again; a launch waits for its store
            attempt = self._launch.attempt(attempt.rank)
        handle = self.handle(attempt)
        if self._launch.begin(attempt, handle) != handle:
            return False
        if (attempt.rank, attempt.number) not in self._begun:
            self._begun.add((attempt.rank, attempt.number))
            self._delete_older_output(attempt)
        if self._lock is not None:
            hold(self._lock, attempt.rank, attempt.number)
        return True

    def start(self, attempt: Attempt, page: SharedPage, close: Iterable[int]) -> int:
        """Start an attempt's process, by a fork unless the launch needs new Pythons; return its pid."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        output = os.open(self._launch.log_file(attempt), flags, 0o600)
        self._times[attempt.rank] = TimesWriter(self._launch.log_file(attempt))
        self.note_output(attempt)
        task, slot = self.task, self._take_gpus(attempt)  # before the first fork
        gpus = _Gpus()
        if slot is not None:
            gpus = _Gpus(slot.devices, None if slot.is_shared else self._last_on.get(slot.devices))
        try:
            if self._launch.preload is not None:
                pid = self._start_python(attempt, gpus, page, output, slot.locks if slot else ())
            else:
                if gc.isenabled():  # not at the launch, which makes no garbage
                    gc.collect()  # frozen objects are never collected
                gc.freeze()  # the rank's garbage collector then skips the supervisor's objects, and so copies no pages
                pid = fork()
                if pid == 0:
                    self._become_rank(attempt, gpus, page, task, output, [*close, *self.private])
        finally:
            for descriptor in (output, *(slot.locks if slot else ())):
                os.close(descriptor)
        if slot is not None and not slot.is_shared:
            self._last_on[slot.devices] = pid
        return pid

    def _start_python(self, attempt: Attempt, gpus: _Gpus, page: SharedPage, output: int, locks: Iterable[int]) -> int:
        """Start an attempt's process as a new Python; return its pid."""
        message = {
            "launch": self._launch.to_json(),
            "rank": attempt.rank,
            "attempt": attempt.number,
            "gpus": asdict(gpus),
            "supervisor_pid": self._pid,
        }
        shared = page.share()
        try:
            return start_python(BECOME_REPLICA, message, {"page": shared}, keeps=locks, output=output)
        finally:
            os.close(shared)

    def _take_gpus(self, attempt: Attempt) -> GpuSlot | None:
        if self._launch.gpu_slots is None:
            return None
        slot = take_slot(self._launch.log_folder, self._launch.gpu_slots, attempt.rank, self._stuck_on)
        self._slots[attempt.rank] = slot
        if slot.is_shared:
            words = f"every GPU has a replica of this run already: sharing {slot.devices} with another"
            if slot.devices in self._stuck_on:
                words = f"no GPU is free: sharing {slot.devices} with a process that cannot be killed"
            self.write_log(attempt, f"replicas: {words}.")
        elif slot.devices in self._stuck_on:
            self._stuck_on.remove(slot.devices)  # it is free: the process has ended
        return slot

    def give_up_process(self, attempt: Attempt) -> None:
        """Share the GPUs of a process that cannot be ended before the GPUs of a replica that trains."""
        slot = self._slots.get(attempt.rank)
        if slot is not None and not slot.is_shared:
            self._stuck_on.append(slot.devices)

    def output_tail(self, attempt: Attempt) -> str:
        """Return the end of an attempt's log."""
        return tail_text(self._launch.log_file(attempt), OUTPUT_TAIL_BYTES)

    def note_output(self, attempt: Attempt, *, is_whole: bool = False) -> None:
        """Note beside a log how far it has come."""
        self._times[attempt.rank].note(time.time(), at_once=is_whole)

    def write_log(self, attempt: Attempt, words: str) -> None:
        """Add to an attempt's log."""
        with open(self._launch.log_file(attempt), "a") as log:
            log.write(f"{words.rstrip()}\n")

    def copy_log(self, asked: Attempt, claimed: Attempt) -> int | None:
        """Copy the end of a log into the store of the run, where that is elsewhere; return the pid of who does it."""
        if not self._launch.copies_logs:
            return None
        pid = fork()
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                die_with_parent()
                signal.alarm(COPY_LIMIT_S)
                patient = self._launch.attempt(claimed.rank).at(claimed.number)
                LogCopy(patient, self._launch.log_file(asked)).put(FINAL_BYTES)
            finally:
                os._exit(0)
        return pid

    def _delete_older_output(self, attempt: Attempt) -> None:
        """Delete what a run of this id that was deleted elsewhere printed: a new attempt has printed nothing."""
        log = self._launch.log_file(attempt)
        for older in (log, times_of(log)):
            with contextlib.suppress(OSError):  # opening the log reports an obstacle
                older.unlink()

    def _become_rank(
        self,
        attempt: Attempt,
        gpus: _Gpus,
        page: SharedPage,
        task: StoredTask | None,
        output: int,
        close: Iterable[int],
    ) -> NoReturn:
        """Be a replica, in a forked process: nothing of the supervisor's is left but the watch on it."""
        try:
            leave_supervisor(close)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            gc.enable()
            assignment = self.assignment(attempt, gpus, page, task)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)  # a forked child must never return into the supervisor
        main(assignment)

    def assignment(self, attempt: Attempt, gpus: _Gpus, page: SharedPage, task: StoredTask | None) -> Assignment:
        """Return what a replica's process needs to know, once its GPUs are its own. Called in that process.

        Args:
            attempt: the attempt that it is asked for.
            gpus: its GPUs.
            page: the page that it shares with its supervisor.
            task: the run's task. None: the process reads the task.
        """
        if gpus.devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus.devices
            if gpus.wait_for is not None:
                await_gpu_release(gpus.wait_for)
        return Assignment(
            replace(self._launch.spec, attempt=attempt.number),
            attempt.rank,
            task=task,
            supervisor_pid=self._pid,
            output_tail=functools.partial(self.output_tail, attempt),
            log_file=self._launch.log_file(attempt) if self._launch.copies_logs else None,
            term_grace_s=self._launch.term_grace_s,
            torch_threads=self._torch_threads,
            gpu=None if gpus.devices is None else self._launch.gpu,
            page=page,
            how=how_started(self._launch.spec, attempt),
        )
