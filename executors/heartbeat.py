"""The thread beside an entrypoint: writes the heartbeat, and ends a replica whose supervisor is gone."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import time

from executors.errors import StoreError
from executors.process import kill_descendants
from executors.records import to_bytes
from executors.replica import Replica, replica_key

LOOK_S = 1.0  # how often new reports are looked for, and so the least time between two heartbeats
BEAT_S = 10.0  # how often it beats with nothing new


class Heartbeat:
    """Beats while its replica runs: `heartbeat.json`, the only object of a run that is overwritten."""

    def __init__(self, replica: Replica, *, supervisor_pid: int | None = None, grace_s: float = 5.0) -> None:
        self._replica = replica
        self._supervisor_pid = supervisor_pid
        self._grace_s = grace_s
        self._key = replica_key(replica.run_id, replica.rank, replica.attempt, "heartbeat.json")
        self._written: dict[str, float] | None = None
        self._writing = _thread.allocate_lock()
        self._is_stopped = False
        self._stop = _thread.allocate_lock()  # held until the thread is to end
        self._stop.acquire()
        self._complained = False

    @property
    def supervisor_is_gone(self) -> bool:
        """Whether the process that watched over this one has ended."""
        # Not by a descriptor: daemon-style libraries close all they find. A process whose parent ends gets another.
        return self._supervisor_pid is not None and os.getppid() != self._supervisor_pid

    def start(self) -> None:
        """Begin to beat, beside the entrypoint."""
        # Not a threading.Thread: its start() waits for the thread's first turn, which is long among 256 new processes.
        # For the same reason the thread must import nothing: `threading` takes who imports it for the main thread.
        _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        beaten_at = -BEAT_S
        while not self._stop.acquire(timeout=LOOK_S):
            if self.supervisor_is_gone:
                self._end_process()
            now = time.monotonic()
            if self._replica.reported != self._written or now - beaten_at >= BEAT_S:
                self.beat()
                beaten_at = now

    def beat(self) -> None:
        """Write the heartbeat now, unless stopped. A store that fails is no reason to end the training."""
        with self._writing:
            if not self._is_stopped:
                self._write()

    def stop(self) -> None:
        """Beat once more if there is something new to say, and end: nothing is written after this returns.

        Else a beat that comes late makes the folder of a run again that somebody deletes once it has ended.
        """
        with self._writing:
            if not self._is_stopped:
                self._is_stopped = True
                self._stop.release()
            if self._replica.reported != (self._written or {}):
                self._write()

    def _write(self) -> None:
        reported = dict(self._replica.reported)
        try:
            self._replica.store.put(self._key, to_bytes({"at": time.time(), **reported}))
        except StoreError as error:
            if not self._complained:
                self._complained = True
                with contextlib.suppress(OSError, ValueError, AttributeError):  # the disk is full; closed by the user
                    sys.stderr.write(f"replicas: rank {self._replica.rank}: no heartbeat: {error}\n")
        self._written = reported

    def _end_process(self) -> None:
        """Nobody else is left to end this replica: let it clean up, then end it and all it started."""
        os.kill(os.getpid(), signal.SIGTERM)
        self._stop.acquire(timeout=self._grace_s)
        kill_descendants(os.getpid())
        os.kill(os.getpid(), signal.SIGKILL)
