"""Replicas as processes on this machine, forked from a clean zygote and watched over by a supervisor."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from executors.attempt_records import PID, TICKS, Claim
from executors.entrypoint import check_entrypoint
from executors.errors import BackendError, EntrypointArgumentsError, EntrypointImportError, LaunchError, StoreError
from executors.found import FoundReplica, collect_rows, find_replica
from executors.local_launch import LocalLaunch, begin_attempt, log_file
from executors.logs import read_from, tail_lines
from executors.outcome import Outcome, record_outcome, request_cancel
from executors.process import is_alive, this_machine
from executors.protocol import ReplicaHandle, ReplicaStatus
from executors.records import Fields, find_record, number, text
from executors.run_record import Recordable
from executors.state import folder_of_run, local_store, remember, settle, state_dir, state_path
from executors.store import store_at
from executors.supervisor_lock import wake
from executors.task import MASK, RunSpec, create_run, new_run_id, split_rank_env
from executors.waiting import wait_until_terminal
from executors.zygote_client import zygote

MACHINE = re.compile(r"\S+ \S+ \S+")  # as `this_machine` names one
LONGEST_GRACE_S = 3600.0
PRELOAD = ("torch", "torch._dynamo")


class LocalProcessExecutor:
    """Runs replicas as local processes.

    They inherit the launcher's working directory, `sys.path` and environment as they are at the launch. Runs go on
    independently of each other; an attached run ends with its launcher, even when that is killed.

    Args:
        preload: modules that every replica finds imported already, because they are imported once, in the process
            that all are forked from. `()` for work without torch.
        max_parallel: how many replicas run at the same time; the others wait as `pending`. None: all.
        term_grace_s: seconds between SIGTERM, which runs a replica's `finally`, and SIGKILL.
        gpus: the GPUs to share out when `gpu=` is asked for, as in `CUDA_VISIBLE_DEVICES`. None: those of this machine.
    """

    backend_name = "local"
    supports_inter_replica_network = True
    recordable_options: ClassVar[Recordable] = {"max_parallel": int, "term_grace_s": float}

    def __init__(
        self,
        *,
        preload: Sequence[str] = PRELOAD,
        max_parallel: int | None = None,
        term_grace_s: float = 5.0,
        gpus: Sequence[str] | None = None,
    ) -> None:
        if max_parallel is not None and max_parallel < 1:
            raise ValueError(f"max_parallel must be at least 1, got max_parallel={max_parallel}.")
        if not 0 <= term_grace_s <= LONGEST_GRACE_S:
            raise ValueError(
                f"term_grace_s must be at least 0 and at most {LONGEST_GRACE_S:g}, got term_grace_s={term_grace_s}."
            )
        self.preload = tuple(preload)
        self.max_parallel = max_parallel
        self.term_grace_s = term_grace_s
        self.gpus = None if gpus is None else tuple(gpus)

    def __repr__(self) -> str:
        return f"LocalProcessExecutor(preload={self.preload}, max_parallel={self.max_parallel})"

    @property
    def options_to_keep(self) -> dict[str, Any]:
        """What a run is resumed with: the parallelism, and so the threads, of its launch."""
        options: dict[str, Any] = {"max_parallel": self.max_parallel, "term_grace_s": self.term_grace_s}
        if self.gpus is not None:
            options["gpus"] = list(self.gpus)
        if self.preload != PRELOAD:
            options["preload"] = list(self.preload)
        return options

    def warm_up(self) -> None:
        """Let the process that forks replicas begin its imports, without waiting for it."""
        if sys.platform == "linux":
            zygote(self.preload).start()

    def check_launch(
        self,
        n_replicas: int,
        entrypoint: str | Callable[..., Any],
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: float | None = 3600,
        secrets: Sequence[str] = (),
    ) -> None:
        """Refuse what cannot work, before anything is written or started.

        An entrypoint given by name is imported and its arguments are bound in a throw-away process.

        Raises:
            ValueError: `n_replicas`, `gpu` or `timeout` has a bad value, or a secret is not set.
            BackendError: not this platform, or too few GPUs.
            EntrypointError: the entrypoint cannot be found, imported, or called with these arguments.
        """
        if sys.platform != "linux":
            raise BackendError(f"The local backend needs Linux; this is {sys.platform}.")
        if n_replicas < 1:
            raise ValueError(f"n must be at least 1, got n={n_replicas}.")
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout must be more than 0 seconds, got timeout={timeout}.")
        if missing := [name for name in secrets if name not in os.environ]:
            raise ValueError(
                f"The secret {missing[0]!r} is not set. Local replicas inherit this environment: "
                "set it before the launch."
            )
        self._gpu_slots(gpu, n_replicas)
        self.warm_up()  # for a callable, its imports go on while the launch is written
        if not isinstance(entrypoint, str):
            return
        args, _ = split_rank_env(entrypoint_args)
        check_entrypoint(entrypoint, args)
        answer = zygote(self.preload).request(
            {"do": "check", "entrypoint": entrypoint, "args": dict.fromkeys(args), **_surroundings()}
        )
        if answer and "kind" not in answer:
            raise BackendError(f"Backend 'local' cannot fork replicas: {answer['error']}.")
        if answer.get("kind") == "arguments":
            raise EntrypointArgumentsError(answer["error"])
        if answer.get("error"):
            raise EntrypointImportError(answer["error"])

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: str | Callable[..., Any],
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: float | None = 3600,
        run: RunSpec | None = None,
    ) -> list[ReplicaHandle]:
        """Start the replicas and return their handles in rank order; see `ServerlessExecutor.launch_replicas`.

        Args:
            timeout: seconds; None for no limit.
            run: the run these replicas belong to, written already. None: a new one in the default store, attached.

        Raises:
            LaunchError: a replica could not be started; those before it were ended.
            RunExistsError: this machine knows a run of the same id in another store.

        Returns: the handles. Those of attempts that another process began first are left out, and left alone.
        """
        if run is None:
            self.check_launch(n_replicas, entrypoint, entrypoint_args, gpu=gpu, timeout=timeout)
            run = create_run(
                local_store(), new_run_id(), entrypoint, entrypoint_args, n_replicas, backend=self.backend_name
            )
            remember(run.run_id, run.store_url, run.task_digest, self.options_to_keep)
        settle(run.run_id, run.store_url, run.task_digest)
        launch = self._local_launch(run, gpu, timeout, state_dir())
        try:
            answer = zygote(self.preload).request({"do": "launch", "launch": launch.to_json()})
        except BaseException:  # it may have begun, and nobody would know of it
            with contextlib.suppress(StoreError):
                self._take_back(launch)
            raise
        if "error" in answer:
            rank = answer["rank"]
            who = "the replicas" if rank is None else f"replica {rank} of {run.world_size}"
            raise LaunchError(
                f"Backend 'local' could not start {who}: {answer['error']}. Those already started were ended.",
                rank=rank,
            )
        return [ReplicaHandle.from_json(text) for text in answer["handles"]]

    def _take_back(self, launch: LocalLaunch) -> None:
        """End what a launch that gave no answer has begun, and see that it begins no more.

        Attempts of other launches are left alone. The supervisor may still be at work: what it has not begun is begun
        here, in the name of a process that never existed, and ended.
        """
        run, why = launch.spec, "the launch was interrupted"
        store = store_at(run.store_url)
        for rank in run.ranks:
            nobodys = launch.handle(rank, os.getpid(), 0)
            standing = begin_attempt(store, nobodys)
            if standing.metadata.get("nonce") != launch.nonce:
                continue
            request_cancel(store, run.run_id, rank, run.attempt, why)
            if standing == nobodys:
                record_outcome(store, run.run_id, Outcome(rank, run.attempt, ReplicaStatus.CANCELLED, "cancelled"))

    def describe_launch(self, run: RunSpec, *, gpu: str | None = None, timeout: float | None = 3600) -> dict[str, Any]:
        """Return what `launch_replicas` would tell the run's supervisor, with the environment's values masked."""
        request = self._local_launch(run, gpu, timeout, state_path()).to_json()
        request["environ"] = dict.fromkeys(request["environ"], MASK)
        request["spec"]["env"] = dict.fromkeys(request["spec"]["env"], MASK)
        del request["nonce"], request["by"]  # those of the launch to come are others
        return {"preload": list(self.preload), **request}

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        """Return the replica's status. The first to find a replica and its supervisor gone writes it off as lost.

        Raises:
            UnknownHandleError: no such replica was ever launched.
        """
        found = find_replica(handle, self.backend_name)
        outcome = found.outcome()
        if outcome is not None:
            return outcome.status
        started = find_record(found.store, found.key("started.json"), Claim.parse)
        if _is_gone(_Watch.of(found), started):
            # Looked at again after its end: the supervisor's last act may have been to write the outcome.
            return (found.outcome() or found.write_off("its supervisor is gone")).status
        return ReplicaStatus.PENDING if started is None else ReplicaStatus.RUNNING

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        """Return the last lines of the replica's output, at most 4 MiB; from another machine, what its outcome kept."""
        found = find_replica(handle, self.backend_name)
        log = _log_file(found)
        if log is not None and log.is_file():
            return tail_lines(log, n_lines)[0].decode(errors="replace")
        outcome = found.outcome()
        return "".join(outcome.output_tail.splitlines(keepends=True)[-n_lines:]) if outcome else ""

    def read_logs(self, handle: ReplicaHandle, *, offset: int | None = None, n_lines: int = 200) -> tuple[bytes, int]:
        """Return output, and the offset behind it: from byte `offset` on, or the last `n_lines` when it is None.

        At most 4 MiB a call. What following a log needs.
        """
        path = _log_file(find_replica(handle, self.backend_name))
        if path is None:
            return b"", offset or 0
        return tail_lines(path, n_lines) if offset is None else read_from(path, offset)

    def cancel(self, handle: ReplicaHandle) -> None:
        """End a replica and everything it started: SIGTERM, `term_grace_s`, SIGKILL. Returns when it is gone."""
        found = find_replica(handle, self.backend_name)
        if found.outcome() is not None:
            return
        request_cancel(found.store, found.run_id, found.rank, found.attempt)
        folder = folder_of_run(found.run_id, found.store.url)
        is_woken = folder is not None and wake(folder, found.rank, found.launched)
        grace_s = _Watch.of(found).term_grace_s + 10.0 if is_woken else 0.0  # else it looks for itself every second
        wait_until_terminal(self.poll, [handle], timeout_s=grace_s)

    def collect(self, handles: list[ReplicaHandle], *, timeout: float | None = None) -> list[dict[str, Any]]:
        """Wait for the replicas' outcomes, at most `timeout` seconds, and return them in the order of `handles`."""
        return collect_rows(self.poll, self.backend_name, handles, timeout)

    def _local_launch(self, run: RunSpec, gpu: str | None, timeout: float | None, state: Path) -> LocalLaunch:
        return LocalLaunch(
            spec=run,
            state_dir=str(state),
            timeout_s=timeout,
            max_parallel=self.max_parallel,
            term_grace_s=self.term_grace_s,
            gpu_slots=self._gpu_slots(gpu, len(run.ranks)),
            **_surroundings(),
        )

    def _gpu_slots(self, gpu: str | None, n_replicas: int) -> list[str] | None:
        """Share the GPUs out: `CUDA_VISIBLE_DEVICES` of each place that a replica can run in."""
        if gpu is None:
            return None
        each = _gpus_each(gpu)
        available = _gpus_of_this_machine() if self.gpus is None else list(self.gpus)
        if not available:
            _warn_once(f"gpu={gpu!r}: this machine has no GPU; the replicas run on the CPU.")
            return None
        places = min(self.max_parallel or n_replicas, n_replicas)
        if places * each > len(available):
            raise BackendError(
                f"{places} replicas with {each} GPU each need {places * each} GPUs, this machine has {len(available)}. "
                f"Launch fewer, or give max_parallel={max(1, len(available) // each)}."
            )
        return [",".join(available[place * each : (place + 1) * each]) for place in range(places)]


