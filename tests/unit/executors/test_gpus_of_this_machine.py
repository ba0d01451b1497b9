"""A launch on this machine finds its GPUs, and does not wait for a driver that never answers."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from executors.backends.local import executor


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """Replace `nvidia-smi` by a program that never answers, and return the time limits of its calls."""
    asked: list[float | None] = []

    def run(command: list[str], *, timeout: float | None = None, **_: Any) -> Any:
        asked.append(timeout)
        raise subprocess.TimeoutExpired(command, timeout or 0.0)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(subprocess, "run", run)
    return asked


def test_a_driver_that_never_answers_has_no_gpus_after_a_limit(limits: list[float | None]) -> None:
    assert executor._gpus_of_this_machine() == []
    assert len(limits) == 1
    assert limits[0] is not None
