"""The verbs `launch` and `resume`, which start replicas and watch them to their end."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Context, Option

from executors.backend import Backend
from executors.cli.config import ConfigOption, ProfileOption, origins_of, settings_of, was_given, with_origins
from executors.cli.documents import ErrorDocument
from executors.cli.options import (
    BackendOptions,
    ColumnsOption,
    DigestOption,
    EnvOption,
    ExecutorOption,
    NotifyOption,
    RanksOption,
    RendezvousOption,
    RunArgument,
    SecretOption,
    TeeOption,
    TrustOption,
    VolumeOption,
    add_settings,
    complete_backend,
    find_run,
    make_executor,
    notify_urls,
    options_of,
    parse_texts,
    setting_option,
    warn_of_python_words,
)
from executors.cli.output import (
    CANCELLED,
    FAILED,
    JsonOption,
    Output,
    name_ranks,
    refuse,
    usage_errors,
    without_unwritable_lines,
)
from executors.cli.verb_help import EXIT_CODES, describe
from executors.errors import BackendError, LaunchError, ReplicasError, StoreError
from executors.settings.declaration import LIMITS, RUN, SETTINGS, TESTING, WATCH, WHERE
from executors.settings.notify import ON_HELP

if TYPE_CHECKING:
    from executors.cli.live import Interrupts
    from executors.launcher import LaunchPlan
    from executors.protocol import ServerlessExecutor
    from executors.run.run import Run

TASKS = "replicas.tasks"  # the group of entry points that names the default task
RESTARTS = "N, N/1h, preempted or none."
ENTRYPOINT = (
    "The function or script that each replica runs: train.py:main, pkg.mod:main or train.py. A file alone runs its "
    "main if `python train.py` only calls main. Otherwise, and with -- ARGV… at the end, it runs as a script. Without "
    "ENTRYPOINT, the words after -- are a command, such as torchrun. Default: the demo."
)
MODULE = "Run the module or package ENTRYPOINT, as `python -m ENTRYPOINT ARGV…` does."
BACKEND = "A backend of `replicas backends`, or pkg.mod:Class. Several with their numbers: slurm:4,modal:4."
ARG = "An argument of the function, converted to its annotation, else read as JSON or text. Repeatable."
RUN_ID = "A name for the run. Default: a generated one, such as brave-otter-7f3a."
DRY_RUN = "Check everything and print the request. Start nothing."
DASHBOARD = "Also serve the page of the run, and open it in the browser, until this command ends."
PANELS = {
    RUN: ("n", "backend", "rendezvous", "gpu", "arg", "run_id", "procs", "module", "from_run", "from_step", "seed"),
    WHERE: ("option", "env", "secrets", "volume", "signed"),
    LIMITS: ("restarts", "timeout", "max_cost", "hang_timeout", "start_timeout", "fail_fast", "min_replicas"),
    WATCH: ("detach", "columns", "tee", "dashboard", "tracker", "notify", "notify_on", "rules", "as_json"),
    SETTINGS: ("config", "profile"),
    TESTING: ("dry_run", "chaos"),
}
"""The order of the options in the help. The six options that a first launch needs come first."""
FROM_NOW = "Default: as before."
RULE_FROM_NOW = (
    "A rule of all attempts that start from now on, in place of all earlier rules, as in 'loss > 8 -> stop'. "
    f"Repeatable. none: no rules. {FROM_NOW}"
)
TOTAL_STEPS = "Extend the run to N inner steps. Ranks that have succeeded start again, too."
TOTAL_ROUNDS = "Extend a run with rounds by the clock to N rounds."
FROM_SNAPSHOT = "Begin a new run at the newest complete snapshot, if the newest round of this run is damaged."


@describe(
    examples=(
        "replicas launch --n 4",
        "replicas launch train.py:main --n 8 --arg steps=500 --arg lr=0.01",
        "replicas launch train.py --n 4 -- --lr 1e-3 --out 'out/${rank}'",
        "replicas launch -m pkg.train --n 4 -- --lr 1e-3",
        "replicas launch --n 4 --gpu H100:8 -- torchrun --nproc-per-node gpu train.py --lr 1e-3",
        "replicas launch train.py:main --n 8 --backend modal --gpu H100 --rendezvous s3://BUCKET/runs --detach",
        "replicas launch train.py:main --backend slurm:4,modal:4 --option slurm.partition=gpu --rendezvous s3://BUCKET/runs",
        "replicas launch train.py:main --n 8 --restarts 3 --timeout 2h --fail-fast",
        "replicas launch --n 4 --chaos kill:rank=1,round=20 --chaos store:delay=0.05,lost=0.02",
    ),
    exit_codes=EXIT_CODES,
)
def launch(
    context: Context,
    entrypoint: Annotated[str | None, Argument(metavar="ENTRYPOINT", help=ENTRYPOINT)] = None,
    *,
    module: Annotated[bool, Option("--module", "-m", help=MODULE)] = False,
    backend: Annotated[
        str, Option("--backend", "-b", metavar="NAME", help=BACKEND, autocompletion=complete_backend)
    ] = "local",
    arg: Annotated[list[str] | None, Option("--arg", "-a", metavar="K=V", help=ARG)] = None,
    rendezvous: RendezvousOption = None,
    run_id: Annotated[str | None, Option(metavar="ID", help=RUN_ID)] = None,
    env: EnvOption = None,
    option: BackendOptions = None,
    volume: VolumeOption = None,
    columns: ColumnsOption = None,
    tee: TeeOption = None,
    dashboard: Annotated[bool, Option("--dashboard", help=DASHBOARD)] = False,
    config: ConfigOption = None,
    profile: ProfileOption = None,
    dry_run: Annotated[bool, Option("--dry-run", help=DRY_RUN)] = False,
    notify: NotifyOption = None,
    as_json: JsonOption = False,
    **settings: Any,
) -> int:
    """Start N ranked replicas and watch them to their end.

    Ctrl-C cancels the run and waits for its end. A second Ctrl-C exits at once.
    """
    from executors.cli.live import Interrupts
    from executors.dashboard.beside import check_packages, dashboard_beside
    from executors.launcher import plan_launch
    from executors.launcher.several_backends import executor_of, options_by_part, total_replicas
    from executors.registry.run_index import locate, preparing
    from executors.run.run import view_of
    from executors.task.command import Command
    from executors.task.launch_request import LaunchRequest

    output, request = Output(as_json), None
    started: list[Run] = []
    args, texts = settings_of(context).arguments
    with Interrupts() as interrupts:
        try:
            with with_origins(context, backend), usage_errors():
                n = settings["n"]
                if (total := total_replicas(backend, n if was_given(context, "n") else None) or n) is None:
                    refuse(
                        "Missing --n, the number of replicas. "
                        f"Try: replicas launch {entrypoint or 'train.py:main'} --n 4"
                    )
                if wrong := next((rank for rank in tee or () if rank >= total), None):
                    refuse(f"--tee {wrong} is not a rank of this run, which has {name_ranks(range(total))}.")
                if tee and (settings["detach"] or backend == "inline"):
                    other = "--detach" if settings["detach"] else "--backend inline"
                    refuse(f"--tee shows the output of a run that this command watches. Remove --tee or {other}.")
                if dashboard and (settings["detach"] or backend == "inline"):
                    other = "--detach" if settings["detach"] else "--backend inline"
                    refuse(
                        f"--dashboard serves while this command watches the run. Remove --dashboard or {other}. "
                        "A dashboard of its own: replicas dashboard"
                    )
                if dashboard:
                    check_packages()
                if module and (entrypoint is None or entrypoint.endswith(".py") or set(":/") & {*entrypoint}):
                    refuse(f"-m needs the name of a module, as in -m pkg.train, got {entrypoint!r}.")
                given, chosen = parse_texts("--arg", arg), options_of(backend, option, volume)
                asked = {name: value for name, value in settings.items() if value is not None}
                is_command = entrypoint is None and context.obj is not None
                request = LaunchRequest.of(
                    Command.of(context.obj) if is_command else default_task() if entrypoint is None else entrypoint,
                    args={name: value for name, value in args.items() if name not in given},
                    arg_texts={**texts, **given},
                    argv=None if is_command else [] if module and context.obj is None else context.obj,
                    rendezvous=rendezvous,
                    run_id=run_id,
                    env=parse_texts("--env", env),
                    notify=notify or (),
                    origins=origins_of(context, backend, given, chosen),
                    **{**asked, "n": total},
                )
                has_new_name, request = request.run_id is None, request.with_run_id()
                by_part = options_by_part(backend, chosen)

                def make(name: str) -> ServerlessExecutor:
                    return make_executor(name, {**settings_of(context).options(name), **by_part.get(name, {})})

                known = contextlib.nullcontext() if dry_run else preparing(str(request.run_id))
                with known:
                    # Reading an entrypoint that imports torch takes a second. Without this line, the command would seem
                    # to hang.
                    with output.busy(f"Preparing {request.run_id}"):
                        plan = plan_launch(request, executor_of(backend, make), has_new_name=has_new_name)
                    warn_of_python_words("--arg", plan.request.args or {})
                    if dry_run:
                        output.document(plan.dry_run())
                        return 0
                    if price := plan.usd_per_hour():
                        at_most = price * (plan.request.settings.timeout or math.inf) / 3600
                        print(f"replicas: ${price:.2f} per hour, ${at_most:.2f} until the time limit", file=sys.stderr)
                    _start(plan, output, started)
        except KeyboardInterrupt:
            _cancel_all(started)
            has_begun = request is not None and locate(str(request.run_id)) is not None
            return report_cancelled_early(
                output, "Cancelled." if has_begun else "Cancelled before the run had started."
            )
        view = view_of(started[0])
        page = dashboard_beside(view.store.url, view.run_id, output.print) if dashboard else contextlib.nullcontext()
        with page:
            return _finish(
                started[0], output, interrupts, detach=settings["detach"], columns=columns, tee=tee or (), is_new=True
            )


add_settings(launch, panels=PANELS)


@contextlib.contextmanager
def _starting(backend: str, text: str, output: Output) -> Iterator[Callable[[str], None]]:
    """Show the progress of a start within the block.

    An inline run shows no progress, because it prints to the same screen.
    """
    if backend != "inline":
        with output.busy(text) as on_progress:
            yield on_progress
        return
    with contextlib.redirect_stdout(sys.stderr) if output.as_json else contextlib.nullcontext():
        yield lambda words: None


def report_cancelled_early(output: Output, said: str = "Cancelled before the replicas had started.") -> int:
    """Print that Ctrl-C ended a start, and return the exit code.

    Args:
        output: the output of the verb.
        said: the line to print.
    """
    output.print(said, "yellow")
    if output.as_json:
        document: ErrorDocument = {"error": said, "kind": None, "exit_code": CANCELLED}
        output.document(document)
    return CANCELLED


def _cancel_all(started: Sequence[Run]) -> None:
    """Cancel the runs that started just before Ctrl-C, because this process ends and cannot watch them."""
    for run in started:
        try:
            run.cancel()
        except ReplicasError as error:
            print(f"replicas: {run.run_id} could not be cancelled: {error}", file=sys.stderr)


def _start(plan: LaunchPlan, output: Output, started: list[Run]) -> None:
    """Start a run, and append it to `started` at once, so that a later Ctrl-C cancels it."""
    n = plan.request.settings.n
    text = f"Starting {n} replica{'s' * (n > 1)} of {plan.run_id}"
    try:
        with _starting(plan.placements.backend_name, text, output) as on_progress:
            started.append(plan.start(on_progress))
    except LaunchError as error:
        message = f"{error} See: replicas status {plan.run_id}"
        raise LaunchError(message, rank=error.rank, cancelled=error.cancelled) from error


def default_task() -> str:
    """Return the default entrypoint, for a launch that names none. An installed package announces it."""
    from importlib.metadata import entry_points

    found = list(entry_points(group=TASKS, name="default"))
    if not found:
        refuse(f"Give an entrypoint, as in train.py:main. No installed package has a default task (group {TASKS!r}).")
    return found[0].value


@describe(
    examples=(
        "replicas resume RUN",
        "replicas resume RUN --rank 1,3 --restarts 3",
        "replicas resume RUN --total-steps 8000",
    ),
    exit_codes=EXIT_CODES,
)
def resume(
    run: RunArgument,
    rank: RanksOption = None,
    gpu: Annotated[
        str | None, setting_option("gpu", f"The GPU of each replica, as in H100 or H100:2. {FROM_NOW}", WHERE)
    ] = None,
    timeout: Annotated[
        float | None, setting_option("timeout", f"Time limit of each replica, as in 5m or 1h30m. {FROM_NOW}")
    ] = None,
    backend: ExecutorOption = None,
    option: BackendOptions = None,
    env: EnvOption = None,
    secret: SecretOption = None,
    volume: VolumeOption = None,
    gather: Annotated[
        float | None, setting_option("gather_s", f"How long to wait for all ranks to start, as in 5m. {FROM_NOW}")
    ] = None,
    restarts: Annotated[
        str | None, setting_option("restarts", f"How often each rank is restarted from now on: {RESTARTS} {FROM_NOW}")
    ] = None,
    hang_timeout: Annotated[
        str | None,
        setting_option(
            "hang_timeout", f"Longest time without progress from now on: 2m, 2m:3m, auto or off. {FROM_NOW}"
        ),
    ] = None,
    start_timeout: Annotated[
        str | None,
        setting_option("start_timeout", f"Longest time until the first progress from now on: 20m or auto. {FROM_NOW}"),
    ] = None,
    detach: Annotated[
        bool, Option("--detach", "-d", help="Return when the replicas have started. The run continues.")
    ] = False,
    task_digest: DigestOption = None,
    trust_bucket: TrustOption = False,
    from_snapshot: Annotated[bool, Option("--from-snapshot", help=FROM_SNAPSHOT)] = False,
    total_steps: Annotated[int | None, Option(metavar="N", min=1, help=TOTAL_STEPS)] = None,
    total_rounds: Annotated[int | None, Option(metavar="N", min=1, help=TOTAL_ROUNDS)] = None,
    notify: NotifyOption = None,
    notify_on: Annotated[str | None, setting_option("notify_on", f"{ON_HELP} {FROM_NOW}")] = None,
    rule: Annotated[list[str] | None, setting_option("rules", RULE_FROM_NOW)] = None,
    rendezvous: RendezvousOption = None,
    as_json: JsonOption = False,
) -> int:
    """Start the ranks of a run again that did not succeed, and watch the run.

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
                    notify=notify_urls(notify),
                    notify_on=notify_on,
                    rules=rule,
                    on_progress=on_progress,
                )
                started += [] if resumed is found or detach else [resumed]
        except KeyboardInterrupt:
            _cancel_all(started)
            return report_cancelled_early(output)
        # Nothing was started, because all ranks still run: the run was only extended.
        if resumed is found:
            output.print(f"Extended {found.run_id}. Its replicas continue when they reach their old total.")
            if as_json:
                output.document(found.status().to_json())
            return 0
        if from_snapshot:
            output.print(f"{resumed.run_id} continues {found.run_id} from its newest complete snapshot.")
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
    """Watch a run that this process started, or return at once if it is detached. Return the exit code."""
    from executors.cli.live import EndedWithoutStore, watch
    from executors.cli.summary import Summary, heading, reference
    from executors.run.run import view_of

    view = view_of(run)
    name = reference(run)
    if detach and view.backend != "inline":  # an inline run has already ended
        if output.as_json:
            output.document(Summary(run, run.outcomes(), None).document())
            return 0
        output.print(run.run_id)
        output.print(f"{heading(run, timeout_s)}, detached.", "dim")
        output.print(f"Follow it: replicas logs {name} -f   replicas wait {name}   replicas cancel {name}", "dim")
        return 0
    interrupts.count_on(run.run_id)
    with without_unwritable_lines():
        # Do not read the store before `watch`. If the store does not answer, Ctrl-C would have to wait for it.
        output.print(heading(run, timeout_s, n=view.world_size if is_new else None), "bold")
        lease = _lease_of(view.placements)
        if lease:
            output.print(
                f"The run ends {lease} after the last command that watches it. With --detach it continues.", "dim"
            )
        try:
            watch(run, output, interrupts=interrupts, columns=columns, tee=tee)
            summary = Summary.of(run, interrupted=interrupts.count > 0)
        except EndedWithoutStore:
            return ended_without_store(run, output)
        except (StoreError, BackendError) as error:
            return report_unreadable_run(run, output, error, view.placements, is_cancelled=interrupts.count > 0)
    return summary.finish(output)


