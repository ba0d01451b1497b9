"""The JSON documents that verbs print with `--json`: each is a TypedDict whose fields have a description.

`reference/json` and the JSON Schemas are made from these types. `Output.document` adds the field `version` to each
document, and `notes` to a document with numbers that JSON cannot write. So no type below names them.

The page of `replicas report` has its type in `executors.view.report.document_types`, the state of a run in
`executors.status`, and a dry run in `executors.launcher.launch_plan`: each beside the code that makes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict

from executors.protocol import OutcomeRow
from executors.status import ReplicaDocument, StateFields, StatusDocument, WarningDocument

VERSION = 1
"""The version of the JSON documents. It rises when a field of any document is removed or changes its meaning."""


class ErrorDocument(TypedDict):
    """The document of a call that failed, or that the user ended before its work began."""

    error: str
    """The message, as on stderr."""
    kind: str | None
    """The name of the error's class, as the page of errors lists it. Null: it is not one of those errors."""
    exit_code: int
    """The exit code of the command."""
    run_id: NotRequired[str]
    """The name of the run, if the call has started or watched one."""
    url: NotRequired[str]
    """The address of that run."""


class ResultRow(OutcomeRow):
    """The end of a replica, with the number of its attempt."""

    attempt: int
    """The number of the replica's newest attempt, from 0."""


class LaunchFields(TypedDict):
    """The launch of a run, and its exit code."""

    url: str
    """The address of the run: its store and its name."""
    entrypoint: str
    """The entrypoint of the launch."""
    world_size: int
    """The number of replicas of the launch."""
    timeout_s: float | None
    """The time limit of each replica, in seconds. Null: none."""
    created_at: float
    """The time of the launch, in Unix time."""
    task_digest: str | None
    """The SHA-256 of the task, for `replicas resume URL --task-digest` on another machine. Null: not known here."""
    signed: bool
    """True: the run has a key, and its records are signed."""
    exit_code: int | None
    """The exit code of a command that watches the run. Null: the run continues."""
    summary: str | None
    """The text `summary` in the result of the lowest rank that has one. Null: there is none."""


class SummaryDocument(LaunchFields):
    """The end of a run, or its state when the command returned."""

    run_id: str
    """The name of the run."""
    backend: str
    """The name of the run's backend. Several names have a plus sign between them."""
    n_warnings: int
    """The number of warnings."""
    warnings: Sequence[WarningDocument]
    """The warnings, the oldest first, at most 200."""
    replicas: Sequence[ResultRow]
    """One object per replica, in the order of ranks."""


class SkippedFile(TypedDict):
    """A log or artifact that `collect` could not write."""

    rank: int
    """The rank that wrote the log or artifact."""
    log: NotRequired[str]
    """The name of the log's file."""
    artifact: NotRequired[str]
    """The name of the artifact."""
    problem: str
    """The reason."""
    is_unreadable: bool
    """True: the log or artifact could not be read, so the exit code is not 0. False: its name cannot be the name of a
    file.
    """


class CollectDocument(SummaryDocument):
    """The results of a run, and the files that were written."""

    out: str | None
    """The absolute path of the folder. Null: the results were printed only."""
    artifacts: Sequence[str]
    """The artifacts that were written, as paths below the folder."""
    skipped: Sequence[SkippedFile]
    """The logs and artifacts that could not be written."""
    error: str | None
    """The reason why no file was written. Null: there was no error."""


class StatusReplica(ReplicaDocument):
    """The state of one replica, with its attempts and its page at its service."""

    attempts: int
    """The number of the replica's attempts."""
    down_s: float
    """The time between failed attempts of the replica and the next ones, in seconds."""
    page: str | None
    """The address of the replica's job at its service. Null: there is none."""
    procs: int | None
    """The number of its processes. Null: they are counted where it starts, and their number is not known yet."""


