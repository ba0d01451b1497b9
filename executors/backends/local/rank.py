"""Turns a new process into the supervisor of a local launch, and the processes that it starts into replicas.

Each is forked from the process before it. Work that is the same for all ranks is done before the fork, because a child
shares data that it only reads. A fork would lose the other threads of a process. So if the first process has other
threads, each is a newly started Python process instead (`LocalLaunch.preload`). On macOS no process may fork, so each
is always a newly started Python process there.
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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from executors.attempt import Attempt
from executors.attempt.outcome import OUTPUT_TAIL_BYTES
from executors.backends.local.gpu_slots import GpuSlot, take_slot
from executors.backends.local.preload import import_named
from executors.backends.local.request import LocalLaunch, adopt
from executors.errors import LaunchError, ReplicasError
from executors.logs import tail_text
from executors.logs.times import TimesWriter, times_of
from executors.notices.notifier import NotifierPid
from executors.process import (
    ADOPTS_ORPHANS,
    CAN_FORK,
    OPENS_FILES_OF_OTHERS,
    become_subreaper,
    die_with_parent,
    fork,
    is_alive,
    kill_descendants,
    mark_child,
    private_file,
    raise_file_limit,
    start_time,
    usable_cores,
)
from executors.protocol import ReplicaHandle
from executors.replica.shared_page import SharedPage
from executors.restarts.rules import SAME_PROCESS
from executors.store import store_at
from executors.store.file import FULL
from executors.supervisor.members import MemberGroup, count_members
from executors.supervisor.new_process import receive_message, start_python
from executors.supervisor.processes import (
    how_started,
    keep_page_of_command,
    kill_processes,
    leave_supervisor,
    read_task_ahead,
)
from executors.supervisor.supervisor import Supervisor
from executors.supervisor.supervisor_lock import hold, open_locks
from executors.task.stored import StoredTask
from executors.worker.log_copy import FINAL_BYTES, LogCopy
from executors.worker.main import Assignment, main
from executors.worker.process_group import MemberPlace, write_whole_lines
from executors.worker.surroundings import await_gpu_release

BECOME_REPLICA = "from executors.backends.local.rank import become_replica; become_replica()"
COPY_LOG = "from executors.backends.local.rank import copy_log; copy_log()"
LOG_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
COPY_LIMIT_S = 8  # the longest time for the copy of a log
# A killed supervisor's ranks have this time, besides their grace, before the guard kills them. A rank checks every
# second whether its supervisor lives.
GUARD_S, GUARD_LOOK_S = 3.0, 0.05


def become_supervisor(launch: LocalLaunch, launcher_end: int, reply: int) -> NoReturn:
    """Run the supervisor of a launch in this process, and end the process. The zygote has just started it.

    Args:
        launch: the launch.
        launcher_end: a descriptor that is readable when the launcher has ended.
        reply: the descriptor to which the handles, or an error, are written as a line of JSON.

    Example:
        become_supervisor(launch, launcher_end, reply)
    """
    code = 1
    try:
        os.setsid()
        notifier = NotifierPid()
        if ADOPTS_ORPHANS:
            become_subreaper()
        try:
            if ADOPTS_ORPHANS:  # elsewhere the zygote has started a guard
                _leave_guard([launcher_end, reply], launch.term_grace_s + GUARD_S, notifier)
                become_subreaper()
            if not OPENS_FILES_OF_OTHERS:
                raise_file_limit()  # for the stacks of each rank
            # Before the store is opened, which may need the launcher's credentials.
            adopt(
                launch.cwd,
                launch.sys_path,
                launch.user_folders,
                {**launch.environ, **launch.spec.env, **launch.spec.credentials},
            )
            _unbuffer_streams()
            store_at(launch.spec.store_url)  # opened and checked once, for the ranks that are forked from here
            ranks = LocalStarter(launch, [launcher_end, reply])
            is_attached = not launch.spec.settings.detach
            supervisor = Supervisor(
                launch.spec,
                ranks,
                max_parallel=launch.n_parallel,
                timeout_s=launch.timeout_s,
                term_grace_s=launch.term_grace_s,
                launcher_end=launcher_end if is_attached else None,
                launcher_lives=_look_at(launch) if is_attached else None,
                on_notifier=notifier.set,
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
            ranks.task = None  # frees memory; a rank that starts later reads the task again
        gc.freeze()
        # each request to a bucket leaves a cycle of objects; without collections, these would take gigabytes after
        # weeks
        gc.enable()
        supervisor.run()
        code = 0
    finally:
        os._exit(code)


def _look_at(launch: LocalLaunch) -> Callable[[], bool] | None:
    """Return a function that checks whether the launcher is alive. None: the descriptor of the launcher shows its end
    for certain.

    Without pidfds, a process that the launcher has forked keeps the launcher's lifeline open.
    """
    if CAN_FORK or launch.launcher_started is None:
        return None
    return functools.partial(is_alive, launch.launcher_pid, launch.launcher_started)


def supervise() -> NoReturn:
    """Run the supervisor of a launch in this newly started Python process.

    Example:
        python -c "from executors.backends.local.rank import supervise; supervise()"
    """
    message, shares = receive_message()
    become_supervisor(LocalLaunch.from_json(message["launch"]), shares["launcher"], shares["reply"])


def become_replica() -> NoReturn:
    """Run a replica in this newly started Python process.

    Example:
        python -c "from executors.backends.local.rank import be_replica; be_replica()"
    """
    try:
        message, shares = receive_message()
        launch = LocalLaunch.from_json(message["launch"])
        page = SharedPage.open(shares["page"], keeps=True)
        page.stacks_descriptor = shares.get("stacks", -1)
        place = MemberPlace.received(message["member"], shares)
        ranks = LocalStarter(launch, [], message["supervisor_pid"])
        leave_supervisor([])
        _unbuffer_streams()
        for name in launch.preload or ():  # before the attempt is claimed, so that imports do not count as its time
            import_named(name)
        attempt = launch.attempt(message["rank"]).at(message["attempt"])
        assignment = ranks.assignment(attempt, _Gpus(**message["gpus"]), page, None, place)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    main(assignment)


def copy_log() -> NoReturn:
    """Copy the end of a log into the run's store in this process, which is a new Python.

    Example:
        python -c "from executors.backends.local.rank import copy_log; copy_log()"
    """
    try:
        message, _ = receive_message()
        _copy_log(LocalLaunch.from_json(message["launch"]), message["rank"], *message["attempts"])
    finally:
        os._exit(0)


def _copy_log(launch: LocalLaunch, rank: int, asked: int, claimed: int) -> None:
    signal.set_wakeup_fd(-1)
    die_with_parent()
    signal.alarm(COPY_LIMIT_S)
    patient = launch.attempt(rank)
    LogCopy(patient.at(claimed), launch.log_file(patient.at(asked))).put(FINAL_BYTES)


@dataclass(frozen=True)
class _Gpus:
    """The GPUs of a replica's process."""

    devices: str | None = None
    """The value of `CUDA_VISIBLE_DEVICES`. None: the replica has no GPU."""
    wait_for: Sequence[int] = ()
    """The processes that used them before. Their memory on them may be freed only some time after their end."""


