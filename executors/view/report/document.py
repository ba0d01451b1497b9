"""Builds the JSON document of a run's page, which `replicas report --json` also prints."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from itertools import groupby, zip_longest
from statistics import fmean
from typing import Any

import numpy as np

from executors.metrics.metrics import Metrics
from executors.protocol import Outcome
from executors.settings.durations import name_duration
from executors.status import TOTAL_STEPS, RunStatus
from executors.task.record import RunRecord, TaskRecord
from executors.view.report.curves import Array, Line, Point, max_points_of, middle, thin
from executors.view.report.event_reader import Event
from executors.view.report.failures import failures_document
from executors.view.report.measures import Measures
from executors.view.report.rounds import UNNOTICED, rounds_document, rounds_of_run
from executors.view.report.run_summary import is_late, summary_sentences
from executors.view.report.text import name_moment, one_line
from executors.view.report.timeline import timeline_document

SHARE = 0.75  # the share of a page's values that all reported curves may use
# the fewest points of a line. If many names leave fewer points for each line, the last names are left out
MIN_POINTS = 50
MAX_NAMES = 24
MAX_NAME = 40  # characters
MAX_SETTINGS, MAX_ARGUMENTS, MAX_VALUE = 60, 200, 2000
MAX_PROBLEMS, MAX_NOTABLE, MAX_EVENTS, MAX_WARNINGS = 20, 8, 500, 50
MAX_WARNING = 300  # the most characters of a warning in the table of events; the table of warnings has the whole text
ANCHOR = "first loss after each round"
AFTER = 0.1  # a share of the time to the next round. A loss that is reported within it is almost the anchor's loss
SHOWN_ELSEWHERE = ("n", "gpu")
"""The settings that the page shows together with the entrypoint."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The records and measurements of one run, from which its page is made."""

    url: str
    record: RunRecord
    task: TaskRecord | None
    now: RunStatus
    metrics: Metrics
    events: Sequence[Event] = ()
    """The events, in the order of time."""
    pages: Sequence[str | None] = ()
    """The address of the page of each rank's job at its service, by rank."""
    problems: Sequence[str] = ()
    """A sentence for each part that could not be read."""

    @property
    def elapsed_s(self) -> float:
        """The seconds from the launch to the last end of a replica, or to now while the run continues."""
        return max(0.0, self.now.last_at - self.record.created_at)

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcomes of all ended attempts, ordered by rank and attempt."""
        found = {(span.rank, span.attempt): span.outcome for span in self.metrics.attempts}
        found |= {(state.rank, state.attempt): state.outcome for state in self.now.replicas if state.outcome}
        return [outcome for _, outcome in sorted(found.items()) if outcome is not None]

    @property
    def arguments(self) -> dict[str, str]:
        """The arguments of the entrypoint, as texts by name."""
        args = self.task.args if self.task is not None else None
        found = {one_line(name, MAX_NAME): _text(value) for name, value in (args or {}).items()}
        return dict(list(found.items())[:MAX_ARGUMENTS])


def document(subject: Subject) -> dict[str, Any]:
    """Return everything that the page of a run shows, cut to a readable size. Texts hold no control characters."""
    record, now, metrics = subject.record, subject.now, subject.metrics
    measures, met = Measures(metrics), rounds_of_run(metrics)
    rounds = rounds_document(met)
    newest = {state.rank: state.attempt for state in now.replicas}
    made: dict[str, Any] = {
        "run_id": now.run_id,
        "url": one_line(subject.url, MAX_VALUE),
        "status": str(now.status),
        "counts": now.counts,
        "is_live": not now.is_terminal,
        "as_of": now.at,
        "launched_at": record.created_at,
        "elapsed_s": subject.elapsed_s,
        "began_at": metrics.began_at,
        "launched": _launched(subject),
        "settings": _settings(subject),
        "numbers": measures.six(),
        "not_finite": measures.not_finite,
        "curves": curves(metrics),
        "replicas": [
            {
                "rank": state.rank,
                "attempt": state.attempt,
                "status": str(state.status),
                "reason": state.outcome and state.outcome.reason,
                **measures.of_rank(state.rank),
                **rounds["by_rank"].get(state.rank, UNNOTICED),
                "page": page,
            }
            for state, page in zip_longest(now.replicas, subject.pages[: len(now.replicas)])
        ],
        "timeline": timeline_document(metrics, subject.events),
        "rounds": rounds,
        "warnings": _warnings(subject.events)[:MAX_WARNINGS],
        "n_warnings": sum(event.kind == "warning" for event in subject.events),
        "events": [_happened(event, metrics.began_at) for event in _shown(subject.events)],
        "n_events": len(subject.events),
        "failures": failures_document(subject.outcomes, newest, len(now.replicas)),
        "configuration": _configuration(subject),
        "doubts": [one_line(each, MAX_VALUE) for each in now.doubts],
        "problems": [one_line(each) for each in [*subject.problems, *metrics.problems][:MAX_PROBLEMS]],
    }
    for row in made["replicas"]:
        row["held_up"] = is_late(made, row["rank"])
    return {**made, "notable": _notable(made), "in_short": summary_sentences(made)}


def _notable(made: Mapping[str, Any]) -> list[int]:
    """Return the ranks to show first: ranks that others waited for most, ranks that were restarted, and ranks that
    failed.
    """
    cost = {rank: row["cost_s"] for rank, row in made["rounds"]["by_rank"].items()}
    late = [rank for rank in sorted(cost, key=lambda rank: -cost[rank]) if is_late(made, rank)]
    failed = [each["rank"] for failure in made["failures"] for each in failure["replicas"]]
    return list(dict.fromkeys([*late, *made["numbers"]["restarts_by_rank"], *failed]))[:MAX_NOTABLE]


def curves(metrics: Metrics) -> dict[str, Any]:
    """Return the curves of all reported numbers. Their x is the step, or seconds if most reports have no step."""
    rows = metrics.numbers
    over = "step" if 2 * sum("step" in row.values for row in rows) >= max(1, len(rows)) else "seconds"
    reported = {*metrics.names()} - {"step", TOTAL_STEPS}
    names = sorted(reported, key=lambda name: (name != "loss", not name.startswith("eval_"), name))
    lines: dict[str, list[Line]] = {name: [] for name in names[:MAX_NAMES]}
    for key, group in groupby(rows, key=lambda row: (row.rank, row.attempt)):
        mine = list(group)
        values = [row.values for row in mine]
        xs = _column(values, "step") if over == "step" else np.array([metrics.at(row) for row in mine])
        for name, found in lines.items():
            line = Line.over(*key, xs, _column(values, name))
            found += [line] if len(line.xs) else []
    n_lines, left_out = 0, names[MAX_NAMES:]
    for name, found in [*lines.items()]:
        has_room = not n_lines or max_points_of(n_lines + len(found), SHARE) >= MIN_POINTS
        if found and has_room:
            n_lines += len(found)
        else:
            left_out = [*left_out, *([name] if found else [])]
            del lines[name]
    max_points = max_points_of(n_lines, SHARE)
    above = {
        name: {"median of replicas": points}
        for name, found in lines.items()
        if len(metrics.attempts) > 1 and len(points := middle(found)) > 1
    }
    if over == "step" and (anchor := _anchor(metrics)):
        above["loss"] = {ANCHOR: anchor}
    elif "loss" in lines and (evaluations := [name for name in lines if name.startswith("eval_") and "loss" in name]):
        above["loss"] = {one_line(evaluations[0], MAX_NAME): middle(lines[evaluations[0]])}
    return {
        "over": over,
        "shown": [
            {"name": one_line(name, MAX_NAME), **thin(found, max_points, above.get(name))}
            for name, found in lines.items()
        ],
        "has_anchor": ANCHOR in above.get("loss", {}),
        "left_out": [one_line(name, MAX_NAME) for name in left_out[:MAX_NAMES]],
        "n_left_out": len(left_out),
    }


def _column(rows: Sequence[Mapping[str, float]], name: str) -> Array:
    """Return the number `name` of each row, and NaN for a row without it."""
    # Not int: a reported integer may need more than 64 bits.
    return np.array([row.get(name, math.nan) for row in rows], dtype=np.float64)


def first_losses(metrics: Metrics) -> dict[tuple[str, int], list[Point]]:
    """Return step and loss of the first report after each round, by the name of the DiLoCo and the entry in its log.

    The result is empty if fewer than half of the rounds have a report soon after their end.

    If `mix` is 0 and a replica made no step while its work was sent, it continues from the anchor. Its first loss after
    the round is then the anchor's loss. A loss that is reported less than half a step after a round is skipped, because
    it was computed before the round.
    """
    losses: dict[tuple[int, int], tuple[Array, Array, Array, float]] = {}
    for key, group in groupby(metrics.numbers, key=lambda row: (row.rank, row.attempt)):
        mine = [row for row in group if "step" in row.values and "loss" in row.values]
        ts, reported = np.array([row.t for row in mine]), [row.values for row in mine]
        steps = _column(reported, "step")
        goes_on = np.diff(steps) > 0
        step_s = float(np.median(np.diff(ts)[goes_on] / np.diff(steps)[goes_on])) if goes_on.any() else 0.0
        losses[key] = ts, steps, _column(reported, "loss"), step_s
    found: dict[tuple[str, int], list[Point]] = defaultdict(list)
    for each in metrics.rounds:
        if (each.rank, each.attempt) in losses and not each.stale_steps:
            ts, steps, values, step_s = losses[each.rank, each.attempt]
            soon_s = each.t + step_s / 2
            at = int(np.searchsorted(ts, soon_s, side="right"))
            if at < len(ts) and ts[at] - soon_s <= AFTER * each.train_s:
                found[each.name, each.entry].append((float(steps[at]), float(values[at])))
    if len(found) < 2 or 2 * len(found) < len({(each.name, each.entry) for each in metrics.rounds}):
        return {}
    return dict(sorted(found.items()))


def _anchor(metrics: Metrics) -> list[Point]:
    found = first_losses(metrics).values()
    return sorted((fmean(x for x, _ in points), fmean(y for _, y in points)) for points in found)


def _warnings(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return each different warning once, the oldest first, with the ranks that gave it."""
    found: dict[str, dict[str, Any]] = {}
    for event in events:
        if event.kind == "warning":
            text = one_line(event.why, MAX_VALUE)
            row = found.setdefault(text, {"text": text, "at": event.at, "ranks": [], "count": 0})
            row["ranks"] = sorted({*row["ranks"], *([] if event.rank is None else [event.rank])})
            row["count"] += event.count
    return [*found.values()]


