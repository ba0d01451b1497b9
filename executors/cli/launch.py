"""`replicas launch` and `replicas resume`."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Context, Option

from executors.backend import Backend
from executors.cli.backends import make_executor
from executors.cli.config import ConfigOption, ProfileOption, origins_of, settings_of, was_given, with_origins
from executors.cli.options import (
    BackendOptions,
    ColumnsOption,
    EnvOption,
    ExecutorOption,
    RanksOption,
    RendezvousOption,
    RunArgument,
    SecretOption,
    TeeOption,
    VolumeOption,
    add_settings,
    find_run,
    options_of,
    parse_texts,
    setting_option,
    warn_of_python_words,
)
from executors.cli.output import CANCELLED, FAILED, JsonOption, Output, refuse, usage_errors, without_unwritable_lines
from executors.errors import BackendError, LaunchError, ReplicasError, StoreError
from executors.settings.durations import DURATIONS

if TYPE_CHECKING:
    from executors.cli.live import Interrupts
    from executors.launcher import LaunchPlan
    from executors.protocol import ServerlessExecutor
    from executors.run.run import Run

TASKS = "replicas.tasks"  # the group of entry points that names the default task
ENTRYPOINT = (
    "The function or script that each replica runs: pkg.mod:function, path/file.py:function, or path/file.py. A file "
    "alone means its main, if `python path/file.py` does no more than call it. Otherwise the file runs as a script. "
    "With -- ARGV… behind all options it always does. Default: the task that comes with the installation."
)
MODULE = "Run ENTRYPOINT, a module or package, as `python -m ENTRYPOINT ARGV…` does."
BACKEND = "A backend's name, or pkg.mod:Class; or several with their numbers of replicas, as in slurm:4,modal:4."
ARG = "An argument of the entrypoint, as its annotation says; without one JSON, else a string. Repeatable."
AS_FOR_LAUNCH, FROM_HERE_ON = "As for launch,", "for all ranks from here on. Default: as before."
TASK_DIGEST = (
    "The task's digest, for a run that another machine launched; `replicas status RUN --json` shows it there as "
    "task_digest."
)
TRUST_BUCKET = "Start whatever the run's rendezvous holds, with the credentials found here."

TOTAL_STEPS = "Extend the run to N inner steps: ranks that have succeeded start again, too."
TOTAL_ROUNDS = "Extend a run with rounds by the clock to N rounds."
FROM_SNAPSHOT = "Begin a new run at the newest complete snapshot of this one, whose newest round is damaged."


def launch(
    context: Context,
    entrypoint: Annotated[str | None, Argument(metavar="ENTRYPOINT", help=ENTRYPOINT)] = None,
    *,
    module: Annotated[bool, Option("--module", "-m", help=MODULE)] = False,
    backend: Annotated[str, Option("--backend", "-b", metavar="NAME", help=BACKEND)] = "local",
    arg: Annotated[list[str] | None, Option("--arg", "-a", metavar="K=V", help=ARG)] = None,
    rendezvous: RendezvousOption = None,
    run_id: Annotated[str | None, Option(metavar="ID", help="A name of your choice. Default: two words.")] = None,
    env: EnvOption = None,
    option: BackendOptions = None,
    volume: VolumeOption = None,
    columns: ColumnsOption = None,
    tee: TeeOption = None,
    config: ConfigOption = None,
    profile: ProfileOption = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Check everything, print the request, start nothing.")] = False,
    as_json: JsonOption = False,
    **settings: Any,
) -> int:
    """Start N ranked replicas and watch them to their end.

    Ctrl-C once cancels the run and waits for its end; twice exits at once.

    Exit code: 130 cancelled, 93 given up or stopped where starting it again unchanged does not help, 1 a replica
    failed, 124 only time limits were hit, 0 all succeeded, 2 usage.
    """
    from executors.cli.live import Interrupts
    from executors.launcher import named, plan_launch
    from executors.launcher.parts import executor_of, options_by_part, total_of
    from executors.run.run_index import locate, preparing
    from executors.task.launch_request import LaunchRequest

    output, request = Output(as_json), None
    started: list[Run] = []
    args, texts = settings_of(context).arguments
    with Interrupts() as interrupts:
        try:
            with with_origins(context, backend), usage_errors():
                n = settings["n"]
                if (total := total_of(backend, n if was_given(context, "n") else None) or n) is None:
                    refuse("Missing option '--n'.")
                if wrong := next((rank for rank in tee or () if rank >= total), None):
                    refuse(f"--tee {wrong}: the ranks are 0 to {total - 1}.")
                if tee and (settings["detach"] or backend == "inline"):
                    refuse("--tee belongs to a run that is watched here: leave --detach and --backend inline away.")
                if module and (entrypoint is None or entrypoint.endswith(".py") or set(":/") & {*entrypoint}):
                    refuse(f"-m runs a module, as in -m pkg.train: got {entrypoint!r}.")
                given, chosen = parse_texts("--arg", arg), options_of(backend, option, volume)
                asked = {name: value for name, value in settings.items() if value is not None}
                request = named(
                    LaunchRequest.of(
                        default_task() if entrypoint is None else entrypoint,
                        args={name: value for name, value in args.items() if name not in given},
                        arg_texts={**texts, **given},
                        argv=[] if module and context.obj is None else context.obj,
                        rendezvous=rendezvous,
                        run_id=run_id,
                        env=parse_texts("--env", env),
                        origins=origins_of(context, backend, given, chosen),
                        **{**asked, "n": total},
                    )
                )
                by_part = options_by_part(backend, chosen)

                def make(name: str) -> ServerlessExecutor:
                    return make_executor(name, {**settings_of(context).options(name), **by_part.get(name, {})})

                known = contextlib.nullcontext() if dry_run else preparing(str(request.run_id))
                with known:
                    with output.busy(f"Preparing {request.run_id}"):  # importing torch takes a second
                        plan = plan_launch(request, executor_of(backend, make))
                    warn_of_python_words("--arg", plan.request.args or {})
                    if dry_run:
                        output.document(plan.dry_run())
                        return 0
                    if price := plan.usd_per_hour():
                        at_most = price * (plan.request.settings.timeout or math.inf) / 3600
                        print(f"replicas: ${price:.2f} an hour, ${at_most:.2f} until the time limit", file=sys.stderr)
                    _start(plan, output, started)
        except KeyboardInterrupt:
            _cancel_all(started)
            has_begun = request is not None and locate(str(request.run_id)) is not None
            return report_cancelled_early(
                output, "Cancelled." if has_begun else "Cancelled before the run had started."
            )
        return _finish(
            started[0], output, interrupts, detach=settings["detach"], columns=columns, tee=tee or (), is_new=True
        )


add_settings(launch, before="columns")
launch.epilog = (  # type: ignore[attr-defined]
    "[bold]Examples[/bold]\n\nreplicas launch --n 4"
    "\n\nreplicas launch train.py:main --n 8 --arg steps=500 --arg lr=0.01"
    "\n\nreplicas launch train.py --n 4 -- --lr 1e-3 --out 'out/${rank}'"
    "\n\nreplicas launch -m pkg.train --n 4 -- --lr 1e-3"
    "\n\nreplicas launch train.py --n 64 --option max_parallel=4 --option preload=\\[] --timeout 10m"
    "\n\nreplicas launch --n 4 --chaos kill:rank=1,round=20 --chaos store:delay=0.05,lost=0.02"
    "\n\nreplicas launch pkg.train:main --n 8 --backend my.cloud:Executor --rendezvous /shared/runs --detach"
    "\n\nreplicas launch train.py --backend slurm:4,modal:4 --option slurm.partition=gpu --rendezvous s3://BUCKET/runs"
)


@contextlib.contextmanager
def _starting(backend: str, text: str, output: Output) -> Iterator[Callable[[str], None]]:
    """Show within the block how far the start is, but where the screen is the entrypoint's."""
    if backend != "inline":
        with output.busy(text) as on_progress:
            yield on_progress
        return
    with contextlib.redirect_stdout(sys.stderr) if output.as_json else contextlib.nullcontext():
        yield lambda words: None


