"""The replica as seen from its own process: its rank, its progress, its share of the data and its artifacts.

Every backend gives a replica the same five environment variables. `current_replica()` returns them as a `Replica`.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import stat
import sys
import time
from _thread import allocate_lock  # not `threading`, which runs a hook at every fork of the process
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from executors.attempt import Attempt, Claim, replica_key
from executors.errors import KeyNotFoundError, ReplicasError
from executors.metrics.recorder import Recorder
from executors.patience import START, retry
from executors.protocol import ReplicaStatus
from executors.replica.shared_page import Atomic, Section, SharedPage, Unwatched
from executors.replica.warning_log import WarningLog
from executors.store import Store, store_at
from executors.store.record_names import CLAIM
from executors.store.run_key import RUN_KEY, hold_key, parse_key

if TYPE_CHECKING:
    from executors.task.record import LaunchedWith, RunRecord

RANK = "REPLICA_RANK"
WORLD_SIZE = "REPLICA_WORLD_SIZE"
RUN_ID = "REPLICA_RUN_ID"
ATTEMPT = "REPLICA_ATTEMPT"
RENDEZVOUS = "REPLICA_RENDEZVOUS"
CONTRACT = (RANK, WORLD_SIZE, RUN_ID, ATTEMPT, RENDEZVOUS)
# Only for the worker in a container, where a command starts the replica and no process forks it.
TASK_DIGEST = "REPLICA_TASK_DIGEST"
TASK_FOLDER = "REPLICA_TASK_FOLDER"  # the folder of the task, below the folder of the run; by default "task"
TIMEOUT_S = "REPLICA_TIMEOUT_S"
BOOTSTRAP_S = "REPLICA_BOOTSTRAP_S"  # the seconds that fetching and installing took
GPU = "REPLICA_GPU"  # the GPU that the launch asked for
BOTO3 = "REPLICA_BOTO3"  # the requirement to install if boto3 is missing
SETTINGS = "REPLICA_SETTINGS"  # the settings of the launch, as JSON
LAUNCHED_AT = "REPLICA_LAUNCHED_AT"
USD_PER_HOUR = "REPLICA_USD_PER_HOUR"  # the price of one replica, for notifications
LEASE_S = "REPLICA_LEASE_S"
LEASE_NAME = "REPLICA_LEASE_NAME"  # the name of the lease; by default the lease of an attached run
SPARE = "REPLICA_SPARE"  # "1": the container is a spare, and REPLICA_RANK is the number of the spare
ENV = "REPLICA_ENV"  # the names of the user's variables, in which each replica replaces placeholders
SERVICE = "REPLICA_SERVICE"  # the name of the service that runs its job, for messages
FOLDER = "REPLICA_FOLDER"  # the folder that the bootstrap made, and that is removed at the end
SYS_PATH = "REPLICA_SYS_PATH"  # the folders with the user's modules, in a container
FOR_THE_WORKER = (
    *(TASK_DIGEST, TASK_FOLDER, TIMEOUT_S, BOOTSTRAP_S, GPU, SETTINGS, BOTO3),
    *(LAUNCHED_AT, USD_PER_HOUR, LEASE_S, LEASE_NAME, SPARE, ENV, SERVICE, FOLDER, SYS_PATH),
)
MEMBER = "REPLICA_MEMBER"  # the number of this process in a replica of several processes
MEMBERS = "REPLICA_MEMBERS"
OF_MEMBERS = (MEMBER, MEMBERS)
PAGE = "REPLICA_PAGE"  # the path of the shared page, for the processes of a command
NOTICE_S = "REPLICA_NOTICE_S"  # the time between a service's signal and the end of the container; a launch may set it
LOST_AFTER_S = "REPLICA_LOST_AFTER_S"  # the silence after which a spare takes over a rank; a launch may set it
UNSEEN = nullcontext()
# A replica is not a member of a process group. Libraries that find one of these variables assume that it is. Then they
# wait for other members, log and save only in the first member, or handle signals themselves. If SLURM_NTASKS is set,
# Lightning ignores SIGTERM and requeues the Slurm job at SIGUSR1. A launcher inside the replica sets its own variables.
PROCESS_GROUP = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "TORCHELASTIC_RUN_ID"),  # torchrun
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE"),
    "TORCHELASTIC_ERROR_FILE",
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_STEP_NUM_TASKS"),  # sbatch and srun
    *("SLURM_PROCID", "SLURM_LOCALID"),
    *("PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # mpirun
    *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    *("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    *("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK"),  # jsrun
)


def place_in_replica(environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return the number of this process in its replica, and the replica's number of processes: (0, 1) for one process.

    A launcher inside a replica, such as `torchrun`, sets RANK and WORLD_SIZE. A replica's own environment has neither.

    Args:
        environ: the environment of the process.

    Example:
        member, members = place_in_replica()
    """
    for member, members in ((MEMBER, MEMBERS), ("RANK", "WORLD_SIZE")):
        try:
            if member in environ and int(environ[members]) > 1:
                return int(environ[member]), int(environ[members])
        except (KeyError, ValueError):
            continue
    return 0, 1