class PlanLink(TypedDict):
    """A measured link to a store."""

    url: str
    """The address of the store."""
    n: int
    """The number of replicas that share the link."""
    at: float
    """The time of the measurement, in Unix time."""
    up: float
    """The speed of sending, in bytes per second and replica."""
    down: float
    """The speed of reading, in bytes per second and replica."""
    latency_s: float
    """The duration of a request, in seconds."""
    processor: Mapping[str, float]
    """The speed of the measured parts of the work, in bytes per second."""


class PlanComparisonDocument(TypedDict):
    """The duration of the newest rounds, compared with the planned duration."""

    round_s: float
    """The median duration of the newest rounds, in seconds."""
    planned_s: float
    """The planned duration of the same rounds, in seconds."""
    link: PlanLink
    """The measured link that the plan uses."""
    ratio: float
    """The measured duration of a round, divided by the planned duration."""


class RunStatusDocument(StateFields, LaunchFields):
    """The launch of a run and the state of each replica."""

    replicas: Sequence[StatusReplica]
    """One object per replica, in the order of ranks."""
    availability: float | None
    """The share of their time in which replicas were up, from 0 to 1. Null: no time has passed."""
    flakiness: float | None
    """The share of attempts that failed, from 0 to 1. Null: there is no attempt."""
    attention: Mapping[str, str]
    """The ranks that may hang, wait for a restart or were given up, each with the reason."""
    spares: Sequence[str]
    """A line on the state of each spare."""
    plan: PlanComparisonDocument | None
    """The newest rounds compared with the plan. Null: this machine has no measured link, or the run has no round."""
    backend_problem: str | None
    """The error of a backend that did not answer. The states are then those in the store. Null: it answered."""


class UnlaunchedDocument(TypedDict):
    """A run that has no records: it is being prepared, was never started, or is being removed."""

    run_id: str
    """The name of the run."""
    status: Literal["preparing", "never started", "being removed"]
    """The state."""
    problem: str
    """The state in a sentence, with what to do."""


class CancelDocument(StatusDocument):
    """The state of a run after a cancel."""

    cancelled: Sequence[int]
    """The ranks that the cancel ended."""
    still_ending: Sequence[int]
    """The ranks that have not ended yet."""


class CancelWithoutStoreDocument(TypedDict):
    """A cancel at the service alone, because the store did not answer."""

    run_id: str
    """The name of the run."""
    cancelled: None
    """Null: the ranks are not known."""
    still_ending: None
    """Null: the ranks are not known."""
    problem: str
    """The problem, and what was ended."""


class AddedDocument(TypedDict):
    """The replicas that `add --detach` started."""

    run_id: str
    """The name of the run."""
    added: Sequence[int]
    """The ranks of the new replicas."""
    backend: str
    """The name of their backend."""


class ListedRun(TypedDict):
    """One run in a list."""

    run_id: str
    """The name of the run."""
    url: str
    """The address of the run: its store and its name."""
    backend: str
    """The name of the run's backend. Empty: the record of the run cannot be read."""
    world_size: int
    """The number of replicas of the launch."""
    n: int
    """The number of replicas now."""
    entrypoint: str
    """The entrypoint of the launch."""
    created_at: float
    """The time of the launch, in Unix time. 0: the record of the run cannot be read."""
    status: str
    """The status of the run, or `unreadable`, `unknown` or `being removed`."""
    problem: str | None
    """The reason why the status is not known. Null: it is known."""


class RunsDocument(TypedDict):
    """The runs of a store."""

    runs: Sequence[ListedRun]
    """The runs, the newest last."""


class RemovedRun(TypedDict):
    """One run of a removal."""

    run: str
    """The run as the command line names it."""
    removed: bool
    """True: the run was deleted."""
    problem: str | None
    """The reason why the run was not deleted. Null: it was."""


class RemovedDocument(TypedDict):
    """The runs that `rm` was asked to delete."""

    runs: Sequence[RemovedRun]
    """One object per run, in the order of the command line."""


class RankLog(TypedDict):
    """The output of one rank."""

    rank: int
    """The rank."""
    members: Sequence[int] | None
    """The processes of the replica that `--rank` names, as in `2.1`. Null: all."""
    log: str
    """The lines that were asked for."""


