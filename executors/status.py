"""The state of a run at one moment: the rows of the live table, of `replicas status` and of a notebook's output."""

from __future__ import annotations

import html
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from executors.outcome import BY_USER, Outcome
from executors.protocol import ReplicaStatus

COLUMNS = ("rank", "status", "round", "step", "loss", "round_s", "note")
HEADINGS = {"round_s": "in rounds", "note": ""}


def number(value: float) -> str:
    """Return a number for a column: four decimals, or an exponent where these would show nothing."""
    return f"{value:.2e}" if 0 < abs(value) < 0.005 else f"{value:.4f}"


@dataclass(frozen=True)
class ReplicaState:
    """One replica at one moment."""

    rank: int
    attempt: int
    status: ReplicaStatus
    outcome: Outcome | None = None
    heartbeat_age_s: float | None = None
    reported: dict[str, Any] = field(default_factory=dict)
    """What the replica reported last: step, loss, round, and whatever else it chose."""

    @property
    def note(self) -> str:
        """A few words on how it ended, or on a heartbeat that is overdue."""
        if self.outcome is not None and self.outcome.reason == "cancelled":
            return "" if BY_USER in (self.outcome.error or "") else (self.outcome.error or "").partition(": ")[2]
        if self.outcome is not None and self.outcome.reason is not None:
            line = self.outcome.headline
            return f"{self.outcome.reason}: {line}" if line else str(self.outcome.reason)
        if self.status is ReplicaStatus.RUNNING and (self.heartbeat_age_s or 0) > 30:
            return f"last heartbeat {self.heartbeat_age_s:.0f} s ago"
        return ""

    def cell(self, column: str) -> str:
        """Return the text of one column of the table."""
        if column in ("rank", "status", "note"):
            return str(getattr(self, column))
        value = self.reported.get(column)
        if value is None:
            return ""
        if column == "round_s":
            return f"{value:.1f} s"
        return number(value) if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class RunStatus:
    """A run at one moment."""

    run_id: str
    backend: str
    replicas: Sequence[ReplicaState]
    joined: int = 0
    """How many ranks beyond those that were launched joined while it ran; of these only the claims are known."""
    at: float = field(default_factory=time.time)

    @property
    def is_terminal(self) -> bool:
        """Whether every replica has ended."""
        return all(replica.status.is_terminal for replica in self.replicas)

    @property
    def status(self) -> ReplicaStatus:
        """One word for the whole run: the worst of its replicas once all have ended."""
        found = {replica.status for replica in self.replicas}
        for status in (ReplicaStatus.RUNNING, ReplicaStatus.PENDING, ReplicaStatus.FAILED, ReplicaStatus.CANCELLED):
            if status in found:
                return ReplicaStatus.RUNNING if status is ReplicaStatus.PENDING and len(found) > 1 else status
        return ReplicaStatus.SUCCEEDED

    @property
    def counts(self) -> str:
        """As in `3 running, 1 failed`."""
        counts = Counter(replica.status for replica in self.replicas)
        told = [f"{counts[status]} {status}" for status in ReplicaStatus if counts[status]]
        return ", ".join([*told, *([f"{self.joined} joined"] if self.joined else [])])

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON."""
        rows = []
        for replica in self.replicas:
            row = asdict(replica)
            row.pop("outcome")
            outcome = replica.outcome
            row["reason"] = outcome.reason if outcome else None
            row["exit_code"] = outcome.exit_code if outcome else None
            rows.append(row)
        return {
            "run_id": self.run_id,
            "backend": self.backend,
            "status": self.status,
            "joined": self.joined,
            "replicas": rows,
        }

    def used_columns(self) -> list[str]:
        """Return the columns of the table that have something to show."""
        always = ("rank", "status")
        return [name for name in COLUMNS if name in always or any(replica.cell(name) for replica in self.replicas)]

    def to_html(self) -> str:
        """Return the table for a notebook."""
        columns = self.used_columns()
        head = "".join(f"<th>{html.escape(HEADINGS.get(name, name))}</th>" for name in columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(replica.cell(name))}</td>" for name in columns) + "</tr>"
            for replica in self.replicas
        )
        title = f"{html.escape(self.run_id)} on {html.escape(self.backend)}: {html.escape(self.counts)}"
        return f"<p>{title}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
