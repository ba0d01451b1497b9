"""The state of a run at one moment: `RunStatus`. It is shown as text, table, HTML or JSON."""

from __future__ import annotations

import html
import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

from executors.protocol import BY_USER, Outcome, Reason, ReplicaStatus, WarningCount
from executors.settings.durations import name_duration
from executors.settings.rule_finding import RuleDocument, RuleFinding
from executors.store.run_key import RUN_KEY
from executors.store.standstill import standstill_lines

INSTALLING = "installing"
"""The state of a replica whose container installs packages."""
WAITS_FOR_CONTROLLER = "waits for a controller"  # the beginning of the note of a rank that needs `replicas watch`
FAILED_EARLY = "failed before the first round"
MAX_WHY = 2000  # the longest reason, in characters
STEPS_PER_S, TOTAL_STEPS = "steps_per_s", "total_steps"
COLUMNS = (
    "rank",
    "backend",
    "attempt",
    "restarts",
    "status",
    "round",
    "step",
    STEPS_PER_S,
    "left",
    "loss",
    "round_s",
    "note",
)
SAME_DATA_AS = "same_data_as"  # a number that DiLoCo reports: the rank of a replica that trains on the same data
NO_COLUMNS = (TOTAL_STEPS, SAME_DATA_AS)
N_MORE = 3  # columns for other reported numbers, if the user names none
MAX_STEPS, MAX_LEFT_S = 1e15, 1e9  # larger reported values are ignored, because a script may report any number
MAX_COLUMNS = 50  # the most rows of the table in a notebook
SAME_MODEL = 2e-3
"""The largest difference between the fingerprints of equal models, because processors round a little differently."""
MAX_WARNING = 200  # the longest warning on one line, in characters
MAX_MEMBERS = 16  # the most processes of failed replicas that a notebook lists
# the largest number of decisions that are shown together, and the most characters of each
MAX_DECIDED, MAX_LINE = 8, 1000
HEADINGS = {"round_s": "in rounds", STEPS_PER_S: "steps/s", "note": ""}


@dataclass(frozen=True)
class Progress:
    """The progress of a replica or a run: the steps that were made, the total, and the rate."""

    step: float
    total_steps: float
    steps_per_s: float | None
    """Steps per second. A replica that catches up by skipping the steps of the others counts these steps as made at
    once.
    """

    @classmethod
    def of(cls, reported: Mapping[str, float]) -> Progress | None:
        """Return the progress in a replica's report. None if the report has no total number of steps."""
        step, total, per_s = (reported.get(name, 0.0) for name in ("step", TOTAL_STEPS, STEPS_PER_S))
        if not (0 < total < MAX_STEPS and abs(step) < MAX_STEPS and math.isfinite(per_s)):
            return None
        return cls(step, total, per_s if per_s > 0 else None)

    @property
    def share(self) -> float:
        """The share of the steps that were made, from 0 to 1."""
        return min(1.0, max(0.0, self.step / self.total_steps))

    @property
    def left_s(self) -> float | None:
        """The seconds until the last step at the current rate."""
        left_s = max(0.0, self.total_steps - self.step) / self.steps_per_s if self.steps_per_s else math.inf
        return left_s if left_s < MAX_LEFT_S else None

    def describe(self) -> str:
        """Return the rate and the remaining time as text: `8.3 steps/s, 18 s left`."""
        if self.steps_per_s is None or self.left_s is None:
            return ""
        return f"{name_rate(self.steps_per_s)} steps/s, {name_duration(self.left_s)} left"


@dataclass(frozen=True)
class Installation:
    """The progress of a container that installs packages before the replica's process starts."""

    package: str
    """The package that takes longest. Empty: not known."""
    for_s: float
    """The time since the beginning of the installation, in seconds."""
    n_bytes: int | None = None
    """The number of downloaded bytes. None: not known."""
    of_bytes: int | None = None
    """The number of bytes to download. None: not known."""

    def to_json(self) -> InstallationDocument:
        """Return everything as plain JSON."""
        return {"package": self.package, "for_s": self.for_s, "n_bytes": self.n_bytes, "of_bytes": self.of_bytes}

    @property
    def what(self) -> str:
        """The part of the text that does not change during the installation: `installing torch`."""
        return f"{INSTALLING} {self.package}" if self.package else INSTALLING

    def describe(self) -> str:
        """Return the progress as text: `installing torch, 1.2 of 2.7 GB, 40 s`, or without sizes `installing torch,
        40 s`.
        """
        sizes = ""
        if self.n_bytes is not None and self.of_bytes:
            sizes = f"{self.n_bytes / 1e9:.1f} of {self.of_bytes / 1e9:.1f} GB, "
        whole = int(max(0.0, self.for_s))
        return f"{self.what}, {sizes}{f'{whole} s' if whole < 60 else name_duration(whole)}"


