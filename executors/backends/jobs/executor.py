"""JobExecutor: an executor over any service that runs jobs. Each replica is one job.

The store knows the state of a replica from its outcome or its claim. If a replica has no outcome, the service is asked
whether its job still runs. The first process that finds that the job has ended records an outcome.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

from executors.attempt import Attempt, Intent, collect_rows
from executors.backend import (
    Backend,
    EndedJobs,
    JobsLeft,
    JobsOfRun,
    Observation,
    PendingReplica,
    Recordable,
    SupervisorStatus,
    no_progress,
)
from executors.backends.jobs.ending import end_jobs
from executors.backends.jobs.gang_start import GangStart
from executors.backends.jobs.job_logs import RetryingLog
from executors.backends.jobs.job_outcomes import LOG_LINES, JobOutcomeRecorder, JobReplica, is_stale
from executors.backends.jobs.job_state_poller import MAX_THREADS, JobStatePoller
from executors.backends.jobs.max_cost import limits_left
from executors.backends.jobs.sdk import call_each
from executors.backends.jobs.service import (
    EACH_INSTALLS,
    INSTALLS_ONCE,
    RUN_LABEL,
    STORE_LABEL,
    WITH_TORCH,
    ForeignJobError,
    JobId,
    JobKey,
    JobService,
    JobServiceError,
    JobSpec,
    retrying,
)
from executors.errors import StoreError
from executors.logs.log import Log
from executors.logs.readers import TailedLog
from executors.protocol import ReplicaHandle, ReplicaStatus
from executors.registry import describe_executor
from executors.registry.run_index import as_noted
from executors.replica import RANK, RENDEZVOUS, SERVICE, TIMEOUT_S
from executors.run.job_notes import NotedJob, note_jobs, noted_jobs
from executors.run.new_run import write_new_run
from executors.run.spares import spares_of
from executors.settings.procs import known_procs
from executors.settings.run_spec import LEASE_S, RunSpec, StartSpec
from executors.store import store_at
from executors.store.parallel import answered_within, in_threads
from executors.store.record_names import HANDLE, INTENT
from executors.store.staleness import StalenessTracker
from executors.store.url import real_url, remote_access
from executors.task.arguments import split_rank_env
from executors.task.code_package import Package
from executors.task.entrypoint import check_entrypoint
from executors.task.launch_request import LaunchRequest
from executors.task.record import find_run_record
from executors.task.stored import read_task

DEFAULT_TIMEOUT_S = 3600
MARGIN_S = 120  # is added to the service's limit, so that the code can be fetched and the replica can end by itself
HEAD_START_S = 5.0  # how long the store may take to write a cancel marker before the service ends the job
STORE_S = 20.0  # how long the store may take to write the marker after that
INSTALL_S = 900  # added to the service's limit for packages, because the time limit counts from the entrypoint's start

TORCH = re.compile(r"torch(?![A-Za-z0-9._-])")  # a requirement of torch itself, as "torch==2.13.0"

P = ParamSpec("P")
S = TypeVar("S", bound=JobService)


def options_of(
    service_class: Callable[P, S],
) -> Callable[[Callable[[Any, S], None]], Callable[Concatenate[Any, P], None]]:
    """Return a decorator for the constructor of an executor. The constructor then takes the options of its service.

    Args:
        service_class: the service. Its fields are the options, which are passed by name.

    Example:
        @options_of(MyJobs)
        def __init__(self, service: MyJobs) -> None:
            super().__init__(service)
    """

    def with_options(constructor: Callable[[Any, S], None]) -> Callable[Concatenate[Any, P], None]:
        def with_service(self: Any, /, *args: P.args, **options: P.kwargs) -> None:
            constructor(self, service_class(*args, **options))

        options = inspect.signature(service_class, eval_str=True)
        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        with_service.__signature__ = options.replace(  # type: ignore[attr-defined]
            parameters=[itself, *options.parameters.values()]
        )
        return with_service

    return with_options


# More than 20 methods: it implements the whole interface of a Backend.
class JobExecutor(Backend):
    """An executor over a JobService. A subclass adds a name and a constructor.

    Args:
        service: the service that runs the jobs.

    Raises:
        TypeError: the service can read no logs.

    Example:
        class MyExecutor(JobExecutor):
            backend_name = "my"
    """

    backend_name: str
    recordable_options: ClassVar[Recordable]
    supports_inter_replica_network: bool = False
    needs_shared_rendezvous: bool = True
    ends_with_launcher: bool = True
    ends_jobs: bool = True
    ships_code: bool = True
    lease_s: float | None = LEASE_S
    default_timeout_s: float | None = DEFAULT_TIMEOUT_S

    def __init__(self, service: JobService) -> None:
        if type(service).logs is JobService.logs and type(service).open_log is JobService.open_log:
            raise TypeError(f"{type(service).__name__} can read no logs. Define logs() or open_log().")
        self.service = service
        self._states = JobStatePoller(service)
        self._recorder = JobOutcomeRecorder(service, self._states)
        self._intents = StalenessTracker()
        self._starting: set[str] = set()
        """The places of the attempts that this process is starting now. It need not search for their jobs."""
        self._known_jobs: dict[JobKey, JobId] = {}
        """The jobs that this process has started or found. It can end them without the store."""
        self._gangs: set[GangStart] = set()
        """The starts that continue in this process."""
        self._explained: set[str] = set()
        """The attempts for which the service was asked why it ended them."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.service!r})"

    @property
    def options_to_keep(self) -> dict[str, Any]:
        """The service's options."""
        return self.service.options

    @property
    def python_of_replicas(self) -> str | None:
        """The options of the service."""
        return self.service.python_of_replicas

    @property
    def pip(self) -> Sequence[str]:
        """The requirements that the user gave; see `Backend.pip`."""
        from executors.shipping.requirements import given_requirements  # not at the top: most processes pack no code

        return given_requirements(self.service.pip)

    def check_launch(self, request: LaunchRequest) -> None:
        """Refuse a launch that cannot work; see `Backend.check_launch`. No code of the user is run."""
        settings, timeout_s = request.settings, self._timeout_s(request.settings.timeout)
        if timeout_s is not None and not timeout_s > 0:
            raise ValueError(f"timeout must be more than 0 seconds, got timeout={settings.timeout}.")
        if isinstance(request.entrypoint, str):
            check_entrypoint(request.entrypoint, split_rank_env(request.args or {})[0])
        self.service.check_account(settings.gpu, timeout_s, settings.secrets)

    def _timeout_s(self, timeout: float | None) -> float | None:
        return self.default_timeout_s if timeout is None else timeout

    def price_per_hour(self, gpu: str | None) -> float | None:
        """Return the price of one replica in US dollars an hour; see `Backend.price_per_hour`."""
        return self.service.price_per_hour(gpu)

    def reports_preemption(self, gpu: str | None) -> bool:
        """Return True if the service reports that it took a machine back; see `Backend.reports_preemption`."""
        return self.service.reports_preemption(gpu)

    def installation_note(self, requirements: Sequence[str]) -> str:
        """Return a sentence if each container installs torch first; see `Backend`."""
        needs_torch = any(TORCH.match(each) for each in requirements)
        if not needs_torch or self.service.keeps_installed or not self.service.image_lacks_torch:
            return ""
        return f"{self.service.name}: {EACH_INSTALLS}. {WITH_TORCH}"

    def check_image(self) -> tuple[str, str] | None:
        """Return a text on the packages that containers install first, and an advice. None: this is not known."""
        if self.service.keeps_installed:
            return INSTALLS_ONCE, ""
        return (EACH_INSTALLS, WITH_TORCH) if self.service.image_lacks_torch else None

    def package(self, entrypoint: str | Callable[..., Any]) -> Package:
        """Return the package that replicas need: the code in the working directory, and the requirements."""
        from executors.shipping.package import make_package  # not at the top: most processes pack no code

        return make_package(entrypoint, pip=self.service.pip)

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: str | Callable[..., Any],
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: int | None = None,
    ) -> list[ReplicaHandle]:
        """Write a new run and start its replicas; see `ServerlessExecutor.launch_replicas`.

        A `timeout` of None is the service's default, `default_timeout_s`.
        """
        request = LaunchRequest.of(entrypoint, n=n_replicas, args=entrypoint_args, gpu=gpu, timeout=timeout)
        return self.start_ranks(write_new_run(self, request))

    def start_ranks(self, start: StartSpec, on_progress: Callable[[str], None] = no_progress) -> list[ReplicaHandle]:
        """Start all replicas at the same time; see `Backend.start_ranks`.

        With `min_replicas`, the handles of replicas that may still join are left out.
        """
        run = start.spec
        task = read_task(store_at(run.store_url), run.run_id, run.task_digest, run.task_folder)
        launched = task.record.launched_with
        price = None if launched is None or launched.settings.max_cost is None else self.price_per_hour(start.gpu)
        together = self.service.starts_together
        limits = limits_left(run, launched, self._timeout_s(start.timeout_s), price, together=together)
        jobs = self._jobs(run, start.gpu, limits, task.record.requirements, task.record.pins)

        def handle_of(attempt: Attempt, job_id: JobId) -> ReplicaHandle:
            made = self._handle(attempt, job_id, timeout_s=limits[attempt.rank], launched_at=run.launched_at)
            return made if price is None else replace(made, metadata={**made.metadata, "usd_per_hour": price})

        self._class_path  # noqa: B018 - computed now, because it takes a while and no job costs money yet
        gang = GangStart(
            self.service,
            self.backend_name,
            run,
            jobs,
            handle_of=handle_of,
            started=self._keep_jobs,
            starting=self._starting,
            on_progress=on_progress,
        )
        self._gangs.add(gang)
        try:
            return gang.run()
        finally:
            self._gangs.discard(gang)

    def describe_start(self, start: StartSpec, requirements: Sequence[str] = ()) -> dict[str, Any]:
        """Return the requests that `start_ranks` would make, one for each job, with secret values masked."""
        parts = [start, spares_of(start)] if start.spec.settings.spares else [start]
        timeout_s = self._timeout_s(start.timeout_s)
        jobs = [
            job
            for part in parts
            for _, job in self._jobs(part.spec, part.gpu, dict.fromkeys(part.ranks, timeout_s), requirements)
        ]
        return {"service": self.service.name, "jobs": [self.service.describe(job) for job in jobs]}

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        """Return the replica's status. If its job ended without an outcome, this records an outcome.

        Raises:
            UnknownHandleError: no such replica was ever launched.
            BackendError: the service refuses the credentials.
        """
        replica = self._find(handle)
        outcome = replica.attempt.outcome()
        if outcome is None:
            outcome = self._observe([replica])[0].outcome
        else:
            self._states.forget(replica.key)
            if outcome.was_told_to_end and replica.attempt.full_name not in self._explained:
                (supervisor,) = self.supervisors([PendingReplica(handle, outcome.attempt)])
                if not supervisor.is_alive:
                    self._explained.add(replica.attempt.full_name)
                    replica.attempt.record_service_reason(supervisor.reason, supervisor.error)
        if outcome is not None:
            return outcome.status
        return ReplicaStatus.RUNNING if replica.attempt.has_started() else ReplicaStatus.PENDING

    def observe(self, replicas: Sequence[PendingReplica]) -> list[Observation]:
        """Ask the service about several replicas; see `Backend.observe`."""
        launched = [Attempt.from_handle(each.handle, self.backend_name) for each in replicas]
        newest = [attempt.at(each.attempt) for attempt, each in zip(launched, replicas, strict=True)]
        return self._observe(
            [JobReplica.of(attempt, each.handle) for attempt, each in zip(newest, replicas, strict=True)]
        )

    def supervisors(self, replicas: Sequence[PendingReplica]) -> list[SupervisorStatus]:
        """Ask the service whether the jobs of replicas run; see `Backend.supervisors`."""
        launched = [(Attempt.from_handle(each.handle, self.backend_name), each) for each in replicas]
        found = [JobReplica.of(attempt.at(each.attempt), each.handle) for attempt, each in launched]
        states = self._states.of({replica.key: replica.job for replica in found if replica.job is not None})

        def supervisor(replica: JobReplica) -> SupervisorStatus:
            state = states.get(replica.key)
            if replica.job is None or (state is not None and (state.has_ended or state.holds_place)):
                if state is not None and state.holds_place and state.reason == "preempted":
                    # This is the last look at a replica that has ended, so the job's place at the service is freed
                    # here.
                    self._recorder.withdraw(replica)
                self._states.forget(replica.key)
                return self._recorder.supervisor_of(replica, state)
            return SupervisorStatus(is_alive=True)

        return list(map(supervisor, found))

    def _observe(self, replicas: Sequence[JobReplica]) -> list[Observation]:
        states = self._states.of({replica.key: replica.job for replica in replicas if replica.job is not None})

        def observation(replica: JobReplica) -> Observation:
            if (state := states.get(replica.key)) is None:
                return Observation()
            if self._recorder.may_live(replica, state):
                unknown = f"{self.service.name} does not know its job" if state.is_unconfirmed else ""
                return Observation(doing=state.message or unknown)
            return Observation(self._recorder.conclude(replica, state))

        if sum(state.has_ended for state in states.values()) < 2:
            return list(map(observation, replicas))
        return call_each(observation, replicas, MAX_THREADS)  # in threads, because each takes several requests

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = LOG_LINES) -> str:
        """Return the last lines of the replica's output that the service still has."""
        job_id = retrying()(self._job_of, self._find(handle))
        return "" if job_id is None else retrying()(self.service.logs, job_id, n_lines)

    def open_log(self, handle: ReplicaHandle) -> Log:
        """Return the log of the job that runs one attempt; see `Backend.open_log`."""
        attempt = Attempt.from_handle(handle, self.backend_name)
        job_id = retrying()(self._job_of, JobReplica.of(attempt, handle))
        if job_id is None:  # the service has never had this job
            return TailedLog(lambda n_lines: "")
        return RetryingLog(self.service.open_log(job_id), f"rank {attempt.rank}")

    def cancel(self, handle: ReplicaHandle) -> None:
        """End a replica. This returns when the service has accepted to end its job.

        First the cancel marker is written into the store, so that the end is recorded as a cancellation. If the store
        does not answer within a few seconds, the service ends the job all the same. Then the store has more time.

        Raises:
            UnknownHandleError: no such replica was ever launched.
            StoreError: the store does not answer. The job was ended all the same.
            JobServiceError: the service did not end the job. The message says how to end it.
        """
        named = Attempt.from_handle(handle, self.backend_name)
        (asked,) = in_threads(self._find_and_mark, [handle], 1)
        problem: StoreError | None = None
        job_id: JobId | None
        try:
            if (found := answered_within(HEAD_START_S, asked, named.store.url)) is None:
                return
            replica, job_id = found
        except StoreError as error:
            problem, replica = error, JobReplica.of(named, handle)
            job_id = self._known_jobs.get(replica.key) or retrying()(self._job_of, replica)
        ended = end_jobs(self.service, [(replica.key, job_id)])
        self._states.expire(replica.key)
        self._recorder.expire(replica)
        if not ended.is_complete:
            raise JobServiceError(ended.what_is_left, "unavailable") from problem
        if problem is not None:
            try:
                answered_within(STORE_S, asked, named.store.url)
            except StoreError as error:
                note = f"{self.service.name} has ended the job of rank {replica.attempt.rank} all the same."
                raise StoreError(f"{error} {note}", key=error.key, url=error.url) from error

    def _find_and_mark(self, handle: ReplicaHandle) -> tuple[JobReplica, JobId] | None:
        """Find a replica, write its cancel marker, and return it with its job. None if it has no job to end.

        Raises:
            JobServiceError: the service cannot verify the job. The marker was written, and the replica reads it.
        """
        replica = self._find(handle)
        attempt = replica.attempt
        if attempt.outcome() is not None:
            return None
        try:
            job_id = retrying()(self._job_of, replica)
        except ForeignJobError:
            raise
        except JobServiceError as error:
            attempt.request_cancel()
            commands = self.service.commands_to_end(attempt.run_id, [replica.job] if replica.job else [])
            raise JobServiceError(f"{error} End it yourself: {commands}", error.kind) from error
        attempt.request_cancel()
        # The launcher died before it started the job; a job that starts later finds the outcome and ends.
        if job_id is None:
            attempt.record(attempt.new_outcome(ReplicaStatus.CANCELLED, "cancelled"))
            return None
        return replica, job_id

    def end_jobs(self, run: JobsOfRun, on_progress: Callable[[str], None] = lambda words: None) -> EndedJobs:
        """End the jobs of a run at the service, without the store; see `Backend.end_jobs`."""
        for gang in list(self._gangs):
            if gang.run_id == run.run_id and (run.ranks is None or {*gang.ranks} <= {*run.ranks}):
                gang.give_up()
        known = self._jobs_known_of(run)
        newest: dict[tuple[bool, int], JobKey] = {}
        for key in sorted(known, key=lambda key: key.attempt):
            if key.is_spare:
                is_asked_for = run.ranks is None
            else:
                is_asked_for = key.rank not in run.over and (run.ranks is None or key.rank in run.ranks)
            if is_asked_for:
                newest[key.is_spare, key.rank] = key
        jobs: list[tuple[JobKey, JobId | None]] = [(key, known[key]) for key in newest.values()]
        launched_at = run.launched_at or max((key.launched_at for key in known), default=None)
        labels: dict[str, str] | None = None
        if run.ranks is None and run.store_url is not None and launched_at is not None:
            labels = JobKey(real_url(run.store_url), run.run_id, 0, 0, launched_at=launched_at).run_labels
        elif run.ranks is None and known:
            labels = next(iter(known)).run_labels
        elif run.ranks is None:
            try:
                labels = self._labels_found(run.run_id)
            except JobServiceError as error:
                problem = f"jobs of run {run.run_id!r} ({str(error).rstrip('.')})"
                return EndedJobs(problems=(problem,), commands=self.commands_to_end(run.run_id))
        ended = end_jobs(self.service, jobs, run_labels=labels, on_progress=on_progress)
        for key in newest.values():
            self._states.expire(key)
        self._recorder.expire_all(f"{run.run_id}/")
        return ended

    def jobs_left(self, run: JobsOfRun) -> JobsLeft:
        """Return the jobs of a run that have not ended. The service is asked once, without retries."""
        known = self._jobs_known_of(replace(run, ranks=None, over=frozenset()))
        if self.service.lists_running:
            launched_at = run.launched_at or max((key.launched_at for key in known), default=None)
            labels = {RUN_LABEL: run.run_id}
            if run.store_url is not None and launched_at is not None:
                labels = JobKey(real_url(run.store_url), run.run_id, 0, 0, launched_at=launched_at).run_labels
            left = [each.job for each in self.service.running_jobs(labels)]
        else:
            jobs = list(known.values())
            states = call_each(self.service.state, jobs, MAX_THREADS)
            left = [job for job, state in zip(jobs, states, strict=True) if not state.has_ended]
        return JobsLeft(len(left), self.service.name, self.service.commands_to_end(run.run_id, left))

    @property
    def log_advice(self) -> str:
        """An advice on how to make the service's log files readable on this machine. Empty if it has no files."""
        return self.service.log_advice

    def risks(self) -> Sequence[tuple[str, str]]:
        """Return the settings of the service that may harm a run, each as a pair of the problem and an advice."""
        return [*self.service.risks()]

    def commands_to_end(self, run_id: str) -> str:
        """Return the service's own commands that end the jobs of a run; see `Backend.commands_to_end`."""
        return self.service.commands_to_end(run_id)

    def _labels_found(self, run_id: str) -> dict[str, str]:
        """Return the labels of the run with an id, for a caller that knows only the id.

        Raises:
            JobServiceError: the service does not answer, or has jobs of several runs with this id.
        """
        labels = {RUN_LABEL: run_id}
        if not self.service.lists_running:
            raise JobServiceError(f"{self.service.name} does not list jobs by their run.", "rejected")
        stores = {each.labels.get(STORE_LABEL, "") for each in retrying()(self.service.running_jobs, labels)}
        if len(stores) > 1:
            raise JobServiceError(
                f"{self.service.name} has jobs of {len(stores)} runs with this id, in different stores, so no job was "
                "ended. Name the run by its address, STORE/RUN.",
                "rejected",
            )
        store = next(iter(stores), "")
        return {**labels, STORE_LABEL: store} if store else labels

    def _jobs_known_of(self, run: JobsOfRun) -> dict[JobKey, JobId]:
        """Return the jobs of a run that this process has started or found, and those in this machine's notes."""
        noted = [job for job in noted_jobs(run.run_id, run.store_url) if job.backend == self.backend_name]
        options = as_noted(self.options_to_keep)
        noted = [job for job in noted if job.options == options] or noted
        found = {
            JobKey(real_url(job.store_url), run.run_id, job.rank, job.attempt, job.is_spare, job.launched_at): dict(
                job.job
            )
            for job in noted
        }
        store_url = None if run.store_url is None else real_url(run.store_url)
        for key, job_id in list(self._known_jobs.items()):
            if key.run_id == run.run_id and store_url in (None, key.store_url):
                found[key] = job_id
        return {key: job_id for key, job_id in found.items() if run.launched_at in (None, key.launched_at)}

    @functools.cached_property
    def _class_path(self) -> str:
        """The import path of the class, as in "pkg.mod:Class". Empty if the name of the backend is enough."""
        return describe_executor(self)["executor"] or ""

    def _keep_jobs(self, jobs: Sequence[tuple[JobKey, JobId]], store_url: str) -> None:
        """Keep the ids of jobs that have just started, in this process and in this machine's notes."""
        noted = []
        for key, job_id in jobs:
            self._known_jobs[key] = job_id
            place: Any = {"rank": key.rank, "attempt": key.attempt, "is_spare": key.is_spare}
            noted.append(
                NotedJob(
                    backend=self.backend_name,
                    executor=self._class_path,
                    options=as_noted(self.options_to_keep),
                    store_url=store_url,
                    launched_at=key.launched_at,
                    job=job_id,
                    **place,
                )
            )
        note_jobs(jobs[0][0].run_id, noted)

    def collect(self, handles: list[ReplicaHandle], *, timeout: float | None = None) -> list[dict[str, Any]]:
        """Wait for the replicas' outcomes, at most `timeout` seconds, and return them in the order of `handles`."""
        return collect_rows(self.poll, self.backend_name, handles, timeout)

    def find_handle(self, handle: ReplicaHandle, *, insists: bool = False) -> ReplicaHandle | None:
        """Find a replica whose launcher wrote its intent and no handle; see `Backend.find_handle`."""
        place = handle.metadata
        attempt = Attempt(store_at(place["store_url"]), place["run_id"], handle.rank, place["attempt"])
        if attempt.full_name in self._starting:
            return None
        if insists:
            return retrying()(self._look_for, attempt)
        try:
            return self._look_for(attempt) if self._states.may_search(attempt.full_name) else None
        except JobServiceError as error:
            self._states.warn(error, f"rank {attempt.rank}")
            return None

    def _look_for(self, attempt: Attempt) -> ReplicaHandle | None:
        record = find_run_record(attempt.store, attempt.run_id)
        launched_at, timeout_s = (0.0, None) if record is None else (record.created_at, record.settings.timeout)
        jobs = self.service.find(JobKey.of(attempt, launched_at))
        if not jobs:
            intent = attempt.find(INTENT, Intent.parse)
            if intent is not None and is_stale(self._intents, attempt.full_name, intent.at, intent.takes_s):
                rank, service = attempt.rank, self.service.name
                error = f"Replica {rank} was never started: {service} knows no job of it. Did {intent.by} die?"
                attempt.record(attempt.new_outcome(ReplicaStatus.FAILED, "start_failed", error=error))
            return None
        found = self._handle(attempt, jobs[0], timeout_s=self._timeout_s(timeout_s), launched_at=launched_at)
        if attempt.create(HANDLE, found.to_json().encode()):
            return found
        return attempt.handle(self.backend_name) or found  # the launcher is alive, and has written the handle itself

    def _find(self, handle: ReplicaHandle) -> JobReplica:
        """Find a replica. If its newest attempt has no handle yet, the service is asked for the job."""
        attempt, newest = Attempt.of_handle(handle, self.backend_name)
        if attempt.number != newest.metadata.get("attempt") and attempt.has_intent():
            announced = attempt.bare_handle(self.backend_name)
            without_job = replace(newest, metadata={**newest.metadata, **announced.metadata, "job": None})
            newest = retrying()(self._look_for, attempt) or without_job
        return JobReplica.of(attempt, newest)

    def _job_of(self, replica: JobReplica) -> JobId | None:
        """Return the job that a replica's handle names, after the service has confirmed that it runs this replica."""
        return None if replica.job is None else self._states.verified(replica.key, replica.job)

    def _handle(self, attempt: Attempt, job_id: JobId, *, timeout_s: float | None, launched_at: float) -> ReplicaHandle:
        key = JobKey.of(attempt, launched_at)
        self._known_jobs[key] = job_id
        self._states.started(key, job_id)
        announced = attempt.bare_handle(self.backend_name)
        known = {"launched_at": launched_at, "timeout_s": timeout_s, "job": job_id}
        spare = {"spare": attempt.rank} if attempt.is_spare else {}
        return replace(announced, metadata={**announced.metadata, **spare, **known})

    def _jobs(
        self,
        run: RunSpec,
        gpu: str | None,
        limits: Mapping[int, float | None],
        requirements: Sequence[str],
        pins: Sequence[str] = (),
    ) -> list[tuple[Attempt, JobSpec]]:
        from executors.shipping.package import replica_environment

        store = store_at(run.store_url)
        url, credentials = remote_access(store)
        service_env = {RENDEZVOUS: url, SERVICE: self.service.name}
        common = {**run.env, **replica_environment(run, 0, None, gpu), **service_env}
        command, margin_s = self.service.command(), INSTALL_S if requirements else MARGIN_S
        # A container costs money while it installs packages. So a limit that follows from max_cost gets no margin.
        margin_s = 0 if run.settings.pays_for_start else margin_s
        jobs = []
        for rank in run.ranks:
            timeout_s = limits[rank]
            attempt = Attempt(store, run.run_id, rank, run.attempt, run.is_of_spares)
            job = JobSpec(
                JobKey.of(attempt, run.launched_at),
                command,
                tuple(requirements),
                {**common, RANK: str(rank), **({} if timeout_s is None else {TIMEOUT_S: str(timeout_s)})},
                {**credentials, **run.container_secrets},
                run.secret_names,
                gpu,
                None if timeout_s is None else int(timeout_s + margin_s),
                0 if timeout_s is None else margin_s,
                pins=tuple(pins),
                procs=known_procs(run.settings.procs, gpu) or 1,
            )
            jobs.append((attempt, job))
        return jobs
