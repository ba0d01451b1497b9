"""Calls functions before each optimizer step of a thread."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from threading import get_ident
from typing import Any, Protocol, TypeAlias

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook


class StepTest(Protocol):
    """A test of one optimizer step: some values of parameters are moved before the step and compared after it."""

    def move(self) -> None:
        """Move the values that the step must keep."""

    def around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that computes the loss at the values that were not moved, and then moves them.

        Args:
            closure: the closure that the optimizer's step was given.
        """


Watcher: TypeAlias = Callable[[Optimizer], StepTest | None]
"""Called before an optimizer step. Returns a test that this step must undergo, or None."""

# One permanent hook for the whole process. To add hooks later is not safe: torch may iterate over its hooks in another
# thread.
_watchers: dict[int, tuple[Watcher, ...]] = {}
"""For each thread, the functions to call before each optimizer step of that thread.

In tests, each replica is a thread.
"""


def watch(callback: Watcher) -> None:
    """Call a function before each optimizer step of this thread, until `unwatch`.

    Args:
        callback: gets the optimizer, and returns a test for the step, or None.

    Example:
        watch(lambda optimizer: print(optimizer))
    """
    _register()
    _watchers[get_ident()] = (*_watchers.get(get_ident(), ()), callback)


def unwatch(callback: Watcher) -> None:
    """Stop the calls that `watch` began.

    Args:
        callback: the function.

    Example:
        unwatch(callback)
    """
    for thread, callbacks in _watchers.copy().items():
        if callback in callbacks:
            if left := tuple(each for each in callbacks if each != callback):
                _watchers[thread] = left
            else:
                _watchers.pop(thread, None)  # a later thread may have the same number


@functools.cache
def _register() -> None:
    def call(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        tests = [test for callback in _callbacks() if (test := callback(optimizer)) is not None]
        # torch passes the optimizer as the first positional argument, so a closure is the second.
        given = args[1] if len(args) > 1 else kwargs.get("closure")
        closure = given if callable(given) else None
        for test in tests:
            if closure is None:
                test.move()
            else:
                closure = test.around(closure)
        if not tests or closure is None:
            return None
        return ((args[0], closure, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": closure})

    register_optimizer_step_pre_hook(call)


def _callbacks() -> tuple[Watcher, ...]:
    """Return the functions to call before an optimizer step of this thread."""
    own = _watchers.get(get_ident(), ())
    if not own and is_in_backward():
        # torch computes gradients on a GPU in a thread of its own, which does not know the thread that called
        # `backward`. Each function examines the optimizer, and ignores one of another model.
        return tuple(itertools.chain.from_iterable(_watchers.copy().values()))
    return own


def is_in_backward() -> bool:
    """Return True if this thread computes gradients now, as when an optimizer steps in a hook of a parameter.

    Example:
        is_in_backward()  # False outside of loss.backward()
    """
    task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
    return task() != -1
