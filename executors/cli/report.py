"""What is said of a run that has ended: its exit code, its summary or results, and what became of failed ranks."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from typing import Any

from executors.cli.output import Output, name_limit, name_ranks, one_line
from executors.outcome import Outcome
from executors.protocol import ReplicaStatus
from executors.run import Run
from executors.state import locate

CANCELLED, FAILED, TIMED_OUT = 130, 1, 124
WHO = re.compile(r"^Replica \d+( of \d+)?( \(attempt \d+\))? ")  # said already, for all ranks that fared alike
MAX_LINES = 8  # of failures or results; the rest is counted


def exit_code(outcomes: Sequence[Outcome], *, interrupted: bool = False) -> int:
    """Return the command's exit code for a run: the first that applies of 130, 1, 124 and 0."""
    if interrupted or any(outcome.status is ReplicaStatus.CANCELLED for outcome in outcomes):
        return CANCELLED
    bad = [outcome.reason for outcome in _failures(outcomes)]
    if any(reason != "timeout" for reason in bad):
        return FAILED
    return TIMED_OUT if bad else 0


def heading(run: Run) -> str:
    """Say in one line what a run is."""
    replicas = "1 replica" if run.world_size == 1 else f"{run.world_size} replicas"
    limit = name_limit(run.record.timeout_s)
    chaos = "".join(f", chaos {one_line(spec)}" for spec in run.record.chaos)
    return f"{run.run_id}: {replicas} of {one_line(run.record.entrypoint)} on {run.backend}, {limit}{chaos}"


def reference(run: Run) -> str:
    """Return what finds the run again from this machine, for a shell: its id where that is enough, else its address."""
    return run.run_id if locate(run.run_id) == run.store.url else shlex.quote(run.url)


def document(run: Run, outcomes: Sequence[Outcome], code: int | None) -> dict[str, Any]:
    """Return the JSON that tells of a run."""
    record = run.record
    return {
        "run_id": run.run_id,
        "url": run.url,
        "backend": run.backend,
        "entrypoint": record.entrypoint,
        "world_size": run.world_size,
        "timeout_s": record.timeout_s,
        "created_at": record.created_at,
        "task_digest": run.task_digest,
        "exit_code": code,
        "summary": find_summary(outcomes),
        "replicas": [{**outcome.to_row(), "attempt": outcome.attempt} for outcome in outcomes],
    }


def find_summary(outcomes: Sequence[Outcome]) -> str | None:
    """Return the `summary` of the lowest rank that succeeded and has one."""
    for outcome in outcomes:
        if outcome.status is ReplicaStatus.SUCCEEDED and isinstance(outcome.result, dict):
            summary = outcome.result.get("summary")
            if isinstance(summary, str):
                return summary
    return None


def tell(output: Output, run: Run, outcomes: Sequence[Outcome]) -> None:
    """Say how a run ended: the summary or the results, failed ranks, and how to look again."""
    name = reference(run)
    summary = find_summary(outcomes)
    if summary is not None:
        output.say()
        output.say(summary, wrap=True)
    else:
        tell_results(output, outcomes)
    tell_failures(output, name, outcomes)
    output.say()
    output.say(f"Look again: replicas status {name} (or: logs, collect)", "dim")


def tell_results(output: Output, outcomes: Sequence[Outcome]) -> None:
    """Say in a line each what the replicas returned."""
    by_text: dict[str, list[int]] = {}
    for outcome in outcomes:
        if outcome.status is ReplicaStatus.SUCCEEDED and outcome.result is not None:
            by_text.setdefault(json.dumps(outcome.result), []).append(outcome.rank)
    if not by_text:
        return
    output.say()
    for text, ranks in list(by_text.items())[:MAX_LINES]:
        output.say(f"{name_ranks(ranks)}: {one_line(text)}")
    if len(by_text) > MAX_LINES:
        output.say(f"… and {len(by_text) - MAX_LINES} more results", "dim")


def tell_failures(output: Output, name: str, outcomes: Sequence[Outcome]) -> None:
    """Say which ranks failed, why, and where their logs are; the earliest failure first."""
    by_text: dict[str, list[int]] = {}
    for outcome in sorted(_failures(outcomes), key=lambda outcome: outcome.finished_at):
        last_line = WHO.sub("", outcome.headline)
        by_text.setdefault(f"failed ({outcome.reason}): {one_line(last_line)}", []).append(outcome.rank)
    if by_text:
        output.say()
    for text, ranks in list(by_text.items())[:MAX_LINES]:
        who = name_ranks(ranks)
        output.say(f"{who[0].upper()}{who[1:]} {text}", "red")
        output.say(f"    replicas logs {name} --rank {min(ranks)}")
    if len(by_text) > MAX_LINES:
        output.say(f"… and {len(by_text) - MAX_LINES} more failed ranks: replicas status {name}", "dim")


def _failures(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those that failed; one that a newer attempt replaced has not."""
    return [outcome for outcome in outcomes if outcome.status is ReplicaStatus.FAILED and outcome.reason != "fenced"]
