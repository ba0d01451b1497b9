"""The verb `export`, which writes the measurements of a run for TensorBoard or as a table."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from executors.cli.options import BackendOptions, ExecutorOption, RendezvousOption, RunArgument, find_run, parse_path
from executors.cli.output import JsonOption, Output, one_line, raise_write_error, refuse
from executors.cli.verb_help import describe

if TYPE_CHECKING:
    from executors.run.run import Run

TENSORBOARD = "Write event files for TensorBoard: a folder for each rank, and `anchor`. Existing files stay."
CSV = "Write a table with one line for each row."
JSONL = "Write one line of JSON for each row."
FOLLOW = "Continue until the run has ended. Event files grow, and the other files are written again."
LEAST_PAUSE_S = 5.0  # the interval, in seconds, at which replicas write measurements
SHARE = 0.1  # the largest share of the time that is spent on reading while a run is followed


@describe(examples=["replicas export RUN --csv run.csv", "replicas export RUN --tensorboard logs --follow"])
def export(
    run: RunArgument,
    tensorboard: Annotated[
        Path | None, Option("--tensorboard", metavar="DIR", parser=parse_path, help=TENSORBOARD)
    ] = None,
    csv: Annotated[Path | None, Option("--csv", metavar="FILE", parser=parse_path, help=CSV)] = None,
    jsonl: Annotated[Path | None, Option("--jsonl", metavar="FILE", parser=parse_path, help=JSONL)] = None,
    follow: Annotated[bool, Option("--follow", "-f", help=FOLLOW)] = False,
    rendezvous: RendezvousOption = None,
    backend: ExecutorOption = None,
    option: BackendOptions = None,
    as_json: JsonOption = False,
) -> int:
    """Write the measurements of a run: losses, rounds, usage.

    Give at least one of --tensorboard, --csv and --jsonl. An export that is started again writes no event twice.
    """
    output = Output(as_json)
    if tensorboard is None and csv is None and jsonl is None:
        refuse("No format was given. Add --tensorboard DIR, --csv FILE or --jsonl FILE.")
    files = {"tensorboard": tensorboard, "csv": csv, "jsonl": jsonl}
    given: dict[str, Path] = {}
    for path in files.values():
        if path is not None and (twice := given.setdefault(os.path.realpath(path), path)) is not path:
            refuse(f"{str(twice)!r} is given for two formats. Give each format its own path.")
    found = find_run(run, rendezvous, backend, option)
    paths = {name: str(path) for name, path in files.items() if path is not None}
    try:
        made = _export(found, tensorboard, csv, jsonl, follow, output)
    except OSError as error:
        raise_write_error(error.filename or ", ".join(paths.values()), error)
    if as_json:
        document: Any = {"run_id": found.run_id, **paths, **made}  # the names of the formats are keys of the document
        output.document(document)
    places = ", ".join(str(path) for path in files.values() if path is not None)
    events = "" if tensorboard is None else f" ({made['events']} new events)"
    output.print(f"Wrote {made['rows']} rows of {found.run_id} to {places}{events}.")
    for problem in made["problems"]:
        output.print(one_line(problem), "yellow")
    return 0


def _export(
    run: Run, tensorboard: Path | None, csv: Path | None, jsonl: Path | None, follow: bool, output: Output
) -> dict[str, Any]:
    """Write the files, repeatedly if the run is followed, and return the number of rows and events."""
    from executors.metrics.metrics import read_metrics
    from executors.run.run import view_of
    from executors.view.report.tables import write_csv, write_jsonl

    view = view_of(run)
    kept: dict[str, memoryview] | None = {} if follow else None
    n_events, metrics = 0, None
    with contextlib.ExitStack() as stack:
        events = None
        if tensorboard is not None:
            from executors.view.report.tensorboard import open_event_files

            events = stack.enter_context(open_event_files(tensorboard, run.run_id, view.record.created_at))
        on_progress = stack.enter_context(output.busy(f"{'Following' if follow else 'Reading'} {run.run_id}"))
        for pause_s in view.reader.pauses():
            began = time.monotonic()
            # Read the state before the rows. In the opposite order, the last rows of a run could be missed.
            is_over = run.status(reports=False).is_terminal
            before, metrics = metrics, read_metrics(view.store, run.run_id, view.record, kept)
            if before is None or len(before) != len(metrics) or is_over:
                if csv is not None:
                    write_csv(metrics, csv)
                if jsonl is not None:
                    write_jsonl(metrics, jsonl)
                if events is not None:
                    n_events += events.write(metrics, is_over=is_over)
            if is_over or not follow:
                break
            on_progress(f"{len(metrics)} rows")
            run.wait(max(pause_s, LEAST_PAUSE_S, (time.monotonic() - began) / SHARE))
    assert metrics is not None
    return {"rows": len(metrics), "events": n_events, "is_over": is_over, "problems": list(metrics.problems)}
