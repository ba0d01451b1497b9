"""`launch()`: check everything, write the run, start its replicas."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from executors.entrypoint import check_entrypoint
from executors.errors import RunExistsError, StoreError
from executors.outcome import Outcome, find_outcome, record_outcome, request_cancel
from executors.protocol import ReplicaHandle, ReplicaStatus, ServerlessExecutor
from executors.records import exists
from executors.registry import check_executor, get_executor, recordable_and_other_options, unregistered_path
from executors.replica import CONTRACT, FOR_THE_WORKER, TORCH_DISTRIBUTED, replica_key
from executors.run_record import MAX_WORLD_SIZE
from executors.shared_rendezvous import shared_rendezvous
from executors.state import local_store, locate, remember
from executors.store import Store, open_store
from executors.store.opening import address_of
from executors.task import StoredTask, check_run_id, create_run, describe, new_run_id, split_rank_env

if TYPE_CHECKING:
    from executors.run import Run

STRANGERS_TIMEOUT_S = 3600  # the protocol's default, for executors that cannot be told "no limit"
NEEDED_SOON = ("executors.run", "executors.store.file", "platformdirs")
STRANGERS_ENTRYPOINT = "executors.worker.call"  # what an executor that knows nothing of runs is given to call


def launch(
    executor: str | ServerlessExecutor,
    entrypoint: str | Callable[..., Any],
    n: int,
    *,
    args: Mapping[str, Any] | None = None,
    rendezvous: str | Path | None = None,
    run_id: str | None = None,
    gpu: str | None = None,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    secrets: Sequence[str] = (),
    seed: int | None = None,
    detach: bool = False,
    resume: bool = False,
    task_digest: str | None = None,
    trust_bucket: bool = False,
    chaos: Sequence[str] = (),
) -> Run:
    """Start `n` ranked replicas of an entrypoint.

    Everything is checked before anything is written or started.

    Args:
        executor: a backend's name, or an executor: ours, or any object with the five verbs.
        entrypoint: a callable, or `pkg.mod:f`, `pkg.mod.f`, `path/file.py:f`, `path/file.py` (its `main`).
        n: how many replicas.
        args: keyword arguments of the entrypoint; JSON values when it is given by name.
        rendezvous: the url of the store in which the run lives. None: a directory of this user.
        run_id: a name of your choice for the run. None: two words and four hex digits.
        gpu: a GPU per replica, as in "H100" or "H100:2".
        timeout: seconds each replica may run. None: no limit locally, one hour elsewhere.
        env: more environment variables of the replicas. Their values are never recorded.
        secrets: names of secrets that the backend hands to the replicas.
        seed: the replicas' generators are seeded from this and their rank. None: from the run id and their rank.
        detach: go on when this process ends. Otherwise the run ends with it.
        resume: bring back what ended of the run `run_id`, with the task it was launched with; see `resuming.resume`.
        task_digest, trust_bucket: who vouches for that task where another machine launched it; see `resuming.resume`.
        chaos: faults that the replicas are to suffer, as in "kill:rank=1,round=3"; local backend only, see `chaos`.

    Raises:
        ValueError, TypeError: a bad argument.
        BackendError: the backend cannot be used; `LaunchError` when it refused a replica.
        EntrypointError: the entrypoint cannot be found, imported, called with `args`, or shipped.
        RunExistsError: the run id is taken.
        StoreError: the rendezvous cannot be used.
    """
    if resume:
        if chaos:
            raise ValueError("A resumed run keeps the chaos it was launched with: leave chaos= away.")
        if run_id is None:
            raise ValueError("resume=True needs the run_id of the run to bring back.")
        from executors.known_runs import attach
        from executors.resuming import resume as bring_back
        from executors.trust import vouched_task

        found = attach(run_id, rendezvous=rendezvous, executor=executor)
        task = vouched_task(found, task_digest=task_digest, trust_bucket=trust_bucket)
        _Same(entrypoint, n, args, seed).check(task)
        _check_env(found.executor, True, env, secrets)
        return bring_back(
            found, gpu=gpu, timeout=timeout, env=env, secrets=secrets, detach=detach, task_digest=task.digest
        )
    if task_digest is not None or trust_bucket:
        raise ValueError("task_digest= and trust_bucket= go with resume=True: a new run's task is the one given.")
    return plan_launch(
        executor,
        entrypoint,
        n,
        args=args,
        rendezvous=rendezvous,
        run_id=run_id,
        gpu=gpu,
        timeout=timeout,
        env=env,
        secrets=secrets,
        seed=seed,
        detach=detach,
        chaos=chaos,
    ).start()


@dataclass(frozen=True)
class LaunchPlan:
    """A launch that was checked, and has neither written nor started anything."""

    executor: ServerlessExecutor
    entrypoint: str | Callable[..., Any]
    n: int
    args: Mapping[str, Any]
    rendezvous: str | Path | None
    run_id: str
    run_id_is_chosen: bool
    gpu: str | None
    timeout: float | None
    run_options: Mapping[str, Any]
    """What else `plan_run` takes: backend, env, secret_names, seed, detach, chaos, options."""

    @property
    def knows_runs(self) -> bool:
        """Whether the executor takes `run=`: ours do, a stranger's has the five verbs alone."""
        return "run" in inspect.signature(self.executor.launch_replicas).parameters

    def strangers_call(self, store_url: str) -> dict[str, Any]:
        """Return what an executor that knows nothing of runs is asked for: our worker as its entrypoint."""
        return {
            "n_replicas": self.n,
            "entrypoint": STRANGERS_ENTRYPOINT,
            "entrypoint_args": {"run": address_of(store_url, self.run_id)},
            "gpu": self.gpu,
            "timeout": STRANGERS_TIMEOUT_S if self.timeout is None else int(max(1, self.timeout)),
        }

    def start(self) -> Run:
        """Write the run and start its replicas. If that fails half-way, the run is left cancelled, not waiting."""
        from executors.run import Run

        store = local_store() if self.rendezvous is None else open_store(self.rendezvous)
        if self.run_id_is_chosen and (known := locate(self.run_id)) not in (None, store.url):
            raise RunExistsError(
                f"Run {self.run_id!r} exists at {known}. Choose another run id, or `replicas rm {self.run_id}`."
            )
        spec = create_run(store, self.run_id, self.entrypoint, self.args, self.n, **self.run_options)
        try:
            options = getattr(self.executor, "options_to_keep", {})
            remember(self.run_id, store.url, spec.task_digest, options, self.run_options.get("secret_names", ()))
            verb: Any = self.executor.launch_replicas  # the protocol does not know `run=`; ours do
            if self.knows_runs:
                handles = verb(self.n, self.entrypoint, self.args, gpu=self.gpu, timeout=self.timeout, run=spec)
            else:
                handles = self._start_on_a_stranger(store)
        except BaseException as error:
            with contextlib.suppress(StoreError):
                give_up(store, self.run_id, range(self.n), 0, error)
            raise
        return Run(store, self.run_id, executor=self.executor, handles=handles)

    def _start_on_a_stranger(self, store: Store) -> Sequence[Any]:
        if self.rendezvous is None:
            name = self.executor.backend_name
            print(f"replicas: the replicas of backend {name!r} must see {store.url}", file=sys.stderr)
        call = self.strangers_call(store.url)
        handles = self.executor.launch_replicas(
            call.pop("n_replicas"), call.pop("entrypoint"), call.pop("entrypoint_args"), **call
        )
        for rank, handle in enumerate(handles):
            if isinstance(handle, ReplicaHandle):
                store.put(replica_key(self.run_id, rank, 0, "handle.json"), handle.to_json().encode())
        return handles


