"""The verb `collect`, which brings results, logs and artifacts of a run into a folder: all of them, or none."""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from executors.cli.documents import CollectDocument, SkippedFile
from executors.cli.options import (
    BackendOptions,
    ExecutorOption,
    RendezvousOption,
    RunArgument,
    WaitOption,
    find_run,
    parse_path,
)
from executors.cli.output import FAILED, TIMED_OUT, JsonOption, Output, finite, inert, one_line, strict_json, versioned
from executors.cli.verb_help import EXIT_CODES, describe
from executors.cli.whole_folder import whole_folder
from executors.errors import ReplicasError, StoreError

if TYPE_CHECKING:
    from executors.attempt import Attempt
    from executors.run.run import Run
    from executors.store.artifacts import Artifact

OUT = "The folder for results.json, and for the logs and artifacts of each rank. Default: print the results."
RESULTS = "results.json"
MAX_NAMED = 8  # the number of artifacts that are listed; further ones are only counted
NAME_ERRORS = (None, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ)


@describe(
    examples=["replicas collect RUN --out results", "replicas collect RUN --timeout 1h --json"],
    exit_codes={
        **EXIT_CODES,
        FAILED: "A replica failed, or a log or the folder could not be read or written.",
        TIMED_OUT: "Replicas reached a time limit, or --timeout ended the wait.",
    },
)
def collect(
    run: RunArgument,
    out: Annotated[Path | None, Option("--out", "-o", metavar="DIR", parser=parse_path, help=OUT)] = None,
    timeout: WaitOption = None,
    rendezvous: RendezvousOption = None,
    backend: ExecutorOption = None,
    option: BackendOptions = None,
    as_json: JsonOption = False,
) -> int:
    """Fetch the results, logs and artifacts of a run.

    The command waits for the end of the run. Without --out it prints one line of JSON for each replica.
    """
    from executors.cli.live import Interrupts, watch
    from executors.cli.summary import Summary

    output = Output(as_json)
    found = find_run(run, rendezvous, backend, option)
    in_time = found.status(reports=False).is_terminal or watch(found, output, timeout_s=timeout)
    summary = Summary.of(found, in_time=in_time)
    whole, code = summary.document(), summary.code or 0
    document = finite(whole)
    skipped: list[SkippedFile] = []
    artifacts: list[str] = []
    if out is not None:
        try:
            # `Interrupts` also turns SIGTERM into an exception, so that an incomplete folder is removed.
            with Interrupts(), whole_folder(out, found.run_id, last=RESULTS) as folder:
                skipped = _write(found, document, folder)
                sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
                kept = sorted(path for path in folder.glob("*/artifacts/**/*") if path.is_file())
                artifacts = [path.relative_to(folder).as_posix() for path in kept]
        except OSError as error:
            if isinstance(error, ReplicasError):
                raise
            why = f"Cannot write {str(error.filename)!r}: {error.strerror}."
            print(inert(f"Error: {why} No file was written to {str(out)!r}."), file=sys.stderr)
            if as_json:
                refused: CollectDocument = {**whole, "out": None, "artifacts": [], "skipped": [], "error": why}
                output.document(refused)
            return FAILED
        output.print(f"Wrote {len(sizes)} files, {sum(sizes):,} bytes, to {out}")
        for artifact in artifacts[:MAX_NAMED]:
            output.print(f"  {one_line(artifact)}", "dim")
        if len(artifacts) > MAX_NAMED:
            output.print(f"  … and {len(artifacts) - MAX_NAMED} more artifacts", "dim")
        for left in skipped:
            name = f"the artifact {left['artifact']!r}" if "artifact" in left else f"the log {left['log']!r}"
            output.print(one_line(f"Skipped {name} of rank {left['rank']}: {left['problem']}"), "yellow")
            code = code or (FAILED if left["is_unreadable"] else 0)
    if as_json:
        place = None if out is None else str(out.absolute())
        collected: CollectDocument = {**whole, "out": place, "artifacts": artifacts, "skipped": skipped, "error": None}
        output.document(collected)
        return code
    output.print_notes(document)
    if out is None:
        for row in document["replicas"]:
            output.print(output.line(row))
    summary.print_failures(output)
    summary.print_model(output)
    summary.print_warnings(output)
    return code


def _write(run: Run, document: dict[str, Any], folder: Path) -> list[SkippedFile]:
    """Write the results, logs and artifacts of a run into an empty folder.

    Returns:
        A row for each log and artifact that could not be written, with the problem.
    """
    from executors.run.run import view_of
    from executors.view.run_view import all_artifacts

    view = view_of(run)
    skipped: list[SkippedFile] = []
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
                # Otherwise the name of the artifact is the problem. Replicas choose these names, so that does not end
                # the command.
                is_unreadable = isinstance(error, StoreError)
                skipped.append(
                    {"rank": rank, "artifact": artifact.name, "problem": problem, "is_unreadable": is_unreadable}
                )
    with _named(folder / RESULTS):
        (folder / RESULTS).write_text(strict_json(versioned(document)) + "\n", encoding="utf-8")
    return skipped


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Add the name of a file to an error within the block. Python adds the name only if opening the file fails."""
    try:
        yield
    except OSError as error:
        # an OSError without a number is not from the operating system, and cannot hold a name
        if error.errno is not None:
            error.filename = error.filename or str(path)
        raise


def _save(artifact: Artifact, folder: Path) -> Exception | None:
    """Write an artifact below a folder. Return the error if the name or the content of the artifact caused it."""
    try:
        with _named(folder / artifact.name):
            artifact.save_below(folder)
    except (StoreError, ValueError) as error:
        return error
    except OSError as error:
        if error.errno not in NAME_ERRORS:
            raise
        return error
    return None


def _copy_log(run: Run, attempt: Attempt, path: Path) -> str | None:
    """Write the readable part of the log of an attempt. Return the problem if a part is missing."""
    problems = list[str]()
    with _named(path), open(path, "wb") as file:
        file.writelines(_pieces(run, attempt, problems))
        is_empty = file.tell() == 0
    if problems and is_empty:
        path.unlink()
    return "; ".join(problems) or None


def _pieces(run: Run, attempt: Attempt, problems: list[str]) -> Iterator[bytes]:
    """Yield a log in pieces, and append read errors to a list, so that the caller sees only errors of writing."""
    from executors.run.run import view_of
    from executors.view.run_logs import whole_log

    is_begun = False
    try:
        for piece in whole_log(view_of(run), attempt, problems.append):
            is_begun = is_begun or bool(piece)
            yield piece
    except (ReplicasError, OSError) as error:
        file, reason = getattr(error, "filename", None), getattr(error, "strerror", None)
        why = f"{file}: {reason}" if file and reason else str(error)
        problems.append(f"{why} (only its beginning was read)" if is_begun else why)