def report_cancelled_early(output: Output, said: str = "Cancelled before the replicas had started.") -> int:
    """Say that Ctrl-C was heard while replicas were being started; return the exit code."""
    output.print(said, "yellow")
    if output.as_json:
        output.document({"exit_code": CANCELLED, "error": said})
    return CANCELLED


def _cancel_all(started: Sequence[Run]) -> None:
    """End what was started just before Ctrl-C was heard: the process that would watch it is about to end."""
    for run in started:
        try:
            run.cancel()
        except ReplicasError as error:
            print(f"replicas: cancelling {run.run_id} failed: {error}", file=sys.stderr)


def _start(plan: LaunchPlan, output: Output, started: list[Run]) -> None:
    """Start a run, and note it among those that were started before anything else can happen."""
    text = f"Starting {plan.request.settings.n} replicas of {plan.run_id}"
    try:
        with _starting(plan.placements.backend_name, text, output) as on_progress:
            started.append(plan.start(on_progress))
    except LaunchError as error:
        message = f"{error} See: replicas status {plan.run_id}"
        raise LaunchError(message, rank=error.rank, cancelled=error.cancelled) from error


def default_task() -> str:
    """Return the entrypoint that is run when none is given."""
    from importlib.metadata import entry_points

    found = list(entry_points(group=TASKS, name="default"))
    if not found:
        refuse(f"Give an ENTRYPOINT, as in train.py:main: no installed package has a default task (group {TASKS!r}).")
    return found[0].value


