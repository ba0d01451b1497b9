"""The tasks of the two replicas in the benchmark of noticing: one writes, the other waits like a rendezvous."""

from __future__ import annotations

import random
import time

from executors import current_replica
from executors.errors import KeyNotFoundError
from executors.store.watch import open_watch


def notice(n_objects: int, watches: bool) -> list[float]:
    """Return the delay in ms after which each object was seen. Rank 1 returns nothing.

    An object has the time just before it was written. Both replicas are on one machine and have one clock.
    """
    replica = current_replica()
    store, folder = replica.store, f"{replica.run_id}/noticing/"
    watch, rng = open_watch(store), random.Random(0)
    delays_ms = []
    for number in range(n_objects):
        mine, theirs = (f"{folder}{rank}-{number}" for rank in (replica.rank, 1 - replica.rank))
        if replica.rank == 1:
            time.sleep(rng.uniform(0.005, 0.03))  # the other process is waiting by now, at any point of its pauses
            store.put_if_absent(mine, str(time.monotonic_ns()).encode())
        while True:
            try:
                written_ns = int(bytes(store.get(theirs)))
                break
            except KeyNotFoundError:
                if watches or replica.rank == 1:
                    watch.wait(1.0, [folder])
                else:
                    time.sleep(0.01)
        if replica.rank == 0:
            delays_ms.append((time.monotonic_ns() - written_ns) / 1e6)
            store.put_if_absent(mine, str(written_ns).encode())  # ready for the next object
    watch.close()
    return delays_ms
