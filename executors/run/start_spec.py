"""Collects the values to start attempts of an existing run: its trusted task, and values that are not recorded, such
as secrets.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from executors.backend import Backend
from executors.errors import BackendError, StoreError, UntrustedTaskError
from executors.registry.placements import PlacedBackend, Placements
from executors.registry.run_index import damage_of_note, needed_key, reference
from executors.settings.health_checks import shipped_checks
from executors.settings.run_spec import RunSpec, StartSpec
from executors.status import name_ranks
from executors.store.record_names import run_record_key
from executors.store.records import SHA256
from executors.task.addition_record import Addition
from executors.task.entrypoint import parse_entrypoint
from executors.task.record import LaunchedWith, Placement
from executors.task.stored import StoredTask, read_task, task_folder_of
from executors.view.run_view import RunView

MAX_SHOWN = 100  # the longest untrusted value in a message, in characters


def resumable_placements(run: RunView) -> Placements:
    """Return the placements of a run if all its backends can start later attempts of a rank.

    Args:
        run: the run. Its additions are read, too, so the backend of the launch need not be installed here.

    Raises:
        BackendError: a backend can only start all ranks together, or the only backend is not installed on this machine.

    Example:
        resumable_placements(run).start_ranks(start_spec)
    """
    run.placements.read_added()
    if not run.placements.knows_attempts:
        raise BackendError(f"Backend {run.backend!r} starts all ranks or none; it cannot resume some of a run.")
    return run.placements


def start_specs_of(
    run: RunView,
    task: StoredTask,
    *,
    ranks: Sequence[int] | None = None,
    gpu: str | None = None,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    secrets: Sequence[str] = (),
    detach: bool = False,
    verb: str = "resume",
) -> list[StartSpec]:
    """Return the values to start attempts of a run.

    Values that are not recorded are taken from the user, and checked.

    Args:
        run: the run.
        task: the task, which the user trusts.
        ranks: the ranks that must be started. If a value is missing that only other ranks need, those ranks are left
            out. Default: all ranks.
        gpu: the GPU of each replica. Default: the GPU of its placement.
        timeout: how long each replica may run, in seconds. Default: the limit of its placement.
        env: the environment variables of the launch, with their values. Default: none.
        secrets: the names of the secrets of the launch. Default: the names that this machine noted.
        detach: True if the replicas continue when this process ends. Default: False.
        verb: the command that starts them, up to the run, for messages.

    Returns:
        The values for the ranks of the launch, then for each addition. Ranks that this machine may not start are left
        out.

    Raises:
        ValueError: a value of the environment, a secret, an option or the run's key is missing, or this folder has
            other code than the launch's folder.
        BackendError: the backend cannot start single ranks.
        UntrustedTaskError: ranks were added on another machine with code of their own, which the user does not trust.

    Example:
        start_specs_of(run, trusted_task(run), env={"STAGE": "test"})
    """
    resumable_placements(run)
    spec, groups = spec_of(run, task, detach=detach), list[tuple[tuple[int, ...], Placements]]()
    for group in run.placements.groups:
        kept = [each for each in group.placed if _is_asked_for(each, ranks) or not _missing_options(run, each)]
        its = tuple(rank for each in kept for rank in each.placement.ranks if run.placements.may_start(rank))
        groups += [(its, run.placements.some(kept))] if its else []
    places = [placements.placed[0].placement for _, placements in groups]
    found = []
    for its, placements in groups:
        place = placements.placed[0].placement
        its_env = {name: value for name, value in (env or {}).items() if _is_for(place, places, "env", name)}
        its_secrets = [name for name in secrets if _is_for(place, places, "secrets", name)]
        try:
            check_env(run, place, its_env)
            given = secrets_to_give(run, place, its_secrets)
            _check_options(run, placements.placed)
            _check_own_task(run, place)
            check_pickle_of(task, placements)
            for _, backend in placements.installed:
                check_requirements(run, backend, task, place.own_task)
            if not placements.ships_code:
                check_folder(run, task, verb)
        except (ValueError, UntrustedTaskError):
            if ranks is None or {*ranks} & {*its}:
                raise
            continue
        lease_s = None if detach else placements.lease_s
        its_gpu, its_timeout = gpu, timeout  # on several backends, None stands for the value of each placement
        if len(placements.placed) == 1:
            its_gpu, its_timeout = gpu or place.gpu, place.timeout_s if timeout is None else timeout
        its_spec = replace(with_own_task(spec, place), ranks=its, env=its_env, secret_names=given, lease_s=lease_s)
        found.append(StartSpec(its_spec, task.given_entrypoint, its_gpu, its_timeout))
    return found


def spec_of(run: RunView, task: StoredTask, *, detach: bool) -> RunSpec:
    """Return the start values that are the same for all attempts of a run.

    Args:
        run: the run.
        task: its task.
        detach: True if the replicas continue when this process ends.

    Raises:
        ValueError: the run's key is missing.

    Example:
        spec_of(run, task, detach=False).key
    """
    launched = task.launched_with
    return RunSpec(
        run_id=run.run_id,
        store_url=run.store.url,
        task_digest=task.digest,
        settings=launched.settings.with_(detach=detach, spares=0),
        ranks=(),
        key=_key_of(run, launched),
        launched_at=run.record.created_at,
    )


def with_own_task(spec: RunSpec, place: Placement) -> RunSpec:
    """Return the spec with the task of an addition, if the addition has code of its own.

    Args:
        spec: the spec.
        place: the placement of the ranks.

    Example:
        with_own_task(spec, placement).task_folder
    """
    own = place.own_task
    return spec if own is None else replace(spec, task_digest=own, task_folder=task_folder_of(own))


def _check_own_task(run: RunView, place: Placement) -> None:
    if not isinstance(place, Addition) or place.own_task is None or run.placements.trusts_store:
        return
    if not run.placements.is_added_here(place):
        raise UntrustedTaskError(
            f"{_who(run, place)} with code of its own, which only the records in its rendezvous prove. Resume it on "
            "the machine that added it. Or trust all users who can write there: --trust-bucket, or trust_bucket=True."
        )


def check_pickle_of(task: StoredTask, backend: Backend) -> None:
    """Check that replicas of a backend can load the entrypoint of a task, if it is a pickled callable.

    Args:
        task: the task.
        backend: the backend, or placements.

    Raises:
        ValueError: replicas run another Python than the one that pickled the callable.

    Example:
        check_pickle_of(task, run.placements)
    """
    if task.record.callable_sha256 is not None:
        backend.check_pickle(task.record.python, f"The callable of run {task.run_id!r}")


def check_requirements(run: RunView, backend: Backend, task: StoredTask, own_task: str | None = None) -> None:
    """Check that a backend installs only requirements that the task names. Replicas cannot get other ones.

    Args:
        run: the run.
        backend: the backend.
        task: the task of the launch.
        own_task: the digest of these replicas' own task. None: they use the task of the launch.

    Raises:
        ValueError: the user gave other requirements to the backend.

    Example:
        check_requirements(run, backend, task)
    """
    asked = backend.pip
    if not asked:
        return
    its = task if own_task is None else read_task(run.store, run.run_id, own_task, task_folder_of(own_task))
    if others := [line for line in asked if line not in its.record.requirements]:
        raise ValueError(
            f"The requirement {others[0]!r} of pip= is new: run {run.run_id!r} was launched without it, and replicas "
            "get no other packages later. Remove it, and use an image or environment that has it."
        )


def check_folder(run: RunView, task: StoredTask, verb: str) -> None:
    """Check that the folder of this process has the code of the run. Replicas that get no package use it.

    If the folder of the launch no longer has the code, a note on stderr names the folder whose code is used.

    Args:
        run: the run.
        task: its task.
        verb: the command that starts the replicas, up to the run, for the error.

    Raises:
        ValueError: in this folder, the entrypoint is missing, or is another file or module.

    Example:
        check_folder(run, task, "resume")
    """
    where, here, record = task.record.cwd, os.getcwd(), task.record
    if not where or os.path.realpath(where) == os.path.realpath(here):
        return
    is_known = record.entrypoint is not None or record.modules is not None
    check = task.launched_with.settings.health_check
    entrypoints = (record.entrypoint, None if check is None or shipped_checks(check) else check)
    names = [parse_entrypoint(each) for each in entrypoints if each is not None]
    needed = [*(name.file or name.module for name in names), *(record.modules or ())]
    code = [(_code_in(where, each), _code_in(here, each)) for each in needed]
    others = [then for then, now in code if then != now or not then]
    if is_known and not others:
        return
    if any(others) or (not is_known and os.path.isdir(where)):
        raise ValueError(
            f"Run {run.run_id!r} was launched in {where!r}, and what is started here finds its files from the folder "
            f"of this process: cd {shlex.quote(where)} && replicas {verb} {reference(run.run_id, run.store.url)}"
        )
    print(
        f"replicas: run {run.run_id!r} was launched in {where!r}, where its code is not found. The code in {here!r} is "
        "used.",
        file=sys.stderr,
    )


def _code_in(folder: str, needed: Path | str) -> frozenset[str]:
    """Return the files that a process in another folder would import as this module or file.

    Entries of `sys.path` below the current folder are searched at the same place in the other folder. Installed
    packages, as in a `.venv`, are not. The result is empty if nothing is found.
    """
    folder, here = os.path.realpath(folder), os.path.realpath(os.getcwd())
    if isinstance(needed, Path):
        file = os.path.realpath(os.path.join(folder, needed))
        return frozenset([file] if os.path.isfile(file) else [])
    installed = [Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths = [] if folder == here else [folder]
    for path in (Path(os.path.realpath(entry)) for entry in sys.path):
        is_of_folder = path.is_relative_to(here) and not any(path.is_relative_to(place) for place in installed)
        paths.append(os.path.join(folder, path.relative_to(here)) if is_of_folder else str(path))
    top = needed.partition(".")[0]
    spec = PathFinder.find_spec(top, paths) or _found_otherwise(top) or BuiltinImporter.find_spec(top)
    if spec is None:
        return frozenset()
    return frozenset(map(os.path.realpath, spec.submodule_search_locations or [spec.origin or top]))


def _found_otherwise(module: str) -> ModuleSpec | None:
    """Return a module that a special import hook finds, such as an editable install. Such a module is the same in each
    folder.
    """
    usual = (PathFinder, BuiltinImporter, FrozenImporter)
    others = [finder for finder in sys.meta_path if finder not in usual and hasattr(finder, "find_spec")]
    return next((spec for finder in others if (spec := finder.find_spec(module, None)) is not None), None)


def _is_for(place: Placement, places: Sequence[Placement], kind: str, name: str) -> bool:
    """Return True if a variable or secret of the user belongs to this placement, or to no placement."""
    return name in getattr(place, kind) or all(name not in getattr(each, kind) for each in places)


def secrets_to_give(run: RunView, place: Placement, secrets: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the secrets that the replicas get.

    The machine that launched this task, or added these ranks, has noted the names. On another machine, the user must
    name them. They are never taken from a record, because other users may be able to write it.

    Args:
        run: the run.
        place: the placement of the replicas.
        secrets: the names that the user gives.

    Raises:
        ValueError: a secret is missing.

    Example:
        secrets_to_give(run, placement, ["wandb"])
    """
    if isinstance(place, Addition):
        noted = place.secrets if run.placements.is_added_here(place) else None
    else:
        noted = run.noted.secrets if run.noted else None
    if noted is None and (missing := sorted({*place.secrets} - {*secrets})):
        it, options = "it" if len(missing) == 1 else "all", " ".join(f"--secret {name}" for name in missing)
        raise ValueError(
            f"{_who(run, place)} with the secret {missing[0]!r}, and a name in a record is not enough to send "
            f"a secret. Name {it} again: {options} or secrets={missing}."
        )
    return tuple(dict.fromkeys([*(noted or ()), *secrets]))


