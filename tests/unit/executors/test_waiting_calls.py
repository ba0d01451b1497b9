"""Tests calls of Modal's SDK that may wait for a machine, and that giving up a launch interrupts them."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from executors.backends.jobs.service import JobServiceError
from executors.backends.modal_client import WaitingCalls


def test_a_call_that_is_interrupted_again_still_ends_its_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executors.backends.modal_client.ON_ITS_WAY_S", 0.0)
    calls, has_begun, is_ending, again = WaitingCalls(), threading.Event(), threading.Event(), threading.Event()
    ended = []

    async def create() -> None:
        try:
            has_begun.set()
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            is_ending.set()
            await asyncio.to_thread(again.wait, 30)
            for _ in range(10):  # turns of the loop, in one of which the second interrupt would arrive
                await asyncio.sleep(0)
            ended.append("sandbox")
            raise

    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(calls.make, create)
        assert has_begun.wait(30)
        calls.interrupt()
        assert is_ending.wait(30)
        calls.interrupt()
        again.set()
        with pytest.raises(JobServiceError, match="given up while it waited for a machine"):
            made.result(timeout=30)
    assert ended == ["sandbox"]
