"""Writes the measurements of a run as TensorBoard event files: a folder for each rank, and the folder `anchor`.

Each event contains the name of its row and of the program that wrote it. A later export reads these names and adds only
the missing rows. This also works if the end of a file is missing.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from executors.errors import MissingDependencyError, ReplicasError, install_command
from executors.metrics.metrics import Metrics
from executors.metrics.rows import Round
from executors.view.report.document import first_losses
from executors.view.report.scalars import scalars
from executors.view.report.text import name_moment, one_line

NEEDED_BY = "Event files for TensorBoard are written with the package 'tensorboard'."
NOTE = ".replicas-export"
ANCHOR = "anchor"
MAX_WAITING = 1000  # the most events in the queue of the writing thread


@contextlib.contextmanager
def open_event_files(directory: Path, run_id: str, launched_at: float) -> Iterator[EventFiles]:
    """Open the folder for the events of a run. It may already have events of this run.

    Raises:
        MissingDependencyError: tensorboard is not installed.
        ReplicasError: the folder has events of another run, or another process writes to it. A run with the same id
            that was removed is another run.
        OSError: the folder cannot be written.
    """
    try:
        from tensorboard.summary.writer import event_file_writer  # noqa: F401 - whether it is here
    except ImportError as error:
        raise MissingDependencyError(f"{NEEDED_BY} Install it with: {install_command('tensorboard')}") from error
    mine = f"{run_id}, launched {name_moment(launched_at)}"
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / NOTE).open("a+", encoding="utf-8") as note:
        try:
            fcntl.flock(note, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ReplicasError(f"Another process exports to {str(directory)!r}. Let it, or end it first.") from None
        note.seek(0)
        if (found := note.read(200)) not in ("", mine):
            raise ReplicasError(
                f"{str(directory)!r} holds the events of run {one_line(found)!r}. Choose another folder for {mine!r}."
            )
        if not found:
            note.write(mine)
            note.flush()
        files = EventFiles(directory)
        try:
            yield files
        finally:
            files.close()


class EventFiles:
    """Adds to a folder the events that it does not have yet."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._folders: dict[str, _Folder] = {}

    def write(self, metrics: Metrics, *, is_over: bool) -> int:
        """Write the new events, and return their number.

        Args:
            is_over: True if no more rows will come. Otherwise a point of the anchor is written only after all live
                replicas have passed its round.
        """
        width = len(str(metrics.world_size - 1))
        n_written, names = 0, Counter[tuple[int, str]]()
        for row in metrics:
            at_s = metrics.at(row)
            step, numbers = scalars(row)
            if step is None:  # TensorBoard drops a point if a later point has the same step
                step = round(1000 * at_s)
            of = f" {row.entry} {row.name}" if isinstance(row, Round) else ""
            name = f"{row.attempt} {type(row).__name__} {row.t!r}{of}"
            names[row.rank, name] += 1
            if (nth := names[row.rank, name]) > 1:  # rows with the same time need different names
                name += f" {nth}"
            folder = self._folder(f"rank-{row.rank:0{width}d}")
            n_written += folder.add(name, metrics.began_at + at_s, step, numbers)
        ended = dict[tuple[str, int], list[float]]()
        for each in metrics.rounds:
            ended.setdefault((each.name, each.entry), []).append(metrics.at(each))
        for key, (step, loss) in self._anchor(metrics, is_over=is_over).items():
            at = metrics.began_at + fmean(ended[key])
            n_written += self._folder(ANCHOR).add("{} {}".format(*key), at, step, {"loss": loss})
        for folder in self._folders.values():
            folder.flush()
        return n_written

    def close(self) -> None:
        """Close all files."""
        for folder in self._folders.values():
            folder.close()

    def _folder(self, name: str) -> _Folder:
        if name not in self._folders:
            self._folders[name] = _Folder(self._directory / name)
        return self._folders[name]

    def _anchor(self, metrics: Metrics, *, is_over: bool) -> dict[tuple[str, int], tuple[int, float]]:
        """Return step and loss of the anchor after each entry that all live replicas have passed."""
        alive = [(span.rank, span.attempt) for span in metrics.attempts if span.outcome is None]
        newest = {(each.name, each.rank, each.attempt): each.entry for each in metrics.rounds}
        return {
            (name, entry): (round(fmean(step for step, _ in points)), fmean(loss for _, loss in points))
            for (name, entry), points in first_losses(metrics).items()
            if is_over or entry < min((newest.get((name, *key), -1) for key in alive), default=0)
        }


class _Folder:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: Any = None
        self._known = {name for file in sorted(path.glob("events.out.tfevents.*")) for name in _names_in(file)}

    def add(self, name: str, at: float, step: int, numbers: Mapping[str, float]) -> bool:
        """Write an event, unless the folder has an event of this name. Return True if it was written."""
        if not numbers or name in self._known:
            return False
        from tensorboard.compat.proto import event_pb2, summary_pb2

        if self._writer is None:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._writer = EventFileWriter(str(self._path), MAX_WAITING)
        values = [summary_pb2.Summary.Value(tag=tag, simple_value=value) for tag, value in numbers.items()]
        self._writer.add_event(
            event_pb2.Event(
                wall_time=at,
                step=step,
                summary=summary_pb2.Summary(value=values),
                source_metadata=event_pb2.SourceMetadata(writer=name),
            )
        )
        self._known.add(name)
        return True

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _names_in(file: Path) -> Iterator[str]:
    """Yield the names of the rows whose events a file contains. The file may break off anywhere."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    for event in LegacyEventFileLoader(str(file)).Load():
        if event.HasField("summary"):
            yield event.source_metadata.writer
