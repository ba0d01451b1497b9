"""Creates the threads of one DiLoCo: for rounds, for parallel reads of a remote store, and for uploads."""

from __future__ import annotations

from diloco.background import BackgroundThread
from diloco.rendezvous.retrying_store import Ask, Map, ParallelMap, RetryingStore, at_once, is_local_store
from diloco.rendezvous.training_side import Inline, Scheduler
from diloco.round_thread import RoundThread
from executors.store.watch import Watch


class Workers:
    """The threads of a DiLoCo, and the function with which it waits. A thread starts when it is first needed.

    Args:
        store: the store of the run.
        watch: notices changes in the store.
        name: names the DiLoCo and its rank; part of the names of the threads.
        in_background: True if rounds run in a thread of their own while training continues.

    Example:
        Workers(store, open_watch(store.store), "diloco main of rank 0", in_background=False)
    """

    def __init__(self, store: RetryingStore, watch: Watch, name: str, *, in_background: bool) -> None:
        self._watch = watch
        self._reads = ParallelMap()
        near = is_local_store(store.store)
        self.uploads = BackgroundThread(name)
        self.map: Map = map if near else self._reads
        self.ask: Ask = at_once if near else self._reads.ask
        self.scheduler: Scheduler = Inline(watch.wait)
        if in_background:
            self.scheduler = RoundThread(f"rounds of {name}", watch.wait, store)

    def close(self) -> None:
        """Close the watch and the threads for reads. Uploads may still run."""
        self._watch.close()
        self._reads.close()