class LogsDocument(TypedDict):
    """The output of replicas."""

    run_id: str
    """The name of the run."""
    attempt: str | None
    """The value of `--attempt`. Null: the newest attempt of each rank."""
    replicas: Sequence[RankLog]
    """One object per rank."""


class StackDump(TypedDict):
    """The stacks of one replica at one time."""

    rank: int
    """The rank."""
    attempt: int
    """The number of the attempt, from 0."""
    number: int
    """The number of the dump of that attempt, from 0."""
    at: float
    """The time of the dump, in Unix time."""
    text: str
    """The stacks of all threads, after a line with the diagnosis."""


class StacksDocument(TypedDict):
    """The stacks that replicas wrote when they hung."""

    run_id: str
    """The name of the run."""
    stacks: Sequence[StackDump]
    """The dumps, by rank and attempt."""


class ExportDocument(TypedDict):
    """The files that `export` wrote."""

    run_id: str
    """The name of the run."""
    tensorboard: NotRequired[str]
    """The folder of `--tensorboard`."""
    csv: NotRequired[str]
    """The file of `--csv`."""
    jsonl: NotRequired[str]
    """The file of `--jsonl`."""
    rows: int
    """The number of rows in a file."""
    events: int
    """The number of new events for TensorBoard."""
    is_over: bool
    """True: the run has ended."""
    problems: Sequence[str]
    """A sentence for each measurement that could not be read."""


class TensorShape(TypedDict):
    """The type and shape of a tensor."""

    dtype: str
    """The type of its values, as PyTorch names it."""
    shape: Sequence[int]
    """Its shape."""


class ModelDocument(TypedDict):
    """The trained model that was written."""

    run_id: str
    """The name of the run."""
    name: str
    """The name of the DiLoCo."""
    out: str
    """The absolute path of the file."""
    rounds: int
    """The number of rounds that the model has."""
    step: int | None
    """The number of inner steps until that round. Null: not known."""
    tensors: Mapping[str, TensorShape]
    """The tensors of the file, by name."""
    missing: Mapping[str, str]
    """The tensors of the model that the file lacks, each with the reason."""
    notes: Sequence[str]
    """Sentences on the model."""


class BackendOption(TypedDict):
    """An option of a backend."""

    name: str
    """The name, as in `--option NAME=VALUE`."""
    type: str
    """The type of its value, as Python writes it."""
    required: bool
    """True: the option has no default."""
    default: Any
    """The default. Null: none, or the service decides."""
    help: str
    """The meaning."""


class BackendDocument(TypedDict):
    """One backend."""

    name: str
    """The name, as in `--backend NAME`."""
    executor: str
    """The class, as `package.module:Class`."""
    ready: bool
    """True: the backend can be used here."""
    problem: str | None
    """The reason why it cannot be used. Null: it can."""
    about: str
    """The backend in a line."""
    options: Sequence[BackendOption]
    """Its options."""
    network_between_replicas: NotRequired[bool]
    """True: its replicas can reach each other by network. Absent: the backend cannot be used here."""


class BackendsDocument(TypedDict):
    """The backends with their options."""

    backends: Sequence[BackendDocument]
    """One object per backend, by name. With `backends NAME`: this one only."""


class DebugFile(TypedDict):
    """One file of a debug archive."""

    name: str
    """The path of the file in the archive."""
    size_bytes: int | None
    """The size of the file. Before the archive is written, the largest size that it may have. Null: not known."""


class DebugDocument(TypedDict):
    """A debug archive: the files that help to find the cause of a problem, without secrets."""

    run_id: str
    """The name of the run."""
    out: str | None
    """The archive. Null: none was written."""
    size_bytes: int | None
    """The size of the archive. Null: none was written."""
    files: Sequence[DebugFile]
    """The files of the archive, or those that it would have."""
    left_out: Sequence[str]
    """A sentence for each thing that the archive never has, or that `--code` adds."""
    problems: Sequence[str]
    """A sentence for each file that could not be read whole."""
    issue: str | None
    """The summary in Markdown. Null: it was not asked for."""


