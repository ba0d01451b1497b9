"""A task: an entrypoint and its arguments, as they are stored with a run and read back by its replicas.

    <run>/run.json            who, what, when, backend; environment and secrets by name only
    <run>/task/task.json      the entrypoint, its arguments, the sha256 of the pickle
    <run>/task/callable.pkl   a function and its arguments, by cloudpickle
    <run>/task/code.tar.gz    the user's workspace and our packages, for replicas on other machines

`REPLICA_TASK_DIGEST`, the sha256 of task.json, reaches a replica with its launch and not through the store, so what
is unpickled is what was launched.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from executors.entrypoint import check_call, describe, split_rank_env
from executors.errors import CorruptObjectError, EntrypointArgumentsError, EntrypointError, RunExistsError, kind_of
from executors.native import GATHER_S, Package, RunSpec
from executors.policy import HangLimits, Restarts
from executors.run_key import key_id, new_key, parse_key
from executors.store import Store
from executors.store.records import FAR_AHEAD, MAX_DEPTH, exists, is_deeper_than, to_bytes
from executors.store.url import address_of, check_run_id, check_scheme
from executors.task.record import MAX_WORLD_SIZE, LaunchedWith, RunRecord
from executors.task.sources import sources_of
from executors.task.stored import PYTHON, StoredTask, folder_of, versions_here

MASK = "***"  # shown instead of a value of the environment


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """What somebody asks of a launch. Its values are checked when it is made; `launch` says what they mean.

    Raises:
        TypeError, ValueError: a value cannot be asked for.
    """

    entrypoint: str | Callable[..., Any]
    n: int
    args: Mapping[str, Any] | None = None
    arg_texts: Mapping[str, str] | None = None
    """Arguments as texts of a command line, which the entrypoint's annotations explain; `args` then has their values.
    """
    argv: Sequence[str] | None = None
    """The entrypoint is a file, run as a script with these arguments."""
    rendezvous: str | Path | None = None
    run_id: str | None = None
    gpu: str | None = None
    timeout: float | None = None
    max_cost: float | None = None
    env: Mapping[str, str] | None = None
    secrets: Sequence[str] = ()
    seed: int | None = None
    detach: bool = False
    chaos: Sequence[str] = ()
    min_replicas: int | None = None
    gather_s: float = GATHER_S
    fail_fast: bool = False
    tracker: str | None = None
    restarts: Restarts | str | None = None
    hang_timeout: str | None = None
    spares: int = 0
    health_check: str | None = None
    signed: bool = False
    origins: Mapping[str, str] = field(default_factory=dict)
    """Who said what: a flag, a variable of the environment, a file."""

    def __post_init__(self) -> None:
        if isinstance(self.n, bool) or not isinstance(self.n, int):
            raise TypeError(f"n is an integer, got n={self.n!r}.")
        if self.n < 1:
            raise ValueError(f"n must be at least 1, got n={self.n!r}.")
        if self.n > MAX_WORLD_SIZE:
            raise ValueError(f"n must be at most {MAX_WORLD_SIZE}, got n={self.n!r}.")
        if not isinstance(self.entrypoint, str) and not callable(self.entrypoint):
            raise TypeError(
                f"entrypoint is a callable or the name of one, as in 'train.py:main', got {self.entrypoint!r}."
            )
        if not isinstance(self.args, Mapping | None):
            raise TypeError(f"args maps names to values, as in {{'steps': 100}}, got {self.args!r}.")
        if self.argv is not None:
            self._check_script()
        if self.timeout is not None and not isinstance(self.timeout, int | float):
            raise TypeError(f"timeout is a number of seconds, got {self.timeout!r}.")
        if self.max_cost is not None and not (isinstance(self.max_cost, int | float) and self.max_cost > 0):
            raise ValueError(f"max_cost is a number of US dollars, more than 0, got {self.max_cost!r}.")
        if self.rendezvous is not None:
            check_scheme(self.rendezvous)
        if str(self.rendezvous).startswith("memory:"):
            raise ValueError(
                f"rendezvous={str(self.rendezvous)!r} lives in this process alone; replicas could not see it."
            )
        for name, value in (self.env or {}).items():
            if not isinstance(value, str) or not name or "=" in name or "\0" in name + value:
                raise ValueError(f"env maps names to strings, got {name!r}: {type(value).__name__}.")
        if self.min_replicas is not None and not (type(self.min_replicas) is int and 1 <= self.min_replicas <= self.n):
            raise ValueError(f"min_replicas is from 1 to n={self.n}, got min_replicas={self.min_replicas!r}.")
        if not isinstance(self.gather_s, int | float) or not 0 <= self.gather_s < FAR_AHEAD:
            raise ValueError(f"gather_s is a number of seconds, got gather_s={self.gather_s!r}.")
        Restarts.of(self.restarts), HangLimits.parse(self.hang_timeout)
        if type(self.spares) is not int or not 0 <= self.spares <= MAX_WORLD_SIZE:
            raise ValueError(f"spares is a number from 0 to {MAX_WORLD_SIZE}, got spares={self.spares!r}.")
        if not isinstance(self.health_check, str | None):
            raise TypeError(f"health_check names a function, as 'pkg.mod:f', got {self.health_check!r}.")
        if not isinstance(self.signed, bool):
            raise TypeError(f"signed is True or False, got signed={self.signed!r}.")
        if not isinstance(self.tracker, str | None):
            raise TypeError(f"tracker is a name, as in 'trackio' or 'pkg.mod:Class', got {self.tracker!r}.")
        if isinstance(self.chaos, str):
            raise TypeError(f"chaos is a list of specs, as in [{self.chaos!r}], got a string.")
        if self.run_id is not None:
            check_run_id(self.run_id)

    def _check_script(self) -> None:
        if isinstance(self.argv, str) or not all(isinstance(text, str) for text in self.argv or ()):
            raise TypeError(f"argv is a list of strings, as in ['--lr', '1e-3'], got {self.argv!r}.")
        if self.args or self.arg_texts:
            raise ValueError(
                "args go to a function and argv to a script: give one of them (--arg, or what follows --)."
            )
        if not isinstance(self.entrypoint, str) or not self.entrypoint.endswith(".py"):
            raise ValueError(
                f"argv, or what follows --, goes to a file that is run as a script, as in 'train.py', got "
                f"{describe(self.entrypoint)!r}."
            )


@dataclass(frozen=True)
class NewRun:
    """A run that is not written yet: its objects, and what its executor gets."""

    spec: RunSpec
    record: dict[str, Any]
    task: bytes
    callable_pickle: bytes | None
    code: bytes | None = None


def plan_run(
    request: LaunchRequest,
    run_id: str,
    store_url: str,
    executor: Mapping[str, Any],
    package: Package | None = None,
    *,
    code: Mapping[str, Any] | None = None,
) -> NewRun:
    """Compose a new run and its task, writing nothing.

    Args:
        executor: what its record says of the executor: at least the name of its `backend`.
        package: the code, for replicas on other machines.
        code: what its record says of the code that does not travel.

    Raises:
        EntrypointError: the task cannot travel.
    """
    key = new_key() if request.signed else None
    launched_with = LaunchedWith(
        **executor,
        world_size=request.n,
        entrypoint=describe(request.entrypoint),
        env=tuple(sorted(request.env or {})),
        secrets=tuple(sorted(request.secrets)),
        chaos=tuple(request.chaos),
        gpu=request.gpu,
        timeout_s=request.timeout,
        min_replicas=request.min_replicas,
        gather_s=request.gather_s,
        max_cost=request.max_cost,
        fail_fast=request.fail_fast,
        restarts=None if request.restarts is None else str(Restarts.of(request.restarts)),
        hang=str(HangLimits.parse(request.hang_timeout)),
        spares=request.spares,
        health_check=request.health_check,
        signed=request.signed,
        key_id=None if key is None else key_id(parse_key(key)),
        tracker=request.tracker,
    )
    task, pickled = _pack_task(request, launched_with, package)
    record = RunRecord(
        **vars(launched_with),
        task_digest=hashlib.sha256(task).hexdigest(),
        **_by_whom(),
        python=sys.version.split()[0],
        detach=request.detach,
        seed=request.seed,
        code=code if package is None else package.about,
        origins=request.origins,
    )
    written = {"run_id": check_run_id(run_id), **asdict(record)}
    try:
        RunRecord.parse(to_bytes(written))  # what nobody could read is not written
    except CorruptObjectError as error:
        raise ValueError(f"This run cannot be recorded: {error}") from None
    spec = RunSpec(
        run_id=run_id,
        store_url=store_url,
        task_digest=record.task_digest,
        world_size=request.n,
        ranks=tuple(range(request.n)),
        env=dict(request.env or {}),
        secret_names=tuple(request.secrets),
        key=key,
        detach=request.detach,
        chaos=tuple(request.chaos),
        min_replicas=request.min_replicas,
        gather_s=request.gather_s,
        fail_fast=request.fail_fast,
        restarts=launched_with.restarts,
        hang=launched_with.hang,
        launched_at=record.created_at,
        spares=request.spares,
    )
    return NewRun(spec, written, task, pickled, None if package is None else package.archive)


def create_run(
    request: LaunchRequest,
    run_id: str,
    store: Store,
    executor: Mapping[str, Any],
    package: Package | None = None,
    *,
    code: Mapping[str, Any] | None = None,
) -> RunSpec:
    """Write a new run and its task into the store. Takes what `plan_run` takes.

    Raises:
        RunExistsError: the id is taken; nothing was changed.
        EntrypointError: the task cannot travel; nothing was written.
    """
    new = plan_run(request, run_id, store.url, executor, package, code=code)
    _write_run(store, run_id, new)
    return new.spec


def continue_run(
    old: StoredTask, spec: RunSpec, record: RunRecord, *, gpu: str | None, timeout: float | None
) -> RunSpec:
    """Write a new run of a task that was launched before, which goes on from the newest snapshot of the old run.

    Args:
        old: the task, for which somebody vouched.
        spec: the new run, but for the digest of its task.
        record: of the old run.
        gpu, timeout: of the new run.

    Raises:
        StoreError: the task's code or callable is not what was launched.
    """
    described = json.loads(bytes(old.read("task.json", old.digest)))
    launched_with = replace(
        old.launched_with,
        continues=old.run_id,
        chaos=(),
        gpu=gpu,
        timeout_s=timeout,
        restarts=spec.restarts,
        hang=spec.hang,
        spares=0,
    )
    task = to_bytes({**described, "launched_with": asdict(launched_with)})
    spec = replace(spec, task_digest=hashlib.sha256(task).hexdigest())
    new_record = replace(record, **vars(launched_with), task_digest=spec.task_digest, detach=spec.detach, **_by_whom())
    pickle_sha256, code_sha256 = old.record.callable_sha256, described.get("code_sha256")
    pickled = None if pickle_sha256 is None else bytes(old.read("callable.pkl", pickle_sha256))
    code = None if code_sha256 is None else bytes(old.read("code.tar.gz", code_sha256))
    _write_run(old.store, spec.run_id, NewRun(spec, {"run_id": spec.run_id, **asdict(new_record)}, task, pickled, code))
    return spec


def _write_run(store: Store, run_id: str, new: NewRun) -> None:
    if not store.put_if_absent(f"{run_id}/run.json", to_bytes(new.record)):
        name = address_of(store.url, run_id)  # another machine may have launched it, and this one not know its id
        raise RunExistsError(
            f"Run {run_id!r} exists at {store.url}. Look at it with executors.attach({name!r}) or "
            f"`replicas status {shlex.quote(name)}`, or choose another run id."
        )
    _write_task(store, f"{run_id}/task", new.task, new.callable_pickle, new.code)


def _write_task(store: Store, place: str, task: bytes, callable_pickle: bytes | None, code: bytes | None) -> None:
    if callable_pickle is not None:
        store.put(f"{place}/callable.pkl", callable_pickle)
    if code is not None:
        store.put(f"{place}/code.tar.gz", code)
    store.put(f"{place}/task.json", task)  # last: who finds it finds the rest


def _pack_task(
    request: LaunchRequest, launched_with: LaunchedWith, package: Package | None
) -> tuple[bytes, bytes | None]:
    """Return task.json and, of a callable, callable.pkl, having checked that they can travel.

    Raises:
        EntrypointArgumentsError: an argument is not a JSON value (entrypoint by name), or does not fit the callable.
        EntrypointError: the callable cannot be pickled.
    """
    entrypoint, (kwargs, rank_env) = request.entrypoint, split_rank_env(request.args or {})
    record: dict[str, Any] = {"python": PYTHON, "rank_env": rank_env, "seed": request.seed}
    record["launched_with"] = asdict(launched_with)  # so that it cannot be exchanged either
    if package is not None:
        record |= _code_of(package)
    if isinstance(entrypoint, str):
        if is_deeper_than(kwargs, MAX_DEPTH - 1):
            raise EntrypointArgumentsError(f"The arguments of {entrypoint!r} are nested deeper than {MAX_DEPTH - 1}.")
        for name, value in kwargs.items():
            if found := _not_json(value, name):
                raise EntrypointArgumentsError(
                    f"The arguments of {entrypoint!r} travel as JSON, and argument {found}. Pass JSON values, or the "
                    "function itself, whose arguments are pickled."
                )
        texts = dict(request.arg_texts or {})
        return to_bytes({**record, "entrypoint": entrypoint, "args": kwargs, "arg_texts": texts}), None
    check_call(entrypoint, kwargs, describe(entrypoint))
    import cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps((entrypoint, kwargs))
    except Exception as error:
        raise EntrypointError(
            f"{describe(entrypoint)} and its arguments cannot be pickled: {error}. Create such objects inside the "
            "function, or give an importable entrypoint such as 'train.py:main'."
        ) from error
    digest = hashlib.sha256(pickled).hexdigest()
    record |= {"entrypoint": None, "name": describe(entrypoint), "sources": sources_of(entrypoint, pickled)}
    return to_bytes({**record, "callable_sha256": digest}), pickled


def _code_of(package: Package) -> dict[str, Any]:
    return {
        **versions_here(),
        "code_sha256": package.sha256,
        "requirements": list(package.requirements),
        "pins": list(package.pins),
        "paths": list(package.paths),
    }


def add_code(task: StoredTask, package: Package) -> str:
    """Write a task beside itself, with the code that replicas on other machines get; return its digest.

    For a run that was launched without: the process that starts them hands them the digest, so nobody else has to
    vouch for it.
    """
    data = to_bytes({**json.loads(bytes(task.read("task.json", task.digest))), **_code_of(package)})
    digest = hashlib.sha256(data).hexdigest()
    folder = folder_of(digest)
    if not exists(task.store, f"{task.run_id}/{folder}/task.json"):
        pickled = task.record.callable_sha256
        callable_pickle = None if pickled is None else bytes(task.read("callable.pkl", pickled))
        _write_task(task.store, f"{task.run_id}/{folder}", data, callable_pickle, package.archive)
    return digest


def _not_json(value: Any, path: str) -> str | None:
    """Say of the first part of an argument that is not JSON where it is, and what."""
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
        "cwd": os.getcwd(),
    }


def _user() -> str:
    try:
        import getpass

        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
