"""The five verbs over any vendor that runs a command in a container: everything of a cloud backend but its SDK.

A replica is one job of the vendor. The store tells how it fares: an outcome decides, a claim says that it runs. The
vendor is asked whether a job without an outcome still lives, and what it knows of its end is recorded by whoever asks
first.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from executors.attempt_records import Intent
from executors.cloud_launch import CloudLaunch
from executors.entrypoint import check_entrypoint
from executors.errors import StoreError
from executors.found import FoundReplica, collect_rows, find_replica, read_handle
from executors.outcome import OUTPUT_TAIL_BYTES, Outcome, Reason, record_outcome, request_cancel
from executors.pace import Pace
from executors.protocol import ReplicaHandle, ReplicaStatus
from executors.records import FAR_AHEAD, Fields, exists, find_record, json_object, nullable, number
from executors.replica import RENDEZVOUS, replica_key
from executors.run_record import find_run_record
from executors.shared_rendezvous import shared_rendezvous
from executors.shipping import Package, bootstrap_command, make_package, replica_environment
from executors.state import remember
from executors.store import Store, open_store, store_at
from executors.store.opening import reach_from_elsewhere
from executors.task import RunSpec, create_run, new_run_id, read_task, split_rank_env
from executors.vendor import Job, JobId, JobKey, JobState, Vendor, VendorError
from executors.vendor_patience import patiently

DEFAULT_TIMEOUT_S = 3600
MARGIN_S = 120  # what the vendor's limit leaves for fetching the code, and for a replica that ends by its own limit
LOG_LINES = 200
STALE_INTENT_S = 1800  # a vendor's call may block until its job is scheduled: at Modal 21 minutes

log = logging.getLogger(__name__)


class CloudExecutor(Vendor):
    """The five verbs of an executor; a subclass knows the vendor."""

    backend_name: str
    supports_inter_replica_network: bool = False
    needs_shared_rendezvous: bool = True
    default_timeout_s: float = DEFAULT_TIMEOUT_S
    pip: tuple[str, ...] = ()

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
        """Refuse what cannot work, before anything is written, started or paid for. None of the user's code is run.

        Raises:
            ValueError: `n_replicas` or `timeout` has a bad value.
            BackendError: the account cannot be used, or has no such GPU or secret.
            EntrypointError: the entrypoint cannot be found in its source, or called with these arguments.
        """
        if n_replicas < 1:
            raise ValueError(f"n must be at least 1, got n={n_replicas}.")
        timeout_s = self.default_timeout_s if timeout is None else timeout
        if not timeout_s > 0:
            raise ValueError(f"timeout must be more than 0 seconds, got timeout={timeout}.")
        if isinstance(entrypoint, str):
            check_entrypoint(entrypoint, split_rank_env(entrypoint_args)[0])
        self.check_account(n_replicas, gpu, timeout_s, secrets)

    def package(self, entrypoint: str | Callable[..., Any]) -> Package:
        """Pack what replicas need of this side: the code under the working directory, and what to install."""
        return make_package(entrypoint, pip=self.pip)

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
            url = shared_rendezvous(self.backend_name, None, entrypoint, n_replicas)
            self.check_launch(n_replicas, entrypoint, entrypoint_args, gpu=gpu, timeout=timeout)
            run = create_run(
                open_store(url),
                new_run_id(),
                entrypoint,
                entrypoint_args,
                n_replicas,
                backend=self.backend_name,
                package=self.package(entrypoint),
            )
            with contextlib.suppress(StoreError):  # without a place for notes, a resume needs the digest or trust
                remember(run.run_id, run.store_url, run.task_digest, getattr(self, "options_to_keep", {}))
        timeout_s = self.default_timeout_s if timeout is None else timeout

        store = store_at(run.store_url)
        requirements = read_task(store, run.run_id, run.task_digest).record.requirements
        jobs = self._jobs(run, gpu, timeout_s, requirements)

        def handle_of(job: Job, job_id: JobId) -> ReplicaHandle:
            return self._handle(store, job.key, timeout_s, job_id)

        return CloudLaunch(self, self.backend_name, store, jobs, run.world_size, handle_of).start()

    def describe_launch(
        self,
        run: RunSpec,
        *,
        gpu: str | None = None,
        timeout: float | None = None,
        requirements: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Return the requests that `launch_replicas` would make, one a rank, with what is secret masked.

        Args:
            requirements: those of the task, which is not written yet.
        """
        jobs = self._jobs(run, gpu, self.default_timeout_s if timeout is None else timeout, requirements)
        return {"vendor": self.vendor, "jobs": [self.describe_job(job) for job in jobs]}

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        """Return the replica's status. The first to find its job ended without an outcome records what is known.

        Raises:
            UnknownHandleError: no such replica was ever launched.
            BackendError: the vendor does not let us in.
        """
        found = self._find(handle)
        outcome = found.outcome() or self._conclude(found)
        if outcome is not None:
            return outcome.status
        return ReplicaStatus.RUNNING if exists(found.store, found.key("started.json")) else ReplicaStatus.PENDING

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = LOG_LINES) -> str:
        """Return the last lines of the replica's output, as far as the vendor keeps it."""
        job_id = self._job_of(self._find(handle))
        return "" if job_id is None else patiently()(self.job_logs, job_id, n_lines)

    def cancel(self, handle: ReplicaHandle) -> None:
        """End a replica. Returns when the vendor has accepted it."""
        found = self._find(handle)
        if found.outcome() is not None:
            return
        job_id = self._job_of(found)
        request_cancel(found.store, found.run_id, found.rank, found.attempt)
        if job_id is None:  # its launcher died before the vendor had it; one that comes up late ends
            record_outcome(
                found.store, found.run_id, Outcome(found.rank, found.attempt, ReplicaStatus.CANCELLED, "cancelled")
            )
            return
        patiently()(self.stop_job, job_id)
        self._pace.forget(found.place)
        self._conclude(found)

    def collect(self, handles: list[ReplicaHandle], *, timeout: float | None = None) -> list[dict[str, Any]]:
        """Wait for the replicas' outcomes, at most `timeout` seconds, and return them in the order of `handles`."""
        return collect_rows(self.poll, self.backend_name, handles, timeout)

    def _find(self, handle: ReplicaHandle) -> FoundReplica:
        """Find a replica; a newer attempt whose launcher died before it wrote a handle is found at the vendor."""
        found = find_replica(handle, self.backend_name)
        if found.attempt != found.launched and exists(found.store, found.key("intent.json")):
            newer = self.find_handle(found.store, found.run_id, found.rank, found.attempt)
            metadata = {**found.metadata, "job": None} if newer is None else newer.metadata
            found = replace(found, launched=found.attempt, metadata=metadata)
        fields = Fields(found.metadata, f"the handle of rank {found.rank} of run {found.run_id!r}", found.store.url)
        fields.take("timeout_s", number(0.0, FAR_AHEAD))
        fields.take("job", nullable(json_object))
        return found

    def _job_of(self, found: FoundReplica, *, is_patient: bool = True) -> JobId | None:
        """Return the job that a replica's handle names, once the vendor has said that it is this replica's."""
        named = found.metadata["job"]
        key = JobKey(found.store.url, found.run_id, found.rank, found.launched)
        if named is not None and self._jobs_seen.get(key) != named:
            check = functools.partial(patiently(), self.check_job) if is_patient else self.check_job
            self._jobs_seen[key] = named = check(named, key)
        return named  # type: ignore[no-any-return]

    def find_handle(self, store: Store, run_id: str, rank: int, attempt: int) -> ReplicaHandle | None:
        """Find a replica whose launcher wrote its intent, and no handle: it died, or lost the vendor's answer."""
        key = JobKey(store.url, run_id, rank, attempt)
        jobs = patiently()(self.find_jobs, key)
        if not jobs:
            self._give_up_intent(key, store)
            return None
        record = find_run_record(store, run_id)
        timeout_s = None if record is None else record.timeout_s
        handle = self._handle(store, key, timeout_s or self.default_timeout_s, jobs[0])
        if not store.put_if_absent(replica_key(run_id, rank, attempt, "handle.json"), handle.to_json().encode()):
            # Its launcher lives, and knows best.
            return read_handle(store, run_id, rank, attempt, self.backend_name) or handle
        return handle

    def _give_up_intent(self, key: JobKey, store: Store) -> None:
        """Record the end of a replica whose launcher died before the vendor had it, once that is past doubt."""
        intent = find_record(store, replica_key(key.run_id, key.rank, key.attempt, "intent.json"), Intent.parse)
        if intent is not None and time.time() - intent.at > STALE_INTENT_S:
            error = f"Replica {key.rank} was never started: {self.vendor} knows no job of it. Did {intent.by} die?"
            outcome = Outcome(key.rank, key.attempt, ReplicaStatus.FAILED, "start_failed", error=error)
            record_outcome(store, key.run_id, outcome)

    @functools.cached_property
    def _pace(self) -> Pace:
        return Pace()

    @functools.cached_property
    def _jobs_seen(self) -> dict[JobKey, JobId]:
        """The jobs that this process started, or the vendor has said whose they are."""
        return {}

    def _handle(self, store: Store, key: JobKey, timeout_s: float, job_id: JobId) -> ReplicaHandle:
        self._jobs_seen[key] = job_id
        where = {"run_id": key.run_id, "store_url": store.url, "attempt": key.attempt}
        return ReplicaHandle(key.rank, self.backend_name, {**where, "timeout_s": timeout_s, "job": job_id})

    def _jobs(self, run: RunSpec, gpu: str | None, timeout_s: float, requirements: Sequence[str]) -> list[Job]:
        url, credentials = reach_from_elsewhere(store_at(run.store_url))
        return [
            Job(
                JobKey(run.store_url, run.run_id, rank, run.attempt),
                bootstrap_command(),
                tuple(requirements),
                {**run.env, **replica_environment(run, rank, timeout_s), RENDEZVOUS: url},
                credentials,
                run.secret_names,
                gpu,
                int(timeout_s + MARGIN_S),
            )
            for rank in run.ranks
        ]

    def _conclude(self, found: FoundReplica) -> Outcome | None:
        """Ask the vendor about a replica without an outcome, and record one if its job has ended."""
        if found.metadata["job"] is None or not self._pace.is_due(found.place):
            return None
        try:
            job_id = self._job_of(found, is_patient=False)  # whoever looks will look again
            assert job_id is not None
            state = self.job_state(job_id)
        except VendorError as error:
            if error.kind == "refused":
                raise
            log.warning("rank %d: %s cannot tell how it fares: %s", found.rank, self.vendor, error)
            return None
        if not state.has_ended:
            return None
        self._pace.forget(found.place)
        standing = found.outcome()  # written just before the job ended, perhaps
        if standing is not None:
            return standing
        if state.reason == "lost":
            return found.write_off(f"{self.vendor} reports it gone")
        return record_outcome(found.store, found.run_id, self._outcome_of(found, job_id, state))

    def _outcome_of(self, found: FoundReplica, job_id: JobId, state: JobState) -> Outcome:
        is_ours = exists(found.store, found.key("cancel.json"))  # and then the marker says why
        output = ""
        with contextlib.suppress(VendorError):
            output = self.job_logs(job_id, LOG_LINES)[-OUTPUT_TAIL_BYTES:]
        reason, error = CANCELLED if is_ours else _explain(found, state, self.vendor, output)
        status = ReplicaStatus.CANCELLED if reason == "cancelled" else ReplicaStatus.FAILED
        return Outcome(
            found.rank,
            found.attempt,
            status,
            reason,
            state.exit_code,
            signal=_SIGNALS.get(state.exit_code or 0) if reason in ("signal", "oom") else None,
            error=error,
            output_tail=output,
        )


