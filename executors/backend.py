"""The interface `Backend`, through which the package uses an executor.

`Backend` is the interface. `PlainBackend` implements it for any executor that has only the five methods of the
protocol.

The registry, the launcher and `attach` get an executor from the user, and make a Backend of it. All other code has a
Backend, and never checks the type of an executor. It asks the backend instead, as with `backend.starts_single_ranks`.
"""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from executors.attempt import Attempt
from executors.errors import BackendError
from executors.logs.log import Log
from executors.logs.readers import TailedLog
from executors.protocol import Outcome, Reason, ReplicaHandle, ReplicaStatus, ServerlessExecutor, as_status
from executors.settings.run_spec import StartSpec
from executors.store import Store, store_at
from executors.store.parallel import at_store
from executors.store.record_names import HANDLE
from executors.store.url import address_of
from executors.task.arguments import split_rank_env
from executors.task.code_package import Package
from executors.task.entrypoint import check_entrypoint
from executors.task.launch_request import LaunchRequest

Recordable = Mapping[str, type | re.Pattern[str]]
"""The options of a backend that readers take from a record, each with its type, or the pattern of its string.

They say where replicas are and how large. An option that decides which code runs, or which secrets it gets, is not
among them.
"""
PLAIN_TIMEOUT_S = 3600  # the protocol's default timeout, because such executors cannot run without one
PLAIN_ENTRYPOINT = "executors.worker.call"  # our worker's module, which these executors call as their entrypoint
WITHOUT_OPTIONS: Recordable = MappingProxyType({})


def no_progress(words: str) -> None:
    """Do nothing. It is the default of `on_progress`.

    Args:
        words: the progress, in a few words.

    Example:
        backend.start_ranks(start, no_progress)
    """


@dataclass(frozen=True)
class PendingReplica:
    """A replica without an outcome that a backend is asked about, as the records of its run show it."""

    handle: ReplicaHandle
    """The newest handle of the replica."""
    attempt: int
    """Its newest attempt: the handle's, or a later one that was claimed since."""


@dataclass(frozen=True)
class Observation:
    """The state of a replica without an outcome, as its backend reports it."""

    outcome: Outcome | None = None
    """How the replica ended. Its process or job is gone, and the backend has recorded this."""
    doing: str = ""
    """The reason why the entrypoint does not run yet, in a few words, as in "installing"."""
    status: ReplicaStatus | None = None
    """The status that the backend reports, if it records no outcomes. None: the store shows it."""


@dataclass(frozen=True)
class SupervisorStatus:
    """The state of the process or job that supervises a replica and restarts it in place."""

    is_alive: bool
    reason: Reason | None = None
    """The reason why the job ended, such as "preempted", if its service knows more than the exit code."""
    error: str | None = None
    """The reason as a sentence. None: there is none."""
    launcher_is_gone: bool = False
    """True if the run is attached, and the process that it ends with is known to have ended."""


@dataclass(frozen=True)
class JobsOfRun:
    """Names the jobs of one run that must be ended. It contains everything that is needed, so no store is asked."""

    run_id: str
    store_url: str | None = None
    """The run's store. None: not known, so the run's id alone finds its jobs."""
    launched_at: float | None = None
    """Unix time of the launch, which is part of the jobs' labels. None: not known."""
    ranks: tuple[int, ...] | None = None
    """The ranks whose jobs must be ended. None: all jobs of the run, with its spares."""
    over: frozenset[int] = frozenset()
    """Ranks that the caller knows to have ended. Their jobs are asked for only if the service lists them."""


