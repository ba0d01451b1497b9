"""The verb `logs`: what replicas printed, and print."""

from __future__ import annotations

import re
import sys
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
from executors.cli.output import JsonOption, Output, inert, refuse, usage_errors
from executors.logs import MAX_READ_BYTES

ATTEMPT = "An earlier attempt, by its number, or `all`. Default: the newest of each rank."


BAR = re.compile(r"^.*\r(?=[^\r\n])", re.MULTILINE)
"""What a terminal shows no more of a line: a progress bar writes over it again and again."""
BAR_OF_RANK = re.compile(rf"^(\[\d+\] ){BAR.pattern[1:]}", re.MULTILINE)


def logs(
    run: RunArgument,
    rank: RanksOption = None,
    follow: Annotated[bool, Option("--follow", "-f", help="Continue with new lines until the run ends.")] = False,
    lines: Annotated[int, Option("--lines", "-n", metavar="N", help="The last lines of each replica.")] = 200,
    attempt: Annotated[str | None, Option("--attempt", metavar="K", help=ATTEMPT)] = None,
    raw: Annotated[bool, Option("--raw", help="Show lines with all that was written over by progress bars.")] = False,
    rendezvous: RendezvousOption = None,
    backend: ExecutorOption = None,
    option: BackendOptions = None,
    as_json: JsonOption = False,
) -> int:
    """Print what replicas wrote to stdout and stderr.

    Lines of more than one rank are led by `\\[rank]`.
    """
    found = find_run(run, rendezvous, backend, option)
    if as_json and follow:
        refuse("--json prints one document at the end: leave --follow away.")
    if lines < 0:
        refuse(f"--lines must be at least 0, got {lines}.")
    if attempt not in (None, "all") and not attempt.isdecimal():
        refuse(f"--attempt is a number or 'all', got {attempt!r}.")
    is_one = rank is not None and len(rank) == 1
    last = "\n"
    with usage_errors():
        which: Any = int(attempt) if attempt and attempt != "all" else attempt
        if as_json:
            ranks = rank or range(found.world_size)
            texts = {one: "".join(found.log_pieces(one, lines, False, which, _note)) for one in ranks}
            rows = [{"rank": one, "log": text if raw else BAR.sub("", text)} for one, text in texts.items()]
            Output(as_json).document({"run_id": found.run_id, "attempt": attempt, "replicas": rows})
            return 0
        for piece in found.log_pieces(rank[0] if rank and is_one else rank, lines, follow, which, _note):
            text = piece if raw else BAR.sub("", piece) if is_one else BAR_OF_RANK.sub(r"\1", piece)
            sys.stdout.write(text)
            last = text[-1:] or last
            if follow:
                sys.stdout.flush()
            elif len(piece) >= MAX_READ_BYTES:
                _note(f"these are the last {MAX_READ_BYTES >> 20} MiB; `replicas collect --out DIR` writes all.")
    if last != "\n":
        sys.stdout.write("\n")
    return 0


def _note(text: str) -> None:
    print(inert(f"Note: {text}"), file=sys.stderr, flush=True)
