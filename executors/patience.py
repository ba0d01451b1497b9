"""Retries calls to a store that fails.

Defines how long each kind of process tolerates an outage, and what it prints.

The shortest wait decides the damage of an outage. So all waits are in this module, and no other module has its own. ADR
0059 has a table with the reasons. A process waits longer if its work would be lost than if its work can be repeated. A
process that costs nothing waits longer than a machine that costs money.

    result = retry(lambda: store.get(key), START, what="the task of this run")

This module does not cover three things: pauses between writes that are repeated anyway (heartbeats, measurements), job
services (`backends/jobs/service.py`), and the wait of replicas for each other.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from executors.errors import CorruptObjectError, KeyNotFoundError, ReplicasError, StoreError, UnsafeStoreError

T = TypeVar("T")

MINUTE, HOUR = 60.0, 3600.0
SCALE = 1.0
"""Multiplies every wait of this process. Tests shorten all of them by one factor; the product never changes it."""
FIRST_WORD_S = 5.0
"""Seconds of waiting before the first line. A shorter wait is not worth a line."""
AGAIN_S = 60.0
"""Seconds between two lines of one process that waits."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0


@dataclass(frozen=True)
class OutageTolerance:
    """The longest time that one kind of process waits for one thing during an outage.

    Args:
        process: the kind of process, for documentation.
        waits_for: the thing that the process waits for.
        seconds: the longest wait for a store that does not answer or is full.
        reason: the reason for this length.
        refused_seconds: the longest wait for a store that refuses access. The user must change something. None:
            `seconds`.
        dead_seconds: the longest wait if credentials have expired. None: `refused_seconds`.
        backend_seconds: the longest wait for a backend that fails. None: `refused_seconds`.
    """

    process: str
    waits_for: str
    seconds: float
    reason: str
    refused_seconds: float | None = None
    dead_seconds: float | None = None
    backend_seconds: float | None = None

    @property
    def limit_s(self) -> float:
        """The longest wait for a store that does not answer or is full, in seconds."""
        return self.seconds * SCALE

    def limit_for(self, error: BaseException | None) -> float:
        """Return the longest wait in seconds for this kind of error.

        Args:
            error: the newest error. None: there was no error yet.
        """
        if isinstance(error, KeyNotFoundError):  # a missing key is an answer of the store and not a failure
            return 0.0
        seconds = self.seconds
        # A stale object is valid again after seconds. A damaged object stays damaged.
        if isinstance(error, CorruptObjectError | UnsafeStoreError):
            seconds = min(seconds, BRIEF.seconds)
        elif isinstance(error, StoreError) and error.refusal:
            refused = self.refused_seconds if self.refused_seconds is not None else seconds
            dead = self.dead_seconds if self.dead_seconds is not None else refused
            seconds = min(seconds, dead if error.refusal == "credentials" else refused)
        elif isinstance(error, ReplicasError) and not isinstance(error, StoreError):  # an error of a backend
            longest = self.refused_seconds if self.backend_seconds is None else self.backend_seconds
            seconds = min(seconds, seconds if longest is None else longest)
        return seconds * SCALE


