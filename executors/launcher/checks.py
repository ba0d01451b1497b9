"""Checks of a launch that are the same on each backend, before anything is written or started."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from executors.backend import Backend
from executors.errors import NO_DIRECTORY, EntrypointError, ReplicasError, StoreError
from executors.registry.placements import Placements
from executors.replica import CONTRACT, FOR_THE_WORKER, OF_MEMBERS, PROCESS_GROUP
from executors.settings.health_checks import shipped_checks
from executors.settings.policy import NO_RESTARTS, ONLY_PREEMPTED
from executors.settings.procs import gpus_asked, known_procs
from executors.store import open_store
from executors.store.run_key import RUN_KEY
from executors.task.arguments import annotations_in, from_texts, split_rank_env, to_json
from executors.task.code_package import Package
from executors.task.command import Command, check_program
from executors.task.entrypoint import (
    SCRIPT,
    check_entrypoint,
    describe,
    find_definition,
    runs_as_script,
    shown,
    signature_in,
)
from executors.task.launch_request import LaunchRequest
from executors.task.placeholders import fill
from executors.task.stored import PYTHON, StoredTask, installed_version
from executors.view.report.trackers import BUILT_IN, check_tracker

KEPT = (
    "chaos",
    "min_replicas",
    "fail_fast",
    "max_cost",
    "tracker",
    "health_check",
    "procs",
    "spares",
    "signed",
    "from_run",
    "from_step",
)


def check_working_directory() -> None:
    """Check that the working directory of this process exists.

    Raises:
        ReplicasError: it was deleted.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ReplicasError(NO_DIRECTORY) from None


def resolved(request: LaunchRequest) -> LaunchRequest:
    """Return the request with a script as a function of `argv`, and with argument texts converted to values.

    Args:
        request: as the user gave it.

    Raises:
        EntrypointImportError: no such file or module.
        EntrypointArgumentsError: a text does not fit the annotation of its parameter.
    """
    entrypoint, argv = request.entrypoint, request.argv
    if not isinstance(entrypoint, str):
        return request
    if argv is None and runs_as_script(entrypoint, has_arguments=bool(request.args or request.arg_texts)):
        argv = []
    if argv is not None:
        args = {"argv": list(argv), **(request.args or {}), **(request.arg_texts or {})}
        return replace(request, entrypoint=f"{entrypoint}:{SCRIPT}", args=args, arg_texts=None, argv=None)
    if not request.arg_texts:
        return request
    found = find_definition(entrypoint)
    taken = None if found is None else signature_in(*found)
    annotations = {} if found is None or taken is None else annotations_in(found[0], taken)
    # A placeholder is checked with the value of rank 0. The request keeps the placeholder, because each replica fills
    # in its own value.
    n, run_id = request.settings.n, request.run_id
    own = {"rank": 0, "member": 0, "run_id": run_id, "attempt": 0, "world_size": n}
    filled = fill(dict(request.arg_texts), own)
    values = from_texts(filled, annotations, found[1] if found else entrypoint)
    texts = request.arg_texts
    kept = {name: to_json(value) if filled[name] == texts[name] else texts[name] for name, value in values.items()}
    return replace(request, args={**(request.args or {}), **kept})


def check_same(request: LaunchRequest, task: StoredTask) -> None:
    """Check that a run is resumed with its own entrypoint, `n`, seed and arguments. A pickled callable is not compared.

    Args:
        request: the values that the user gave for the resume.
        task: the task of the run.

    Raises:
        ValueError: a value differs.
    """
    n, entrypoint = task.launched_with.world_size, task.launched_with.entrypoint
    # A file's form (script or function) depends on its arguments, and a resume need not give these.
    if request.settings.n != n or shown(describe(request.entrypoint)) != shown(entrypoint):
        raise ValueError(
            f"Run {task.run_id!r} has {n} replicas of {shown(entrypoint)}. It cannot be resumed as "
            f"{request.settings.n} of {shown(describe(request.entrypoint))}."
        )
    differing = [] if request.settings.seed in (None, task.record.seed) else ["seed"]
    if request.args is not None and isinstance(request.entrypoint, str):
        launched = task.record.args or {}
        given = json.loads(json.dumps(split_rank_env(request.args)[0]))
        differing += [name for name in {**launched, **given} if launched.get(name) != given.get(name)]
    if differing:
        raise ValueError(
            f"Run {task.run_id!r} continues with the values of its launch, and {differing[0]!r} differs from them. "
            "Remove args=, argv= and seed=, or launch a new run."
        )


