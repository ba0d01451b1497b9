"""`replicas ls`, `status`, `logs` and `wait`: looking at runs, changing nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
from executors.cli.output import Output, name_age, one_line
from executors.errors import ReplicasError
from executors.logs import MAX_READ_BYTES

if TYPE_CHECKING:
    from executors.run import Run

TIMED_OUT = 124


def ls(
    last: Annotated[int, typer.Option("--last", "-n", metavar="N", help="Show only the newest; 0 shows all.")] = 30,
    rendezvous: RendezvousOption = None,
    as_json: JsonOption = False,
) -> int:
    """List runs, the newest last."""
    from executors.known_runs import list_runs

    output = Output(as_json)
    try:
        runs = list_runs(rendezvous)
    except ValueError as error:
        refuse(error)
    shown = runs[-last:] if last > 0 else runs
    rows = [_row_of(run) for run in shown]
    if as_json:
        output.document(rows)
        return 0
    if not rows:
        output.say("No runs. Start one: replicas launch --n 4")
        return 0
    from rich.text import Text

    from executors.cli.table import STYLES, cut, plain_table

    if len(runs) > len(shown):
        output.say(f"… {len(runs) - len(shown)} older: replicas ls --last 0", "dim")
    table = plain_table("run", "backend", "n", "entrypoint", "status", "age", right=("n", "age"))
    for column in table.columns:
        column.no_wrap = column.header != "entrypoint"  # the one that gives way on a narrow terminal
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
    try:
        record = run.record
    except ReplicasError as error:  # a power cut left half a record, or somebody wrote it; `rm` takes it away
        nothing = {"backend": "", "world_size": 0, "entrypoint": "", "created_at": 0.0}
        return {"run_id": run.run_id, "url": run.url, "status": "unreadable", **nothing, "problem": str(error)}
    problem = None
    try:
        status = str(run.status().status)
    except ReplicasError as error:  # its backend is not installed here, or its store is out of reach
        status, problem = "unknown", str(error)
    return {
        "run_id": run.run_id,
        "url": run.url,
        "backend": run.backend,
        "world_size": run.world_size,
        "entrypoint": record.entrypoint,
        "status": status,
        "created_at": record.created_at,
        "problem": problem,
    }


def status(
    run: RunArgument,
    rendezvous: RendezvousOption = None,
    backend: ExecutorOption = None,
    option: ExecutorOptions = None,
    as_json: JsonOption = False,
) -> int:
    """Show how each replica of a run fares."""
    from executors.cli.report import document, exit_code, heading, reference, tell_failures
    from executors.cli.table import replica_table, title

    output = Output(as_json)
    found = find_run(run, rendezvous, backend, option)
    now = found.status()
    if as_json:
        rows = now.to_json()["replicas"]
        ended = [replica.outcome for replica in now.replicas if replica.outcome is not None]
        about = document(found, ended, exit_code(ended) if now.is_terminal else None)
        output.document({**about, "status": now.status, "joined": now.joined, "replicas": rows})
        return 0
    record = found.record
    outcomes = [replica.outcome for replica in now.replicas if replica.outcome is not None]
    ended_at = max((outcome.finished_at for outcome in outcomes), default=now.at) if now.is_terminal else now.at
    output.say(heading(found), "bold")
    output.say(
        f"launched {name_age(time.time() - record.created_at)} ago by {one_line(record.created_by)}"
        f"{', detached' if record.detach else ''}, in {found.store.url}",
        "dim",
    )
    output.say(title(now, ended_at - record.created_at))
    output.say(replica_table(now))
    tell_failures(output, reference(found), outcomes)
    return 0


def logs(
    run: RunArgument,
    rank: Annotated[
        list[int] | None,
        typer.Option("--rank", "-r", metavar="R", help="Only this rank. Repeatable.", show_default=False),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines until the run ends.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", metavar="N", help="The last lines of each replica.")] = 200,
    rendezvous: RendezvousOption = None,
    backend: ExecutorOption = None,
    option: ExecutorOptions = None,
) -> int:
    """Print what replicas wrote to stdout and stderr.

    Lines of more than one rank are led by `\\[rank]`.
    """
    found = find_run(run, rendezvous, backend, option)
    ranks: Any = rank[0] if rank and len(rank) == 1 else rank or list(range(found.world_size))
    if lines < 0:
        refuse(f"--lines must be at least 0, got {lines}.")
    try:
        if follow:
            _print_all(found.logs(ranks, lines, follow=True), flush=True)
        elif isinstance(ranks, int):
            _print_all(_noting_cuts([found.logs(ranks, lines)]))
        else:  # one at a time: each is bounded, all together need not be
            _print_all(_noting_cuts(found.logs([one], lines) for one in ranks))
    except ValueError as error:
        refuse(error)
    return 0


def _noting_cuts(texts: Iterable[str]) -> Iterator[str]:
    """Pass logs on, and say when there was more than a reader holds."""
    for text in texts:
        yield text
        if len(text) >= MAX_READ_BYTES:
            most = f"{MAX_READ_BYTES >> 20} MiB"
            print(f"Note: these are the last {most}; `replicas collect --out DIR` brings all.", file=sys.stderr)


def _print_all(texts: Iterable[str], *, flush: bool = False) -> None:
    last = "\n"
    for text in texts:
        sys.stdout.write(text)
        last = text[-1:] or last
        if flush:
            sys.stdout.flush()
    if last != "\n":
        sys.stdout.write("\n")


def wait(
    run: RunArgument,
    timeout: TimeoutOption = None,
    rendezvous: RendezvousOption = None,
    backend: ExecutorOption = None,
    option: ExecutorOptions = None,
    as_json: JsonOption = False,
) -> int:
    """Wait for a run's end, showing how it fares.

    Ctrl-C leaves the run alone. Exit code: as `launch`; 124 also when --timeout was over first.
    """
    from executors.cli.report import document, exit_code, heading, tell

    output = Output(as_json)
    found = find_run(run, rendezvous, backend, option)
    output.say(heading(found), "bold")
    in_time = watch(found, output, timeout)
    outcomes = found.outcomes()
    code = exit_code(outcomes) if in_time else TIMED_OUT
    if in_time:
        tell(output, found, outcomes)
    if as_json:
        output.document(document(found, outcomes, code))
    return code


def watch(run: Run, output: Output, timeout_s: float | None) -> bool:
    """Show a run until its end; False if the time was over first. Ctrl-C leaves the run alone."""
    from executors.cli.following import follow, open_view
    from executors.cli.report import reference

    deadline = None if timeout_s is None else time.monotonic() + timeout_s

    def sleep(seconds: float) -> None:
        left_s = seconds if deadline is None else deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        time.sleep(min(seconds, left_s))

    view = open_view(output, run, hint="Ctrl-C stops watching; the run goes on.")
    try:
        follow(run, view, sleep)
    except TimeoutError:
        view.close()
        output.say(f"Not over after {timeout_s:g} s; the run goes on: replicas wait {reference(run)}", "yellow")
        return False
    except KeyboardInterrupt:
        view.close()
        output.say(f"Stopped watching; the run goes on: replicas wait {reference(run)}", "yellow")
        raise
    finally:
        view.close()
    return True
