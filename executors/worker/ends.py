"""How an attempt ended whose process left no outcome: explained, and recorded in its place."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from executors.attempt import Attempt
from executors.attempt.outcome import describe_end
from executors.errors import StoreError
from executors.process import killed_for_memory
from executors.protocol import Outcome, Reason, ReplicaStatus
from executors.replica import SERVICE
from executors.store.records import RETRY_S, is_gone
from executors.worker.ranks import Running

CLOCKS_S, CLOCKS_DRIFT = 5.0, 0.001  # how far the kernel's clock may be apart, and a share of the time since the boot
LOGGED_S = 0.02  # the kernel kills first, and then says so


class Ends:
    """Explains how processes ended.

    Args:
        timeout_s: the time limit of each.
        count_oom_kills: counts what the kernel has killed for want of memory.
    """

    def __init__(self, world_size: int, timeout_s: float | None, count_oom_kills: Callable[[], int]) -> None:
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._count_oom_kills = count_oom_kills
        self._oom_kills = count_oom_kills()

    def explain(self, running: Running, exit_code: int) -> tuple[Reason, str | None]:
        """Name the reason of an end without an outcome, and put it into a sentence."""

        def because(reason: Reason, ending: str = "", **values: Any) -> tuple[Reason, str]:
            return reason, describe_end(ending or reason, running.asked.rank, self._world_size, **values)

        if running.ending == "cancelled":
            return "cancelled", None  # its marker says why
        if running.ending == "timeout":
            return because("timeout", limit_s=self._timeout_s)
        if running.ending == "hang":
            return "hang", running.error
        if running.ending == "fenced":
            return because("fenced")
        service = os.environ.get(SERVICE) if running.page.notice else None
        terminated = "terminated" if service is None else "told_to_end"
        if running.ending == "signal":
            return because("signal", terminated, name=running.page.notice, service=service)
        if exit_code == -signal.SIGKILL and self._was_killed_for_memory(running):
            return because("oom")
        if exit_code < 0:
            return because("signal", number=-exit_code, name=signal_name(-exit_code))
        if exit_code == 128 + signal.SIGTERM:
            return because("signal", terminated, name="SIGTERM", service=service)
        return because("no_result", code=f"exit code {exit_code}")

    def _was_killed_for_memory(self, running: Running) -> bool:
        """Return whether the kernel killed a process; where its log cannot be read, as far as its counter tells."""
        if self._count_oom_kills() <= self._oom_kills:
            return False
        now = time.monotonic()
        since = now - (time.time() - running.started_at) - CLOCKS_S - now * CLOCKS_DRIFT
        is_named = killed_for_memory(running.pid, since)
        if is_named is False:
            time.sleep(LOGGED_S)
            is_named = killed_for_memory(running.pid, since)
        if is_named is not False:
            self._oom_kills += 1  # one at a time: two ranks may have ended at once
        return is_named is not False


def seen_from_outside(running: Running, exit_code: int) -> dict[str, Any]:
    """Return what an outcome says beside the reason, where its supervisor writes it."""
    killed_by = signal_name(-exit_code) if exit_code < 0 else None
    return {
        **running.page.told(),
        "exit_code": exit_code,
        "signal": killed_by or running.page.notice,
        "fingerprint": killed_by or f"exit code {exit_code}",
        "pid": running.pid,
        "started_at": running.started_at,
    }


def is_cancelled(attempt: Attempt) -> bool:
    """Return whether an attempt has a cancel marker; False when the store does not answer."""
    with contextlib.suppress(StoreError):
        return attempt.has("cancel.json")
    return False  # asked again in a second


def is_overtaken(running: Running) -> bool:
    """Return whether a living process has lost its attempt: to an outcome of somebody else, or to a later claim.

    Before its own claim it has none to lose: it takes the next that is free.
    """
    if not running.page.claimed:
        return False
    with contextlib.suppress(StoreError):
        attempt = running.attempt
        outcome = attempt.outcome()
        return attempt.at(attempt.number + 1).has("started.json") or (
            outcome is not None and outcome.pid != running.pid
        )
    return False


def mark_cancelled(why: str, attempt: Attempt) -> None:
    """Leave the cancel marker of an attempt, unless that has its outcome."""
    with contextlib.suppress(StoreError):
        if attempt.outcome() is None:  # else it is only tidying up
            attempt.request_cancel(why)


def record_end(
    attempt: Attempt, reason: Reason, error: str | None, retry_s: float = RETRY_S, **more: Any
) -> Outcome | None:
    """Record how an attempt ended; return the outcome that counts. None: its run was deleted, or the store fails."""
    status = ReplicaStatus.CANCELLED if reason == "cancelled" else ReplicaStatus.FAILED
    if is_gone(attempt.store, f"{attempt.run_id}/run.json"):  # it was deleted, and would begin to exist again
        return None
    try:
        return attempt.record(attempt.ended(status, reason, error=error, **more), retry_s=retry_s)
    except StoreError as failure:
        # The next poll finds this process gone, and reports what the store says.
        import logging  # 2 ms, on the way of every replica otherwise

        logging.getLogger(__name__).error("rank %d: no outcome could be written: %s", attempt.rank, failure)
        return None


def signal_name(number: int) -> str:
    """Name a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal, as 40
        return f"SIG{number}"
