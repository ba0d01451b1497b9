"""What is checked of a launch before anything is written or started, on every backend."""

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
from executors.replica import CONTRACT, FOR_THE_WORKER, PROCESS_GROUP
from executors.report.trackers import BUILT_IN, check_tracker
from executors.run.placements import Placements
from executors.settings.policy import NO_RESTARTS, ONLY_PREEMPTED
from executors.store import open_store
from executors.store.run_key import RUN_KEY
from executors.task.arguments import annotations_in, from_texts, split_rank_env, to_json
from executors.task.code_package import Package
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

KEPT = (
    "chaos",
    "min_replicas",
    "fail_fast",
    "max_cost",
    "tracker",
    "health_check",
    "spares",
    "signed",
    "from_run",
    "from_step",
)


def check_working_directory() -> None:
    """Raises: ReplicasError: this process's working directory was deleted."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ReplicasError(NO_DIRECTORY) from None


def resolved(request: LaunchRequest) -> LaunchRequest:
    """Return the request with a script as a function of `argv`, and its texts as the values that they mean.

    Args:
        request: as the user gave it.

    Raises:
        EntrypointImportError: no such file or module.
        EntrypointArgumentsError: a text is not what the entrypoint's annotations say.
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
    # A placeholder is checked as rank 0 will see it, and stays: each replica fills in its own.
    filled = fill(
        dict(request.arg_texts), {"rank": 0, "run_id": request.run_id, "attempt": 0, "world_size": request.settings.n}
    )
    values = from_texts(filled, annotations, found[1] if found else entrypoint)
    texts = request.arg_texts
    kept = {name: to_json(value) if filled[name] == texts[name] else texts[name] for name, value in values.items()}
    return replace(request, args={**(request.args or {}), **kept})


def check_same(request: LaunchRequest, task: StoredTask) -> None:
    """Refuse to resume a run with another entrypoint, `n`, seed or arguments. A pickled callable is not compared."""
    n, entrypoint = task.launched_with.world_size, task.launched_with.entrypoint
    # A file's form (script or function) depends on its arguments, and a resume need not give these.
    if request.settings.n != n or shown(describe(request.entrypoint)) != shown(entrypoint):
        raise ValueError(
            f"Run {task.run_id!r} has {n} replicas of {shown(entrypoint)}; it cannot be resumed as "
            f"{request.settings.n} of {shown(describe(request.entrypoint))}."
        )
    differing = [] if request.settings.seed in (None, task.record.seed) else ["seed"]
    if request.args is not None and isinstance(request.entrypoint, str):
        launched = task.record.args or {}
        given = json.loads(json.dumps(split_rank_env(request.args)[0]))
        differing += [name for name in {**launched, **given} if launched.get(name) != given.get(name)]
    if differing:
        raise ValueError(
            f"Run {task.run_id!r} goes on with what it was launched with, and {differing[0]!r} is another now. "
            "Leave args= and seed= away, or launch a new run."
        )


def check_environment(backend: Backend, request: LaunchRequest) -> None:
    """Raises: ValueError: the environment or the secrets cannot be had, or are not to be set."""
    if not backend.carries_environment and (request.env or request.settings.secrets):
        raise ValueError(
            f"Backend {backend.backend_name!r} takes no env= and no secrets=: values are never recorded, and its five "
            "verbs carry none. Set them where its replicas run."
        )
    if not backend.carries_environment and request.settings.signed:
        raise ValueError(
            f"Backend {backend.backend_name!r} takes no signed= (--signed): its five verbs carry no key. Leave it "
            "away, and give each replica a key of yours: DiLoCo(key=…)."
        )
    for name in request.env or {}:
        if name in (*PROCESS_GROUP, *CONTRACT, *FOR_THE_WORKER, RUN_KEY):
            raise ValueError(
                f"env cannot set {name!r}: replicas get or lose it themselves, see docs/reference/environment.md."
            )


def with_policy(backend: Backend, request: LaunchRequest) -> LaunchRequest:
    """Return the request with what the backend keeps of restarts and limits on hanging; stderr says what is left out.

    Raises:
        ValueError: nobody could start a replica again, or watch it, where somebody relies on it.
    """
    settings = request.settings
    if settings.restarts == NO_RESTARTS:
        request = request.with_settings(restarts=None)
    elif settings.restarts is None and not settings.detach and backend.reports_preemption(settings.gpu):
        # Only while the launching process watches: of a detached run, each preempted rank would wait for a controller.
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


def check_spares(placements: Placements, request: LaunchRequest) -> None:
    """Raises: ValueError: spares are asked for that nobody could start, or that could take nothing over."""
    if not request.settings.spares:
        return
    if placements.lease_s is None or len(placements.placed) > 1:
        raise ValueError(
            f"Backend {placements.backend_name!r} takes no spares= (--spares): only services that run jobs do, as "
            "modal and hf. Leave it away."
        )
    if request.settings.restarts in (None, ONLY_PREEMPTED, NO_RESTARTS):
        raise ValueError("A spare takes over what is to be restarted: give restarts= (--restarts) with spares=.")


def check_pickle(backend: Backend, request: LaunchRequest) -> None:
    """Raises: ValueError: replicas run another Python than this one, which pickles the callable for them."""
    if not isinstance(request.entrypoint, str):
        backend.check_pickle(PYTHON)


def check_chaos(placements: Placements, request: LaunchRequest) -> Sequence[str]:
    """Return the specs, checked. Raises: ValueError: a bad one, or the backend takes none."""
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
    return chaos.check_chaos(asked.chaos, asked.n)


def check_named(request: LaunchRequest) -> None:
    """Check that tracker and health check exist, as far as that shows without running any of them.

    Raises:
        ValueError, MissingDependencyError: there is no such tracker.
        EntrypointError: there is no such health check, or it cannot be called without arguments.
    """
    settings = request.settings
    if settings.tracker is not None:
        check_tracker(settings.tracker)
    if settings.health_check is not None:
        try:
            check_entrypoint(settings.health_check, {})
        except EntrypointError as error:
            error.add_note("It is the health check of this launch.")
            raise


def check_kept(request: LaunchRequest) -> None:
    """Raises: ValueError: something is given that a resumed run keeps."""
    for name in KEPT:
        if getattr(request.settings, name):
            raise ValueError(f"A resumed run keeps the {name} it was launched with: leave {name}= away.")


def with_tracker(package: Package, tracker: str) -> Package:
    """Return the package with what a tracker needs in a replica: as it is here, unless the user asks for it anyway."""
    from executors.shipping.requirements import name_of

    names = BUILT_IN.get(tracker, ())
    if not names or {name_of(line) for line in package.requirements} & {*names}:
        return package
    needed = next((f"{name}=={version}" for name in names if (version := installed_version(name))), names[0])
    return replace(package, requirements=(*package.requirements, needed), pins=(*package.pins, needed))


def check_directory(directory: Path) -> None:
    """Prove in a folder beside, gone afterwards, that a store could be made here and creates exclusively."""
    nearest = next(path for path in (directory, *directory.parents) if os.path.exists(path))
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=nearest, prefix=".replicas-dry-run-"))
        except OSError as error:
            raise StoreError(f"Cannot use {directory.as_uri()}: {error.strerror}.", url=directory.as_uri()) from error
        open_store(Path(folder))