class DecisionDocument(TypedDict):
    """The decision on the end of an attempt, as plain JSON."""

    kind: str
    """`restart`, `give_up` or `stop`."""
    why: str
    """The rule behind a `give_up` or a `stop`. Empty: a restart."""
    reason: str | None
    """The reason of the outcome that the decision follows."""
    words: str
    """The end in a few words."""
    start: Mapping[int, int]
    """The numbers of the attempts that a restart starts, by rank."""
    charged: bool
    """True: the restart counts against the budget."""
    strikes: int
    """The number of charged attempts of the rank in a row that made no progress."""
    not_before: float
    """The time before which the attempts do not start, in Unix time."""
    at: float
    """The time of the decision, in Unix time."""
    by: str
    """The process that decided."""


class RestartDocument(TypedDict):
    """The restarts of a replica as plain JSON."""

    restarts: int
    """The number of the replica's attempts that restart decisions started."""
    charged: int
    """The number of restarts that count against the replica's budget now."""
    left: int | None
    """The number of restarts that the budget still allows. Null: nothing restarts the replica."""
    next_at: float | None
    """The time at which the next attempt is due, in Unix time. Null: none is due."""
    decision: DecisionDocument | None
    """The decision on the end of the replica's newest attempt. None: there is none. Null: there is none."""


class InstallationDocument(TypedDict):
    """The progress of an installation in a container, as plain JSON."""

    package: str
    """The package that takes longest. Empty: not known."""
    for_s: float
    """The time since the beginning of the installation, in seconds."""
    n_bytes: int | None
    """The number of downloaded bytes. Null: not known."""
    of_bytes: int | None
    """The number of bytes to download. Null: not known."""


class MemberDocument(TypedDict):
    """The end of one process of a replica that has several, as plain JSON."""

    member: int
    """The number of the process, from 0."""
    pid: int
    """The number of the process at its machine."""
    exit_code: int | None
    """The exit status; minus the signal's number if a signal ended it. Null: not known."""
    signal: str | None
    """The name of the signal that ended it. Null: no signal did."""
    error: str | None
    """The line that begins its exception. Null: it recorded none."""


class ReplicaDocument(RestartDocument):
    """The state of one replica as plain JSON."""

    rank: int
    """The rank of the replica."""
    backend: str
    """The name of its backend."""
    attempt: int
    """The number of its newest attempt, from 0."""
    status: ReplicaStatus
    """The status of that attempt."""
    doing: str
    """The activity of the replica before its entrypoint runs, in a few words. Empty: none is known."""
    heartbeat_age_s: float | None
    """The age of the replica's last heartbeat, in seconds. Null: there is none, or the replica has ended."""
    reported: Mapping[str, float | None]
    """The numbers that the replica reported last, by name. Null: the number is not finite."""
    left_s: float | None
    """The remaining time at the current rate, in seconds. Null: not known."""
    note: str
    """The text of the column `note`. Empty: there is no note."""
    installation: InstallationDocument | None
    """The progress of an installation in the replica's container. Null: nothing is installed, or it is not known."""
    reason: Reason | None
    """The reason of the attempt's end. Null: success, or no end yet."""
    exit_code: int | None
    """The exit status of its process; minus the signal's number if a signal ended it. Null: not known."""
    n_warnings: int
    """The number of warnings of this attempt."""
    unproven: bool
    """True: the run is signed, and the run's key does not prove the outcome."""
    member: int | None
    """The process that failed first, of a replica that has several. Null: the replica has one, or has not failed."""
    members: Sequence[MemberDocument]
    """The ends of the processes of a replica that has several. Empty: it has one, or has not ended."""


class WarningDocument(TypedDict):
    """One warning of a run as plain JSON."""

    text: str
    """The warning."""
    at: float
    """The time at which the warning first came, in Unix time."""
    rank: int | None
    """The rank. Null: the warning is about the whole run."""
    attempt: int | None
    """The number of the attempt. Null: the warning is about the whole run."""
    count: int
    """How often the warning came."""


class AttemptDocument(TypedDict):
    """The name of an attempt as plain JSON."""

    rank: int
    """The rank."""
    attempt: int
    """The number of the attempt, from 0."""