def plan_launch(
    executor: str | ServerlessExecutor,
    entrypoint: str | Callable[..., Any],
    n: int,
    *,
    args: Mapping[str, Any] | None = None,
    rendezvous: str | Path | None = None,
    run_id: str | None = None,
    gpu: str | None = None,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    secrets: Sequence[str] = (),
    seed: int | None = None,
    detach: bool = False,
    chaos: Sequence[str] = (),
) -> LaunchPlan:
    """Check everything about a launch but its store. Takes and raises what `launch` does."""
    if isinstance(executor, str):
        executor = get_executor(executor)
    else:
        check_executor(executor)
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"n is an integer, got n={n!r}.")
    if n < 1:
        raise ValueError(f"n must be at least 1, got n={n!r}.")
    if n > MAX_WORLD_SIZE:
        raise ValueError(f"n must be at most {MAX_WORLD_SIZE}, got n={n!r}.")
    if not isinstance(entrypoint, str) and not callable(entrypoint):
        raise TypeError(f"entrypoint is a callable or the name of one, as in 'train.py:main', got {entrypoint!r}.")
    if not isinstance(args, Mapping | None):
        raise TypeError(f"args maps names to values, as in {{'steps': 100}}, got {args!r}.")
    if timeout is not None and not isinstance(timeout, int | float):
        raise TypeError(f"timeout is a number of seconds, got {timeout!r}.")
    args = dict(args or {})
    if str(rendezvous).startswith("memory:"):
        raise ValueError(f"rendezvous={str(rendezvous)!r} lives in this process alone; replicas could not see it.")
    if getattr(executor, "needs_shared_rendezvous", False):
        rendezvous = shared_rendezvous(executor.backend_name, rendezvous, entrypoint, n)
    knows_runs = "run" in inspect.signature(executor.launch_replicas).parameters
    if timeout is None:
        timeout = getattr(executor, "default_timeout_s", None if knows_runs else STRANGERS_TIMEOUT_S)
    _check_env(executor, knows_runs, env, secrets)
    if chaos:
        chaos = _check_chaos(executor, chaos, n)
    chosen_id = check_run_id(run_id) if run_id is not None else new_run_id()
    if hasattr(executor, "warm_up"):
        executor.warm_up()
        for module in NEEDED_SOON:  # meanwhile another process warms up
            importlib.import_module(module)
    check_launch = getattr(executor, "check_launch", None)
    if check_launch is not None:
        check_launch(n, entrypoint, args, gpu=gpu, timeout=timeout, secrets=secrets)
    elif isinstance(entrypoint, str):
        check_entrypoint(entrypoint, split_rank_env(args)[0])
    package = executor.package(entrypoint) if hasattr(executor, "package") else None
    options, unrecorded = recordable_and_other_options(executor)
    path = unregistered_path(executor)
    return LaunchPlan(
        executor,
        entrypoint,
        n,
        args,
        rendezvous,
        chosen_id,
        run_id is not None,
        gpu,
        timeout,
        {
            "backend": executor.backend_name,
            "env": env,
            "secret_names": secrets,
            "seed": seed,
            "detach": detach,
            "package": package,
            "chaos": chaos,
            "options": {
                **({} if path is None else {"executor": path}),
                "executor_options": options,
                "unrecorded_options": unrecorded,
                "gpu": gpu,
                "timeout_s": timeout,
            },
        },
    )