def ended_without_store(run: Run, output: Output) -> int:
    """Print that a run was cancelled while its store did not answer, and return the exit code.

    Args:
        run: the run.
        output: the output of the verb.

    Example:
        return ended_without_store(run, output)
    """
    from executors.run.run import manager_of

    said = f"Cancelled {run.run_id} at its service. The store does not answer."
    if not manager_of(run).canceller.was_ended_without_store:
        said = f"{run.run_id} was not cancelled completely (see above). The store does not answer."
    output.print(said, "yellow")
    if output.as_json:
        document: ErrorDocument = {"error": said, "kind": None, "exit_code": CANCELLED, "run_id": run.run_id}
        output.document({**document, "url": run.url})
    return CANCELLED


def report_unreadable_run(
    run: Run,
    output: Output,
    error: ReplicasError,
    backend: Backend,
    *,
    who: str = "",
    is_cancelled: bool = False,
) -> int:
    """Print that a run cannot be watched any more, and whether its replicas continue. Return the exit code.

    Args:
        run: the run.
        output: the output of the verb.
        error: the error of the store or of the backend.
        backend: the backend of the replicas that this command started.
        who: the name of these replicas in the message, in the plural. Empty: the whole run.
        is_cancelled: True if the user has cancelled the run.
    """
    from executors.cli.summary import reference
    from executors.run.run import manager_of

    name, lease = reference(run), _lease_of(backend)
    continues = f"{who} continue" if who else "The run continues"
    ends = f"End it: replicas cancel {name}"
    if backend.ends_jobs:
        ends += f"   or: {backend.commands_to_end(run.run_id)}"
    if is_cancelled:
        then = f"Some replicas may still run: replicas status {name}   {ends}"
    elif words := manager_of(run).end_refused(error):
        then = words
    elif lease and not manager_of(run).is_released and isinstance(error, StoreError):
        # A replica does not end if it cannot read the lease, so replicas continue while the store does not answer.
        then = f"{continues} while the store does not answer, and {lease} longer. {ends}"
    elif lease and not manager_of(run).is_released:
        then = f"{continues} for {lease}. To keep it longer, watch it: replicas watch {name}"
    elif not lease and backend.ends_with_launcher:
        then = f"{who} end with this command." if who else "The run ends with this command."
    else:
        then = f"{continues}. To see the end: replicas wait {name}"
    code = CANCELLED if is_cancelled else FAILED
    output.print(f"The state of {run.run_id} cannot be read any more: {error}", "red")
    output.print(then, "red")
    if output.as_json:
        document: ErrorDocument = {"error": f"{error} {then}", "kind": type(error).__name__, "exit_code": code}
        output.document({**document, "run_id": run.run_id, "url": run.url})
    return code


def _lease_of(backend: Backend) -> str:
    """Return as text how long replicas continue when no process watches them, as in "15 min".

    Empty: they need no watching process.
    """
    return "" if backend.lease_s is None else f"{backend.lease_s / 60:.0f} min"
