"""The table of the replicas of a run, for a terminal."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from executors.cli.output import name_duration, one_line
from executors.protocol import ReplicaStatus
from executors.status import COLUMNS, HEADINGS, STEPS_PER_S, ReplicaState, RunStatus

STYLES: Mapping[str, str] = {  # states in the order in which a short table shows their replicas
    ReplicaStatus.FAILED: "bold red",
    ReplicaStatus.RUNNING: "cyan",
    ReplicaStatus.CANCELLED: "yellow",
    ReplicaStatus.PENDING: "dim",
    ReplicaStatus.SUCCEEDED: "green",
}
WIDTHS = {
    "rank": 4,
    "restarts": 5,
    "status": 9,
    "round": 5,
    "step": 6,
    "loss": 8,
    "round_s": 9,
    STEPS_PER_S: 7,
    "left": 7,
}
"""The least widths of columns, in characters. They keep columns in place when numbers get more digits."""
GAP = 2
NOTE_WIDTH = 20  # the least width of the column `note`, in characters
MAX_HEADING = 20  # the longest name of a reported number, in characters
LINES_AROUND = 5  # the number of lines around the rows: title, head, count of hidden rows, hint, and the shell's prompt


def plain_table(*columns: str, right: Collection[str], gives_way: str) -> Table:
    """Return an empty table with aligned columns.

    Args:
        columns: the names of the columns.
        right: the columns with numbers, which are aligned to the right.
        gives_way: the column that becomes narrower on a narrow terminal.

    Example:
        plain_table("run", "age", right=("age",), gives_way="run")
    """
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
    for name in columns:
        table.add_column(
            Text(_heading(name)),
            justify="right" if name in right else "left",
            min_width=WIDTHS.get(name),
            no_wrap=name != gives_way,
        )
    return table


def _heading(column: str) -> str:
    return HEADINGS[column] if column in HEADINGS else one_line(column, MAX_HEADING)


def cut(text: str) -> Text:
    """Return a table cell of one line. Text that does not fit into the column is cut.

    Args:
        text: the text of the cell.
    """
    return Text(one_line(text), no_wrap=True, overflow="ellipsis")


def title(status: RunStatus, elapsed_s: float) -> Text:
    """Return the line above the table: the number of replicas by status, and the time since the launch.

    Args:
        status: the state of the run.
        elapsed_s: the seconds since the launch.
    """
    text = Text(", ").join(Text(f"{count} {state}", style=STYLES[state]) for state, count in status.numbers)
    if status.joined:
        text.append(f", {status.joined} joined")
    if status.prospects:
        text.append(f"; {status.prospects}", style="yellow")
    return text.append(f"  {name_duration(elapsed_s)}", style="dim")


def replica_table(
    status: RunStatus,
    max_rows: int | None = None,
    *,
    width: int,
    more: Sequence[str] | None = None,
    brief: bool = False,
) -> RenderableType:
    """Return the table of the replicas of a run.

    Args:
        status: the state of the run.
        max_rows: the largest number of rows. Failed and running replicas come first, and further ones are only counted.
            None: all.
        width: the width of the terminal, in characters. On a narrow terminal, the least important numbers are omitted.
        more: the names of reported numbers to show besides the usual ones. None: the first three.
        brief: True to show only the reason of each failure, if the full text is printed elsewhere. False: the full
            text of each different failure is shown once.

    Example:
        replica_table(run.status(), width=80)
    """
    shown = status.replicas
    if max_rows is not None:
        by_interest = sorted(shown, key=lambda replica: (list(STYLES).index(replica.status), replica.rank))
        shown = sorted(by_interest[: max(1, max_rows)], key=lambda replica: replica.rank)
    columns = _fitting_columns(status.used_columns(more), shown, width, more or ())
    table = plain_table(*columns, right={*columns} - {"status", "note"}, gives_way="note")
    printed: set[str] = set()
    for replica in shown:
        is_printed = (brief and not replica.restart.note) or replica.note in printed
        printed.add(replica.note)
        table.add_row(*(_cell(replica, name, is_printed) for name in columns))
    hidden = len(status.replicas) - len(shown)
    return Group(table, Text(f"… and {hidden} more", style="dim")) if hidden else table


def _fitting_columns(columns: list[str], shown: Sequence[ReplicaState], width: int, wanted: Sequence[str]) -> list[str]:
    """Return the columns that fit. The first column to be omitted is the rate, then the time in rounds, then the last
    reported numbers.

    Args:
        columns: the names of all columns.
        shown: the replicas in the table.
        width: the width of the terminal, in characters.
        wanted: the columns that the user asked for. These are never omitted.
    """

    def width_of(name: str) -> int:
        longest = max((len(replica.cell(name)) for replica in shown), default=0)
        return max(WIDTHS.get(name, 0), len(_heading(name)), longest if name != "note" else min(longest, NOTE_WIDTH))

    others = [name for name in reversed(columns) if name not in COLUMNS]
    for name in (STEPS_PER_S, "round_s", *others):
        if name in columns and name not in wanted and sum(width_of(each) + GAP for each in columns) - GAP > width:
            columns.remove(name)
    return columns


def _cell(replica: ReplicaState, column: str, is_printed: bool) -> Text:
    outcome = replica.outcome
    if column == "note" and is_printed and outcome is not None and outcome.status is ReplicaStatus.FAILED:
        text = Text(outcome.reason or "")
    else:
        text = cut(replica.cell(column)) if column == "note" else Text(replica.cell(column))
    if column == "status":
        text.stylize(STYLES[replica.status])
    elif column == "note":
        text.stylize("red" if replica.status is ReplicaStatus.FAILED else "dim")
    return text
