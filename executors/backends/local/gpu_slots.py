"""Chooses GPUs for a local replica that no live replica of its run on this machine uses.

A run may have several supervisors, one for each start of ranks, and they do not know each other. So locks in files show
which GPUs are taken. Each GPU has a file in the run's folder, and a replica's process holds a lock on it as long as it
lives. Replicas that share a GPU hold locks on a second file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote


@dataclass(frozen=True)
class GpuSlot:
    """The GPUs of one replica.

    Example:
        take_slot(folder, ["0", "1"], rank=1).devices
    """

    devices: str
    """The value of `CUDA_VISIBLE_DEVICES`."""
    locks: tuple[int, ...] = ()
    """The descriptors that hold the locks. The replica inherits them, and its parent closes its copies."""
    is_shared: bool = False
    """True if another replica of the run uses the GPUs, because none were free."""


def take_slot(folder: Path, slots: Sequence[str], rank: int, stuck: Sequence[str] = ()) -> GpuSlot:
    """Take the GPUs for a rank: the slot of its own number if it is free, or else the next free slot.

    Args:
        folder: the run's folder on this machine.
        slots: the GPUs of each slot, as in `CUDA_VISIBLE_DEVICES`.
        rank: the rank.
        stuck: the slots on which a process cannot be killed. If no slot is free, these are shared first. Default: none.

    Example:
        take_slot(folder, ["0", "1"], rank=1)
    """
    own = rank % len(slots)
    for devices in (*slots[own:], *slots[:own]):
        try:
            return GpuSlot(devices, _lock_all(folder, devices.split(",")))
        except BlockingIOError:
            continue
        except OSError:  # the file system has no locks
            return GpuSlot(slots[own])
    devices, held = next((each for each in stuck if _has_no_guests(folder, each)), slots[own]), list[int]()
    with contextlib.suppress(OSError):
        for device in devices.split(","):
            held.append(_locked(folder, device, "guests", fcntl.LOCK_SH))
    return GpuSlot(devices, tuple(held), is_shared=True)


def _has_no_guests(folder: Path, devices: str) -> bool:
    with contextlib.suppress(OSError):
        for device in devices.split(","):
            os.close(_locked(folder, device, "guests", fcntl.LOCK_EX))
        return True
    return False


def _lock_all(folder: Path, devices: Sequence[str]) -> tuple[int, ...]:
    """Lock all GPUs of a slot, and return the descriptors.

    Raises:
        BlockingIOError: another process has locked a GPU.
        OSError: a GPU's file cannot be locked.
    """
    held: list[int] = []
    try:
        for device in devices:
            held.append(_locked(folder, device, "lock", fcntl.LOCK_EX))
            os.close(_locked(folder, device, "guests", fcntl.LOCK_EX))
    except OSError:
        for descriptor in held:
            os.close(descriptor)
        raise
    return tuple(held)


def _locked(folder: Path, device: str, kind: str, how: int) -> int:
    """Return a descriptor of a GPU's file that holds a lock.

    Raises:
        BlockingIOError: another process has the lock.
        OSError: the file cannot be locked.
    """
    # The name has the host, because several machines may share the folder.
    name = f"gpu-{socket.gethostname()}-{quote(device.strip(), safe='')}.{kind}"
    descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
