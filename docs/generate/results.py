"""Makes the page of results from the data files in `docs/results/`. Each data file gives one section.

To publish a measurement, put one JSON object into `docs/results/NAME.json`, and nothing else. `Document` has its
fields. A measurement whose data is not in the form of tables has a function in `SECTIONS`, which makes its section.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypedDict

from docs.generate import scaling
from docs.generate.markdown import code, table

FOLDER = Path(__file__).parents[1] / "results"
ORDER = ("scaling", "outer_settings", "recovery", "goodput", "utilization", "many")
"""The order of the sections. The others follow by name."""
INTRODUCTION = """# Results

This page shows what was measured, and on which machine. Each section is made from one data file in `docs/results/`.
The data file has the command that made it. A result that disappoints is kept. To add a result, see
[Development](../development/index.md).
"""
CONTENTS = """```{toctree}
:hidden:

outer_settings
```
"""

Cell = str | int | float | bool | None


class Rows(TypedDict):
    """One table of a data file.

    Attributes:
        caption: One sentence in Markdown: what the table shows.
        columns: The head of each column, by the key of its values in `rows`.
        rows: The values. A missing value and null are empty cells.
    """

    caption: str
    columns: dict[str, str]
    rows: list[dict[str, Cell]]


class Document(TypedDict):
    """A data file of which the section has text and tables.

    Attributes:
        title: The heading of the section.
        about: Paragraphs in Markdown: the setup, the goal, and what the figures mean.
        command: The command that made the file.
        machine: The processor, the memory, the versions, and the load of the machine.
        tables: The tables. Other keys of the object, such as raw samples, are not shown.
    """

    title: str
    about: str
    command: str
    machine: str
    tables: list[Rows]


def plain_section(found: Document) -> str:
    """Return the section of a data file that has text and tables.

    Args:
        found: The data.

    Example:
        plain_section(json.loads(Path("docs/results/many.json").read_text()))
    """
    tables = [
        f"{each['caption']}\n\n"
        + table([*each["columns"].values()], [[_text(row.get(key)) for key in each["columns"]] for row in each["rows"]])
        for each in found["tables"]
    ]
    machine = f"Measured on: {found['machine']}. Command: {code(found['command'])}."
    return "\n\n".join([f"## {found['title']}", found["about"], *tables, machine])


def _text(value: Cell) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else value


def outer_settings_section(found: Mapping[str, Any]) -> str:
    """Return the section of the outer settings in short runs, which have a page of their own.

    Args:
        found: The data.
    """
    return (
        "## Outer settings in short runs\n\n"
        f"{found['about']} [Outer settings in short runs](outer_settings.md) has all rows. The defaults of `DiLoCo` "
        "for short plans follow this measurement.\n\n"
        f"Measured on: {found['versions']['machine']}, PyTorch {found['versions']['torch']}. "
        f"Command: {code(found['command'])}."
    )


def wires_section(found: Mapping[str, Any]) -> str:
    """Return the section of the losses by wire.

    Args:
        found: The data.
    """
    heads = ("setting", "inner_steps", "steps", "replicas", "seed", "loss", "bytes")
    keys = ("setting", "inner_steps", "steps", "n", "seed", "loss", "n_bytes")
    rows = [[_text(f"{run[key]:.4f}" if key == "loss" else run[key]) for key in keys] for run in found["runs"]]
    versions = found["versions"]
    return (
        f"## Losses by wire\n\n{found['about']} [Slow links](../how-to/slow-links.md) explains them.\n\n"
        f"{table(heads, rows)}\n\nMeasured on: {versions['machine']}, PyTorch {versions['torch']}. "
        f"Command: {code(found['command'])}."
    )


SECTIONS: Mapping[str, Callable[[Any], str]] = {
    "scaling": scaling.section,
    "outer_settings": outer_settings_section,
    "wires": wires_section,
}
"""The function of each data file that is not a `Document`, by the name of the file without suffix."""


def data_files() -> dict[str, Path]:
    """Return the data files by name without suffix, in the order of the page."""
    paths = {path.stem: path for path in sorted(FOLDER.glob("*.json"))}
    return {name: paths[name] for name in [*ORDER, *paths] if name in paths}


def results_page() -> str:
    """Return the page of results."""
    sections = []
    for name, path in data_files().items():
        section: Callable[[Any], str] = SECTIONS.get(name, plain_section)
        sections.append(section(json.loads(path.read_text(encoding="utf-8"))))
    return "\n\n".join([INTRODUCTION.strip(), *sections, CONTENTS])
