"""`replicas add`: more replicas for a run that goes on."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from executors.backend import as_backend
from executors.cli.backends import make_executor
from executors.cli.launch import TASK_DIGEST, TRUST_BUCKET, report_cancelled_early, report_unreadable_run
from executors.cli.options import (
    BackendOptions,
    EnvOption,
    RendezvousOption,
    RunArgument,
    VolumeOption,
    find_run,
    options_of,
    parse_duration,
    parse_texts,
)
from executors.cli.output import CANCELLED, JsonOption, Output, name_ranks, usage_errors, without_unwritable_lines
from executors.errors import BackendError, ReplicasError, StoreError
from executors.settings.durations import DURATIONS

BACKEND = "Where to start them: a backend's name, or pkg.mod:Class. The backend must reach the run's rendezvous."
GPU = "A GPU for each, as in H100 or H100:2. '' means none. Default: as launched."
SECRET = "A secret, by its name. '' means none. Repeatable. Default: as launched, on a backend of the launch."
TIMEOUT = f"How long each may run ({DURATIONS}). Default: as launched."
DETACH = "Return when they have started. They continue without this command."


def add(
    run: RunArgument,
    *,
    n: Annotated[int, Option("--n", metavar="K", help="How many replicas to add.")],
    backend: Annotated[str, Option("--backend", "-b", metavar="NAME", help=BACKEND)] = "local",
    gpu: Annotated[str | None, Option(metavar="GPU", help=GPU)] = None,
    timeout: Annotated[float | None, Option(metavar="DURATION", parser=parse_duration, help=TIMEOUT)] = None,
    env: EnvOption = None,
    secret: Annotated[list[str] | None, Option("--secret", metavar="NAME", help=SECRET)] = None,
    option: BackendOptions = None,
    volume: VolumeOption = None,
    detach: Annotated[bool, Option("--detach", "-d", help=DETACH)] = False,
    task_digest: Annotated[str | None, Option(metavar="SHA256", help=TASK_DIGEST)] = None,
    trust_bucket: Annotated[bool, Option("--trust-bucket", help=TRUST_BUCKET)] = False,
    rendezvous: RendezvousOption = None,
    as_json: JsonOption = False,
) -> int:
    """Start K more replicas of a run, on any backend, and watch the run to its end.

    The new replicas get new ranks and join the others at their next round. Ctrl-C ends the replicas that this command
    added, and no others. --max-cost of the launch does not bound them; --timeout does.

    Exit code: as `launch`, or 0 with --detach.
    """
    from executors.cli.live import Interrupts, watch
    from executors.cli.summary import Summary, heading

    output = Output(as_json)
    found = find_run(run, rendezvous)
    with usage_errors():
        executor = make_executor(backend, options_of(backend, option, volume))
    with Interrupts():
        try:
            text = f"Adding {n} replica{'s' * (n > 1)} to {found.run_id}"
            with usage_errors(), output.busy(text) as on_progress:
                ranks = found.add(
                    executor,
                    n,
                    gpu=gpu,
                    timeout=timeout,
                    env=parse_texts("--env", env),
                    secrets=[*filter(None, secret)] if secret else None,
                    detach=detach,
                    task_digest=task_digest,
                    trust_bucket=trust_bucket,
                    on_progress=on_progress,
                )
        except KeyboardInterrupt:
            return report_cancelled_early(output)
        if detach:
            output.print(f"Added {name_ranks(ranks)} on {executor.backend_name}.")
            if as_json:
                output.document({"run_id": found.run_id, "added": ranks, "backend": executor.backend_name})
            return 0
        try:
            with without_unwritable_lines():
                output.print(f"Added {name_ranks(ranks)} on {executor.backend_name}.")
                output.print(heading(found), "bold")
            watch(found, output, interrupt_ends=f"{name_ranks(ranks)}; the others continue")
        except KeyboardInterrupt:
            output.print(f"Cancelling {name_ranks(ranks)}; the others continue.", "yellow")
            try:
                found.cancel(ranks)
            except ReplicasError as error:
                output.print(f"Cancelling failed: {error}", "red")
            return CANCELLED
        except (StoreError, BackendError) as error:
            return report_unreadable_run(found, output, error, as_backend(executor), who="What was added")
    return Summary.of(found).finish(output)
