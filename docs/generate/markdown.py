"""Small pieces of Markdown that all generated pages are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def code(text: str) -> str:
    """Return a text as inline code; an empty text stays empty.

    Example:
        code("a|b")  # "`a|b`"
    """
    if not text:
        return ""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. A column that is empty in each row is left out.

    Args:
        heads: The head of each column.
        rows: Markdown of one line for each cell.

    Example:
        table(("option", "meaning"), [["`--n`", "How many replicas."]])
    """
    rows = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
    used = [column for column in range(len(heads)) if any(row[column] for row in rows)]
    lines = [
        [heads[column] for column in used],
        ["---"] * len(used),
        *([row[column] for column in used] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