def leave_process_group() -> None:
    """Remove the variables that announce a process group, or several processes of a replica, from the environment."""
    for name in (*PROCESS_GROUP, *OF_MEMBERS, PAGE):
        os.environ.pop(name, None)


@dataclass(frozen=True)
class StartsFrom:
    """The run from which another run takes its first model."""

    store: Store
    run_id: str
    step: int | None
    """The snapshot at or before this step is taken. None: the newest snapshot."""
    extensions: Mapping[str, Sequence[int]]
    """The totals that the run was extended to."""


# More than 20 methods: users call 12 of them. DiLoCo and the worker use the others to reach the page, the recorder and
# the store of the replica.
@dataclass
class Replica:
    """This replica, as its own process sees it.

    Example:
        replica = current_replica()
        torch.manual_seed(replica.rank)
        replica.report(step=10, loss=2.3)
        print(replica.key("artifacts/model.pt"))  # the key of an artifact in `replica.store`
    """

    rank: int
    """The rank. A replica that was added to the run has a rank of `world_size` or more."""
    world_size: int
    """The number of replicas that were launched. It stays the same when replicas are added or lost."""
    run_id: str
    """The id of the run."""
    attempt: int
    """The number of this attempt of the rank, from 0."""
    rendezvous: str
    """The url of the store. The keys of the run begin with `run_id`."""
    reported: dict[str, Any] = field(default_factory=dict, repr=False)
    """The values that `report` got so far. Each heartbeat of the worker has these values."""
    recorder: Recorder | None = field(default=None, repr=False)
    """Records measurements over time. None: nothing is recorded, as in a helper process."""
    warnings: WarningLog | None = field(default=None, repr=False)
    """Collects warnings, which are events of the run. None: they are only in the log, as in a helper process."""
    page: SharedPage | None = field(default=None, repr=False)
    """The page that this process shares with its supervisor. None: there is no supervisor, or this is a helper
    process.
    """
    launched: LaunchedWith | None = field(default=None, repr=False)
    """The launch of the run, from the run's task. If the start came with a digest of the task, the digest proves the
    launch. None: this is a helper process, or a process that `replicas` did not start.
    """
    claimed_nonce: str | None = field(default=None, repr=False)
    """The random text of the attempt's claim. None: the process has no claim, as a helper process."""
    counted_step: int | None = field(default=None, repr=False)
    """The step that a DiLoCo has reached. None: no DiLoCo counts, or the script reports its own steps."""
    reports_own_steps: bool = field(default=False, repr=False)
    """True if the script has called `report(step=…)`. The script's steps then replace the steps that a DiLoCo
    counts.
    """
    is_alone: bool = False
    """True if this process was not started by `replicas`. Then nothing of this process is saved."""
    at_end: list[Callable[[], None]] = field(default_factory=list, repr=False)
    """Functions to call after the entrypoint has returned."""
    at_failure: list[Callable[[], None]] = field(default_factory=list, repr=False)
    """Functions to call after a failure if this process stays for the next attempt."""
    at_dismissal: list[Callable[[], None]] = field(default_factory=list, repr=False)
    """Functions to call after that, if the process ends all the same or waits for long."""
    may_stay: Callable[[BaseException], bool] | None = field(default=None, repr=False)
    """Returns True if this process stays for the next attempt after an error of the entrypoint. None: it never does."""
    own_models: dict[str, float] = field(default_factory=dict, repr=False)
    """A number for each model that the script changed after `close()`, by the name of the DiLoCo. Equal models have the
    same number.
    """
    began_after_the_end: bool = field(default=False, repr=False)
    """True if a DiLoCo of this attempt found when it was opened that the run has no steps left."""
    knows_rank: bool = field(default=False, repr=False)
    """True if the user's code has asked for this object, or if the arguments or variables of the replica have
    `${rank}`. Then replicas may differ on purpose.
    """

    @property
    def member(self) -> int:
        """The number of this process in the replica: 0 in a replica of one process.

        Example:
            is_leader = replica.member == 0
        """
        return place_in_replica()[0]

    @property
    def members(self) -> int:
        """The number of processes of this replica.

        Example:
            batch = 512 // replica.members
        """
        return place_in_replica()[1]

    @cached_property
    def store(self) -> Store:
        """The run's store, opened once."""
        return store_at(self.rendezvous)

    def key(self, name: str) -> str:
        """Return the key of an object of this attempt in the store.

        Args:
            name: the name of the object, as in "artifacts/model.pt".
        """
        return replica_key(self.run_id, self.rank, self.attempt, name)

    @cached_property
    def nonce(self) -> str:
        """The nonce in the claim of this attempt. A second copy of the rank has another nonce."""
        if self.claimed_nonce is not None:
            return self.claimed_nonce
        if (key := run_key()) is not None:  # a helper process of a signed run must check the proof of the claim, too
            hold_key(self.store.url, self.run_id, key.hex())
        attempt = Attempt(self.store, self.run_id, self.rank, self.attempt)
        try:
            return attempt.read(CLAIM, Claim.parse).nonce
        except KeyNotFoundError:
            raise ReplicasError(
                f"Rank {self.rank} of run {self.run_id!r} was not started by `replicas`: the store has no claim "
                f"{attempt.key(CLAIM)!r}. Start it with executors.launch(...) or `replicas launch`."
            ) from None

    @cached_property
    def previous_failure(self) -> str | None:
        """The error line of this rank's previous attempt. None if this is the first attempt, or if the previous attempt
        did not fail.

        The value comes from the outcomes in the store, so it is the same after each way of restarting. The first use
        reads the store.

        Raises:
            StoreError: the store does not answer.

        Example:
            if replica.previous_failure is not None:
                print(f"restarted after {replica.previous_failure}")
        """
        if self.is_alone:
            return None
        # A lower number may be an attempt that never ran: another process had claimed a later one.
        for number in range(self.attempt - 1, -1, -1):
            before = Attempt(self.store, self.run_id, self.rank, number)
            outcome = retry(before.outcome, START, "the outcome of the previous attempt")
            if outcome is not None and outcome.reason != "fenced":
                return outcome.headline or None if outcome.status is ReplicaStatus.FAILED else None
        return None

    @cached_property
    def record(self) -> RunRecord | None:
        """The record `run.json` of the run."""
        from executors.task.record import find_run_record

        return retry(lambda: find_run_record(self.store, self.run_id), START, "the record of this run")

    @property
    def continues(self) -> str | None:
        """The id of the run from whose newest snapshot this run begins. None if there is no such run.

        The value comes from the task, or from the run's record in a process that has not read the task.
        """
        launch = self.launched or self.record
        return None if launch is None else launch.continues

    @property
    def starts_from(self) -> StartsFrom | None:
        """The run from which this run takes its first model and outer state. None if it begins with its own model.

        The value comes from the run's task, or from its record in a process that has not read the task. The store of
        that run is opened here.

        Raises:
            StoreError: the store of that run does not answer.
            RunNotFoundError: the store of that run no longer exists.

        Example:
            if (source := replica.starts_from) is not None:
                print(source.run_id)
        """
        launch = self.launched or self.record
        if launch is None or launch.settings.from_run is None or self.is_alone:
            return None
        from executors.restarts.decision_log import DecisionLog, extensions_of
        from executors.store.url import check_run_id, existing_store, split_address

        url, run_id = split_address(launch.settings.from_run)
        store, run_id = existing_store(url), check_run_id(run_id)
        log = DecisionLog(store, run_id, key=os.environ.get(RUN_KEY))
        return StartsFrom(
            store, run_id, launch.settings.from_step, extensions_of(retry(log.read, START, "the log of decisions"))
        )

    @property
    def begins_warm(self) -> bool:
        """True if this run begins with the model of another run, at its own step 0."""
        launch = self.launched or self.record
        return launch is not None and launch.settings.from_run is not None

    def extensions(self) -> Mapping[str, Sequence[int]]:
        """Return the totals that `replicas resume` has extended the run to so far, oldest first.

        `DiLoCo` follows them: `total_steps`, or `total_rounds` of a run whose rounds go by the clock.

        Raises:
            StoreError: the store does not answer, or the log of decisions is damaged.

        Example:
            replica.extensions()   # {"total_steps": [800], "total_rounds": []}
        """
        if self.is_alone:
            return {}
        from executors.restarts.decision_log import DecisionLog, extensions_of

        log = DecisionLog(self.store, self.run_id, key=os.environ.get(RUN_KEY))
        return extensions_of(retry(log.read, START, "the log of decisions"))

    @property
    def seed(self) -> int:
        """A seed below 2**31 that differs between runs, ranks, attempts and the processes of a replica."""
        import hashlib

        of_member = f"/{self.member}" if self.member else ""
        source = f"{self.run_id}/{self.rank}/{self.attempt}{of_member}".encode()
        return int.from_bytes(hashlib.sha256(source).digest()[:4], "big") >> 1

    def shard(self, dataset: Any, *, equal: bool = False, per: str = "member") -> Any:
        """Return this replica's share of a data set, or this process's if the replica has several.

            train = replica.shard(dataset, equal=True)
            loader = DataLoader(train, batch_size=32, shuffle=True)
            diloco = DiLoCo(model, total_steps=epochs * len(loader))   # the same number at every replica

        The share has every `world_size`th item. If two kinds of items alternate, as with pairs that match and pairs
        that do not, a share may have only one kind. Permute such a data set first, in the same way on each replica. A
        data set of `datasets` is split as that library splits it. The ranks of the launch have no item in common. The
        longest share has one item more than the shortest, and every item is in a share. With `equal`, all shares are as
        long as the shortest, and up to `world_size - 1` items are in no share.

        A replica that was added later has a rank of `world_size` or more. Its share has items that other replicas have
        as well. It is one of `rank + 1` shares. With `equal`, it has the same number of items as every other share.

        Each replica must see the data set in the same order. Shuffle the share, and not the data set.

        The share of a data set of torch, or of your own, has the attributes of that data set. Attributes that you set
        on the share are set on the data set, which makes the items. A share has `dataset` and `indices`, as a `Subset`
        of torch has them. A list or an array with a value for each item of the data set, such as `targets`, is not
        available from the share: take `share.dataset.targets[i]` for each `i` of `share.indices`.

        Args:
            dataset: a data set of `datasets` or of torch, a list, an array, a table, any object with `__len__` and
                `__getitem__`, or an iterable. The share of an iterable reads all items, and skips the items of other
                shares.
            equal: True if all shares must have the same number of items, so that a number of steps computed from their
                length is the same at every replica. An iterable without a length is read in groups of `world_size`
                items, and an incomplete last group is dropped. Default False.
            per: "member", the default: each process of a replica gets a share of its own. "replica": all processes of a
                replica get the replica's share. Use "replica" with a sampler that divides among these processes itself,
                as `DistributedSampler`, the Trainer and accelerate do. Both are the same for a replica of one process.

        Raises:
            TypeError: `dataset` is not a data set, or it has no order, as a set. Or `equal` is set for a stream of
                `datasets`, whose number of items is not known.
            ValueError: `dataset` has too few items, or `per` is neither "member" nor "replica".
        """
        from executors.replica.shard import share_of

        if per not in ("member", "replica"):
            raise ValueError(f"shard() takes per='member' or per='replica', got per={per!r}.")

        if not isinstance(equal, bool):
            raise TypeError(f"shard() takes equal=True or equal=False, got equal={equal!r}.")
        n, member = (self.members, self.member) if per == "member" else (1, 0)
        of = self.world_size if equal else max(self.world_size, self.rank + 1)
        return share_of(dataset, self.rank * n + member, of * n, equal)

    def report(self, *, step: int | None = None, loss: float | None = None, **numbers: float) -> None:
        """Report the progress.

        The numbers appear in the live table and in `status`, at most once a second. `Run.metrics()` has them over time.

        The first two reports after a round are always recorded. A call takes a few microseconds, so you can call it at
        every step. Call it in the process that runs the entrypoint.

            replica.report(loss=loss.item(), lr=schedule.get_last_lr()[0])

        Args:
            step: the script's own step. None, the default: the step that `DiLoCo` counts, if there is one. After the
                first call with a step, the steps of `DiLoCo` are no longer shown.
            loss: the loss of this step.
            numbers: any other numbers, by name.

        Raises:
            TypeError: a value is not a number.
        """
        named = {"step": step, "loss": loss, **numbers}
        reported = {
            name: value if type(value) is float else _number(name, value)
            for name, value in named.items()
            if value is not None
        }
        if step is not None:
            self.reports_own_steps, self.counted_step = True, None
            if self.page is not None:
                self.page.progress(step=reported["step"])
        self.reported.update(reported)
        if self.page is not None and self.page.reports is not None:
            self.page.reports.note(reported)
        if self.recorder is not None and reported:
            # A loss without its step could not be drawn over steps.
            counted = self.counted_step
            self.recorder.report(reported if counted is None else {"step": counted, **reported})

    def count_step(self, step: int) -> None:
        """Report the step that a `DiLoCo` has reached, unless the script reports its own step.

        `DiLoCo.step()` calls this. The call only writes two variables, so it takes less than a microsecond.

        Args:
            step: the run's step, from 0.

        Example:
            replica.count_step(120)
        """
        if not self.reports_own_steps:
            self.counted_step = self.reported["step"] = step
            if self.page is not None:
                self.page.step = step

    def progress(self, *, kept: bool = False) -> None:
        """Mark progress, so that the replica does not count as hanging.

        `report(step=…)` and `DiLoCo.step()` do this themselves.

        A supervisor treats a replica as hanging if it was idle for a minute, or worked for half an hour, since its last
        mark. `--hang-timeout` sets another limit. Call this method, `section`, `atomic` and `no_watchdog` in the thread
        that runs the entrypoint.

        Args:
            kept: True if this attempt saved something that the next attempt need not repeat, such as a checkpoint.
                Default False. DiLoCo does this for rounds that counted this attempt's work. After several attempts that
                saved nothing, the replica is no longer restarted.

        Example:
            for batch in validation:
                evaluate(batch)
                replica.progress()
        """
        if self.page is not None:
            self.page.progress(kept)

    def section(self, name: str, limit_s: float | None = None) -> AbstractContextManager[None]:
        """Return a context manager for a section of code that has its own limit on hanging.

        Args:
            name: the name of the section. Limits are learned separately for each name.
            limit_s: seconds until a mark of progress is due, whether the replica is active or idle; more than 0. None,
                the default: a limit learned from earlier sections of this name, as between two steps. inf is for code
                that waits for other replicas. It limits only single calls in which Python does not run.

        Raises:
            ValueError: the limit is not more than 0.

        Example:
            with replica.section("evaluate", limit_s=600):
                evaluate(model)
        """
        if limit_s is not None and not limit_s > 0:
            raise ValueError(f"section({name!r}): limit_s must be more than 0, got {limit_s!r}.")
        return UNSEEN if self.page is None else Section(self.page, name, limit_s)

    def atomic(self) -> AbstractContextManager[None]:
        """Return a context manager in which this replica is not ended, for at most 60 s.

        If the replica is asked to end within the block, for example by a cancel, the exception is raised at the end of
        the block.

        Example:
            with replica.atomic():
                torch.save(state, path)
        """
        return UNSEEN if self.page is None else Atomic(self.page)

    def unwatched(self) -> AbstractContextManager[None]:
        """Return a context manager in which no limit on hanging applies, for example for a long call into C code.

        Example:
            with replica.unwatched():
                build_index(files)
        """
        return UNSEEN if self.page is None else Unwatched(self.page)

    @property
    def ending_s(self) -> float | None:
        """The seconds that this replica has left to save its work and end. None if it need not end.

        A replica must end if its machine is taken away, or after `replicas stop`. `DiLoCo.step()` then raises
        `SystemExit` itself. If an entrypoint has read a number here and then returns, it has ended early, and does not
        count as succeeded.

        Example:
            if replica.ending_s is not None:
                save(model)
                return
        """
        if self.page is None or (at := self.page.ending_at) is None:
            return None
        self.page.knows_of_end = True
        return max(0.0, at - time.monotonic())

    def is_to_leave(self, *, after_round: bool) -> bool:
        """Return True if a training loop must end now.

        Args:
            after_round: True if a round has just ended. A stop by the user takes effect only then. The loss of the
                machine takes effect at once.

        Example:
            if replica.is_to_leave(after_round=report is not None):
                break
        """
        page = self.page
        return page is not None and page.ending_at is not None and (after_round or not page.is_stopping)

    def record_round(self, ended: float, **fields: Any) -> None:
        """Record the measurements of a round, and mark progress.

        Args:
            ended: the time of its end, by `time.monotonic`.
            fields: the fields of `executors.metrics.rows.Round`.

        Example:
            replica.record_round(report.ended, name="main", **report.line())
        """
        if self.recorder is not None:
            self.recorder.round(ended, fields)
        if self.page is not None:
            self.page.progress(int(fields["verdict"] == "counted"), round_=fields["entry"] + 1)

    def open_training(self) -> None:
        """Tell the supervisor that a DiLoCo is open. From now on the supervisor expects marks of progress.

        Example:
            replica.open_training()
        """
        if self.page is not None:
            self.page.open_training()

    def finish_training(self) -> None:
        """Tell the supervisor that all DiLoCos of this process have ended. From now on the supervisor expects no marks
        of progress.

        A later mark of progress makes the supervisor expect marks again.

        Example:
            replica.finish_training()
        """
        if self.page is not None:
            self.page.finish_training()

    def record_left(self, *, name: str, work: float) -> None:
        """Record the work that is in no round when a DiLoCo is closed.

        Args:
            name: the name of the DiLoCo.
            work: the number of steps, or of other units of its weight.

        Example:
            replica.record_left(name="main", work=3.0)
        """
        if self.recorder is not None:
            self.recorder.left(name, work)

    def save_artifact(self, name: str, path: str | Path) -> None:
        """Save a file or a folder with the run. `replicas collect` and `Run.artifacts` return it.

        Artifacts of this rank's earlier attempts are collected, too. If two have the same name, the newer one counts.

        Args:
            name: the name of the artifact, which may contain `/`.
            path: the file or folder to copy.

        Raises:
            FileNotFoundError: there is nothing at `path`.
            ValueError: the name cannot be the name of a file, or `path` is a pipe, a socket or a device. A pipe, socket
                or device within a folder is left out, and a line on stderr names it.

        Example:
            replica.save_artifact("model.pt", "out/model.pt")
        """
        from executors.store.artifacts import problem_of

        if problem := problem_of(name):
            raise ValueError(f"save_artifact({name!r}, …): {problem}.")
        source = Path(path)
        if source.is_dir():
            for entry in sorted(source.rglob("*")):
                relative = entry.relative_to(source).as_posix()
                if entry.is_file():
                    self.save_artifact(f"{name}/{relative}", entry)
                elif entry.is_symlink() or not entry.is_dir():
                    left_out = f"save_artifact({name!r}) skips {relative!r}: not a file."
                    print(f"replicas: {left_out}", file=sys.stderr)
                    if self.warnings is not None:
                        self.warnings.add(left_out, place="save_artifact")
            return
        if not stat.S_ISREG(source.stat().st_mode):
            raise ValueError(f"save_artifact({name!r}, …): {str(source)!r} is neither a file nor a folder.")
        if self.is_alone:
            return
        from executors.store.file import read_file

        self.store.put(self.key(f"artifacts/{name}"), read_file(source))


