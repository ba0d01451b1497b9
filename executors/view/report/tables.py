"""Writes the measurements of a run to a table: a CSV file, or a file with one JSON object per line."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

from executors.metrics.metrics import Metrics
from executors.metrics.rows import MAX_NAME
from executors.store.artifacts import replacing
from executors.view.report.text import one_line

SEPARATORS = re.compile(r"[;,|\"]")  # a spreadsheet may end a cell at one of these, even within quotes
FORMULA = tuple("=+-@'\uff1d\uff0b\uff0d\uff20")  # the last four are the same signs as East Asian keyboards write them


def write_csv(metrics: Metrics, path: Path) -> None:
    """Write each row as one line of a CSV file. A text never begins a formula when a spreadsheet opens the file.

    The first columns identify a row. The columns of reported numbers have the names that the training code gave them.
    An existing file is replaced.
    """
    columns = metrics.to_dict()
    columns.pop("t", None)
    with replacing(path) as file, io.TextIOWrapper(file, "utf-8", newline="") as text:
        writer = csv.writer(text)
        writer.writerow(map(_cell, columns))
        writer.writerows(zip(*([_cell(value) for value in column] for column in columns.values()), strict=True))


def write_jsonl(metrics: Metrics, path: Path) -> None:
    """Write each row as one line with a JSON object. An existing file is replaced."""
    with replacing(path) as file:
        for row in metrics:
            record = {name: value for name, value in metrics.record(row).items() if name != "t" and value is not None}
            file.write(f"{json.dumps(record)}\n".encode())


def _cell(value: Any) -> Any:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    if not isinstance(value, str):
        return value
    text = SEPARATORS.sub(" ", one_line(value, MAX_NAME)).strip()
    return f"'{text}" if text.startswith(FORMULA) else text
