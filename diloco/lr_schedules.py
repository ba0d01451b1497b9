"""Checks whether a learning rate schedule can follow the run's step, and names a remedy if it cannot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, OneCycleLR, ReduceLROnPlateau, SequentialLR

from executors.errors import kind_of


def unwrapped(thing: Any) -> Any:
    """Return the optimizer or schedule of torch inside an object that `accelerator.prepare` returned.

    A prepared schedule cannot be stepped to the run's step: its `step()` does nothing while gradients accumulate, or
    after a step that the loss scaler skipped. The run counts these steps, too.

    Args:
        thing: an `AcceleratedScheduler` or an `AcceleratedOptimizer`. Any other object is returned unchanged.

    Raises:
        TypeError: the schedule makes several steps per update, because its Accelerator has several processes.

    Example:
        unwrapped(accelerator.prepare(schedule)) is schedule
    """
    # The class is recognized by its name, because accelerate may not be installed, and its import takes a second.
    name = next((each.__name__ for each in type(thing).__mro__ if each.__module__.startswith("accelerate.")), None)
    if name == "AcceleratedOptimizer":
        return thing.optimizer
    if name != "AcceleratedScheduler":
        return thing
    state = getattr(thing.optimizers[0], "accelerator_state", None)
    n_processes = getattr(state, "num_processes", 1)
    if n_processes > 1 and thing.step_with_optimizer and not thing.split_batches:
        raise TypeError(
            f"A schedule that accelerator.prepare() returned makes {n_processes} steps per update, one per process "
            "of its Accelerator. Attach the schedule of torch, without accelerator.prepare()."
        )
    return thing.scheduler


def counts_steps(thing: Any) -> bool:
    """Return True if an object is a schedule of torch that can be stepped to a given number of steps.

    Args:
        thing: any object.

    Example:
        counts_steps(LinearLR(optimizer)), counts_steps(ReduceLROnPlateau(optimizer))  # True, False
    """
    if isinstance(thing, ChainedScheduler):
        return all(map(counts_steps, thing._schedulers))  # a part of the schedule may have a class of the user
    is_stepped_alone = isinstance(thing, LRScheduler) and not isinstance(thing, ReduceLROnPlateau)
    return is_stepped_alone and isinstance(getattr(thing, "last_epoch", None), int)


def steps_counted(schedule: Any) -> int:
    """Return the number of steps that a schedule has counted.

    Args:
        schedule: a schedule for which `counts_steps` is True.

    Example:
        steps_counted(schedule)  # 0, before its first step()
    """
    # a ChainedScheduler has no count of its own, and steps all its parts together
    if isinstance(schedule, ChainedScheduler):
        return steps_counted(schedule._schedulers[-1])
    counted: int = schedule.last_epoch
    return counted


def last_count_of(schedule: Any) -> int | None:
    """Return the largest number of steps that a schedule can make. None: it has no end.

    OneCycleLR raises an error beyond its own total.

    Args:
        schedule: a schedule for which `counts_steps` is True.

    Example:
        last_count_of(OneCycleLR(optimizer, 0.1, total_steps=100))  # 100
    """
    if isinstance(schedule, OneCycleLR):
        return int(schedule.total_steps)
    if isinstance(schedule, SequentialLR):  # the last schedule of a SequentialLR begins at the last milestone
        last = last_count_of(schedule._schedulers[-1])
        return None if last is None else last + (schedule._milestones[-1] if schedule._milestones else 0)
    if isinstance(schedule, ChainedScheduler):
        return min((last for each in schedule._schedulers if (last := last_count_of(each)) is not None), default=None)
    return None


def check_can_follow(name: str, thing: Any) -> None:
    """Raise an error if an object is not a schedule that can follow the run.

    Args:
        name: the name that it is attached by.
        thing: the user's object, unwrapped.

    Raises:
        TypeError: the object cannot follow the run. The message has a remedy for the most common objects.

    Example:
        check_can_follow("schedule", ReduceLROnPlateau(optimizer))  # TypeError
    """
    if not counts_steps(thing):
        raise TypeError(
            f"attach_state({name!r}, …, follow=True) needs a learning rate schedule of torch that counts its steps "
            f"(last_epoch), got {kind_of(thing)}. {_remedy_of(thing)}"
        )


def _remedy_of(thing: Any) -> str:
    if isinstance(thing, Mapping) and "scheduler" in thing:  # the result of Lightning's configure_optimizers
        return "Pass its 'scheduler', if that is stepped once per inner step."
    for attribute in ("scheduler", "lr_scheduler"):  # Lightning's LRSchedulerConfig, and wrappers of users
        if hasattr(thing, attribute):
            return f"Pass its .{attribute}, if that is stepped once per inner step."
    if callable(getattr(thing, "step_update", None)):  # timm's schedulers
        return "Do not attach it, and call its step_update(diloco.inner_step) after each diloco.step()."
    if callable(getattr(thing, "step", None)) and isinstance(getattr(thing, "param_groups", None), list):
        return "Attach an optimizer without follow=True."
    # the class GreedyLR of transformers is also such a schedule
    if isinstance(thing, ReduceLROnPlateau) or hasattr(thing, "last_epoch"):
        return "It needs a metric: attach it without follow=True, and call its step(metric) yourself."
    return "Make the learning rate a function of `diloco.inner_step` instead."
