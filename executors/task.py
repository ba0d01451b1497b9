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
import re
import shlex
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from executors.entrypoint import check_call, load_entrypoint, prepare_entrypoint
from executors.errors import CorruptObjectError, EntrypointArgumentsError, EntrypointError, RunExistsError, StoreError
from executors.insisting import insist
from executors.records import MAX_DEPTH, get_at_most, is_deeper_than, to_bytes
from executors.run_record import LaunchedWith, RunRecord
from executors.store import Store
from executors.store.opening import address_of
from executors.task_record import TaskRecord

if TYPE_CHECKING:
    from executors.shipping import Package

RUN_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
READ_TRIES = 3
MAX_TASK_BYTES = 1 << 30  # of each of its objects
MASK = "***"  # shown instead of a value of the environment
PYTHON = "{}.{}".format(*sys.version_info)


@dataclass(frozen=True)
class RunSpec:
    """What an executor of ours needs to know of the run its replicas belong to. JSON; never stored."""

    run_id: str
    store_url: str
    task_digest: str
    world_size: int
    ranks: tuple[int, ...]
    attempt: int = 0
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Additional environment of the replicas: reaches them and is never recorded."""
    secret_names: tuple[str, ...] = ()
    detach: bool = False
    chaos: tuple[str, ...] = ()
    """Faults that the replicas are to suffer; see `chaos.py`."""


@dataclass(frozen=True)
class StoredTask:
    """A task as it was read from the store: nothing of the user's was imported or unpickled yet."""

    store: Store
    run_id: str
    record: TaskRecord
    digest: str
    """The sha256 of task.json."""

    @property
    def launched_with(self) -> LaunchedWith:
        """What `run.json` says of how the run was launched, vouched for by this task's digest as well.

        Raises:
            CorruptObjectError: the task does not say it.
        """
        if self.record.launched_with is None:
            key = f"{self.run_id}/task/task.json"
            raise CorruptObjectError(
                f"{key!r} in {self.store.url} does not say how the run was launched.", key=key, url=self.store.url
            )
        return self.record.launched_with

    def prepare(self) -> None:
        """Compile the entrypoint's file, if it is one, for this process and those it forks. Runs nothing of it."""
        if self.record.entrypoint is not None:
            prepare_entrypoint(self.record.entrypoint)

    def load(self) -> tuple[Callable[..., Any], Mapping[str, Any]]:
        """Import or unpickle the entrypoint, and return it with its arguments.

        Raises:
            StoreError: the pickle is not what was launched.
            EntrypointError: the entrypoint cannot be loaded here. What the user's module raises is passed on.
        """
        if self.record.entrypoint is not None:
            return load_entrypoint(self.record.entrypoint), self.record.args or {}
        if self.record.python != PYTHON:
            raise EntrypointError(
                f"The callable was pickled by Python {self.record.python}, this replica runs {PYTHON}. "
                "Use the same version, or an importable entrypoint."
            )
        key = f"{self.run_id}/task/callable.pkl"
        pickled = _get_checked(self.store, key, self.record.callable_sha256)
        import cloudpickle

        function, args = cloudpickle.loads(pickled)
        return function, args


@dataclass(frozen=True)
class NewRun:
    """A run that is not written yet: its objects, and what its executor will be told."""

    spec: RunSpec
    record: dict[str, Any]
    task: bytes
    callable_pickle: bytes | None
    code: bytes | None = None


def new_run_id() -> str:
    """Make a run id that people can tell apart: two words and four hex digits."""
    from executors.words import random_words

    return f"{random_words()}-{os.urandom(2).hex()}"


def check_run_id(run_id: str) -> str:
    """Return the run id.

    Raises:
        ValueError: it cannot be a name everywhere (paths, labels, buckets).
    """
    if not RUN_ID.fullmatch(run_id):
        raise ValueError(
            f"Bad run id {run_id!r}: use 1 to 40 lower-case letters, digits and hyphens, not a hyphen first, "
            "as in 'my-run-1'."
        )
    return run_id