class FoundSettingDocument(TypedDict):
    """One setting."""

    value: Any
    """The value."""
    origin: str
    """The file or variable that gives it."""


class ConfigDocument(TypedDict):
    """The settings that `launch` would use."""

    files: Sequence[str]
    """The settings files, in the order in which they are read."""
    profile: str | None
    """The profile. Null: none."""
    settings: Mapping[str, FoundSettingDocument]
    """The settings by name. A dot follows the name of a table."""


class CheckDocument(TypedDict):
    """The result of one check."""

    what: str
    """The thing that was checked, in one or two words."""
    state: Literal["ok", "note", "wrong"]
    """`ok`, `note` for advice, or `wrong`."""
    found: str
    """The result in words."""
    advice: str
    """The remedy. Empty: none is needed."""


class DoctorDocument(TypedDict):
    """The checks of this machine, a backend and a store."""

    ok: bool
    """True: no check found a problem."""
    facts: Mapping[str, str]
    """The facts about this machine, by name."""
    findings: Sequence[CheckDocument]
    """One object per check."""


class LinkDocument(TypedDict):
    """The link of one replica to the store."""

    up: float
    """The speed of sending, in bytes per second."""
    down: float
    """The speed of reading, in bytes per second."""
    latency_s: float
    """The duration of a request, in seconds."""
    source: str
    """`measured`, `assumed` or `given`, or several of these words."""


class PlannedSettings(TypedDict):
    """The arguments of the planned `DiLoCo`."""

    inner_steps: int
    """The number of steps between two rounds."""
    fragments: int
    """The number of fragments."""
    overlap_steps: int
    """The number of steps that train during a round."""
    wire: str
    """The wire of contributions."""
    mean_wire: str
    """The wire of means."""
    merge: Literal["carry", "anchor"]
    """The merge of the result with steps that were made meanwhile."""
    outer_lr: float
    """The learning rate of the outer step."""
    outer_momentum: float
    """The momentum of the outer step."""


class PlannedRound(TypedDict):
    """The estimated duration and bytes of a round."""

    link_s: float
    """The time in which bytes move, in seconds."""
    requests_s: float
    """The time in which a replica waits for answers to requests, in seconds."""
    processor_s: float
    """The time in which the processor encodes, adds and decodes, in seconds."""
    noticing_s: float
    """The time until a replica notices the work of the others, in seconds."""
    up: float
    """The bytes that one replica sends."""
    down: float
    """The bytes that one replica reads."""
    seconds: float
    """The duration of the round, in seconds."""


class BytesPerRound(TypedDict):
    """The bytes that one replica moves in `inner_steps` steps."""

    up: float
    """The bytes that the replica sends."""
    down: float
    """The bytes that the replica reads."""


class PlanSums(TypedDict):
    """The sums over all replicas and the steps of the run."""

    steps: int
    """The number of inner steps that the sums cover."""
    bytes: float
    """The bytes that all replicas move."""
    requests_usd: float | None
    """The price of the requests, in US dollars. Null: the prices are not known."""
    egress_usd: float | None
    """The price of reading from another region or service, in US dollars. Null: the prices are not known."""


class PlanPrices(TypedDict):
    """The prices that the sums use, in US dollars."""

    put: float
    """The price of one request that writes or lists."""
    get: float
    """The price of one request that reads."""
    egress: float
    """The price of one byte that leaves the service."""
    of: str
    """The date of the table of prices."""