_lock = allocate_lock()


_current: Replica | None = None


def find_replica() -> Replica | None:
    """Return this process's replica. None: this process was not started by `replicas`.

    Raises:
        ReplicasError: the environment has only some of the variables of a replica.
    """
    global _current
    with _lock:
        if _current is None and any(name in os.environ for name in CONTRACT):
            _current = replica_from(os.environ)
            if PAGE in os.environ and os.environ.get("RANK", "0") == "0":
                # This process belongs to a command. The import is by name, because this module must not import the
                # worker, which is a layer above it.
                importlib.import_module("executors.worker.speaker").speak_for(_current)
        if _current is not None:
            _current.knows_rank = True
        return _current


def run_key() -> bytes | None:
    """Return the key of this process's signed run from its environment. None: the run is not signed.

    Raises:
        ValueError: the value of the variable is not a key.
    """
    text = os.environ.get(RUN_KEY)
    return None if text is None else parse_key(text)


def current_replica() -> Replica:
    """Return this process's replica.

    A process that was not started by `replicas`, as with `python train.py`, is rank 0 of 1 and saves nothing. A line on
    stderr explains that.

    Raises:
        ReplicasError: the environment has only some of the variables of a replica.

    Example:
        rank = current_replica().rank
    """
    return find_replica() or _replica_alone()


