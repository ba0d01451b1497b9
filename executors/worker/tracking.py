"""Sends the numbers of a replica to a tracker such as wandb, from a separate thread.

Neither the training nor the heartbeat waits for the tracker. A failure of the tracker is one warning.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from executors.metrics.rows import Left, LeftOut, parse_line
from executors.process.temp_folders import temp_prefix
from executors.protocol import ReplicaStatus
from executors.replica import Replica
from executors.task.stored import StoredTask
from executors.view.report.scalars import scalars
from executors.view.report.trackers import PageTracker, TrackedReplica, load_tracker

MAX_WAITING = 10_000  # lines in the queue for the tracker, enough for some hours
FINISH_S = 20.0  # seconds that a replica waits for the tracker at its end
PAGE_SHARE = 0.5  # the share of this time for the page of the run
HURRIED_S = 2.5  # seconds that a replica waits for the tracker if it will be killed soon


class Tracking:
    """The connection of this replica to one tracker. The constructor loads the tracker, and `start` starts it.

    Args:
        name: the name of the tracker, from the settings of the run.
        tracked: the facts about this replica and its run, for the tracker.
        write_page: writes the page of the run into a file, for a tracker that takes it. None, the default: it gets no
            page.
        on_warning: called with one sentence if the tracker fails. The sentence is also printed to stderr.
    """

    def __init__(
        self,
        name: str,
        tracked: TrackedReplica,
        write_page: Callable[[Path], object] | None = None,
        on_warning: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._name = name
        self._on_warning = on_warning
        self._tracked = tracked
        self._write_page = write_page
        self._waiting = queue.Queue[tuple[float, Mapping[str, Any]] | None](MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._has_succeeded = self._is_hurried = False
        self._page_by = 0.0
        self._has_complained = False
        self._class: Any = None
        with self._warned("cannot be loaded here, so it gets no numbers"):
            self._class = load_tracker(name)

    def start(self) -> None:
        """Start the thread that sends numbers to the tracker."""
        if self._class is not None:
            self._thread = threading.Thread(target=self._run, name="replicas-tracker", daemon=True)
            self._thread.start()

    def take(self, at: float, line: Mapping[str, Any]) -> None:
        """Queue a line of measurements for the tracker. The call never waits.

        Args:
            at: the Unix time of the measurements.
            line: the numbers, by name.
        """
        if self._class is not None:
            try:
                self._waiting.put_nowait((at, line))
            except queue.Full:
                self._complain("does not keep up, so some numbers are missing there")

    def finish(self, *, has_succeeded: bool, is_hurried: bool) -> None:
        """Send the remaining lines, and end the thread.

        Args:
            has_succeeded: True if the replica has succeeded.
            is_hurried: True if the replica will be killed soon, so that the wait must be short.
        """
        thread, self._thread = self._thread, None
        if thread is None or not thread.is_alive():
            return
        self._has_succeeded, self._is_hurried = has_succeeded, is_hurried
        limit_s = HURRIED_S if is_hurried else FINISH_S
        self._page_by = time.monotonic() + PAGE_SHARE * limit_s
        with contextlib.suppress(queue.Full):  # the tracker hangs
            self._waiting.put_nowait(None)
        thread.join(limit_s)
        if thread.is_alive():
            self._complain(f"did not finish within {limit_s:.0f} s, so some numbers may be missing there")

    def _run(self) -> None:
        tracker: Any = None
        with self._warned("cannot begin, so it gets no numbers"):
            tracker = self._class(self._tracked)
        if tracker is None:
            self._class = None
            return
        strange = Counter[str]()
        while (item := self._waiting.get()) is not None:
            at, line = item
            with self._warned("refuses numbers, so some are missing there"):
                row = parse_line({"t": 0.0, **line}, self._tracked.rank, self._tracked.attempt, "a line", strange)
                if isinstance(row, Left | LeftOut):
                    continue
                step, numbers = scalars(row)
                if numbers:
                    tracker.log(numbers, step, at)
        if self._write_page is not None and isinstance(tracker, PageTracker) and not self._is_hurried:
            with (
                self._warned("did not take the page of the run"),
                tempfile.TemporaryDirectory(prefix=temp_prefix()) as folder,
            ):
                path = Path(folder, f"{self._tracked.run_id}.html")
                writing = threading.Thread(target=self._write, args=(self._write_page, path), daemon=True)
                # written in a thread, because a store that does not answer would delay the end of the tracker
                writing.start()
                writing.join(max(0.0, self._page_by - time.monotonic()))
                if writing.is_alive():
                    self._complain("did not get the page of the run: it was not written in time")
                elif path.exists():
                    tracker.page(path)
        with self._warned("did not finish, so some numbers may be missing there"):
            tracker.finish(has_succeeded=self._has_succeeded)

    def _write(self, write_page: Callable[[Path], object], path: Path) -> None:
        with self._warned("did not get the page of the run"):
            write_page(path)

    @contextlib.contextmanager
    def _warned(self, problem: str) -> Iterator[None]:
        """Print a warning for an error in the block, and continue."""
        try:
            yield
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a failure of the tracker must not end the training
            self._complain(f"{problem}: {type(error).__name__}: {error}")

    def _complain(self, problem: str) -> None:
        if not self._has_complained:
            self._has_complained = True
            text = f"rank {self._tracked.rank}: the tracker {self._name!r} {problem}"
            self._on_warning(text)
            # The disk may be full, or the user's code may have closed or replaced stderr.
            with contextlib.suppress(OSError, ValueError, AttributeError):
                sys.stderr.write(f"replicas: {text}\n")


def tracked(task: StoredTask, replica: Replica, launched_at: float) -> TrackedReplica:
    """Return the facts about a replica and its task, for a tracker.

    Args:
        task: the task of the run.
        replica: the replica.
        launched_at: the Unix time of the launch.
    """
    launched, record = task.launched_with, task.record
    settings = {
        "run": task.run_id,
        "entrypoint": launched.entrypoint,
        "replicas": launched.world_size,
        "backend": launched.backend,
        "gpu": launched.settings.gpu,
        "seed": launched.settings.seed,
        "torch": record.torch,
        **{f"args.{name}": value for name, value in {**record.arg_texts, **(record.args or {})}.items()},
    }
    config = {name: value for name, value in settings.items() if value is not None}
    return TrackedReplica(
        run_id=task.run_id,
        launched_at=launched_at,
        rank=replica.rank,
        world_size=replica.world_size,
        attempt=replica.attempt,
        config=config,
    )


def write_run_page(replica: Replica, path: Path) -> None:
    """Write the HTML page of a replica's run, from the current records in the store.

    Args:
        replica: the replica.
        path: the file.
    """
    from executors.view.run_page import write_report
    from executors.view.run_view import RunView

    store_alone: Any = _StoreAlone()
    write_report(RunView(replica.store, replica.run_id, executor=store_alone), path)


class _StoreAlone:
    """An executor that asks no service, because a replica has no account there.

    Ranks without an outcome count as running.
    """

    backend_name = "store"
    supports_inter_replica_network = False

    def poll(self, handle: Any) -> ReplicaStatus:
        return ReplicaStatus.RUNNING
