"""Builds the time line of a run: one lane per rank, with spans for starting, training, transfers, waiting, reducing and
being dead.

Parts of a round that ran in the background are drawn on top of the training span.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from html import escape
from typing import Any

from executors.metrics.metrics import AttemptSpan, Metrics
from executors.metrics.rows import Round
from executors.protocol import ReplicaStatus
from executors.settings.durations import name_duration
from executors.view.report.event_reader import Event
from executors.view.report.text import one_line

KINDS = {
    "starting": "starting",
    "training": "training",
    "moving": "sending and reading",
    "waiting": "waiting for others",
    "reducing": "reducing, outer step",
    "beside": "a round while training continued",
    "dead": "dead",
}
MARKS = {
    "fail": "killed or failed",
    "stop": "cancelled",
    "restart": "next attempt",
    "hang": "may hang",
    "notice": "told to end",
    "late": "came too late",
}
OF_EVENTS = {"hang_suspected": "hang", "notice": "notice"}
SHAPES = {
    "fail": "M-5-5 5 5M-5 5 5-5",
    "stop": "M-4-4h8v8h-8z",
    "restart": "M-4-5 5 0-4 5z",
    "hang": "M-4-5h8L0 0l4 5h-8l4-5z",
    "notice": "M0-5 5 4h-10z",
    "late": "M0-4 4 0 0 4-4 0z",
}
MAX_SPANS = 5000
MAX_MARKS = 100  # the most spans in one lane
WIDTH = 10_000  # units of a lane; the page stretches them to its width
LANE, NARROW_LANE, MANY, AXIS = 1.6, 0.7, 20, 1.7  # heights in em; from `MANY` lanes on they are narrow
STEPS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400)
N_TICKS = 7
Span = list[Any]
"""The activity, its begin and end in seconds on the run's time line, and its rounds."""


def timeline_document(metrics: Metrics, events: Sequence[Event] = ()) -> dict[str, Any]:
    """Return the lanes with their spans and marks, as JSON. If there are too many spans, one span stands for several
    rounds.

    Args:
        events: the events of the run. Events that no measurement shows become marks.
    """
    rounds: dict[tuple[int, int], list[Round]] = defaultdict(list)
    for row in metrics.rounds:
        rounds[row.rank, row.attempt].append(row)
    first: dict[tuple[int, int], float] = {}
    for number in metrics.numbers:
        if (number.rank, number.attempt) not in first:
            first[number.rank, number.attempt] = metrics.at(number)
    has_hidden = any(row.hidden_s and row.stale_steps for row in metrics.rounds)
    merged = max(1, math.ceil((4 + has_hidden) * len(metrics.rounds) / max(1, MAX_SPANS - 3 * len(metrics.attempts))))
    end_s = max([metrics.as_of_s, *(span.ended_s or 0.0 for span in metrics.attempts)])
    decided = {(event.rank, (event.attempt or 0) + 1): event.why for event in events if event.kind == "decided"}
    lanes: dict[int, dict[str, Any]] = {}
    for attempt in metrics.attempts:
        key = (attempt.rank, attempt.attempt)
        lane = lanes.setdefault(attempt.rank, {"rank": attempt.rank, "spans": [], "beside": [], "marks": []})
        if lane["spans"]:
            lane["spans"].append(["dead", lane["spans"][-1][2], attempt.started_s, ""])
            why = one_line(decided.get(key, f"attempt {attempt.attempt}"), 200)
            lane["marks"].append(["restart", attempt.started_s, why])
        lane["spans"] += _spans(attempt, rounds[key], metrics, merged, first.get(key), end_s)
        lane["beside"] += _beside(rounds[key], metrics, merged) if has_hidden else []
        late = [row for row in rounds[key] if row.verdict != "counted"]
        lane["marks"] += [["late", metrics.at(row), f"round {row.entry + 1}: {row.verdict}"] for row in late]
        lane["marks"] += _end(attempt)
    for event in events:
        if event.kind in OF_EVENTS and event.rank in lanes:
            at_s = min(max(0.0, event.at - metrics.began_at), end_s)
            text = one_line(f"{event.kind.replace('_', ' ')}: {event.why or event.reason}", 200)
            lanes[event.rank]["marks"].append([OF_EVENTS[event.kind], at_s, text])
    for lane in lanes.values():
        last = [span for span in metrics.attempts if span.rank == lane["rank"]][-1]
        if last.outcome is not None and last.outcome.status is not ReplicaStatus.SUCCEEDED:
            lane["spans"].append(["dead", lane["spans"][-1][2], end_s, ""])
        lane["n_marks"] = len(lane["marks"])
        lane["marks"].sort(key=lambda mark: mark[1])
        lane["marks"] = [[kind, round(at, 3), text] for kind, at, text in lane["marks"][-MAX_MARKS:]]
        lane["spans"] = [[kind, round(a, 3), round(b, 3), text] for kind, a, b, text in lane["spans"] if b > a]
    return {
        "end_s": round(end_s, 3),
        "merged": merged,
        "used_kinds": sorted({kind for lane in lanes.values() for kind, *_ in lane["spans"] + lane["beside"]}),
        "used_marks": sorted({kind for lane in lanes.values() for kind, _, _ in lane["marks"]}),
        "lanes": [lanes[rank] for rank in sorted(lanes)],
    }


