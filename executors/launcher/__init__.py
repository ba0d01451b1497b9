"""`launch()`: check everything, write the run, start its replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from executors.launcher.at_exit import ends_with_this_process
from executors.launcher.checks import check_environment, check_kept, check_same, resolved
from executors.launcher.launch_plan import LaunchPlan as LaunchPlan
from executors.launcher.launch_plan import plan_launch as plan_launch
from executors.launcher.parts import executor_of, parts_of, total_of
from executors.protocol import ServerlessExecutor
from executors.registry import get_executor
from executors.run.run_index import preparing
from executors.settings import GATHER_S
from executors.settings.policy import Restarts
from executors.store.url import new_run_id
from executors.task.entrypoint import check_nothing_loads
from executors.task.launch_request import LaunchRequest

if TYPE_CHECKING:
    from executors.run.run import Run

NOT_REQUESTED = ("executor", "resume", "task_digest", "trust_bucket", "progress", "config", "profile")
"""Parameters of `launch` that are not part of the request."""


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
    start_timeout: str | float | None = None,
    spares: int = 0,
    health_check: str | None = None,
    signed: bool = False,
    from_run: str | None = None,
    from_step: int | None = None,
    progress: bool = False,
    config: str | Path | bool | Sequence[str | Path] = False,
    profile: str | None = None,
) -> Run:
    """Start `n` ranked replicas of an entrypoint.

    Everything is checked before anything is written or started.

    Args:
        executor: a backend's name, or any object with the five verbs; or several backends, each with its number of
            replicas, as in "slurm:4,modal:4": these need nothing in common but the rendezvous.
        entrypoint: a callable, or `pkg.mod:f`, `pkg.mod.f`, `path/file.py:f`, `path/file.py` (its `main`).
        n: how many replicas. With several backends it may be left out.
        args: keyword arguments of the entrypoint; JSON values when it is given by name. In texts, also in dicts, lists
            and tuples, each replica replaces `${rank}`, `${run_id}`, `${attempt}` and `${world_size}` by its own;
            `$${rank}` is the text `${rank}`, and any other `$` stays as it is.
        argv: run the file or module that the entrypoint names as a script, with these arguments, in which each replica
            fills in placeholders as in `args`. Its result is None. A file whose part below `if __name__ == "__main__"`
            does more than call `main()` is run as a script without arguments, too; see ADR 0044.
        rendezvous: the url of the store in which the run lives. None: a directory of this user.
        run_id: a name of your choice for the run. None: two words and four hex digits.
        gpu: a GPU per replica, as in "H100" or "H100:2".
        timeout: seconds each replica may run. None: one hour in a cloud, else a cluster's own limit, or none.
        max_cost: US dollars that all replicas may cost together, as a limit of their time, where the backend tells
            prices. A replica that is started again, also by `resume`, gets what is left of its share. The limit counts
            from the container's start, with what is installed there. What is added to the run comes on top.
        env: more environment variables of the replicas, with placeholders as in `args`. Their values are never
            recorded.
        secrets: names of secrets that the backend hands to the replicas.
        seed: the replicas' generators are seeded from this and their rank. None: from the run id and their rank.
        detach: go on when this process ends. Otherwise the run ends with it; on an executor that has the five verbs
            alone, unless a signal ends this process, such as SIGTERM or SIGKILL: it cancels the replicas at its exit.
        resume: bring back what ended of the run `run_id`, with the task it was launched with; see `resume.resume`.
        task_digest, trust_bucket: who vouches for that task where another machine launched it; see `resume.resume`.
        chaos: faults that the replicas are to suffer, as in "kill:rank=1,round=3"; local backend only, see `chaos`.
        min_replicas: start with so many when the others cannot be started, or not within `gather_s` seconds; these join
            when they come, unless `detach`. The run has succeeded when so many have. None: all of them.
        fail_fast: end the run at the first failure before anybody's first round. Otherwise the others train on.
        tracker: what gets the numbers of the replicas, too, while they train: "trackio", "wandb", "mlflow", or a class
            as "pkg.mod:Class"; see `report.trackers.Tracker`. One tracker run a rank; what fails there is a warning.
        restarts: bring back replicas that end, up to so many times each: a number, a text as "3/1h,oom=0", or a
            `Restarts`. 0: only those whose end is nobody's fault. None: only those whose machine the service took back,
            while this process waits for the run, and if the service tells that. "none": nothing restarts.
        hang_timeout: how long a replica may run without progress: seconds, "SOFT:HARD" as in "2m:3m", "off", or "auto".
            With "auto" the limit is a minute for an idle replica, and 30 minutes for a replica that uses the processor,
            a disk or the network. It grows with the pauses that the replica has made. It ends a replica only if
            `restarts` is given.
        start_timeout: how long a replica may take from its start to its first progress: seconds, a text such as "20m",
            or "auto". None, the default, means "auto". "auto" is five times a number in `hang_timeout`, and at least a
            minute. Without such a number, a replica that is idle for 30 minutes before its first progress is ended if
            `restarts` is given.
        spares: start so many jobs more, which stand by for replicas that lose their containers; with `restarts`, on
            backends in a cloud.
        health_check: a function without arguments, as "pkg.mod:f", that each new process calls before the entrypoint,
            for 60 s at most. An exception, or False: this attempt ends as `start_failed`.
        signed: draw a key for this run, and let its replicas believe only what was made with it: whoever else can write
            to the rendezvous can stop the run, and not steer it. This machine keeps the key, for `resume`.
        from_run: begin with the model and the outer momentum of another run, given by its id or address. The new run
            has its own entrypoint, `n`, step 0 and total. Its `DiLoCo` has to train the same parameters, by name and
            shape. That run may still train, and its store is needed until the new run has begun. If it is signed, the
            new run is signed with its key.
        from_step: take the newest round of that run at or before this step. None: its newest round.
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
    asked: dict[str, Any] = {name: value for name, value in locals().items() if name not in NOT_REQUESTED}
    check_nothing_loads()
    if config is not False or profile is not None:
        from executors.launcher.launch_settings import filled

        executor, asked = filled(executor, asked, config, profile)
    if executor is None:
        raise TypeError("launch() needs an executor, an entrypoint and n, or config= with settings that say them.")
    if isinstance(executor, str):
        asked["n"] = total_of(executor, n)
        executor = executor_of(executor, get_executor) if parts_of(executor) else executor
    request = LaunchRequest.of(**asked)
    if resume:
        run = _bring_back(request, executor, task_digest, trust_bucket)
    elif task_digest is not None or trust_bucket:
        raise ValueError("task_digest= and trust_bucket= go with resume=True: a new run's task is the one given.")
    else:
        request = named(request)
        with preparing(str(request.run_id)):
            run = plan_launch(request, executor).start()
    from executors.run.run import manager_of  # not before locals() is read

    manager_of(run).shows_progress = progress
    return ends_with_this_process(run, detach=request.settings.detach)


