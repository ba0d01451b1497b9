"""The methods that the executors of this package add to the five verbs, and the types of their arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from executors.protocol import Outcome, Reason, ReplicaHandle, ServerlessExecutor
from executors.settings.run_spec import RunSpec

PAGE = re.compile(r"https?://[!-~]{1,500}")

Recordable = Mapping[str, type | re.Pattern[str]]
"""The options of a backend that readers take from a record, each with its type, or the pattern of its string.

They name the place and the size of replicas. No option here decides which code runs, or which secrets it gets.
"""


@dataclass(frozen=True)
class Package:
    """The code of the user and of this package for a replica on another machine, and the packages to install."""

    archive: bytes = field(repr=False)
    """A tar.gz with the folders `workspace` and `packages`."""
    sha256: str
    """The digest of the archive, in hexadecimal."""
    n_files: int
    """How many of them are the user's."""
    size_bytes: int
    """The size of the user's files together, unpacked."""
    commit: str | None = None
    """The commit that is checked out. None outside a git repository."""
    dirty: bool | None = None
    """Whether the files differ from that commit."""
    files: tuple[str, ...] = field(default=(), repr=False)
    """The user's files, by their paths in the workspace."""
    left_out: tuple[str, ...] = ()
    """The files that git would take and the archive lacks, each with the reason in brackets."""
    requirements: tuple[str, ...] = ()
    """What to install."""
    pins: tuple[str, ...] = ()
    """Those of them that are ours: an image that has a later version keeps it."""
    paths: tuple[str, ...] = ()
    """Folders of the workspace from which the launcher imports, such as `src`: its `sys.path`, made relative."""

    @property
    def about(self) -> dict[str, Any]:
        """The description of the code in `run.json`."""
        return {name: getattr(self, name) for name in ("sha256", "size_bytes", "n_files", "commit", "dirty")}


@runtime_checkable
class KeepsOptions(Protocol):
    """An executor that is made again with the same options when its run is followed or resumed later."""

    recordable_options: Recordable

    @property
    def options_to_keep(self) -> Mapping[str, Any]:
        """The options with which the executor was made: what this machine notes of a launch, as far as it is JSON."""


@runtime_checkable
class InstallsRequirements(Protocol):
    """An executor with an option for the packages that its replicas need."""

    @property
    def pip(self) -> Sequence[str]:
        """The packages that the user named, as a task has them. Empty: the files of the workspace name them."""


@runtime_checkable
class KnowsPrices(Protocol):
    """An executor that can say what its machines cost."""

    def price_per_hour(self, gpu: str | None) -> float | None:
        """Return the price of an hour of one replica in US dollars. None if its service does not publish it."""


@runtime_checkable
class TellsPreemption(Protocol):
    """An executor whose service tells when it has taken back the machine of a replica."""

    def tells_preemption(self, gpu: str | None) -> bool:
        """Return whether replicas with such a GPU may lose their machine, and their service then reports that.

        Example:
            executor.tells_preemption("H100")
        """


@runtime_checkable
class KnowsInstallation(Protocol):
    """An executor that can say what its containers install before they run anything."""

    def installation_note(self, requirements: Sequence[str]) -> str:
        """Return a sentence on a long installation in each container, and on what avoids it; empty if there is none.

        Args:
            requirements: the packages that replicas need.

        Example:
            executor.installation_note(["torch==2.13.0"])
        """


@runtime_checkable
class KnowsPython(Protocol):
    """An executor that can say which Python its replicas will run."""

    @property
    def python_of_replicas(self) -> str | None:
        """The minor version, as in "3.12". None: it shows when they run."""


@runtime_checkable
class LeavesFiles(Protocol):
    """An executor whose replicas may leave files elsewhere than in the store and in the directory of runs."""

    def remove_files(self, store_url: str, run_id: str, launched_at: float) -> None:
        """Delete the files that a run left there after its end. It is not an error if there are none.

        Args:
            store_url: the store of the run.
            run_id: the id of the run.
            launched_at: Unix time of its launch.
        """


