"""Prints the summary of a run as text or JSON, and chooses the exit code: 0, 1, 93, 124 or 130."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from executors.cli.documents import LaunchFields, SummaryDocument
from executors.cli.output import (
    CANCELLED,
    FAILED,
    MAX_CHARACTERS,
    PERMANENT,
    TIMED_OUT,
    Output,
    finite,
    name_limit,
    note,
    one_line,
)
from executors.protocol import Outcome, ReplicaStatus
from executors.registry import run_index
from executors.restarts.decision_log import Decision
from executors.restarts.restart_view import counted, was_stopped
from executors.run.run import Run, view_of
from executors.status import FAILED_EARLY, MAX_LINE, FoundWarning, describe_warnings, name_ranks
from executors.store.standstill import standstill_lines
from executors.task.entrypoint import shown
from executors.view.report.failures import failure_text, group_failures
from executors.view.report.root_cause import headline, last_frames
from executors.view.run_model import has_model

K = TypeVar("K")
V = TypeVar("V")
UNPROVEN = "unproven: made without the key of this signed run, or this machine does not have the key"
MAX_LINES = 8  # the number of failures or results that are listed; further ones are only counted
MAX_WARNINGS = 200  # the number of warnings in one document; `replicas events RUN --json` prints all


def heading(run: Run, timeout_s: float | None = None, *, n: int | None = None) -> str:
    """Return a line that describes the launch of a run.

    Args:
        run: the run.
        timeout_s: the time limit of resumed replicas, in seconds. None: as launched.
        n: the number of replicas. None: it is read from the store.

    Example:
        heading(attach("brave-otter-7f3a"))
    """
    view = view_of(run)
    n = len(run.ranks) if n is None else n
    replicas = "1 replica" if n == 1 else f"{n} replicas"
    limit_s = view.record.settings.timeout if timeout_s is None else timeout_s
    partitions = " but the partition's" * (limit_s is None and view.backend == "slurm")
    limit = f", {name_limit(limit_s)}{partitions}"
    if len(view.record.placements) > 1 and timeout_s is None:  # each backend has its own limit
        limit = ""
    chaos = "".join(f", chaos {one_line(spec)}" for spec in view.record.settings.chaos)
    signed = f", signed (key {view.record.key_id})" * view.record.settings.signed
    entrypoint = one_line(shown(view.record.entrypoint))
    return f"{run.run_id}: {replicas} of {entrypoint} on {view.backend}{limit}{chaos}{signed}"


def reference(run: Run) -> str:
    """Return the name of a run for a command on this machine: its id, or its address if the id is not enough.

    Args:
        run: the run.

    Example:
        reference(attach("brave-otter-7f3a"))  # "brave-otter-7f3a"
    """
    return run_index.reference(run.run_id, view_of(run).store.url)


def exit_code(
    outcomes: Sequence[Outcome],
    *,
    interrupted: bool = False,
    enough: int | None = None,
    decisions: Sequence[Decision] = (),
    is_permanent: bool = False,
) -> int:
    """Return the exit code of the command for a run that has ended. The first that applies is 130, 93, 1, 124 or 0.

    Args:
        outcomes: the outcomes of all ranks.
        interrupted: True if Ctrl-C ended the run.
        enough: the number of successes that makes the exit code 0. None: all ranks must succeed.
        decisions: the decision log of the run.
        is_permanent: True if starting the run again unchanged does not help.

    Example:
        exit_code(run.outcomes())
    """
    n_done = sum(outcome.status is ReplicaStatus.SUCCEEDED for outcome in outcomes)
    if enough is not None and n_done >= enough and not interrupted:
        return 0
    if enough is None:  # with `enough`, a rank that a user has cancelled counts as one that may be missing
        outcomes = counted(decisions, outcomes)
    cancelled = [outcome for outcome in outcomes if outcome.status is ReplicaStatus.CANCELLED]
    if interrupted or not all(FAILED_EARLY in (end.error or "") or was_stopped(decisions, end) for end in cancelled):
        return CANCELLED
    if is_permanent:
        return PERMANENT
    reasons = {group[0].reason for group in group_failures(outcomes)}
    if reasons - {"timeout"}:
        return FAILED
    return TIMED_OUT if reasons else 0


def code_of(run: Run, outcomes: Sequence[Outcome], *, interrupted: bool = False) -> int:
    """Return the exit code of the command for a run that has ended.

    Args:
        run: the run.
        outcomes: the outcomes of all ranks.
        interrupted: True if Ctrl-C ended the run.

    Example:
        code_of(run, run.outcomes())
    """
    view = view_of(run)
    return exit_code(
        outcomes,
        interrupted=interrupted,
        enough=view.record.settings.min_replicas,
        decisions=view.reader.decisions,
        is_permanent=view.reader.is_permanent,
    )


def find_summary(outcomes: Sequence[Outcome]) -> str | None:
    """Return the `summary` in the result of the lowest rank that succeeded and has one.

    Args:
        outcomes: the outcomes, by rank.

    Example:
        find_summary(run.outcomes())
    """
    for outcome in outcomes:
        if outcome.status is ReplicaStatus.SUCCEEDED and isinstance(outcome.result, dict):
            summary = outcome.result.get("summary")
            if isinstance(summary, str):
                return summary
    return None


@dataclass(frozen=True)
class Summary:
    """The outcomes of a run and the exit code that follows from them. The code is None while the run continues."""

    run: Run
    outcomes: Sequence[Outcome]
    code: int | None
    warnings: Sequence[FoundWarning] = ()
    """The warnings of all attempts, the oldest first."""
    standstills: Sequence[str] = ()
    """One line for each round that waits for a damaged object, or that waited for one when its replica ended."""

    @classmethod
    def of(cls, run: Run, *, in_time: bool = True, interrupted: bool = False) -> Summary:
        """Return the summary of a run that was watched.

        Args:
            run: the run.
            in_time: False if the time limit of watching was reached before the run ended.
            interrupted: True if Ctrl-C ended the run.
        """
        view = view_of(run)
        outcomes = run.outcomes()
        code = code_of(run, outcomes, interrupted=interrupted) if in_time else TIMED_OUT
        if all(outcome.status.is_terminal for outcome in outcomes) or not view.record.settings.signed:
            counts = [(outcome.warned, True) for outcome in outcomes]
            standstills = standstill_lines(counts, run.run_id, view.store.url)
        else:  # heartbeats of a signed run contain standstills until the replicas end
            standstills = run.status().standstills
        return cls(run, outcomes, code, run.warnings(note), standstills)

    def launch_fields(self) -> LaunchFields:
        """Return the launch and the exit code as JSON."""
        view = view_of(self.run)
        record = view.record
        return {
            "url": self.run.url,
            "entrypoint": record.entrypoint,
            "world_size": view.world_size,
            "timeout_s": record.settings.timeout,
            "created_at": record.created_at,
            "task_digest": view.task_digest,
            "signed": record.settings.signed,
            "exit_code": self.code,
            "summary": find_summary(self.outcomes),
        }

    def document(self) -> SummaryDocument:
        """Return the summary as JSON."""
        return {
            "run_id": self.run.run_id,
            "backend": view_of(self.run).backend,
            **self.launch_fields(),
            "n_warnings": len(self.warnings),
            "warnings": [each.to_json() for each in self.warnings[:MAX_WARNINGS]],
            "replicas": [
                {**outcome.to_row(), "attempt": outcome.attempt, "unproven": outcome.unproven}
                for outcome in self.outcomes
            ],
        }

    def finish(self, output: Output) -> int:
        """Print the results and failures of a run that has ended, or its JSON document. Return the exit code.

        Args:
            output: the output of the verb.
        """
        document = finite(self.document())
        if all(outcome.status.is_terminal for outcome in self.outcomes):
            summary = find_summary(self.outcomes)
            if summary is not None:
                output.print()
                output.print(summary, wrap=True)
                if any(outcome.unproven for outcome in self.outcomes):
                    output.print(f"({UNPROVEN})", "yellow", wrap=True)
            else:
                self._print_results(output, document)
            self.print_failures(output)
            n_done = sum(outcome.status is ReplicaStatus.SUCCEEDED for outcome in self.outcomes)
            enough = view_of(self.run).record.settings.min_replicas
            if enough is not None and n_done < len(self.outcomes):
                output.print()
                asked = f"--min-replicas asks for {enough}"
                output.print(f"{n_done} of {len(self.outcomes)} replicas succeeded; {asked}.{self._others()}", "yellow")
            removed = self._removed()
            if removed:
                output.print()
                output.print(f"{removed}. The results of the others count.", "yellow")
            self.print_standstills(output)
            self.print_warnings(output)
            if self.code == PERMANENT:
                output.print()
                output.print("Starting the run again unchanged does not help (exit code 93).", "yellow")
            output.print()
            self.print_model(output)
            output.print(f"More: replicas status {reference(self.run)} (or: logs, collect)", "dim")
        else:
            self.print_standstills(output)
        if output.as_json:
            output.document(document)
        return self.code or 0

    def _removed(self) -> str:
        """Return a line about ranks that a user cancelled with --rank.

        Empty if there are none, or if they count as failures.
        """
        view = view_of(self.run)
        if view.record.settings.min_replicas is not None:
            return ""
        left = {outcome.rank for outcome in counted(view.reader.decisions, self.outcomes)}
        ranks = [outcome.rank for outcome in self.outcomes if outcome.rank not in left]
        were = "were" if len(ranks) > 1 else "was"
        return f"{name_ranks(ranks).capitalize()} {were} cancelled with `cancel --rank`" if ranks else ""

    def print_model(self, output: Output) -> None:
        """Print the command that writes the trained model, if the run has a model."""
        if has_model(view_of(self.run).store, self.run.run_id, self.outcomes):
            output.print(f"Get the model: replicas model {reference(self.run)} --out model.safetensors", "dim")

    def _others(self) -> str:
        """Return a line about the ranks that did not succeed."""
        others = ((str(end.status), end.rank) for end in self.outcomes if end.status is not ReplicaStatus.SUCCEEDED)
        return " The others: " + ", ".join(f"{name_ranks(ranks)} {status}" for status, ranks in _by_key(others)) + "."

    def _print_results(self, output: Output, document: dict[str, Any]) -> None:
        done = (row for row in document["replicas"] if row["status"] == "succeeded" and row["result"] is not None)
        groups = _by_key((output.line(row["result"]) + " (unproven)" * row["unproven"], row["rank"]) for row in done)
        if groups and not output.as_json:
            output.print_notes(document)
        if groups:
            output.print()
        for text, ranks in groups[:MAX_LINES]:
            output.print(f"{name_ranks(ranks)}: {one_line(text)}")
        if len(groups) > MAX_LINES:
            output.print(f"… and {len(groups) - MAX_LINES} more: replicas collect {reference(self.run)}", "dim")

    def print_standstills(self, output: Output) -> None:
        """Print one line for each round that waits for a damaged object, with the command that deletes the object."""
        for line in self.standstills:
            output.print()
            output.print(one_line(line, MAX_LINE), "red", wrap=True)

    def print_warnings(self, output: Output) -> None:
        """Print one line about the warnings of the run, if it has any."""
        if self.warnings:
            output.print()
            line = describe_warnings(self.warnings, len(self.warnings), reference(self.run))
            output.print(one_line(line, MAX_LINE), "yellow", wrap=True)

    def print_failures(self, output: Output) -> None:
        """Print each different failure once, the earliest first: its ranks, its error and the command for its log."""
        groups = group_failures(self.outcomes)
        shown: list[list[str]] = []
        for outcomes in groups[:MAX_LINES]:
            ranks, frames = [outcome.rank for outcome in outcomes], last_frames(outcomes[0])
            output.print()
            if outcomes[0].error_line is not None:
                output.print(headline(outcomes[0], ranks, len(self.outcomes)), "red")
            else:
                failed = f"{name_ranks(ranks).capitalize()} failed ({outcomes[0].reason})"
                output.print(f"{failed}: {failure_text(outcomes[0])}", "red")
            for line in frames if frames not in shown else ():
                output.print(line[:MAX_CHARACTERS])
            shown.append(frames)
            output.print(f"  Log: replicas logs {reference(self.run)} --rank {min(ranks)}")
        if len(groups) > MAX_LINES:
            output.print(f"… and {len(groups) - MAX_LINES} more: replicas status {reference(self.run)}", "dim")


def _by_key(pairs: Iterable[tuple[K, V]]) -> list[tuple[K, list[V]]]:
    """Group values by key, in the order of the first value of each key."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return list(groups.items())
