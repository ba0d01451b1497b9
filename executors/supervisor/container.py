"""The supervisor of a container: its first process, and the parent of the one rank that runs there.

It records the outcome of a rank that cannot do so itself, because it holds the GIL, is out of memory, or was killed.
The service signals the end of the container to the supervisor, which passes the signal on to the rank in time. A
sandbox with its own kernel may hide facts about processes and control groups. Then the supervisor makes no judgment
that needs these facts.
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
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

from executors.attempt import Attempt, Beat
from executors.attempt.outcome import describe_end
from executors.errors import StoreError
from executors.patience import BRIEF, CONTAINER, LAST_WORDS, START, OutageTolerance, retry
from executors.process import (
    be_killed_first,
    die_with_parent,
    fork,
    threads_lost_by_a_fork,
    usable_cores,
)
from executors.protocol import Reason
from executors.replica.shared_page import TAIL_BYTES, SharedPage
from executors.restarts.lease import LeaseWatch
from executors.restarts.rules import SAME_PROCESS
from executors.settings.run_spec import RunSpec
from executors.store import store_at
from executors.store.record_names import HEARTBEAT, OUTCOME, run_folder_was_deleted
from executors.supervisor.members import MemberGroup, count_members
from executors.supervisor.memory_kills import container_memory_kills
from executors.supervisor.new_process import describe_threads, receive_message, start_python
from executors.supervisor.processes import (
    RunningAttempt,
    how_started,
    keep_page_of_command,
    kill_processes,
    leave_supervisor,
    read_task_ahead,
)
from executors.supervisor.supervisor import Supervisor
from executors.task.stored import StoredTask
from executors.worker.main import Assignment, main
from executors.worker.process_group import MemberPlace, write_whole_lines
from executors.worker.surroundings import await_gpu_release

BECOME_REPLICA = "from executors.supervisor.container import ContainerStarter; ContainerStarter.become_replica()"
NOTICES = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
TIMED_OUT = 124  # the exit code of the command `timeout`
NOTICE_S = 25.0  # services leave 30 s between the notice and the end of a container
BEAT_S = 10.0
# A rank without a beat for this long holds the GIL or waits for the store, so the supervisor beats for it.
BEAT_LATE_S = 15.0
NOTIFY_S = 12.0
"""The longest time by which notifications delay the end of a container, after the rank's outcome was recorded."""
PRELOAD = ("torch", "torch._dynamo")
IMPORTS_TORCH = re.compile(r"^\s*(?:import|from)\s+(?:torch|diloco)\b", re.MULTILINE)