REQUEST = OutageTolerance(
    "any process",
    "the answer to one request to a bucket",
    2 * MINUTE,
    "It absorbs throttling, lost replies and a change of addresses. The caller decides how to treat a longer outage.",
    refused_seconds=0.0,
)
OPENING = OutageTolerance(
    "any process",
    "the first answer of a bucket that it opens",
    10.0,
    "A wrong address must be reported soon.",
    refused_seconds=0.0,
)
BRIEF = OutageTolerance(
    "any process",
    "a record that decides its next step",
    10.0,
    "It absorbs a short failure of a directory. A user waits for the answer, or ranks wait for their supervisor.",
)
GLANCE = OutageTolerance(
    "a supervisor, a spare, `ls`",
    "one request, which is tried once",
    5.0,
    "The only thread of such a process must also reap, end and limit ranks. It asks again a few seconds later.",
    refused_seconds=0.0,
)
START = OutageTolerance(
    "a replica before its entrypoint is called",
    "its claim, its task and the log of decisions",
    30 * MINUTE,
    "The next start would meet the same outage, and would cost another restart.",
    refused_seconds=MINUTE,
    dead_seconds=10.0,
)
ROUND = OutageTolerance(
    "a replica in a round, or in its first anchor",
    "the store, whatever kind it is",
    30 * MINUTE,
    "It is the default of round_timeout_s, which replaces this number: the group decides how long a round may take.",
    refused_seconds=10 * MINUTE,
    dead_seconds=MINUTE,
)
OUTCOME = OutageTolerance(
    "a replica that has ended",
    "the store, to record its result or its failure",
    30 * MINUTE,
    "A result cannot be computed again, and no other process knows the traceback of a failure.",
    refused_seconds=10 * MINUTE,
    dead_seconds=10.0,
)
SUPERVISOR = OutageTolerance(
    "a supervisor on this machine",
    "the store, to record an end and to decide what follows",
    7 * 24 * HOUR,
    "It costs nothing, and giving up would end the run. It restarts ranks when the store is back.",
    refused_seconds=10 * MINUTE,
)
CONTAINER = OutageTolerance(
    "a supervisor in a container that may restart its rank",
    "the store, to record an end and to decide what follows",
    30 * MINUTE,
    "The container is paid for, and a new one costs minutes and a restart.",
    refused_seconds=MINUTE,
)
LAST_WORDS = OutageTolerance(
    "a supervisor in a container without restarts",
    "the store, to record an end",
    MINUTE,
    "The container is paid for, and its service knows as well that it has ended.",
)
CONTROLLER = OutageTolerance(
    "`launch`, `resume`, `add` and `watch`, and a `Run` that started replicas",
    "the store, or the backend",
    7 * 24 * HOUR,
    "Giving up ends an attached run, or leaves it without restarts. Waiting costs nothing: replicas have limits.",
    refused_seconds=15 * MINUTE,
)
PAID_CONTROLLER = OutageTolerance(
    "the same, where jobs of a service need their lease",
    "the store, or the backend",
    7 * 24 * HOUR,
    "As above. But a bucket that refuses this process refuses its replicas as well, and their jobs are paid for.",
    refused_seconds=MINUTE,
    backend_seconds=15 * MINUTE,
)
FOLLOWER = OutageTolerance(
    "`wait`, `logs -f`, `events -f`, `collect`, a notebook, and a `Run` that was found again",
    "the store, or the backend",
    HOUR,
    "It outlasts every wait of a replica, so that it sees how the run ends. It can be called again.",
    refused_seconds=10 * MINUTE,
)
TABLE = (
    REQUEST, OPENING, BRIEF, GLANCE, START, ROUND, OUTCOME, SUPERVISOR, CONTAINER, LAST_WORDS, CONTROLLER,
    PAID_CONTROLLER, FOLLOWER,
)  # fmt: skip
"""All waits for a store. ADR 0059 shows the same rows, which a test compares."""


def name_span(seconds: float) -> str:
    """Return a duration in one unit: `5 s`, `3 min`, `2 h`, `7 days`.

    Args:
        seconds: the duration.
    """
    for unit, name in ((24 * HOUR, "days"), (HOUR, "h"), (MINUTE, "min")):
        if seconds >= 2 * unit or (seconds >= unit and seconds % unit < 1):
            return f"{seconds / unit:.0f} {name}".replace("1 days", "1 day")
    return f"{seconds:.0f} s"


@dataclass
class _Wait:
    """One thing that this process waits for now."""

    what: str
    since: float
    limit_s: float
    error: str = ""
    was_reported: bool = False
    is_quiet: bool = False
    """True if the wait may have ended, so that nothing is printed before the next failure."""

    def sentence(self, now: float) -> str:
        longest = f", {name_span(self.limit_s)} at most" if self.limit_s else ""
        why = f": {self.error}" if self.error else "."
        return f"waiting for {self.what}, {name_span(now - self.since)} so far{longest}{why}"