CANCELLED: tuple[Reason, str | None] = ("cancelled", None)
_SIGNALS = {137: "SIGKILL", 143: "SIGTERM", 139: "SIGSEGV", 134: "SIGABRT", 130: "SIGINT"}


def _explain(found: FoundReplica, state: JobState, vendor: str, output: str) -> tuple[Reason, str | None]:
    """Name the reason of an end without an outcome, and put it into a sentence."""
    who = f"Replica {found.rank} of {found.world_size} (attempt {found.attempt})"
    said = f" {vendor} says: {state.message.rstrip('.')}." if state.message else ""
    if state.reason == "timeout":
        return "timeout", f"{who} ran into its time limit of {found.metadata['timeout_s']:g} s."
    if state.reason == "oom":
        cause = "out of memory" if said else f"most likely out of memory (SIGKILL, and not by {vendor})"
        return "oom", f"{who} was killed: {cause}.{said}"
    if state.reason == "preempted":
        return "preempted", f"{who} was preempted: {vendor} took its machine back.{said}"
    if state.reason == "cancelled":
        return "cancelled", f"{who} was cancelled at {vendor}, not by `replicas`.{said}"
    if state.reason is not None:
        return state.reason, f"{who} could not run.{said}"
    if state.exit_code in _SIGNALS:
        return "signal", f"{who} was ended by {_SIGNALS[state.exit_code]} (exit code {state.exit_code}).{said}"
    code = "an unknown exit code" if state.exit_code is None else f"exit code {state.exit_code}"
    if not exists(found.store, found.key("started.json")):
        lines = output.strip().splitlines()
        why = f" Its log ends: {lines[-1].rstrip('.')}." if lines else ""  # first: a table shows the beginning alone
        return "start_failed", f"{who} ended with {code} before its entrypoint was reached.{why}{said}"
    return "no_result", f"{who} ended by itself with {code}, before its entrypoint returned a result.{said}"
