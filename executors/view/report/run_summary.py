"""Summarizes a run in a few sentences: the loss, late ranks, dead ranks, and the time that was lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from executors.settings.durations import name_duration
from executors.status import begins_with_rank, name_ranks
from executors.view.report.text import name_moment, name_number, name_share, one_line

MAX_LATE = 3  # the most ranks that are named
NOTABLE = 0.02  # a share of the replicas' time; a smaller loss of time is not mentioned
TOO_LATE = 0.2  # the share of time lost to rounds from which the settings do not fit this network
UNEVEN = 1.9  # a rank that costs this many times the average is named
MAX_FAILURES = 3
MAX_WARNING = 240  # characters


def summary_sentences(document: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the sentences of the summary with a tone each: good, bad or plain."""
    return [{"text": text, "tone": tone} for tone, text in _sentences(document)]


def _sentences(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if document["is_live"]:
        yield "plain", f"As of {name_moment(document['as_of'])}: {document['counts']}."
    for failure in [each for each in document["failures"] if not each["resumed"]][:MAX_FAILURES]:
        yield "bad", f"{failure['words'].rstrip('.')}."
    yield from (("bad", doubt) for doubt in document["doubts"])
    for problem in document["problems"][:MAX_FAILURES]:
        yield "bad", problem
    if document["n_warnings"]:
        first, n = document["warnings"][0], document["n_warnings"]
        named = begins_with_rank(first["text"], first["ranks"])
        whose = f"{name_ranks(first['ranks'])}: " if first["ranks"] and not named else ""
        text = one_line(first["text"], MAX_WARNING).rstrip(".")
        yield "bad", f"{'1 warning' if n == 1 else f'{n} warnings, the first'}: {whose}{text}."
    yield from _loss(document)
    yield from _late(document)
    yield from _lost(document)


def _loss(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    curves, not_finite = document["curves"], document["not_finite"]
    if not_finite:
        step = min((step for step in not_finite.values() if step is not None), default=None)
        since = "" if step is None else f" since step {step:,.0f}"
        yield "bad", f"The loss of {name_ranks(not_finite)} is not finite{since}."
    curve = next((each for each in curves["shown"] if each["name"] == "loss"), None)
    if curve is None or not curve["lines"]:
        return
    one = curve["lines"][0]
    whose = f"rank {one['rank']}" if curve["lines"][1:] else ""
    whose, ys = next(iter(curve["above"].items()), (whose, one["y"]))
    found = [(x, y) for x, y in zip(curve["x"], ys, strict=True) if y is not None]
    if len(found) < 2:
        return
    firsts = [line["y"] for line in curve["lines"] if line["attempt"] == 0] or [ys]
    # the replica reported no round, because it ended before the first average
    first = median(next(y for y in line if y is not None) for line in firsts)
    x0, (x1, last) = curve["x"][0], found[-1]
    over = f"steps {x0:,.0f} to {x1:,.0f}" if curves["over"] == "step" else name_duration(x1 - x0)
    words = f"Loss {name_number(first)} → {name_number(last)} over {over}{f' ({whose})' if whose else ''}."
    yield ("good" if last < first and not not_finite else "bad"), words


def is_late(document: Mapping[str, Any], rank: int) -> bool:
    """Return True if the others waited so long for a rank that the page should mention this."""
    costs = {each: row["cost_s"] for each, row in document["rounds"]["by_rank"].items()}
    mean_s = sum(costs.values()) / max(1, len(document["replicas"]))
    return bool(costs.get(rank, 0.0) >= max(NOTABLE * document["numbers"]["alive_s"], UNEVEN * mean_s) > 0)


def _late(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    n = document["rounds"]["n"]
    if not n:
        return
    for same in document["rounds"]["same"]:
        words = f"{name_ranks(same['ranks']).capitalize()} sent identical work in {same['rounds']} of {n} rounds"
        yield "bad", f"{words}: they train on the same data."
    if document["numbers"]["waiting"] is not None:  # the names come from the replicas' records, which are untrusted
        yield from _held_up(document)
    if drifting := document["rounds"]["drifting"]:
        yield "bad", f"The pseudo-gradients of {name_ranks(drifting)} drift: their norms are far from the median."


def _held_up(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    n, alive_s = document["rounds"]["n"], document["numbers"]["alive_s"]
    late = {rank: row for rank, row in document["rounds"]["by_rank"].items() if is_late(document, rank)}
    for rank, row in sorted(late.items(), key=lambda each: -each[1]["cost_s"])[:MAX_LATE]:
        when = [f"last in {row['last']}"] if row["last"] else []
        when += [f"missing from {row['missing']}"] if row["missing"] else []
        cost = f"{name_duration(row['cost_s'])}, {name_share(row['cost_s'] / alive_s)} of the replicas’ time"
        yield "bad", f"Rank {rank} delayed the others by {cost}: {', '.join(when)} of {n} rounds."
    held_up, hidden = document["numbers"]["late"] or 0.0, document["numbers"]["hidden"] or 0.0
    if hidden >= NOTABLE or held_up >= TOO_LATE:
        beside = f"; {name_share(hidden)} more ran while training continued" if hidden else ""
        tone = "bad" if held_up >= TOO_LATE else "plain"
        yield tone, f"Training waited for rounds for {name_share(held_up)} of the time{beside}."
    if not late and held_up < TOO_LATE:
        share = name_share(document["numbers"]["waiting"])
        yield "good", f"Replicas waited for {share} of their time, in {n} rounds. No single replica caused that."


def _lost(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    restarts = document["numbers"]["restarts_by_rank"]
    resumed = [each["words"].rstrip(".") for each in document["failures"] if each["resumed"]][:MAX_FAILURES]
    came_back = [f"{words}, and came back." for words in resumed]
    if restarts and not came_back:
        came_back = [f"{name_ranks(restarts).capitalize()} came back."]
    yield from (("plain", words) for words in came_back)
    work = document["numbers"]["work"] or {}
    made, gone = sum(work.values()), work.get("lost", 0.0) + work.get("dropped", 0.0)
    if gone:
        yield "bad", f"{name_share(gone / made)} of the work was lost."
    elif restarts and made:
        yield "good", "No work was lost."
