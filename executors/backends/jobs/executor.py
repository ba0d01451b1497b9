"""JobExecutor: the five verbs over any service that runs jobs.

A replica is one job. The store says how the replica is: an outcome decides, a claim says that it runs. The service is
asked whether a job without an outcome still lives, and its answer is recorded by the first process that asks.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

from executors.attempt import ENDINGS, MAX_ATTEMPTS, OUTPUT_TAIL_BYTES, Attempt, Intent, collect_rows
from executors.backends.jobs.gang_start import GangStart
from executors.backends.jobs.sdk import PollThrottle
from executors.backends.jobs.service import Job, JobId, JobKey, JobService, JobServiceError, JobState, retrying
from executors.entrypoint import check_entrypoint, split_rank_env
from executors.errors import StoreError
from executors.protocol import (
    Observation,
    Outcome,
    Package,
    Reason,
    Recordable,
    ReplicaHandle,
    ReplicaStatus,
    RunSpec,
    Unfinished,
)
from executors.registry import describe_executor
from executors.replica import RENDEZVOUS
from executors.run_index import local_store, new_run_id, remember
from executors.shipping.package import bootstrap_command, make_package, replica_environment
from executors.store import open_store, store_at
from executors.store.records import FAR_AHEAD, Fields, integer, json_object, nullable, number
from executors.store.url import remote_access, shared_rendezvous
from executors.task.create import LaunchRequest, create_run
from executors.task.record import find_run_record
from executors.task.stored import read_task

DEFAULT_TIMEOUT_S = 3600
MARGIN_S = 120  # what the service's limit leaves for fetching the code, and for a replica that ends by its own limit
LOG_LINES = 200
STALE_INTENT_S = 1800  # a call may block until its job is scheduled: at Modal 21 minutes
SIGNALS = {137: "SIGKILL", 143: "SIGTERM", 139: "SIGSEGV", 134: "SIGABRT", 130: "SIGINT"}  # by exit code

P = ParamSpec("P")
S = TypeVar("S", bound=JobService)
log = logging.getLogger(__name__)


def options_of(
    service_class: Callable[P, S],
) -> Callable[[Callable[[Any, S], None]], Callable[Concatenate[Any, P], None]]:
    """Let a constructor that takes a service take the options of that service instead: its fields, by name."""

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


@dataclass(frozen=True)
class _Replica:
    """A replica whose handle was found and checked."""

    attempt: Attempt  # the newest
    key: JobKey  # of the job that runs it: an earlier attempt's where a second copy was started since
    job: JobId | None  # as a record names it, to be verified; None: the service never had it
    timeout_s: float

    @classmethod
    def of(cls, attempt: Attempt, handle: ReplicaHandle) -> _Replica:
        where = f"the handle of rank {attempt.rank} of run {attempt.run_id!r}"
        fields = Fields(handle.metadata, where, attempt.store.url)
        timeout_s = fields.take("timeout_s", number(0.0, FAR_AHEAD))
        job, launched = fields.take("job", nullable(json_object)), fields.take("attempt", integer(0, MAX_ATTEMPTS))
        return cls(attempt, JobKey.of(attempt.at(launched)), job, timeout_s)


class JobExecutor:
    """The five verbs of an executor over a JobService; a subclass has a name and a constructor."""

    backend_name: str
    recordable_options: ClassVar[Recordable]
    supports_inter_replica_network: bool = False
    needs_shared_rendezvous: bool = True
    default_timeout_s: float | None = DEFAULT_TIMEOUT_S

    def __init__(self, service: JobService) -> None:
        self.service = service
        self._throttle = PollThrottle()
        self._verified: dict[JobKey, JobId] = {}
        """The jobs that this process started, or the service has said whose they are."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.service!r})"

    @property
    def options_to_keep(self) -> dict[str, Any]:
        """The service's options."""
        return self.service.options

    def warm_up(self) -> None:
        """Do nothing: a service has nothing to begin early."""

    def check_launch(
        self,
        n_replicas: int,
        entrypoint: str | Callable[..., Any],
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        secrets: Sequence[str] = (),
    ) -> None:
        """Refuse what cannot work; see `NativeExecutor.check_launch`. None of the user's code is run."""
        if n_replicas < 1:
            raise ValueError(f"n must be at least 1, got n={n_replicas}.")
        timeout_s = _timeout_s(timeout)
        if not timeout_s > 0:
            raise ValueError(f"timeout must be more than 0 seconds, got timeout={timeout}.")
        if isinstance(entrypoint, str):
            check_entrypoint(entrypoint, split_rank_env(entrypoint_args)[0])
        self.service.check_account(gpu, timeout_s, secrets)

    def package(self, entrypoint: str | Callable[..., Any]) -> Package:
        """Pack what replicas need of this side: the code under the working directory, and what to install."""
        return make_package(entrypoint, pip=self.service.pip)

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: str | Callable[..., Any],
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        run: RunSpec | None = None,
    ) -> list[ReplicaHandle]:
        """Start the replicas at the same time; see `ServerlessExecutor.launch_replicas`.

        Args:
            timeout: seconds; None for one hour.
            run: the run these replicas belong to, written already. None: a new one in `$REPLICAS_RENDEZVOUS`.

        Raises:
            LaunchError: a replica could not be started; the others were ended.

        Returns: the handles. Those of attempts that another process began first are left out, and left alone.
        """
        if run is None:
            is_shared = self.needs_shared_rendezvous
            url = shared_rendezvous(self.backend_name, None, entrypoint, n_replicas) if is_shared else None
            self.check_launch(n_replicas, entrypoint, entrypoint_args, gpu=gpu, timeout=timeout)
            request = LaunchRequest(entrypoint=entrypoint, n=n_replicas, args=entrypoint_args, gpu=gpu, timeout=timeout)
            store = local_store() if url is None else open_store(url)
            run = create_run(request, new_run_id(), store, describe_executor(self), self.package(entrypoint))
            with contextlib.suppress(StoreError):  # without a place for notes, a resume needs the digest or trust
                remember(run.run_id, run.store_url, run.task_digest, self.options_to_keep)
        timeout_s = _timeout_s(timeout)
        requirements = read_task(store_at(run.store_url), run.run_id, run.task_digest).record.requirements
        jobs = self._jobs(run, gpu, timeout_s, requirements)

        handle_of = functools.partial(self._handle, timeout_s=timeout_s)
        return GangStart(self.service, self.backend_name, run.world_size, jobs, handle_of).run()

    def describe_launch(
        self, run: RunSpec, *, gpu: str | None = None, timeout: float | None = None, requirements: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Return the requests that `launch_replicas` would make, one a rank, with what is secret masked."""
        jobs = self._jobs(run, gpu, _timeout_s(timeout), requirements)
        return {"vendor": self.service.name, "jobs": [self.service.describe(job) for _, job in jobs]}

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        """Return the replica's status. The first to find its job ended without an outcome records what is known.

        Raises:
            UnknownHandleError: no such replica was ever launched.
            BackendError: the service refuses the credentials.
        """
        replica = self._find(handle)
        if outcome := replica.attempt.outcome() or self._conclude(replica):
            return outcome.status
        return ReplicaStatus.RUNNING if replica.attempt.has("started.json") else ReplicaStatus.PENDING

    def observe(self, replicas: Sequence[Unfinished]) -> list[Observation]:
        """Ask the service about several replicas; see `NativeExecutor.observe`."""
        found = []
        for each in replicas:
            launched = Attempt.named_by(each.handle, self.backend_name)
            found.append(Observation(self._conclude(_Replica.of(launched.at(each.attempt), each.handle))))
        return found

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = LOG_LINES) -> str:
        """Return the last lines of the replica's output, as far as the service keeps it."""
        job_id = retrying()(self._job_of, self._find(handle))
        return "" if job_id is None else retrying()(self.service.logs, job_id, n_lines)

    def cancel(self, handle: ReplicaHandle) -> None:
        """End a replica. Returns when the service has accepted it."""
        replica = self._find(handle)
        attempt = replica.attempt
        if attempt.outcome() is not None:
            return
        job_id = retrying()(self._job_of, replica)
        attempt.request_cancel()
        if job_id is None:  # its launcher died before the service had it; one that comes up late ends
            attempt.record(attempt.ended(ReplicaStatus.CANCELLED, "cancelled"))
            return
        retrying()(self.service.stop, job_id)
        self._throttle.forget(attempt.place)
        self._conclude(replica)

    def collect(self, handles: list[ReplicaHandle], *, timeout: float | None = None) -> list[dict[str, Any]]:
        """Wait for the replicas' outcomes, at most `timeout` seconds, and return them in the order of `handles`."""
        return collect_rows(self.poll, self.backend_name, handles, timeout)

    def find_handle(self, handle: ReplicaHandle) -> ReplicaHandle | None:
        """Find a replica whose launcher wrote its intent and no handle; see `NativeExecutor.find_handle`."""
        place = handle.metadata
        attempt = Attempt(store_at(place["store_url"]), place["run_id"], handle.rank, place["attempt"])
        jobs = retrying()(self.service.find, JobKey.of(attempt))
        if not jobs:
            intent = attempt.find("intent.json", Intent.parse)
            if intent is not None and time.time() - intent.at > STALE_INTENT_S:
                rank, service = attempt.rank, self.service.name
                error = f"Replica {rank} was never started: {service} knows no job of it. Did {intent.by} die?"
                attempt.record(attempt.ended(ReplicaStatus.FAILED, "start_failed", error=error))
            return None
        record = find_run_record(attempt.store, attempt.run_id)
        found = self._handle(attempt, jobs[0], _timeout_s(record.timeout_s if record else None))
        if attempt.store.put_if_absent(attempt.key("handle.json"), found.to_json().encode()):
            return found
        return attempt.handle(self.backend_name) or found  # its launcher lives, and knows best

    def _find(self, handle: ReplicaHandle) -> _Replica:
        """Find a replica; a newer attempt whose launcher died before it wrote a handle is found at the service."""
        attempt, newest = Attempt.of_handle(handle, self.backend_name)
        if attempt.number != newest.metadata.get("attempt") and attempt.has("intent.json"):
            announced = attempt.announced(self.backend_name)
            unheard = replace(newest, metadata={**newest.metadata, **announced.metadata, "job": None})
            newest = self.find_handle(announced) or unheard
        return _Replica.of(attempt, newest)

    def _job_of(self, replica: _Replica) -> JobId | None:
        """Return the job that a replica's handle names, once the service has said that it is this replica's."""
        named = replica.job
        if named is not None and self._verified.get(replica.key) != named:
            self._verified[replica.key] = named = self.service.verify(named, replica.key)
        return named

    def _handle(self, attempt: Attempt, job_id: JobId, timeout_s: float) -> ReplicaHandle:
        self._verified[JobKey.of(attempt)] = job_id
        announced = attempt.announced(self.backend_name)
        return replace(announced, metadata={**announced.metadata, "timeout_s": timeout_s, "job": job_id})

    def _jobs(
        self, run: RunSpec, gpu: str | None, timeout_s: float, requirements: Sequence[str]
    ) -> list[tuple[Attempt, Job]]:
        store = store_at(run.store_url)
        url, credentials = remote_access(store)
        jobs = []
        for rank in run.ranks:
            attempt = Attempt(store, run.run_id, rank, run.attempt)
            job = Job(
                JobKey.of(attempt),
                bootstrap_command(),
                tuple(requirements),
                {**run.env, **replica_environment(run, rank, timeout_s), RENDEZVOUS: url},
                credentials,
                run.secret_names,
                gpu,
                int(timeout_s + MARGIN_S),
            )
            jobs.append((attempt, job))
        return jobs

    def _conclude(self, replica: _Replica) -> Outcome | None:
        """Ask the service about a replica without an outcome, and record one if its job has ended."""
        attempt, service = replica.attempt, self.service
        if replica.job is None or not self._throttle.is_due(attempt.place):
            return None
        try:
            job_id = self._job_of(replica)  # not retried: the next poll asks again
            assert job_id is not None
            state = service.state(job_id)
        except JobServiceError as error:
            if error.kind == "rejected":
                raise
            log.warning("rank %d: %s cannot report the state of its job: %s", attempt.rank, service.name, error)
            return None
        if not state.has_ended:
            return None
        self._throttle.forget(attempt.place)
        if outcome := attempt.outcome():  # written just before the job ended
            return outcome
        if state.reason == "lost":
            return attempt.record_lost(f"{service.name} reports it gone")
        output = ""
        with contextlib.suppress(JobServiceError):
            output = service.logs(job_id, LOG_LINES)[-OUTPUT_TAIL_BYTES:]
        reason: Reason = "cancelled"
        error_text = None  # of a cancellation the marker says why
        if not attempt.has("cancel.json"):
            who, has_started = attempt.title(), attempt.has("started.json")
            reason, error_text = explain(who, service.name, state, replica.timeout_s, has_started, output)
        return attempt.record(
            attempt.ended(
                ReplicaStatus.CANCELLED if reason == "cancelled" else ReplicaStatus.FAILED,
                reason,
                exit_code=state.exit_code,
                signal=SIGNALS.get(state.exit_code or 0) if reason in ("signal", "oom") else None,
                error=error_text,
                output_tail=output,
            )
        )


def _timeout_s(timeout: float | None) -> float:
    return DEFAULT_TIMEOUT_S if timeout is None else timeout


def explain(
    who: str, service: str, state: JobState, timeout_s: float, has_started: bool, output: str
) -> tuple[Reason, str]:
    """Name the reason of an end without an outcome, and put it into a sentence.

    Args:
        who: `Replica 3 of 8 (attempt 1)`.
        service: its name for people.
        has_started: whether the replica claimed its attempt.
        output: the end of its log.
    """
    said = f" {service} says: {state.message.rstrip('.')}." if state.message else ""

    def sentence(ending: str, **values: Any) -> str:
        return f"{who} {ENDINGS[ending].format(service=service, **values)}{'' if ending == 'timeout' else said}"

    if state.reason == "oom":
        cause = "out of memory" if said else f"most likely out of memory (SIGKILL, and not by {service})"
        return "oom", sentence("killed", cause=cause)
    if state.reason is not None:
        endings = {"timeout": "timeout", "preempted": "preempted", "cancelled": "cancelled_there"}
        return state.reason, sentence(endings.get(state.reason, "not_run"), limit_s=timeout_s)
    code = "an unknown exit code" if state.exit_code is None else f"exit code {state.exit_code}"
    if state.exit_code in SIGNALS:
        return "signal", sentence("by_exit_code", name=SIGNALS[state.exit_code], code=code)
    if not has_started:
        lines = output.strip().splitlines()
        why = f" Its log ends: {lines[-1].rstrip('.')}." if lines else ""  # first: a table shows the beginning alone
        return "start_failed", sentence("not_reached", code=code, why=why)
    return "no_result", sentence("no_result", code=code)
