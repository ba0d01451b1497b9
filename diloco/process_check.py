"""A replica is one process: several that train under one rank are refused, since the work of all but one would be lost.

`torchrun`, `accelerate launch` and `torch.multiprocessing` start processes that inherit the replica's environment, so
each of them takes itself for the replica. Two checks refuse that before anything is trained: the process group, which
names the number of processes, and a record in the store (`rendezvous.membership.claim_process`), which the first
process to open a `DiLoCo` creates.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from diloco.errors import DiLoCoError
from diloco.rendezvous.membership import RunLocation


def check_is_one_process(place: RunLocation, rank: object, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse a process that is one of several of its replica.

        check_is_one_process(find_location(None, None, None, None), rank=None)

    A process whose rank was given as an argument is not refused: there, each process of a group may be a replica.

    Args:
        place: the run and the rank of this process.
        rank: the argument `rank` of `DiLoCo`; None if it was not given.
        environ: the environment, which names the processes that `torchrun` has started.

    Raises:
        DiLoCoError: this process is one of several.
    """
    if rank is not None:
        return
    member, n_members = _place_in_group() or _place_in_launch(environ)
    if n_members <= 1:
        return
    if place.replica is not None and (member, n_members) == (place.replica.rank, place.world_size):
        return  # a group across all replicas, on one machine: as a benchmark makes it, beside DiLoCo
    raise DiLoCoError(
        f"DiLoCo takes one process per replica so far, and this is process {member} of {n_members} in one. Launch more "
        f"replicas instead of several processes in each, without torchrun or accelerate launch: replicas launch … --n "
        f"{place.world_size * n_members}."
    )


def not_the_opener(pid: int) -> DiLoCoError:
    """Return the error of a process that uses a DiLoCo and was forked from its opener.

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
    """Return the rank and the size of torch's process group; None if there is no group."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def _place_in_launch(environ: Mapping[str, str]) -> tuple[int, int]:
    """Return the rank and the number of processes of `torchrun`; (0, 1) if it did not start this process.

    A `WORLD_SIZE` alone does not count: it may be left over from the job that launches replicas.
    """
    if "TORCHELASTIC_RUN_ID" not in environ:
        return 0, 1
    try:
        return int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1
