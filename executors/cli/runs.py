"""The verbs for runs that were launched before: `ls`, `status`, `wait`, `collect`, `cancel`, `rm`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import BadParameter, Option

from executors.cli.options import (
    BackendOptions,
    ExecutorOption,
    RanksOption,
    RendezvousOption,
    RunArgument,
    RunArguments,
    WaitOption,
    find_run,
)
from executors.cli.output import (
    USAGE,
    JsonOption,
    Output,
    inert,
    name_age,
    name_ranks,
    one_line,
    refuse,
    strict_json,
    usage_errors,
)
from executors.errors import ReplicasError, StoreError
from executors.protocol import OffsetReader, ReplicaStatus

if TYPE_CHECKING:
    from executors.run import Run

EVERY_LINE = 1 << 40
OUT = "A folder for results.json, and for logs and artifacts by rank."


def ls(
    last: Annotated[int, Option("--last", "-n", metavar="N", help="Show only the newest; 0 shows all.")] = 30,
    rendezvous: RendezvousOption = None,
    as_json: JsonOption = False,
) -> int:
    """List runs, the newest last."""
    from executors.run import list_runs

    output = Output(as_json)
    with usage_errors():
        runs = list_runs(rendezvous)
    rows = [_row_of(run) for run in (runs[-last:] if last > 0 else runs)]
    if as_json:
        output.document(rows)
        return 0
    if not rows:
        output.say("No runs. Start one: replicas launch --n 4")
        return 0
    from rich.text import Text

    from executors.cli.table import STYLES, cut, plain_table

    if len(runs) > len(rows):
        output.say(f"… {len(runs) - len(rows)} older: replicas ls --last 0", "dim")
    table = plain_table(
        "run", "backend", "n", "entrypoint", "status", "age", right=("n", "age"), gives_way="entrypoint"
    )
    for row in rows:
        status = Text(row["status"], style=STYLES.get(row["status"], "dim"))
        age = name_age(time.time() - row["created_at"]) if row["created_at"] else ""
        table.add_row(row["run_id"], row["backend"], str(row["world_size"]), cut(row["entrypoint"]), status, age)
    output.say(table)
    for row in rows:
        if row["problem"] is not None:
            output.say(f"{row['run_id']}: {one_line(row['problem'])}", "dim")
    return 0


def _row_of(run: Run) -> dict[str, Any]:
    row = {"run_id": run.run_id, "url": run.url, "backend": "", "world_size": 0, "entrypoint": "", "created_at": 0.0}
    row |= {"status": "unreadable", "problem": None}  # a power cut left half a record, or somebody wrote it
    try:
        record = run.record
        row |= {"backend": record.backend, "world_size": record.world_size, "entrypoint": record.entrypoint}
        row |= {"created_at": record.created_at, "status": "unknown"}  # no such backend here, or the store is away
        row["status"] = str(run.status().status)
    except ReplicasError as error:
        row["problem"] = str(error)
    return row


def status(
    run: RunArgument,
    rendezvous: RendezvousOption = None,
    backend: ExecutorOption = None,
    option: BackendOptions = None,
    as_json: JsonOption = False,
) -> int:
    """Show the status of each replica of a run."""
    from executors.cli.summary import Summary, exit_code, heading
    from executors.cli.table import replica_table, title

    output = Output(as_json)
    found = find_run(run, rendezvous, backend, option)
    now, record = found.status(), found.record
    outcomes = [replica.outcome for replica in now.replicas if replica.outcome is not None]
    summary = Summary(found, outcomes, exit_code(outcomes) if now.is_terminal else None)
    if as_json:
        output.document({**summary.document(), **now.to_json()})
        return 0
    ended_at = max((outcome.finished_at for outcome in outcomes), default=now.at) if now.is_terminal else now.at
    output.say(heading(found), "bold")
    output.say(
        f"launched {name_age(time.time() - record.created_at)} ago by {one_line(record.created_by)}"
        f"{', detached' if record.detach else ''}, in {found.store.url}",
        "dim",
    )
    output.say(title(now, ended_at - record.created_at))
    output.say(replica_table(now))
    summary.print_failures(output)
    return 0


def wait(
    run: RunArgument,
    timeout: WaitOption = None,
    rendezvous: RendezvousOption = None,
    backend: ExecutorOption = None,
    option: BackendOptions = None,
    as_json: JsonOption = False,
) -> int:
    """Wait for the end of a run, showing its status.

    Ctrl-C leaves the run alone. Exit code: as `launch`; 124 also when --timeout was over first.
    """
    from executors.cli.live import watch
    from executors.cli.summary import Summary, heading

    output = Output(as_json)
    found = find_run(run, rendezvous, backend, option)
    output.say(heading(found), "bold")
    in_time = watch(found, output, timeout_s=timeout)
    return Summary.of(found, in_time=in_time).finish(output)


def collect(
    run: RunArgument,
    out: Annotated[Path | None, Option("--out", "-o", metavar="DIR", help=OUT)] = None,
    timeout: WaitOption = None,
    rendezvous: RendezvousOption = None,
    backend: ExecutorOption = None,
    option: BackendOptions = None,
    as_json: JsonOption = False,
) -> int:
    """Fetch the results of a run, its logs and artifacts.

    Waits for its end. Without --out it prints a line of JSON for each replica.

    Exit code: as `launch`; 124 also when --timeout was over first.
    """
    from executors.cli.live import watch
    from executors.cli.summary import Summary

    output = Output(as_json)
    found = find_run(run, rendezvous, backend, option)
    in_time = found.status().is_terminal or watch(found, output, timeout_s=timeout)
    summary = Summary.of(found, in_time=in_time)
    document = summary.document()
    skipped: list[dict[str, Any]] = []
    if out is not None:
        try:
            n_files, n_bytes, skipped = _write(found, document, out)
        except StoreError:
            raise
        except OSError as error:
            refuse(f"Cannot write to {str(out)!r}: {error.strerror}.")
        output.say(f"Wrote {n_files} files, {n_bytes:,} bytes, to {out}")
        for left in skipped:
            name = one_line(repr(left["artifact"]))
            output.say(f"Skipped the artifact {name} of rank {left['rank']}: {one_line(left['problem'])}", "yellow")
    if as_json:
        output.document({**document, "out": None if out is None else str(out.absolute()), "skipped": skipped})
        return summary.code or 0
    if out is None:
        for row in document["replicas"]:
            output.say(json.dumps(row))
    summary.print_failures(output)
    return summary.code or 0


def _write(run: Run, document: dict[str, Any], folder: Path) -> tuple[int, int, list[dict[str, Any]]]:
    """Write everything a run left into a folder; return how many files and bytes, and what was skipped."""
    skipped = []
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "results.json"]
    written[0].write_text(strict_json(document) + "\n")
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
    """Copy a whole log in pieces, if the executor can read it so; else what the executor keeps of it."""
    handle = run.handle(rank)
    with open(path, "wb") as file:
        if handle is not None and isinstance(run.executor, OffsetReader):
            offset, part = 0, b"-"
            while part:
                part, offset = run.executor.read_logs(handle, offset=offset)
                file.write(part)
        if file.tell() == 0:
            file.write(run.logs(rank, EVERY_LINE).encode())


def cancel(
    run: RunArgument,
    rank: RanksOption = None,
    rendezvous: RendezvousOption = None,
    backend: ExecutorOption = None,
    option: BackendOptions = None,
) -> int:
    """Cancel a run, or some of its ranks.

    Returns when they are gone, or the backend has agreed to end them. Replicas that have ended stay as they are.
    """
    output = Output()
    found = find_run(run, rendezvous, backend, option)
    before = found.status()
    with usage_errors():
        for one in rank or (None,):
            found.cancel(one)
    after = found.status()
    alive = {r.rank for r in before.replicas if not r.status.is_terminal and (not rank or r.rank in rank)}
    chosen = [replica for replica in after.replicas if replica.rank in alive]
    ended = [replica.rank for replica in chosen if replica.status is ReplicaStatus.CANCELLED]
    ending = [replica.rank for replica in chosen if not replica.status.is_terminal]
    names = [name_ranks(ended)] if ended else []
    names += [f"{name_ranks(ending)} (still ending)"] if ending else []
    if names:
        output.say(f"Cancelled {found.run_id}: {' and '.join(names)}. Now {after.counts}.")
    else:
        output.say(f"Nothing to cancel in {found.run_id}: {after.counts}.")
    return 0


def rm(
    runs: RunArguments,
    rendezvous: RendezvousOption = None,
    backend: ExecutorOption = None,
    option: BackendOptions = None,
) -> int:
    """Delete runs and all they left: records, logs, artifacts.

    A run that still runs is refused.
    """
    output = Output()
    code = 0
    for run in runs:
        try:
            found = find_run(run, rendezvous, backend, option)
            found.remove()
            output.say(f"Removed {found.run_id} from {found.store.url}")
        except (ReplicasError, BadParameter) as error:
            print(inert(f"Error: {error}"), file=sys.stderr)
            code = USAGE
    return code