@dataclass(frozen=True)
class EndedJobs:
    """The answer of a service that was asked to end jobs."""

    n_ended: int = 0
    """The number of jobs that the service has accepted to end."""
    attempts: frozenset[tuple[int, int]] = frozenset()
    """Rank and attempt of each known job that the service was asked to end, whether or not it accepted that."""
    problems: tuple[str, ...] = ()
    """A sentence for each job, or list of jobs, that failed. Empty: no job that was asked for still runs."""
    commands: str = ""
    """The service's own commands that end the jobs that may still run."""

    @property
    def is_complete(self) -> bool:
        """True if the service has accepted to end every job."""
        return not self.problems

    @property
    def what_is_left(self) -> str:
        """A sentence on jobs that may still run, with the commands that end them. Empty if all jobs were ended."""
        if not self.problems:
            return ""
        return f"These may still run: {'; '.join(self.problems)}. End them yourself: {self.commands}"

    def __add__(self, other: EndedJobs) -> EndedJobs:
        """Combine the answers of two services."""
        commands = "   ".join(filter(None, dict.fromkeys([self.commands, other.commands])))
        return EndedJobs(
            self.n_ended + other.n_ended, self.attempts | other.attempts, (*self.problems, *other.problems), commands
        )


@dataclass(frozen=True)
class JobsLeft:
    """The jobs of a run that have not ended, as their service lists them."""

    n: int
    """The number of these jobs."""
    service: str
    """The service's name, for users."""
    commands: str
    """The service's own commands that end them."""


