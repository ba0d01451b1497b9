"""Writes the records of a new run and its task, which is the entrypoint with its arguments.

    <run>/run.json            user, time, settings and backend; environment and secrets by name only
    <run>/task/task.json      the entrypoint, its arguments, the sha256 of the pickle
    <run>/task/callable.pkl   a function and its arguments, by cloudpickle
    <run>/task/code.tar.gz    the user's workspace and our packages, for replicas on other machines

`REPLICA_TASK_DIGEST` is the sha256 of task.json. A replica gets it with its launch and not through the store. So a
replica only unpickles the task that was launched.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from executors.errors import (
    CorruptObjectError,
    EntrypointArgumentsError,
    EntrypointError,
    RunExistsError,
    StoreError,
    kind_of,
)
from executors.process import identify_process
from executors.settings.policy import supervised
from executors.settings.run_spec import RunSpec
from executors.store import Store
from executors.store.record_names import RUN_RECORD, removal_key, run_record_key
from executors.store.records import MAX_DEPTH, exists, find_record, is_deeper_than, to_bytes
from executors.store.run_key import key_id, new_key, parse_key
from executors.store.url import address_of, check_run_id
from executors.task.arguments import check_call, split_rank_env
from executors.task.code_package import Package
from executors.task.command import Command
from executors.task.entrypoint import describe
from executors.task.launch_request import LaunchRequest
from executors.task.pickles import pickle_call
from executors.task.record import LaunchedWith, Placement, RunRecord
from executors.task.removal_record import Removal
from executors.task.sources import sources_of
from executors.task.stored import MAX_TASK_BYTES, PYTHON, StoredTask, task_folder_of, versions_here


@dataclass(frozen=True)
class NewRun:
    """A run that is not written yet: its objects for the store, and the spec for its executor."""

    spec: RunSpec
    record: dict[str, Any]
    task: bytes
    callable_pickle: bytes | None
    code: bytes | None = None


def plan_run(
    request: LaunchRequest,
    run_id: str,
    store_url: str,
    placements: Sequence[Placement],
    package: Package | None = None,
    *,
    code: Mapping[str, Any] | None = None,
    key: str | None = None,
) -> NewRun:
    """Compose the records of a new run and its task, and write nothing.

    Args:
        request: the request of the launch.
        run_id: the id of the new run.
        store_url: the url of its store.
        placements: the placements of the run: its ranks by backend.
        package: the code for replicas on other machines. None, the default: no replica is on another machine.
        code: a description of code that is not packed, for the run's record. None, the default: there is no such
            description.
        key: the key of another run that a signed run takes over. None, the default: a signed run gets a new key.

    Raises:
        EntrypointError: the task cannot be pickled or written as JSON.
        ValueError: a value cannot be recorded.

    Example:
        plan_run(request, "first-try", store.url, [Placement(backend="local", ranks=(0, 1))]).spec
    """
    settings = request.settings
    if key is None and settings.signed:
        key = new_key()
    launched_with = LaunchedWith(
        entrypoint=describe(request.entrypoint),
        settings=settings,
        placements=tuple(placements),
        key_id=None if key is None else key_id(parse_key(key)),
    )
    task, pickled = _pack_task(request, launched_with, package)
    if (size_bytes := max(len(task), len(pickled or b""))) > MAX_TASK_BYTES:
        raise EntrypointArgumentsError(
            f"{describe(request.entrypoint)} and its arguments are {size_bytes:,} bytes, more than the "
            f"{MAX_TASK_BYTES:,} that replicas read. Load such data inside the function."
        )
    record = RunRecord(
        **vars(launched_with),
        task_digest=hashlib.sha256(task).hexdigest(),
        **_by_whom(),
        python=sys.version.split()[0],
        code=code if package is None else package.about,
        origins=request.origins,
    )
    written = {"run_id": check_run_id(run_id), **asdict(record)}
    try:
        RunRecord.parse(to_bytes(written))  # never write a record that its readers would refuse
    except CorruptObjectError as error:
        raise ValueError(f"This run cannot be recorded: {error}") from None
    spec = RunSpec(
        run_id=run_id,
        store_url=store_url,
        task_digest=record.task_digest,
        settings=settings,
        ranks=tuple(range(settings.n)),
        env=dict(request.env or {}),
        secret_names=settings.secrets,
        key=key,
        notify=tuple(request.notify),
        launched_at=record.created_at,
    )
    return NewRun(spec, written, task, pickled, None if package is None else package.archive)


def create_run(
    request: LaunchRequest,
    run_id: str,
    store: Store,
    executor: Mapping[str, Any],
    package: Package | None = None,
) -> RunSpec:
    """Write a new run on one backend, with its task, into the store. After an error, nothing is written.

    Args:
        request: the request of the launch.
        run_id: the id of the new run.
        store: its store.
        executor: fields of its placement that describe the executor: at least the name of its `backend`.
        package: the code for replicas on other machines. None, the default: no replica is on another machine.

    Raises:
        RunExistsError: the id is taken. Nothing was changed.
        EntrypointError: the task cannot be pickled or written as JSON. Nothing was written.

    Example:
        create_run(LaunchRequest.of("train.py:main", n=2), "first-try", store, {"backend": "local"})
    """
    new = plan_run(request, run_id, store.url, [placement_of(request, executor)], package)
    write_run(store, run_id, new)
    return new.spec


def placement_of(request: LaunchRequest, executor: Mapping[str, Any]) -> Placement:
    """Return the placement of a launch on one backend.

    Args:
        request: the request of the launch.
        executor: fields of the placement that describe the executor: at least the name of its `backend`.

    Example:
        placement_of(request, {"backend": "local"}).ranks
    """
    settings = request.settings
    return Placement(
        **executor,
        ranks=tuple(range(settings.n)),
        env=tuple(sorted(request.env or {})),
        secrets=tuple(sorted(settings.secrets)),
        gpu=settings.gpu,
        timeout_s=settings.timeout,
    )


def continue_run(
    old: StoredTask, spec: RunSpec, record: RunRecord, *, gpu: str | None, timeout: float | None
) -> RunSpec:
    """Write a new run with the task of an old run. The new run continues from the newest snapshot of the old one.

    Args:
        old: the task of the old run, which the user trusts.
        spec: the new run, without the digest of its task.
        record: the record of the old run.
        gpu: the GPU of the new run. None: no GPU.
        timeout: the time limit of the new run in seconds. None: no limit.

    Returns: the spec with the digest of its task.

    Raises:
        RunExistsError: the id of the new run is taken. Nothing was changed.
        StoreError: the code or the callable in the store is not the one that was launched.
    """
    described = json.loads(bytes(old.read("task.json", old.digest)))
    restarts = supervised(spec.settings.restarts)
    settings = spec.settings.with_(chaos=(), spares=0, gpu=gpu, timeout=timeout, restarts=restarts)
    first, *others = old.launched_with.placements
    launched_with = replace(
        old.launched_with,
        settings=settings,
        placements=(replace(first, gpu=gpu, timeout_s=timeout), *others),
        continues=old.run_id,
    )
    task = to_bytes({**described, "cwd": os.getcwd(), "launched_with": asdict(launched_with)})
    digest = hashlib.sha256(task).hexdigest()
    new_record = replace(record, **vars(launched_with), task_digest=digest, **_by_whom())
    spec = replace(spec, task_digest=digest, launched_at=new_record.created_at, settings=settings)
    pickle_sha256, code_sha256 = old.record.callable_sha256, described.get("code_sha256")
    pickled = None if pickle_sha256 is None else bytes(old.read("callable.pkl", pickle_sha256))
    code = None if code_sha256 is None else bytes(old.read("code.tar.gz", code_sha256))
    write_run(old.store, spec.run_id, NewRun(spec, {"run_id": spec.run_id, **asdict(new_record)}, task, pickled, code))
    return spec


def write_run(store: Store, run_id: str, new: NewRun) -> None:
    """Write a planned run and its task into the store. After an error, nothing is written.

    Args:
        store: the store of the run.
        run_id: the run.
        new: the planned run.

    Raises:
        RunExistsError: the id is taken, or a removal of the run is under way.
        StoreError: the store did not take an object.
    """
    record = to_bytes(new.record)
    try:
        if not store.put_if_absent(run_record_key(run_id), record):
            # the address has the store, because another machine may have launched the run
            name = address_of(store.url, run_id)
            raise RunExistsError(
                f"Run {run_id!r} exists at {store.url}. Look at it with executors.attach({name!r}) or "
                f"`replicas status {shlex.quote(name)}`, or choose another run id."
            )
        # A removal deletes run.json before its own record. So if there is no such record now, no removal under way can
        # delete this new run.
        if (removal := find_record(store, removal_key(run_id), Removal.parse)) is not None:
            with contextlib.suppress(StoreError):
                _take_back(store, run_id, record)
            raise RunExistsError(removal.describe(run_id, shlex.quote(address_of(store.url, run_id))))
        _write_task(store, f"{run_id}/task", new.task, new.callable_pickle, new.code)
    except RunExistsError:
        raise
    except BaseException:  # Ctrl-C during a long upload counts, too: nothing may be left that a reader would wait for
        with contextlib.suppress(StoreError):
            _take_back(store, run_id, record)
        raise


def _take_back(store: Store, run_id: str, record: bytes) -> None:
    """Delete the objects of a run that was not written completely, unless the id belongs to another launch."""
    if bytes(store.get(run_record_key(run_id))) == record:
        for name in ("task/task.json", "task/code.tar.gz", "task/callable.pkl", RUN_RECORD):
            store.delete(f"{run_id}/{name}")


def _write_task(store: Store, place: str, task: bytes, callable_pickle: bytes | None, code: bytes | None) -> None:
    if callable_pickle is not None:
        store.put(f"{place}/callable.pkl", callable_pickle)
    if code is not None:
        store.put(f"{place}/code.tar.gz", code)
    store.put(f"{place}/task.json", task)  # written last, so that a reader of this object finds the others


def _pack_task(
    request: LaunchRequest, launched_with: LaunchedWith, package: Package | None
) -> tuple[bytes, bytes | None]:
    """Return the bytes of task.json, and of callable.pkl if the entrypoint is a callable.

    Raises:
        EntrypointArgumentsError: an argument of a named entrypoint is not a JSON value, or an argument does not fit the
            callable.
        EntrypointError: the callable cannot be pickled.
    """
    entrypoint, (kwargs, rank_env) = request.entrypoint, split_rank_env(request.args or {})
    record: dict[str, Any] = {"python": PYTHON, "rank_env": rank_env, "cwd": os.getcwd()}
    # the task contains the digest of the pickle, so that the digest of the task protects it as well
    record["launched_with"] = asdict(launched_with)
    if package is not None:
        record |= _code_of(package)
    if isinstance(entrypoint, str):
        if is_deeper_than(kwargs, MAX_DEPTH - 1):
            raise EntrypointArgumentsError(f"The arguments of {entrypoint!r} are nested deeper than {MAX_DEPTH - 1}.")
        for name, value in kwargs.items():
            if found := _not_json(value, name):
                raise EntrypointArgumentsError(
                    f"The arguments of {entrypoint!r} are sent as JSON, and argument {found}. Pass JSON values, or the "
                    "function itself, whose arguments are pickled."
                )
        texts = dict(request.arg_texts or {})
        return to_bytes({**record, "entrypoint": entrypoint, "args": kwargs, "arg_texts": texts}), None
    if isinstance(entrypoint, Command):
        return to_bytes({**record, "entrypoint": None, "command": list(entrypoint.words)}), None
    check_call(entrypoint, kwargs, describe(entrypoint))
    try:
        pickled, modules = pickle_call(entrypoint, kwargs)
    except Exception as error:
        raise EntrypointError(
            f"{describe(entrypoint)} and its arguments cannot be pickled: {error}. Create such objects inside the "
            "function, or give an importable entrypoint such as 'train.py:main'."
        ) from error
    digest = hashlib.sha256(pickled).hexdigest()
    record |= {"entrypoint": None, "name": describe(entrypoint), "sources": sources_of(entrypoint, pickled)}
    return to_bytes({**record, "callable_sha256": digest, "modules": modules}), pickled


def _code_of(package: Package) -> dict[str, Any]:
    return {
        **versions_here(),
        "code_sha256": package.sha256,
        "requirements": list(package.requirements),
        "pins": list(package.pins),
        "paths": list(package.paths),
    }


def add_code(task: StoredTask, package: Package) -> str:
    """Write a second version of a task, with code for replicas on other machines, and return its digest.

    This is for a run that was launched without such code. The new replicas get the digest from the process that starts
    them, so they need to trust no other process.

    Args:
        task: the task of the run.
        package: the code.

    Raises:
        StoreError: the store did not take an object.
    """
    data = to_bytes({**json.loads(bytes(task.read("task.json", task.digest))), **_code_of(package)})
    digest = hashlib.sha256(data).hexdigest()
    folder = task_folder_of(digest)
    if not exists(task.store, f"{task.run_id}/{folder}/task.json"):
        pickled = task.record.callable_sha256
        callable_pickle = None if pickled is None else bytes(task.read("callable.pkl", pickled))
        _write_task(task.store, f"{task.run_id}/{folder}", data, callable_pickle, package.archive)
    return digest


def _not_json(value: Any, path: str) -> str | None:
    """Describe the first part of an argument that is not a JSON value. Return None if there is none."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                return f"{path!r} has the key {key!r}, {kind_of(key)}; keys are strings"
            if found := _not_json(item, f"{path}.{key}"):
                return found
    elif isinstance(value, list | tuple):
        return next(filter(None, (_not_json(item, f"{path}[{i}]") for i, item in enumerate(value))), None)
    elif value is not None and not isinstance(value, bool | int | float | str):
        return f"{path!r} is {kind_of(value)}"
    return None


def _by_whom() -> dict[str, Any]:
    return {
        "created_at": time.time(),
        "created_by": f"{_user()}@{socket.gethostname()}",
        "launcher_pid": os.getpid(),
        "launcher": identify_process(),
        "cwd": os.getcwd(),
    }


def _user() -> str:
    try:
        import getpass

        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
