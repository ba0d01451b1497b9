"""Threads may open, close and read the DiLoCos of a process at the same time."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from diloco.open_dilocos import OpenDiLoCos


class Thing:
    """Anything that can be deleted."""


@pytest.fixture(autouse=True)
def _threads_alternate_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def errors_beside(change: Callable[[int], None], read: Callable[[], object]) -> list[BaseException]:
    """Call one function in a thread and another one here, many times. Return the errors."""
    found: list[BaseException] = []

    def run() -> None:
        for number in range(3000):
            change(number)

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive() and not found:
        try:
            read()
        except RuntimeError as error:
            found.append(error)
    thread.join()
    return found


def test_one_thread_may_open_dilocos_while_another_thread_reads_them() -> None:
    held, kept = OpenDiLoCos(), [Thing() for _ in range(50)]
    for number, thing in enumerate(kept):
        held.add(("nonce", str(number)), thing)

    def change(number: int) -> None:
        held.add(("other", str(number)), thing := Thing())
        held.remove(("other", str(number - 1)))
        del thing

    assert errors_beside(change, lambda: held.of("nonce")) == []
    assert list(held.of("nonce").values()) == kept


def test_a_deleted_object_is_not_open_and_its_name_is_free() -> None:
    held, thing = OpenDiLoCos(), Thing()
    held.add(("nonce", "main"), thing)
    assert ("nonce", "main") in held
    del thing
    gc.collect()
    assert ("nonce", "main") not in held
    assert held.of("nonce") == {}
