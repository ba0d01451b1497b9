"""InlineExecutor: calls the entrypoint in this process, as the only replica of a run. For debuggers and tests."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executors import module_search
from executors.attempt import TICKS, Attempt, collect_rows
from executors.attempt.outcome import PID
from executors.backend import Backend, Observation, PendingReplica, SupervisorStatus, no_progress
from executors.errors import BackendError, StoreError
from executors.logs.log import Log
from executors.logs.readers import TailedLog
from executors.masking import MASK
from executors.process import is_alive, start_time, this_machine
from executors.protocol import Outcome, ReplicaHandle, ReplicaStatus
from executors.replica import RANK, find_replica, set_current_replica
from executors.run.new_run import write_new_run
from executors.settings.run_spec import NOTIFY, RunSpec, StartSpec
from executors.store import store_at
from executors.store.record_names import HANDLE
from executors.store.records import Record, checked, text
from executors.store.run_key import RUN_KEY
from executors.store.url import address_of
from executors.task.arguments import split_rank_env
from executors.task.entrypoint import check_entrypoint
from executors.task.launch_request import LaunchRequest
from executors.worker.main import call_replica

MACHINE = re.compile(r"\S+ \S+ \S+")  # as `this_machine` names one
_calls: list[tuple[str, int]] = []
"""The run and the rank of each call that is running in this process."""


@dataclass(frozen=True)
class _Process(Record):
    """The process in which a replica runs, from its handle."""

    machine: str = checked(text(1000, MACHINE))
    pid: int = checked(PID)
    pid_started: int = checked(TICKS)


class InlineExecutor(Backend):
    """Calls the entrypoint in this process, as the only replica of its run. `launch` returns when the call has ended.

    The replica uses stdin, stdout and the threads of this process. So `breakpoint()` works, and `pdb.pm()` works after
    an exception. The run has the same records as any other run.

    Example:
        launch(InlineExecutor(), train, n=1)
    """

    backend_name = "inline"
    supports_inter_replica_network = True
    needs_shared_rendezvous = False
    ends_with_launcher = False  # the replica has ended when its launch returns
    ships_code = False
    starts_single_ranks = False

    def check_launch(self, request: LaunchRequest) -> None:
        """Raise an error for a launch that cannot work, before anything is written or called; see
        `Backend.check_launch`.
        """
        settings = request.settings
        if settings.n != 1:
            raise ValueError(
                f"n must be 1 on the backend 'inline', which runs one replica in this process, got n={settings.n}. "
                "For more, use another backend: local, or a cloud backend such as modal or hf."
            )
        for name, value in (("gpu", settings.gpu), ("timeout", settings.timeout)):
            if value is not None:
                raise ValueError(
                    f"Backend 'inline' has no {name}, got {name}={value!r}: it can neither choose a GPU for the "
                    "entrypoint nor limit its time. Remove the argument, or use another backend."
                )
        if missing := [name for name in settings.secrets if name not in os.environ]:
            raise ValueError(f"The secret {missing[0]!r} is not set. Set it in this process's environment.")
        if isinstance(request.entrypoint, str):
            check_entrypoint(request.entrypoint, split_rank_env(request.args or {})[0])

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: str | Callable[..., Any],
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: int | None = None,
    ) -> list[ReplicaHandle]:
        """Write a run of one replica and call its entrypoint; see `ServerlessExecutor.launch_replicas`."""
        request = LaunchRequest.of(entrypoint, n=n_replicas, args=entrypoint_args, gpu=gpu, timeout=timeout)
        return self.start_ranks(write_new_run(self, request))

    def start_ranks(self, start: StartSpec, on_progress: Callable[[str], None] = no_progress) -> list[ReplicaHandle]:
        """Call the entrypoint, and return its replica's handle; see `Backend.start_ranks`.

        An exception of the entrypoint is its outcome, and is printed. Only Ctrl-C is passed on; it cancels the replica.
        """
        run = start.spec
        attempt = Attempt(store_at(run.store_url), run.run_id, run.ranks[0], run.attempt)
        announced = attempt.bare_handle(self.backend_name)
        process = {"machine": this_machine(), "pid": os.getpid(), "pid_started": start_time(os.getpid())}
        handle = ReplicaHandle(announced.rank, self.backend_name, {**announced.metadata, **process})
        is_ours = False
        _calls.append((run.run_id, attempt.rank))
        try:
            is_ours = attempt.create(HANDLE, handle.to_json().encode())
            if not is_ours:
                return []  # another process has begun the attempt
            self._call(run, attempt.rank, start.entrypoint)
        finally:
            _calls.remove((run.run_id, attempt.rank))
            if is_ours:
                with contextlib.suppress(StoreError):  # if it left no outcome, other processes see that it has ended
                    self._conclude(attempt, handle)
        return [handle]

    def describe_start(self, start: StartSpec, requirements: Sequence[str] = ()) -> dict[str, Any]:
        """Return what `start_ranks` would call, with the environment's values masked."""
        return {"process": "this one", "cwd": os.getcwd(), "env": dict.fromkeys(start.spec.env, MASK)}

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        """Return the replica's status. If its process is gone or its call has ended, this records it as lost.

        Raises:
            UnknownHandleError: no such replica was ever launched.
        """
        attempt, handle = Attempt.of_handle(handle, self.backend_name)
        if outcome := attempt.outcome() or self._conclude(attempt, handle):
            return outcome.status
        return ReplicaStatus.RUNNING if attempt.has_started() else ReplicaStatus.PENDING

    def observe(self, replicas: Sequence[PendingReplica]) -> list[Observation]:
        """Return which replicas have ended, from the processes of this machine; see `Backend.observe`."""
        return [
            Observation(
                self._conclude(Attempt.from_handle(each.handle, self.backend_name).at(each.attempt), each.handle)
            )
            for each in replicas
        ]

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        """Return an empty string, because the replica prints to its process's own stdout."""
        Attempt.of_handle(handle, self.backend_name)
        return ""

    def supervisors(self, replicas: Sequence[PendingReplica]) -> list[SupervisorStatus]:
        """Return a supervisor for each replica, because no process restarts it; see `Backend.supervisors`."""
        return [SupervisorStatus(is_alive=True)] * len(replicas)

    def open_log(self, handle: ReplicaHandle) -> Log:
        """Return an empty log; see `stream_logs`."""
        return TailedLog(lambda n_lines: self.stream_logs(handle))

    def cancel(self, handle: ReplicaHandle) -> None:
        """Do nothing if the replica has ended, and refuse to end a running one, which may be under a debugger.

        Raises:
            BackendError: the replica runs.
        """
        if self.poll(handle).is_terminal:
            return
        attempt, newest = Attempt.of_handle(handle, self.backend_name)
        process = _process_of(attempt, newest)
        raise BackendError(
            f"Run {attempt.run_id!r} runs inside process {process.pid} on {process.machine.split()[0]} (backend "
            "'inline'). Press Ctrl-C there to end it."
        )

    def collect(self, handles: list[ReplicaHandle], *, timeout: float | None = None) -> list[dict[str, Any]]:
        """Wait for the replicas' outcomes, at most `timeout` seconds, and return them in the order of `handles`."""
        return collect_rows(self.poll, self.backend_name, handles, timeout)

    def _call(self, run: RunSpec, rank: int, entrypoint: str | Callable[..., Any]) -> None:
        with _surroundings_of(run, rank, entrypoint):
            try:
                call_replica(address_of(run.store_url, run.run_id), run.task_digest)
            except SystemExit:
                pass  # the outcome has the exit code
            except Exception as error:  # noqa: BLE001 - the user's code raised it, and the outcome has it
                trace = error.__traceback__
                while trace is not None and str(trace.tb_frame.f_globals.get("__name__")).startswith("executors."):
                    trace = trace.tb_next  # only frames of the user's code are shown
                traceback.print_exception(error.with_traceback(trace))
                # `pdb.pm()` reads these. Since Python 3.12 it reads `last_exc`.
                vars(sys).update(last_exc=error, last_type=type(error), last_value=error, last_traceback=trace)

    def _conclude(self, attempt: Attempt, handle: ReplicaHandle) -> Outcome | None:
        process = _process_of(attempt, handle)
        is_over = process.pid == os.getpid() and (attempt.run_id, attempt.rank) not in _calls
        if process.machine != this_machine() or (is_alive(process.pid, process.pid_started) and not is_over):
            return None
        # The outcome is read again: the process may have written it just before its end.
        return attempt.outcome() or attempt.record_lost("its call has ended" if is_over else "its process is gone")


def _process_of(attempt: Attempt, handle: ReplicaHandle) -> _Process:
    where = f"the handle of rank {attempt.rank} of run {attempt.run_id!r}"
    return _Process.parse(handle.metadata, where, attempt.store.url)


@contextlib.contextmanager
def _surroundings_of(run: RunSpec, rank: int, entrypoint: str | Callable[..., Any]) -> Iterator[None]:
    """Give this process the replica's environment for a block, and restore its own environment afterwards."""
    environ, argv, modules, replica = dict(os.environ), sys.argv, {*sys.modules}, find_replica()
    os.environ.pop(RUN_KEY, None)  # this key belongs to another run
    os.environ.pop(NOTIFY, None)  # the user's code does not need the URLs of notifications
    os.environ.update({**run.env, **run.credentials, RANK: str(rank)})
    try:
        with module_search.restored_search_path():
            yield
    finally:
        os.environ.clear()
        os.environ.update(environ)
        sys.argv = argv
        set_current_replica(replica)
        file = re.match(r"(.*\.py)(:\w+)?$", entrypoint) if isinstance(entrypoint, str) else None
        if file and (name := Path(file[1]).stem) not in modules:
            sys.modules.pop(name, None)  # so that the next launch imports the file again after an edit