def _surroundings() -> dict[str, Any]:
    """What a replica inherits of its launcher: as it is now, not as it was when the zygote started."""
    return {
        "cwd": os.getcwd(),
        "sys_path": [os.path.abspath(path) for path in sys.path],
        "environ": dict(os.environ),
    }


def _log_file(found: FoundReplica) -> Path | None:
    """Return where the log is, if this machine launched the run. The store has no say in which file is shown."""
    folder = folder_of_run(found.run_id, found.store.url)
    return None if folder is None else log_file(folder.parent, found.run_id, found.rank, found.launched)


@dataclass(frozen=True)
class _Watch:
    """Who watches over a replica, by what its handle says. Good for looking, and not for sending a signal there."""

    machine: str
    supervisor_pid: int
    supervisor_started: int
    term_grace_s: float

    @classmethod
    def of(cls, found: FoundReplica) -> _Watch:
        fields = Fields(found.metadata, f"the handle of rank {found.rank} of run {found.run_id!r}", found.store.url)
        return cls(
            fields.take("machine", text(1000, MACHINE)),
            fields.take("supervisor_pid", PID),
            fields.take("supervisor_started", TICKS),
            fields.take("term_grace_s", number(0.0, LONGEST_GRACE_S)),
        )


def _is_gone(watch: _Watch, started: Claim | None) -> bool:
    """Whether nobody is left who could write the outcome, as far as this machine can tell."""
    here, there = this_machine(), watch.machine
    if here != there:
        host, boot, _ = here.split(" ")
        return there.split(" ")[0] == host and there.split(" ")[1] != boot  # this host was restarted since
    if is_alive(watch.supervisor_pid, watch.supervisor_started):
        return False
    if started is None or started.pid is None or started.pid_started is None:
        return True
    return not is_alive(started.pid, started.pid_started)


def _gpus_each(gpu: str) -> int:
    name, _, count = gpu.partition(":")
    if not name or (count and not (count.isdigit() and int(count) > 0)):
        raise ValueError(f"gpu is a name and perhaps a count, as in 'H100' or 'H100:2', got {gpu!r}.")
    return int(count or 1)


def _gpus_of_this_machine() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [device for device in visible.split(",") if device.strip() not in ("", "-1")]
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return []
    return listed.stdout.split()


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=4)
