"""`replicas collect`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from executors.cli.looking import TIMED_OUT, watch
from executors.cli.options import (
    ExecutorOption,
    ExecutorOptions,
    JsonOption,
    RendezvousOption,
    RunArgument,
    TimeoutOption,
    find_run,
    refuse,
)
from executors.cli.output import Output, one_line, strict_json
from executors.errors import StoreError

if TYPE_CHECKING:
    from executors.run import Run

EVERY_LINE = 1 << 40


def collect(
    run: RunArgument,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="Write results.json, and logs and artifacts by rank, there."),
    ] = None,
    timeout: TimeoutOption = None,
    rendezvous: RendezvousOption = None,
    backend: ExecutorOption = None,
    option: ExecutorOptions = None,
    as_json: JsonOption = False,
) -> int:
    """Bring back what a run returned, its logs and artifacts.

    Waits for its end. Without --out it prints a line of JSON for each replica.

    Exit code: as `launch`; 124 also when --timeout was over first.
    """
    from executors.cli.report import document, exit_code, reference, tell_failures

    output = Output(as_json)
    found = find_run(run, rendezvous, backend, option)
    in_time = True
    if not found.status().is_terminal:
        in_time = watch(found, output, timeout)
    outcomes = found.outcomes()
    code = exit_code(outcomes) if in_time else TIMED_OUT
    about = document(found, outcomes, code)
    skipped: list[dict[str, Any]] = []
    if out is not None:
        try:
            n_files, n_bytes, skipped = _write(found, about, out)
        except StoreError:
            raise
        except OSError as error:
            refuse(f"Cannot write to {str(out)!r}: {error.strerror}.")
        output.say(f"Wrote {n_files} files, {n_bytes:,} bytes, to {out}")
        for left in skipped:
            name = one_line(repr(left["artifact"]))
            output.say(f"Skipped the artifact {name} of rank {left['rank']}: {one_line(left['problem'])}", "yellow")
    if as_json:
        output.document({**about, "out": None if out is None else str(out.absolute()), "skipped": skipped})
    elif out is None:
        for row in about["replicas"]:
            output.say(json.dumps(row))
    if not as_json:
        tell_failures(output, reference(found), outcomes)
    return code


def _write(run: Run, about: dict[str, Any], folder: Path) -> tuple[int, int, list[dict[str, Any]]]:
    """Write everything there is of a run into a folder; return how many files and bytes, and what was skipped."""
    skipped = []
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "results.json"]
    written[0].write_text(strict_json(about) + "\n")
    for rank in range(run.world_size):
        log = folder / str(rank) / "output.log"
        log.parent.mkdir(exist_ok=True)
        _copy_log(run, rank, log)
        written.append(log)
        for artifact in run.all_artifacts(rank):
            try:
                written.append(artifact.save_below(folder / str(rank) / "artifacts"))
            except (OSError, StoreError, ValueError) as error:
                problem = getattr(error, "strerror", None) or str(error)
                skipped.append({"rank": rank, "artifact": artifact.name, "problem": problem})
    return len(written), sum(path.stat().st_size for path in written), skipped


def _copy_log(run: Run, rank: int, path: Path) -> None:
    """Copy a whole log in pieces, where the executor can read it so; else what it keeps of it."""
    handle = run.handle(rank)
    with open(path, "wb") as file:
        if handle is not None and hasattr(run.executor, "read_logs"):
            offset, part = 0, b"-"
            while part:
                part, offset = run.executor.read_logs(handle, offset=offset)
                file.write(part)
        if file.tell() == 0:
            file.write(run.logs(rank, EVERY_LINE).encode())