# More than 20 methods: this is the only interface to an executor. With two interfaces, other code would have to check
# which one an executor has.
class Backend(ABC):
    """The five methods of the protocol, and everything else that the package needs from an executor.

    The executors of this package inherit from it and implement the abstract members. The other members have defaults
    for a backend without the ability.
    """

    recordable_options: ClassVar[Recordable] = WITHOUT_OPTIONS

    # --- members that each backend implements

    @property
    @abstractmethod
    def backend_name(self) -> str:
        """The name of the backend in records and for users."""

    @property
    @abstractmethod
    def supports_inter_replica_network(self) -> bool:
        """True if replicas can connect to each other over the network."""

    @property
    @abstractmethod
    def needs_shared_rendezvous(self) -> bool | None:
        """True if replicas cannot see the directories of this machine. None: not known, so the launch prints a note."""

    @property
    @abstractmethod
    def ends_with_launcher(self) -> bool:
        """True if an attached run ends with the process that launched it, however that process ends."""

    @property
    @abstractmethod
    def ships_code(self) -> bool:
        """True if replicas get a package with the code.

        Otherwise they use the files in the folder in which they start.
        """

    # --- members with a default

    @property
    def knows_attempts(self) -> bool:
        """True if the backend records each attempt before it starts it, and starts later attempts of a rank.

        False: the backend starts each replica once, and has no attempts.
        """
        return True

    @property
    def starts_single_ranks(self) -> bool:
        """True if the backend can start some ranks of a run, while other backends start the others.

        A supervisor watches and restarts each rank.

        False: the backend starts all ranks of a run together.
        """
        return True

    @property
    def carries_environment(self) -> bool:
        """True if environment variables, secrets and the key of a signed run reach its replicas."""
        return True

    @property
    def is_cancelled_at_exit(self) -> bool:
        """True if only the launching process can end an attached run. It cancels the replicas when it exits."""
        return False

    @property
    def has_launch_check(self) -> bool:
        """True if `check_launch` also asks the backend's service. A launch that passes is then likely to start."""
        return True

    @property
    def ends_jobs(self) -> bool:
        """True if replicas are jobs of a service, which `end_jobs` can end without the run's store."""
        return False

    @property
    def lease_s(self) -> float | None:
        """The seconds that replicas of an attached run continue after the last renewal of its lease.

        None: they have no lease.
        """
        return None

    @property
    def default_timeout_s(self) -> float | None:
        """The default time limit of a launch in seconds. None: no limit."""
        return None

    @property
    def options_to_keep(self) -> Mapping[str, Any]:
        """The options of the executor. At a launch, this machine notes those that JSON can express.

        A run that is followed or resumed later gets an executor with the same options.
        """
        return {}

    @property
    def pip(self) -> Sequence[str]:
        """The requirements that the user gave to the executor.

        Empty: they are read from files of the workspace at the launch.
        """
        return ()

    @property
    def python_of_replicas(self) -> str | None:
        """The minor version of Python that replicas use, as in "3.12". None if it is not known before they run."""
        return None

    @property
    def log_advice(self) -> str:
        """Advice on how to make the log of a replica readable on this machine. Empty if the user cannot change that."""
        return ""

    def price_per_hour(self, gpu: str | None) -> float | None:
        """Return the price of one replica per hour in US dollars. None if the backend does not publish it.

        Args:
            gpu: the GPU of the replica. None: no GPU.

        Example:
            backend.price_per_hour("H100")  # 3.95
        """
        return None

    def reports_preemption(self, gpu: str | None) -> bool:
        """Return True if the service may take back the machines of replicas, and reports that it did.

        Args:
            gpu: the GPU of the replicas. None: no GPU.

        Example:
            backend.reports_preemption("H100")
        """
        return False

    def risks(self) -> Sequence[tuple[str, str]]:
        """Return the settings of the service that may harm a run: pairs of a problem and an advice.

        Example:
            for problem, advice in backend.risks(): print(problem, advice)
        """
        return ()

    def installation_note(self, requirements: Sequence[str]) -> str:
        """Return a sentence on a slow installation in each container, with advice on how to avoid it.

        Empty if there is none.

        Args:
            requirements: the requirements of replicas.

        Example:
            backend.installation_note(["torch==2.13.0"])
        """
        return ""

    def check_image(self) -> tuple[str, str] | None:
        """Return a text on the packages that containers install before they run, and advice on how to avoid it.

        None: not known.

        The advice is empty if the installation is short.

        Example:
            backend.check_image()
        """
        return None

    # --- before a launch

    def warm_up(self, entrypoint: str | Callable[..., Any]) -> None:
        """Begin slow preparations that cost no money, and do not wait for them. A launch is expected soon.

        Args:
            entrypoint: the entrypoint of the launch. A command needs fewer preparations than a function.

        Example:
            backend.warm_up("train.py:main")
        """
        return

    @abstractmethod
    def check_launch(self, request: LaunchRequest) -> None:
        """Raise an error for a launch that cannot work, before anything is written, started or paid for.

        Args:
            request: the entrypoint, its arguments, and the settings `n`, `gpu`, `timeout` and `secrets`. A `timeout` of
                None stands for `default_timeout_s`.

        Raises:
            ValueError: a bad argument.
            BackendError: the backend cannot be used.
            EntrypointError: the entrypoint cannot be found, or called with these arguments.

        Example:
            backend.check_launch(LaunchRequest.of("train.py:main", n=2, args={"steps": 100}))
        """

    def check_pickle(self, pickled_by: str, whose: str = "The callable") -> None:
        """Check that replicas can load a pickle, as far as the backend knows their Python.

        Args:
            pickled_by: the minor version of the Python that made the pickle, as in "3.12".
            whose: the subject of the message.

        Raises:
            ValueError: replicas run another Python. Each start would be paid for, and fail.

        Example:
            backend.check_pickle("3.12")
        """
        found = self.python_of_replicas
        if found in (None, pickled_by):
            return
        wanted = {"image": f"python:{pickled_by}", "python_version": pickled_by}
        name = next((name for name in wanted if self.options_to_keep.get(name)), None)
        advice = f"Run this with Python {pickled_by}" if name is None else f"Give --option {name}={wanted[name]}"
        raise ValueError(
            f"{whose} was pickled by Python {pickled_by}, and replicas on {self.backend_name!r} would run {found}. "
            f"{advice}, or launch an importable entrypoint."
        )

    def package(self, entrypoint: str | Callable[..., Any]) -> Package | None:
        """Return the package with the code that replicas need. None if the backend ships no code.

        Args:
            entrypoint: the entrypoint of the launch.

        Example:
            backend.package("train.py:main")
        """
        return None

    @abstractmethod
    def describe_start(self, start: StartSpec, requirements: Sequence[str] = ()) -> dict[str, Any]:
        """Return the request of `start_ranks` as JSON. Values of secrets and of environment variables are masked.

        Args:
            start: the run, which of its ranks, and what each replica gets.
            requirements: the requirements that replicas install. Default: none.

        Example:
            backend.describe_start(StartSpec(spec, "train.py:main", gpu="H100"))
        """

    # --- starting ranks of a run that has been written

    @abstractmethod
    def start_ranks(self, start: StartSpec, on_progress: Callable[[str], None] = no_progress) -> list[ReplicaHandle]:
        """Start attempts of some ranks of a run, whose record exists already.

        `executors.run.start_attempts` calls it for each launch, resume, addition and restart. It also holds the lease,
        and undoes a start that fails.

        Args:
            start: the run, which of its ranks, which attempt, and what each replica gets.
            on_progress: called with a few words on the progress of the start, as in "5 of 8 started". Default: nothing
                is reported.

        Returns:
            The handles in the order of the ranks. Attempts that another process has claimed are not included, and not
            changed.

        Raises:
            LaunchError: a replica could not be started. Those that were started have been ended.

        Example:
            backend.start_ranks(StartSpec(spec, "train.py:main"))
        """

    # --- the five methods of the protocol

    @abstractmethod
    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: str | Callable[..., Any],
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: int = 3600,
    ) -> list[ReplicaHandle]:
        """Write a new run and start its replicas; see `ServerlessExecutor.launch_replicas`."""

    @abstractmethod
    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        """Return the replica's `ReplicaStatus` without waiting; see `ServerlessExecutor.poll`."""

    @abstractmethod
    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        """Return the last lines of the replica's output without waiting; see `ServerlessExecutor.stream_logs`."""

    @abstractmethod
    def cancel(self, handle: ReplicaHandle) -> None:
        """End a replica and its child processes; see `ServerlessExecutor.cancel`."""

    @abstractmethod
    def collect(self, handles: list[ReplicaHandle], *, timeout: float | None = None) -> list[dict[str, Any]]:
        """Wait until all replicas have ended, and return their outcomes as dictionaries; see
        `ServerlessExecutor.collect`.
        """

    # --- replicas that were started

    @abstractmethod
    def observe(self, replicas: Sequence[PendingReplica]) -> list[Observation]:
        """Return the backend's observations of several replicas, in their order.

        The first process that finds that a replica has gone records its outcome. The caller has just read the store. So
        the backend reads the store only for replicas that have gone.

        Args:
            replicas: the replicas that have left no outcome.

        Raises:
            UnknownHandleError: a handle belongs to another backend.
            BackendError: the backend refuses the credentials.

        Example:
            [observation] = backend.observe([PendingReplica(handle, attempt=0)])
        """

    @abstractmethod
    def supervisors(self, replicas: Sequence[PendingReplica]) -> list[SupervisorStatus]:
        """Return the state of the supervisors of replicas that have ended, in the order of the replicas.

        A supervisor counts as alive if the backend cannot find out its state at the moment.

        Args:
            replicas: the replicas that have ended.

        Raises:
            CorruptObjectError: a handle belongs to another backend.
            UnknownHandleError: a handle names another replica's job.
            BackendError: the backend refuses the credentials.

        Example:
            [supervisor] = backend.supervisors([PendingReplica(handle, attempt=0)])
        """

    @abstractmethod
    def open_log(self, handle: ReplicaHandle) -> Log:
        """Return the log of exactly the attempt that a handle names.

        Args:
            handle: the handle of the attempt.

        Example:
            backend.open_log(handle).tail(200)
        """

    def find_handle(self, handle: ReplicaHandle, *, insists: bool = False) -> ReplicaHandle | None:
        """Find a replica whose launcher wrote an intent, and died before it wrote the handle.

        Args:
            handle: a handle that has nothing but `store_url`, `run_id` and `attempt`.
            insists: True if the caller acts upon the answer: None then proves that there is no such replica. False, the
                default: None may also mean that the backend does not know now, or was asked a moment ago.

        Raises:
            BackendError: the backend refuses the credentials, or `insists` is True and the backend does not know.

        Example:
            backend.find_handle(attempt.bare_handle("modal"), insists=True)
        """
        return None

    # --- ending and removing

    def end_jobs(self, run: JobsOfRun, on_progress: Callable[[str], None] = lambda words: None) -> EndedJobs:
        """End the jobs of a run: jobs that this process started, jobs in this machine's notes, and jobs that the
        service lists.

        Starts of this run that this process has begun are given up as well. The store is not asked.

        Args:
            run: the run, and which of its jobs.
            on_progress: gets a sentence if the service takes longer than a minute: what still runs, and how to end it.

        Returns:
            The number of ended jobs, and the jobs that may still run, with the commands that end them.

        Example:
            backend.end_jobs(JobsOfRun("brave-otter-7f3a")).what_is_left
        """
        return EndedJobs()

    def commands_to_end(self, run_id: str) -> str:
        """Return the service's own commands that list and end the jobs of a run. Empty if there is no service.

        Example:
            backend.commands_to_end("brave-otter-7f3a")  # "hf jobs ls --label replicas-run=brave-otter-7f3a; …"
        """
        return ""

    def jobs_left(self, run: JobsOfRun) -> JobsLeft:
        """Return the jobs of a run that have not ended. This ends nothing, and does not ask the store.

        Args:
            run: the run. Its `ranks` and `over` are ignored: all jobs are listed.

        Raises:
            BackendError: the service refuses, or does not answer.

        Example:
            backend.jobs_left(JobsOfRun("brave-otter-7f3a")).n
        """
        return JobsLeft(0, self.backend_name, "")

    def remove_files(self, store_url: str, run_id: str, launched_at: float) -> None:
        """Delete files of an ended run that are neither in its store nor in the directory of runs.

        Args:
            store_url: the store of the run.
            run_id: the id of the run.
            launched_at: Unix time of its launch.

        Example:
            backend.remove_files(run.store.url, run.run_id, run.record.created_at)
        """
        return

    def withdraw_jobs(self, store_url: str, run_id: str, launched_at: float) -> int:
        """Delete the jobs of an ended run that wait in a queue and could start again. Return their number.

        Args:
            store_url: the store of the run.
            run_id: the id of the run.
            launched_at: Unix time of its launch.

        Raises:
            BackendError: the service refuses, or does not answer.

        Example:
            backend.withdraw_jobs(run.store.url, run.run_id, run.record.created_at)
        """
        return 0