class StateFields(TypedDict):
    """The state of a run without its replicas, as plain JSON."""

    run_id: str
    """The name of the run."""
    backend: str
    """The name of its backend. Several names have a plus sign between them."""
    status: ReplicaStatus
    """The status of the run as a whole."""
    min_replicas: int | None
    """The number of successes that `--min-replicas` asks for. Null: all replicas must succeed."""
    prospects: str
    """A few words on whether enough replicas can still succeed. Empty: the launch did not set `min_replicas`."""
    joined: int
    """The number of replicas that another machine added."""
    left_s: float | None
    """The remaining time of the run at the current rate, in seconds. Null: not known."""
    n_warnings: int
    """The number of different warnings of the newest attempts and of the run."""
    warnings: Sequence[WarningDocument]
    """The first warning of each replica, and the warnings of the run as a whole."""
    rules: Sequence[RuleDocument]
    """The rules of the run that were broken or not judged, in the order in which they became known."""
    restarts_by_reason: Mapping[str, int]
    """The number of restarts, by the reason of the outcome before each restart."""
    standstills: Sequence[str]
    """A line for each round that waits until a damaged object is deleted."""
    forged_outcomes: Sequence[AttemptDocument]
    """The attempts of a signed run that have an outcome without the run's key."""
    forged_starts: Sequence[AttemptDocument]
    """The attempts of a signed run that begin without the run's key."""


class StatusDocument(StateFields):
    """The state of a run as plain JSON."""

    replicas: Sequence[ReplicaDocument]
    """One object per replica, in the order of ranks."""


@dataclass(frozen=True)
class RestartState:
    """The restart decisions on one replica, as of one moment, from the decision log."""

    restarts: int = 0
    """The number of the replica's attempts that restart decisions started."""
    charged: int = 0
    """The number of restarts that count against the replica's budget now."""
    limit: int | None = None
    """The largest number of restarts that the budget allows. None: nothing restarts the replica."""
    next_at: float | None = None
    """The Unix time at which the next attempt is due. None: none is due."""
    decision: DecisionDocument | None = None
    """The decision on the end of the replica's newest attempt. None: there is none."""
    note: str = ""
    is_awaited: bool = False
    """True if another attempt will follow the attempt that ended."""
    is_permanent: bool = False
    """True if the replica was given up, or the run was stopped, because another start without a change does not
    help.
    """

    def to_json(self) -> RestartDocument:
        """Return the fields for other programs, as plain JSON."""
        left = None if self.limit is None else max(0, self.limit - self.charged)
        return {
            "restarts": self.restarts,
            "charged": self.charged,
            "next_at": self.next_at,
            "decision": self.decision,
            "left": left,
        }


@dataclass(frozen=True)
class DecisionLine:
    """One restart decision or one broken rule, with a line of text that describes it."""

    at: float
    line: str