def _leave_guard(close: Iterable[int], wait_s: float, notifier: NotifierPid) -> None:
    """Continue in a child. This process becomes the guard, which kills the ranks of a killed supervisor.

    A rank that is stopped, or whose GIL is held, cannot see that its supervisor is gone.

    Args:
        close: the descriptors that the guard must close.
        wait_s: the seconds that ranks have to end by themselves.
        notifier: the process that sends notifications. It is not killed, because it ends by itself.
    """
    child = fork()
    if child == 0:
        return
    for descriptor in close:
        os.close(descriptor)
    os.waitpid(child, 0)
    deadline = time.monotonic() + wait_s
    with contextlib.suppress(ChildProcessError):  # no rank is left
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(GUARD_LOOK_S)
        kill_descendants(os.getpid(), spare=notifier.get())
    os._exit(0)


def _unbuffer_streams() -> None:
    """Make stdout and stderr unbuffered, as `python -u` does, so that the log of a killed rank has all its output."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        raw = _LogWriter(descriptor)
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


class _LogWriter(io.FileIO):
    """Writes to a log, and drops output while the disk is full. A `print` must not end hours of training.

    Args:
        descriptor: the file of the log.
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
    """Starts the ranks of a launch on this machine, for their supervisor.

    Args:
        launch: the run and the options of this machine.
        private: the supervisor's descriptors, which a forked rank must close.
        supervisor_pid: the pid of the supervisor. Default: this process.

    Example:
        starter = LocalStarter(launch, [launcher_end, reply])
        pid = starter.start(launch.attempt(0), page, [])
    """

    def __init__(self, launch: LocalLaunch, private: list[int], supervisor_pid: int | None = None) -> None:
        self._launch = launch
        self.private = private
        self._torch_threads = launch.torch_threads(usable_cores())
        self._pid = os.getpid() if supervisor_pid is None else supervisor_pid
        self._started = start_time(self._pid)
        self._lock: int | None = None
        self._begun: set[tuple[int, int]] = set()
        """The ranks and numbers of the attempts that this process has begun."""
        self._times: dict[int, TimesWriter] = {}
        """By rank, the writer of the times of its newest attempt's log."""
        self._last_on: dict[str, list[int]] = {}
        """The last processes on each slot of GPUs. Their memory may be freed only some time after their end."""
        self._slots: dict[int, GpuSlot] = {}
        """By rank, the GPUs of its newest attempt."""
        self._stuck_on: list[str] = []
        """The slots of GPUs on which a process cannot be killed."""

    @functools.cached_property
    def task(self) -> StoredTask | None:
        """The run's task, which is read once for all ranks. None if that failed, so that each rank reads it."""
        return read_task_ahead(self._launch.spec)

    def handle(self, attempt: Attempt) -> ReplicaHandle:
        """Return the handle of an attempt.

        Args:
            attempt: the attempt.
        """
        return self._launch.handle(attempt, self._pid, self._started)

    def prepare(self, attempt: Attempt) -> None:
        """Create the folder of an attempt, and open the file of the supervisors' locks.

        Args:
            attempt: the attempt.
        """
        if self._lock is None:
            folder = self._launch.log_folder
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = open_locks(folder)
            self.private.append(self._lock)
        os.makedirs(self._launch.log_file(attempt).parent, exist_ok=True, mode=0o700)

    def begin(self, attempt: Attempt) -> bool:
        """Begin an attempt. Return False if another process has begun it.

        Args:
            attempt: the attempt.
        """
        # The first attempt waits for the store, because the launch waits. The start of a later one is tried again.
        if attempt.number == self._launch.spec.attempt:
            attempt = self._launch.attempt(attempt.rank)
        handle = self.handle(attempt)
        if self._launch.begin(attempt, handle) != handle:
            return False
        if (attempt.rank, attempt.number) not in self._begun:
            self._begun.add((attempt.rank, attempt.number))
            self._delete_older_output(attempt)
        if self._lock is not None:
            hold(self._lock, attempt.rank, attempt.number, self._launch.log_folder)
        return True

    def count_members(self, attempt: Attempt) -> int:
        """Return the number of processes of an attempt, from the setting `procs` and the GPUs of a replica.

        Args:
            attempt: the attempt.
        """
        slots = self._launch.gpu_slots
        return count_members(self._launch.spec.settings.procs, self._launch.gpu, slots[0] if slots else None)

    def start(
        self, attempt: Attempt, pages: Sequence[SharedPage], close: Iterable[int], group: MemberGroup | None = None
    ) -> list[int]:
        """Start the processes of an attempt, and return their pids.

        Args:
            attempt: the attempt.
            pages: the pages that the processes share with their supervisor.
            close: more descriptors that a forked process must close.
            group: the port and the end files of several processes. None, the default: there is one process.
        """
        output = os.open(self._launch.log_file(attempt), LOG_FLAGS, 0o600)
        self._times[attempt.rank] = TimesWriter(self._launch.log_file(attempt))
        self.note_output(attempt)
        task, slot = self.task, self._take_gpus(attempt)  # the task is read before the first fork, so ranks share it
        gpus = _Gpus()
        if slot is not None:
            gpus = _Gpus(slot.devices, () if slot.is_shared else self._last_on.get(slot.devices, ()))
        pids = list[int]()
        try:
            if self._launch.preload is None:
                if gc.isenabled():  # it is disabled at the launch, which makes no garbage
                    gc.collect()  # before the freeze, because frozen garbage is never collected
                gc.freeze()  # so that the rank's collector does not write to shared pages, which would copy them
            keep_page_of_command(task, pages[0])
            for number, page in enumerate(pages):
                place = None if group is None else group.place_of(number, pages[0])
                if self._launch.preload is not None:
                    pids.append(self._start_python(attempt, gpus, page, place, output, slot.locks if slot else ()))
                    continue
                pid = fork()
                if pid == 0:
                    if number:
                        pages[0].close_file()
                    own = () if place is None else (place.end_file,)
                    shared = () if group is None else group.descriptors
                    others = [each for each in (*close, *self.private, *shared) if each not in own]
                    self._become_rank(attempt, gpus, page, place, task, output, others)
                pids.append(pid)
        except OSError:
            kill_processes(pids)
            raise
        finally:
            for descriptor in (output, *(slot.locks if slot else ())):
                os.close(descriptor)
            for page in pages:
                page.close_file()
        if slot is not None and not slot.is_shared:
            self._last_on[slot.devices] = pids
        return pids

    def _start_python(
        self,
        attempt: Attempt,
        gpus: _Gpus,
        page: SharedPage,
        place: MemberPlace | None,
        output: int,
        locks: Iterable[int],
    ) -> int:
        """Start a process of an attempt as a new Python interpreter, and return its pid."""
        message = {
            "member": None if place is None else place.to_json(),
            "launch": self._launch.for_a_rank().to_json(),
            "rank": attempt.rank,
            "attempt": attempt.number,
            "gpus": asdict(gpus),
            "supervisor_pid": self._pid,
        }
        shared, of_members = page.share(), {} if place is None else place.shares()
        try:
            shares = {"page": shared, **of_members}
            if not OPENS_FILES_OF_OTHERS:  # so both sides have the file of the stacks before the start
                shares["stacks"] = page.stacks_descriptor = private_file()
            return start_python(BECOME_REPLICA, message, shares, keeps=locks, output=output, marks=mark_child())
        finally:
            os.close(shared)
            if "leader" in of_members:
                os.close(of_members["leader"])

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
            self._stuck_on.remove(slot.devices)  # the slot is free, so the process has ended
        return slot

    def give_up_process(self, attempt: Attempt) -> None:
        """Note that the process of an attempt cannot be killed. If no GPU is free, its GPUs are shared first.

        Args:
            attempt: the attempt.
        """
        slot = self._slots.get(attempt.rank)
        if slot is not None and not slot.is_shared:
            self._stuck_on.append(slot.devices)

    def output_file(self, attempt: Attempt) -> Path:
        """Return the file with an attempt's output.

        Args:
            attempt: the attempt that was started.
        """
        return self._launch.log_file(attempt)

    def output_tail(self, attempt: Attempt) -> str:
        """Return the end of an attempt's log.

        Args:
            attempt: the attempt.
        """
        return tail_text(self._launch.log_file(attempt), OUTPUT_TAIL_BYTES)

    def note_output(self, attempt: Attempt, *, is_whole: bool = False) -> None:
        """Note the present length of a log in the file of its times.

        Args:
            attempt: the attempt that has the log.
            is_whole: True if the log is complete, so that the note is written at once. Default False.
        """
        self._times[attempt.rank].note(time.time(), at_once=is_whole)

    def write_log(self, attempt: Attempt, words: str) -> None:
        """Add a line to an attempt's log.

        Args:
            attempt: the attempt.
            words: the line.
        """
        with open(self._launch.log_file(attempt), "a") as log:
            log.write(f"{words.rstrip()}\n")

    def copy_log(self, asked: Attempt, claimed: Attempt) -> int | None:
        """Start a process that copies the end of a log into the run's store, and return its pid. None: without a copy.

        Args:
            asked: the attempt whose file is copied.
            claimed: the attempt that gets the copy.
        """
        if not self._launch.copies_logs:
            return None
        if not CAN_FORK:
            numbers = {"rank": asked.rank, "attempts": [asked.number, claimed.number]}
            return start_python(COPY_LOG, {"launch": self._launch.for_a_rank().to_json(), **numbers}, {})
        pid = fork()
        if pid == 0:
            try:
                _copy_log(self._launch, asked.rank, asked.number, claimed.number)
            finally:
                os._exit(0)
        return pid

    def _delete_older_output(self, attempt: Attempt) -> None:
        """Delete the log of an earlier run with this id, which another machine has deleted."""
        log = self._launch.log_file(attempt)
        for older in (log, times_of(log)):
            with contextlib.suppress(OSError):  # if the file cannot be deleted, opening the log raises the error
                older.unlink()

    def _become_rank(
        self,
        attempt: Attempt,
        gpus: _Gpus,
        page: SharedPage,
        place: MemberPlace | None,
        task: StoredTask | None,
        output: int,
        close: Iterable[int],
    ) -> NoReturn:
        """Run a replica in this process, which was just forked, and end the process."""
        try:
            leave_supervisor(close)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            gc.enable()
            assignment = self.assignment(attempt, gpus, page, task, place)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)  # a forked child must never return into the supervisor
        main(assignment)

    def assignment(
        self,
        attempt: Attempt,
        gpus: _Gpus,
        page: SharedPage,
        task: StoredTask | None,
        place: MemberPlace | None = None,
    ) -> Assignment:
        """Return the assignment of a replica's process, when its GPUs are free. It is called in that process.

        Args:
            attempt: the attempt that the process runs.
            gpus: the GPUs of the process.
            page: the page that the process shares with its supervisor.
            task: the run's task. None: the process reads the task itself.
            place: the number and the shared objects of a process of several. None, the default: it is the only one.
        """
        if place is not None:
            write_whole_lines(place.number)
        if gpus.devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus.devices
            for pid in gpus.wait_for:
                await_gpu_release(pid)
        return Assignment(
            replace(self._launch.spec.without_notify(), attempt=attempt.number),
            attempt.rank,
            task=task,
            supervisor_pid=self._pid,
            output_tail=functools.partial(self.output_tail, attempt),
            log_file=self._launch.log_file(attempt) if self._launch.copies_logs else None,
            term_grace_s=self._launch.term_grace_s,
            torch_threads=max(1, self._torch_threads // (1 if place is None else place.of)),
            gpu=None if gpus.devices is None else self._launch.gpu,
            page=page,
            how=how_started(self._launch.spec, attempt),
            member=place,
            continue_as=functools.partial(self._continue, attempt, replace(gpus, wait_for=()), page, task),
        )

    def _continue(
        self, attempt: Attempt, gpus: _Gpus, page: SharedPage, task: StoredTask | None, number: int
    ) -> Assignment:
        """Return the assignment of this process's next attempt, and write its output into that attempt's log."""
        following = attempt.at(number)
        output = os.open(self._launch.log_file(following), LOG_FLAGS, 0o600)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        os.close(output)
        return replace(self.assignment(following, gpus, page, task), how=SAME_PROCESS)

    def prepare_same_process(self, attempt: Attempt) -> None:
        """Create the log of an attempt that the process of the attempt before will run.

        Args:
            attempt: the attempt.
        """
        os.close(os.open(self._launch.log_file(attempt), LOG_FLAGS, 0o600))
        self._times[attempt.rank] = TimesWriter(self._launch.log_file(attempt))
        self.note_output(attempt)