def check_environment(backend: Backend, request: LaunchRequest) -> None:
    """Check that the environment and the secrets reach the replicas.

    Args:
        backend: the backend that starts the replicas.
        request: the launch.

    Raises:
        ValueError: the backend cannot pass them to replicas, or replicas set one of the variables themselves.
    """
    if not backend.carries_environment and (request.env or request.settings.secrets):
        raise ValueError(
            f"Backend {backend.backend_name!r} takes no env= and no secrets=: values are never recorded, and its five "
            "verbs carry none. Set them where its replicas run."
        )
    if not backend.carries_environment and request.settings.signed:
        raise ValueError(
            f"Backend {backend.backend_name!r} takes no signed= (--signed): its five verbs carry no key. Remove it, "
            "and give each replica a key of yours: DiLoCo(key=…)."
        )
    for name in request.env or {}:
        if name in (*PROCESS_GROUP, *OF_MEMBERS, *CONTRACT, *FOR_THE_WORKER, RUN_KEY):
            raise ValueError(
                f"env cannot set {name!r}: replicas get or lose it themselves, see docs/reference/environment.md."
            )


def with_policy(backend: Backend, request: LaunchRequest) -> LaunchRequest:
    """Return the request with the restarts and limits on hanging that the backend supports.

    A line on stderr names the settings that have no effect there.

    Args:
        backend: the backend that starts the replicas.
        request: the launch.

    Raises:
        ValueError: no process could restart or watch a replica, and the user asked for that.
    """
    settings = request.settings
    if settings.restarts == NO_RESTARTS:
        request = request.with_settings(restarts=None)
    elif settings.restarts is None and not settings.detach and backend.reports_preemption(settings.gpu):
        # Only while the launching process watches the run. In a detached run, each preempted rank would wait for a
        # controller.
        return request.with_settings(restarts=ONLY_PREEMPTED)
    name, is_limited = backend.backend_name, settings.hang_limits.start_limit_s is not None
    if backend.starts_single_ranks or (request.settings.restarts is None and not is_limited):
        return request
    if not backend.knows_attempts:
        raise ValueError(
            f"Backend {name!r} takes no restarts= (--restarts), hang_timeout= (--hang-timeout) or start_timeout= "
            "(--start-timeout): it has no process that supervises a replica. Remove these."
        )
    print(
        f"replicas: backend {name!r} restarts no replica: restarts, hang_timeout and start_timeout do not count",
        file=sys.stderr,
    )
    return request.with_settings(restarts=None, hang_timeout=None, start_timeout=None)


def check_procs(backend: Backend, request: LaunchRequest) -> None:
    """Check that the backend starts as many processes in each replica as the launch asks for.

    A line on stderr warns that one process of a replica has several GPUs.

    Args:
        backend: the backend that starts the replicas.
        request: the launch.

    Raises:
        ValueError: no process of this project starts the processes of a replica there, and the launch asks for several.
    """
    procs, n_gpus = request.settings.procs, gpus_asked(request.settings.gpu)
    if backend.starts_single_ranks:
        if procs is None and n_gpus is not None and n_gpus > 1:
            print(f"replicas: 1 process sees {n_gpus} GPUs; --procs gpu starts {n_gpus}", file=sys.stderr)
    elif procs not in (None, "1"):
        raise ValueError(
            f"Backend {backend.backend_name!r} starts one process in each replica: got procs={procs!r} (--procs). "
            "Remove it, or use a backend such as local or modal."
        )


def check_command(placements: Placements, request: LaunchRequest) -> None:
    """Check that the backend can run a command, and that this machine has its program if replicas run here.

    Args:
        placements: the placements of the launch.
        request: the launch.

    Raises:
        ValueError: no process of this project supervises a replica there, so no process could ask the command to end.
        EntrypointImportError: there is no such program.
    """
    command = request.entrypoint
    if not isinstance(command, Command):
        return
    if not placements.starts_single_ranks:
        raise ValueError(
            f"Backend {placements.backend_name!r} calls functions and runs no command: got {str(command)!r}. Use a "
            "backend such as local or modal."
        )
    if request.settings.tracker is not None:
        raise ValueError(
            f"A tracker follows the numbers of a function, and this launch runs the command {str(command)!r}. Remove "
            "tracker (--tracker), and start the tracker in the command itself."
        )
    if any(placed.placement.backend == "local" for placed in placements.placed):
        check_program(command, {**os.environ, **(request.env or {})})


def check_rules(placements: Placements, request: LaunchRequest) -> None:
    """Check that a process judges the rules of a launch.

    Args:
        placements: the placements of the launch.
        request: the launch.

    Raises:
        ValueError: no process of this project supervises a replica there.
    """
    if request.settings.rules and not placements.starts_single_ranks:
        raise ValueError(
            f"Backend {placements.backend_name!r} takes no rules= (--rule): it has no process that supervises a "
            f"replica, got {request.settings.rules[0]!r}. Remove the rules, or use a backend such as local or modal."
        )