def resume(
    run: RunArgument,
    rank: RanksOption = None,
    gpu: Annotated[str | None, setting_option("gpu", f"{AS_FOR_LAUNCH} which is the default.")] = None,
    timeout: Annotated[float | None, setting_option("timeout", f"As for launch ({DURATIONS}).")] = None,
    backend: ExecutorOption = None,
    option: BackendOptions = None,
    env: EnvOption = None,
    secret: SecretOption = None,
    volume: VolumeOption = None,
    gather: Annotated[float | None, setting_option("gather_s", f"As for launch ({DURATIONS}).")] = None,
    restarts: Annotated[str | None, setting_option("restarts", f"{AS_FOR_LAUNCH} {FROM_HERE_ON}")] = None,
    hang_timeout: Annotated[str | None, setting_option("hang_timeout", f"{AS_FOR_LAUNCH} {FROM_HERE_ON}")] = None,
    start_timeout: Annotated[str | None, setting_option("start_timeout", f"{AS_FOR_LAUNCH} {FROM_HERE_ON}")] = None,
    detach: Annotated[bool, Option("--detach", "-d", help="Return at once; the run continues.")] = False,
    task_digest: Annotated[str | None, Option(metavar="SHA256", help=TASK_DIGEST)] = None,
    trust_bucket: Annotated[bool, Option("--trust-bucket", help=TRUST_BUCKET)] = False,
    from_snapshot: Annotated[bool, Option("--from-snapshot", help=FROM_SNAPSHOT)] = False,
    total_steps: Annotated[int | None, Option(metavar="N", min=1, help=TOTAL_STEPS)] = None,
    total_rounds: Annotated[int | None, Option(metavar="N", min=1, help=TOTAL_ROUNDS)] = None,
    rendezvous: RendezvousOption = None,
    as_json: JsonOption = False,
) -> int:
    """Start every rank again that ended without succeeding, and watch the run to its end.

    A replica that trains with DiLoCo catches up with the others, or continues at the step where all stopped. With
    --total-steps it trains beyond the planned end.
    """
    from executors.cli.live import Interrupts
    from executors.run.resume import resume as start_again
    from executors.run.run import view_of

    output = Output(as_json)
    started: list[Run] = []
    found = find_run(run, rendezvous, backend, option, volume)
    with Interrupts() as interrupts:
        try:
            text = f"Starting replicas of {found.run_id} again"
            with usage_errors(), _starting(view_of(found).backend, text, output) as on_progress:
                resumed = start_again(
                    found,
                    ranks=rank or None,
                    gpu=gpu,
                    timeout=timeout,
                    env=parse_texts("--env", env),
                    secrets=secret or (),
                    gather_s=gather,
                    restarts=restarts,
                    hang_timeout=hang_timeout,
                    start_timeout=start_timeout,
                    detach=detach,
                    task_digest=task_digest,
                    trust_bucket=trust_bucket,
                    from_snapshot=from_snapshot,
                    total_steps=total_steps,
                    total_rounds=total_rounds,
                    on_progress=on_progress,
                )
                started += [] if resumed is found or detach else [resumed]
        except KeyboardInterrupt:
            _cancel_all(started)
            return report_cancelled_early(output)
        if resumed is found:  # extended, and every rank still runs
            output.print(f"Extended {found.run_id}. Its replicas continue when they reach their old total.")
            if as_json:
                output.document(found.status().to_json())
            return 0
        if from_snapshot:
            output.print(f"{found.run_id} goes on as {resumed.run_id}, from its newest whole snapshot.")
        return _finish(resumed, output, interrupts, detach=detach, timeout_s=timeout)