def _spans(
    attempt: AttemptSpan, rounds: Sequence[Round], metrics: Metrics, merged: int, first_s: float | None, end_s: float
) -> list[Span]:
    """Return the activities of an attempt from its claim to its end."""
    last_s = max(attempt.started_s, end_s if attempt.ended_s is None else attempt.ended_s)
    now_s = first_s if first_s is not None else last_s
    if rounds:
        now_s = metrics.at(rounds[0]) - rounds[0].train_s - rounds[0].round_s
    now_s = min(max(attempt.started_s, now_s), last_s)
    spans: list[Span] = [["starting", attempt.started_s, now_s, ""]]
    for at in range(0, len(rounds), merged):
        group = rounds[at : at + merged]
        gap_s = max(0.0, metrics.at(group[-1]) - now_s)
        other_s = {
            "moving": 0.0,
            "waiting": sum(row.late_share * row.wait_s for row in group),
            "reducing": sum(row.late_share * (row.reduce_s + row.step_s) for row in group),
        }
        other_s["moving"] = max(0.0, sum(row.round_s for row in group) - sum(other_s.values()))
        # The measured parts must fit in the gap, although clocks of hosts differ a little.
        scale = min(1.0, gap_s / (sum(other_s.values()) or 1.0))
        training_s = gap_s - scale * sum(other_s.values())
        names = _name(group)
        for kind, seconds in [("training", training_s), *((kind, scale * each) for kind, each in other_s.items())]:
            spans.append([kind, now_s, now_s + seconds, names])
            now_s += seconds
    spans.append(["training", now_s, max(now_s, last_s), ""])
    return spans


def _beside(rounds: Sequence[Round], metrics: Metrics, merged: int) -> list[Span]:
    """Return the spans of rounds that ran in the background while the attempt continued training."""
    spans = []
    for at in range(0, len(rounds), merged):
        group = rounds[at : at + merged]
        to_s = metrics.at(group[-1]) - group[-1].round_s
        hidden_s = min(
            sum(row.hidden_s for row in group), max(0.0, to_s - metrics.origins[group[0].rank, group[0].attempt])
        )
        if hidden_s:
            spans.append(["beside", round(to_s - hidden_s, 3), round(to_s, 3), _name(group)])
    return spans


def _name(group: Sequence[Round]) -> str:
    return f"round {group[0].entry + 1}" + (f"-{group[-1].entry + 1}" if len(group) > 1 else "")


def _end(attempt: AttemptSpan) -> list[Span]:
    outcome = attempt.outcome
    if outcome is None or attempt.ended_s is None or outcome.status is ReplicaStatus.SUCCEEDED:
        return []
    kind = "stop" if outcome.status is ReplicaStatus.CANCELLED else "fail"
    return [[kind, attempt.ended_s, one_line(f"{outcome.reason or outcome.status}: {outcome.headline}", 200)]]


def svg(document: dict[str, Any]) -> str:
    """Draw the time line as SVG. Its lanes stretch with the page; its texts and marks keep their size."""
    end_s = document["end_s"] or 1.0
    lane_em = LANE if len(document["lanes"]) <= MANY else NARROW_LANE
    height = lane_em * len(document["lanes"])
    step_s = next((step for step in STEPS_S if end_s / step <= N_TICKS), 86_400 * math.ceil(end_s / 86_400 / N_TICKS))
    parts = [f'<svg class="timeline" role="img" aria-label="Time line" width="100%" height="{height + AXIS:g}em">']
    for number in range(int(end_s / step_s) + 1):
        share = number * step_s / end_s
        anchor = "start" if number == 0 else "end" if share > 0.96 else "middle"
        parts.append(
            f'<line x1="{share:.3%}" x2="{share:.3%}" y1="0" y2="{height + 0.3:g}em"/>'
            f'<text x="{share:.3%}" y="{height + 1.4:g}em" text-anchor="{anchor}">{_tick(number * step_s)}</text>'
        )
    for number, lane in enumerate(document["lanes"]):
        top = number * lane_em
        parts.append(
            f'<svg y="{top + lane_em / 8:g}em" width="100%" height="{lane_em * 3 / 4:g}em" viewBox="0 0 {WIDTH} 1" '
            'preserveAspectRatio="none">'
        )
        paths = {kind: _path(lane["spans"] + lane["beside"], kind, WIDTH / end_s) for kind in KINDS}
        parts += [f'<path class="{kind}" d="{path}"/>' for kind, path in paths.items() if path]
        parts.append("</svg>")
        for kind, at_s, text in lane["marks"]:
            title = escape(f"Rank {lane['rank']} at {name_duration(at_s)}: {text}")
            parts.append(
                f'<svg x="{at_s / end_s:.3%}" y="{top + lane_em / 2:g}em" width="1em" height="1em" viewBox="0 0 14 14" '
                f'overflow="visible">'
                f'<path class="{kind}" d="{SHAPES[kind]}"><title>{title}</title></path></svg>'
            )
    return "".join([*parts, "</svg>"])


def _path(spans: Sequence[Span], kind: str, scale: float) -> str:
    found = [(round(a * scale), round(b * scale)) for each, a, b, _ in spans if each == kind]
    top, bottom = {"dead": (".36", ".64"), "beside": (".7", "1")}.get(kind, ("0", "1"))
    return "".join(f"M{a} {top}H{b}V{bottom}H{a}z" for a, b in found if b > a)


def _tick(seconds: float) -> str:
    return "0" if seconds == 0 else f"{seconds:g} s" if seconds < 60 else name_duration(seconds)
