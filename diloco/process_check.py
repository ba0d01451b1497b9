"""Finds the process group of a replica with several processes, and refuses processes whose work would be lost.

`replicas launch --procs`, `torchrun`, `accelerate launch` and `torch.multiprocessing` start processes that inherit the
replica's environment. They open one `DiLoCo` together, in their process group. A process without such a group would
regard itself as the whole replica. The check here refuses it, and so does a record in the store that the first process
creates (`rendezvous.claims.claim_process`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from diloco.errors import DiLoCoError
from diloco.rendezvous.run_location import RunLocation
from executors.errors import kind_of
from executors.replica import place_in_replica

WAIT_FOR_MEMBERS_S = 60.0
"""Longest wait for the other processes of a group to open the DiLoCo of the same name."""


def find_group(
    group: Any, place: RunLocation, rank: object, name: str, environ: Mapping[str, str] = os.environ
) -> Any | None:
    """Return the process group in which the processes of this replica train together. None: this process is alone.

    A process that got its rank as an argument is alone, because there each process of a group may be a replica.

    Args:
        group: the argument `group` of `DiLoCo`.
        place: the run and the rank of this process.
        rank: the argument `rank` of `DiLoCo`. None: it was not given.
        name: the name of the DiLoCo.
        environ: the environment, in which a launcher sets the number of processes.

    Raises:
        DiLoCoError: this process is one of several without a group, or another process has not opened the DiLoCo.
        TypeError: `group` is not a process group.

    Example:
        find_group("auto", find_location(None, None, None, None), rank=None, name="main")
    """
    member, n_members = place_in_replica(environ)
    if group is None:
        if member and rank is None:
            raise DiLoCoError(
                f"group=None lets member 0 alone open the DiLoCo {name!r}, and this is member {member} of {n_members}. "
                "Open it in member 0 only, or in all members with group='auto'."
            )
        return None
    distributed = _distributed()
    if isinstance(group, str):
        if group != "auto":
            raise TypeError(f'group must be "auto", None or a process group of torch, got group={group!r}.')
        if rank is not None:
            return None
        if distributed is None:
            if n_members > 1:
                raise DiLoCoError(
                    f"{n_members} processes of this replica open a DiLoCo, and have no process group: call "
                    "torch.distributed.init_process_group() before, or open it in member 0 alone: DiLoCo(model, "
                    "group=None)."
                )
            return None
        group = distributed.group.WORLD
    elif distributed is None or not isinstance(group, distributed.ProcessGroup):
        raise TypeError(f'group must be "auto", None or a process group of torch, got group={kind_of(group)}.')
    if group.size() == 1 or not _is_of_one_replica(group, place, name):
        return None
    return group


def _distributed() -> Any | None:
    """Return `torch.distributed` if this process has a default group. The module is not imported for this check."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def _is_of_one_replica(group: Any, place: RunLocation, name: str) -> bool:
    """Wait for all processes of a group, and return True if they belong to one replica.

    The processes of a group may also be the replicas of a run, as in a benchmark that compares DiLoCo with other
    methods. Each of them is then alone in its replica.

    Raises:
        DiLoCoError: some processes have not opened the DiLoCo in time.
    """
    store = _store_of(group)
    # All processes of a group open their DiLoCos in the same order, so each process counts the same number.
    number = store.add(_counter(group, name), 1)
    keys = [f"replicas/{name}/{number}/{each}" for each in range(group.size())]
    store.set(keys[group.rank()], str(-1 if place.replica is None else place.replica.rank))
    try:
        store.wait(keys, timedelta(seconds=WAIT_FOR_MEMBERS_S))
    except Exception as error:  # the stores of torch raise different errors
        missing = [each for each, key in enumerate(keys) if not store.check([key])]
        raise DiLoCoError(
            f"{_members(missing)} not opened the DiLoCo {name!r}: open it in all, or say group=None."
        ) from error
    ranks = {int(store.get(key)) for key in keys}
    return len(ranks) == 1


def store_of_members(group: Any, name: str) -> Any:
    """Return a part of a group's store for the newest DiLoCo of a name. No other DiLoCo has the same keys.

    Args:
        group: the process group.
        name: the name of the DiLoCo.

    Example:
        store_of_members(find_group("auto", place, None, "main"), "main")
    """
    from torch.distributed.distributed_c10d import PrefixStore

    store = _store_of(group)
    return PrefixStore(f"replicas/{name}/{store.add(_counter(group, name), 0)}/group", store)


def _counter(group: Any, name: str) -> str:
    """Return the key in a group's store of the number of DiLoCos of a name that this process has opened."""
    return f"replicas/{name}/opened/{group.rank()}"


def _store_of(group: Any) -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._world.pg_map[group][1]


def _members(numbers: list[int]) -> str:
    """Return a text such as "Members 1-3 have" or "Member 1 has"."""
    if len(numbers) == 1:
        return f"Member {numbers[0]} has"
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"Members {numbers[0]}-{numbers[-1]} have"
    return f"Members {', '.join(map(str, numbers))} have"


def not_the_opener(pid: int) -> DiLoCoError:
    """Return the error for a process that was forked from the process that opened a DiLoCo, and uses it.

    Args:
        pid: the process that opened the DiLoCo.

    Example:
        if os.getpid() != pid: raise not_the_opener(pid)
    """
    return DiLoCoError(
        f"Process {os.getpid()} cannot use this DiLoCo: process {pid} opened it. To train in several processes, "
        "launch more replicas (--n), or several processes in each (--procs)."
    )
