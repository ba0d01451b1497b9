"""The type of the document that `replicas report --json` prints and that the HTML page of a run shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from executors.protocol import Reason
from executors.view.report.event_reader import EventDocument


class CurveLine(TypedDict):
    """One line of a chart."""

    rank: int
    """The rank."""
    attempt: int
    """The number of the attempt, from 0."""
    y: Sequence[float | None]
    """A value for each `x` of the chart. Null: the line has no value there."""


class Chart(TypedDict):
    """Lines over one common x axis."""

    x: Sequence[float]
    """The x axis: steps, seconds or rounds."""
    lines: Sequence[CurveLine]
    """The lines of single replicas."""
    above: Mapping[str, Sequence[float | None]]
    """Further lines by name, such as the median of the replicas."""
    bins: int | None
    """The number of bins that the values were thinned to. Null: they are complete."""
    points: int
    """The number of values before thinning."""


class NamedChart(Chart):
    """The chart of one reported number."""

    name: str
    """The name of the number."""


class ReportCurves(TypedDict):
    """The numbers that replicas reported."""

    over: str
    """The x axis: `step`, or `seconds` if most reports name no step."""
    shown: Sequence[NamedChart]
    """A chart for each number."""
    has_anchor: bool
    """True: the chart of the loss also has the loss after each round."""
    left_out: Sequence[str]
    """Names of numbers that have no chart, because there are too many."""
    n_left_out: int
    """The number of names without a chart."""


class CostNumbers(TypedDict):
    """The costs of a run. Null: there is nothing to compute the number from, or not all measurements were read."""

    goodput: float | None
    """The share of the possible work that was counted, from 0 to 1."""
    late: float | None
    """The share of the time of all attempts in which training waited for rounds, from 0 to 1."""
    hidden: float | None
    """The share of the time in which rounds ran while training continued, from 0 to 1."""
    hidden_s: float
    """The time in which rounds ran while training continued, in seconds over all replicas."""
    in_rounds: float | None
    """The share of the time in which training waited for the replica's own part of rounds, from 0 to 1."""
    in_rounds_s: float
    """The time in which training waited for the replica's own part of rounds, in seconds over all replicas."""
    waiting: float | None
    """The share of the time in which training waited for other replicas, from 0 to 1."""
    waiting_s: float
    """The time in which training waited for other replicas, in seconds over all replicas."""
    alive_s: float
    """The time of all attempts, in seconds."""
    bytes_up: float | None
    """The bytes that a replica sent, on average."""
    bytes_down: float | None
    """The bytes that a replica read, on average."""
    data_parallel_bytes: float | None
    """The bytes that a replica would have sent with float32 gradients averaged in each step."""
    wire: str | None
    """The wire of contributions."""
    wire_error: float | None
    """The median share of a contribution that is rounding error of the wire."""
    times_less: float | None
    """The bytes of data parallel training, divided by the bytes that were moved."""
    restarts: int
    """The number of restarts."""
    restarts_by_rank: Mapping[int, int]
    """The number of restarts of each rank that had any."""
    work: Mapping[str, float] | None
    """The work that was `counted`, `carried`, `dropped` and `lost`, in inner steps."""