def check_spares(placements: Placements, request: LaunchRequest) -> None:
    """Check that the spares of a launch can start, and that they could take over a rank.

    Args:
        placements: the placements of the launch.
        request: the launch.

    Raises:
        ValueError: the backend has no spares, or the launch restarts nothing.
    """
    if not request.settings.spares:
        return
    if placements.lease_s is None or len(placements.placed) > 1:
        raise ValueError(
            f"Backend {placements.backend_name!r} has no spares. Remove spares (--spares), or use one cloud backend "
            "such as modal or hf."
        )
    if request.settings.restarts in (None, ONLY_PREEMPTED, NO_RESTARTS):
        raise ValueError(
            "A spare takes over for replicas that are restarted. Add restarts (--restarts), for example --restarts 3."
        )


def check_pickle(backend: Backend, request: LaunchRequest) -> None:
    """Check that replicas can load a callable that this Python pickles.

    Args:
        backend: the backend that starts the replicas.
        request: the launch.

    Raises:
        ValueError: replicas run another minor version of Python.
    """
    if not isinstance(request.entrypoint, str | Command):
        backend.check_pickle(PYTHON)


def check_faults(placements: Placements, request: LaunchRequest) -> Sequence[str]:
    """Return the faults of a launch, checked.

    Args:
        placements: the placements of the launch.
        request: the launch.

    Raises:
        ValueError: a fault is not legal, or is for a replica that is not on the local backend.
    """
    from executors.worker import chaos

    asked = request.settings
    places = [placed.placement for placed in placements.placed]
    elsewhere = {rank for place in places if place.backend != "local" for rank in place.ranks}
    has_local = any(place.backend == "local" for place in places)
    if not has_local or not elsewhere.isdisjoint(chaos.parse(spec).rank for spec in asked.chaos):
        raise ValueError(
            f"Backend {placements.backend_name!r} takes no chaos: faults are injected into local replicas only. "
            "Try it with --backend local."
        )
    return chaos.check_chaos(asked.chaos, asked.n, known_procs(asked.procs, asked.gpu))


def check_named(request: LaunchRequest) -> None:
    """Check that the tracker and the health check exist, without running either.

    Args:
        request: the launch.

    Raises:
        ValueError, MissingDependencyError: there is no such tracker.
        EntrypointError: there is no such health check, or it cannot be called without arguments.
    """
    settings = request.settings
    if settings.tracker is not None:
        check_tracker(settings.tracker)
    if settings.health_check is not None and not shipped_checks(settings.health_check):
        try:
            check_entrypoint(settings.health_check, {})
        except EntrypointError as error:
            error.add_note("It is the health check of this launch.")
            raise


def check_kept(request: LaunchRequest) -> None:
    """Check that the user gives no setting that a resumed run keeps.

    Args:
        request: the values that the user gave for the resume.

    Raises:
        ValueError: such a setting is given.
    """
    for name in KEPT:
        if getattr(request.settings, name):
            raise ValueError(f"A resumed run keeps the {name} of its launch: remove {name}=.")


def with_package(package: Package, name: str) -> Package:
    """Return the package with one more requirement, in the version that is installed here.

    Args:
        package: the package. It is returned as it is if it has the requirement already.
        name: the name of the required package.
    """
    from executors.shipping.requirements import package_name_of

    if name in {package_name_of(line) for line in package.requirements}:
        return package
    version = installed_version(name)
    needed = name if version is None else f"{name}=={version}"
    return replace(package, requirements=(*package.requirements, needed), pins=(*package.pins, needed))


def with_tracker(package: Package, tracker: str) -> Package:
    """Return the package with the requirement of a tracker, in the version that is installed here.

    Args:
        package: the package. It is returned as it is if it has the requirement already.
        tracker: the name of the tracker.
    """
    from executors.shipping.requirements import package_name_of

    names = BUILT_IN.get(tracker, ())
    if not names or {package_name_of(line) for line in package.requirements} & {*names}:
        return package
    return with_package(package, next((name for name in names if installed_version(name)), names[0]))


def check_directory(directory: Path) -> None:
    """Check that a directory can be a store, in a temporary folder beside it.

    Args:
        directory: the directory, which need not exist.

    Raises:
        StoreError: files cannot be written there, or cannot be created exclusively.
    """
    nearest = next(path for path in (directory, *directory.parents) if os.path.exists(path))
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=nearest, prefix=".replicas-dry-run-"))
        except OSError as error:
            raise StoreError(f"Cannot use {directory.as_uri()}: {error.strerror}.", url=directory.as_uri()) from error
        open_store(Path(folder))
