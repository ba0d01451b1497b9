"""What goes on beside the training of one DiLoCo: its rounds where they do, reads of a far store, and uploads."""

from __future__ import annotations

from diloco.background import BackgroundThread
from diloco.rendezvous.patient_store import Ask, Map, ParallelMap, PatientStore, at_once, is_near
from diloco.rendezvous.turns import InTurn, Turns
from diloco.rounds_thread import RoundsThread
from executors.store.watch import Watch


class Workers:
    """The threads of a DiLoCo, and what it waits with. A thread starts when it is first needed.

    Args:
        who: for the names of the threads.
        is_beside: whether rounds go on beside the training.
    """

    def __init__(self, store: PatientStore, watch: Watch, who: str, *, is_beside: bool) -> None:
        self._watch = watch
        self._reads = ParallelMap()
        near = is_near(store.store)
        self.uploads = BackgroundThread(who)
        self.map: Map = map if near else self._reads
        self.ask: Ask = at_once if near else self._reads.ask
        self.turns: Turns = InTurn(watch.wait)
        if is_beside:
            self.turns = RoundsThread(f"rounds of {who}", watch.wait, lambda: store.answer_s)

    def close(self) -> None:
        """Release what is not needed for uploads."""
        self._watch.close()
        self._reads.close()
