"""`launch()`: check everything, write the run, start its replicas."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from executors.attempt import Attempt, half_way
from executors.entrypoint import check_entrypoint, split_rank_env
from executors.errors import BackendError, RunExistsError, StoreError
from executors.launcher.at_exit import ends_with_this_process
from executors.launcher.checks import (
    check_chaos,
    check_directory,
    check_environment,
    check_kept,
    check_named,
    check_same,
    check_spares,
    check_working_directory,
    resolved,
    with_policy,
    with_tracker,
)
from executors.launcher.prices import affordable_s, usd_per_hour
from executors.native import GATHER_S, KeepsOptions, NativeExecutor, Package
from executors.policy import Restarts
from executors.protocol import ReplicaHandle, ServerlessExecutor
from executors.registry import check_executor, describe_executor, get_executor, import_path
from executors.run_index import NOTE, keep_key, local_store, locate, new_run_id, preparing, remember, state_path
from executors.shipping.script_header import check_python, script_header, script_of
from executors.store import Store, open_store
from executors.store.records import exists
from executors.store.url import address_of, default_rendezvous, directory_of, shared_rendezvous
from executors.supervision.decisions import DecisionLog
from executors.supervision.orders import order_cancel
from executors.task.create import LaunchRequest, create_run, plan_run

if TYPE_CHECKING:
    from executors.run.run import Run

PLAIN_TIMEOUT_S = 3600  # the protocol's default, for executors that cannot be told "no limit"
PLAIN_ENTRYPOINT = "executors.worker.call"  # what an executor that has the five verbs alone is given to call
NEEDED_SOON = ("executors.run.run", "executors.store.file", "platformdirs")


def launch(
    executor: str | ServerlessExecutor | None = None,
    entrypoint: str | Callable[..., Any] | None = None,
    n: int | None = None,
    *,
    args: Mapping[str, Any] | None = None,
    argv: Sequence[str] | None = None,
    rendezvous: str | Path | None = None,
    run_id: str | None = None,
    gpu: str | None = None,
    timeout: float | None = None,
    max_cost: float | None = None,
    env: Mapping[str, str] | None = None,
    secrets: Sequence[str] = (),
    seed: int | None = None,
    detach: bool = False,
    resume: bool = False,
    task_digest: str | None = None,
    trust_bucket: bool = False,
    chaos: Sequence[str] = (),
    min_replicas: int | None = None,
    gather_s: float = GATHER_S,
    fail_fast: bool = False,
    tracker: str | None = None,
    restarts: Restarts | int | str | None = None,
    hang_timeout: str | float | None = None,
    spares: int = 0,
    health_check: str | None = None,
    signed: bool = False,
    progress: bool = False,
    config: str | Path | bool | Sequence[str | Path] = False,
    profile: str | None = None,
) -> Run:
    """Start `n` ranked replicas of an entrypoint.

    Everything is checked before anything is written or started.

    Args:
        executor: a backend's name, or any object with the five verbs.
        entrypoint: a callable, or `pkg.mod:f`, `pkg.mod.f`, `path/file.py:f`, `path/file.py` (its `main`).
        n: how many replicas.
        args: keyword arguments of the entrypoint; JSON values when it is given by name.
        argv: run the file that the entrypoint names as a script, `__main__`, with these arguments. A file without a
            `main` is one also without them. Its result is None.
        rendezvous: the url of the store in which the run lives. None: a directory of this user.
        run_id: a name of your choice for the run. None: two words and four hex digits.
        gpu: a GPU per replica, as in "H100" or "H100:2".
        timeout: seconds each replica may run. None: no limit locally, one hour elsewhere.
        max_cost: US dollars that all replicas may cost together, as a limit of their time, where the backend tells
            prices. What is installed before the entrypoint starts comes on top.
        env: more environment variables of the replicas. Their values are never recorded.
        secrets: names of secrets that the backend hands to the replicas.
        seed: the replicas' generators are seeded from this and their rank. None: from the run id and their rank.
        detach: go on when this process ends. Otherwise the run ends with it.
        resume: bring back what ended of the run `run_id`, with the task it was launched with; see `resume.resume`.
        task_digest, trust_bucket: who vouches for that task where another machine launched it; see `resume.resume`.
        chaos: faults that the replicas are to suffer, as in "kill:rank=1,round=3"; local backend only, see `chaos`.
        min_replicas: start with so many when the others cannot be started, or not within `gather_s` seconds; these join
            when they come, unless `detach`. The run has succeeded when so many have. None: all of them.
        fail_fast: end the run at the first failure before anybody's first round. Otherwise the others train on.
        tracker: what gets the numbers of the replicas, too, while they train: "trackio", "wandb", "mlflow", or a class
            as "pkg.mod:Class"; see `report.trackers.Tracker`. One tracker run a rank; what fails there is a warning.
        restarts: bring back replicas that end, up to so many times each: a number, a text as "3/1h,oom=0", or a
            `Restarts`. 0: only those whose end is nobody's fault. None: nothing restarts.
        hang_timeout: how long a replica may go on without progress: seconds, "SOFT:HARD" as in "2m:3m", "off", or
            "auto": learned. With "auto" a replica is ended only where `restarts` is given.
        spares: start so many jobs more, which stand by for replicas that lose their containers; with `restarts`, on
            backends in a cloud.
        health_check: a function without arguments, as "pkg.mod:f", that each new process calls before the entrypoint,
            for 60 s at most. An exception, or False: this attempt ends as `start_failed`.
        signed: draw a key for this run, and let its replicas believe only what was made with it: whoever else can write
            to the rendezvous can stop the run, and not steer it. This machine keeps the key, for `resume`.
        progress: while this process waits for the run, draw bars with rate and time left, of the steps that replicas
            report; without a terminal, print a line now and then.
        config: take what is left at its default here from the settings that `replicas launch` would find here; files
            are read besides. False: read none.
        profile: use this profile of theirs.

    Raises:
        ValueError, TypeError: a bad argument.
        BackendError: the backend cannot be used; `LaunchError` when it refused a replica.
        EntrypointError: the entrypoint cannot be found, imported, called with `args`, or shipped.
        RunExistsError: the run id is taken.
        StoreError: the rendezvous cannot be used.
    """
    asked: dict[str, Any] = {
        "entrypoint": entrypoint,
        "n": n,
        "args": args,
        "argv": argv,
        "rendezvous": rendezvous,
        "run_id": run_id,
        "gpu": gpu,
        "timeout": timeout,
        "max_cost": max_cost,
        "env": env,
        "secrets": secrets,
        "seed": seed,
        "detach": detach,
        "chaos": chaos,
        "min_replicas": min_replicas,
        "gather_s": gather_s,
        "fail_fast": fail_fast,
        "tracker": tracker,
        "restarts": Restarts.of(restarts),
        "hang_timeout": None if hang_timeout is None else str(hang_timeout),
        "spares": spares,
        "health_check": health_check,
        "signed": signed,
    }
    if config is not False or profile is not None:
        from executors.launcher.launch_settings import filled

        executor, asked = filled(executor, asked, config, profile)
    if executor is None:
        raise TypeError("launch() needs an executor, an entrypoint and n, or config= with settings that say them.")
    request = LaunchRequest(**asked)
    if resume:
        run = _bring_back(request, executor, task_digest, trust_bucket)
    elif task_digest is not None or trust_bucket:
        raise ValueError("task_digest= and trust_bucket= go with resume=True: a new run's task is the one given.")
    else:
        request = named(request)
        with preparing(str(request.run_id)):
            run = plan_launch(request, executor).start()
    run.shows_progress = progress
    return ends_with_this_process(run, detach=request.detach)


def named(request: LaunchRequest) -> LaunchRequest:
    """Return the request with a run id."""
    return request if request.run_id is not None else replace(request, run_id=new_run_id())


@dataclass(frozen=True)
class LaunchPlan:
    """A launch that was checked, and has neither written nor started anything."""

    request: LaunchRequest
    """With everything that was left to the executor or to us filled in, but for `run_id`."""
    executor: ServerlessExecutor
    run_id: str
    package: Package | None

    def start(self, tell: Callable[[str], None] = lambda words: None) -> Run:
        """Write the run and start its replicas. If that fails half-way, the run is left cancelled, not waiting.

        Args:
            tell: gets a few words on how far the start is, where it takes long.
        """
        from executors.run.handles import keep_handles
        from executors.run.launch_hands import Recipe
        from executors.run.run import Run
        from executors.supervision.lease import hold_lease

        request, executor = self.request, self.executor
        store = local_store() if request.rendezvous is None else open_store(request.rendezvous)
        known = None if request.run_id is None else locate(self.run_id)
        if known is not None and (known != store.url or exists(store, f"{self.run_id}/run.json")):
            raise RunExistsError(
                f"Run {self.run_id!r} exists at {known}. Look at it with executors.attach({self.run_id!r}) or "
                f"`replicas status {self.run_id}`. Choose another run id, or `replicas rm {self.run_id}`."
            )
        spec = create_run(request, self.run_id, store, describe_executor(executor), self.package)
        lease = None
        try:
            options = executor.options_to_keep if isinstance(executor, KeepsOptions) else {}
            remember(self.run_id, store.url, spec.task_digest, options, request.secrets)
            keep_key(self.run_id, spec.key)
            handles: Sequence[Any]
            if isinstance(executor, NativeExecutor):
                limits: Any = {"gpu": request.gpu, "timeout": request.timeout}
                args = request.args or {}
                spec = replace(spec, lease_s=None if request.detach else executor.lease_s)
                lease = hold_lease(store, spec)
                started = executor.launch_replicas(request.n, request.entrypoint, args, **limits, run=spec, tell=tell)
                of_ranks = {handle.rank: handle for handle in started}
                handles = [of_ranks.get(rank) for rank in range(request.n)]
            else:
                handles = self._start_plainly(store)
        except BaseException as error:
            if lease is not None:
                lease.end()
            with contextlib.suppress(StoreError):
                for rank in range(request.n):
                    Attempt(store, self.run_id, rank).abandon(error)
                # No keeper goes on with it.
                order_cancel(DecisionLog(store, self.run_id), None, half_way(error))
            raise
        keep_handles(store, self.run_id, 0, handles)
        run = Run(store, self.run_id, executor=executor, handles=handles)
        if not request.detach and isinstance(executor, NativeExecutor):
            run.keep_here(Recipe(replace(spec, spares=0), request.entrypoint, limits), lease)
        return run

    def usd_per_hour(self) -> float | None:
        """Return what an hour of all replicas costs in US dollars; None: nobody tells, or not now."""
        with contextlib.suppress(BackendError):
            return usd_per_hour(self.executor, self.request.n + self.request.spares, self.request.gpu)
        return None

    def _start_plainly(self, store: Store) -> Sequence[Any]:
        """Start the replicas on an executor that has the five verbs alone."""
        if self.request.rendezvous is None:
            name = self.executor.backend_name
            print(f"replicas: the replicas of backend {name!r} must see {store.url}", file=sys.stderr)
        handles = self.executor.launch_replicas(**self._plain_call(store.url))
        for rank, handle in enumerate(handles):
            if isinstance(handle, ReplicaHandle):
                store.put(Attempt(store, self.run_id, rank).key("handle.json"), handle.to_json().encode())
        return handles

    def _plain_call(self, store_url: str) -> dict[str, Any]:
        """Return what an executor that has the five verbs alone is asked for: our worker as its entrypoint."""
        timeout = self.request.timeout
        return {
            "n_replicas": self.request.n,
            "entrypoint": PLAIN_ENTRYPOINT,
            "entrypoint_args": {"run": address_of(store_url, self.run_id)},
            "gpu": self.request.gpu,
            "timeout": PLAIN_TIMEOUT_S if timeout is None else int(max(1, timeout)),
        }

    def dry_run(self) -> dict[str, Any]:
        """Check what `start` would still check, and return as JSON what it would write and ask for.

        Values of environment variables are masked.

        Raises:
            RunExistsError: the chosen run id is taken.
            StoreError: the rendezvous cannot be used.
            EntrypointError: the task cannot travel.
        """
        request, executor, url = self.request, self.executor, self._check_store()
        new = plan_run(request, self.run_id, url, describe_executor(executor), self.package)
        if isinstance(executor, NativeExecutor):
            requirements = () if self.package is None else self.package.requirements
            asked = executor.describe_launch(
                new.spec, gpu=request.gpu, timeout=request.timeout, requirements=requirements
            )
        else:
            asked = self._plain_call(url)
        return {
            "dry_run": True,
            "run_id": self.run_id,
            "url": address_of(url, self.run_id),
            "executor": import_path(executor),
            "timeout_s": request.timeout,
            "usd_per_hour": self.usd_per_hour(),
            "run.json": new.record,
            "task/task.json": json.loads(new.task),
            "request": asked,
        }

    def _check_store(self) -> str:
        """Check the rendezvous and the run id, leaving a directory as it is; return the url."""
        known_here = state_path() / self.run_id
        if (known_here / "run.json").is_file() or (known_here / NOTE).is_file():
            raise RunExistsError(f"Run {self.run_id!r} exists. Choose another run id, or `replicas rm {self.run_id}`.")
        rendezvous = state_path() if self.request.rendezvous is None else self.request.rendezvous
        directory = directory_of(rendezvous)
        if directory is None:
            store = open_store(rendezvous)
            taken, url = exists(store, f"{self.run_id}/run.json"), store.url
        else:
            check_directory(directory.absolute())
            taken, url = (directory / self.run_id / "run.json").is_file(), directory.absolute().as_uri()
        if taken:
            raise RunExistsError(f"Run {self.run_id!r} exists at {url}. Choose another run id.")
        return url


def plan_launch(request: LaunchRequest, executor: str | ServerlessExecutor) -> LaunchPlan:
    """Check everything about a launch but its store. Raises what `launch` does."""
    check_working_directory()
    executor = get_executor(executor) if isinstance(executor, str) else check_executor(executor)
    if request.min_replicas is None and request.gather_s != GATHER_S:
        raise ValueError("gather_s= (--gather) waits for what min_replicas= can do without: give both.")
    request = resolved(request)
    native = executor if isinstance(executor, NativeExecutor) else None
    rendezvous, timeout = request.rendezvous, request.timeout
    if native is not None and native.needs_shared_rendezvous:
        rendezvous = shared_rendezvous(native.backend_name, rendezvous, request.entrypoint, request.n)
    if request.max_cost is not None:
        affordable = affordable_s(executor, request.n + request.spares, request.gpu, request.max_cost)
        timeout = affordable if timeout is None else min(timeout, affordable)
    if timeout is None:
        timeout = PLAIN_TIMEOUT_S if native is None else native.default_timeout_s
    check_environment(executor, request)
    request = with_policy(executor, request)
    if (script := script_of(request.entrypoint)) is not None:
        check_python(script_header(script), script)
    check_spares(executor, request)
    check_named(request)
    chaos = check_chaos(executor, request) if request.chaos else ()
    request = replace(request, rendezvous=rendezvous, timeout=timeout, chaos=chaos)
    package = None
    args = request.args or {}
    if native is not None:
        native.warm_up()
        for module in NEEDED_SOON:  # meanwhile another process warms up
            importlib.import_module(module)
        native.check_launch(
            request.n, request.entrypoint, args, gpu=request.gpu, timeout=timeout, secrets=request.secrets
        )
        package = native.package(request.entrypoint)
        if package is not None and rendezvous is None:  # for other machines, which see directories of this one
            request = replace(request, rendezvous=default_rendezvous())
        if package is not None and request.tracker is not None:
            package = with_tracker(package, request.tracker)
    elif isinstance(request.entrypoint, str):
        check_entrypoint(request.entrypoint, split_rank_env(args)[0])
    return LaunchPlan(request, executor, request.run_id or new_run_id(), package)


def _bring_back(
    request: LaunchRequest, executor: str | ServerlessExecutor, task_digest: str | None, trust_bucket: bool
) -> Run:
    """Resume a run as `launch(resume=True)` does."""
    given = request.args if request.argv is None else request.argv
    request = resolved(request) if given is not None else replace(resolved(request), args=None)
    check_kept(request)
    if request.run_id is None:
        raise ValueError("resume=True needs the run_id of the run to bring back.")
    from executors.resume import resume
    from executors.run.lookup import attach
    from executors.run.recipe import vouched_task

    run = attach(request.run_id, rendezvous=request.rendezvous, executor=executor)
    task = vouched_task(run, task_digest=task_digest, trust_bucket=trust_bucket)
    check_same(request, task)
    check_environment(run.executor, request)
    return resume(
        run,
        gpu=request.gpu,
        timeout=request.timeout,
        gather_s=None if request.gather_s == GATHER_S else request.gather_s,
        env=request.env,
        secrets=request.secrets,
        detach=request.detach,
        restarts=request.restarts,
        hang_timeout=request.hang_timeout,
        task_digest=task.digest,
    )
