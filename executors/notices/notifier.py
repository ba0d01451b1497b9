"""The process that sends the notifications of a run, and the object by which its starter controls it.

A supervisor has one thread, and a launching process runs code of the user. Neither may wait for a service, and neither
may end because a package of a service crashes. So a process beside them reads the store, and sends. It gets the URLs
through a pipe, so no command line and no environment contains them. Each line in the pipe asks for a look at once. The
last line, or the end of the pipe, asks the process to send the rest and to end.
"""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

from executors.errors import ReplicasError, StoreError
from executors.module_search import new_python
from executors.settings.notify import KINDS, parse_kinds
from executors.settings.run_spec import RunSpec
from executors.store import Store
from executors.task.notice_record import Notice, as_document

CODE = "from executors.notices.notifier import main; main()"
NEAR_LOOK_S, FAR_LOOK_S = 2.0, 10.0
"""The pause between two looks at a directory and at a bucket, if no line in the pipe asks for a look."""
FINISH_S = 10.0
"""How long a process whose starter has ended still sends its own messages."""
ORPHAN_S = 20.0
"""How long a process whose starter was killed waits for the end of the run, which another process may still record."""
HEIR_S = 75.0
"""How long a process stays for the claims of other processes, which may have died. It is longer than `DEAD_S`."""
LEFT_S = 600.0
"""How long a process stays after the end of the run if its starter neither ends nor closes the pipe."""
TICK_S = 0.1  # while a message is being sent
RESTART_S = 1.0
MAX_STARTS = 1000


@dataclass(frozen=True)
class NotifierSpec:
    """The values that a notifier needs. They contain secrets, so they are never stored, and their `repr` shows none."""

    store_url: str
    run_id: str
    urls: tuple[str, ...] = field(default=(), repr=False)
    kinds: tuple[str, ...] = ()
    """The kinds of notices to send. Empty: all kinds."""
    key: str | None = field(default=None, repr=False)
    """The key of a signed run."""
    usd_per_hour: float | None = None
    """The price of one replica, in US dollars per hour."""
    waits_for_others: bool = True
    """True: after its starter has ended, it stays until the claims of other processes have their results. False in a
    container, whose end must not be delayed."""

    @classmethod
    def of(cls, spec: RunSpec, *, waits_for_others: bool = True) -> NotifierSpec:
        """Return the values for a run.

        Args:
            spec: the run.
            waits_for_others: see the attribute. Default True.
        """
        on = spec.settings.notify_on
        kinds = tuple(KINDS) if on is None else parse_kinds(on)
        return cls(spec.store_url, spec.run_id, spec.notify, kinds, spec.key, spec.usd_per_hour, waits_for_others)


