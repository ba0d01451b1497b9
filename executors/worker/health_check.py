"""The health check of a run: a function of the user that tests this process and its machine before the entrypoint."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from executors.errors import ReplicasError
from executors.settings.health_checks import ALL, LIMITS_S, shipped_checks
from executors.task.entrypoint import load_entrypoint
from executors.worker.result import is_scalar
from executors.worker.sigterm import sigterm_arrived

LIMIT_S = 60.0


class UnhealthyError(ReplicasError):
    """The health check failed."""

    outcome_reason = "start_failed"


def check_health(
    name: str,
    end: Callable[[str], None] | None = None,
    limit_s: float = LIMIT_S,
    *,
    gpu: str | None = None,
    in_child: bool = False,
) -> None:
    """Call a health check. It has failed if it raises an exception, exits, or returns False.

    Args:
        name: the function, as in "checks.py:gpu", or checks that ship, as in "gpu,disk".
        end: ends the process if the check takes too long. It is called in another thread, with a sentence. None, the
            default: the check has no limit.
        limit_s: the limit of a function in seconds. Default: a minute. Checks that ship have their own limits.
        gpu: the GPU that the launch requests. None, the default: no GPU.
        in_child: True if a child process must ask the GPUs, because this process only starts a command. Default False.

    Raises:
        UnhealthyError: the check failed.
    """
    if shipped := shipped_checks(name):
        for each in shipped:
            _run_shipped(each, end, gpu, is_one_of_all=ALL in name.split(","), in_child=in_child)
        return
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


def _run_shipped(
    name: str, end: Callable[[str], None] | None, gpu: str | None, *, is_one_of_all: bool, in_child: bool
) -> None:
    """Run a check that ships, and print what it found into the log of the replica."""
    import threading

    from executors.replica import current_replica
    from executors.worker.shipped_checks import run_check

    limit_s = LIMITS_S[name]
    timer = threading.Timer(limit_s, end or print, [f"The health check {name} took longer than {limit_s:g} s."])
    timer.daemon = True
    if end is not None:
        timer.start()
    try:
        found = run_check(name, current_replica(), gpu, is_one_of_all=is_one_of_all, in_child=in_child)
    except Exception as error:
        if sigterm_arrived():
            raise
        is_plain = isinstance(error, ReplicasError)
        words = str(error).rstrip(".") if is_plain else f"{type(error).__name__}: {error}"
        if not is_plain:
            traceback.print_exc()
        raise UnhealthyError(f"The health check {name} failed: {words}.") from error
    finally:
        timer.cancel()
    print(f"replicas: health check {name}: {found}", flush=True)