def _shown(events: Sequence[Event]) -> Sequence[Event]:
    """Return the events of the table: the last events, but only the first warnings, so that warnings do not displace
    other events.
    """
    late = {id(event) for event in [event for event in events if event.kind == "warning"][MAX_WARNINGS:]}
    return [event for event in events if id(event) not in late][-MAX_EVENTS:]


def _happened(event: Event, began_at: float) -> dict[str, Any]:
    """Return an event for the page, with texts without control characters and its second on the run's time line."""
    most = MAX_WARNING if event.kind == "warning" else MAX_VALUE
    texts = {name: one_line(getattr(event, name) or "", most) for name in ("actor", "reason", "why")}
    return {**event.to_json(), **texts, "s": round(event.at - began_at, 3), "is_usual": event.is_usual}


def _launched(subject: Subject) -> list[list[str]]:
    """Return the facts of the launch as pairs of name and text: the user, the time, the code and the versions."""
    record, code = subject.record, subject.record.code or {}
    where = f"{len(subject.now.replicas)} on {subject.now.backend}"
    pairs = [
        ("entrypoint", record.entrypoint.removesuffix(":__main__")),
        (
            "replicas",
            where + (f", {record.settings.gpu} each" if record.settings.gpu else ""),
        ),
        ("launched", name_moment(record.created_at)),
        ("has run" if not subject.now.is_terminal else "ran", name_duration(subject.elapsed_s)),
        ("by", record.created_by),
        ("folder", record.cwd),
    ]
    if isinstance(commit := code.get("commit"), str):
        pairs.append(("git commit", f"{commit[:12]}{', with changes' if code.get('dirty') else ''}"))
    torch = subject.task.torch if subject.task is not None else None
    pairs.append(("versions", f"Python {record.python}" + (f", torch {torch}" if torch else "")))
    pairs.append(("store", subject.url))
    return [[name, one_line(text, 200)] for name, text in pairs if text]