class ContainerSupervisor(Supervisor):
    """Runs the rank of a container to its end.

    Args:
        spec: the run, with the one rank.
        starter: starts the processes of the rank.
        timeout_s: the time limit in seconds, from the first start of the rank. None: there is none.
        term_grace_s: seconds between SIGTERM and SIGKILL.
        notice_s: seconds from the notice of the service until the container ends.
    """

    count_memory_kills = staticmethod(container_memory_kills)
    waits_for_notices = False

    def __init__(
        self, spec: RunSpec, starter: ContainerStarter, *, timeout_s: float | None, term_grace_s: float, notice_s: float
    ) -> None:
        super().__init__(
            spec, starter, max_parallel=1, timeout_s=timeout_s, term_grace_s=term_grace_s, launcher_end=None
        )
        self._wakeups.signals += NOTICES
        self._notice_s = notice_s
        self._notice: int | None = None
        self._beaten_at = 0.0
        self._lease = (
            None if spec.lease_s is None else LeaseWatch(self._store, spec.run_id, spec.lease_s, name=spec.lease_name)
        )
        self.exit_code = 1
        """The exit code of the rank's last process, as a shell reports it."""

    @property
    def _tolerance(self) -> OutageTolerance:
        """The longest wait for a failing store when the supervisor has no other work.

        The wait is limited because the container costs money.
        """
        if self._notice is not None:
            return BRIEF
        return CONTAINER if self._session.may_follow else LAST_WORDS

    def _note_signals(self, signals: bytes) -> None:
        """Tell the ranks that the container will end. From then on no attempt starts on this machine."""
        super()._note_signals(signals)
        notice = next((number for number in signals if number in NOTICES), None)
        if notice is None or self._notice is not None:
            return
        self._notice = notice
        self._session.stop_deciding()
        self._waiting.clear()
        self._cancel_poller.look_soon()  # a service also sends the notice for a cancel, which gives a rank less time
        end_at = time.monotonic() + self._notice_s
        for running in self._running.values():
            running.announce(end_at, notice)
            running.end_by(end_at - self._term_grace_s, "signal")

    def run(self) -> None:
        """Supervise the rank to its end, and let the last notifications be sent before the container ends."""
        super().run()
        if self._notifier is not None:
            self._notifier.wait(NOTIFY_S)

    def _check_store(self) -> None:
        super()._check_store()
        if self._lease is not None and self._lease.has_expired():
            self._end_abandoned(self._lease.why)
        if time.monotonic() - self._beaten_at >= BEAT_S:
            for running in self._running.values():
                if time.monotonic() - min(running.page.beat, running.page.beaten) > BEAT_LATE_S:
                    self._beat_for(running)

    def _beat_for(self, running: RunningAttempt) -> None:
        """Write the heartbeat of a rank that holds the GIL or waits for the store.

        Otherwise the rank would count as lost.
        """
        self._beaten_at = time.monotonic()
        attempt = running.attempt
        if run_folder_was_deleted(attempt.store, attempt.run_id):
            return
        with contextlib.suppress(StoreError):
            beat = attempt.beat()
            beat = Beat(0.0, {}) if beat is None else beat
            attempt.store.put(attempt.key(HEARTBEAT), replace(beat, at=time.time()).to_bytes())

    def _give_up_process(self, running: RunningAttempt) -> None:
        """Give up a stuck process. Start no other process in this container, because it would be stuck as well."""
        self._session.stop_deciding()
        super()._give_up_process(running)

    def _conclude(self, running: RunningAttempt, exit_code: int) -> None:
        killed = TIMED_OUT if running.ending == "timeout" else 128 - exit_code
        self.exit_code = exit_code if exit_code >= 0 else killed
        super()._conclude(running, exit_code)

    def _print_reason(self, running: RunningAttempt, reason: Reason, error: str | None) -> None:
        """Print the reason of an end into the log of the container, because the rank could not print it."""
        if reason == "cancelled":
            error = describe_end("cancelled", running.asked.rank, self._spec.world_size)
        self._starter.write_log(running.asked, str(error))


