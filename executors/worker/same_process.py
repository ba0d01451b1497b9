"""The next attempt in the same process: cleans up after the failed call, and waits for the supervisor's decision."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any

from executors.process import kill_descendants
from executors.process.lasting_threads import lasting_threads
from executors.replica import Replica
from executors.replica.restartable import AWAITED_S, RestartHooks
from executors.replica.shared_page import SharedPage
from executors.worker.failure import all_of

THREADS_S = 2.0  # the time that threads of the failed call have to end
MOST_COLLECTIONS = 20  # an object whose finalizer makes new garbage would never let the collector come to an end
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.02  # seconds between two looks for the decision


def running_threads() -> set[int]:
    """Return the idents of the threads that run Python code.

    Threads of C libraries are not included: the pools of torch and OpenMP stay, and are used again.
    """
    # Python does not list a thread of ours yet that has been started but has not run. The clean-up would take it for a
    # thread of the failed call.
    return set(sys._current_frames()) | lasting_threads()


def clean_up(replica: Replica, hooks: RestartHooks, error: BaseException, before: AbstractSet[int]) -> str | None:
    """Free what a failed call has left in this process.

    Args:
        replica: the replica of the failed attempt.
        hooks: the user's hooks.
        error: the exception. Its tracebacks are dropped, because their frames keep models alive.
        before: the idents of the threads that ran before the call.

    Returns: the reason why this process must not call the entrypoint again. None: this process may call it again.
    """
    problem = _release(replica)
    replica.at_end.clear()
    kill_descendants(os.getpid())
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:  # a child that is stuck in the kernel is left to the next clean-up
            pass
    for each in all_of(error):
        each.__traceback__ = None
    del error
    if problem or (problem := _call_hook("finalize", hooks.finalize, replica)):
        return problem
    for _ in range(MOST_COLLECTIONS):
        if not gc.collect():
            break
    if problem := _empty_cache():
        return problem
    if problem := _call_hook("health_check", hooks.health_check, replica):
        return problem
    if names := _threads_left(before):
        return f"threads of the failed call still run: {', '.join(names)}"
    return None


def dismiss(replica: Replica) -> None:
    """Tell the other replicas that this process does not run the next attempt, or not soon.

    Args:
        replica: the replica of the failed attempt.
    """
    while replica.at_dismissal:
        with contextlib.suppress(Exception):  # the others stop waiting by themselves
            replica.at_dismissal.pop()()


def await_decision(
    page: SharedPage, supervisor_pid: int, number: int, on_long_wait: Callable[[], None] = lambda: None
) -> int | None:
    """Wait until the supervisor has decided about the next attempt.

    Args:
        page: the page that this process shares with its supervisor.
        supervisor_pid: the supervisor.
        number: the number of the next attempt, if no other process claims it.
        on_long_wait: called once if the wait is longer than other replicas should wait for this one.

    Returns: the number of the attempt that this process must run. None: this process must end.
    """
    page.go_on = 0
    page.left_at = 0  # a wait for the decision may take longer than exit functions
    page.waits_for = number
    with contextlib.suppress(ProcessLookupError):
        os.kill(supervisor_pid, signal.SIGUSR1)
    pause_s, long_at = FIRST_PAUSE_S, time.monotonic() + AWAITED_S
    while not page.go_on:
        if os.getppid() != supervisor_pid:
            return None
        if time.monotonic() > long_at:
            long_at = math.inf
            on_long_wait()
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, LONGEST_PAUSE_S)
    return int(page.go_on) if page.go_on > 0 else None


def _call_hook(name: str, hook: Any, replica: Replica) -> str | None:
    """Call a hook. Return a sentence with the reason if this process must not run another attempt."""
    if hook is None:
        return None
    try:
        if hook(replica) is False and name == "health_check":
            return "health_check returned False"
    except Exception as error:  # noqa: BLE001 - after any error of the user's hook the process is not fit
        return f"{name} raised {type(error).__name__}: {error}"
    return None


def _release(replica: Replica) -> str | None:
    """Call the functions that a failure needs, such as the end of a DiLoCo. Return the reason if one of them fails.

    After some errors of CUDA every further call fails. An exception here would end the process before the others hear
    of it.
    """
    try:
        while replica.at_failure:
            replica.at_failure.pop()()
        _destroy_process_group()
    except Exception as error:  # noqa: BLE001 - a process that cannot be cleaned up is not fit, whatever the error is
        return f"the end of the failed call raised {type(error).__name__}: {error}"
    return None


def _destroy_process_group() -> None:
    """Destroy torch's default process group, so that the next call can make its own."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _empty_cache() -> str | None:
    """Return the GPU memory that torch keeps for tensors that no longer exist. Return the reason if a GPU is not fit.

    A GPU is asked even if it has no memory to return, because after some errors every further call of CUDA fails.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    try:
        for device in range(torch.cuda.device_count()):
            if torch.cuda.memory_reserved(device):  # a call for another GPU would create a context there
                torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except Exception as error:  # noqa: BLE001 - torch has several types for errors of CUDA
        return f"the GPU raised {type(error).__name__}: {error}"
    return None


def _threads_left(before: AbstractSet[int]) -> list[str]:
    """Return the names of threads that the call has left running. They get a moment to end first."""
    until = time.monotonic() + THREADS_S
    while (left := running_threads() - before) and time.monotonic() < until:
        time.sleep(FIRST_PAUSE_S)
    threading = sys.modules.get("threading")
    named = {} if threading is None else {each.ident: each.name for each in threading.enumerate()}
    return sorted(named.get(ident, "without a name") for ident in left)