class ReportReplica(TypedDict):
    """The work of one replica."""

    rank: int
    """The rank."""
    attempt: int
    """The number of its newest attempt, from 0."""
    status: str
    """The status of that attempt."""
    reason: Reason | None
    """The reason of its end. Null: success, or no end yet."""
    step: float | None
    """The step that the replica reported last. Null: none."""
    loss: float | None
    """The loss that the replica reported last. Null: none, or it is not finite."""
    alive_s: float
    """The time of all attempts of the replica, in seconds."""
    training_s: float
    """The time in which the replica trained, in seconds."""
    waiting_s: float
    """The time in which the replica waited for other replicas, in seconds."""
    in_rounds_s: float
    """The time in which the replica waited for its own part of rounds, in seconds."""
    hidden_s: float
    """The time in which rounds ran while the replica trained, in seconds."""
    rounds: Mapping[str, int]
    """The number of rounds in which the replica's work was `counted`, `carried` or `dropped`."""
    lost: float | None
    """The work that was lost with an attempt, in inner steps. Null: not known."""
    bytes_up: int | None
    """The bytes that the replica sent. Null: not known."""
    bytes_down: int | None
    """The bytes that the replica read. Null: not known."""
    last: int
    """The number of rounds in which the rank came last."""
    missing: int
    """The number of rounds that lack the work of this rank."""
    drifting: int
    """The number of rounds in which the rank's pseudo-gradient was far from the others."""
    cost_s: float
    """The time that the other replicas waited for this rank, in seconds."""
    page: str | None
    """The address of its job at its service. Null: there is none."""
    held_up: bool
    """True: the other replicas waited noticeably long for this replica."""


class Lane(TypedDict):
    """One rank on the time line."""

    rank: int
    """The rank."""
    spans: Sequence[Any]
    """The activities of the rank: kind, begin and end in seconds since the launch, and the rounds."""
    beside: Sequence[Any]
    """The parts of rounds that ran while training continued, in the form of the activities."""
    marks: Sequence[Any]
    """The events of the rank: kind, seconds since the launch, and a text."""
    n_marks: int
    """The number of events, also of those that are left out."""


class Timeline(TypedDict):
    """The activities of all ranks."""

    end_s: float
    """The end of the time line, in seconds since the launch."""
    merged: int
    """The number of rounds that one span represents."""
    used_kinds: Sequence[str]
    """The kinds of spans."""
    used_marks: Sequence[str]
    """The kinds of marks."""
    lanes: Sequence[Lane]
    """One object per rank."""


class ReportRound(TypedDict):
    """One round."""

    name: str
    """The name of the DiLoCo."""
    round: int
    """The number of the round, from 1."""
    ended_s: float
    """The end of the round, in seconds since the launch."""
    fragment: int
    """The number of the round's fragment, from 0."""
    counted: Sequence[int]
    """The ranks whose work is in the mean."""
    missing: Sequence[int]
    """The ranks that were alive and whose work is not in the mean."""
    last: int | None
    """The rank that came last. Null: not known."""
    waited_s: float
    """The time that all replicas waited for others, in seconds."""
    late_s: float
    """The time that training waited for the round, in seconds over all replicas."""
    hidden_s: float
    """The time that the round ran while training continued, in seconds over all replicas."""
    stale_steps: int
    """The largest number of inner steps between sending and applying."""
    wire_error: float | None
    """The largest share of a contribution that is rounding error of the wire. Null: not measured."""
    weight: float
    """The work that was counted, in inner steps."""
    mean_norm: float | None
    """The norm of the mean. Null: not measured."""
    drifting: Mapping[str, float]
    """The ranks whose pseudo-gradient was far from the others, with the ratio of its norm to the median."""


class RankCost(TypedDict):
    """The rounds of one rank."""

    last: int
    """The number of rounds in which the rank came last."""
    missing: int
    """The number of rounds that lack the work of this rank."""
    drifting: int
    """The number of rounds in which the rank's pseudo-gradient was far from the others."""
    cost_s: float
    """The time that the other replicas waited for this rank, in seconds."""


class SameData(TypedDict):
    """Ranks that sent the same work."""

    ranks: Sequence[int]
    """The ranks."""
    rounds: int
    """The number of rounds in which these ranks sent the same work."""


