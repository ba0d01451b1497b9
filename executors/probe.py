"""What `replicas doctor --probe` runs in a replica: a look around, and at the store from that side."""

from __future__ import annotations

import os
import platform
import shutil
from typing import Any

from executors.errors import UnsafeStoreError
from executors.replica import current_replica, replica_key


def look_around() -> dict[str, Any]:
    """Return what a replica finds where it runs, having proved that its store creates exclusively.

    Raises:
        UnsafeStoreError: an object could be created twice.
    """
    from importlib import metadata

    me = current_replica()
    key = replica_key(me.run_id, me.rank, me.attempt, "probe")
    first, second = me.store.put_if_absent(key, b"first"), me.store.put_if_absent(key, b"second")
    if (first, second) != (True, False) or bytes(me.store.get(key)) != b"first":
        raise UnsafeStoreError(f"{me.store.url}: an object could be created twice.", key=key, url=me.store.url)
    versions = {}
    for name in ("torch", "numpy", "boto3"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = ""
    return {
        "python": platform.python_version(),
        **versions,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpu tools": "yes" if shutil.which("nvidia-smi") else "",
        "store": "creates exclusively",
    }
