"""`replicas resume`."""

from __future__ import annotations

from typing import Annotated

import typer

from executors.cli.launch import watch
from executors.cli.options import (
    EnvOption,
    ExecutorOption,
    ExecutorOptions,
    JsonOption,
    RendezvousOption,
    RunArgument,
    SecretOption,
    find_run,
    parse_texts,
    refuse,
)
from executors.cli.output import Output


def resume(
    run: RunArgument,
    rank: Annotated[
        list[int] | None,
        typer.Option("--rank", "-r", metavar="R", help="Only this rank. Repeatable.", show_default=False),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", metavar="GPU", help="A GPU for each replica. Default: as launched.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", metavar="S", help="Seconds each replica may run. Default: as launched."),
    ] = None,
    backend: ExecutorOption = None,
    option: ExecutorOptions = None,
    env: EnvOption = None,
    secret: SecretOption = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return at once; the run goes on by itself.")] = False,
    task_digest: Annotated[
        str | None,
        typer.Option(
            "--task-digest",
            metavar="SHA256",
            help="The task's digest, for a run that another machine launched; "
            "`replicas status RUN --json` says it there as task_digest.",
        ),
    ] = None,
    trust_bucket: Annotated[
        bool,
        typer.Option("--trust-bucket", help="Start whatever the run's store holds, with the credentials found here."),
    ] = False,
    rendezvous: RendezvousOption = None,
    as_json: JsonOption = False,
) -> int:
    """Start every rank again that ended without succeeding, and watch the run to its end.

    A replica that trains with DiLoCo catches up with the others, or goes on where all stopped.
    """
    from executors.cli.following import Interrupts
    from executors.resuming import resume as bring_back

    output = Output(as_json)
    found = find_run(run, rendezvous, backend, option)
    with Interrupts() as interrupts:
        try:
            resumed = bring_back(
                found,
                ranks=rank or None,
                gpu=gpu,
                timeout=timeout,
                env=parse_texts("--env", env),
                secrets=secret or (),
                detach=detach,
                task_digest=task_digest,
                trust_bucket=trust_bucket,
            )
        except (ValueError, TypeError) as error:
            refuse(error)
        except KeyboardInterrupt:
            output.say("Cancelled before the replicas had started.", "yellow")
            return 130
        return watch(resumed, output, interrupts, detach=detach)
