"""Calls the `modal` SDK with a time limit, and turns its errors into JobServiceError."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from executors.backends.jobs.sdk import LazyModule, call_with_timeout
from executors.backends.jobs.service import JobServiceError, Kind

if TYPE_CHECKING:
    import modal
else:
    modal = LazyModule("modal", "Backend 'modal' needs the Modal SDK.", "modal")

__all__ = ["TOKEN_ADVICE", "WaitingCalls", "in_thread", "modal", "translated_modal_errors"]

CALL_LIMIT_S = 90.0  # the SDK gives up on a server that it cannot reach after 56 s
# A call is not interrupted in its first seconds. Without the answer to its first request, the SDK does not know what it
# must end.
ON_ITS_WAY_S = 3.0
TOKEN_ADVICE = "Run: modal token new (or set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET)."

P = ParamSpec("P")
T = TypeVar("T")


@contextlib.contextmanager
def translated_modal_errors() -> Iterator[None]:
    """Turn errors of the SDK into JobServiceError. The SDK itself repeats a failed request three times.

    Raises:
        JobServiceError: the block raised an error of the SDK.

    Example:
        with translated_modal_errors():
            modal.App.lookup("replicas")
    """
    import grpclib.exceptions
    import modal.exception as raised

    may_be_done = raised.ServiceError, raised.InternalError, raised.ConnectionError, raised.TimeoutError
    try:
        yield
    except raised.Error as error:
        kind: Kind = "rejected"
        lacks_machines = "insufficient capacity" in str(error).lower()
        # AlreadyExistsError: an earlier try of the SDK has acted, and its answer was lost.
        if isinstance(error, (*may_be_done, raised.AlreadyExistsError)):
            kind = "unknown"
        elif isinstance(error, raised.ResourceExhaustedError) and not lacks_machines:
            kind = "unavailable"  # too many requests; an error about machines has waited for one already
        advice = f" {TOKEN_ADVICE}" if isinstance(error, raised.AuthError) else ""
        raise JobServiceError(f"Modal: {_text(error)}.{advice}", kind, lacks_machines=lacks_machines) from error
    except (grpclib.GRPCError, grpclib.exceptions.StreamTerminatedError, OSError, TimeoutError) as error:
        raise JobServiceError(f"Modal cannot be reached: {_text(error)}.", "unknown") from error


class WaitingCalls:
    """Makes calls that may wait long, and can interrupt them. The SDK then ends what an interrupted call has begun.

    Example:
        calls = WaitingCalls()
        sandbox = calls.make(lambda: modal.Sandbox.create.aio("true", app=app))
    """

    def __init__(self) -> None:
        self._under_way: set[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any], float]] = set()

    def make(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call in a new event loop of this thread, and return its result.

        Args:
            call: returns the coroutine of the call.

        Raises:
            JobServiceError: the call was interrupted, and may have acted.
        """

        async def wait() -> T:
            task = asyncio.current_task()
            assert task is not None
            loop = asyncio.get_running_loop()
            waiting = loop, task, loop.time() + ON_ITS_WAY_S
            self._under_way.add(waiting)
            try:
                return await call()
            finally:
                self._under_way.discard(waiting)

        try:
            return asyncio.run(wait())
        except asyncio.CancelledError:
            raise JobServiceError("Modal: the launch was given up while it waited for a machine.", "unknown") from None

    def interrupt(self) -> None:
        """Interrupt all calls that wait. A call that has just begun is interrupted a few seconds later.

        Each call is interrupted only once. A second interrupt would stop the SDK while it ends what the call has begun.
        """
        waiting = list(self._under_way)
        self._under_way.difference_update(waiting)
        for loop, task, due_at in waiting:
            with contextlib.suppress(RuntimeError):  # the loop is closed because the call has ended
                loop.call_soon_threadsafe(functools.partial(loop.call_at, due_at, task.cancel))


def in_thread(call: Callable[P, T]) -> Callable[P, T]:
    """Return a function that makes a call of the SDK in another thread, with a time limit.

    In a notebook, an event loop runs in the caller's thread. The SDK's blocking calls do not work in such a thread.

    Args:
        call: makes the call of the SDK.

    Raises:
        JobServiceError: when called, the call failed or took too long.

    Example:
        @in_thread
        def stop(sandbox_id): ...
    """

    @functools.wraps(call)
    def made_in_thread(*args: P.args, **kwargs: P.kwargs) -> T:
        with translated_modal_errors():
            return call_with_timeout(CALL_LIMIT_S, lambda: call(*args, **kwargs))

    return made_in_thread


def _text(error: BaseException) -> str:
    return (str(error) or type(error).__name__).rstrip(".")