def _finish(
    run: Run,
    output: Output,
    interrupts: Interrupts,
    *,
    detach: bool,
    columns: Sequence[str] | None = None,
    timeout_s: float | None = None,
    tee: Sequence[int] = (),
    is_new: bool = False,
) -> int:
    """Watch a run that this process started to its end, or leave it; return the exit code."""
    from executors.cli.live import EndedWithoutStore, watch
    from executors.cli.summary import Summary, heading, reference
    from executors.run.run import view_of

    view = view_of(run)
    name = reference(run)
    if detach and view.backend != "inline":  # which has ended
        if output.as_json:
            output.document(Summary(run, run.outcomes(), None).document())
            return 0
        output.print(run.run_id)
        output.print(f"{heading(run, timeout_s)}, detached.", "dim")
        output.print(f"Follow it: replicas logs {name} -f   replicas wait {name}   replicas cancel {name}", "dim")
        return 0
    interrupts.count_on(run.run_id)
    with without_unwritable_lines():
        # The store is not asked before `watch`: it may be silent, and Ctrl-C would wait for it.
        output.print(heading(run, timeout_s, n=view.world_size if is_new else None), "bold")
        lease = _lease_of(view.placements)
        if lease:
            output.print(f"It ends when nobody watches it for {lease}: --detach lets it go on alone.", "dim")
        try:
            watch(run, output, interrupts=interrupts, columns=columns, tee=tee)
            summary = Summary.of(run, interrupted=interrupts.count > 0)
        except EndedWithoutStore:
            return ended_without_store(run, output)
        except (StoreError, BackendError) as error:
            return report_unreadable_run(run, output, error, view.placements, is_cancelled=interrupts.count > 0)
    return summary.finish(output)


def ended_without_store(run: Run, output: Output) -> int:
    """Say that a run was cancelled whose store does not answer; return the exit code.

    Example:
        return ended_without_store(run, output)
    """
    from executors.run.run import manager_of

    said = f"Cancelled {run.run_id}: its jobs were ended at their service. Its store does not answer."
    if not manager_of(run).canceller.was_ended_without_store:
        said = f"{run.run_id} was not ended as a whole, see above, and its store does not answer."
    output.print(said, "yellow")
    if output.as_json:
        output.document({"run_id": run.run_id, "url": run.url, "exit_code": CANCELLED, "error": said})
    return CANCELLED


def report_unreadable_run(
    run: Run,
    output: Output,
    error: ReplicasError,
    backend: Backend,
    *,
    who: str = "The run",
    is_cancelled: bool = False,
) -> int:
    """Say that a run cannot be watched any more, and what becomes of who was started here; return the exit code."""
    from executors.cli.summary import reference
    from executors.run.run import manager_of

    name, lease = reference(run), _lease_of(backend)
    ends = f"End it: replicas cancel {name}"
    if backend.ends_jobs:
        ends += f"   or: {backend.commands_to_end(run.run_id)}"
    if is_cancelled:
        then = f"Whether all of it has ended is not known here: replicas status {name}   {ends}"
    elif words := manager_of(run).end_refused(error):
        then = words
    elif lease and not manager_of(run).is_released and isinstance(error, StoreError):
        # A replica that cannot read the lease does not end by it.
        then = f"{who} continues while the store does not answer, and {lease} longer. {ends}"
    elif lease and not manager_of(run).is_released:
        then = f"{who} continues for {lease}, and as long as somebody watches it: replicas watch {name}"
    elif not lease and backend.ends_with_launcher:
        then = f"{who} ends with this command."
    else:
        then = f"{who} continues without this command: replicas wait {name}"
    code = CANCELLED if is_cancelled else FAILED
    output.print(f"The status of the run cannot be read any more: {error}", "red")
    output.print(then, "red")
    if output.as_json:
        output.document({"run_id": run.run_id, "url": run.url, "exit_code": code, "error": f"{error} {then}"})
    return code


def _lease_of(backend: Backend) -> str:
    """Return how long replicas continue that no process watches, as in "15 min"; empty if they need no watch."""
    return "" if backend.lease_s is None else f"{backend.lease_s / 60:.0f} min"