# More than 20 methods: it implements the whole interface of a Backend for an executor with five methods.
class PlainBackend(Backend):
    """The backend of an executor that has only the five methods of the protocol.

    Its replicas call our worker, which finds the run by its address. The executor may also have other members of a
    Backend, such as `options_to_keep` or `price_per_hour`. These are used if they exist.

    Args:
        executor: the executor, which need not import anything of this package.
        store: the store of the run. At a bucket, several replicas are asked about at once. None: one after another.
    """

    knows_attempts = False
    starts_single_ranks = False
    carries_environment = False
    has_launch_check = False
    needs_shared_rendezvous = None
    ends_with_launcher = False
    is_cancelled_at_exit = True
    ships_code = False
    default_timeout_s = PLAIN_TIMEOUT_S
    backend_name = ""
    supports_inter_replica_network = False

    def __init__(self, executor: ServerlessExecutor, store: Store | None = None) -> None:
        self.executor: Any = executor
        self._store = store
        self.backend_name = executor.backend_name
        self.supports_inter_replica_network = executor.supports_inter_replica_network
        if self._has("recordable_options", "options_to_keep"):
            self.recordable_options = self.executor.recordable_options  # type: ignore[misc, attr-defined]

    def __repr__(self) -> str:
        return f"PlainBackend({self.executor!r})"

    def _has(self, *names: str) -> bool:
        return all(hasattr(self.executor, name) for name in names)

    @property
    def options_to_keep(self) -> Mapping[str, Any]:
        """The executor's options, if it keeps options."""
        found: Mapping[str, Any] = {}
        return self.executor.options_to_keep if self._has("recordable_options", "options_to_keep") else found

    @property
    def pip(self) -> Sequence[str]:
        """The executor's requirements, if it has some."""
        found: Sequence[str] = ()
        return self.executor.pip if self._has("pip") else found

    @property
    def python_of_replicas(self) -> str | None:
        """The version that the executor names, if it names one."""
        return self.executor.python_of_replicas if self._has("python_of_replicas") else None

    @property
    def ends_jobs(self) -> bool:
        """True if the executor has `end_jobs` and `commands_to_end`."""
        return self._has("end_jobs", "commands_to_end")

    def price_per_hour(self, gpu: str | None) -> float | None:
        """Return the executor's price. None if the executor has no method for prices."""
        return self.executor.price_per_hour(gpu) if self._has("price_per_hour") else None

    def reports_preemption(self, gpu: str | None) -> bool:
        """Return the executor's `reports_preemption`. False if the executor has no such method."""
        return self._has("reports_preemption") and bool(self.executor.reports_preemption(gpu))

    def installation_note(self, requirements: Sequence[str]) -> str:
        """Return the executor's `installation_note`. Empty if the executor has no such method."""
        return str(self.executor.installation_note(requirements)) if self._has("installation_note") else ""

    def check_launch(self, request: LaunchRequest) -> None:
        """Check the entrypoint without running it. The executor itself checks nothing."""
        if isinstance(request.entrypoint, str):
            check_entrypoint(request.entrypoint, split_rank_env(request.args or {})[0])

    def describe_start(self, start: StartSpec, requirements: Sequence[str] = ()) -> dict[str, Any]:
        """Return the arguments of the executor's `launch_replicas`."""
        return {
            "n_replicas": len(start.ranks),
            "entrypoint": PLAIN_ENTRYPOINT,
            "entrypoint_args": {"run": address_of(start.spec.store_url, start.spec.run_id)},
            "gpu": start.gpu,
            "timeout": PLAIN_TIMEOUT_S if start.timeout_s is None else int(max(1, start.timeout_s)),
        }

    def start_ranks(self, start: StartSpec, on_progress: Callable[[str], None] = no_progress) -> list[ReplicaHandle]:
        """Start all replicas of a run, and write their handles into its store.

        The executor returns handles in rank order. Only handles of the type `ReplicaHandle` are written.
        """
        handles: list[Any] = self.executor.launch_replicas(**self.describe_start(start))
        try:
            store = store_at(start.spec.store_url)
            for rank, handle in zip(start.ranks, handles, strict=False):
                if isinstance(handle, ReplicaHandle):
                    Attempt(store, start.spec.run_id, rank).create(HANDLE, handle.to_json().encode(), replaces=True)
        except BaseException:  # no other process knows these replicas, and each costs money until its time limit
            for handle in handles:
                with contextlib.suppress(Exception):
                    self.executor.cancel(handle)
            raise
        return handles

    def launch_replicas(self, *asked: Any, **more: Any) -> list[ReplicaHandle]:
        """Let the executor start replicas outside of any run."""
        started: list[ReplicaHandle] = self.executor.launch_replicas(*asked, **more)
        return started

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        """Return what the executor reports. A word that is not a `ReplicaStatus` counts as running."""
        return as_status(self.executor.poll(handle))

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        """Return the last lines of the replica's output, as the executor has them."""
        return str(self.executor.stream_logs(handle, n_lines=n_lines))

    def cancel(self, handle: ReplicaHandle) -> None:
        """Let the executor end a replica."""
        self.executor.cancel(handle)

    def collect(self, handles: list[ReplicaHandle], *, timeout: float | None = None) -> list[dict[str, Any]]:
        """Return how replicas ended, as the executor reports it."""
        rows: list[dict[str, Any]] = self.executor.collect(handles, timeout=timeout)
        return rows

    def observe(self, replicas: Sequence[PendingReplica]) -> list[Observation]:
        """Return what `poll` reports of each replica. The caller records missing outcomes."""

        def ask(replica: PendingReplica) -> Observation:
            return Observation(status=as_status(self.executor.poll(replica.handle)))

        return [*map(ask, replicas)] if self._store is None else at_store(self._store, ask, replicas)

    def supervisors(self, replicas: Sequence[PendingReplica]) -> list[SupervisorStatus]:
        """Return a living supervisor for each replica. The protocol cannot report supervisors, and no process restarts
        these replicas.
        """
        return [SupervisorStatus(is_alive=True)] * len(replicas)

    def open_log(self, handle: ReplicaHandle) -> Log:
        """Return the log of the replica, with all its attempts. It reads the last lines from the executor."""
        return TailedLog(lambda n_lines: self.stream_logs(handle, n_lines=n_lines))

    def end_jobs(self, run: JobsOfRun, on_progress: Callable[[str], None] = lambda words: None) -> EndedJobs:
        """End the jobs of a run, if the executor can."""
        return self.executor.end_jobs(run, on_progress) if self.ends_jobs else EndedJobs()

    def commands_to_end(self, run_id: str) -> str:
        """Return the commands that end the jobs of a run, if the executor has any."""
        return str(self.executor.commands_to_end(run_id)) if self.ends_jobs else ""

    def jobs_left(self, run: JobsOfRun) -> JobsLeft:
        """Return the jobs that have not ended. Empty if the executor cannot list them."""
        found: JobsLeft = self.executor.jobs_left(run) if self._has("jobs_left") else super().jobs_left(run)
        return found

    def remove_files(self, store_url: str, run_id: str, launched_at: float) -> None:
        """Delete what an ended run left at the executor, if the executor can."""
        if self._has("remove_files"):
            self.executor.remove_files(store_url, run_id, launched_at)

    def withdraw_jobs(self, store_url: str, run_id: str, launched_at: float) -> int:
        """Delete the jobs that wait in a queue, if the executor can. Return their number."""
        return int(self.executor.withdraw_jobs(store_url, run_id, launched_at)) if self._has("withdraw_jobs") else 0


