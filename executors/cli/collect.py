"""`replicas collect`: all that a run left, brought into a folder; as a whole, or not at all."""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from executors.cli.options import (
    BackendOptions,
    ExecutorOption,
    RendezvousOption,
    RunArgument,
    WaitOption,
    find_run,
    parse_path,
)
from executors.cli.output import FAILED, JsonOption, Output, finite, inert, one_line, strict_json
from executors.cli.whole_folder import whole_folder
from executors.errors import ReplicasError, StoreError

if TYPE_CHECKING:
    from executors.attempt import Attempt
    from executors.run.run import Run
    from executors.store.artifacts import Artifact

OUT = "A folder for results.json, and for logs (of all attempts) and artifacts by rank."
RESULTS = "results.json"
MAX_NAMED = 8  # artifacts; the rest is counted
OF_ITS_NAME = (None, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ)


def collect(
    run: RunArgument,
    out: Annotated[Path | None, Option("--out", "-o", metavar="DIR", parser=parse_path, help=OUT)] = None,
    timeout: WaitOption = None,
    rendezvous: RendezvousOption = None,
    backend: ExecutorOption = None,
    option: BackendOptions = None,
    as_json: JsonOption = False,
) -> int:
    """Fetch the results of a run, its logs and artifacts.

    Waits for its end. Without --out it prints a line of JSON for each replica.

    Exit code: as `launch`, 124 also if --timeout ended the wait, and 1 also if a log or the folder failed.
    """
    from executors.cli.live import Interrupts, watch
    from executors.cli.summary import Summary

    output = Output(as_json)
    found = find_run(run, rendezvous, backend, option)
    in_time = found.status(reports=False).is_terminal or watch(found, output, timeout_s=timeout)
    summary = Summary.of(found, in_time=in_time)
    document, code = finite(summary.document()), summary.code or 0
    skipped: list[dict[str, Any]] = []
    artifacts: list[str] = []
    if out is not None:
        try:
            with (
                Interrupts(),
                whole_folder(out, found.run_id, last=RESULTS) as folder,
            ):  # also SIGTERM lets it remove what it has begun
                skipped = _write(found, document, folder)
                sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
                kept = sorted(path for path in folder.glob("*/artifacts/**/*") if path.is_file())
                artifacts = [path.relative_to(folder).as_posix() for path in kept]
        except OSError as error:
            if isinstance(error, ReplicasError):
                raise
            why = f"Cannot write {str(error.filename)!r}: {error.strerror}."
            print(inert(f"Error: {why} Nothing was brought."), file=sys.stderr)
            if as_json:
                output.document({**document, "out": None, "skipped": [], "error": why})
            return FAILED
        output.print(f"Wrote {len(sizes)} files, {sum(sizes):,} bytes, to {out}")
        for artifact in artifacts[:MAX_NAMED]:
            output.print(f"  {one_line(artifact)}", "dim")
        if len(artifacts) > MAX_NAMED:
            output.print(f"  … and {len(artifacts) - MAX_NAMED} more artifacts", "dim")
        for left in skipped:
            what = f"the artifact {left['artifact']!r}" if "artifact" in left else f"the log {left['log']!r}"
            output.print(one_line(f"Skipped {what} of rank {left['rank']}: {left['problem']}"), "yellow")
            code = code or (FAILED if left["is_unreadable"] else 0)
    if as_json:
        place = None if out is None else str(out.absolute())
        output.document({**document, "out": place, "artifacts": artifacts, "skipped": skipped})
        return code
    output.print_notes(document)
    if out is None:
        for row in document["replicas"]:
            output.print(output.line(row))
    summary.print_failures(output)
    summary.print_model(output)
    summary.print_warnings(output)
    return code


def _write(run: Run, document: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Write everything a run left into an empty folder; return what was skipped, and why."""
    from executors.run.run import view_of
    from executors.run.run_view import all_artifacts

    view = view_of(run)
    skipped: list[dict[str, Any]] = []
    for rank in run.ranks:
        (folder / str(rank)).mkdir()
        attempts = view.launched(rank)
        for attempt in attempts:
            is_newest = attempt == attempts[-1]
            log = folder / str(rank) / ("output.log" if is_newest else f"output-attempt-{attempt.number}.log")
            if problem := _copy_log(run, attempt, log):
                skipped.append({"rank": rank, "log": log.name, "problem": problem, "is_unreadable": True})
        for artifact in all_artifacts(view, rank):
            if error := _save(artifact, folder / str(rank) / "artifacts"):
                problem = (isinstance(error, OSError) and error.strerror) or str(error)
                is_unreadable = isinstance(error, StoreError)  # else its name is at fault, which others may choose
                left = {"rank": rank, "artifact": artifact.name, "problem": problem, "is_unreadable": is_unreadable}
                skipped.append(left)
    with _named(folder / RESULTS):
        (folder / RESULTS).write_text(strict_json(document) + "\n", encoding="utf-8")
    return skipped


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Have an error of writing name its file: only those of opening do."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:  # else it is no system's error, and has no place for a name
            error.filename = error.filename or str(path)
        raise


def _save(artifact: Artifact, folder: Path) -> Exception | None:
    """Write an artifact below a folder; return the error, where its name or its content is at fault."""
    try:
        with _named(folder / artifact.name):
            artifact.save_below(folder)
    except (StoreError, ValueError) as error:
        return error
    except OSError as error:
        if error.errno not in OF_ITS_NAME:
            raise
        return error
    return None


def _copy_log(run: Run, attempt: Attempt, path: Path) -> str | None:
    """Write all that can be had of the log of an attempt; return why that is not all."""
    problems = list[str]()
    with _named(path), open(path, "wb") as file:
        file.writelines(_pieces(run, attempt, problems))
        is_empty = file.tell() == 0
    if problems and is_empty:
        path.unlink()
    return "; ".join(problems) or None


def _pieces(run: Run, attempt: Attempt, problems: list[str]) -> Iterator[bytes]:
    """Read a log in pieces; what goes wrong here is not what goes wrong with the file that is written."""
    from executors.run.run import view_of
    from executors.run.run_logs import whole_log

    is_begun = False
    try:
        for piece in whole_log(view_of(run), attempt, problems.append):
            is_begun = is_begun or bool(piece)
            yield piece
    except (ReplicasError, OSError) as error:
        file, reason = getattr(error, "filename", None), getattr(error, "strerror", None)
        why = f"{file}: {reason}" if file and reason else str(error)
        problems.append(f"{why} (only its beginning was read)" if is_begun else why)
