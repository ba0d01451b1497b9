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
from executors.launcher.several_backends import executor_of, parse_backends, total_replicas
from executors.protocol import ServerlessExecutor
from executors.registry import get_executor
from executors.registry.run_index import preparing
from executors.settings import GATHER_S
from executors.settings.policy import Restarts
from executors.task.command import Command
from executors.task.entrypoint import check_nothing_loads
from executors.task.launch_request import LaunchRequest

if TYPE_CHECKING:
    from executors.run.run import Run

NOT_REQUESTED = ("executor", "resume", "task_digest", "trust_bucket", "progress", "config", "profile")
"""The parameters of `launch` that are not part of the request."""


def launch(
    executor: str | ServerlessExecutor | None = None,
    entrypoint: str | Callable[..., Any] | None = None,
    n: int | None = None,
    *,
    args: Mapping[str, Any] | None = None,
    argv: Sequence[str] | None = None,
    command: Sequence[str] | None = None,
    rendezvous: str | Path | None = None,
    run_id: str | None = None,
    gpu: str | None = None,
    procs: int | str | None = None,
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
    notify: Sequence[str] = (),
    notify_on: str | Sequence[str] | None = None,
    rules: Sequence[str] = (),
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
        executor: a backend's name, or any object with the five methods of `ServerlessExecutor`. Several backends are
            named with their numbers of replicas, as in "slurm:4,modal:4". These backends need to share nothing but the
            rendezvous.
        entrypoint: a callable, or its name: `pkg.mod:f`, `pkg.mod.f`, `path/file.py:f`, or `path/file.py` for the
            function `main` of that file.
        n: the number of replicas. With several backends, the default is the sum of their numbers.
        args: keyword arguments of the entrypoint. If the entrypoint is given by name, they are JSON values. In texts,
            also inside dicts, lists and tuples, each replica replaces `${rank}`, `${member}`, `${run_id}`,
            `${attempt}` and `${world_size}` by its own values. `$${rank}` stands for the text `${rank}`. Any other `$`
            stays as it is.
        argv: run the file or module that the entrypoint names as a script, with these arguments. Each replica fills in
            placeholders as in `args`. The result is None. A file whose part below `if __name__ == "__main__"` does
            more than call `main()` is also run as a script without arguments; see ADR 0044.
        command: a program and its arguments, as in `["torchrun", "train.py"]`. Each replica runs the program without a
            shell. Give it without an entrypoint. Each replica fills in placeholders as in `args`. The result is None.
            Default: the entrypoint is called.
        rendezvous: the url of the store in which the run is kept. Default: a directory of this user.
        run_id: the name of the run. Default: two words and four hexadecimal digits.
        gpu: the GPU of each replica, as in "H100" or "H100:2". Default: no GPU.
        procs: the number of processes of each replica, for a script that trains with torch.distributed: a number, "gpu"
            for one for each GPU of the replica, or "auto" for the same and 1 without a GPU. Each gets the variables
            that torchrun sets. Default: 1, without these variables.
        timeout: how long each replica may run, in seconds. Default: one hour in a cloud, the limit of the cluster on a
            cluster, and no limit elsewhere.
        max_cost: the amount in US dollars that all replicas may cost together. It limits their time, if the backend
            publishes prices. A replica that is started again, also by `resume`, gets the rest of its share. The time
            counts from the start of the container, so it includes the installation of packages. Replicas that are added
            later cost extra.
        env: additional environment variables of the replicas, with placeholders as in `args`. Their values are never
            recorded.
        secrets: names of secrets that the backend gives to the replicas.
        seed: the seed of the replicas' generators, together with their rank. Default: the run id.
        detach: True if the run continues when this process ends. Otherwise the run ends with this process. The replicas
            of an executor with only the five methods are cancelled at the exit of this process, unless a signal such as
            SIGTERM or SIGKILL ends the process.
        resume: True resumes the run `run_id` with the task of its launch; see `executors.run.resume`.
        task_digest: the sha256 of the task of a resumed run that another machine launched.
        trust_bucket: True resumes a run that another machine launched with the task that its store holds.
        chaos: faults that the replicas suffer, as in "kill:rank=1,round=3". Only the local backend has them.
        min_replicas: start with this number of replicas if the others do not start within `gather_s` seconds. The
            others join when they start, unless `detach` is True. The run has succeeded when this number of replicas has
            succeeded. Default: all of them.
        gather_s: how long to wait for more than `min_replicas` replicas, in seconds.
        fail_fast: True ends the run if a replica fails before any replica has made its first round. Otherwise the other
            replicas continue to train.
        tracker: a tracker that also gets the numbers of the replicas while they train. The names are "trackio",
            "wandb", "mlflow", or a class as "pkg.mod:Class" (see `executors.view.report.trackers.Tracker`). There is
            one tracker run for each rank. If the tracker fails, the run gets a warning.
        notify: the URLs to which events of the run are sent, such as its end. Each is an https URL that gets the event
            as JSON, a URL of the package apprise, "env:NAME" for the URLs in a variable, or "file:PATH" for the URLs in
            a file. A URL is a secret: it is never recorded, and containers get it as a secret. Default: none.
        notify_on: the events to send, as in "end,given_up": "end", "given_up", "hang", "rule", "budget" and
            "no_round". Default: all.
        rules: conditions that the supervisor of each rank watches for, each as a text "WHAT [for N] [-> ACTION]".
            Examples are "loss nan -> stop", "gnorm > 10 * median for 50", "no round 10m", "log /CUDA error/ -> restart"
            and "gpu < 10% 15m". The actions are "notify", which is the default, "stop" for the run, and "restart" for
            the attempt, which needs `restarts`. A rule is broken at most once in an attempt. Default: none.
        restarts: restart replicas that end, at most this number of times each: a number, a text as "3/1h,oom=0", or a
            `Restarts`. 0 restarts only replicas whose end is not their own failure. "none" restarts nothing. Default:
            only replicas whose machine the service took back are restarted, while this process waits for the run.
        hang_timeout: how long a replica may run without progress: seconds, "SOFT:HARD" as in "2m:3m", "off", or "auto".
            With "auto" the limit is a minute for an idle replica, and 30 minutes for a replica that uses the processor,
            a disk or the network. It grows with the pauses that the replica has made. It ends a replica only if
            `restarts` is given.
        start_timeout: how long a replica may take from its start to its first progress: seconds, a text such as "20m",
            or "auto", which is the default. "auto" is five times a number in `hang_timeout`, and at least a minute.
            Without such a number, a replica that is idle for 30 minutes before its first progress is ended if
            `restarts` is given.
        spares: start this number of additional jobs, which stand by for replicas that lose their containers. Spares
            need `restarts` and a cloud backend.
        health_check: the checks that each new process makes before the entrypoint: "gpu", "disk", "store", "clock" or
            "all", or several as "gpu,disk". Or a function without arguments, as "pkg.mod:f", which is called for at
            most 60 s. If a check fails, or the function raises or returns False, the attempt ends as `start_failed`.
        signed: True makes a key for this run. Replicas accept only records that were made with this key. Other users
            who can write to the rendezvous can stop the run, but cannot change its training. This machine keeps the key
            for `resume`.
        from_run: begin with the model and the outer momentum of another run, given by its id or address. The new run
            has its own entrypoint, number of replicas and total of steps, and starts at step 0. Its `DiLoCo` must train
            parameters of the same names and shapes. The other run may still train. Its store is needed until the new
            run has begun. If the other run is signed, the new run is signed with the same key.
        from_step: take the newest round of that run at or before this step. Default: its newest round.
        progress: True draws bars with rate and remaining time of the steps that replicas report, while this process
            waits for the run. Without a terminal, it prints a line now and then.
        config: True reads each value that is at its default here from the settings that `replicas launch` would find. A
            path, or a list of paths, names settings files that are read in addition. False reads no settings.
        profile: the profile of these settings to use. Default: none.

    Returns:
        The run. Its replicas have started, or are starting.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument has a wrong value.
        BackendError: the backend cannot be used. It is a `LaunchError` if the backend refused a replica.
        EntrypointError: the entrypoint cannot be found, imported, called with `args`, or shipped.
        RunExistsError: the run id is taken.
        StoreError: the rendezvous cannot be used.

    Example:
        run = launch("local", "train.py:main", n=4, args={"steps": 100})
        print(run.results())
    """
    asked: dict[str, Any] = {name: value for name, value in locals().items() if name not in NOT_REQUESTED}
    check_nothing_loads()
    del asked["command"]
    if command is not None:
        if entrypoint is not None:
            raise ValueError("launch() takes an entrypoint or command=, and both are given. Remove one of them.")
        asked["entrypoint"] = Command.of(command)
    if config is not False or profile is not None:
        from executors.launcher.launch_settings import filled

        executor, asked = filled(executor, asked, config, profile)
    if executor is None:
        raise TypeError("launch() needs an executor, an entrypoint and n, or config= with settings that name them.")
    if isinstance(executor, str):
        asked["n"] = total_replicas(executor, n)
        executor = executor_of(executor, get_executor) if parse_backends(executor) else executor
    request = LaunchRequest.of(**asked)
    if resume:
        run = _bring_back(request, executor, task_digest, trust_bucket)
    elif task_digest is not None or trust_bucket:
        raise ValueError("task_digest= and trust_bucket= go with resume=True: a new run's task is the one given.")
    else:
        has_new_name, request = request.run_id is None, request.with_run_id()
        with preparing(str(request.run_id)):
            run = plan_launch(request, executor, has_new_name=has_new_name).start()
    from executors.run.run import manager_of  # not before locals() is read

    manager_of(run).shows_progress = progress
    return ends_with_this_process(run, detach=request.settings.detach)


def _bring_back(
    request: LaunchRequest, executor: str | ServerlessExecutor, task_digest: str | None, trust_bucket: bool
) -> Run:
    """Resume a run as `launch(resume=True)` does."""
    from executors.run.run import view_of

    given = request.args if request.argv is None else request.argv
    request = resolved(request) if given is not None else replace(resolved(request), args=None)
    check_kept(request)
    if request.run_id is None:
        raise ValueError("resume=True needs the run_id of the run to resume.")
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
        notify=request.notify,
        notify_on=settings.notify_on,
        rules=settings.rules or None,
        task_digest=task.digest,
    )
