"""Writes the document of a run as one self-contained HTML page, which loads nothing and runs no text of the run."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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


PART = re.compile(r'<div class="part" data-part="([a-z]+)">\n(.*?)</div><!--end-->', re.S)
"""Matches a part of the page. No text of a run can contain its end, because `<` is escaped there."""


@dataclass(frozen=True)
class Served:
    """The additions to a page that a server updates."""

    controls: Markup
    """HTML above the report."""
    style: Markup
    script: Markup


def page(document: Mapping[str, Any], served: Served | None = None) -> str:
    """Return a whole HTML page. Its content security policy allows only the page's own script and style, by digest.

    Args:
        document: the document of the run.
        served: the additions of a page that a server updates. None: the page is a file, and makes no request.
    """
    styles, scripts = [asset(name) for name in STYLES], [asset(name) for name in SCRIPTS]
    if served is not None:
        styles, scripts = [*styles, served.style], [*scripts, served.script]
    return (
        _templates()
        .get_template("page.html")
        .render(
            document,
            csp=page_policy(styles, scripts, is_served=served is not None),
            fragment=Markup(_fragment(document, styles, scripts, served)),
        )
    )


def page_policy(styles: Iterable[str], scripts: Iterable[str], *, is_served: bool) -> str:
    """Return a content security policy that allows these texts, by digest, and nothing else.

    Args:
        styles: the style sheets of the page.
        scripts: its scripts.
        is_served: True if the scripts may ask the server of the page.
    """
    policy = {
        "default-src": "'none'",
        "img-src": "data:",
        "script-src": " ".join(map(_digest, scripts)),
        "style-src": " ".join(map(_digest, styles)),
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    if is_served:
        policy["connect-src"] = "'self'"
    return "; ".join(f"{what} {allowed}" for what, allowed in policy.items())


def fragment(document: Mapping[str, Any]) -> str:
    """Return the page's content without `<html>` and `<head>`, to be put into another page, such as a notebook's
    output.
    """
    return _fragment(document, [asset(name) for name in STYLES], [asset(name) for name in SCRIPTS])


def page_parts(document: Mapping[str, Any]) -> dict[str, str]:
    """Return the HTML of each part of a served page, by the name of the part.

    Args:
        document: the document of the run.
    """
    nothing = Served(Markup(""), Markup(""), Markup(""))
    return dict(PART.findall(_fragment(document, (), (), nothing)))


def charts_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that the script of the page draws.

    Args:
        document: the document of the run.
    """
    rounds, timeline = document["rounds"], document["timeline"]
    lanes = [{"rank": lane["rank"], "spans": lane["spans"] + lane["beside"]} for lane in timeline["lanes"]]
    return {
        "notable": document["notable"],
        "curves": document["curves"],
        "rounds": {"waited": rounds["waited"], "norms": rounds["norms"]},
        "timeline": {"end_s": timeline["end_s"], "kinds": KINDS, "lanes": lanes},
    }


def _fragment(
    document: Mapping[str, Any], styles: Sequence[str], scripts: Sequence[str], served: Served | None = None
) -> str:
    timeline = document["timeline"]
    kinds = {kind: text for kind, text in KINDS.items() if kind in timeline["used_kinds"]}
    return (
        _templates()
        .get_template("report.html")
        .render(
            document,
            charts=_json(charts_of(document)),
            timeline_svg=Markup(svg(timeline)),
            totals=[_totals(lane, kinds) for lane in timeline["lanes"]],
            kinds=kinds,
            marks=MARKS,
            shapes=SHAPES,
            styles=styles,
            scripts=scripts,
            only_head=False,
            controls="" if served is None else served.controls,
            is_live_page=served is not None,
        )
    )


def head(document: Mapping[str, Any]) -> str:
    """Return the top of the page without scripts: the launch, and the summary in a few sentences."""
    styles = [asset("page.css")]
    return (
        _templates()
        .get_template("report.html")
        .render(document, styles=styles, scripts=(), only_head=True, controls="", is_live_page=False)
    )


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
def asset(name: str) -> Markup:
    """Return the text of a style sheet or a script of the page.

    Args:
        name: the name of the file below `assets`.
    """
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