def named(request: LaunchRequest) -> LaunchRequest:
    """Return the request with a run id."""
    return request if request.run_id is not None else replace(request, run_id=new_run_id())


def _bring_back(
    request: LaunchRequest, executor: str | ServerlessExecutor, task_digest: str | None, trust_bucket: bool
) -> Run:
    """Resume a run as `launch(resume=True)` does."""
    from executors.run.run import view_of

    given = request.args if request.argv is None else request.argv
    request = resolved(request) if given is not None else replace(resolved(request), args=None)
    check_kept(request)
    if request.run_id is None:
        raise ValueError("resume=True needs the run_id of the run to bring back.")
    from executors.run.lookup import attach
    from executors.run.resume import resume
    from executors.run.start_spec import trusted_task

    run = attach(request.run_id, rendezvous=request.rendezvous, executor=executor)
    view = view_of(run)
    task = trusted_task(view, task_digest=task_digest, trust_bucket=trust_bucket)
    check_same(request, task)
    check_environment(view.placements, request)
    settings = request.settings
    return resume(
        run,
        gpu=settings.gpu,
        timeout=settings.timeout,
        gather_s=None if settings.gather_s == GATHER_S else settings.gather_s,
        env=request.env,
        secrets=settings.secrets,
        detach=settings.detach,
        restarts=settings.restarts,
        hang_timeout=settings.hang_timeout,
        start_timeout=settings.start_timeout,
        task_digest=task.digest,
    )
