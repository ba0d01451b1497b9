"""The verb `logs`: what replicas printed, and print."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Annotated, Any

from typer import Option

from executors.cli.options import (
    BackendOptions,
    ExecutorOption,
    RanksOption,
    RendezvousOption,
    RunArgument,
    find_run,
)
from executors.cli.output import refuse, usage_errors
from executors.logs import MAX_READ_BYTES


def logs(
    run: RunArgument,
    rank: RanksOption = None,
    follow: Annotated[bool, Option("--follow", "-f", help="Continue with new lines until the run ends.")] = False,
    lines: Annotated[int, Option("--lines", "-n", metavar="N", help="The last lines of each replica.")] = 200,
    rendezvous: RendezvousOption = None,
    backend: ExecutorOption = None,
    option: BackendOptions = None,
) -> int:
    """Print what replicas wrote to stdout and stderr.

    Lines of more than one rank are led by `\\[rank]`.
    """
    found = find_run(run, rendezvous, backend, option)
    if lines < 0:
        refuse(f"--lines must be at least 0, got {lines}.")
    ranks: list[Any] = rank or list(range(found.world_size))
    is_one = rank is not None and len(rank) == 1
    texts: Iterable[str]
    last = "\n"
    with usage_errors():
        if follow:
            texts = found.logs(ranks[0] if is_one else ranks, lines, follow=True)
        else:  # one rank at a time: each text is bounded, all together need not be
            texts = (found.logs(one if is_one else [one], lines) for one in ranks)
        for text in texts:
            sys.stdout.write(text)
            last = text[-1:] or last
            if follow:
                sys.stdout.flush()
            elif len(text) >= MAX_READ_BYTES:
                most = f"{MAX_READ_BYTES >> 20} MiB"
                print(f"Note: these are the last {most}; `replicas collect --out DIR` writes all.", file=sys.stderr)
    if last != "\n":
        sys.stdout.write("\n")
    return 0