class Waits:
    """All outages that one process waits for now. Once a minute it reports the oldest one with its duration.

    Args:
        report: called with each sentence. None, the default: the sentence is printed to stderr after `replicas: `.
        clock: returns the seconds of a monotonic clock. Default: the system's clock.

    Example:
        waits = Waits(print)
        outage = Outage(CONTROLLER, "the rendezvous", waits=waits)
    """

    def __init__(
        self, report: Callable[[str], None] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.report = report or _print
        self.clock = clock
        self._all: dict[object, _Wait] = {}
        self._pid = os.getpid()
        self._reported_at = -float("inf")

    @property
    def _open(self) -> dict[object, _Wait]:
        """The current waits by key. A forked process starts without the waits of its parent."""
        if self._pid != os.getpid():
            self._pid, self._all = os.getpid(), {}
        return self._all

    def note(self, key: object, what: str, since: float, limit_s: float, error: BaseException | None = None) -> None:
        """Note that this process waits, or still waits, for something.

        Args:
            key: identifies this wait. It may be any hashable object.
            what: the thing that the process waits for, as in "the store".
            since: the begin of the wait, in seconds of the clock.
            limit_s: the longest wait, in seconds. 0: the sentence names no limit.
            error: the newest error. None, the default: the earlier error stays.
        """
        wait = self._open.setdefault(key, _Wait(what, since, limit_s))
        wait.since, wait.limit_s, wait.error = since, limit_s, wait.error if error is None else str(error)
        wait.is_quiet = False
        if error is not None:
            self.look()

    def quiet(self, key: object) -> None:
        """Report a wait again only after its next failure, because it may have ended.

        Args:
            key: the wait, as for `note`.
        """
        if key in self._open:
            self._open[key].is_quiet = True

    def end(self, key: object, *, is_back: bool) -> None:
        """Note that a wait has ended.

        Args:
            key: the wait, as for `note`.
            is_back: True if the thing works again. False if the process has given up.
        """
        wait = self._open.pop(key, None)
        if wait is not None and wait.was_reported and is_back:
            self.report(f"the wait for {wait.what} has ended after {name_span(self.clock() - wait.since)}.")

    def look(self) -> None:
        """Report the oldest wait if a report is due: first after 5 s, then once a minute for the whole process."""
        now = self.clock()
        reported = [wait for wait in list(self._open.values()) if not wait.is_quiet]
        oldest = min(reported, key=lambda wait: (not wait.error, wait.since), default=None)
        first_s, again_s = FIRST_WORD_S * SCALE, AGAIN_S * SCALE
        if oldest is not None and now - oldest.since >= first_s and now - self._reported_at >= again_s:
            self._reported_at, oldest.was_reported = now, bool(oldest.error)
            self.report(oldest.sentence(now))

    @contextlib.contextmanager
    def asking(self, what: str) -> Iterator[None]:
        """Report a request as a wait if its answer takes too long. The block makes the request.

        Args:
            what: the thing that is asked, as in "s3://bucket/runs".
        """
        key = _thread.get_ident(), what
        is_outermost = key not in self._open
        if is_outermost:
            self._open[key] = _Wait(what, self.clock(), 0.0)
        try:
            yield
        except BaseException:
            if is_outermost:
                self.end(key, is_back=False)
            raise
        if is_outermost:
            self.end(key, is_back=True)

    def failed(self, what: str, error: BaseException) -> None:
        """Note the error of a request that is tried again within the block of `asking`.

        Args:
            what: the thing that is asked, as for `asking`.
            error: the error.
        """
        wait = self._open.get((_thread.get_ident(), what))
        if wait is not None:
            wait.error = str(error)
            self.look()

    @contextlib.contextmanager
    def reporting_to(self, report: Callable[[str], None]) -> Iterator[None]:
        """Send reports to another function within the block.

        Args:
            report: called with each sentence.
        """
        before, self.report = self.report, report
        try:
            yield
        finally:
            self.report = before

    @contextlib.contextmanager
    def report_from_thread(self) -> Iterator[None]:
        """Report from a separate thread within the block, so that even one request without an answer is reported."""
        import threading  # only here, because in a replica the main thread must be the first that imports it

        is_over = threading.Event()

        def look() -> None:
            while not is_over.wait(min(1.0, FIRST_WORD_S * SCALE / 2)):
                self.look()

        threading.Thread(target=look, name="replicas-waits", daemon=True).start()
        try:
            yield
        finally:
            is_over.set()


def _print(words: str) -> None:
    # The disk may be full, or the user's code may have closed or replaced stderr.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"replicas: {words}\n")


waits = Waits()
"""The waits of this process."""


class Outage:
    """One outage, from the first failure of a thing to its next success.

    Args:
        tolerance: the longest wait.
        what: the thing that fails. Default "the store".
        waits: reports the wait once a minute. None, the default: the waits of this process.

    Example:
        outage = Outage(FOLLOWER, "the rendezvous")
        while True:
            try:
                look()
            except StoreError as error:
                if not outage.tolerates(error):
                    raise
            else:
                outage.end()
    """

    def __init__(self, tolerance: OutageTolerance, what: str = "the store", *, waits: Waits | None = None) -> None:
        self.tolerance = tolerance
        self._what = what
        self._waits = waits or globals()["waits"]
        self._since: float | None = None
        self._counts_from: float | None = None

    @property
    def is_on(self) -> bool:
        """True if the last call failed."""
        return self._since is not None

    def tolerates(self, error: ReplicasError) -> bool:
        """Note a failure. Return True if the caller should try again.

        Args:
            error: the error. After the longest wait, its attribute `was_waited_for` becomes True.
        """
        now = self._waits.clock()
        first = getattr(error, "failing_since", None) or now  # the store may already have tried for minutes
        self._since = first if self._since is None else self._since
        self._counts_from = first if self._counts_from is None else self._counts_from
        limit_s = self.tolerance.limit_for(error)
        if now - self._counts_from >= limit_s:
            self._waits.end(self, is_back=False)
            error.was_waited_for = True
            return False
        self._waits.note(self, self._what, self._since, limit_s, error)
        return True

    def restart(self) -> None:
        """Measure the longest wait from the next failure on, because the process has begun other work."""
        self._counts_from = None

    def end(self) -> None:
        """Note that the thing works again."""
        self._stop(is_back=True)

    def quiet(self) -> None:
        """Report nothing until the next failure, because the thing may work again and was not asked."""
        self._waits.quiet(self)

    def drop(self) -> None:
        """Note that the process no longer waits. Nothing is reported."""
        self._stop(is_back=False)

    def _stop(self, *, is_back: bool) -> None:
        if self._since is not None:
            self._since = self._counts_from = None
            self._waits.end(self, is_back=is_back)


def retry(
    act: Callable[[], T],
    tolerance: OutageTolerance = BRIEF,
    what: str = "the store",
    *,
    is_last: bool = False,
    sleep: Callable[[float], object] = time.sleep,
    waits: Waits | None = None,
) -> T:
    """Call a function until it succeeds or the longest wait has passed. Return the function's result.

        task = retry(lambda: store.get(key), START, "the task of this run")

    A missing key is an answer of the store, so its error is raised at once.

    Args:
        act: the function. It may be called several times.
        tolerance: the longest wait. Default: 10 s.
        what: the thing that the process waits for, as named in reports. Default: the store.
        is_last: True: do not report the end of the wait, because the log of this process may be closed. Default False.
        sleep: called with the seconds to wait between two tries. Default: `time.sleep`.
        waits: reports the wait. None, the default: the waits of this process.

    Raises:
        StoreError: the error of the last try.
    """
    outage: Outage | None = None
    longest_s = FIRST_PAUSE_S
    while True:
        try:
            result = act()
        except KeyNotFoundError:
            raise
        except StoreError as error:
            outage = outage or Outage(tolerance, what, waits=waits)
            if not outage.tolerates(error):
                raise
        else:
            if outage is not None:
                outage.drop() if is_last else outage.end()
            return result
        # The pause is random, so that replicas that lost the store together do not all try again at the same moment.
        sleep(longest_s * (1 + _chance()) / 2 * min(1.0, max(SCALE, 0.01)))
        longest_s = min(LONGEST_PAUSE_S, tolerance.seconds / 10, 2 * longest_s)


def _chance() -> float:
    """Return a random number from 0 to 1 from the system.

    The user's training may have seeded the generators of Python.
    """
    return int.from_bytes(os.urandom(4), "big") / 2**32