def check_env(run: RunView, place: Placement, env: Mapping[str, str]) -> None:
    """Check that the user gives a value for each variable of a placement.

    Args:
        run: the run.
        place: the placement.
        env: the variables that the user gives.

    Raises:
        ValueError: the value of a variable is missing.

    Example:
        check_env(run, placement, {"STAGE": "test"})
    """
    if missing := sorted({*place.env} - {*env}):
        raise ValueError(
            f"{_who(run, place)} with the variable {missing[0]!r}, whose value is not recorded. "
            f"Give it again: --env {missing[0]}=… or env={{{missing[0]!r}: …}}."
        )


def _is_asked_for(placed: PlacedBackend, ranks: Sequence[int] | None) -> bool:
    return ranks is None or not {*ranks}.isdisjoint(placed.placement.ranks)


def _missing_options(run: RunView, placed: PlacedBackend) -> list[str]:
    """Return the names of missing options: a record may not contain them, and the user did not give them.

    If the backend is not installed on this machine, the result is empty, because the start itself fails.
    """
    if missing := sorted({*placed.placement.unrecorded_options} - {*run.placements.known_options(placed.placement)}):
        with contextlib.suppress(BackendError):
            placed.backend  # noqa: B018 - made now
            return missing
    return []


def _check_options(run: RunView, places: Sequence[PlacedBackend]) -> None:
    """Check that no option is missing that a record may not give.

    Raises:
        ValueError: an option is missing.
    """
    for placed in places:
        place = placed.placement
        if missing := _missing_options(run, placed):
            option, backend = missing[0], place.backend
            how = "--volume NAME:/path" if option == "volumes" else f"--option {option}=…"
            how = f"--backend {backend} {how}" if len(run.placements.placed) == 1 else f"--option {backend}.{option}=…"
            raise ValueError(
                f"{_who(run, place)} with the option {option!r} of backend {backend!r}, which is not taken from a "
                f"record. Give it again: {how}, or attach(…, executor=…)."
            )


