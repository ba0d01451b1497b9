"""Detects that a replica trained a model without the others, by the modules and objects of its process.

If a script that does not use `replicas` is launched several times, it trains the same model several times and succeeds.
The user gets a warning for that. Sharded inference, sweeps and plain functions are intended, and get no warning.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from executors.errors import ReplicasError
from executors.replica import RANK, Replica
from executors.task.entrypoint import find_source
from executors.task.record import TaskRecord
from executors.worker.failure import is_users_file

MAX_SOURCE_BYTES = 4 << 20
MAX_SOURCES = 1000
LAUNCHERS = ("torchrun", "accelerate-launch", "deepspeed")
MODULES = {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"}


def has_trained_alone(replica: Replica, task: TaskRecord) -> bool:
    """Return True only if this process trained, and no code in it can know its rank.

    All of these must hold:
    - The entrypoint is a file or an importable function. A function that was pickled is not judged.
    - The process made an optimizer of torch. Inference and plain functions make none.
    - No code asked for the replica. `DiLoCo`, `current_replica()` and the callbacks of trainers do.
    - No argument and no variable has `${rank}`, and no source file of the user names `REPLICA_RANK`.

    The modules of a command's processes are not known. A command counts as training if it is a launcher of torch, as
    torchrun is. The source files are those beside its scripts.

    Args:
        replica: the replica of this process, whose entrypoint has returned.
        task: the task of the run.
    """
    if replica.world_size < 2 or replica.knows_rank:
        return False
    if task.command is not None:
        return _is_launcher_of_torch(task.command) and not _has_reported(replica) and not _names_rank(task.command)
    if task.entrypoint is None:
        return False
    try:
        return _made_optimizer() and not any(RANK.encode() in source for source in _users_sources(task.entrypoint))
    except Exception:  # noqa: BLE001 - modules may be any object, and no result may be lost because of a hint
        return False


def _is_launcher_of_torch(command: Sequence[str]) -> bool:
    program = Path(command[0]).name
    modules = {command[at + 1] for at, word in enumerate(command[:-1]) if word == "-m"}
    return program in LAUNCHERS or (program, *command[1:2]) == ("accelerate", "launch") or bool(modules & MODULES)


def _has_reported(replica: Replica) -> bool:
    """Return True if a process of the command has asked for its replica, or if that cannot be known."""
    return replica.page is None or replica.page.speaker > 0


def _names_rank(command: Sequence[str]) -> bool:
    """Return True if a file beside a script of the command names the variable with the rank."""
    folders = {Path(word).parent for word in command if word.endswith(".py")}
    for folder in folders:
        for file in itertools.islice(folder.glob("*.py"), MAX_SOURCES):
            with contextlib.suppress(OSError), file.open("rb") as source:
                if RANK.encode() in source.read(MAX_SOURCE_BYTES):
                    return True
    return False


def _made_optimizer() -> bool:
    """Return True if an optimizer of torch was made in this process."""
    torch = sys.modules.get("torch")
    base = getattr(getattr(torch, "optim", None), "Optimizer", None)
    # The constructor of an optimizer wraps the `step` of its class once, and marks that method. If a future torch sets
    # no mark, the result is False, and there is no warning.
    return base is not None and any(getattr(each.step, "hooked", False) for each in _subclasses(base))


def _subclasses(base: Any) -> Iterator[Any]:
    for each in base.__subclasses__():
        yield each
        yield from _subclasses(each)


def _users_sources(entrypoint: str) -> Iterator[bytes]:
    """Yield the source of the entrypoint's file, and of all modules of the user that are loaded."""
    files = {file for each in [*sys.modules.values()] if isinstance(file := getattr(each, "__file__", None), str)}
    with contextlib.suppress(ReplicasError):
        if (found := find_source(entrypoint)) is not None:
            files.add(str(found[0].absolute()))
    for file in files:
        if file.endswith(".py") and is_users_file(file):
            with contextlib.suppress(OSError), Path(file).open("rb") as source:
                yield source.read(MAX_SOURCE_BYTES)