@dataclass(frozen=True)
class ReplicaState:
    """The state of one replica at one moment."""

    rank: int
    attempt: int
    status: ReplicaStatus
    outcome: Outcome | None = None
    """The outcome of the replica. If its state is not known, the error of this outcome has the reason."""
    heartbeat_age_s: float | None = None
    reported: dict[str, Any] = field(default_factory=dict)
    """The numbers that the replica reported last: step, loss, round, and numbers of its own."""
    doing: str = ""
    """The activity of the replica before its entrypoint runs, in a few words that change only with the activity. Empty:
    none is known.
    """
    installation: Installation | None = None
    """The progress of the installation in its container. None: nothing is installed, or the progress is not known."""
    is_readable: bool = True
    """True if the state of the replica is known from its records."""
    restart: RestartState = field(default_factory=RestartState)
    backend: str = ""
    warned: WarningCount | None = None
    """The warnings of this attempt, as its last heartbeat or its outcome counts them."""

    @property
    def is_over(self) -> bool:
        """True if the replica has ended, or its state is not known."""
        return self.status.is_terminal or self.outcome is not None

    @property
    def goes_on(self) -> bool:
        """True if the newest attempt of the replica has not ended."""
        return not (self.status.is_terminal or self.restart.is_awaited)

    @property
    def note(self) -> str:
        """A short text: the reason of its end, the thing that it waits for, a problem with its data, or a late
        heartbeat.

        The text begins with "unproven" if the run is signed and its outcome has no proof of the run's key.
        """
        if self.outcome is not None and self.outcome.unproven:
            return ": ".join(
                filter(None, ("unproven", replace(self, outcome=replace(self.outcome, unproven=False)).note))
            )
        if self.restart.note:
            return self.restart.note
        if self.outcome is not None and self.outcome.reason is not None:
            if self.outcome.reason == "stopped":
                return self.outcome.reason
            if self.outcome.reason == "cancelled":
                error = self.outcome.error or ""
                return "" if BY_USER in error else error.partition(": ")[2]
            return ": ".join(filter(None, (self.outcome.reason, self.outcome.headline)))
        if self.doing and not self.status.is_terminal:
            return self.doing if self.installation is None else self.installation.describe()
        if self.status is ReplicaStatus.RUNNING and (self.heartbeat_age_s or 0) > 30:
            return f"last heartbeat {self.heartbeat_age_s:.0f} s ago"
        if (peer := self.reported.get(SAME_DATA_AS)) is not None:
            return f"trains on the same data as rank {peer:.0f}"
        return ""

    @property
    def progress(self) -> Progress | None:
        """The progress. None if the replica has not reported a total number of steps."""
        return Progress.of(self.reported)

    @property
    def left_s(self) -> float | None:
        """The seconds until its last step at the current rate. None if this is not known."""
        return None if self.progress is None or not self.goes_on else self.progress.left_s

    def cell(self, column: str) -> str:
        """Return the text of one column of the table."""
        if column in ("rank", "backend", "attempt", "status", "note"):
            return str(getattr(self, column))
        if column == "restarts":
            return "" if self.restart.limit is None else f"{self.restart.charged}/{self.restart.limit}"
        if column == "left":
            return "" if self.left_s is None else name_duration(self.left_s)
        text = "" if column == STEPS_PER_S and not self.goes_on else self.number(column)
        return f"{text}/{self.progress.total_steps:.0f}" if column == "step" and self.progress else text

    def number(self, name: str) -> str:
        """Return the text of a number that the replica reported. Empty if it has not reported the number."""
        value = self.reported.get(name)
        if value is None:
            return ""
        if name == "round_s":
            return f"{value:.1f} s"
        if name == STEPS_PER_S:
            return name_rate(value)
        if not isinstance(value, float):
            return str(value)
        is_odd = 0 < abs(value) < 0.005 or abs(value) >= 1e6  # four decimals would show 0.0000 or very many digits
        return f"{value:.2e}" if is_odd else f"{value:.4f}"

    def to_json(self) -> ReplicaDocument:
        """Return all fields except the result, as plain JSON."""
        outcome, found = self.outcome, self.installation
        return {
            "rank": self.rank,
            "backend": self.backend,
            "attempt": self.attempt,
            "status": self.status,
            "doing": self.doing,
            "heartbeat_age_s": self.heartbeat_age_s,
            "reported": self.reported,
            "left_s": self.left_s,
            "note": self.note,
            "installation": None if found is None else found.to_json(),
            "reason": None if outcome is None else outcome.reason,
            "exit_code": None if outcome is None else outcome.exit_code,
            "n_warnings": 0 if self.warned is None else self.warned.count,
            "unproven": outcome is not None and outcome.unproven,
            "member": None if outcome is None else outcome.member,
            "members": [] if outcome is None else members_document(outcome),
            **self.restart.to_json(),
        }


def members_document(outcome: Outcome) -> list[MemberDocument]:
    """Return the ends of the processes of a replica that has several, as plain JSON.

    Args:
        outcome: the outcome of the replica.

    Example:
        members_document(run.outcomes()[0])
    """
    return [
        {"member": n, "pid": end.pid, "exit_code": end.exit_code, "signal": end.signal, "error": end.error}
        for n, end in enumerate(outcome.members)
    ]


def alone_warning(outcomes: Sequence[Outcome]) -> str | None:
    """Return a warning if each replica trained alone, without DiLoCo. None if the outcomes do not show this.

    Args:
        outcomes: the outcome of each rank's newest attempt, if it has ended.
    """
    if len(outcomes) < 2 or not all(outcome.trained_alone for outcome in outcomes):
        return None
    return (
        f"None of the {len(outcomes)} replicas created a DiLoCo, so each trained alone. "
        "To train one model together, create a DiLoCo after the optimizer."
    )


