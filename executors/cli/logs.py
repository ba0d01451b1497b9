"""The verb `logs`, which prints the output of replicas."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from executors.cli.documents import LogsDocument, StackDump, StacksDocument
from executors.cli.options import (
    BackendOptions,
    ExecutorOption,
    MembersOption,
    RendezvousOption,
    RunArgument,
    find_run,
)
from executors.cli.output import FAILED, USAGE, JsonOption, Output, name_ranks, note, refuse, usage_errors
from executors.cli.verb_help import describe
from executors.errors import BackendError
from executors.settings.durations import DURATIONS, parse_duration

if TYPE_CHECKING:
    from executors.run.run import Run
    from executors.view.run_view import RunView

ATTEMPT = "The number of an attempt, or `all`. Default: the newest attempt of each rank."
LINES = "The number of last lines of each replica. Default: 200, but all that --grep, --since and --until find."
LAST_LINES = 200
TIME = f"a duration before now ({DURATIONS}), or a moment such as 2026-11-22T09:30"
SINCE = "Only lines since then: a duration before now, as in 5m, or 2026-11-22T09:30."
UNTIL = "Only lines until then: a duration before now, as in 5m, or 2026-11-22T09:30."
GREP = "Only lines in which this regular expression is found."
PREFIX = (
    "A text before each line, with {rank}, {attempt} and {run_id}. Default: '\\[{rank}] ' if there are several ranks."
)
STACKS = "Show the stacks of all threads of replicas that hung, instead of their output."
RAW = "Keep the parts of lines that progress bars have overwritten."

BAR = re.compile(r"^.*\r(?=[^\r\n])", re.MULTILINE)
"""Matches the part of a line that a progress bar has overwritten. A terminal does not show that part."""


def moment(text: str) -> float:
    """Return the Unix time that a text names: a duration before now, or a date and time by this machine's clock.

    Raises:
        ValueError: the text is neither a duration nor a date.
    """
    try:
        return time.time() - parse_duration(text)
    except ValueError:
        try:
            return datetime.fromisoformat(text).timestamp()
        except ValueError:
            raise ValueError(f"{text!r} is not a time. Give {TIME}.") from None


def without_bars(line: str) -> str:
    """Return a line without the parts that progress bars have overwritten."""
    return BAR.sub("", line)


def _without_bars_of_member(line: str) -> str:
    """Return a line without these parts. The number of the process that printed the line stays before it."""
    from executors.view.run_logs import OF_MEMBER

    found = OF_MEMBER.match(line)
    return without_bars(line) if found is None else f"{found[0]}{without_bars(line[found.end() :])}"


def without_bars_of(view: RunView) -> Callable[[str], str]:
    """Return a function that removes from a line the parts that progress bars have overwritten.

    Args:
        view: the run. The lines of replicas that have several processes begin with the number of the process.
    """
    return without_bars if view.record.settings.procs in (None, "1") else _without_bars_of_member


@describe(
    examples=[
        "replicas logs RUN --follow",
        "replicas logs RUN --rank 0,2-5 -n 50",
        "replicas logs RUN --grep loss --since 5m",
    ],
    exit_codes={
        0: "The logs were printed.",
        FAILED: "The logs of some ranks cannot be read.",
        USAGE: "A wrong option.",
    },
)
def logs(
    run: RunArgument,
    rank: MembersOption = None,
    follow: Annotated[bool, Option("--follow", "-f", help="Continue with new lines until the run ends.")] = False,
    lines: Annotated[int | None, Option("--lines", "-n", metavar="N", help=LINES)] = None,
    attempt: Annotated[str | None, Option("--attempt", metavar="K", help=ATTEMPT)] = None,
    grep: Annotated[str | None, Option("--grep", metavar="RE", help=GREP)] = None,
    since: Annotated[str | None, Option("--since", metavar="T", help=SINCE)] = None,
    until: Annotated[str | None, Option("--until", metavar="T", help=UNTIL)] = None,
    prefix: Annotated[str | None, Option("--prefix", metavar="TEMPLATE", help=PREFIX)] = None,
    stacks: Annotated[bool, Option("--stacks", help=STACKS)] = False,
    raw: Annotated[bool, Option("--raw", help=RAW)] = False,
    rendezvous: RendezvousOption = None,
    backend: ExecutorOption = None,
    option: BackendOptions = None,
    as_json: JsonOption = False,
) -> int:
    """Print the output of replicas.

    The output of several ranks has `\\[rank]` before each line.
    If a replica has several processes, the lines of process 1 begin with `\\[1]`. Lines of process 0, of other programs
    and of C code have no number. `--rank 2.1` selects the lines of process 1 of rank 2.
    """
    from executors.run.run import view_of
    from executors.view.report.text import colored
    from executors.view.run_logs import LineFilter, lines_of_members, log_pieces, logs_by_rank

    found = find_run(run, rendezvous, backend, option)
    view = view_of(found)
    if as_json and (follow or prefix is not None):
        refuse(f"--json prints one document at the end. Remove --json or {'--follow' if follow else '--prefix'}.")
    if follow and (since or until):
        refuse("--follow begins with the newest lines. Remove --follow, or --since and --until.")
    if lines is not None and lines < 0:
        refuse(f"--lines must be at least 0, got {lines}.")
    if attempt not in (None, "all") and not attempt.isdecimal():
        refuse(f"--attempt must be a number or 'all', got {attempt!r}.")
    which: Any = int(attempt) if attempt and attempt != "all" else attempt
    ranks = list(dict.fromkeys(one for one, _ in rank or ()))
    members = {one: [number for each, number in rank or () if each == one] for one in ranks}
    # A rank that was also named without a process is shown whole.
    chosen_members = {one: numbers for one, numbers in members.items() if None not in numbers}
    if stacks:
        if chosen_members:
            refuse("--stacks shows the stacks of all processes of a replica. Remove the process from --rank.")
        given = {"follow": follow, "grep": grep, "since": since, "until": until, "prefix": prefix, "lines": lines}
        if wrong := next((name for name, value in given.items() if value), None):
            refuse(f"--stacks shows complete stacks. Remove --{wrong}.")
        return _show_stacks(found, ranks or found.ranks, which, Output(as_json))
    last, unread = "\n", list[int]()

    def name_unread(one: int, error: BackendError) -> None:
        unread.append(one)
        note(f"The log of rank {one} cannot be read: {error}")

    with usage_errors():
        chosen = LineFilter(
            grep=_pattern(grep),
            since=None if since is None else moment(since),
            until=None if until is None else moment(until),
            prefix=prefix,
            clean=str if raw else without_bars_of(view),
            members=lines_of_members(view, chosen_members),
        )
        n_lines = lines if lines is not None else None if chosen.is_search and not follow else LAST_LINES
        if as_json:
            texts = logs_by_rank(view, ranks or found.ranks, n_lines, which, chosen, note, name_unread)
            logs: LogsDocument = {
                "run_id": found.run_id,
                "attempt": attempt,
                "replicas": [
                    {"rank": one, "members": chosen_members.get(one), "log": text} for one, text in texts.items()
                ],
            }
            Output(as_json).document(logs)
            return FAILED if unread else 0
        asked = ranks[0] if len(ranks) == 1 else ranks or None
        # output that goes to a file or a program gets no colors of this command
        shown = colored if sys.stdout.isatty() else str
        for text in log_pieces(view, asked, n_lines, follow, which, chosen, note, name_unread):
            sys.stdout.write(shown(text))
            last = text[-1:] or last
            if follow:
                sys.stdout.flush()
    if last != "\n":
        sys.stdout.write("\n")
    return FAILED if unread else 0


def _pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise ValueError(f"--grep {text!r} is not a regular expression: {error}.") from None


def _show_stacks(run: Run, ranks: Sequence[int], which: Any, output: Output) -> int:
    """Print the stacks of ranks.

    Args:
        run: the run.
        ranks: the ranks.
        which: the attempt: its number, or "all". None: the newest attempt of each rank that has stacks.
        output: the output of the verb.
    """
    from executors.cli.output import one_line
    from executors.run.run import view_of
    from executors.view.report.text import name_moment
    from executors.view.run_logs import stacks_of

    rows = list[StackDump]()
    for each in stacks_of(view_of(run), ranks, which):
        rows.append(
            {"rank": each.rank, "attempt": each.attempt, "number": each.number, "at": each.at, "text": each.text}
        )
    if output.as_json:
        document: StacksDocument = {"run_id": run.run_id, "stacks": rows}
        output.document(document)
    for row in rows if not output.as_json else ():
        output.print(
            one_line(f"=== rank {row['rank']}, attempt {row['attempt']}, {name_moment(row['at'])} ==="), "bold"
        )
        output.print(row["text"])
    if not rows:
        note(f"No stacks exist of {name_ranks(ranks)}. Replicas write stacks when they hang.")
    return 0