class Notifier:
    """Starts the notifying process, asks it for looks, and starts it again if it dies. No call waits.

    Args:
        spec: the values that the process needs.
        has_output: True if its warnings go to stderr of this process. Default False.
        on_start: called with the pid of each process. Default: nothing is called.

    Example:
        notifier = Notifier(NotifierSpec.of(spec))
        notifier.start()
        notifier.look()
    """

    def __init__(
        self, spec: NotifierSpec, *, has_output: bool = False, on_start: Callable[[int], None] = lambda pid: None
    ) -> None:
        self._spec = spec
        self._has_output = has_output
        self._on_start = on_start
        self._notices: dict[str, Notice] = {}
        """The notices of this starter, which a process that is started again must get again."""
        self._n_starts = 0
        self._start_at = 0.0
        self._pipe = -1
        self.pid: int | None = None
        """The process. None: there is none now."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The descriptors that a forked child must close. Otherwise the process would not see the end of its
        starter.
        """
        return () if self._pipe < 0 else (self._pipe,)

    def start(self) -> None:
        """Start the process. If this machine cannot, a later call of `keep` tries again."""
        self._start_at = time.monotonic() + RESTART_S * min(2**self._n_starts, 60)
        self._n_starts += 1
        reader, writer = os.pipe()
        actions: list[tuple[Any, ...]] = [(os.POSIX_SPAWN_DUP2, reader, 0)]
        nothing = os.open(os.devnull, os.O_WRONLY)
        actions += [(os.POSIX_SPAWN_DUP2, nothing, 1)]
        actions += [] if self._has_output else [(os.POSIX_SPAWN_DUP2, nothing, 2)]
        try:
            command = new_python(CODE)
            self.pid = os.posix_spawn(sys.executable, command, os.environ, file_actions=actions, setsigmask=())
        except OSError:
            os.close(writer)
            return
        finally:
            os.close(reader)
            os.close(nothing)
        self._pipe = writer
        self._on_start(self.pid)
        # The message fits into the buffer of the pipe, so this does not wait for the process.
        self._write({**asdict(self._spec), "notices": [as_document(each) for each in self._notices.values()]})
        os.set_blocking(writer, False)

    def look(self) -> None:
        """Ask for a look at the store, because something has happened."""
        self._write({})

    def notice(self, notice: Notice) -> None:
        """Send a notice that is in no record.

        Args:
            notice: the notice.
        """
        if notice.id not in self._notices:
            self._notices[notice.id] = notice
            self._write({"notice": as_document(notice)})

    def keep(self) -> None:
        """Start the process again if it has died."""
        if self.pid is not None:
            if not self._has_died():
                return
            with contextlib.suppress(ChildProcessError):  # the user's code may wait for all its children
                os.waitpid(self.pid, os.WNOHANG)
            self.note_end(self.pid)
        if self._n_starts < MAX_STARTS and time.monotonic() >= self._start_at:
            self.start()

    def _has_died(self) -> bool:
        """Return True if no process reads the pipe. `waitpid` cannot tell if the user's code ignores SIGCHLD."""
        if self._pipe < 0:
            return False
        poller = select.poll()
        poller.register(self._pipe, 0)
        return any(state & (select.POLLERR | select.POLLHUP) for _, state in poller.poll(0))

    def note_end(self, pid: int) -> bool:
        """Note that a child of this process has ended. Return True if it was the notifying process.

        Args:
            pid: the process that has ended.
        """
        if pid != self.pid:
            return False
        self.pid = None
        self._close_pipe()
        return True

    def close(self) -> None:
        """Let the process send the rest, and end. If it has just died, another one does that."""
        if self.pid is not None and self._has_died():
            self.note_end(self.pid)
        if self.pid is None:
            self.start()
        self._write({"end": True})
        self._close_pipe()

    def wait(self, limit_s: float) -> None:
        """Wait until the process has sent the rest and has ended. If it is killed, another one does that.

        Args:
            limit_s: the longest wait, in seconds.
        """
        until = time.monotonic() + limit_s
        with contextlib.suppress(ChildProcessError):
            while self.pid is not None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid and not os.WIFSIGNALED(status):
                    break
                if time.monotonic() > until:
                    return
                if pid:
                    self.note_end(pid)
                    self.close()
                time.sleep(0.02)
        self.pid = None

    def _write(self, message: dict[str, Any]) -> None:
        # A full pipe has looks that are not read yet. Without a reader, `keep` starts the process again.
        with contextlib.suppress(OSError):
            if self._pipe >= 0:
                os.write(self._pipe, (json.dumps(message) + "\n").encode())

    def _close_pipe(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1


class NotifierPid:
    """The pid of a notifier, in memory that a process shares with the children that it forks."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8)

    def set(self, pid: int) -> None:
        """Note the pid.

        Args:
            pid: the process.
        """
        self._memory[:8] = pid.to_bytes(8, "little")

    def get(self) -> tuple[int, ...]:
        """Return the pid of the last process that was started. Empty: there was none."""
        pid = int.from_bytes(self._memory[:8], "little")
        return (pid,) if pid else ()


class _Starter:
    """The pipe from the starter of this process.

    Args:
        descriptor: the end of the pipe that this process reads.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""
        self.has_ended = False
        """True if no line follows."""
        self.was_killed = False
        """True if the pipe has ended without the last line."""

    def first(self) -> dict[str, Any]:
        """Return the first line, as JSON."""
        while b"\n" not in self._rest:
            part = os.read(self._descriptor, 1 << 16)
            if not part:
                raise EOFError
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return dict(json.loads(line))

    def wait(self, limit_s: float) -> list[dict[str, Any]]:
        """Return the lines that have arrived, after waiting for one."""
        if self.has_ended:
            time.sleep(limit_s)
            return []
        if b"\n" not in self._rest and not select.select([self._descriptor], [], [], limit_s)[0]:
            return []
        part = os.read(self._descriptor, 1 << 16) if select.select([self._descriptor], [], [], 0)[0] else None
        if part == b"":
            self.has_ended, self.was_killed = True, True
        *lines, self._rest = (self._rest + (part or b"")).split(b"\n")
        found = [dict(json.loads(line)) for line in lines if line]
        if any(message.get("end") for message in found):
            self.has_ended, self.was_killed = True, False
        return found


def main() -> NoReturn:
    """Send the notices of one run until the starter of this process has ended."""
    code = 1
    try:
        with contextlib.suppress(OSError):
            os.setsid()  # Ctrl-C in the terminal of the starter does not end this process
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        starter = _Starter(0)
        message = starter.first()
        notices = [Notice.parse(each) for each in message.pop("notices")]
        tuples = {name: tuple(message[name]) for name in ("urls", "kinds")}
        _run(NotifierSpec(**{**message, **tuples}), starter, notices)
        code = 0
    except (EOFError, ReplicasError) as error:
        _warn(str(error))
    finally:
        os._exit(code)  # a thread that still sends must not delay the end


def _warn(words: str) -> None:
    if words:
        with contextlib.suppress(OSError):
            print(f"replicas: {words}", file=sys.stderr, flush=True)


def _run(spec: NotifierSpec, starter: _Starter, given: Sequence[Notice]) -> None:
    from executors.notices.outbox import Outbox
    from executors.notices.reader import NoticeReader, wanted
    from executors.notices.sender import send_to_all
    from executors.patience import GLANCE
    from executors.store.run_key import hold_key
    from executors.store.url import impatient_store, is_near
    from executors.task.record import find_run_record

    def warn(words: str) -> None:
        if not starter.has_ended:  # after its end, the terminal of the starter belongs to other commands
            _warn(words)

    store = impatient_store(spec.store_url, GLANCE.limit_s)
    hold_key(store.url, spec.run_id, spec.key)
    every_s = NEAR_LOOK_S if is_near(store.url) else FAR_LOOK_S
    outbox = Outbox(store, spec.run_id, functools.partial(send_to_all, spec.urls), on_failure=warn)
    reader: NoticeReader | None = None
    is_local = False
    notices = list(given)
    ended_at = next_at = 0.0
    over_since = time.monotonic()
    has_looked = False
    """True if a look has succeeded since the starter ended."""
    while True:
        now = time.monotonic()
        if now >= next_at:
            next_at = now + every_s
            with contextlib.suppress(StoreError):  # the next look tries again, for as long as the run lasts
                if reader is None:
                    record = find_run_record(store, spec.run_id)
                    if record is not None:
                        is_local = all(place.backend == "local" for place in record.placements)
                        price = spec.usd_per_hour
                        reader = NoticeReader(store, spec.run_id, record, key=spec.key, usd_per_hour=price)
                outbox.offer(wanted(notices, spec.kinds))
                if reader is not None:
                    outbox.offer(wanted(reader.look(), spec.kinds))
                has_looked = starter.has_ended
        is_over = reader is not None and reader.is_over
        if not is_over or not outbox.is_idle:
            over_since = now
        elif now - over_since > LEFT_S:
            return
        if starter.has_ended:
            ended_at = ended_at or now
            after_s = now - ended_at
            is_expected = starter.was_killed and not is_over and after_s < ORPHAN_S
            next_at = min(next_at, now + 1.0)
            if starter.was_killed and not is_over and is_local:
                _record_lost(store, spec.run_id)
        is_last = starter.has_ended and not is_expected
        with contextlib.suppress(StoreError):
            outbox.advance(is_last=is_last)
        if is_last and (has_looked or after_s > FINISH_S) and _is_done(outbox, spec, after_s):
            return
        pause_s = TICK_S if outbox.has_own_work else 1.0 if starter.has_ended else every_s
        for message in starter.wait(min(pause_s, max(0.0, next_at - time.monotonic()))):
            next_at = 0.0
            if "notice" in message:
                notices.append(Notice.parse(message["notice"]))
        if starter.has_ended and not ended_at:
            next_at = 0.0  # the last records may have been written just before the last line


def _record_lost(store: Store, run_id: str) -> None:
    """Record the ranks of a local run as lost whose supervisor has been killed. No other process may look."""
    from executors.view.run_view import RunView

    with contextlib.suppress(ReplicasError):
        RunView(store, run_id).status(reports=False)


def _is_done(outbox: Any, spec: NotifierSpec, after_s: float) -> bool:
    """Return True if nothing is left to send, or the time for it has passed."""
    if outbox.is_idle:
        return True
    if outbox.has_own_work:
        return after_s > FINISH_S + (ORPHAN_S if spec.waits_for_others else 0.0)
    return not spec.waits_for_others or after_s > HEIR_S
