"""The state of a run as a table for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from executors.cli.output import name_duration, one_line
from executors.protocol import ReplicaStatus
from executors.status import HEADINGS, ReplicaState, RunStatus

STYLES = {
    ReplicaStatus.PENDING: "dim",
    ReplicaStatus.RUNNING: "cyan",
    ReplicaStatus.SUCCEEDED: "green",
    ReplicaStatus.FAILED: "bold red",
    ReplicaStatus.CANCELLED: "yellow",
}
INTEREST = [
    ReplicaStatus.FAILED,
    ReplicaStatus.RUNNING,
    ReplicaStatus.CANCELLED,
    ReplicaStatus.PENDING,
    ReplicaStatus.SUCCEEDED,
]
WIDTHS = {"rank": 4, "status": 9, "round": 5, "step": 6, "loss": 8, "round_s": 9}  # so that columns stay where they are
LINES_AROUND = 5  # title, head, what is left out, hint, and the prompt that follows


def plain_table(*columns: str, right: Sequence[str] = ()) -> Table:
    """Return an empty table without lines: aligned columns under grey headings."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left")
    return table


def cut(text: str) -> Text:
    """Return a cell of one line that is cut where its column ends."""
    return Text(one_line(text), no_wrap=True, overflow="ellipsis")


def title(status: RunStatus, elapsed_s: float) -> Text:
    """Return the line above the table: how many replicas are in which state, and since when."""
    counts = [(state, sum(replica.status is state for replica in status.replicas)) for state in ReplicaStatus]
    text = Text(", ").join(Text(f"{count} {state}", style=STYLES[state]) for state, count in counts if count)
    if status.joined:
        text.append(f", {status.joined} joined")
    return text.append(f"  {name_duration(elapsed_s)}", style="dim")


def replica_table(status: RunStatus, max_rows: int | None = None) -> RenderableType:
    """Return the table of a run's replicas.

    Args:
        max_rows: show no more; those that failed or run come before the others, and what is left out is said.
    """
    columns = status.used_columns()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in columns:
        left = name in ("status", "note")
        table.add_column(
            HEADINGS.get(name, name),
            justify="left" if left else "right",
            min_width=WIDTHS.get(name),
            no_wrap=name != "note",  # the one that gives way on a narrow terminal
        )
    shown, hidden = _choose(status.replicas, max_rows)
    for replica in shown:
        table.add_row(*(_cell(replica, name) for name in columns))
    return Group(table, Text(f"… and {hidden} more", style="dim")) if hidden else table


def _choose(replicas: Sequence[ReplicaState], max_rows: int | None) -> tuple[list[ReplicaState], int]:
    if max_rows is None or len(replicas) <= max_rows:
        return list(replicas), 0
    by_interest = sorted(replicas, key=lambda replica: (INTEREST.index(replica.status), replica.rank))
    shown = sorted(by_interest[: max(1, max_rows)], key=lambda replica: replica.rank)
    return shown, len(replicas) - len(shown)


def _cell(replica: ReplicaState, column: str) -> Text:
    text = cut(replica.cell(column)) if column == "note" else Text(replica.cell(column))
    if column == "status":
        text.stylize(STYLES[replica.status])
    elif column == "note":
        text.stylize("red" if replica.status is ReplicaStatus.FAILED else "dim")
    return text
