"""Looks at one run, and keeps what the list and the page of the run show."""

from __future__ import annotations

import contextlib
import hashlib
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from executors.attempt import Attempt, Claim
from executors.dashboard.changes import Versions
from executors.dashboard.run_store import RunStore
from executors.errors import BackendError, ReplicasError, RunBeingRemovedError, StoreError
from executors.metrics.metrics import Metrics
from executors.metrics.segments import SegmentBudget, sample_numbers
from executors.status import RunStatus
from executors.store import Store
from executors.store.inventory import Inventory
from executors.store.record_names import CLAIM
from executors.store.url import address_of, is_near
from executors.task.record import RunRecord
from executors.view.report.document import Subject, document
from executors.view.report.page import charts_of, page_parts
from executors.view.report.text import one_line
from executors.view.run_page import ReportReader
from executors.view.run_view import RunView

EVERY_S = 2.0  # the shortest time between two looks at a run
PER_MINUTE = 15
"""The most requests to a bucket in a minute, for a run of at most `REPLICAS_OF_THAT` replicas that continues."""
REPLICAS_OF_THAT = 8
MAX_POINTS = 60  # of a loss in the list
MAX_SEGMENTS = 12  # that are read for it
MAX_ATTEMPTS = 500  # that are read for the cost
PAUSES_AFTER_FAILURE_S = (5.0, 60.0)  # the pauses after looks that fail
PARSED = SegmentBudget(128 << 20)
"""The room of this process for the parsed measurements of the runs whose pages are shown."""
READING = "The measurements of the run are being read."


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One run in the list."""

    key: str
    """The path of the run's page: the digest of its store, and its id."""
    run_id: str
    store: str
    status: str = "reading"
    """A status of a run, `being removed`, `unreadable`, or `reading` before the first look."""
    counts: str = ""
    backend: str = ""
    entrypoint: str = ""
    created_at: float = 0.0
    """Unix time of the launch. 0.0: not known."""
    ended_at: float | None = None
    share: float | None = None
    """The share of the steps that were made, from 0 to 1. None: not known."""
    progress: str = ""
    loss: float | None = None
    """The last loss. None: no replica has reported one."""
    losses: Sequence[float] = ()
    cost: str = ""
    """The cost of the run, or else the hours of its replicas."""
    problem: str = ""


