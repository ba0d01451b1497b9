"""The numbers of a replica, handed to a tracker in a thread that does nothing else.

Neither the training nor the heartbeat waits for it, and what fails there is one warning.
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
from executors.protocol import ReplicaStatus
from executors.replica import Replica
from executors.report.scalars import scalars
from executors.report.trackers import TakesPage, Tracked, load_tracker
from executors.task.stored import StoredTask

MAX_WAITING = 10_000  # lines that wait for the tracker: hours of them
FINISH_S = 20.0  # how long a replica waits at its end for what is left
PAGE_SHARE = 0.5  # of that, for the page of the run
HURRIED_S = 2.5  # where it is killed soon


class Tracking:
    """One tracker of this replica: loaded when this is made, begun by `start`.

    Args:
        name: of the tracker, as the task says it.
        tracked: what the tracker gets to know of this replica and its run.
        write_page: writes the page of the run, for a tracker that takes it. None: it gets no page.
        on_warning: gets a sentence, once, when the tracker fails. It is in stderr, too.
    """

    def __init__(
        self,
        name: str,
        tracked: Tracked,
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
        with self._told("cannot be loaded here, so it gets no numbers"):
            self._class = load_tracker(name)

    def start(self) -> None:
        """Begin to hand on."""
        if self._class is not None:
            self._thread = threading.Thread(target=self._run, name="replicas-tracker", daemon=True)
            self._thread.start()

    def take(self, at: float, line: Mapping[str, Any]) -> None:
        """Take a line of measurements, made at this Unix time; never waits."""
        if self._class is not None:
            try:
                self._waiting.put_nowait((at, line))
            except queue.Full:
                self._complain("does not keep up, so some numbers are missing there")

    def finish(self, *, has_succeeded: bool, is_hurried: bool) -> None:
        """Hand on what is left, and end."""
        thread, self._thread = self._thread, None
        if thread is None or not thread.is_alive():
            return
        self._has_succeeded, self._is_hurried = has_succeeded, is_hurried
        limit_s = HURRIED_S if is_hurried else FINISH_S
        self._page_by = time.monotonic() + PAGE_SHARE * limit_s
        with contextlib.suppress(queue.Full):  # it hangs
            self._waiting.put_nowait(None)
        thread.join(limit_s)
        if thread.is_alive():
            self._complain(f"did not finish within {limit_s:.0f} s, so some numbers may be missing there")

    def _run(self) -> None:
        tracker: Any = None
        with self._told("cannot begin, so it gets no numbers"):
            tracker = self._class(self._tracked)
        if tracker is None:
            self._class = None
            return
        strange = Counter[str]()
        while (item := self._waiting.get()) is not None:
            at, line = item
            with self._told("refuses numbers, so some are missing there"):
                row = parse_line({"t": 0.0, **line}, self._tracked.rank, self._tracked.attempt, "a line", strange)
                if isinstance(row, Left | LeftOut):
                    continue
                step, numbers = scalars(row)
                if numbers:
                    tracker.log(numbers, step, at)
        if self._write_page is not None and isinstance(tracker, TakesPage) and not self._is_hurried:
            with self._told("did not take the page of the run"), tempfile.TemporaryDirectory() as folder:
                path = Path(folder, f"{self._tracked.run_id}.html")
                writing = threading.Thread(target=self._write, args=(self._write_page, path), daemon=True)
                writing.start()  # a store that does not answer would keep the tracker from its end
                writing.join(max(0.0, self._page_by - time.monotonic()))
                if writing.is_alive():
                    self._complain("did not get the page of the run: it was not written in time")
                elif path.exists():
                    tracker.page(path)
        with self._told("did not finish, so some numbers may be missing there"):
            tracker.finish(has_succeeded=self._has_succeeded)

    def _write(self, write_page: Callable[[Path], object], path: Path) -> None:
        with self._told("did not get the page of the run"):
            write_page(path)

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Tell on stderr what is raised in the block, and go on."""
        try:
            yield
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a tracker's failure is not the training's
            self._complain(f"{what}: {type(error).__name__}: {error}")

    def _complain(self, what: str) -> None:
        if not self._has_complained:
            self._has_complained = True
            text = f"rank {self._tracked.rank}: the tracker {self._name!r} {what}"
            self._on_warning(text)
            with contextlib.suppress(OSError, ValueError, AttributeError):  # the disk is full; closed by the user
                sys.stderr.write(f"replicas: {text}\n")


def tracked(task: StoredTask, replica: Replica, launched_at: float) -> Tracked:
    """Return what a tracker is told of a replica and of its task."""
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
    return Tracked(
        run_id=task.run_id,
        launched_at=launched_at,
        rank=replica.rank,
        world_size=replica.world_size,
        attempt=replica.attempt,
        config=config,
    )


def write_page(replica: Replica, path: Path) -> None:
    """Write the page of a replica's run, as it is now and the rendezvous shows it."""
    from executors.run.run_view import RunView

    store_alone: Any = _StoreAlone()
    RunView(replica.store, replica.run_id, executor=store_alone).report(path)


class _StoreAlone:
    """In place of the executor: a replica has no account to ask, so who has left no outcome runs."""

    backend_name = "store"
    supports_inter_replica_network = False

    def poll(self, handle: Any) -> ReplicaStatus:
        return ReplicaStatus.RUNNING
