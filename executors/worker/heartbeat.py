"""A background thread of the replica: it writes heartbeats, and ends the replica if the supervisor has died.

The thread is not a `threading.Thread`, because `start()` waits until the thread runs, which takes long with 256 new
processes. The thread must not import `threading`, because that module takes the thread that imports it first for the
main thread.
"""

from __future__ import annotations

import _thread
import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Iterator

from executors.attempt import Beat
from executors.errors import StoreError
from executors.process import kill_descendants, start_time
from executors.protocol import WarningCount
from executors.replica import Replica
from executors.status import STEPS_PER_S
from executors.store.record_names import HEARTBEAT, run_folder_was_deleted
from executors.worker.log_copy import LIVE_BYTES, LogCopy
from executors.worker.pace import Pace
from executors.worker.sigterm import sigterm_arrived

COPY_S = 60.0  # seconds between two copies of the end of the output
LOOK_S = 1.0  # seconds between two checks for new reports, which is also the shortest time between two heartbeats
BEAT_S = 10.0  # seconds between two heartbeats without a new report


class Heartbeat:
    """Writes `heartbeat.json` while its replica runs: at once after a report, and every 10 s otherwise.

    Args:
        replica: the replica.
        supervisor_pid: the supervisor. If the supervisor ends, this thread ends the replica. None, the default: there
            is no supervisor.
        grace_s: seconds between SIGTERM and SIGKILL if this thread ends the replica. Default 5.
        log: the output whose end is copied every minute. None, the default: nothing is copied.
        is_silent: True writes nothing, as in all members of a replica except member 0. Default False.
        is_speaker: True in a process of a command that reports in the place of its worker. Default False.
        is_watched: True if the supervisor watches the threads of this process. Default True.
    """

    def __init__(
        self,
        replica: Replica,
        *,
        supervisor_pid: int | None = None,
        grace_s: float = 5.0,
        log: LogCopy | None = None,
        is_silent: bool = False,
        is_speaker: bool = False,
        is_watched: bool = True,
    ) -> None:
        self._replica = replica
        self._log = log
        self._supervisor_pid = supervisor_pid
        self._grace_s = grace_s
        self._key = replica.key(HEARTBEAT)
        self._written: dict[str, float] = {}
        self._written_count: WarningCount | None = None
        self._writing = _thread.allocate_lock()
        self._is_stopped = False
        self._is_silent = is_silent
        self._is_speaker = is_speaker
        self._is_watched = is_watched
        self._heard = 0
        """The pid of the process of a command whose last report the replica has."""
        self._wakeup = _thread.allocate_lock()  # this lock is held until the thread must look, or end
        self._wakeup.acquire()
        if replica.warnings is not None:
            replica.warnings.on_first = self._wake
        self._has_complained = False
        self._pace = Pace()

    @property
    def supervisor_is_gone(self) -> bool:
        """True if the process that supervised this one has ended."""
        # A descriptor of the supervisor would not work, because libraries that start daemons close all descriptors. But
        # a process whose parent has ended gets another parent.
        return self._supervisor_pid is not None and os.getppid() != self._supervisor_pid

    def start(self) -> None:
        """Start the thread."""
        _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        if self._replica.page is not None and self._is_watched:
            self._replica.page.heartbeat_thread = _thread.get_native_id()
        beaten_at = -BEAT_S
        copied_at = time.monotonic()
        while True:
            self._wakeup.acquire(timeout=LOOK_S)
            if self._is_stopped:
                return
            if self.supervisor_is_gone:
                self._end_process()
            if self._is_silent:
                continue
            now = time.monotonic()
            self._pace.look(now, self._replica.reported.get("step"))
            # Warnings are written before the heartbeat that counts them, so that a reader of the count finds the
            # record.
            self._write_warnings()
            if self._is_left_to_speaker():
                beaten_at = now
                continue
            if self._is_news or now - beaten_at >= BEAT_S:
                self.beat()
                beaten_at = now
            if self._log is not None and now - copied_at >= COPY_S:
                copied_at = now
                with self._writing:
                    if not self._is_stopped:
                        self._log.put(LIVE_BYTES)
            if self._replica.recorder is not None:
                is_last = sigterm_arrived()  # this process may be killed soon
                self._replica.recorder.measure(is_last=is_last)  # outside the lock, because a driver may not answer
                with self._writing:
                    if not self._is_stopped and not self._run_is_gone:
                        self._replica.recorder.look(is_last=is_last)

    def _is_left_to_speaker(self) -> bool:
        """True if a process of the replica's command writes the heartbeats now."""
        page = self._replica.page
        if self._is_speaker or page is None or not page.speaker:
            return False
        if start_time(int(page.speaker)) is not None:
            return True
        self.take_reports()
        return False

    def take_reports(self) -> None:
        """Take the last report of a process of the command, so that the next heartbeat and the outcome have it."""
        page, store = self._replica.page, self._replica.store
        speaker = 0 if page is None else int(page.speaker)
        if self._is_speaker or speaker in (0, self._heard):
            return
        with contextlib.suppress(StoreError):
            reported = Beat.parse(store.get(self._key), self._key, store.url).reported
            self._replica.reported |= {name: value for name, value in reported.items() if name != STEPS_PER_S}
            self._heard = speaker  # another process may report since the read
            self._written = dict(self._replica.reported)

    def beat(self) -> None:
        """Write a heartbeat now, unless the thread was stopped. A store that fails does not end the training."""
        with self._writing:
            if not (self._is_stopped or self._is_silent):
                self._write()

    def stop(self) -> None:
        """Write the last reports and measurements, and end the thread. Nothing is written after this returns.

        A later heartbeat could create the folder of a run again that a user deletes right after its end.
        """
        if self._replica.recorder is not None:
            self._replica.recorder.measure(is_last=True)
        with self._writing:
            if not self._is_stopped:
                self._is_stopped = True
                self._wake()
            if self._replica.warnings is not None:
                self._replica.warnings.write(is_last=True)
            if self._is_news and not self._is_silent:
                self._write()
            if self._replica.recorder is not None and not self._run_is_gone:
                self._replica.recorder.look(is_last=True)
            self._note(math.inf)

    @contextlib.contextmanager
    def left_to_supervisor(self) -> Iterator[None]:
        """Let a container's supervisor write the heartbeats within the block, because the outcome of the replica is
        late.
        """
        self._note(time.monotonic())
        try:
            yield
        finally:
            self._note(math.inf)

    def _wake(self) -> None:
        """Make the thread of this object look at once. Any thread may call this method."""
        with contextlib.suppress(RuntimeError):  # the lock is free, so the thread is awake already
            self._wakeup.release()

    def _write_warnings(self) -> None:
        with self._writing:
            if not self._is_stopped and self._replica.warnings is not None:
                self._replica.warnings.write()

    @property
    def _is_news(self) -> bool:
        """True if a report or a warning came after the last heartbeat."""
        return self._replica.reported != self._written or self._count != self._written_count

    @property
    def _count(self) -> WarningCount | None:
        return None if self._replica.warnings is None else self._replica.warnings.count

    @property
    def _run_is_gone(self) -> bool:
        return run_folder_was_deleted(self._replica.store, self._replica.run_id)

    def _write(self) -> None:
        if self._run_is_gone:
            return
        reported, count = dict(self._replica.reported), self._count
        pace = self._pace.steps_per_s(time.monotonic())
        measured = {} if pace is None else {STEPS_PER_S: pace}
        try:
            self._replica.store.put(self._key, Beat(time.time(), {**measured, **reported}, count).to_bytes())
            self._note(time.monotonic())
        except StoreError as error:
            if not self._has_complained:
                self._has_complained = True
                text = f"rank {self._replica.rank}: no heartbeat: {error}"
                if self._replica.warnings is not None:
                    self._replica.warnings.add(text, place="heartbeat")
                # The disk may be full, or the user's code may have closed or replaced stderr.
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    sys.stderr.write(f"replicas: {text}\n")
        self._written, self._written_count = reported, count

    def _note(self, beaten_at: float) -> None:
        """Note the time of the last heartbeat in the shared page.

        The supervisor writes heartbeats if this thread waits for the store.
        """
        if self._replica.page is not None:
            self._replica.page.beaten = beaten_at

    def _end_process(self) -> None:
        """End this replica because its supervisor cannot: SIGTERM, the grace, and SIGKILL to it and its descendants."""
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + self._grace_s
        # Usually the main thread records the outcome and exits within the grace, and this thread ends with it.
        while (left_s := deadline - time.monotonic()) > 0:
            self._wakeup.acquire(timeout=left_s)  # `stop` and each warning wake this thread
        kill_descendants(os.getpid())
        os.kill(os.getpid(), signal.SIGKILL)
