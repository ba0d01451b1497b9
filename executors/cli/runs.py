"""The verbs `ls`, `status`, `wait`, `cancel` and `rm`, for runs that were launched earlier."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Annotated

from typer import BadParameter, Option

from executors.attempt import Attempt
from executors.attempt.handles import name_of_job, page_of_job
from executors.cli.documents import (
    CancelDocument,
    CancelWithoutStoreDocument,
    ListedRun,
    RemovedDocument,
    RunsDocument,
    RunStatusDocument,
    StatusReplica,
    UnlaunchedDocument,
)
from executors.cli.options import (
    BackendOptions,
    ColumnsOption,
    ExecutorOption,
    RanksOption,
    RendezvousOption,
    RunArgument,
    RunArguments,
    WaitOption,
    find_run,
    make_executor,
    options_of,
)
from executors.cli.output import (
    FAILED,
    TIMED_OUT,
    USAGE,
    JsonOption,
    Output,
    inert,
    name_age,
    name_duration,
    name_ranks,
    one_line,
    usage_errors,
)
from executors.cli.verb_help import EXIT_CODES, describe
from executors.errors import (
    BackendError,
    CorruptObjectError,
    ReplicasError,
    RunBeingRemovedError,
    RunNotFoundError,
    StoreError,
)
from executors.protocol import ReplicaStatus
from executors.registry.run_index import find_preparation
from executors.status import MAX_DECIDED, MAX_LINE, describe_warnings
from executors.store.parallel import at_store, within
from executors.store.record_names import HEARTBEAT
from executors.store.url import is_near, split_address
from executors.task.entrypoint import shown

if TYPE_CHECKING:
    from executors.run.run import Run

FIND_S = 10.0  # seconds that `cancel` waits for the store, at most twice, before it asks only the service
SILENT_S = 60.0  # seconds; a spare writes a heartbeat every 10 s, so a much older one means that it does not answer
SLOW = 1.5  # rounds that take this many times the plan are shown in yellow
BEING_REMOVED = "being removed"
CHECK = "Print only the ranks that may hang, wait for a restart or were given up. Exit code 1 if there are any."
VERBOSE = "Also name the job of each rank at its service, and the processes of replicas that have several."
LAST = "Show the N newest runs. 0 shows all."


@describe(examples=["replicas ls", "replicas ls --last 0 --rendezvous s3://BUCKET/runs"])
def ls(
    last: Annotated[int, Option("--last", "-n", metavar="N", help=LAST)] = 30,
    rendezvous: RendezvousOption = None,
    as_json: JsonOption = False,
) -> int:
    """List runs, the newest last."""
    from executors.run.lookup import list_runs

    output = Output(as_json)
    with usage_errors():
        runs = list_runs(rendezvous)
    n_runs = len(runs)
    n_rows = min(last, n_runs) if last > 0 else n_runs
    del runs[: n_runs - n_rows]
    # Drop each run after its row is printed. A run caches all records that were read, and thousands of runs would fill
    # the memory.
    rows = [_row_of(runs.pop(0)) for _ in range(n_rows)]
    if as_json:
        listed: RunsDocument = {"runs": rows}
        output.document(listed)
        return 0
    if not rows:
        output.print("No runs. Start one: replicas launch --n 4")
        return 0
    from rich.text import Text

    from executors.cli.table import STYLES, cut, plain_table

    if n_runs > n_rows:
        output.print(f"… {n_runs - n_rows} older runs: replicas ls --last 0", "dim")
    table = plain_table(
        "run", "backend", "n", "entrypoint", "status", "age", right=("n", "age"), gives_way="entrypoint"
    )
    for row in rows:
        status = Text(row["status"], style=STYLES.get(row["status"], "dim"))
        age = name_age(time.time() - row["created_at"]) if row["created_at"] else ""
        table.add_row(row["run_id"], row["backend"], str(row["n"]), cut(shown(row["entrypoint"])), status, age)
    output.print(table)
    for row in rows:
        if row["problem"] is not None:
            output.print(f"{row['run_id']}: {one_line(row['problem'])}", "dim")
    return 0


def _row_of(run: Run) -> ListedRun:
    """Return the row of a run in the list.

    If the run cannot be read, the row has the problem, and no error is raised.
    """
    from executors.run.run import view_of

    view = view_of(run)
    row: ListedRun = {
        "run_id": run.run_id,
        "url": run.url,
        "backend": "",
        "world_size": 0,
        "n": 0,
        "entrypoint": "",
        "created_at": 0.0,
        "status": "unreadable",  # true if a power failure left half a record, or another program wrote the record
        "problem": None,
    }
    try:
        record = view.record
        n = record.world_size
        row |= {"backend": record.backend, "world_size": n, "n": n, "entrypoint": record.entrypoint}
        # This happens if the backend is not installed on this machine, or the store does not answer.
        row |= {"created_at": record.created_at, "status": "unknown"}
        view.check_not_removed()
        now = run.status()
        row |= {"status": str(now.status), "backend": now.backend, "n": len(now.replicas)}
    except RunBeingRemovedError as error:
        row |= {"status": BEING_REMOVED, "problem": str(error)}
    except ReplicasError as error:
        row["problem"] = str(error)
        if not is_near(view.store.url) and not isinstance(error, CorruptObjectError):
            row["status"] = "unknown"
    return row


@describe(
    examples=["replicas status RUN", "replicas status RUN --check", "replicas status s3://BUCKET/runs/RUN --json"],
    exit_codes={
        0: "The state was shown.",
        FAILED: "--check has found a rank.",
        USAGE: "No such run, or a wrong option.",
    },
)
def status(
    run: RunArgument,
    rendezvous: RendezvousOption = None,
    backend: ExecutorOption = None,
    option: BackendOptions = None,
    columns: ColumnsOption = None,
    verbose: Annotated[bool, Option("--verbose", "-v", help=VERBOSE)] = False,
    check: Annotated[bool, Option("--check", help=CHECK)] = False,
    as_json: JsonOption = False,
) -> int:
    """Show the status of each replica of a run."""
    from executors.cli.live import warn_of_unknown_columns
    from executors.cli.plan_check import compare_with_plan
    from executors.cli.summary import Summary, code_of, heading, reference
    from executors.cli.table import replica_table, title
    from executors.run.run import view_of
    from executors.view.progress import bars
    from executors.view.report.uptime import uptime_document, wants_attention
    from executors.view.run_view import known_members

    output = Output(as_json)
    try:
        found = find_run(run, rendezvous, backend, option)
        view = view_of(found)
        view.check_not_removed()
    except RunBeingRemovedError as error:
        run_id = split_address(run)[1] if "/" in run else run
        shown_as: UnlaunchedDocument = {"run_id": run_id, "status": "being removed", "problem": str(error)}
        output.document(shown_as) if as_json else output.print(str(error))
        return 0
    except RunNotFoundError:
        named = run.rstrip("/")
        # The records of a launch on this machine are for the default rendezvous. Another rendezvous may have another
        # run with the same id.
        is_elsewhere = rendezvous is not None or "/" in named
        if is_elsewhere or (preparation := find_preparation(named)) is None:
            raise
        text = preparation.describe(run)
        prepared: UnlaunchedDocument = {
            "run_id": run,
            "status": "preparing" if preparation.is_going_on else "never started",
            "problem": text,
        }
        output.document(prepared) if as_json else output.print(text)
        return 0
    refusal: BackendError | None = None
    try:
        now = found.status()
    except BackendError as error:  # show the states in the store, which are better than no answer
        now, refusal = view.recorded_status(), error
    record = view.record
    outcomes = [replica.outcome for replica in now.replicas if replica.outcome is not None]
    summary = Summary(found, outcomes, code_of(found, outcomes) if now.is_terminal else None)
    # Look up handles by rank and not by position: joined replicas have no handle, and ranks may have been added since.
    handles = {each.rank: each for each in found.handles if each is not None} if as_json or verbose else {}
    attention = wants_attention(now, view.reader.records.inventory, view.newest_attempt) if as_json or check else {}
    if check and not as_json:
        for rank, why in attention.items():
            output.print(f"rank {rank} {one_line(why)}", "red")
        return FAILED if attention else 0
    compared, spares = compare_with_plan(found), _describe_spares(found)
    if as_json:
        up = uptime_document(now, record.created_at, view.newest_attempt)
        state = now.to_json()
        rows: list[StatusReplica] = [
            {
                **row,
                **more,
                "page": page_of_job(handles.get(row["rank"])),
                "procs": known_members(view, row["rank"]),
            }
            for row, more in zip(state["replicas"], up["replicas"], strict=True)
        ]
        document: RunStatusDocument = {
            **summary.launch_fields(),
            **state,
            "availability": up["availability"],
            "flakiness": up["flakiness"],
            "attention": {str(rank): why for rank, why in attention.items()},
            "spares": spares,
            "plan": None if compared is None else compared.to_json(),
            "backend_problem": None if refusal is None else str(refusal),
            "replicas": rows,
        }
        output.document(document)
        return FAILED if check and attention else 0
    output.print(heading(found, n=len(now.replicas)), "bold")
    output.print(
        f"launched {name_age(time.time() - record.created_at)} ago by {one_line(record.created_by)}"
        f"{', detached' if record.settings.detach else ''}, in {view.store.url}",
        "dim",
    )
    if refusal is not None:
        text = f"The backend did not answer, so the states below are those in the store: {refusal}"
        output.print(one_line(text, MAX_LINE), "yellow", wrap=True)
    output.print(title(now, now.last_at - record.created_at))
    if bar := bars(now):
        output.print(bar)
    output.print(replica_table(now, width=output.console.width, more=columns, brief=True))
    for number, words in enumerate(spares):
        output.print(f"spare {number} {one_line(words)}", "dim")
    if compared is not None:
        output.print(compared.describe(), "yellow" if compared.ratio >= SLOW else "dim")
    for each in now.decided[-MAX_DECIDED:]:
        output.print(f"[{name_duration(each.at - record.created_at):>6}] {one_line(each.line, MAX_LINE)}", "yellow")
    for doubt in now.doubts:
        output.print(one_line(doubt, MAX_LINE), "yellow", wrap=True)
    if found_warnings := now.warnings:
        line = describe_warnings(found_warnings, now.n_warnings, reference(found))
        output.print(one_line(line, MAX_LINE), "yellow", wrap=True)
    warn_of_unknown_columns(columns or (), now)
    for replica in now.replicas:
        if (job := name_of_job(handles.get(replica.rank))) is not None:
            output.print(f"rank {replica.rank}: {one_line(job)}", "dim")
        if verbose:
            n, outcome = known_members(view, replica.rank), replica.outcome
            if n != 1:
                count = "its processes are counted where it starts" if n is None else f"{n} processes"
                output.print(f"rank {replica.rank}: {count}", "dim")
            for line in () if outcome is None else outcome.describe_members():
                output.print(f"  {one_line(line)}", "dim")
    summary.print_failures(output)
    return 0


def _describe_spares(run: Run) -> list[str]:
    """Return a line about the state of each spare."""
    from executors.run.run import view_of

    view = view_of(run)
    if not view.record.settings.spares:
        return []
    # One listing of keys is cheaper than a read for each record that may not exist.
    left = {entry.key for entry in view.store.list(f"{run.run_id}/spares/")}
    spares = [Attempt(view.store, run.run_id, number, is_spare=True) for number in range(view.record.settings.spares)]
    return at_store(view.store, lambda spare: _describe_spare(spare, left), spares)


def _describe_spare(spare: Attempt, left: Collection[str]) -> str:
    """Return a line about the state of a spare.

    Args:
        spare: the attempt of the spare.
        left: the keys that exist. Only these records are read.
    """
    try:
        # In a signed run, hexadecimal digits follow the name of the record.
        has_ended = any(key.startswith(spare.key("outcome")) for key in left)
        end = spare.outcome() if has_ended else None
        beat = spare.beat() if end is None and spare.key(HEARTBEAT) in left else None
    except CorruptObjectError as error:
        return f"cannot be read: {error}"
    if end is not None:
        is_used = end.status is ReplicaStatus.SUCCEEDED
        return f"became {end.result}" if is_used else (end.error or end.status).removeprefix("The spare ")
    if beat is None:
        return "starts"
    age_s = time.time() - beat.at
    return "stands by" if age_s < SILENT_S else f"does not answer; its last heartbeat was {name_age(age_s)} ago"


@describe(
    examples=["replicas wait RUN", "replicas wait RUN --timeout 30m"],
    exit_codes={**EXIT_CODES, TIMED_OUT: "Replicas reached a time limit, or --timeout ended the wait."},
)
def wait(
    run: RunArgument,
    timeout: WaitOption = None,
    rendezvous: RendezvousOption = None,
    backend: ExecutorOption = None,
    option: BackendOptions = None,
    columns: ColumnsOption = None,
    as_json: JsonOption = False,
) -> int:
    """Show the status of a run until it ends.

    Ctrl-C stops watching. The run continues.
    """
    from executors.cli.live import watch
    from executors.cli.summary import Summary, heading
    from executors.run.run import view_of

    output = Output(as_json)
    found = find_run(run, rendezvous, backend, option)
    view_of(found).check_not_removed()
    output.print(heading(found), "bold")
    in_time = watch(found, output, timeout_s=timeout, columns=columns)
    return Summary.of(found, in_time=in_time).finish(output)


@describe(
    examples=["replicas cancel RUN", "replicas cancel RUN --rank 3,5-7", "replicas cancel RUN --backend modal"],
    exit_codes={
        0: "The replicas are ended, or had ended before.",
        USAGE: "A wrong option, or a backend did not answer.",
    },
)
def cancel(
    run: RunArgument,
    rank: RanksOption = None,
    rendezvous: RendezvousOption = None,
    backend: ExecutorOption = None,
    option: BackendOptions = None,
    as_json: JsonOption = False,
) -> int:
    """Cancel a run, or some of its ranks.

    The command returns when the replicas have ended, or when the backend has agreed to end them. If the rendezvous does
    not answer, the machine that launched the run asks the backend. Other machines need --backend.
    """
    from executors.run.run import manager_of, view_of
    from executors.run.without_store import end_without_store, where_is

    output = Output(as_json)
    problems: list[BackendError] = []
    try:
        # Wait a few seconds for a store that does not answer. Then end the jobs by this machine's records and the
        # service's list of jobs.
        found = within(FIND_S, lambda: find_run(run, rendezvous, backend, option), where_is(run, rendezvous))
        view = view_of(found)
        with _collect_errors(problems):
            before = within(FIND_S, lambda: found.status(reports=False), view.store.url)
    except (RunNotFoundError, StoreError) as error:
        given = None if backend is None else make_executor(backend, options_of(backend, option, None))
        said = end_without_store(
            run, rendezvous, given, rank or None, error, lambda words: output.print(words, "yellow")
        )
        output.print(said, "yellow")
        if as_json:
            output.document(_without_store(run, f"{said} {error}"))
        return 0
    with usage_errors():
        for one in rank or ():
            view.check_rank(one)
    failed: list[BackendError] = []
    with _collect_errors(failed):
        found.cancel(rank or None)
    manager = manager_of(found)
    if manager.canceller.was_ended_without_store:
        if as_json:
            said = "The jobs of the run were ended at their service. The store does not answer."
            output.document(_without_store(run, said))
        return 0
    with _collect_errors(problems):
        after = found.status(reports=False)
    if problems or failed:
        subject = f"{name_ranks(rank)} of {found.run_id}" if rank else found.run_id
        text = f"Cancelled {subject} in its store, which the replicas read. Its backend did not answer every request:"
        output.print(text, "yellow")
        # The error of the cancel names the jobs that still run, and the command that ends them.
        raise (failed or problems)[-1]
    alive = {r.rank for r in before.replicas if not r.status.is_terminal and (not rank or r.rank in rank)}
    chosen = [replica for replica in after.replicas if replica.rank in alive]
    awaited = {replica.rank for replica in before.replicas if replica.restart.is_awaited}
    ended = [r.rank for r in chosen if r.status is ReplicaStatus.CANCELLED or (r.rank in awaited and r.is_over)]
    ending = [replica.rank for replica in chosen if not replica.status.is_terminal]
    names = [name_ranks(ended)] if ended else []
    names += [f"{name_ranks(ending)} (still ending)"] if ending else []
    if names:
        output.print(f"Cancelled {found.run_id}: {' and '.join(names)}. Now {after.counts}.")
    elif not manager.n_withdrawn:
        output.print(f"Nothing to cancel in {found.run_id}: {after.counts}.")
    if manager.n_withdrawn:
        jobs = "1 job" if manager.n_withdrawn == 1 else f"{manager.n_withdrawn} jobs"
        output.print(f"Deleted {jobs} of {found.run_id} that a queue would have started again.")
    if as_json:
        document: CancelDocument = {**after.to_json(), "cancelled": ended, "still_ending": ending}
        output.document(document)
    return 0


def _without_store(run: str, problem: str) -> CancelWithoutStoreDocument:
    """Return the document of a cancel at the service alone."""
    return {"run_id": run, "cancelled": None, "still_ending": None, "problem": problem}


@contextlib.contextmanager
def _collect_errors(problems: list[BackendError]) -> Iterator[None]:
    """Append the error of a backend to a list and continue, because a run can also be cancelled through its store."""
    try:
        yield
    except BackendError as error:
        problems.append(error)


def _hint_on_running_jobs(run: str, error: Exception) -> str:
    """Return advice on how to end the jobs of a run whose store does not answer.

    Empty if this machine knows of no jobs.
    """
    from executors.run.job_notes import noted_jobs

    name = run.rstrip("/").rpartition("/")[2]
    if not isinstance(error, StoreError) or isinstance(error, CorruptObjectError):
        return ""
    with contextlib.suppress(ReplicasError, ValueError):
        if noted_jobs(name):
            return f" Its jobs may still run. To end them at their service: replicas cancel {run}"
    return ""


@describe(
    examples=["replicas rm RUN", "replicas rm RUN OTHER_RUN --rendezvous s3://BUCKET/runs"],
    exit_codes={0: "All runs were deleted.", USAGE: "A run was not deleted. The message names the reason."},
)
def rm(
    runs: RunArguments,
    rendezvous: RendezvousOption = None,
    backend: ExecutorOption = None,
    option: BackendOptions = None,
    as_json: JsonOption = False,
) -> int:
    """Delete runs with their records, logs and artifacts.

    The command refuses a run that has not ended. If it is interrupted, the same command completes the deletion.
    """
    from executors.run.run import view_of

    output = Output(as_json)
    problems: dict[str, str | None] = {}
    for run in runs:
        try:
            found = find_run(run, rendezvous, backend, option)
            with output.busy(f"Removing {found.run_id}") as on_progress:
                found.remove(on_progress)
            output.print(f"Removed {found.run_id} from {view_of(found).store.url}")
            problems[run] = None
        except (ReplicasError, BadParameter) as error:
            text = f"{error}{_hint_on_running_jobs(run, error)}"
            print(inert(f"Error: {text}"), file=sys.stderr)
            problems[run] = text
    if as_json:
        removed: RemovedDocument = {
            "runs": [{"run": run, "removed": error is None, "problem": error} for run, error in problems.items()]
        }
        output.document(removed)
    return USAGE if any(problems.values()) else 0
