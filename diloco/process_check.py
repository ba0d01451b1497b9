"""Refuses a replica with several training processes, because the work of all processes but one would be lost.

`torchrun`, `accelerate launch` and `torch.multiprocessing` start processes that inherit the replica's environment. Each
of them then regards itself as the replica. Two checks refuse that before training begins. First, the process group
tells the number of processes. Second, the first process that opens a `DiLoCo` creates a record in the store
(`rendezvous.membership.claim_process`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from diloco.errors import DiLoCoError
from diloco.rendezvous.membership import RunLocation


def check_is_one_process(place: RunLocation, rank: object, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse a process that is one of several processes of its replica.

        check_is_one_process(find_location(None, None, None, None), rank=None)

    A process that got its rank as an argument is not refused, because there each process of a group may be a replica.

    Args:
        place: the run and the rank of this process.
        rank: the argument `rank` of `DiLoCo`. None: it was not given.
        environ: the environment, in which `torchrun` sets the number of processes.

    Raises:
        DiLoCoError: this process is one of several.
    """
    if rank is not None:
        return
    member, n_members = _place_in_group() or _place_in_launch(environ)
    if n_members <= 1:
        return
    if place.replica is not None and (member, n_members) == (place.replica.rank, place.world_size):
        # here the processes of the group are the replicas, as in a benchmark that compares DiLoCo with other methods
        return
    raise DiLoCoError(
        f"DiLoCo needs one process per replica, and this is process {member} of {n_members} in one replica. Launch "
        f"more replicas instead, without torchrun or accelerate launch: replicas launch … --n "
        f"{place.world_size * n_members}."
    )


def not_the_opener(pid: int) -> DiLoCoError:
    """Return the error for a process that was forked from the process that opened a DiLoCo, and uses it.

    Args:
        pid: the process that opened the DiLoCo.

    Example:
        if os.getpid() != pid: raise not_the_opener(pid)
    """
    return DiLoCoError(
        f"Process {os.getpid()} cannot use this DiLoCo: process {pid} opened it. To train in several processes, "
        "launch more replicas."
    )


def _place_in_group() -> tuple[int, int] | None:
    """Return the rank and the size of torch's process group. None: there is no group."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def _place_in_launch(environ: Mapping[str, str]) -> tuple[int, int]:
    """Return the rank and the number of processes of `torchrun`; (0, 1) if `torchrun` did not start this process.

    `WORLD_SIZE` alone does not count, because it may come from the job that launches the replicas.
    """
    if "TORCHELASTIC_RUN_ID" not in environ:
        return 0, 1
    try:
        return int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1
