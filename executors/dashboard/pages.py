"""Writes the HTML of the dashboard around the report: the list, the rows, and the controls of a run.

The report itself comes from `executors.view.report.page`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from executors.view.report.page import ASSETS as REPORT_ASSETS
from executors.view.report.page import Served, asset, page, page_policy
from executors.view.report.text import name_moment, name_number, name_share

if TYPE_CHECKING:
    from executors.dashboard.actions import Action
    from executors.dashboard.run_feed import RunRow

ASSETS = Path(__file__).with_name("assets")
WIDTH, HEIGHT = 100, 24  # of a sparkline, in units of its SVG
STYLE, SCRIPT = "dashboard.css", "dashboard.js"


def row_html(row: RunRow) -> str:
    """Return a run as a row of the list.

    Args:
        row: the run.
    """
    return _templates().get_template("row.html").render(row=row, line=sparkline(row.losses))


def sparkline(values: Sequence[float]) -> str:
    """Return the path of a small curve. Empty if there are fewer than two values.

    Args:
        values: the values, from left to right.

    Example:
        sparkline([3.0, 2.0])  # "M0.0 1.0L100.0 23.0"
    """
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    size = (high - low) or 1.0
    points = (
        (WIDTH * at / (len(values) - 1), 1 + (HEIGHT - 2) * (high - value) / size) for at, value in enumerate(values)
    )
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def list_page(rows: Sequence[str], head: Mapping[str, str], version: int, settings: Mapping[str, Any]) -> str:
    """Return the page with the list of runs.

    Args:
        rows: the HTML of each row.
        head: the texts above and below the list.
        version: the version of the rows.
        settings: the values for the script.
    """
    return _with_policy("list.html", rows=[Markup(row) for row in rows], head=head, version=version, settings=settings)


def message_page(title: str, text: str, settings: Mapping[str, Any]) -> str:
    """Return a page with a message, which loads itself again when there is more to show.

    Args:
        title: the title of the page.
        text: the message.
        settings: the values for the script.
    """
    return _with_policy("message.html", title=title, text=text, settings=settings)


def run_page(document: Mapping[str, Any], parts: Mapping[str, str], settings: Mapping[str, Any]) -> str:
    """Return the page of a run: the page of `replicas report` with controls above it.

    Args:
        document: the document of the run.
        parts: the HTML of the controls' parts.
        settings: the values for the script.
    """
    made = (
        _templates()
        .get_template("controls.html")
        .render(parts={name: Markup(html) for name, html in parts.items()}, settings=settings, ranks=_ranks(document))
    )
    return page(document, Served(Markup(made), _asset(STYLE), _asset(SCRIPT)))


def controls_parts(row: RunRow, action: Action | None, *, is_read_only: bool) -> dict[str, str]:
    """Return the HTML of the parts of the controls, by name.

    Args:
        row: the run.
        action: the last action of a button on the run. None: there was none.
        is_read_only: True: there are no buttons.
    """
    template = _templates().get_template("state.html")
    return {
        "state": template.render(row=row, action=action),
        "buttons": "" if is_read_only else _templates().get_template("buttons.html").render(row=row, action=action),
    }


def _ranks(document: Mapping[str, Any]) -> list[int]:
    return [row["rank"] for row in document["replicas"]]


def _with_policy(name: str, **values: Any) -> str:
    styles, scripts = [asset("page.css"), _asset(STYLE)], [_asset(SCRIPT)]
    return (
        _templates()
        .get_template(name)
        .render(**values, csp=page_policy(styles, scripts, is_served=True), styles=styles, scripts=scripts)
    )


@cache
def _templates() -> Environment:
    made = Environment(
        loader=FileSystemLoader([ASSETS, REPORT_ASSETS]), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.filters |= {"moment": name_moment, "amount": name_number, "share": name_share}
    return made


@cache
def _asset(name: str) -> Markup:
    return Markup((ASSETS / name).read_text(encoding="utf-8").strip())