def as_backend(executor: ServerlessExecutor, store: Store | None = None) -> Backend:
    """Return the backend of an executor. It is the executor itself, or a `PlainBackend` around it.

    Args:
        executor: an executor that a user gives.
        store: the store of the run. None: not known yet.

    Example:
        as_backend(PopenExecutor()).starts_single_ranks  # False
    """
    return executor if isinstance(executor, Backend) else PlainBackend(executor, store)


def as_executor(backend: Backend) -> ServerlessExecutor:
    """Return the executor of a backend, as the user gave it.

    Args:
        backend: a backend that `as_backend` returned.

    Example:
        as_executor(as_backend(executor)) is executor  # True
    """
    if isinstance(backend, PlainBackend):
        plain: ServerlessExecutor = backend.executor
        return plain
    return backend


def affordable_s(backend: Backend, n: int, gpu: str | None, max_cost: float) -> float:
    """Return the time limit in seconds at which `n` replicas have cost `max_cost`.

    Args:
        backend: the backend of all replicas.
        n: the number of replicas.
        gpu: the GPU of each. None: no GPU.
        max_cost: US dollars that all replicas may cost together.

    Raises:
        BackendError: the backend does not publish prices.

    Example:
        affordable_s(backend, 8, "H100", 20.0)
    """
    price = backend.price_per_hour(gpu)
    if not price:
        raise BackendError(
            f"Backend {backend.backend_name!r} has no price for these replicas, so max_cost={max_cost:g} (--max-cost) "
            "cannot be enforced. Use timeout (--timeout) instead."
        )
    return max_cost / (price * n) * 3600
