"""Writes the document of a run as one self-contained HTML page, which loads nothing and runs no text of the run."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from executors.settings.durations import name_duration
from executors.status import name_ranks
from executors.store.artifacts import replacing
from executors.view.report.text import name_moment, name_number, name_share, name_size
from executors.view.report.timeline import KINDS, MARKS, SHAPES, svg

ASSETS = Path(__file__).with_name("assets")
STYLES = ("uplot/uPlot.min.css", "page.css")
SCRIPTS = ("uplot/uPlot.iife.min.js", "page.js")


def page(document: Mapping[str, Any]) -> str:
    """Return a whole HTML page. Its content security policy allows only the page's own script and style, by digest."""
    policy = {
        "default-src": "'none'",
        "img-src": "data:",
        "script-src": " ".join(_digest(_asset(name)) for name in SCRIPTS),
        "style-src": " ".join(_digest(_asset(name)) for name in STYLES),
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    csp = "; ".join(f"{what} {allowed}" for what, allowed in policy.items())
    return _templates().get_template("page.html").render(document, csp=csp, fragment=Markup(fragment(document)))


def fragment(document: Mapping[str, Any]) -> str:
    """Return the page's content without `<html>` and `<head>`, to be put into another page, such as a notebook's
    output.
    """
    rounds, timeline = document["rounds"], document["timeline"]
    lanes = [{"rank": lane["rank"], "spans": lane["spans"] + lane["beside"]} for lane in timeline["lanes"]]
    kinds = {kind: text for kind, text in KINDS.items() if kind in timeline["used_kinds"]}
    charts = {
        "notable": document["notable"],
        "curves": document["curves"],
        "rounds": {"waited": rounds["waited"], "norms": rounds["norms"]},
        "timeline": {"end_s": timeline["end_s"], "kinds": KINDS, "lanes": lanes},
    }
    return (
        _templates()
        .get_template("report.html")
        .render(
            document,
            charts=_json(charts),
            timeline_svg=Markup(svg(timeline)),
            totals=[_totals(lane, kinds) for lane in timeline["lanes"]],
            kinds=kinds,
            marks=MARKS,
            shapes=SHAPES,
            styles=[_asset(name) for name in STYLES],
            scripts=[_asset(name) for name in SCRIPTS],
            only_head=False,
        )
    )


def head(document: Mapping[str, Any]) -> str:
    """Return the top of the page without scripts: the launch, and the summary in a few sentences."""
    styles = [_asset("page.css")]
    return _templates().get_template("report.html").render(document, styles=styles, scripts=(), only_head=True)


def write_page(document: Mapping[str, Any], path: Path) -> Path:
    """Write the HTML page to a file and return its path.

    An existing file is replaced at once, or left unchanged after an error.
    """
    with replacing(path) as file:
        file.write(page(document).encode())
    return path


@cache
def _templates() -> Environment:
    made = Environment(
        loader=FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "age": name_duration, "moment": name_moment, "amount": name_number, "share": name_share, "size": name_size,
        "ranks": name_ranks,
    }  # fmt: skip
    return made


@cache
def _asset(name: str) -> Markup:
    return Markup((ASSETS / name).read_text(encoding="utf-8").strip())


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _json(value: Any) -> Markup:
    """Return JSON that cannot close the HTML element around it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _totals(lane: Mapping[str, Any], kinds: Iterable[str]) -> dict[str, float]:
    spans = lane["spans"] + lane["beside"]
    return {kind: sum(to - since for each, since, to, _ in spans if each == kind) for kind in kinds}