@functools.cache  # the line is printed once
def _replica_alone() -> Replica:
    # A notebook has no file, and argv has the file of its kernel.
    is_script = hasattr(sys.modules["__main__"], "__file__") and sys.argv[0].endswith(".py")
    how = f"replicas launch {sys.argv[0]} --n 4" if is_script else 'executors.launch("local", your_function, n=4)'
    print(
        "replicas: this process is not a replica, so it is alone: world size 1, in memory, and nothing is kept. With "
        f"others: {how}",
        file=sys.stderr,
    )
    nonce = os.urandom(16).hex()
    return Replica(0, 1, "alone", 0, f"memory://alone-{nonce}", claimed_nonce=nonce, is_alone=True)


def set_current_replica(replica: Replica | None) -> None:
    """Set this process's replica. Only the worker calls this function.

    Args:
        replica: the replica. None: this process is no longer a replica.
    """
    global _current
    with _lock:
        _current = replica


def replica_from(environ: Mapping[str, str]) -> Replica:
    """Return the replica that environment variables describe, as in a helper process of a replica.

    Args:
        environ: the variables.

    Raises:
        ReplicasError: a variable is missing.
    """
    missing = [name for name in CONTRACT if name not in environ]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ReplicasError(
            f"This process has only some variables of a replica: {', '.join(missing)} {verb} not set. Start it with "
            "executors.launch(...) or the command `replicas launch`."
        )
    return Replica(
        rank=int(environ[RANK]),
        world_size=int(environ[WORLD_SIZE]),
        run_id=environ[RUN_ID],
        attempt=int(environ[ATTEMPT]),
        rendezvous=environ[RENDEZVOUS],
    )


def _number(name: str, value: Any) -> float:
    item = getattr(value, "item", None)  # a numpy or torch scalar with one element
    plain = item() if callable(item) else value
    if isinstance(plain, bool) or not isinstance(plain, (int, float)):
        raise TypeError(f"report() takes numbers, got {name}={value!r}.")
    if abs(plain) > sys.float_info.max:  # JSON cannot express an integer with thousands of digits
        return math.inf if plain > 0 else -math.inf
    return plain