@dataclass(frozen=True)
class _Same:
    """What `launch(resume=True)` says of the task: all of it has to be as it was launched."""

    entrypoint: str | Callable[..., Any]
    n: int
    args: Mapping[str, Any] | None
    seed: int | None

    def check(self, task: StoredTask) -> None:
        """Refuse to go on with something else than what is asked for now; what was pickled is not looked into."""
        n, entrypoint = task.launched_with.world_size, task.launched_with.entrypoint
        if self.n != n or describe(self.entrypoint) != entrypoint:
            raise ValueError(
                f"Run {task.run_id!r} has {n} replicas of {entrypoint}; it cannot be resumed as {self.n} of "
                f"{describe(self.entrypoint)}."
            )
        differing = [] if self.seed in (None, task.record.seed) else ["seed"]
        if self.args is not None and isinstance(self.entrypoint, str):
            launched = task.record.args or {}
            given = json.loads(json.dumps(split_rank_env(self.args)[0]))
            differing += [name for name in {**launched, **given} if launched.get(name) != given.get(name)]
        if differing:
            raise ValueError(
                f"Run {task.run_id!r} goes on with what it was launched with, and {differing[0]!r} is another now. "
                "Leave args= and seed= away, or launch a new run."
            )


def _check_env(
    executor: ServerlessExecutor, knows_runs: bool, env: Mapping[str, str] | None, secrets: Sequence[str]
) -> None:
    if not knows_runs and (env or secrets):
        raise ValueError(
            f"Backend {executor.backend_name!r} takes no env= and no secrets=: values are never recorded, and its five "
            "verbs carry none. Set them where its replicas run."
        )
    for name, value in (env or {}).items():
        if not isinstance(value, str) or not name or "=" in name or "\0" in name + value:
            raise ValueError(f"env maps names to strings, got {name!r}: {type(value).__name__}.")
    for name in env or {}:
        if name in (*TORCH_DISTRIBUTED, *CONTRACT, *FOR_THE_WORKER):
            raise ValueError(f"env cannot set {name!r}: replicas get or lose it themselves, see the README.")


def _check_chaos(executor: ServerlessExecutor, chaos: Sequence[str], n: int) -> Sequence[str]:
    from executors.chaos import check_chaos

    if executor.backend_name != "local":
        raise ValueError(
            f"Backend {executor.backend_name!r} takes no chaos: faults are injected into local replicas only. "
            "Try it with --backend local."
        )
    if isinstance(chaos, str):
        raise TypeError(f"chaos is a list of specs, as in [{chaos!r}], got a string.")
    return check_chaos(chaos, n)


def give_up(store: Store, run_id: str, ranks: Iterable[int], attempt: int, error: BaseException) -> None:
    """Leave no attempt behind that waits for ever, and no replica that nobody asked to end."""
    why = f"The launch ended half-way: {str(error) or type(error).__name__}"
    for rank in ranks:
        if find_outcome(store, run_id, rank, attempt) is None:
            if not exists(store, replica_key(run_id, rank, attempt, "handle.json")):
                record_outcome(store, run_id, Outcome(rank, attempt, ReplicaStatus.FAILED, "start_failed", error=why))
            request_cancel(store, run_id, rank, attempt, why)  # also where no handle is: its starter may live on
