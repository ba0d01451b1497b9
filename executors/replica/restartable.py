"""The decorator `restartable`: after a failure, the same process calls the entrypoint again as the next attempt."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from executors.replica import Replica

P = ParamSpec("P")
T = TypeVar("T")
_HOOKS = "__restart_hooks__"
AWAITED_S = 5.0
"""The other replicas wait this long, in seconds, for a process that has failed and stays. A shorter wait than usual
restarts take would cost a round, and a longer one would hold them up if the delay of the restart policy is long."""


@dataclass(frozen=True)
class RestartHooks:
    """The functions that run around the calls of an entrypoint that can be called again in the same process."""

    initialize: Callable[[Replica], Any] | None
    finalize: Callable[[Replica], Any] | None
    health_check: Callable[[Replica], Any] | None


def restartable(
    *,
    initialize: Callable[[Replica], Any] | None = None,
    finalize: Callable[[Replica], Any] | None = None,
    health_check: Callable[[Replica], Any] | None = None,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator for an entrypoint that may be called several times in one process.

    After an exception or a `HangError`, the process stays, and calls the entrypoint again as the next attempt. Imported
    modules, the CUDA context and compiled kernels stay loaded. The restart policy of the launch (`--restarts`) decides
    as after every failure. A process that is killed, exits, or is no longer fit is replaced by a new one.

    The decorator has an effect on functions that a launch names as its entrypoint, in replicas of one process.
    Everywhere else the decorated function behaves like the plain function.

    Args:
        initialize: called with the replica before each call of the entrypoint, the first one included. An exception in
            it is a failure of the attempt. None, the default: nothing is called.
        finalize: called with the replica after a failure. It must free what the entrypoint has left in global
            variables. An exception in it ends the process. None, the default: nothing is called.
        health_check: called with the replica before the process waits for its next attempt. If it raises an exception
            or returns False, the process ends. None, the default: nothing is called.

    Returns: the decorator. The decorated function has the name and the signature of the function.

    Raises:
        TypeError: a hook is not a function, the decorator was written without parentheses, or the decorated object is
            not a plain function.

    Example:
        @restartable(finalize=lambda replica: cache.clear())
        def main(lr: float = 1e-3) -> None:
            print(current_replica().previous_failure)
    """
    hooks = {"initialize": initialize, "finalize": finalize, "health_check": health_check}
    for name, hook in hooks.items():
        if hook is not None and not callable(hook):
            raise TypeError(f"restartable({name}=…) takes a function, got {hook!r}.")

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        _check_plain(function)

        @functools.wraps(function)
        def entrypoint(*args: P.args, **kwargs: P.kwargs) -> T:
            return function(*args, **kwargs)

        setattr(entrypoint, _HOOKS, RestartHooks(**hooks))
        return entrypoint

    return decorate


def _check_plain(function: Any) -> None:
    """Check that a decorated object is a function whose call runs its code.

    The launch refuses async functions and generators, but it does not see them behind the decorator.

    Raises:
        TypeError: it is something else.
    """
    if not callable(function) or isinstance(function, type):
        raise TypeError(f"restartable() decorates a function, got {function!r}.")
    kinds = (
        ("async", inspect.iscoroutinefunction), ("async", inspect.isasyncgenfunction),
        ("a generator", inspect.isgeneratorfunction),
    )  # fmt: skip
    for kind, is_one in kinds:
        if is_one(function):
            name = getattr(function, "__name__", repr(function))
            raise TypeError(
                f"restartable() decorates a plain function, and {name}() is {kind}, so a call would run none of its "
                "code. Decorate a plain function that runs it, for example by asyncio.run()."
            )


def hooks_of(function: Any) -> RestartHooks | None:
    """Return the hooks of a function that `restartable` has decorated. None for every other function.

    Args:
        function: any entrypoint.

    Example:
        hooks_of(main)
    """
    found = getattr(function, _HOOKS, None)
    return found if isinstance(found, RestartHooks) else None
