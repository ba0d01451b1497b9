"""Tests which objects the decorator `restartable` takes."""

from __future__ import annotations

import sys
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from executors import restartable
from executors.process.lasting_threads import start_lasting_thread
from executors.replica.restartable import hooks_of
from executors.worker.same_process import running_threads


async def is_async() -> None: ...


async def is_async_generator() -> AsyncIterator[int]:
    yield 1


def is_generator() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("thing", "kind"), [(is_async, "async"), (is_async_generator, "async"), (is_generator, "a generator")]
)
def test_a_function_whose_call_runs_none_of_its_code_is_refused(thing: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=rf"{thing.__name__}\(\) is {kind}, so a call would run none of its code"):
        restartable()(thing)


@pytest.mark.parametrize("thing", [3, None, int])
def test_an_object_that_is_not_a_function_is_refused(thing: Any) -> None:
    with pytest.raises(TypeError, match=r"restartable\(\) decorates a function, got"):
        restartable()(thing)


def test_a_plain_function_keeps_its_name_and_is_called_as_it_is_outside_of_a_replica() -> None:
    @restartable(finalize=print)
    def main(lr: float = 0.5) -> float:
        return 2 * lr

    found = hooks_of(main)
    assert (main.__name__, main(lr=1.5), main()) == ("main", 3.0, 1.0)
    assert found is not None
    assert found.finalize is print


def test_a_hook_that_is_not_a_function_is_refused_by_its_name() -> None:
    with pytest.raises(TypeError, match=r"restartable\(health_check=…\) takes a function, got 3"):
        restartable(health_check=3)  # type: ignore[arg-type]


def test_a_thread_of_ours_is_known_before_it_runs_for_the_first_time() -> None:
    """On a loaded machine it may run only after the entrypoint has failed, and then look like a thread of that call."""
    over, before = threading.Event(), sys.getswitchinterval()
    sys.setswitchinterval(3600.0)  # so that no other thread runs until this one waits
    try:
        ident = start_lasting_thread(over.wait)
        assert ident in running_threads()
    finally:
        sys.setswitchinterval(before)
        over.set()
