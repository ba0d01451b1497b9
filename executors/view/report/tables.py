"""The measurements of a run as a table in a file: CSV, or a JSON object a line."""

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

SEPARATORS = re.compile(r"[;,|\"]")  # which a spreadsheet may take for the end of a cell, even within quotes
FORMULA = tuple("=+-@'\uff1d\uff0b\uff0d\uff20")  # the last four: how East Asian keyboards write the first


def write_csv(metrics: Metrics, path: Path) -> None:
    """Write one line a row, over the file if there is one. No text in it begins a formula where a spreadsheet opens it.

    The first columns say what a row is; those of numbers that were reported are named as they were.
    """
    columns = metrics.to_dict()
    columns.pop("t", None)
    with replacing(path) as file, io.TextIOWrapper(file, "utf-8", newline="") as text:
        writer = csv.writer(text)
        writer.writerow(map(_cell, columns))
        writer.writerows(zip(*([_cell(value) for value in column] for column in columns.values()), strict=True))


def write_jsonl(metrics: Metrics, path: Path) -> None:
    """Write each row as a JSON object on a line of its own, over the file if there is one."""
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