def _who(run: RunView, place: Placement) -> str:
    if isinstance(place, Addition):
        return f"{name_ranks(place.ranks).capitalize()} of run {run.run_id!r} came"
    return f"Run {run.run_id!r} was launched"


def _key_of(run: RunView, launched: LaunchedWith) -> str | None:
    """Return the key of a signed run, which this machine keeps or the user gives. None: the run is not signed."""
    return None if launched.key_id is None else needed_key(run.run_id, launched.key_id)


def trusted_task(run: RunView, *, task_digest: str | None = None, trust_bucket: bool = False) -> StoredTask:
    """Read the task of a run, and check that the user trusts it. Nothing is written or started.

    Args:
        run: the run.
        task_digest: the sha256 of the task, as the user gives it. Default: the digest that this machine noted at the
            launch.
        trust_bucket: True trusts the task in the store, and prints on stderr which code it runs. Default: False.

    Raises:
        ValueError: `task_digest` is not a sha256, or both are given.
        UntrustedTaskError: this machine did not launch the run, and the user gives neither a digest nor `trust_bucket`.
        StoreError: the run's task, or its record, differs from the launch.

    Example:
        trusted_task(run, task_digest=digest).record.entrypoint
    """
    kept = run.task_digest
    if task_digest is not None:
        if trust_bucket:
            raise ValueError("Give either task_digest= or trust_bucket=True: with the digest, no trust is needed.")
        digest = _check_digest(task_digest)
    elif trust_bucket:
        digest = run.record.task_digest
    elif kept is not None:
        digest = kept
    else:
        damage = damage_of_note(run.run_id)
        why = f"Run {run.run_id!r} was not launched from here, at least not under this address, so"
        raise UntrustedTaskError(
            f"{why if damage is None else f'{damage} So'} its task is not proven. {_what_would_run(run)} "
            f"To resume it, give the digest that `replicas status {run.run_id} --json` shows as task_digest on the "
            f"machine that launched it: replicas resume {shlex.quote(run.url)} --task-digest SHA256, or task_digest=. "
            "Or trust all users who can write to that rendezvous: --trust-bucket, or trust_bucket=True."
        )
    task = read_task(run.store, run.run_id, digest)
    launched_with, recorded = {**_flat(task.launched_with), "task_digest": digest}, _flat(run.record)
    for name, launched in launched_with.items():
        if (said := recorded[name]) != launched:
            key = run_record_key(run.run_id)
            raise StoreError(
                f"{key!r} in {run.store.url} is not what was launched: its {name} is {_shown(said)}, the launch's "
                f"{_shown(launched)}.",
                key=key,
                url=run.store.url,
            )
    if trust_bucket:
        other = "" if kept in (None, digest) else f" This machine launched another task there: its digest is {kept}."
        run.placements.trusts_store = True
        print(f"replicas: trusting {run.store.url}. {_what_would_run(run)}{other}", file=sys.stderr)
    return task


def _flat(launched: LaunchedWith) -> dict[str, Any]:
    """Return the fields of a launch in a record, with one field per setting."""
    return {**vars(launched), **vars(launched.settings), "settings": None}


def _check_digest(text: str) -> str:
    if not SHA256.fullmatch(text.lower()):
        raise ValueError(f"A task's digest must be a sha256, 64 hexadecimal digits, got {text!r}.")
    return text.lower()


def _what_would_run(run: RunView) -> str:
    """Return a sentence on the code that a resume would run, from records that are not proven."""
    record = run.record
    entrypoint, by, digest = (_shown(value) for value in (record.entrypoint, record.created_by, record.task_digest))
    return (
        f"Resuming {run.url} runs code with the credentials of this machine: {entrypoint}, launched by {by}, with the "
        f"task digest {digest}, as the records in its rendezvous name them."
    )


def _shown(value: Any) -> str:
    """Return an untrusted value as one line without control characters."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
