"""Which GPUs a local replica gets: those that no living replica of its run on this machine has.

Each start of a run's ranks has a supervisor of its own, which knows nothing of the others. So the kernel keeps account.
Each GPU has a file in the run's folder, on which a replica's process holds a lock as long as it lives. Replicas that
share a GPU hold locks on a second file.
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
    """The GPUs that one replica sees."""

    devices: str
    """As in `CUDA_VISIBLE_DEVICES`."""
    locks: tuple[int, ...] = ()
    """Descriptors that hold them. They are the replica's own after its parent has closed its copies."""
    is_shared: bool = False
    """Whether other replicas of the run have all of the GPUs already."""


def take_slot(folder: Path, slots: Sequence[str], rank: int, stuck: Sequence[str] = ()) -> GpuSlot:
    """Take the GPUs of a rank: its own if these are free, which they are at a launch, else the next that are.

    Args:
        stuck: the slots of a process that cannot be ended. If none are free, these are shared first.
    """
    own = rank % len(slots)
    for devices in (*slots[own:], *slots[:own]):
        try:
            return GpuSlot(devices, _lock_all(folder, devices.split(",")))
        except BlockingIOError:
            continue
        except OSError:  # an odd file system
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
    """Raises: OSError: one cannot be locked; of others that are locked, BlockingIOError."""
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
    """Return a descriptor of a GPU's file of some kind that holds a lock. Raises: OSError."""
    # The folder may be on a file system that machines share.
    name = f"gpu-{socket.gethostname()}-{quote(device.strip(), safe='')}.{kind}"
    descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