def unlike_ends_warning(outcomes: Sequence[Outcome]) -> str | None:
    """Return a warning if replicas ended after different rounds, and so with different models. None otherwise.

    Each script then saves and evaluates a different model. A replica cannot know this when it ends, because the later
    rounds have not happened yet.

    Args:
        outcomes: the outcome of each rank's newest attempt. Replicas that did not succeed are left out.

    Example:
        unlike_ends_warning(run.outcomes())
    """
    ends: dict[int, list[int]] = {}
    for each in outcomes:
        rounds = (each.reached or each.reported or {}).get("round")
        # A script may report any value, also infinity.
        if each.status is ReplicaStatus.SUCCEEDED and rounds is not None and math.isfinite(rounds):
            ends.setdefault(int(rounds), []).append(each.rank)
    if len(ends) < 2:
        return None
    (first, early), *_, (last, late) = sorted(ends.items())
    return (
        f"Replicas ended with unlike models, from {name_ranks(early)} after round {first} to {name_ranks(late)} after "
        f"round {last}. Give DiLoCo total_steps, or end the run on all replicas by diloco.stop()."
    )


def own_models_warning(outcomes: Sequence[Outcome]) -> str | None:
    """Return a warning if replicas have changed their models differently after DiLoCo was closed. None otherwise.

    No warning is given if all replicas made the same change, or if only one replica changed its model.

    Args:
        outcomes: the outcome of each rank's newest attempt. Replicas that did not succeed are left out.

    Example:
        own_models_warning(run.outcomes())
    """
    marks: dict[str, dict[int, float]] = {}
    for each in outcomes:
        if each.status is ReplicaStatus.SUCCEEDED:
            for name, mark in (each.own_models or {}).items():
                marks.setdefault(name, {})[each.rank] = mark
    for by_rank in marks.values():
        apart = max(by_rank.values()) - min(by_rank.values())
        if not apart <= SAME_MODEL:  # also true if a fingerprint is not a number
            return (
                f"Replicas ended with different models: {name_ranks(by_rank)} changed theirs after DiLoCo was closed, "
                "as by an own checkpoint or update_bn() on an own share. Save the model of one rank, or take the "
                "run's: replicas model RUN"
            )
    return None


@dataclass(frozen=True, kw_only=True)
class FoundWarning:
    """One warning of a run."""

    text: str
    at: float
    """The Unix time at which the warning first came."""
    rank: int | None = None
    """None: the warning is about the whole run."""
    attempt: int | None = None
    count: int = 1
    """How often it came."""

    def to_json(self) -> WarningDocument:
        """Return everything as plain JSON."""
        return {"text": self.text, "at": self.at, "rank": self.rank, "attempt": self.attempt, "count": self.count}


def begins_with_rank(text: str, ranks: Collection[int | None]) -> bool:
    """Return True if a warning of one rank begins with this rank, as in `Rank 1: …`. It needs no second name before it.

    Args:
        text: the warning.
        ranks: the ranks that have this warning.

    Example:
        begins_with_rank("Rank 1: 3 inner steps are dropped", {1})
    """
    begins = tuple(f"rank {each}{end}" for each in ranks for end in (" ", ":"))
    return len(ranks) == 1 and text.lower().startswith(begins)


def describe_warnings(found: Sequence[FoundWarning], n: int, reference: str) -> str:
    """Return one line with the number of warnings of a run: `3 warnings, the first: rank 2: …; replicas events RUN`.

    Args:
        found: the warnings whose texts are known.
        n: the number of all warnings, at least the length of `found`.
        reference: the words that name the run in a shell.

    Returns: a text that may contain anything, because the warnings are untrusted. The caller must escape it.
    """
    first = min(found, key=lambda each: each.at)
    ranks = {each.rank for each in found if each.text == first.text and each.rank is not None}
    whose = "" if begins_with_rank(first.text, ranks) else f"{name_ranks(ranks)}: " if ranks else ""
    text = first.text.rstrip(".")
    text = text if len(text) <= MAX_WARNING else f"{text[: MAX_WARNING - 1]}…"
    begin = "1 warning: " if n == 1 else f"{n} warnings, the first: "
    return f"{begin}{whose}{text}; replicas events {reference}"


def fails_early(failed: Outcome | None, min_replicas: int | None, reports: Iterable[Collection[str]]) -> bool:
    """Return True if a replica failed before any replica of the run had a round. This is the rule of `fail_fast`.

    A supervisor calls it with records, and a process that watches the run calls it with states.

    Args:
        failed: the outcome of the replica. None: it failed, but its outcome cannot be read.
        min_replicas: the `min_replicas` of the launch. None: all replicas.
        reports: the names of the numbers that each replica has reported last. They are read only if they matter.
    """
    is_one = failed is None or is_failure(failed, min_replicas)
    return is_one and not any("round" in reported for reported in reports)


def describe_early_failure(rank: int, failed: Outcome | None) -> str:
    """Return the reason why a run ends early: `rank 3 failed before the first round: ValueError: boom`.

    Args:
        rank: the rank that failed.
        failed: the outcome of the rank. None: it cannot be read.
    """
    first = f"rank {rank} {FAILED_EARLY}"
    return first if failed is None else f"{first}: {failed.headline[:MAX_WHY]}"


