"""`replicas launch`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from executors.cli.options import (
    BackendOptions,
    EnvOption,
    JsonOption,
    RendezvousOption,
    SecretOption,
    parse_texts,
    parse_values,
    refuse,
)
from executors.cli.output import Output
from executors.errors import BackendError, LaunchError, ReplicasError, StoreError

if TYPE_CHECKING:
    from executors.launching import LaunchPlan
    from executors.run import Run

TASKS = "replicas.tasks"  # the group of entry points that names the default task


def launch(
    entrypoint: Annotated[
        str | None,
        typer.Argument(
            metavar="ENTRYPOINT",
            help="What each replica calls: pkg.mod:function, path/file.py:function, or path/file.py (its main). "
            "Default: the task that comes with the installation.",
            show_default=False,
        ),
    ] = None,
    *,
    n: Annotated[int, typer.Option("--n", "-n", metavar="N", help="How many replicas.", show_default=False)],
    backend: Annotated[
        str, typer.Option("--backend", "-b", metavar="NAME", help="A backend's name, or pkg.mod:Class.")
    ] = "local",
    arg: Annotated[
        list[str] | None,
        typer.Option(
            "--arg",
            "-a",
            metavar="K=V",
            help="An argument of the entrypoint: JSON, else a string. Repeatable.",
            show_default=False,
        ),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", metavar="GPU", help="A GPU for each replica, as in H100 or H100:2.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", metavar="S", help="Seconds each replica may run. Default: no limit locally."),
    ] = None,
    rendezvous: RendezvousOption = None,
    run_id: Annotated[
        str | None, typer.Option("--run-id", metavar="ID", help="A name of your choice. Default: two words.")
    ] = None,
    env: EnvOption = None,
    secret: SecretOption = None,
    option: BackendOptions = None,
    chaos: Annotated[
        list[str] | None,
        typer.Option(
            "--chaos",
            metavar="SPEC",
            help="A fault to suffer, locally: kill:rank=1,round=3 (or at=POINT,count=N,when=after), "
            "or store:lost=0.02,error=0.01,delay=0.3. Repeatable.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="S", help="Seed the replicas from this and their rank.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Print the run id and return; the run goes on by itself.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and print the exact request; start and write nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Start N ranked replicas and watch them to their end.

    Ctrl-C once cancels the run and waits for its end; twice leaves at once.

    Exit code: 130 cancelled, 1 a replica failed, 124 only time limits were hit, 0 all succeeded, 2 usage.
    """
    from executors.cli.following import Interrupts

    output = Output(as_json)
    with Interrupts() as interrupts:
        try:
            plan = _plan_watched(
                output,
                entrypoint,
                n,
                backend,
                parse_values("--option", option),
                args=parse_values("--arg", arg),
                rendezvous=rendezvous,
                run_id=run_id,
                gpu=gpu,
                timeout=timeout,
                env=parse_texts("--env", env),
                secrets=secret or (),
                seed=seed,
                detach=detach,
                chaos=chaos or (),
            )
            if dry_run:
                output.document(_rehearse(plan))
                return 0
            run = _start(plan, output)
        except KeyboardInterrupt:
            output.say("Cancelled before the run had started.", "yellow")
            return 130
        return watch(run, output, interrupts, detach=detach)


launch.epilog = (  # type: ignore[attr-defined]
    "[bold]Examples[/bold]\n\nreplicas launch --n 4"
    "\n\nreplicas launch train.py:main --n 8 --arg steps=500 --arg lr=0.01"
    "\n\nreplicas launch train.py --n 64 --option max_parallel=4 --option preload=\\[] --timeout 600"
    "\n\nreplicas launch --n 4 --chaos kill:rank=1,round=20 --chaos store:delay=0.05,lost=0.02"
    "\n\nreplicas launch pkg.train:main --n 8 --backend my.cloud:Executor --rendezvous /shared/runs --detach"
)


def _plan_watched(output: Output, *launch: Any, **more: Any) -> LaunchPlan:
    """Check the launch; on a terminal something moves meanwhile, since importing torch takes its second."""
    if not output.is_live:
        return _plan(*launch, **more)
    with output.console.status("Checking the launch"):
        return _plan(*launch, **more)


def _plan(entrypoint: str | None, n: int, backend: str, options: dict[str, Any], **more: Any) -> LaunchPlan:
    """Check the launch; what is wrong with it is a usage error."""
    from executors.cli.backend_options import check_options
    from executors.launching import plan_launch
    from executors.registry import executor_class, get_executor

    try:
        check_options(backend, executor_class(backend), options)
        return plan_launch(get_executor(backend, options), entrypoint or default_task(), n, **more)
    except ReplicasError:
        raise
    except (ValueError, TypeError, ImportError) as error:
        refuse(error)


def _rehearse(plan: LaunchPlan) -> dict[str, Any]:
    from executors.dry_run import rehearse

    try:
        return rehearse(plan)
    except (ValueError, TypeError) as error:
        refuse(error)


def _start(plan: LaunchPlan, output: Output) -> Run:
    try:
        if not output.is_live:
            return plan.start()
        with output.console.status(f"Starting {plan.n} replicas"):
            return plan.start()
    except (ValueError, TypeError) as error:
        refuse(error)
    except LaunchError as error:
        told = f"{error} Look at it: replicas status {plan.run_id}"
        raise LaunchError(told, rank=error.rank, cancelled=error.cancelled) from error


def default_task() -> str:
    """Return the entrypoint that is run when none is given."""
    from importlib.metadata import entry_points

    found = list(entry_points(group=TASKS, name="default"))
    if not found:
        refuse(f"Give an ENTRYPOINT, as in train.py:main: no installed package has a default task (group {TASKS!r}).")
    return found[0].value


def _leave(run: Run, output: Output) -> int:
    from executors.cli.report import document, heading, reference

    if output.as_json:
        output.document(document(run, run.outcomes(), None))
        return 0
    output.say(run.run_id)
    name = reference(run)
    output.say(f"{heading(run)}, detached.", "dim")
    output.say(f"Follow it: replicas logs {name} -f   replicas wait {name}   replicas cancel {name}", "dim")
    return 0


def watch(run: Run, output: Output, interrupts: Any, *, detach: bool) -> int:
    """Watch a run to its end and tell how it ended, or say how to; return the exit code."""
    if detach:
        return _leave(run, output)
    interrupts.count_on(run.run_id)
    from executors.cli.following import follow_and_cancel, open_view
    from executors.cli.report import document, exit_code, heading, reference, tell

    output.say(heading(run), "bold")
    view = open_view(output, run, hint="Ctrl-C cancels the run.")
    try:
        follow_and_cancel(run, view, interrupts)
        outcomes = run.outcomes()
    except (StoreError, BackendError) as error:
        fate = "ends with this command"
        if getattr(run.executor, "needs_shared_rendezvous", False):
            fate = f"goes on without this command (replicas wait {reference(run)})"
        output.say(f"The run can no longer be followed, and {fate}: {error}", "red")
        return 1
    finally:
        view.close()
    code = exit_code(outcomes, interrupted=interrupts.count > 0)
    tell(output, run, outcomes)
    if output.as_json:
        output.document(document(run, outcomes, code))
    return code
