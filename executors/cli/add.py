"""The verb `add`, which starts more replicas of a run that continues."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from executors.backend import as_backend
from executors.cli.documents import AddedDocument
from executors.cli.launch import report_cancelled_early, report_unreadable_run
from executors.cli.options import (
    BackendOptions,
    DigestOption,
    EnvOption,
    RendezvousOption,
    RunArgument,
    TrustOption,
    VolumeOption,
    complete_backend,
    find_run,
    make_executor,
    options_of,
    parse_duration,
    parse_texts,
)
from executors.cli.output import CANCELLED, JsonOption, Output, name_ranks, usage_errors, without_unwritable_lines
from executors.cli.verb_help import EXIT_CODES, describe
from executors.errors import BackendError, ReplicasError, StoreError
from executors.settings.declaration import WHERE

BACKEND = "The backend of the new replicas. It must reach the rendezvous of the run."
GPU = "The GPU of each new replica, as in H100 or H100:2. '' means none. Default: as launched."
SECRET = "The name of a secret. '' means none. Repeatable. Default: as launched, on a backend of the launch."
TIMEOUT = "Time limit of each new replica, as in 5m or 1h30m. Default: as launched."
DETACH = "Return when the new replicas have started. They continue without this command."


@describe(
    examples=["replicas add RUN --n 2", "replicas add RUN --n 4 --backend modal --gpu H100 --detach"],
    exit_codes=EXIT_CODES,
)
def add(
    run: RunArgument,
    *,
    n: Annotated[int, Option("--n", metavar="K", help="The number of replicas to add.")],
    backend: Annotated[
        str,
        Option(
            "--backend",
            "-b",
            metavar="NAME",
            help=BACKEND,
            rich_help_panel=WHERE,
            autocompletion=complete_backend,
        ),
    ] = "local",
    gpu: Annotated[str | None, Option(metavar="GPU", help=GPU, rich_help_panel=WHERE)] = None,
    timeout: Annotated[float | None, Option(metavar="DURATION", parser=parse_duration, help=TIMEOUT)] = None,
    env: EnvOption = None,
    secret: Annotated[list[str] | None, Option("--secret", metavar="NAME", help=SECRET, rich_help_panel=WHERE)] = None,
    option: BackendOptions = None,
    volume: VolumeOption = None,
    detach: Annotated[bool, Option("--detach", "-d", help=DETACH)] = False,
    task_digest: DigestOption = None,
    trust_bucket: TrustOption = False,
    rendezvous: RendezvousOption = None,
    as_json: JsonOption = False,
) -> int:
    """Start K more replicas of a run on any backend, and watch the run.

    The new replicas get new ranks and join the others at the next round. Ctrl-C ends the new replicas only. The
    --max-cost of the launch does not cover them: use --timeout.
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
                added: AddedDocument = {"run_id": found.run_id, "added": ranks, "backend": executor.backend_name}
                output.document(added)
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
                output.print(f"{name_ranks(ranks).capitalize()} could not be cancelled: {error}", "red")
            return CANCELLED
        except (StoreError, BackendError) as error:
            return report_unreadable_run(found, output, error, as_backend(executor), who="The added replicas")
    return Summary.of(found).finish(output)