@runtime_checkable
class MayBeQueued(Protocol):
    """An executor whose jobs a queue may take back, and start again after their run has ended."""

    def withdraw_jobs(self, store_url: str, run_id: str, launched_at: float) -> int:
        """Delete the jobs of a run that has ended and that a queue still holds; return how many.

        Args:
            store_url: the store of the run.
            run_id: the id of the run.
            launched_at: Unix time of its launch.

        Raises:
            BackendError: the service refuses, or does not answer.
        """


@dataclass(frozen=True)
class Unfinished:
    """A replica that a backend is asked about, as the records of its run show it."""

    handle: ReplicaHandle
    """The newest that it has."""
    attempt: int
    """Its newest attempt: the handle's, or a later one that was claimed since."""


@dataclass(frozen=True)
class Observation:
    """The state of a replica that has left no outcome, as its backend reports it."""

    outcome: Outcome | None = None
    """How it ended: its process or job was found gone, and this is on record now."""
    doing: str = ""
    """In a few words for people, what it does or waits for before its entrypoint runs, as in "installing"."""


@dataclass(frozen=True)
class Parent:
    """The process or job that supervises a replica and restarts it in place."""

    is_alive: bool
    reason: Reason | None = None
    """How the job ended, where its service knows more than its exit code, as in "preempted"."""
    error: str | None = None
    """The same as a sentence."""
    launcher_is_gone: bool = False
    """True if the run is attached, and the process that it ends with is known to have ended."""


@dataclass(frozen=True)
class JobsOfRun:
    """The jobs of one run that must be ended, with all that the caller knows of the run. No store is needed."""

    run_id: str
    store_url: str | None = None
    """The run's store. None: not known, so the run's id alone finds its jobs."""
    launched_at: float | None = None
    """Unix time of the launch, which is part of the jobs' labels. None: not known."""
    ranks: tuple[int, ...] | None = None
    """Only the jobs of these ranks. None: all jobs of the run, with its spares."""
    over: frozenset[int] = frozenset()
    """Ranks of which the caller knows that they have ended: their jobs are asked for only if the service lists them."""


@dataclass(frozen=True)
class EndedJobs:
    """The result of a request to end jobs of a service."""

    n_ended: int = 0
    """How many jobs the service has accepted to end."""
    attempts: frozenset[tuple[int, int]] = frozenset()
    """Rank and attempt of each known job that the service was asked to end, whether or not it accepted that."""
    problems: tuple[str, ...] = ()
    """A sentence for each job, or list of jobs, that failed. Empty: nothing of what was asked for runs any more."""
    commands: str = ""
    """The service's own commands that end what is left."""

    @property
    def is_complete(self) -> bool:
        """Whether the service has accepted to end every job that was asked for."""
        return not self.problems

    @property
    def what_is_left(self) -> str:
        """Say what may still run and how to end it; empty if nothing does."""
        if not self.problems:
            return ""
        return f"What could not be ended may still run: {'; '.join(self.problems)}. End it yourself: {self.commands}"

    def __add__(self, other: EndedJobs) -> EndedJobs:
        """Join the answers of two services."""
        commands = "   ".join(filter(None, dict.fromkeys([self.commands, other.commands])))
        return EndedJobs(
            self.n_ended + other.n_ended, self.attempts | other.attempts, (*self.problems, *other.problems), commands
        )


@runtime_checkable
class EndsJobs(Protocol):
    """An executor whose replicas are jobs of a service that it can end without asking the run's store."""

    def end_jobs(self, run: JobsOfRun, tell: Callable[[str], None] = lambda words: None) -> EndedJobs:
        """End the jobs of a run that this process started, that this machine noted, and that the service lists.

        Starts of this run that are under way in this process are given up as well. The store is not asked.

        Args:
            run: the run, and which of its jobs.
            tell: gets a sentence if the service takes longer than a minute: what still runs, and how to end it.

        Returns: what was ended, and what may still run with the commands that end it.

        Example:
            executor.end_jobs(JobsOfRun("brave-otter-7f3a")).what_is_left
        """

    def commands_to_end(self, run_id: str) -> str:
        """Return the service's own commands that list and end the jobs of a run.

        Example:
            executor.commands_to_end("brave-otter-7f3a")  # "hf jobs ls --label replicas-run=brave-otter-7f3a; …"
        """