class ReportRounds(TypedDict):
    """The rounds of a run."""

    n: int
    """The number of rounds."""
    names: Sequence[str]
    """The names of the DiLoCos."""
    charted: str
    """The name of the DiLoCo that the charts show."""
    by_rank: Mapping[int, RankCost]
    """The rounds of each rank that stood out."""
    drifting: Sequence[int]
    """The ranks whose pseudo-gradients are far from the others again and again."""
    same: Sequence[SameData]
    """Groups of ranks that train on the same data."""
    usual_wait_s: float
    """The wait in a round that no rank misses, in seconds."""
    has_hidden: bool
    """True: rounds run while training continues."""
    waited: Chart
    """The wait by round."""
    norms: Chart
    """The norms of pseudo-gradients by round."""
    table: Sequence[ReportRound]
    """The rounds, at most 200: those in which replicas waited longest."""


class ReportWarning(TypedDict):
    """A warning of replicas, with its ranks."""

    text: str
    """The warning."""
    at: float
    """The time of the first one, in Unix time."""
    ranks: Sequence[int]
    """The ranks that gave the warning."""
    count: int
    """How often it came."""


class ReportEvent(EventDocument):
    """One event, on the time line of the run."""

    s: float
    """The time in seconds since the launch."""
    is_usual: bool
    """True: the event also happens in a run without failures."""


class FailedReplica(TypedDict):
    """An attempt that failed."""

    rank: int
    """The rank."""
    attempt: int
    """The number of the attempt, from 0."""


class Failure(TypedDict):
    """Attempts that failed in the same way."""

    words: str
    """The failure in a sentence."""
    reason: Reason | None
    """The reason, as the page of outcomes lists them."""
    replicas: Sequence[FailedReplica]
    """The attempts."""
    resumed: bool
    """True: later attempts of these ranks were started."""
    exit_code: int | None
    """The exit status of the process. Null: not known."""
    finished_at: float
    """The time of the first end, in Unix time."""
    frames: str
    """The last lines of the user's code in the traceback."""
    stack: str
    """The traceback."""
    output: str
    """The end of the output."""
    members: Sequence[str]
    """A line about the end of each process, if a replica has several."""


class Sentence(TypedDict):
    """A sentence of the page."""

    text: str
    """The sentence."""
    tone: str
    """`good`, `bad` or `plain`."""


class ReportDocument(TypedDict):
    """The content of the page of a run, cut to a readable size."""

    run_id: str
    """The name of the run."""
    url: str
    """The address of the run: its store and its name."""
    status: str
    """The status of the run as a whole."""
    counts: str
    """The number of replicas by status, in words."""
    is_live: bool
    """True: the run continues."""
    as_of: float
    """The time of the report, in Unix time."""
    launched_at: float
    """The time of the launch, in Unix time."""
    elapsed_s: float
    """The time from the launch to the last end, or to now, in seconds."""
    began_at: float
    """The begin of the time line, in Unix time."""
    launched: Sequence[Sequence[str]]
    """The launch as pairs of a name and a text."""
    settings: Sequence[Sequence[str]]
    """The arguments and settings of the launch, as pairs of a name and a text."""
    numbers: CostNumbers
    """The costs."""
    not_finite: Mapping[int, float | None]
    """The ranks whose loss is not finite, with the step since then."""
    curves: ReportCurves
    """The numbers that replicas reported."""
    replicas: Sequence[ReportReplica]
    """One object per replica, in the order of ranks."""
    timeline: Timeline
    """The activities of all ranks."""
    rounds: ReportRounds
    """The rounds."""
    warnings: Sequence[ReportWarning]
    """The warnings, at most 50 texts."""
    n_warnings: int
    """The number of events of the kind `warning`."""
    events: Sequence[ReportEvent]
    """The last events, at most 500."""
    n_events: int
    """The number of events."""
    failures: Sequence[Failure]
    """The failures. The probable cause comes first."""
    configuration: Sequence[Sequence[str]]
    """The records of the run and its task, as pairs of a name and a text."""
    doubts: Sequence[str]
    """Sentences on objects that the key of a signed run does not prove."""
    problems: Sequence[str]
    """A sentence for each part that could not be read."""
    notable: Sequence[int]
    """The ranks that stand out."""
    in_short: Sequence[Sentence]
    """The summary in sentences."""
