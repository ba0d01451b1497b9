"""The health check of a run: a function of the user that tests this process and its machine before the entrypoint."""

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
    """Call a health check. It has failed if it raises an exception, exits, or returns False.

    Args:
        name: the function, as in "checks.py:gpu".
        end: ends the process if the check takes too long. It is called in another thread, with a sentence. None, the
            default: the check has no limit.
        limit_s: the limit in seconds. Default: a minute.

    Raises:
        UnhealthyError: the check failed.
    """
    import threading  # only here, because a process that forks replicas must not import it

    too_long = f"The health check {name} took longer than {limit_s:g} s."
    timer = threading.Timer(limit_s, end or print, [too_long])
    timer.daemon = True
    if end is not None:
        timer.start()
    try:
        answer = load_entrypoint(name)()
        answer = answer.item() if is_scalar(answer) else answer  # a failure of the tensor's device is raised only here
    except (Exception, SystemExit) as error:
        if sigterm_arrived():
            raise
        traceback.print_exc()  # the outcome has only the last line of the traceback
        raise UnhealthyError(f"The health check {name} failed: {type(error).__name__}: {error}") from error
    finally:
        timer.cancel()
    if answer is False:
        raise UnhealthyError(f"The health check {name} returned False.")
