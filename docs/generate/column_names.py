"""Gives each cell of a wide table the name of its column, which the style sheet shows on a narrow screen.

There, the cells of a row stack. A row of two or three cells is read without help, except in a table that compares: the
head of its first column is empty. In a row of four and more cells, a number has no meaning without its column.
"""

from __future__ import annotations

import html
import re

WIDE = 4
"""The least number of columns of a table whose cells get names."""
TABLE = re.compile(r"<table\b.*?</table>", re.S)
HEAD = re.compile(r"<th\b[^>]*>(.*?)</th>", re.S)
ROW = re.compile(r"<tr\b.*?</tr>", re.S)
CELL = re.compile(r"<td\b(?![^>]*data-column)")


def with_column_names(body: str) -> str:
    """Return the HTML of a page in which cells of wide tables have the attribute `data-column`.

    Args:
        body: the HTML of the page.

    Example:
        with_column_names("<table><tr><th>a</th><th>b</th><th>c</th><th>d</th></tr>…</table>")
    """
    return TABLE.sub(lambda found: _named(found[0]), body)


def _named(table: str) -> str:
    names = [html.escape(html.unescape(re.sub(r"<[^>]+>", "", head)).strip()) for head in HEAD.findall(table)]
    if len(names) < WIDE and (not names or names[0]):
        return table

    def named_row(row: re.Match[str]) -> str:
        left = iter(names)
        return CELL.sub(lambda _: f'<td data-column="{next(left, "")}"', row[0])

    return ROW.sub(named_row, table)
