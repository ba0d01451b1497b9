"""Calls of the `modal` SDK with a time limit, and its errors translated."""

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
    NEEDED = "Backend 'modal' needs the Modal SDK. Install it with: pip install 'serverless-replicas[modal]'"
    modal = LazyModule("modal", NEEDED)

__all__ = ["TOKEN_ADVICE", "WaitingCalls", "in_thread", "modal", "translated_errors"]

CALL_LIMIT_S = 90.0  # the SDK itself gives up on a server that it cannot reach after 56 s
ON_ITS_WAY_S = 3.0  # until then a request may be under way whose answer tells the SDK what it would have to end
TOKEN_ADVICE = "Run: modal token new (or set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET)."

P = ParamSpec("P")
T = TypeVar("T")


@contextlib.contextmanager
def translated_errors() -> Iterator[None]:
    """Turn what the SDK raises into JobServiceError. The SDK itself repeats what failed on the way, three times."""
    import grpclib.exceptions
    import modal.exception as raised

    may_be_done = raised.ServiceError, raised.InternalError, raised.ConnectionError, raised.TimeoutError
    try:
        yield
    except raised.Error as error:
        kind: Kind = "rejected"
        lacks_machines = "insufficient capacity" in str(error).lower()
        if isinstance(error, (*may_be_done, raised.AlreadyExistsError)):  # an earlier try, whose answer was lost
            kind = "unknown"
        elif isinstance(error, raised.ResourceExhaustedError) and not lacks_machines:
            kind = "unavailable"  # too many requests; the other one has waited for a machine already
        advice = f" {TOKEN_ADVICE}" if isinstance(error, raised.AuthError) else ""
        raise JobServiceError(f"Modal: {_text(error)}.{advice}", kind, lacks_machines=lacks_machines) from error
    except (grpclib.GRPCError, grpclib.exceptions.StreamTerminatedError, OSError, TimeoutError) as error:
        raise JobServiceError(f"Modal cannot be reached: {_text(error)}.", "unknown") from error


class WaitingCalls:
    """Calls that may wait long, and can be interrupted: the SDK then ends for sure what they had begun."""

    def __init__(self) -> None:
        self._under_way: set[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any], float]] = set()

    def make(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return what the call returns; it is made in an event loop of this thread's own.

        Raises:
            JobServiceError: it was interrupted, and may have been done.
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
        """Interrupt all that wait, those that began just now a moment later. Each is interrupted once.

        Twice would break off the end of what it had begun.
        """
        waiting = list(self._under_way)
        self._under_way.difference_update(waiting)
        for loop, task, due_at in waiting:
            with contextlib.suppress(RuntimeError):  # it has ended meanwhile
                loop.call_soon_threadsafe(functools.partial(loop.call_at, due_at, task.cancel))


def in_thread(call: Callable[P, T]) -> Callable[P, T]:
    """Make a call of the SDK in a thread of its own, with a limit, its errors translated.

    In a notebook an event loop runs in the caller's thread, and the SDK's blocking calls complain of it.
    """

    @functools.wraps(call)
    def made_in_thread(*args: P.args, **kwargs: P.kwargs) -> T:
        with translated_errors():
            return call_with_timeout(CALL_LIMIT_S, lambda: call(*args, **kwargs))

    return made_in_thread


def _text(error: BaseException) -> str:
    return (str(error) or type(error).__name__).rstrip(".")