class ContainerStarter:
    """Starts the attempts of a container's rank as processes of the container.

    Args:
        spec: the run, with the one rank.
        term_grace_s: seconds between SIGTERM and SIGKILL.
        gpu: the GPU that the launch requests. None: no GPU.
    """

    def __init__(self, spec: RunSpec, *, term_grace_s: float, gpu: str | None) -> None:
        self._spec = spec
        self._term_grace_s = term_grace_s
        self._gpu = gpu
        self._torch_threads = usable_cores()
        self._task: StoredTask | None = None
        self._pages: Sequence[SharedPage] = ()
        self._last_pids: Sequence[int] = ()
        self._imported: tuple[str, ...] = ()
        self._has_told = False

    def prepare(self, attempt: Attempt) -> None:
        """Read the task, and import torch if the user's code does, so that forked attempts start fast."""
        if self._task is None:
            self._task = read_task_ahead(self._spec)
        if self._task is not None and attempt.number == self._spec.attempt:
            self._imported = preload(self._task)

    def begin(self, attempt: Attempt) -> bool:
        """Return True unless the attempt has ended. A service may start the container of an ended attempt again."""
        with contextlib.suppress(StoreError):
            if attempt.number == self._spec.attempt and retry(functools.partial(attempt.has, OUTCOME), START):
                name = f"attempt {attempt.number} of rank {attempt.rank}"
                print(f"replicas: {name} has ended; it is not started again", flush=True)
                return False
        return True

    def count_members(self, attempt: Attempt) -> int:
        """Return the number of processes of the rank, from the setting `procs` and the GPUs of this container."""
        return count_members(self._spec.settings.procs, self._gpu, None)

    def start(
        self, attempt: Attempt, pages: Sequence[SharedPage], close: Iterable[int], group: MemberGroup | None = None
    ) -> list[int]:
        """Start an attempt's processes, and return their pids. Fork, unless a fork would lose threads."""
        self._pages, pids = pages, list[int]()
        try:
            keep_page_of_command(self._task, pages[0])
            for number, page in enumerate(pages):
                place = None if group is None else group.place_of(number, pages[0])
                pids.append(self._start_process(attempt, page, close, group, place))
        except OSError:
            kill_processes(pids)
            raise
        finally:
            for page in pages:
                page.close_file()
        self._last_pids = pids
        return pids

    def _start_process(
        self,
        attempt: Attempt,
        page: SharedPage,
        close: Iterable[int],
        group: MemberGroup | None,
        place: MemberPlace | None,
    ) -> int:
        parent = os.getpid()
        if threads := threads_lost_by_a_fork():
            if not self._has_told:
                self._has_told = True
                print(f"replicas: {describe_threads(threads, self._imported)}", file=sys.stderr, flush=True)
            return self._start_python(attempt, page, place)
        gc.freeze()  # the rank's garbage collector then skips the supervisor's objects, and so copies no pages
        pid = fork()
        if pid == 0:
            own = () if place is None else (place.end_file,)
            shared = () if group is None else group.descriptors
            self._become_rank(attempt, page, parent, [*close, *(each for each in shared if each not in own)], place)
        return pid

    def _start_python(self, attempt: Attempt, page: SharedPage, place: MemberPlace | None) -> int:
        """Start an attempt's process as a new Python interpreter; return its pid."""
        shared, of_members = page.share(), {} if place is None else place.shares()
        message = {
            "member": None if place is None else place.to_json(),
            "spec": asdict(replace(self._spec.without_notify(), attempt=attempt.number)),
            "term_grace_s": self._term_grace_s,
            "gpu": self._gpu,
            "last_pids": list(self._last_pids),
            "how": how_started(self._spec, attempt),
            "parent": os.getpid(),
        }
        try:
            return start_python(BECOME_REPLICA, message, {"page": shared, **of_members})
        finally:
            os.close(shared)
            if "leader" in of_members:
                os.close(of_members["leader"])

    def output_file(self, attempt: Attempt) -> None:
        """Return None, because the service has the log, and the pages have the end of the output."""

    def output_tail(self, attempt: Attempt) -> str:
        """Return the last output of an attempt, member after member."""
        return "".join(page.tail() for page in self._pages)[-TAIL_BYTES:]

    def note_output(self, attempt: Attempt, *, is_whole: bool = False) -> None:
        """Do nothing, because the service records the time of each line."""

    def write_log(self, attempt: Attempt, words: str) -> None:
        """Add lines to the output of an attempt."""
        half_a_line = self._pages[0].tail().rpartition("\n")[2] if self._pages else ""
        line = "\n" * bool(half_a_line) + f"{words.rstrip()}\n"
        if self._pages:
            self._pages[0].write_tail(line.encode())
        with contextlib.suppress(OSError):  # the service may have closed its end of the pipe
            os.write(1, line.encode())

    def give_up_process(self, attempt: Attempt) -> None:
        """Do nothing, because no other process belongs to the attempt; see `ProcessStarter.give_up_process`."""

    def copy_log(self, asked: Attempt, claimed: Attempt) -> None:
        """Do nothing, because the service keeps the log."""

    def _become_rank(
        self, attempt: Attempt, page: SharedPage, parent: int, close: Iterable[int], place: MemberPlace | None
    ) -> NoReturn:
        """Become a replica in a forked process, and leave all of the supervisor's state behind."""
        try:
            leave_supervisor(close)
            self._prepare_process(page, place)
            assignment = self._assignment(attempt, page, parent, how_started(self._spec, attempt), place)
        except BaseException:  # noqa: BLE001 - a forked child must never return into the supervisor
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        main(assignment)

    def _prepare_process(self, page: SharedPage, place: MemberPlace | None) -> None:
        """Prepare this process for a replica.

        It ends with its supervisor, and the end of its output is copied for the outcome.
        """
        with contextlib.suppress(OSError):
            die_with_parent()
        be_killed_first()
        gc.enable()
        keep_output_tail(page)
        if place is not None:
            write_whole_lines(place.number)
        for pid in self._last_pids if self._gpu is not None else ():
            await_gpu_release(pid)

    def _assignment(
        self, attempt: Attempt, page: SharedPage, parent: int, how: str | None, place: MemberPlace | None
    ) -> Assignment:
        return Assignment(
            replace(self._spec.without_notify(), attempt=attempt.number),
            attempt.rank,
            task=self._task,
            supervisor_pid=parent,
            output_tail=page.tail,
            term_grace_s=self._term_grace_s,
            torch_threads=max(1, self._torch_threads // (1 if place is None else place.of)),
            gpu=self._gpu,
            page=page,
            has_log_in_page=True,
            how=how,
            member=place,
            continue_as=functools.partial(self._continue, attempt, page, parent),
        )

    def _continue(self, attempt: Attempt, page: SharedPage, parent: int, number: int) -> Assignment:
        """Return the assignment of this process's next attempt."""
        return self._assignment(attempt.at(number), page, parent, SAME_PROCESS, None)

    def prepare_same_process(self, attempt: Attempt) -> None:
        """Do nothing, because the output of all attempts goes to the service."""

    @classmethod
    def become_replica(cls) -> NoReturn:
        """Become a replica in a new Python process that its supervisor has started."""
        try:
            message, shares = receive_message()
            spec = RunSpec.from_json(message["spec"])
            ranks = cls(spec, term_grace_s=message["term_grace_s"], gpu=message["gpu"])
            ranks._last_pids = message["last_pids"]
            page = SharedPage.open(shares["page"], keeps=True)
            place = MemberPlace.received(message["member"], shares)
            leave_supervisor([])
            ranks._prepare_process(page, place)
            store = retry(lambda: store_at(spec.store_url), START)
            attempt = Attempt(store, spec.run_id, spec.ranks[0], spec.attempt)
            assignment = ranks._assignment(attempt, page, message["parent"], message["how"], place)
        except BaseException:  # noqa: BLE001 - any error is printed and ends this process, as in a forked child
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        main(assignment)


def preload(task: StoredTask) -> tuple[str, ...]:
    """Import torch if the user's code does. Return the names of the modules, as in ("torch",).

    Args:
        task: the task of the run.
    """
    names = PRELOAD if imports_torch(task, Path.cwd()) else ()
    for name in names:
        # If torch is missing or does not fit this machine, the import in the user's code raises the error.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    return names


def imports_torch(task: StoredTask, workspace: Path) -> bool:
    """Return True if a file of the workspace, or a file that defines the pickled callable, imports torch or diloco.

    Args:
        task: the task of the run.
        workspace: the folder with the user's code.
    """
    if any(IMPORTS_TORCH.search(str(text)) for text in task.record.sources.values()):
        return True
    for file in workspace.rglob("*.py"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if IMPORTS_TORCH.search(file.read_text(encoding="utf-8")):
                return True
    return False


def keep_output_tail(page: SharedPage) -> None:
    """Copy the end of what Python code of this process prints into the page, for the outcome.

    The output of C code and of other processes is only in the service's log.

    Args:
        page: the page that the rank shares with its supervisor.
    """
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        writer = _TailWriter(descriptor, page)
        # With write_through, an unfinished line reaches the page at once. The service gets whole lines.
        stream = io.TextIOWrapper(
            writer, encoding="utf-8", errors="backslashreplace", line_buffering=True, write_through=True
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


class _TailWriter(io.BufferedWriter):
    """A writer for a descriptor that also copies the end of its output into a page."""

    def __init__(self, descriptor: int, page: SharedPage) -> None:
        super().__init__(io.FileIO(descriptor, "w", closefd=False))
        self._page = page

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        finally:
            self._page.write_tail(data)
