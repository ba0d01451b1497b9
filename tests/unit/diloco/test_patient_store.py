"""What the rendezvous believes of a store's readings."""

from __future__ import annotations

from diloco.rendezvous.frames import READ_TRIES
from diloco.rendezvous.patient_store import PatientStore
from executors.store import MemoryStore


class Scene:
    """A store that is looked at over time."""

    now = 100.0

    def __init__(self) -> None:
        self.store = PatientStore(MemoryStore(), clock=lambda: self.now, error_patience_s=60.0)

    def misread(self, data: bytes, *, n: int = 1, every_s: float = 0.0) -> None:
        for _ in range(n):
            self.now += every_s
            self.store.note_bad("seal/0", data)


def test_an_object_that_was_misread_in_a_moment_has_not_rotted_however_long_nobody_looks_again() -> None:
    scene = Scene()
    scene.misread(b"x", n=READ_TRIES)
    scene.now += 3600.0  # a laptop's lid
    assert not scene.store.is_rotten("seal/0", for_s=10.0)
    scene.misread(b"x")
    assert scene.store.is_rotten("seal/0", for_s=10.0)


def test_an_object_has_rotted_that_is_the_same_wrong_bytes_for_so_long() -> None:
    scene = Scene()
    scene.misread(b"x", n=4, every_s=3.0)
    assert not scene.store.is_rotten("seal/0", for_s=10.0)
    scene.misread(b"y", n=4, every_s=3.0)
    assert not scene.store.is_rotten("seal/0", for_s=10.0), "other bytes each time are a reader's fault"
    scene.misread(b"y", every_s=3.0)
    assert scene.store.is_rotten("seal/0", for_s=10.0)
    assert scene.store.bad_readings("seal/0") == 9
    assert scene.store.bad_readings("seal/1") == 0