def is_failure(outcome: Outcome, min_replicas: int | None) -> bool:
    """Return True if an outcome is a failure.

    Fenced replicas, and ended replicas that the run does not need, are not failures.
    """
    without = ("fenced",) if min_replicas is None else ("fenced", "start_failed")
    return outcome.status is ReplicaStatus.FAILED and outcome.reason not in without


@dataclass(frozen=True)
class RunStatus:
    """The state of a run and its replicas at one moment.

    Example:
        status = run.status()
        print(status.describe_progress(["accuracy"]))
        print(status.used_columns())
        Path("status.html").write_text(status.to_html())
        print(json.dumps(status.to_json()))
    """

    run_id: str
    """The id of the run."""
    backend: str
    """The name of the backend, or of several with their ranks."""
    replicas: Sequence[ReplicaState]
    """The state of each replica, in rank order."""
    joined: int = 0
    """The number of replicas that joined the running run by themselves. Only their claims are known."""
    min_replicas: int | None = None
    """The number of replicas that must succeed. None: all."""
    decided: Sequence[DecisionLine] = ()
    """The restart decisions and the broken rules of the run so far, in the order in which they became known."""
    restarts_by_reason: Mapping[str, int] = field(default_factory=dict)
    """The number of restarts so far, by the reason of the end before each restart."""
    forged: Sequence[tuple[int, int]] = ()
    """The ranks and attempts of a signed run whose outcome was recorded without the run's key. Such outcomes do not
    count.
    """
    forged_starts: Sequence[tuple[int, int]] = ()
    """The ranks and attempts of a signed run whose start was recorded without the run's key."""
    lacks_key: bool = False
    """True if the run is signed and this process does not have its key, so that this process can prove no outcome."""
    at: float = field(default_factory=time.time)
    """Unix time of the look."""
    store_url: str = ""
    """The url of the run's store, for commands that a line names."""
    rules: Sequence[RuleFinding] = ()
    """The rules that were broken or not judged, in the order in which they became known."""

    @property
    def is_terminal(self) -> bool:
        """True if every replica has ended or has an unknown state."""
        return all(replica.is_over for replica in self.replicas)

    @property
    def last_at(self) -> float:
        """The time at which the last replica ended, or the time of the look while any replica continues."""
        ends = [replica.outcome.finished_at for replica in self.replicas if replica.outcome is not None]
        return max(ends, default=0.0) or self.at if self.is_terminal else self.at

    @property
    def failed_early(self) -> list[int]:
        """The ranks that failed before any replica had reported a round, while other replicas continue."""
        ended = [r for r in self.replicas if r.status is ReplicaStatus.FAILED and r.is_readable]
        # One report of a round is enough. It is searched once, because a run may have thousands of failed ranks.
        reports = [replica.reported for replica in self.replicas if "round" in replica.reported][:1]
        failed = [r.rank for r in ended if fails_early(r.outcome, self.min_replicas, reports)]
        return [] if self.is_terminal else failed

    @property
    def status(self) -> ReplicaStatus:
        """The status of the whole run. After the end, it is the worst status of its replicas."""
        found = {replica.status for replica in self.replicas}
        if not self.is_terminal:
            return ReplicaStatus.PENDING if found == {ReplicaStatus.PENDING} else ReplicaStatus.RUNNING
        n_done = dict(self.numbers).get(ReplicaStatus.SUCCEEDED, 0)
        if n_done >= (self.min_replicas or len(self.replicas)):
            return ReplicaStatus.SUCCEEDED
        found |= {replica.outcome.status for replica in self.replicas if replica.outcome is not None}
        worst_first = (ReplicaStatus.FAILED, ReplicaStatus.CANCELLED)
        return next((status for status in worst_first if status in found), ReplicaStatus.SUCCEEDED)

    @property
    def numbers(self) -> list[tuple[ReplicaStatus, int]]:
        """The number of replicas in each status. A status without replicas is left out."""
        counts = Counter(replica.status for replica in self.replicas)
        return [(status, counts[status]) for status in ReplicaStatus if counts[status]]

    @property
    def counts(self) -> str:
        """The numbers as text: `3 running, 1 failed`."""
        joined = [f"{self.joined} joined"] if self.joined else []
        return ", ".join([*(f"{count} {status}" for status, count in self.numbers), *joined])

    @property
    def prospects(self) -> str:
        """A text for runs with `min_replicas`: replicas may still join, or too few can still succeed.

        Otherwise empty.
        """
        if self.min_replicas is None:
            return ""
        count, n = dict(self.numbers), len(self.replicas)
        pending = count.get(ReplicaStatus.PENDING, 0) - sum(replica.restart.is_awaited for replica in self.replicas)
        can_succeed = n - count.get(ReplicaStatus.FAILED, 0) - count.get(ReplicaStatus.CANCELLED, 0)
        if can_succeed < self.min_replicas:
            which = "succeeded" if self.is_terminal else "can still succeed"
            return f"only {can_succeed} of {n} {which}, at least {self.min_replicas} were asked for"
        if pending and can_succeed - pending >= self.min_replicas:
            return f"started with {can_succeed - pending} of {n}; {pending} may still join"
        return ""

    @property
    def progress(self) -> Progress | None:
        """The progress of the running replica that needs the longest time. None if it is not known."""
        going = [r.progress for r in self.replicas if r.progress is not None and r.goes_on]
        return max(going, key=lambda each: (each.left_s or 0.0, -each.share), default=None)

    @property
    def installing(self) -> str:
        """The ranks whose containers install packages, and the progress of the slowest one. Empty if there are none."""
        found = {each.rank: each.installation for each in self.replicas if each.installation is not None}
        if not found:
            return ""
        slowest = min(found.values(), key=lambda each: ((each.n_bytes or 0) / (each.of_bytes or 1), -each.for_s))
        return f"{name_ranks(found)} {slowest.describe()}"

    @property
    def left_s(self) -> float | None:
        """The seconds until the end of the run, as far as replicas report their progress."""
        return None if self.progress is None else self.progress.left_s

    @property
    def warnings(self) -> list[FoundWarning]:
        """The first warning of each replica that has one, and the warning of the run.

        `Run.warnings()` reads all warnings.
        """
        found = [
            FoundWarning(text=each.warned.first, at=each.warned.first_at, rank=each.rank, attempt=each.attempt)
            for each in self.replicas
            if each.warned is not None
        ]
        outcomes = [each.outcome for each in self.replicas if each.outcome is not None]
        if len(outcomes) == len(self.replicas):
            texts = (alone_warning(outcomes), unlike_ends_warning(outcomes) or own_models_warning(outcomes))
            found += [FoundWarning(text=text, at=self.last_at) for text in texts if text is not None]
        return found + self.unjudged

    @property
    def unjudged(self) -> list[FoundWarning]:
        """A warning for each rule that could not be judged."""
        return [
            FoundWarning(text=each.sentence, at=each.at, rank=each.rank, attempt=each.attempt)
            for each in self.rules
            if not each.is_broken
        ]

    @property
    def n_warnings(self) -> int:
        """The number of different warnings of the newest attempts and of the run."""
        own = sum(each.warned.count for each in self.replicas if each.warned is not None)
        return own + sum(each.rank is None for each in self.warnings) + len(self.unjudged)

    @property
    def standstills(self) -> list[str]:
        """A line for each round that waits until the user deletes an object that is not signed with the run's key."""
        counts = [(each.warned, each.status.is_terminal) for each in self.replicas]
        return standstill_lines(counts, self.run_id, self.store_url)

    @property
    def doubts(self) -> list[str]:
        """Sentences about objects without a proof of the run's key. Empty for unsigned runs."""
        found = self.standstills
        if self.forged:
            ranks = name_ranks({rank for rank, _ in self.forged})
            several, were = ("outcomes", "were") if len(self.forged) > 1 else ("an outcome", "was")
            found.append(
                f"{several.capitalize()} without the run's key {were} found, of {ranks}. They have no effect. "
                "Another process can write to the store of this run."
            )
        if self.forged_starts:
            ranks = name_ranks({rank for rank, _ in self.forged_starts})
            found.append(
                f"Attempts that begin without the run's key were found, of {ranks}. They have no effect. "
                "Another process can write to the store of this run."
            )
        if self.lacks_key:
            found.append(
                f"Unproven: the run is signed, and this machine does not have its key. Set {RUN_KEY} to have outcomes "
                "checked."
            )
        return found

    def describe_progress(self, more: Sequence[str] = ()) -> str:
        """Describe the progress in one line: `3 running, 1 failed: round 4, step 120-130 of 400, loss 2.31`.

        Args:
            more: names of other reported numbers to show after the round, the step and the loss. Default: none.
        """
        parts = []
        for name in dict.fromkeys(("round", "step", "loss", *more)):
            having = [replica for replica in self.replicas if replica.reported.get(name) is not None]
            if having:
                ends = [choose(having, key=lambda r: float(r.reported[name])).number(name) for choose in (min, max)]
                of = f" of {self.progress.total_steps:.0f}" if name == "step" and self.progress else ""
                parts.append(f"{name} {'-'.join(dict.fromkeys(ends))}{of}")
        if self.progress is not None and (pace := self.progress.describe()):
            parts.append(pace)
        if installing := self.installing:
            parts.append(installing)
        if self.prospects:
            parts.append(self.prospects)
        return self.counts + (f": {', '.join(parts)}" if parts else "")

    def to_json(self) -> StatusDocument:
        """Return all fields as plain JSON."""
        return {
            "run_id": self.run_id,
            "backend": self.backend,
            "status": self.status,
            "min_replicas": self.min_replicas,
            "prospects": self.prospects,
            "joined": self.joined,
            "left_s": self.left_s,
            "n_warnings": self.n_warnings,
            "warnings": [each.to_json() for each in self.warnings],
            "rules": [each.to_json() for each in self.rules],
            "restarts_by_reason": dict(self.restarts_by_reason),
            "standstills": self.standstills,
            "forged_outcomes": [{"rank": rank, "attempt": attempt} for rank, attempt in self.forged],
            "forged_starts": [{"rank": rank, "attempt": attempt} for rank, attempt in self.forged_starts],
            "replicas": [replica.to_json() for replica in self.replicas],
        }

    def used_columns(self, more: Sequence[str] | None = None, n_more: int = N_MORE) -> list[str]:
        """Return the columns of the table that have a value for any replica.

        Args:
            more: the names of other reported numbers to show. None, the default: the first `n_more`.
            n_more: the number of other reported numbers to show if `more` is None.
        """
        *fixed, note = COLUMNS
        reported = dict.fromkeys(name for r in self.replicas for name in r.reported if name not in NO_COLUMNS)
        others = [name for name in (more if more is not None else reported) if name not in COLUMNS]
        others = others[: n_more if more is None else None]
        columns = [*fixed, *dict.fromkeys(others), note]
        return [name for name in columns if name in (more or ()) or self._has(name)]

    def _has(self, column: str) -> bool:
        if column == "attempt":
            return any(replica.attempt > 0 for replica in self.replicas)
        if column == "backend":
            return len({replica.backend for replica in self.replicas}) > 1
        if column == "restarts":
            return any(replica.restart.restarts or replica.restart.decision for replica in self.replicas)
        return any(replica.cell(column) for replica in self.replicas)

    def to_html(self, between: str = "") -> str:
        """Return a heading and the table for a notebook.

        Args:
            between: HTML to show between the heading and the table.
        """
        columns = self.used_columns(n_more=MAX_COLUMNS)
        head = "".join(f"<th>{_escape(HEADINGS.get(name, name))}</th>" for name in columns)
        rows = ["".join(f"<td>{_escape(row.cell(name))}</td>" for name in columns) for row in self.replicas]
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        words = "; ".join(filter(None, [self.counts, self.prospects]))
        title = _escape(f"{self.run_id} on {self.backend}: {words}")
        told = [*self.doubts, *(each.line for each in self.decided[-MAX_DECIDED:])]
        if found := self.warnings:
            told.append(describe_warnings(found, self.n_warnings, self.run_id))
        failed = [(row.rank, line) for row in self.replicas if row.outcome for line in row.outcome.describe_members()]
        told += [f"rank {rank}, {line}" for rank, line in failed[:MAX_MEMBERS]]
        if len(failed) > MAX_MEMBERS:
            told.append(f"… and {len(failed) - MAX_MEMBERS} more processes of failed replicas")
        lines = "".join(f"<p>{_escape(line)}</p>" for line in told)
        return f"<p>{title}</p>{lines}{between}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _escape(text: str) -> str:
    return html.escape("".join(char if char.isprintable() else " " for char in text))


def name_rate(per_s: float) -> str:
    """Return a rate as text: `123`, `12.3`, `1.23`, `0.0123`."""
    return f"{per_s:.3g}" if not 0.1 <= per_s < 1e6 else f"{per_s:.{2 if per_s < 10 else 1 if per_s < 100 else 0}f}"


def name_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as a short text: `rank 3`, `ranks 0-2, 5`."""
    spans: list[list[int]] = []
    ranks = sorted(ranks)
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    return f"rank{'s' if len(ranks) > 1 else ''} " + ", ".join("-".join(map(str, span)) for span in spans)
