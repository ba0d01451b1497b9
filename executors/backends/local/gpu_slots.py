"""Which GPUs a local replica gets: those that no living replica of its run on this machine has.

Each start of a run's ranks has a supervisor of its own, which knows nothing of the others. So the kernel keeps account:
each GPU has a file in the run's folder, on which a replica's process holds a lock as long as it lives.
"""

from __future__ import annotations

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
    """Descriptors that hold them: of the replica's process, once whoever has forked it has closed its own."""
    is_shared: bool = False
    """Whether other replicas of the run have all of the GPUs already."""


def take_slot(folder: Path, slots: Sequence[str], rank: int) -> GpuSlot:
    """Take the GPUs of a rank: its own if these are free, which they are at a launch, else the next that are."""
    own = rank % len(slots)
    for devices in (*slots[own:], *slots[:own]):
        try:
            return GpuSlot(devices, _lock_all(folder, devices.split(",")))
        except BlockingIOError:
            continue
        except OSError:  # an odd file system
            return GpuSlot(slots[own])
    return GpuSlot(slots[own], is_shared=True)


def _lock_all(folder: Path, devices: Sequence[str]) -> tuple[int, ...]:
    """Raises: OSError: one cannot be locked; of others that are locked, BlockingIOError."""
    held: list[int] = []
    try:
        for device in devices:
            # The folder may be on a file system that machines share.
            name = f"gpu-{socket.gethostname()}-{quote(device.strip(), safe='')}.lock"
            held.append(os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
            fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        for descriptor in held:
            os.close(descriptor)
        raise
    return tuple(held)