def split_rank_env(args: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Take `rank_env`, the name of one more variable for the rank, out of the arguments."""
    rest = dict(args)
    for name in rest:
        if not isinstance(name, str):
            raise TypeError(f"Arguments are named by strings, got {name!r}.")
    rank_env = rest.pop("rank_env", None)
    if rank_env is not None and (not isinstance(rank_env, str) or not rank_env.isidentifier()):
        raise ValueError(f"rank_env names an environment variable, got {rank_env!r}.")
    return rest, rank_env


def pack_task(
    entrypoint: str | Callable[..., Any],
    args: Mapping[str, Any],
    seed: int | None = None,
    package: Package | None = None,
    launched_with: Mapping[str, Any] | None = None,
) -> tuple[bytes, bytes | None]:
    """Turn an entrypoint and its arguments into (task.json, callable.pkl or None), and check that they can travel.

    Args:
        launched_with: what else decides what runs where, so that it cannot be exchanged either.
        package: the code that goes with them, to replicas on other machines.

    Raises:
        EntrypointArgumentsError: an argument is no JSON value (string entrypoint), or the callable does not take them.
        EntrypointError: the callable cannot be pickled.
    """
    kwargs, rank_env = split_rank_env(args)
    record: dict[str, Any] = {"python": PYTHON, "rank_env": rank_env, "seed": seed}
    if launched_with is not None:
        record["launched_with"] = dict(launched_with)
    if package is not None:
        from executors.versions import versions_here

        record |= {
            **versions_here(),
            "code_sha256": package.workspace.sha256,
            "requirements": list(package.requirements),
            "paths": list(package.paths),
        }
    if isinstance(entrypoint, str):
        try:
            json.dumps(kwargs)
        except (TypeError, ValueError) as error:
            raise EntrypointArgumentsError(
                f"The arguments of {entrypoint!r} travel as JSON: {error}. Pass JSON values, or a callable."
            ) from None
        if is_deeper_than(kwargs, MAX_DEPTH - 1):
            raise EntrypointArgumentsError(f"The arguments of {entrypoint!r} are nested deeper than {MAX_DEPTH - 1}.")
        return to_bytes({**record, "entrypoint": entrypoint, "args": kwargs}), None
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
    return to_bytes({**record, "entrypoint": None, "name": describe(entrypoint), "callable_sha256": digest}), pickled


def plan_run(
    store_url: str,
    run_id: str,
    entrypoint: str | Callable[..., Any],
    args: Mapping[str, Any],
    world_size: int,
    *,
    backend: str,
    env: Mapping[str, str] | None = None,
    secret_names: Sequence[str] = (),
    seed: int | None = None,
    detach: bool = False,
    chaos: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    package: Package | None = None,
) -> NewRun:
    """Compose a new run and its task, writing nothing.

    Args:
        options: what else `run.json` tells: gpu, timeout_s, the executor's class.
        package: the code, for replicas on other machines.

    Raises:
        EntrypointError: the task cannot travel.
    """
    check_run_id(run_id)
    launched_with = {
        "backend": backend,
        "world_size": world_size,
        "entrypoint": describe(entrypoint),
        "env": sorted(env or {}),
        "secrets": sorted(secret_names),
        "chaos": list(chaos),
        **(options or {}),
    }
    task, pickled = pack_task(entrypoint, args, seed, package, launched_with)
    task_digest = hashlib.sha256(task).hexdigest()
    record = {
        "run_id": run_id,
        **launched_with,
        "task_digest": task_digest,
        "created_at": time.time(),
        "created_by": f"{_user()}@{socket.gethostname()}",
        "launcher_pid": os.getpid(),
        "cwd": os.getcwd(),
        "python": sys.version.split()[0],
        "detach": detach,
        "seed": seed,
    }
    if package is not None:
        code = package.workspace
        record["code"] = {name: getattr(code, name) for name in ("sha256", "size_bytes", "n_files", "commit", "dirty")}
    try:
        RunRecord.parse(to_bytes(record))  # what nobody could read is not written
    except CorruptObjectError as error:
        raise ValueError(f"This run cannot be recorded: {error}") from None
    spec = RunSpec(
        run_id=run_id,
        store_url=store_url,
        task_digest=task_digest,
        world_size=world_size,
        ranks=tuple(range(world_size)),
        env=dict(env or {}),
        secret_names=tuple(secret_names),
        detach=detach,
        chaos=tuple(chaos),
    )
    return NewRun(spec, record, task, pickled, None if package is None else package.workspace.archive)


def create_run(
    store: Store,
    run_id: str,
    entrypoint: str | Callable[..., Any],
    args: Mapping[str, Any],
    world_size: int,
    **more: Any,
) -> RunSpec:
    """Write a new run and its task into the store. Takes what `plan_run` takes.

    Raises:
        RunExistsError: the id is taken; nothing was changed.
        EntrypointError: the task cannot travel; nothing was written.
    """
    new = plan_run(store.url, run_id, entrypoint, args, world_size, **more)
    if not store.put_if_absent(f"{run_id}/run.json", to_bytes(new.record)):
        from executors.state import locate  # which an adapter in a replica has no use for

        # Another machine may have launched it: then this one does not know it by its id.
        name = run_id if locate(run_id) == store.url else address_of(store.url, run_id)
        raise RunExistsError(
            f"Run {run_id!r} exists at {store.url}. Look at it with executors.attach({name!r}) or "
            f"`replicas status {shlex.quote(name)}`, or choose another run id."
        )
    if new.callable_pickle is not None:
        store.put(f"{run_id}/task/callable.pkl", new.callable_pickle)
    if new.code is not None:
        store.put(f"{run_id}/task/code.tar.gz", new.code)
    store.put(f"{run_id}/task/task.json", new.task)  # last: who finds it finds the rest
    return new.spec


def read_task(store: Store, run_id: str, digest: str | None = None) -> StoredTask:
    """Read a run's task, checking that it is the one that was launched.

    Args:
        digest: the sha256 of task.json that came with the launch; None where a launch cannot carry one.

    Raises:
        StoreError: what the store holds is not what was launched.
    """
    key = f"{run_id}/task/task.json"
    data = _get_checked(store, key, digest)
    return StoredTask(store, run_id, TaskRecord.parse(data, key, store.url), hashlib.sha256(data).hexdigest())


def describe(entrypoint: str | Callable[..., Any]) -> str:
    """Name an entrypoint for people."""
    if isinstance(entrypoint, str):
        return entrypoint
    name = getattr(entrypoint, "__qualname__", None) or repr(entrypoint)
    return f"{getattr(entrypoint, '__module__', '?')}.{name}"


def _get_checked(store: Store, key: str, digest: str | None) -> memoryview:
    """Read what was launched; a failing store, or a reading that is not it, is worth another try."""
    for _ in range(READ_TRIES):
        data = insist(lambda: get_at_most(store, key, MAX_TASK_BYTES))
        found = hashlib.sha256(data).hexdigest()
        if digest in (None, found):
            return data
    raise StoreError(
        f"{key!r} in {store.url} is not what was launched: its sha256 is {found}, the launch's {digest}.",
        key=key,
        url=store.url,
    )


def _user() -> str:
    try:
        import getpass

        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
