"""`replicas cancel` and `rm`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from executors.cli.options import (
    ExecutorOption,
    ExecutorOptions,
    RendezvousOption,
    RunArgument,
    RunArguments,
    find_run,
    refuse,
)
from executors.cli.output import Output, inert, name_ranks
from executors.errors import ReplicasError
from executors.protocol import ReplicaStatus


def cancel(
    run: RunArgument,
    rank: Annotated[
        list[int] | None,
        typer.Option("--rank", "-r", metavar="R", help="Only this rank. Repeatable.", show_default=False),
    ] = None,
    rendezvous: RendezvousOption = None,
    backend: ExecutorOption = None,
    option: ExecutorOptions = None,
) -> int:
    """Cancel a run, or some of its ranks.

    Returns when they are gone, or the backend has agreed to end them. Nothing happens to what has ended.
    """
    output = Output()
    found = find_run(run, rendezvous, backend, option)
    before = found.status()
    try:
        if not rank:
            found.cancel()
        for one in rank or ():
            found.cancel(one)
    except ValueError as error:
        refuse(error)
    after = found.status()
    lived = [
        new
        for old, new in zip(before.replicas, after.replicas, strict=True)
        if not old.status.is_terminal and (not rank or new.rank in rank)
    ]
    ended = [replica.rank for replica in lived if replica.status is ReplicaStatus.CANCELLED]
    ending = [replica.rank for replica in lived if not replica.status.is_terminal]
    which = [name_ranks(ended)] if ended else []
    which += [f"{name_ranks(ending)} (still ending)"] if ending else []
    if which:
        output.say(f"Cancelled {found.run_id}: {' and '.join(which)}. Now {after.counts}.")
    else:
        output.say(f"Nothing to cancel in {found.run_id}: {after.counts}.")
    return 0


def rm(
    runs: RunArguments,
    rendezvous: RendezvousOption = None,
    backend: ExecutorOption = None,
    option: ExecutorOptions = None,
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
        except (ReplicasError, typer.BadParameter) as error:
            print(inert(f"Error: {error}"), file=sys.stderr)
            code = 2
    return code