class RunFeed:
    """Looks at a run, and keeps the result for all tabs that show the run.

    `look` is called by one thread at a time. Other methods may be called at any time.

    Args:
        store: the store of the run.
        run_id: the id of the run.

    Example:
        feed = RunFeed(open_store("s3://bucket/runs"), "brave-otter-7f3a")
        feed.look(with_page=False)
        feed.row.status
    """

    def __init__(self, store: Store, run_id: str) -> None:
        self.key = f"{hashlib.sha256(store.url.encode()).hexdigest()[:8]}/{run_id}"
        self.store = RunStore(store)
        self.view = RunView(self.store, run_id)
        self.address = address_of(store.url, run_id)
        self.row = RunRow(key=self.key, run_id=run_id, store=one_line(store.url))
        self.versions = Versions()
        """The content of the run's page."""
        self.document: tuple[int, Mapping[str, Any]] | None = None
        """The newest version of the page, and the document that it was made from."""
        self.now: RunStatus | None = None
        """The state of the run at the last look that succeeded."""
        self.is_gone = False
        """True if the store does not have the run."""
        self.cpu_s = self.page_cpu_s = 0.0
        """The processor time of the last look, without and with only its page, in seconds."""
        self.pause_s = EVERY_S
        """The time to wait before the next look because of requests, in seconds."""
        self.changed = threading.Condition()
        self._is_near = is_near(store.url)
        self._reader: ReportReader | None = None
        self._losses = Losses()
        self._outage_s = PAUSES_AFTER_FAILURE_S[0]

    @property
    def has_page(self) -> bool:
        """True if the page has the measurements of the run."""
        return self.document is not None

    @property
    def goes_on(self) -> bool:
        """True if the run has not ended, as far as it is known, so that the run must be looked at again."""
        return not self.is_gone and (self.now is None or not self.now.is_terminal)

    def look(self, *, with_page: bool) -> None:
        """Read the run, and renew its row. An error becomes the problem of the row.

        Args:
            with_page: True: also renew the page of the run.
        """
        before, began, known = self.store.n_requests, time.thread_time(), self.now
        # The first look and the first page read everything once. Pauses for these requests would last minutes.
        reads_all = known is None or (with_page and not self.has_page)
        try:
            self._look()
            look_s = time.thread_time() - began
            # The first look reads everything, so its time is not the time of the looks that follow.
            self.cpu_s = 0.0 if known is None else look_s
            if with_page and not (self.has_page and _is_same_end(known, self.now)):
                self._make_page()
                self.page_cpu_s = time.thread_time() - began - look_s
        except ReplicasError as error:
            self._fail(error)
        else:
            self._outage_s = PAUSES_AFTER_FAILURE_S[0]
            n_requests = 0 if reads_all else self.store.n_requests - before
            self.pause_s = max(EVERY_S, self._fair_pause_s(n_requests))
        with self.changed:
            self.changed.notify_all()

    def quick_document(self) -> Mapping[str, Any] | None:
        """Return the document of the page without measurements. None: the state of the run is not known yet."""
        if self.now is None:
            return None
        record = self.view.record
        empty = Metrics(
            run_id=self.view.run_id, world_size=record.world_size, began_at=record.created_at, as_of_s=0.0, attempts=(),
            rows=(), problems=(), origins={},
        )  # fmt: skip
        subject = Subject(url=self.view.url, record=record, task=None, now=self.now, metrics=empty, problems=(READING,))
        return document(subject)

    def forget_page(self) -> None:
        """Free the memory of what the page was made from, because no tab shows it."""
        if self._reader is not None:
            self._reader.forget()
        self._reader = None
        self.store.forget_measurements()

    def _fair_pause_s(self, n_requests: int) -> float:
        """Return the pause after a look that keeps the requests of a minute within their limit."""
        if self._is_near:
            return 0.0
        n_replicas = len(self.now.replicas) if self.now is not None else 1
        return n_requests * 60 / (PER_MINUTE * max(1.0, n_replicas / REPLICAS_OF_THAT))

    def _look(self) -> None:
        view, problem = self.view, ""
        n_beats = None if self._is_near else max(1, view.record.world_size // REPLICAS_OF_THAT)
        self.store.begin_look(n_beats)
        record = view.record
        view.check_not_removed()
        try:
            now = view.status()
        except BackendError as error:
            now, problem = view.recorded_status(), f"The state is that in the store: {error}"
        if self.now is None:
            rows = sample_numbers(self.store, view.run_id, MAX_SEGMENTS)
            self._losses.begin([loss for row in rows if (loss := row.values.get("loss")) is not None])
        self._losses.add(now)
        self.now = now
        progress = now.progress
        self.row = replace(
            self.row,
            status=str(now.status),
            counts=one_line(now.counts),
            backend=one_line(now.backend, 60),
            entrypoint=one_line(record.entrypoint.removesuffix(":__main__"), 80),
            created_at=record.created_at,
            ended_at=now.last_at if now.is_terminal else None,
            share=None if progress is None else progress.share,
            progress="" if progress is None else progress.describe(),
            loss=self._losses.last,
            losses=self._losses.points,
            cost=self._cost(record, now),
            problem=one_line(problem),
        )

    def _make_page(self) -> None:
        self._reader = self._reader or ReportReader(self.view, PARSED)
        made = self._reader.read(self.now)
        self.versions.add(page_parts(made), charts_of(made))
        newest = self.versions.newest
        assert newest is not None
        self.document = newest.version, made
        if not self.goes_on:
            self.forget_page()

    def _fail(self, error: ReplicasError) -> None:
        from executors.errors import CorruptObjectError, RunNotFoundError

        status = self.row.status
        if isinstance(error, RunBeingRemovedError):
            status = "being removed"
        elif isinstance(error, RunNotFoundError):
            self.is_gone = True
        elif isinstance(error, CorruptObjectError):
            status = "unreadable"
        elif status == "reading":
            status = "unknown"
        self.row = replace(self.row, status=status, problem=one_line(str(error)))
        self.pause_s, self._outage_s = self._outage_s, min(2 * self._outage_s, PAUSES_AFTER_FAILURE_S[1])

    def _cost(self, record: RunRecord, now: RunStatus) -> str:
        hours = self._used_s(now) / 3600
        price = None
        with contextlib.suppress(ReplicasError):  # the backend is not installed here, or does not answer
            price = self.view.placements.at(0).backend.price_per_hour(record.settings.gpu)
        return f"{hours:.{2 if hours < 10 else 0}f} h" if price is None else f"{hours * price:.2f} USD"

    def _used_s(self, now: RunStatus) -> float:
        """Return the seconds that all attempts have run, by the clocks of their hosts."""
        inventory: Inventory = self.view.reader.records.inventory
        begun = sorted((rank, number) for rank, number, name in inventory.records if f"{name}.json" == CLAIM)
        ends = {(each.rank, each.attempt): each.outcome for each in now.replicas if each.outcome is not None}
        used_s = 0.0
        for key in begun[:MAX_ATTEMPTS]:
            attempt = Attempt(self.store, self.view.run_id, *key)
            with contextlib.suppress(StoreError):
                end = ends.get(key)
                if end is None and inventory.has(*key, "outcome"):
                    end = attempt.outcome()
                begun_at = None if end is None else end.started_at
                if begun_at is None and (claim := attempt.find(CLAIM, Claim.parse)) is not None:
                    begun_at = claim.at
                if begun_at is not None:
                    used_s += max(0.0, (now.at if end is None else end.finished_at) - begun_at)
        return used_s


def _is_same_end(known: RunStatus | None, now: RunStatus | None) -> bool:
    """Return True if a run had ended at an earlier look, and was not resumed since."""
    if known is None or now is None or not known.is_terminal or not now.is_terminal:
        return False
    return [each.attempt for each in known.replicas] == [each.attempt for each in now.replicas]


class Losses:
    """The loss of a run over time, with a limited number of points.

    Example:
        losses = Losses()
        losses.add(view.status())
        losses.last
    """

    def __init__(self) -> None:
        self.points: list[float] = []
        self.last: float | None = None
        self._every = self._n = 0
        self._step: float | None = None

    def begin(self, losses: Sequence[float]) -> None:
        """Begin with losses that were reported earlier.

        Args:
            losses: the losses, the oldest first.
        """
        self._every = max(1, len(losses) // MAX_POINTS)
        self.points = [*losses[:: self._every]]
        self.last = losses[-1] if losses else None

    def add(self, now: RunStatus) -> None:
        """Add the median of the losses that the replicas reported last.

        Args:
            now: the state of the run.
        """
        reported = [each.reported for each in now.replicas]
        found = [loss for each in reported if isinstance(loss := each.get("loss"), int | float) and abs(loss) < 1e300]
        steps = [step for each in reported if isinstance(step := each.get("step"), int | float)]
        step = max(steps, default=None)
        if not found or (step is not None and step == self._step):
            return
        self._step, self.last = step, float(statistics.median(found))
        self._n += 1
        if self._n % max(1, self._every) == 0:
            self.points = [*self.points, self.last]
        if len(self.points) > 2 * MAX_POINTS:
            self.points = self.points[::2]
            self._every = 2 * max(1, self._every)