def _settings(subject: Subject) -> list[list[str]]:
    """Return the values that the user set, as pairs of name and text. Arguments of the entrypoint come first."""
    record = subject.record
    found = dict(subject.arguments)
    asked = {name: value for name, value in record.settings.to_json().items() if name not in SHOWN_ELSEWHERE}
    env = sorted({name for place in record.placements for name in place.env})
    more = {"env": env or None, "continues": record.continues, "key_id": record.key_id}
    found |= {name: _text(value) for name, value in {**asked, **more}.items() if value is not None}
    return [[name, one_line(text, 200)] for name, text in list(found.items())[:MAX_SETTINGS]]


def _configuration(subject: Subject) -> list[list[str]]:
    """Return all values of the run's record and task, as pairs of name and text."""
    record = subject.record
    whole = asdict(record)
    found = {f"setting {name}": _text(value) for name, value in whole.pop("settings").items()}
    found |= {name: _text(value) for name, value in whole.items()}
    task = subject.task
    if task is None:
        return [[name, text] for name, text in found.items()]
    if task.args is None:
        found["arguments"] = "pickled with the function"
    found |= {f"argument {name}": text for name, text in subject.arguments.items()}
    found |= {"torch": task.torch or "", "requirements": _text(task.requirements)}
    return [[name, text] for name, text in found.items()]


def _plain(value: Any) -> Any:
    return vars(value) if is_dataclass(value) else list(value)


def _text(value: Any) -> str:
    """Return a value of a record as one line of text."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_plain)
    return one_line(text, MAX_VALUE)
