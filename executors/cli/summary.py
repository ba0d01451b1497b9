"""A run in words and as JSON: what was launched, how it ended, and which exit code that is."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from executors.cli.output import CANCELLED, FAILED, TIMED_OUT, Output, name_limit, name_ranks, one_line
from executors.protocol import Outcome, ReplicaStatus
from executors.run import Run
from executors.run_index import locate
from executors.status import FAILED_EARLY

SUBJECT = re.compile(r"^Replica \d+( of \d+)?( \(attempt \d+\))? ")  # left out: the ranks are named once, before it
MAX_LINES = 8  # of failures or results; the rest is counted


def heading(run: Run) -> str:
    """Describe in one line what was launched."""
    replicas = "1 replica" if run.world_size == 1 else f"{run.world_size} replicas"
    limit = name_limit(run.record.timeout_s)
    chaos = "".join(f", chaos {one_line(spec)}" for spec in run.record.chaos)
    return f"{run.run_id}: {replicas} of {one_line(run.record.entrypoint)} on {run.backend}, {limit}{chaos}"


def reference(run: Run) -> str:
    """Return what finds the run again from this machine, for a shell: its id where that is enough, else its address."""
    return run.run_id if locate(run.run_id) == run.store.url else shlex.quote(run.url)


def exit_code(outcomes: Sequence[Outcome], *, interrupted: bool = False) -> int:
    """Return the command's exit code for a run that has ended: the first that applies of 130, 1, 124 and 0."""
    cancelled = [outcome for outcome in outcomes if outcome.status is ReplicaStatus.CANCELLED]
    if interrupted or not all(FAILED_EARLY in (outcome.error or "") for outcome in cancelled):
        return CANCELLED
    reasons = {outcome.reason for outcome in _failures(outcomes)}
    if reasons - {"timeout"}:
        return FAILED
    return TIMED_OUT if reasons else 0


def find_summary(outcomes: Sequence[Outcome]) -> str | None:
    """Return the `summary` of the lowest rank that succeeded and has one."""
    for outcome in outcomes:
        if outcome.status is ReplicaStatus.SUCCEEDED and isinstance(outcome.result, dict):
            summary = outcome.result.get("summary")
            if isinstance(summary, str):
                return summary
    return None


@dataclass(frozen=True)
class Summary:
    """The outcomes of a run, and the exit code they mean; None: it has not ended."""

    run: Run
    outcomes: Sequence[Outcome]
    code: int | None

    @classmethod
    def of(cls, run: Run, *, in_time: bool = True, interrupted: bool = False) -> Summary:
        """Summarise a run that was watched to its end, or until the time was over."""
        outcomes = run.outcomes()
        return cls(run, outcomes, exit_code(outcomes, interrupted=interrupted) if in_time else TIMED_OUT)

    def document(self) -> dict[str, Any]:
        """Return the summary as JSON."""
        run, record = self.run, self.run.record
        return {
            "run_id": run.run_id,
            "url": run.url,
            "backend": run.backend,
            "entrypoint": record.entrypoint,
            "world_size": run.world_size,
            "timeout_s": record.timeout_s,
            "created_at": record.created_at,
            "task_digest": run.task_digest,
            "exit_code": self.code,
            "summary": find_summary(self.outcomes),
            "replicas": [{**outcome.to_row(), "attempt": outcome.attempt} for outcome in self.outcomes],
        }

    def finish(self, output: Output) -> int:
        """Print how a run ended, if it has, and the JSON document if asked for; return the exit code."""
        if all(outcome.status.is_terminal for outcome in self.outcomes):
            summary = find_summary(self.outcomes)
            if summary is not None:
                output.say()
                output.say(summary, wrap=True)
            else:
                self._print_results(output)
            self.print_failures(output)
            output.say()
            output.say(f"More: replicas status {reference(self.run)} (or: logs, collect)", "dim")
        if output.as_json:
            output.document(self.document())
        return self.code or 0

    def _print_results(self, output: Output) -> None:
        done = (o for o in self.outcomes if o.status is ReplicaStatus.SUCCEEDED and o.result is not None)
        groups = _by_text((json.dumps(outcome.result), outcome.rank) for outcome in done)
        if groups:
            output.say()
        for text, ranks in groups[:MAX_LINES]:
            output.say(f"{name_ranks(ranks)}: {one_line(text)}")
        if len(groups) > MAX_LINES:
            output.say(f"… and {len(groups) - MAX_LINES} more: replicas collect {reference(self.run)}", "dim")

    def print_failures(self, output: Output) -> None:
        """Print which ranks failed, why, and where their logs are; the earliest failure first."""
        failures = sorted(_failures(self.outcomes), key=lambda outcome: outcome.finished_at)
        groups = _by_text((f"({o.reason}): {one_line(SUBJECT.sub('', o.headline))}", o.rank) for o in failures)
        if groups:
            output.say()
        for text, ranks in groups[:MAX_LINES]:
            output.say(f"{name_ranks(ranks).capitalize()} failed {text}", "red")
            output.say(f"    replicas logs {reference(self.run)} --rank {min(ranks)}")
        if len(groups) > MAX_LINES:
            output.say(f"… and {len(groups) - MAX_LINES} more: replicas status {reference(self.run)}", "dim")


def _by_text(pairs: Iterable[tuple[str, int]]) -> list[tuple[str, list[int]]]:
    """Group ranks by their text, so that each text is printed once."""
    groups: dict[str, list[int]] = {}
    for text, rank in pairs:
        groups.setdefault(text, []).append(rank)
    return list(groups.items())


def _failures(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the outcomes of replicas that failed, except those that a newer attempt replaced."""
    return [outcome for outcome in outcomes if outcome.status is ReplicaStatus.FAILED and outcome.reason != "fenced"]
