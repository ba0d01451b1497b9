"""The check that a run asks for: whether this process, and the machine below it, can do its task."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from executors.errors import ReplicasError
from executors.task.entrypoint import load_entrypoint
from executors.worker.result import is_scalar
from executors.worker.sigterm import sigterm_arrived

LIMIT_S = 60.0


class UnhealthyError(ReplicasError):
    """The health check failed."""

    outcome_reason = "start_failed"


def check_health(name: str, end: Callable[[str], None] | None = None, limit_s: float = LIMIT_S) -> None:
    """Call a health check, which fails by an exception, by leaving, or by returning False.

    Args:
        end: called in a thread, with a sentence, when the check takes too long; ends the process. None: no limit.

    Raises:
        UnhealthyError: it failed.
    """
    import threading  # a process that forks replicas must not

    too_long = f"The health check {name} took longer than {limit_s:g} s."
    timer = threading.Timer(limit_s, end or print, [too_long])
    timer.daemon = True
    if end is not None:
        timer.start()
    try:
        answer = load_entrypoint(name)()
        answer = answer.item() if is_scalar(answer) else answer  # a tensor tells only now what its device has failed at
    except (Exception, SystemExit) as error:
        if sigterm_arrived():
            raise
        traceback.print_exc()  # the outcome has the last line of it
        raise UnhealthyError(f"The health check {name} failed: {type(error).__name__}: {error}") from error
    finally:
        timer.cancel()
    if answer is False:
        raise UnhealthyError(f"The health check {name} returned False.")
