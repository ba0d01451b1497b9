"""LocalProcessExecutor: runs replicas as processes of this machine, forked from a clean process, under a supervisor."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from executors.attempt import TICKS, Attempt, Claim, collect_rows
from executors.attempt.outcome import PID
from executors.attempt.pauses import wait_until_terminal
from executors.backend import Backend, Observation, PendingReplica, Recordable, SupervisorStatus, no_progress
from executors.backends.local.local_log import open_local_log
from executors.backends.local.preload import (
    AUTO,
    PRELOAD,
    default_preload,
    imports_at_the_top,
    note_imports,
    noted_imports,
)
from executors.backends.local.request import LocalLaunch, log_file, surroundings
from executors.backends.local.zygote_client import ZygoteClient, zygote
from executors.errors import BackendError, EntrypointArgumentsError, EntrypointImportError, LaunchError, StoreError
from executors.logs import last_of
from executors.logs.log import Log
from executors.masking import MASK
from executors.process import CAN_SUPERVISE, is_alive, system_name, this_machine
from executors.protocol import Outcome, ReplicaHandle, ReplicaStatus
from executors.registry.run_index import claim_run_folder, folder_of_run, state_dir
from executors.run.new_run import write_new_run
from executors.settings.run_spec import StartSpec
from executors.store.record_names import CLAIM
from executors.store.records import Record, checked, nullable, number, text
from executors.store.state_folder import state_path
from executors.supervisor.supervisor_lock import wake
from executors.task.arguments import split_rank_env
from executors.task.command import Command
from executors.task.entrypoint import check_entrypoint
from executors.task.launch_request import LaunchRequest
from executors.task.stored import PYTHON

MACHINE = re.compile(r"\S+ \S+ \S+")  # as `this_machine` names one
LONGEST_GRACE_S = 3600.0
CHOOSE_PRELOAD = "To fork them, remove it from the backend's option preload."


# More than 20 methods: it implements the whole interface of a Backend.
class LocalProcessExecutor(Backend):
    """Runs replicas as processes on this machine.

    Replicas inherit the launcher's working directory, `sys.path` and environment as they are at the launch. Runs
    are independent of each other. An attached run ends with its launcher, even if the launcher is killed.

    Args:
        preload: the modules that are imported once, in the process from which all replicas are forked. Default: torch.
            Use `()` for work without torch. "auto" is torch and the modules that the entrypoint's file imports at its
            top. These are preloaded from the second launch of the file on, if their import takes more than 0.3 s.
        max_parallel: the number of replicas that run at the same time. The others wait as `pending`. Default: all.
        term_grace_s: the seconds between SIGTERM, which runs a replica's `finally`, and SIGKILL. Default 5.
        gpus: the GPUs for replicas that ask for `gpu=`, as in `CUDA_VISIBLE_DEVICES`. Default: all GPUs of this
            machine. A replica gets GPUs that no living replica of its run has, also when it is resumed or added.

    Raises:
        ValueError: an option has a wrong value.

    Example:
        executor = LocalProcessExecutor(max_parallel=2)
        executor.warm_up()
        launch(executor, train, n=8)
    """

    backend_name = "local"
    supports_inter_replica_network = True
    needs_shared_rendezvous = False
    ends_with_launcher = True
    ships_code = False
    recordable_options: ClassVar[Recordable] = {"max_parallel": int, "term_grace_s": float}

    def __init__(
        self,
        *,
        preload: Sequence[str] | str = PRELOAD,
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
        if isinstance(preload, str) and preload != AUTO:
            raise ValueError(
                f"preload must be a list of modules such as ['torch'], or 'auto', got preload={preload!r}."
            )
        self.finds_imports = preload == AUTO
        self.preload = default_preload() if preload in (AUTO, PRELOAD) else tuple(preload)
        self._measured: dict[str, dict[str, Any]] = {}
        """The measured imports of each entrypoint's file, from the check of the entrypoint."""
        self.max_parallel = max_parallel
        self.term_grace_s = term_grace_s
        self.gpus = None if gpus is None else tuple(gpus)

    def __repr__(self) -> str:
        return f"LocalProcessExecutor(preload={self.preload}, max_parallel={self.max_parallel})"

    @property
    def options_to_keep(self) -> dict[str, Any]:
        """The options for a resumed run. They keep the number of parallel replicas, and so of torch threads."""
        options: dict[str, Any] = {"max_parallel": self.max_parallel, "term_grace_s": self.term_grace_s}
        if self.gpus is not None:
            options["gpus"] = list(self.gpus)
        if self.finds_imports:
            options["preload"] = AUTO
        elif self.preload != default_preload():
            options["preload"] = list(self.preload)
        return options

    @property
    def python_of_replicas(self) -> str:
        """The version of this Python, because replicas are forked from it."""
        return PYTHON

    def warm_up(self, entrypoint: str | Callable[..., Any]) -> None:
        """Start the process that forks replicas, and do not wait for its imports.

        Args:
            entrypoint: the entrypoint of the launch.
        """
        if CAN_SUPERVISE and not self.finds_imports:
            self._zygote(entrypoint).start()

    def _zygote(self, entrypoint: object, env: Mapping[str, str] | None = None) -> ZygoteClient:
        """Return the zygote that forks the replicas of an entrypoint.

        With "auto", a zygote that has imported the user's modules is used only if replicas have this process's
        environment, because imports may read variables. A command is a program of its own, so the worker that starts
        it needs no module of the preload list.
        """
        if isinstance(entrypoint, Command):
            return zygote(())
        noted = noted_imports(entrypoint) if self.finds_imports and isinstance(entrypoint, str) else ()
        found = zygote((*self.preload, *noted))
        return zygote(self.preload) if noted and (env or not found.has_this_environment) else found

    def check_launch(self, request: LaunchRequest) -> None:
        """Raise an error for a launch that cannot work, before anything is written or started; see
        `Backend.check_launch`.

        An entrypoint given by name is imported and its arguments are bound in a throw-away process.
        """
        _refuse_other_systems()
        entrypoint, settings = request.entrypoint, request.settings
        timeout = settings.timeout
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout must be more than 0 seconds, got timeout={timeout}.")
        if missing := [name for name in settings.secrets if name not in os.environ]:
            advice = "Local replicas inherit this environment: set it before the launch."
            raise ValueError(f"The secret {missing[0]!r} is not set. {advice}")
        self._gpu_slots(settings.gpu, settings.n)
        forks = self._zygote(entrypoint)
        forks.start()  # for a callable, its imports continue while the records of the launch are written
        if not isinstance(entrypoint, str):
            return
        args, _ = split_rank_env(request.args or {})
        check_entrypoint(entrypoint, args)
        imports = imports_at_the_top(entrypoint) if self.finds_imports else []
        question = {"do": "check", "entrypoint": entrypoint, "args": dict.fromkeys(args), "imports": imports}
        answer = forks.request({**question, **surroundings()})
        if "error" in answer and "kind" not in answer:
            raise BackendError(f"Backend 'local' cannot fork replicas: {answer['error']}.")
        if "error" in answer:
            errors = {"arguments": EntrypointArgumentsError, "import": EntrypointImportError}
            raise errors[answer["kind"]](answer["error"])
        self._measured[entrypoint] = answer["measured"]

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: str | Callable[..., Any],
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: int | None = 3600,
    ) -> list[ReplicaHandle]:
        """Write an attached run of this user, and start its replicas; see `ServerlessExecutor.launch_replicas`.

        If `timeout` is None, there is no time limit.
        """
        _refuse_other_systems()
        request = LaunchRequest.of(entrypoint, n=n_replicas, args=entrypoint_args, gpu=gpu, timeout=timeout)
        return self.start_ranks(write_new_run(self, request))

    def start_ranks(self, start: StartSpec, on_progress: Callable[[str], None] = no_progress) -> list[ReplicaHandle]:
        """Let a supervisor start the replicas; see `Backend.start_ranks`.

        Raises:
            LaunchError: a replica could not be started; those before it were ended.
            RunExistsError: this machine knows a run of the same id in another store.
        """
        _refuse_other_systems()  # also here, because a resume and an addition are launched without that check
        run, entrypoint = start.spec, start.entrypoint
        claim_run_folder(run.run_id, run.store_url, run.task_digest)
        launch = self._local_launch(start, state_dir())
        try:
            answer = self._zygote(entrypoint, run.env).request({"do": "launch", "launch": launch.to_json()})
        except BaseException:  # the supervisor may have begun attempts for which no caller has a handle
            with contextlib.suppress(StoreError):
                self._take_back(launch)
            raise
        if "error" in answer:
            rank = answer["rank"]
            who = "the replicas" if rank is None else f"replica {rank} of {run.world_size}"
            why = answer["error"].rstrip(".")
            raise LaunchError(
                f"Backend 'local' could not start {who}: {why}. Those already started were ended.",
                rank=rank,
            )
        if note := answer.get("note"):  # once for each launch, in the user's terminal
            print(f"replicas: {note} {CHOOSE_PRELOAD}", file=sys.stderr)
        measured = self._measured.pop(str(entrypoint), None)
        if self.finds_imports and measured is not None:
            note_imports(str(entrypoint), measured)
            self._zygote(entrypoint).start()  # for the next launch in this process
        return [ReplicaHandle.from_json(text) for text in answer["handles"]]

    def _take_back(self, launch: LocalLaunch) -> None:
        """End the attempts of a launch that gave no answer, and make sure that no more are begun.

        The supervisor of the launch may still run. So this method itself claims the attempts that the supervisor has
        not begun, with a handle of a process that never existed, and then ends them. Attempts of other launches are not
        changed.
        """
        for rank in launch.spec.ranks:
            attempt = launch.attempt(rank)
            placeholder = launch.handle(attempt, os.getpid(), 0)
            found = launch.begin(attempt, placeholder)
            if found.metadata.get("nonce") != launch.nonce:
                continue
            attempt.request_cancel("the launch was interrupted")
            if found == placeholder:
                attempt.record(attempt.new_outcome(ReplicaStatus.CANCELLED, "cancelled"))

    def describe_start(self, start: StartSpec, requirements: Sequence[str] = ()) -> dict[str, Any]:
        """Return what `start_ranks` would send to the run's supervisor, with the environment's values masked."""
        request = self._local_launch(start, state_path()).to_json()
        request["environ"] = dict.fromkeys(request["environ"], MASK)
        request["spec"]["env"] = dict.fromkeys(request["spec"]["env"], MASK)
        request["spec"]["key"] = start.spec.key and MASK
        request["spec"]["notify"] = [MASK] * len(start.spec.notify)
        # These differ in each launch. Whether a launch forks is only known to its first process.
        for name in ("nonce", "by", "preload", "launcher_pid", "launcher_started"):
            del request[name]
        return {"preload": AUTO if self.finds_imports else list(self.preload), **request}

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        """Return the replica's status. If the replica and its supervisor are gone, this records it as lost.

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

    def supervisors(self, replicas: Sequence[PendingReplica]) -> list[SupervisorStatus]:
        """Return which supervisors of replicas are alive; see `Backend.supervisors`."""
        named = [(Attempt.from_handle(each.handle, self.backend_name), each.handle) for each in replicas]
        watches = [(_Watch.of(attempt, handle), attempt) for attempt, handle in named]
        return [
            SupervisorStatus(watch.is_supervised(attempt), launcher_is_gone=watch.launcher_is_gone)
            for watch, attempt in watches
        ]

    def _conclude(self, attempt: Attempt, handle: ReplicaHandle) -> Outcome | None:
        """Record a replica as lost if it and its supervisor are gone, and it has left no outcome."""
        if not _Watch.of(attempt, handle).is_gone(attempt):
            return None
        # The outcome is read again: the supervisor may have written it just before its end.
        return attempt.outcome() or attempt.record_lost("its supervisor is gone")

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        """Return the last lines of the replica's output, at most 4 MiB.

        If this machine does not have the file, the copy in the store is read.
        """
        attempt, handle = Attempt.of_handle(handle, self.backend_name)
        if text := self.open_log(handle).tail(n_lines):
            return text
        outcome = attempt.outcome()
        return last_of(outcome.output_tail, n_lines) if outcome else ""

    def open_log(self, handle: ReplicaHandle) -> Log:
        """Return the log of one attempt; see `Backend.open_log`."""
        attempt = Attempt.from_handle(handle, self.backend_name)
        # The path of the file comes from this machine's notes, and never from the store, which others may write to.
        folder = folder_of_run(attempt.run_id, attempt.store.url)
        path = None if folder is None else log_file(folder.parent, attempt)
        return open_local_log(attempt, path, handle.metadata.get("machine") == this_machine())

    def cancel(self, handle: ReplicaHandle) -> None:
        """End a replica and its child processes: SIGTERM, `term_grace_s`, SIGKILL. The call returns when they have
        ended.
        """
        attempt, newest = Attempt.of_handle(handle, self.backend_name)
        if attempt.outcome() is not None:
            return
        attempt.request_cancel()
        folder = folder_of_run(attempt.run_id, attempt.store.url)
        is_woken = folder is not None and wake(folder, attempt.rank, newest.metadata["attempt"])
        # A supervisor that cannot be woken finds the marker at its next look. This call does not wait for that.
        grace_s = _Watch.of(attempt, newest).term_grace_s + 10.0 if is_woken else 0.0
        wait_until_terminal(self.poll, [handle], timeout_s=grace_s)

    def collect(self, handles: list[ReplicaHandle], *, timeout: float | None = None) -> list[dict[str, Any]]:
        """Wait for the replicas' outcomes, at most `timeout` seconds, and return them in the order of `handles`."""
        return collect_rows(self.poll, self.backend_name, handles, timeout)

    def _local_launch(self, start: StartSpec, state: Path) -> LocalLaunch:
        return LocalLaunch(
            spec=start.spec,
            state_dir=str(state),
            timeout_s=start.timeout_s,
            max_parallel=self.max_parallel,
            term_grace_s=self.term_grace_s,
            gpu=start.gpu,
            gpu_slots=self._gpu_slots(start.gpu, len(start.ranks)),
            **surroundings(),
        )

    def _gpu_slots(self, gpu: str | None, n_replicas: int) -> list[str] | None:
        """Divide the GPUs of this machine. Each slot is the `CUDA_VISIBLE_DEVICES` of one replica."""
        if gpu is None:
            return None
        name, _, count = gpu.partition(":")
        if not name or (count and not (count.isdigit() and int(count) > 0)):
            raise ValueError(f"gpu must be a name, with or without a count, as in 'H100' or 'H100:2', got gpu={gpu!r}.")
        each = int(count or 1)
        available = _gpus_of_this_machine() if self.gpus is None else list(self.gpus)
        if not available:
            _warn(f"gpu={gpu!r}: this machine has no GPU, so the replicas run on the CPU.")
            return None
        n_parallel = min(self.max_parallel or n_replicas, n_replicas)
        if each > len(available):
            raise BackendError(
                f"A replica with {each} GPUs needs more than this machine has, which is {len(available)}. Use "
                f"fewer, as in gpu='{name}:{len(available)}'."
            )
        if n_parallel * each > len(available):
            raise BackendError(
                f"{n_parallel} replicas with {each} GPU each need {n_parallel * each} GPUs, but this machine has "
                f"{len(available)}. Launch fewer, or set max_parallel={len(available) // each}."
            )
        return [",".join(available[slot * each : (slot + 1) * each]) for slot in range(len(available) // each)]


@dataclass(frozen=True)
class _Watch(Record):
    """The supervisor of a replica, from its handle.

    Another user may have written the handle, so its pid gets no signal.
    """

    machine: str = checked(text(1000, MACHINE))
    supervisor_pid: int = checked(PID)
    supervisor_started: int = checked(TICKS)
    term_grace_s: float = checked(number(0.0, LONGEST_GRACE_S))
    launcher_pid: int | None = checked(nullable(PID), None)
    """The launcher of an attached run."""
    launcher_started: int | None = checked(nullable(TICKS), None)

    @classmethod
    def of(cls, attempt: Attempt, handle: ReplicaHandle) -> _Watch:
        where = f"the handle of rank {attempt.rank} of run {attempt.run_id!r}"
        return cls.parse(handle.metadata, where, attempt.store.url)

    def is_gone(self, attempt: Attempt) -> bool:
        """True if no process is left that could write the attempt's outcome, as far as this machine can see."""
        if self.is_supervised(attempt):
            return False
        if self.machine != this_machine():
            return True
        claim = attempt.find(CLAIM, Claim.parse)
        if claim is None or claim.pid is None or claim.pid_started is None:
            return True
        return not is_alive(claim.pid, claim.pid_started)

    @property
    def launcher_is_gone(self) -> bool:
        """True if the run is attached, its launcher has ended, and this machine can see that."""
        if self.launcher_pid is None or self.launcher_started is None:
            return False
        here, there = this_machine().split(" "), self.machine.split(" ")
        if here[:2] != there[:2]:  # another host, which this one cannot see, or this host before a restart
            return here[0] == there[0]
        return here == there and not is_alive(self.launcher_pid, self.launcher_started)

    def is_supervised(self, attempt: Attempt) -> bool:
        """Return True if the supervisor is alive, as far as this machine can see.

        Args:
            attempt: the attempt.
        """
        here, there = this_machine(), self.machine
        if here == there:
            return is_alive(self.supervisor_pid, self.supervisor_started)
        (host, boot, _), (its_host, its_boot, _) = here.split(" "), there.split(" ")
        is_restarted = host == its_host and boot != its_boot
        # Another machine may have the same name. It is this machine only if this machine's notes have the run.
        return not is_restarted or folder_of_run(attempt.run_id, attempt.store.url) is None


def _refuse_other_systems() -> None:
    """Check that supervisors of local replicas can run on this system.

    Raises:
        BackendError: they cannot.
    """
    if not CAN_SUPERVISE:
        raise BackendError(
            f"Backend 'local' needs the package psutil on {system_name()}, and it is not installed. Install it with "
            "pip install psutil, or use another backend."
        )


def _gpus_of_this_machine() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [device for device in visible.split(",") if device.strip() not in ("", "-1")]
    from executors.worker.probe import nvidia_smi

    return [line.strip() for line in nvidia_smi("--query-gpu=index", "--format=csv,noheader")]


@functools.cache  # so that each message is shown once
def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=4)
