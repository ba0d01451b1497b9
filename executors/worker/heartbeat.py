"""The thread beside an entrypoint: it beats, and notices a dead supervisor.

It is not of `threading`: its `Thread.start()` waits for the thread's first turn, which is long among 256 new
processes. So it must import nothing: `threading` takes the thread that imports it first for the main thread.
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
from executors.process import kill_descendants
from executors.protocol import WarningCount
from executors.replica import Replica
from executors.status import STEPS_PER_S
from executors.store.record_names import HEARTBEAT, run_folder_was_deleted
from executors.worker.log_copy import LIVE_BYTES, LogCopy
from executors.worker.pace import Pace
from executors.worker.sigterm import sigterm_arrived

COPY_S = 60.0  # how often the end of the output is copied, where it is
LOOK_S = 1.0  # how often new reports are looked for, and so the least time between two heartbeats
BEAT_S = 10.0  # how often it beats with nothing new


class Heartbeat:
    """Beats while its replica runs: writes `heartbeat.json` again and again.

    Args:
        log: copied with it, if given.
    """

    def __init__(
        self,
        replica: Replica,
        *,
        supervisor_pid: int | None = None,
        grace_s: float = 5.0,
        log: LogCopy | None = None,
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
        self._wakeup = _thread.allocate_lock()  # held until the thread is to look, or to end
        self._wakeup.acquire()
        if replica.warnings is not None:
            replica.warnings.on_first = self._wake
        self._has_complained = False
        self._pace = Pace()

    @property
    def supervisor_is_gone(self) -> bool:
        """Whether the process that supervised this one has ended."""
        # Not by a descriptor: daemon-style libraries close all they find. A process whose parent ends gets another.
        return self._supervisor_pid is not None and os.getppid() != self._supervisor_pid

    def start(self) -> None:
        """Begin to beat."""
        _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        if self._replica.page is not None:
            self._replica.page.heartbeat_thread = _thread.get_native_id()
        beaten_at = -BEAT_S
        copied_at = time.monotonic()
        while True:
            self._wakeup.acquire(timeout=LOOK_S)
            if self._is_stopped:
                return
            if self.supervisor_is_gone:
                self._end_process()
            now = time.monotonic()
            self._pace.look(now, self._replica.reported.get("step"))
            self._write_warnings()  # before the beat with their count, so that a reader of the count finds the record
            if self._is_news or now - beaten_at >= BEAT_S:
                self.beat()
                beaten_at = now
            if self._log is not None and now - copied_at >= COPY_S:
                copied_at = now
                with self._writing:
                    if not self._is_stopped:
                        self._log.put(LIVE_BYTES)
            if self._replica.recorder is not None:
                with self._writing:
                    if not self._is_stopped and not self._run_is_gone:
                        self._replica.recorder.look(is_last=sigterm_arrived())  # it may be killed soon

    def beat(self) -> None:
        """Write the heartbeat now, unless stopped. A store that fails does not end the training."""
        with self._writing:
            if not self._is_stopped:
                self._write()

    def stop(self) -> None:
        """Write what was reported and measured since the last beat, and end: nothing is written after this returns.

        Else a late beat would make the folder of a run again that somebody deletes once it has ended.
        """
        with self._writing:
            if not self._is_stopped:
                self._is_stopped = True
                self._wake()
            if self._replica.warnings is not None:
                self._replica.warnings.write(is_last=True)
            if self._is_news:
                self._write()
            if self._replica.recorder is not None and not self._run_is_gone:
                self._replica.recorder.look(is_last=True)
            self._note(math.inf)

    @contextlib.contextmanager
    def left_to_supervisor(self) -> Iterator[None]:
        """Let the supervisor of a container beat, once this was stopped, for a replica whose outcome is late."""
        self._note(time.monotonic())
        try:
            yield
        finally:
            self._note(math.inf)

    def _wake(self) -> None:
        """Make the thread check at once. Safe in any thread: of two calls at the same time one is enough."""
        with contextlib.suppress(RuntimeError):  # it is awake already
            self._wakeup.release()

    def _write_warnings(self) -> None:
        with self._writing:
            if not self._is_stopped and self._replica.warnings is not None:
                self._replica.warnings.write()

    @property
    def _is_news(self) -> bool:
        """Whether the last heartbeat that was written lacks something."""
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
                with contextlib.suppress(OSError, ValueError, AttributeError):  # the disk is full; closed by the user
                    sys.stderr.write(f"replicas: {text}\n")
        self._written, self._written_count = reported, count

    def _note(self, beaten_at: float) -> None:
        """Note when the store had the last beat: the supervisor beats while this thread waits for the store."""
        if self._replica.page is not None:
            self._replica.page.beaten = beaten_at

    def _end_process(self) -> None:
        """End this replica in its supervisor's place: let it clean up, then kill it and all it started."""
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + self._grace_s
        # The main thread records the outcome and leaves by itself meanwhile; then this thread ends with the process.
        while (left_s := deadline - time.monotonic()) > 0:
            self._wakeup.acquire(timeout=left_s)  # `stop` and each warning wake this thread
        kill_descendants(os.getpid())
        os.kill(os.getpid(), signal.SIGKILL)