class PlanDocument(TypedDict):
    """Settings with which no step waits for a round, and their costs."""

    params: int
    """The number of trained parameters."""
    n: int
    """The number of replicas."""
    step_s: float
    """The duration of an inner step, in seconds."""
    steps: int | None
    """The number of inner steps of the run. Null: not given."""
    store: str | None
    """The address of the store. Null: not given."""
    link: LinkDocument
    """The link of one replica."""
    processor: Mapping[str, float]
    """The speed of a replica's core in each part of the work, in bytes of float32 per second."""
    settings: PlannedSettings
    """The planned settings."""
    call: str
    """The same settings as a line of Python."""
    round: PlannedRound
    """A round of one fragment."""
    hidden_s: float
    """The part of a round that runs while training continues, in seconds."""
    late_s: float
    """The part of a round for which training waits, in seconds."""
    share_lost: float
    """The share of the time that training waits, from 0 to 1."""
    has_room: bool
    """True: a round may take a quarter longer than estimated, and training still does not wait."""
    rounds: int | None
    """The number of rounds of the run. Null: the number of steps is not given."""
    per_round: BytesPerRound
    """The bytes per replica."""
    sums: PlanSums
    """The sums."""
    prices: PlanPrices | None
    """The prices. Null: not known."""


class DashboardDocument(TypedDict):
    """The address of a dashboard. The command serves after it has printed the document."""

    url: str
    """The address to open. It has the token, so it is a secret."""
    port: int
    """The port of the dashboard."""
    read_only: bool
    """True: the dashboard has no buttons."""


@dataclass(frozen=True)
class DocumentKind:
    """One kind of document.

    Attributes:
        name: the name of its section in the reference, and of its JSON Schema.
        type: the type, as `module:Class`. It is loaded when it is needed, because some modules are slow to import.
        printed_by: the verbs with their options that print it.
        is_line: True if it is printed on one line, and a call prints several.
    """

    name: str
    type: str
    printed_by: Sequence[str]
    is_line: bool = False


HERE = "executors.cli.documents"
WATCHING = ("launch", "resume", "add", "wait", "watch", "stop")
"""The verbs that watch a run to its end."""
KINDS = (
    DocumentKind("error", f"{HERE}:ErrorDocument", ("every verb, if it fails",)),
    DocumentKind("run", f"{HERE}:SummaryDocument", WATCHING),
    DocumentKind("dry-run", "executors.launcher.launch_plan:DryRunDocument", ("launch --dry-run",)),
    DocumentKind("status", f"{HERE}:RunStatusDocument", ("status",)),
    DocumentKind("unlaunched", f"{HERE}:UnlaunchedDocument", ("status",)),
    DocumentKind("state", "executors.status:StatusDocument", ("watch --once", "stop", "resume")),
    DocumentKind("cancel", f"{HERE}:CancelDocument", ("cancel",)),
    DocumentKind("cancel-without-store", f"{HERE}:CancelWithoutStoreDocument", ("cancel",)),
    DocumentKind("add", f"{HERE}:AddedDocument", ("add --detach",)),
    DocumentKind("ls", f"{HERE}:RunsDocument", ("ls",)),
    DocumentKind("rm", f"{HERE}:RemovedDocument", ("rm",)),
    DocumentKind("logs", f"{HERE}:LogsDocument", ("logs",)),
    DocumentKind("stacks", f"{HERE}:StacksDocument", ("logs --stacks",)),
    DocumentKind("event", "executors.view.report.event_reader:EventDocument", ("events",), is_line=True),
    DocumentKind("collect", f"{HERE}:CollectDocument", ("collect",)),
    DocumentKind("report", "executors.view.report.document_types:ReportDocument", ("report",)),
    DocumentKind("dashboard", f"{HERE}:DashboardDocument", ("dashboard",)),
    DocumentKind("debug", f"{HERE}:DebugDocument", ("debug",)),
    DocumentKind("export", f"{HERE}:ExportDocument", ("export",)),
    DocumentKind("model", f"{HERE}:ModelDocument", ("model",)),
    DocumentKind("backends", f"{HERE}:BackendsDocument", ("backends",)),
    DocumentKind("config", f"{HERE}:ConfigDocument", ("config",)),
    DocumentKind("doctor", f"{HERE}:DoctorDocument", ("doctor",)),
    DocumentKind("plan", f"{HERE}:PlanDocument", ("plan",)),
)
"""Each kind of document, in the order of the reference."""