@dataclass(frozen=True)
class JobsLeft:
    """The jobs of a run that have not ended, as their service lists them."""

    n: int
    """How many there are."""
    service: str
    """The service's name, for users."""
    commands: str
    """The service's own commands that end them."""


@runtime_checkable
class ListsJobs(Protocol):
    """An executor that can ask its service which jobs of a run have not ended, without asking the run's store."""

    def jobs_left(self, run: JobsOfRun) -> JobsLeft:
        """Return the jobs of a run that have not ended; nothing is ended.

        Args:
            run: the run. Its `ranks` and `over` do not count: all jobs are listed.

        Raises:
            BackendError: the service refuses, or does not answer.

        Example:
            executor.jobs_left(JobsOfRun("brave-otter-7f3a")).n
        """


@runtime_checkable
class NativeExecutor(ServerlessExecutor, KeepsOptions, Protocol):
    """The methods that the executors of this package add to the five verbs.

    `launch`, `resume` and `Run` use it where an executor has all of it. One that has the five verbs alone (a
    third-party executor) is given a task that finds the run by its address, and starts all ranks or none.
    """

    needs_shared_rendezvous: bool
    """Whether its replicas see no directory of this machine."""
    ends_with_launcher: bool
    """Whether a run that is not detached ends with the process that launched it, however that ends."""
    ships_code: bool
    """Whether its replicas get a package of the code; else they run what lies in the folder that they start in."""
    lease_s: float | None
    """How long the replicas of an attached run continue while no process renews its lease. None: they need none."""
    default_timeout_s: float | None
    """The time limit of a launch that names none, in seconds. None: no limit."""

    def warm_up(self) -> None:
        """Begin what takes long and costs nothing, without waiting for it: a launch comes soon."""

    def check_launch(
        self,
        n_replicas: int,
        entrypoint: str | Callable[..., Any],
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: float | None = None,
        secrets: Sequence[str] = (),
    ) -> None:
        """Refuse a launch that cannot work, before anything is written, started or paid for.

        Args:
            n_replicas: how many, at least 1.
            entrypoint: as `launch_replicas` takes it.
            entrypoint_args: keyword arguments of the entrypoint.
            gpu: a GPU per replica, as `"H100"` or `"H100:2"`. None: no GPU.
            timeout: seconds each replica may run. None: no limit.
            secrets: the names of secrets for the replicas.

        Raises:
            ValueError: a bad argument.
            BackendError: the backend cannot be used.
            EntrypointError: the entrypoint cannot be found, or called with these arguments.
        """

    def package(self, entrypoint: str | Callable[..., Any]) -> Package | None:
        """Return the code of this machine that replicas need, or None if no code is shipped.

        Args:
            entrypoint: as `launch_replicas` takes it.
        """

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: str | Callable[..., Any],
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: float | None = None,
        run: RunSpec | None = None,
        tell: Callable[[str], None] = lambda words: None,
    ) -> list[ReplicaHandle]:
        """Start replicas as `ServerlessExecutor.launch_replicas` does.

        Args:
            n_replicas: how many, at least 1.
            entrypoint: a callable, or a text that names one, as in `ServerlessExecutor.launch_replicas`.
            entrypoint_args: keyword arguments of the entrypoint.
            gpu: a GPU per replica, as `"H100"` or `"H100:2"`. None: no GPU.
            timeout: seconds each replica may run. None: no limit.
            run: the run these replicas belong to, and which of its ranks they are. The run is written already. None: a
                new run.
            tell: gets a few words on the progress, if the start takes long.

        Returns: the handles. Attempts that another process began first are left out, and left alone.
        """

    def describe_launch(
        self, run: RunSpec, *, gpu: str | None = None, timeout: float | None = None, requirements: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Return the request of `launch_replicas` as JSON, with values of secrets and of the environment masked.

        Args:
            run: the run, and the ranks to start.
            gpu: a GPU per replica, as `"H100"` or `"H100:2"`. None: no GPU.
            timeout: seconds each replica may run. None: no limit.
            requirements: the packages that replicas install.
        """

    def observe(self, replicas: Sequence[Unfinished]) -> list[Observation]:
        """Look at several replicas at once, in their order. The first caller that finds one gone records its outcome.

        The caller has read the store. So this method reads only the records of a replica that is gone.

        Args:
            replicas: replicas that have left no outcome, as far as the caller knows.

        Raises:
            CorruptObjectError: a handle is not one of this backend.
            BackendError: the backend refuses the credentials.
        """

    def parents(self, replicas: Sequence[Unfinished]) -> list[Parent]:
        """Return for replicas that ended whether their supervisors still live, in their order.

        A supervisor counts as alive if its state is not known, or not known now.

        Args:
            replicas: replicas that ended.

        Raises:
            CorruptObjectError: a handle is not one of this backend.
            UnknownHandleError: a handle names the job or process of another replica.
            BackendError: the backend refuses the credentials.
        """

    def open_log(self, handle: ReplicaHandle) -> Log:
        """Return the log of the attempt that a handle names, and of no later one.

        Args:
            handle: the handle of the attempt.
        """

    def find_handle(self, handle: ReplicaHandle, *, insists: bool = False) -> ReplicaHandle | None:
        """Find a replica whose launcher announced it, and died before it wrote the whole handle.

        Args:
            handle: one that has nothing but `store_url`, `run_id` and `attempt`.
            insists: whether the caller acts upon it: None then means that there is none. A caller that only looks gets
                None as well where that cannot be found out now, or is not asked again so soon.

        Raises:
            BackendError: the backend refuses the credentials, or the caller insists, and it cannot be found out.
        """


@runtime_checkable
class KnowsTimes(Protocol):
    """A log that knows when its lines came."""

    def between(self, since: float | None, until: float | None) -> Iterator[list[str]]:
        """Yield the lines of a span of Unix time, to the second, in parts of bounded size.

        Raises:
            ValueError: the times of the lines of this log were not kept.
        """


class Log(Protocol):
    """The output of one attempt of one rank, as it can be read from here. For one reader; any thread may close it."""

    @property
    def note(self) -> str:
        """Where it is read and how old that is, if it is not what the replica writes to; else empty."""

    @property
    def may_lag(self) -> bool:
        """Whether lines come late, so that the last may be missing when the replica has ended."""

    @property
    def cut(self) -> str:
        """Why what `tail`, `pieces` or `between` gave is not all that was asked for, for people; empty if it is."""

    @property
    def pause_s(self) -> float:
        """The least time between two reads."""

    def tail(self, n_lines: int) -> str:
        """Return the last lines so far."""

    def pieces(self) -> Iterator[bytes]:
        """Yield all available output, as it was written, from the beginning or from the place that `cut` names."""

    def lines(self, n_first: int, *, has_ended: bool = False) -> Iterator[list[str]]:
        """Yield whole lines in parts of bounded size: the last `n_first` in the first call, then what is new.

        Args:
            has_ended: the replica writes no more; the very last line may come without a newline.
        """

    def close(self) -> None:
        """Close connections, at once."""


def restarts_replicas(executor: ServerlessExecutor) -> bool:
    """Whether single replicas of an executor can be started again, and watched by a supervisor."""
    return isinstance(executor, NativeExecutor) and executor.backend_name != "inline"


def page_of_job(handle: Any) -> str | None:
    """Return the page of a replica's job at its service, as its handle names it."""
    job = handle.metadata.get("job") if isinstance(handle, ReplicaHandle) else None
    page = job.get("url") if isinstance(job, dict) else None
    return page if isinstance(page, str) and PAGE.fullmatch(page) else None


def name_of_job(handle: Any) -> str | None:
    """Return what finds a replica's job at its service: its page, else its id, which is foreign text."""
    job = handle.metadata.get("job") if isinstance(handle, ReplicaHandle) else None
    parts = [str(job[name]) for name in ("id", "task") if name in job] if isinstance(job, dict) else []
    return page_of_job(handle) or (f"job {'_'.join(parts)}" if parts else None)
