"""Makes the page of metrics: the columns of `Run.metrics().to_dict()`, from the declarations of the rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from diloco.rendezvous.round import RoundReport
from docs.generate.api import definition_of
from docs.generate.markdown import code, table
from executors.metrics.ledger import Ledger
from executors.metrics.metrics import KINDS
from executors.metrics.rows import Numbers, Round, Usage
from executors.view.report.scalars import OF_ROUND, OF_USAGE

IN_EACH = (
    ("kind", "str", "", f"The kind of the row: {', '.join(code(kind) for kind in KINDS.values())}."),
    ("rank", "int", "", "The rank of the replica."),
    ("attempt", "int", "", "The number of the attempt, from 0."),
    ("s", "float", "s", "The time on the run's time line, in seconds from the first claim of a rank."),
)
"""The columns that each row has: name, type, unit and meaning."""


class Column(NamedTuple):
    """A column of a run's metrics."""

    kind: str
    """The kind of the rows that have it. "each": all rows."""
    name: str
    type: str
    unit: str
    meaning: str


def columns() -> list[Column]:
    """Return the columns of all kinds of rows. Reported numbers have the names that the user gives them."""
    return [
        *(Column("each", *each) for each in IN_EACH),
        *columns_of(Round),
        *columns_of(Usage),
    ]


def columns_of(row: type[Round | Usage]) -> list[Column]:
    """Return the columns of one kind of rows, except for the columns of each row.

    Args:
        row: the class of the rows.
    """
    left_out = {"t", *(name for name, *_ in IN_EACH)}
    return [
        Column(KINDS[row], each.name, _type(each.type), each.metadata["unit"], _meaning(row, each.name))
        for each in dataclasses.fields(row)
        if each.name not in left_out
    ]


def attribute_of_column() -> dict[str, str]:
    """Return the attribute of `RoundReport` with the value of each column, if it has one."""
    report: Any = RoundReport.__new__(RoundReport)
    for number, each in enumerate(dataclasses.fields(RoundReport)):
        object.__setattr__(report, each.name, 1000.0 + number)  # a value that no other attribute has
    by_value = {1000.0 + number: each.name for number, each in enumerate(dataclasses.fields(RoundReport))}
    found = {name: by_value[value] for name, value in report.line().items() if value in by_value}
    return found | {"entry": "round"}  # the entry is the number of the round, less one


def metrics_page() -> str:
    """Return the page of metrics."""
    return "\n\n".join(_blocks()) + "\n"


def _blocks() -> Iterator[str]:
    yield "# Metrics"
    yield (
        "[`Run.metrics()`](#executors.Run.metrics) returns the measurements of a run, and "
        "`replicas export RUN --csv FILE` writes them. A row has a kind, and the columns of its kind. "
        "Other columns are empty."
    )
    yield '```python\npandas.DataFrame(attach("first-try").metrics().to_dict())\n```'
    yield "## Each row"
    yield _table(column for column in columns() if column.kind == "each")
    yield f"## Rows of the kind `{KINDS[Numbers]}`"
    yield (
        "A row has the numbers of one call of `replica.report(step=10, loss=2.3)`, under the names that you give them. "
        "The replica keeps at most one row a second, and the two rows after a round."
    )
    yield f"## Rows of the kind `{KINDS[Round]}`"
    yield (
        "DiLoCo records a row for each round of each replica. The last column names the attribute of the "
        "[`RoundReport`](#diloco.RoundReport) that `diloco.step()` returned. `entry` counts from 0, and `round` from 1."
    )
    attributes = attribute_of_column()
    yield table(
        ("column", "type", "unit", "meaning", "`RoundReport`"),
        [[*_cells(each), code(attributes.get(each.name, ""))] for each in columns_of(Round)],
    )
    yield f"## Rows of the kind `{KINDS[Usage]}`"
    yield "The process of each replica records a row every 30 seconds."
    yield _table(columns_of(Usage))
    yield "## What happened to the work"
    yield (
        "`Run.metrics().ledger` adds up the work of all replicas. A unit of work is an inner step, or the unit of a "
        "`weight` function."
    )
    yield table(("attribute", "meaning"), [[code(name), meaning] for name, meaning in _ledger()])
    yield "## TensorBoard and trackers"
    yield (
        "A tracker gets reported numbers under their own names, the numbers of a round as `round/…`, and resources as "
        "`usage/…`. The step of a round is its `entry`. A DiLoCo with another name has `round/<name>/…`."
    )
    yield table(
        ("names", "from"),
        [
            [", ".join(code(f"round/{name}") for name in (*OF_ROUND, "ranks")), f"rows of the kind `{KINDS[Round]}`"],
            [", ".join(code(f"usage/{name}") for name in OF_USAGE), f"rows of the kind `{KINDS[Usage]}`"],
        ],
    )


def _table(rows: Iterator[Column] | list[Column]) -> str:
    return table(("column", "type", "unit", "meaning"), [_cells(each) for each in rows])


def _cells(each: Column) -> list[str]:
    return [code(each.name), code(each.type), each.unit, each.meaning]


def _ledger() -> list[tuple[str, str]]:
    fields = dataclasses.fields(Ledger)
    return [(each.name, _meaning(Ledger, each.name)) for each in fields]


def _type(declared: object) -> str:
    return "str" if declared == "Verdict" else str(declared)


def _meaning(owner: type[Any], name: str) -> str:
    """Return the description of a field, from the text below its declaration."""
    found = definition_of(f"{owner.__module__}.{owner.__name__}").all_members[name]
    return " ".join(found.docstring.value.split()) if found.docstring else ""
