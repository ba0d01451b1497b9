"""How long each kind of process waits for a store that fails, why, and what it says meanwhile. ADR 0059 has the table.

The shortest wait decides what an outage costs, so all of them are here, and no other module has one of its own. Two
rules order them. Work that would be lost waits longer than work that can be asked for again. A process that costs
nothing waits longer than a machine that is paid for.

    result = retry(lambda: store.get(key), START, what="the task of this run")

Not covered: pauses between two tries of what is written again anyway (heartbeats, measurements), the patience with job
services (`backends/jobs/service.py`), and how long replicas wait for each other.
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
"""Seconds of waiting before the first line. A shorter wait is a hiccup, which nobody needs to know of."""
AGAIN_S = 60.0
"""Seconds between two lines of one process that waits."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0


@dataclass(frozen=True)
class Patience:
    """How long one kind of process waits for one thing.

    Args:
        process: the process that waits.
        waits_for: the thing that it waits for.
        seconds: the longest wait for a store that is away or full.
        reason: why it is this long, and not shorter or longer.
        refused_seconds: the longest wait for a store that answers, and refuses: a user has to change something there.
            None: `seconds`.
        dead_seconds: the longest wait with credentials that have ended. None: `refused_seconds`.
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
        """The longest wait for a store that is away or full, in seconds of this process."""
        return self.seconds * SCALE

    def limit_for(self, error: BaseException | None) -> float:
        """Return the longest wait in seconds, given the newest failure.

        Args:
            error: what was raised. None: nothing yet.
        """
        if isinstance(error, KeyNotFoundError):  # an answer, and no failure
            return 0.0
        seconds = self.seconds
        if isinstance(error, CorruptObjectError | UnsafeStoreError):  # a stale answer heals in seconds, or never
            seconds = min(seconds, BRIEF.seconds)
        elif isinstance(error, StoreError) and error.refusal:
            refused = self.refused_seconds if self.refused_seconds is not None else seconds
            dead = self.dead_seconds if self.dead_seconds is not None else refused
            seconds = min(seconds, dead if error.refusal == "credentials" else refused)
        elif isinstance(error, ReplicasError) and not isinstance(error, StoreError):  # a backend's
            longest = self.refused_seconds if self.backend_seconds is None else self.backend_seconds
            seconds = min(seconds, seconds if longest is None else longest)
        return seconds * SCALE


REQUEST = Patience(
    "any process",
    "the answer to one request to a bucket",
    2 * MINUTE,
    "It absorbs throttling, lost replies and a change of addresses. A longer outage is for the caller to bear.",
    refused_seconds=0.0,
)
OPENING = Patience(
    "any process",
    "the first answer of a bucket that it opens",
    10.0,
    "A wrong address must be reported soon.",
    refused_seconds=0.0,
)
BRIEF = Patience(
    "any process",
    "a record that decides its next step",
    10.0,
    "It absorbs a hiccup of a directory. A user waits for the answer, or ranks wait to be looked after.",
)
GLANCE = Patience(
    "a supervisor, a spare, `ls`",
    "one request, which is tried once",
    5.0,
    "Its one thread must also reap, end and limit ranks. It asks again a few seconds later.",
    refused_seconds=0.0,
)
START = Patience(
    "a replica before its entrypoint is called",
    "its claim, its task and the log of decisions",
    30 * MINUTE,
    "The next start would meet the same outage, and would cost another restart.",
    refused_seconds=MINUTE,
    dead_seconds=10.0,
)
ROUND = Patience(
    "a replica in a round, or in its first anchor",
    "the store, whatever kind it is",
    30 * MINUTE,
    "It is the default of round_timeout_s, which replaces this number: the group decides how long a round may take.",
    refused_seconds=10 * MINUTE,
    dead_seconds=MINUTE,
)
OUTCOME = Patience(
    "a replica that has ended",
    "the store, to record its result or its failure",
    30 * MINUTE,
    "A result cannot be computed again, and no other process knows the traceback of a failure.",
    refused_seconds=10 * MINUTE,
    dead_seconds=10.0,
)
SUPERVISOR = Patience(
    "a supervisor on this machine",
    "the store, to record an end and to decide what follows",
    7 * 24 * HOUR,
    "It costs nothing, and giving up would end the run. It restarts ranks when the store is back.",
    refused_seconds=10 * MINUTE,
)
CONTAINER = Patience(
    "a supervisor in a container that may restart its rank",
    "the store, to record an end and to decide what follows",
    30 * MINUTE,
    "The container is paid for, and a new one costs minutes and a restart.",
    refused_seconds=MINUTE,
)
LAST_WORDS = Patience(
    "a supervisor in a container without restarts",
    "the store, to record an end",
    MINUTE,
    "The container is paid for, and its service knows as well that it has ended.",
)
KEEPER = Patience(
    "`launch`, `resume`, `add` and `watch`, and a `Run` that started replicas",
    "the store, or the backend",
    7 * 24 * HOUR,
    "Giving up ends an attached run, or leaves it without restarts. Waiting costs nothing: replicas have limits.",
    refused_seconds=15 * MINUTE,
)
PAID_KEEPER = Patience(
    "the same, where jobs of a service need their lease",
    "the store, or the backend",
    7 * 24 * HOUR,
    "As above. But a bucket that refuses this process refuses its replicas as well, and their jobs are paid for.",
    refused_seconds=MINUTE,
    backend_seconds=15 * MINUTE,
)
FOLLOWER = Patience(
    "`wait`, `logs -f`, `events -f`, `collect`, a notebook, and a `Run` that was found again",
    "the store, or the backend",
    HOUR,
    "It outlasts every wait of a replica, so that it sees how the run ends. It can be called again.",
    refused_seconds=10 * MINUTE,
)
TABLE = (
    REQUEST, OPENING, BRIEF, GLANCE, START, ROUND, OUTCOME, SUPERVISOR, CONTAINER, LAST_WORDS, KEEPER,
    PAID_KEEPER, FOLLOWER,
)  # fmt: skip
"""All waits for a store. ADR 0059 shows the same rows, which a test compares."""


def name_span(seconds: float) -> str:
    """Write a wait for people, in one unit: `5 s`, `3 min`, `2 h`, `7 days`."""
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
    is_told: bool = False
    is_quiet: bool = False
    """Whether it may have ended: nothing is said before the next failure."""

    def sentence(self, now: float) -> str:
        longest = f", {name_span(self.limit_s)} at most" if self.limit_s else ""
        why = f": {self.error}" if self.error else "."
        return f"waiting for {self.what}, {name_span(now - self.since)} so far{longest}{why}"


class Waits:
    """Everything that one process waits for now. It says once a minute what that is, and how long already.

    Args:
        say: gets each sentence. None: it goes to stderr, behind `replicas: `.
        clock: returns seconds of a monotonic clock.

    Example:
        waits = Waits(print)
        outage = Outage(KEEPER, "the rendezvous", waits=waits)
    """

    def __init__(self, say: Callable[[str], None] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.say = say or _say
        self.clock = clock
        self._all: dict[object, _Wait] = {}
        self._pid = os.getpid()
        self._told_at = -float("inf")

    @property
    def _open(self) -> dict[object, _Wait]:
        """The waits of this process by their keys; those of the process that it was forked from are forgotten."""
        if self._pid != os.getpid():
            self._pid, self._all = os.getpid(), {}
        return self._all

    def note(self, key: object, what: str, since: float, limit_s: float, error: BaseException | None = None) -> None:
        """Note that something is waited for, or why it still is.

        Args:
            key: tells this wait from others.
            what: the thing that is waited for, in words.
            since: the time from which the wait counts, by the clock.
            limit_s: the longest wait, in seconds. 0: the sentence names none.
            error: the newest failure.
        """
        wait = self._open.setdefault(key, _Wait(what, since, limit_s))
        wait.since, wait.limit_s, wait.error = since, limit_s, wait.error if error is None else str(error)
        wait.is_quiet = False
        if error is not None:
            self.look()

    def quiet(self, key: object) -> None:
        """Note that a wait may have ended: it is not spoken of before the next failure.

        Args:
            key: the wait, as for `note`.
        """
        if key in self._open:
            self._open[key].is_quiet = True

    def over(self, key: object, *, is_back: bool) -> None:
        """Note that a wait has ended.

        Args:
            key: the wait, as for `note`.
            is_back: True if the thing has come; False if nobody waits for it any more.
        """
        wait = self._open.pop(key, None)
        if wait is not None and wait.is_told and is_back:
            self.say(f"the wait for {wait.what} has ended after {name_span(self.clock() - wait.since)}.")

    def look(self) -> None:
        """Say what is waited for, if a line is due: the first after 5 s, then one a minute for the whole process."""
        now = self.clock()
        told_of = [wait for wait in list(self._open.values()) if not wait.is_quiet]
        oldest = min(told_of, key=lambda wait: (not wait.error, wait.since), default=None)
        first_s, again_s = FIRST_WORD_S * SCALE, AGAIN_S * SCALE
        if oldest is not None and now - oldest.since >= first_s and now - self._told_at >= again_s:
            self._told_at, oldest.is_told = now, bool(oldest.error)
            self.say(oldest.sentence(now))

    @contextlib.contextmanager
    def asking(self, what: str) -> Iterator[None]:
        """Note within the block that an answer is waited for, which may not come."""
        key = _thread.get_ident(), what
        is_outermost = key not in self._open
        if is_outermost:
            self._open[key] = _Wait(what, self.clock(), 0.0)
        try:
            yield
        except BaseException:
            if is_outermost:
                self.over(key, is_back=False)
            raise
        if is_outermost:
            self.over(key, is_back=True)

    def failed(self, what: str, error: BaseException) -> None:
        """Note why the answer that `asking` waits for has not come yet."""
        wait = self._open.get((_thread.get_ident(), what))
        if wait is not None:
            wait.error = str(error)
            self.look()

    @contextlib.contextmanager
    def saying(self, say: Callable[[str], None]) -> Iterator[None]:
        """Say it in another way within the block."""
        before, self.say = self.say, say
        try:
            yield
        finally:
            self.say = before

    @contextlib.contextmanager
    def told_by_thread(self) -> Iterator[None]:
        """Have a thread look within the block, so that a request without an answer is told of, too."""
        import threading  # here: a replica's first thread must not be the one that imports it

        is_over = threading.Event()

        def look() -> None:
            while not is_over.wait(min(1.0, FIRST_WORD_S * SCALE / 2)):
                self.look()

        threading.Thread(target=look, name="replicas-waits", daemon=True).start()
        try:
            yield
        finally:
            is_over.set()


def _say(words: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a full disk; the user has closed or unset it
        sys.stderr.write(f"replicas: {words}\n")


waits = Waits()
"""Those of this process."""


class Outage:
    """One wait for something that fails, from its first failure to the next success.

    Args:
        patience: how long it lasts at most.
        what: the thing that fails, in words.
        waits: says once a minute that it is waited for. None: those of this process.

    Example:
        outage = Outage(FOLLOWER, "the rendezvous")
        while True:
            try:
                look()
            except StoreError as error:
                if not outage.bears(error):
                    raise
            else:
                outage.end()
    """

    def __init__(self, patience: Patience, what: str = "the store", *, waits: Waits | None = None) -> None:
        self.patience = patience
        self._what = what
        self._waits = waits or globals()["waits"]
        self._since: float | None = None
        self._counts_from: float | None = None

    @property
    def is_on(self) -> bool:
        """Whether the last call failed."""
        return self._since is not None

    def bears(self, error: ReplicasError) -> bool:
        """Note a failure; return whether to try again.

        Args:
            error: what was raised. It is marked as waited for when the patience is over.
        """
        now = self._waits.clock()
        first = getattr(error, "failing_since", None) or now  # a store may have tried for minutes by itself
        self._since = first if self._since is None else self._since
        self._counts_from = first if self._counts_from is None else self._counts_from
        limit_s = self.patience.limit_for(error)
        if now - self._counts_from >= limit_s:
            self._waits.over(self, is_back=False)
            error.was_waited_for = True
            return False
        self._waits.note(self, self._what, self._since, limit_s, error)
        return True

    def restart(self) -> None:
        """Count the patience from the next failure on: until then this process had something else to do."""
        self._counts_from = None

    def end(self) -> None:
        """Note that the thing has answered."""
        self._stop(is_back=True)

    def quiet(self) -> None:
        """Note that the thing may have answered: this process has not asked it again."""
        self._waits.quiet(self)

    def drop(self) -> None:
        """Note that the thing is not waited for any more, and say nothing."""
        self._stop(is_back=False)

    def _stop(self, *, is_back: bool) -> None:
        if self._since is not None:
            self._since = self._counts_from = None
            self._waits.over(self, is_back=is_back)


def retry(
    act: Callable[[], T],
    patience: Patience = BRIEF,
    what: str = "the store",
    *,
    is_last: bool = False,
    sleep: Callable[[float], object] = time.sleep,
    waits: Waits | None = None,
) -> T:
    """Call `act` again while a store fails, as long as the patience lasts; return what it returns.

        task = retry(lambda: store.get(key), START, "the task of this run")

    A missing key is an answer, and is raised at once.

    Args:
        act: the call, which may be made several times.
        patience: how long to try.
        what: the thing that is waited for, in words.
        is_last: True if nothing is to be said when the wait ends, because what this process said is kept by then.
        sleep: waits between two tries, for so many seconds.
        waits: says what is waited for. None: those of this process.

    Raises:
        StoreError: the last failure.
    """
    outage: Outage | None = None
    longest_s = FIRST_PAUSE_S
    while True:
        try:
            result = act()
        except KeyNotFoundError:
            raise
        except StoreError as error:
            outage = outage or Outage(patience, what, waits=waits)
            if not outage.bears(error):
                raise
        else:
            if outage is not None:
                outage.drop() if is_last else outage.end()
            return result
        # At random: replicas that lost the store at once must not come back to it at once.
        sleep(longest_s * (1 + _chance()) / 2 * min(1.0, max(SCALE, 0.01)))
        longest_s = min(LONGEST_PAUSE_S, patience.seconds / 10, 2 * longest_s)


def _chance() -> float:
    """Return a number from 0 to 1, by no generator that a user may have seeded."""
    return int.from_bytes(os.urandom(4), "big") / 2**32
