"""Learning rate schedules that follow a run: which ones can, how far one has counted, and remedies for the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, OneCycleLR, ReduceLROnPlateau, SequentialLR

from executors.errors import kind_of


def unwrapped(thing: Any) -> Any:
    """Return the optimizer or schedule of torch inside what `accelerator.prepare` returned; anything else unchanged.

    A prepared schedule cannot be stepped to the run's step: its `step()` does nothing while gradients accumulate, or
    after a step that the loss scaler skipped. The run has counted that step all the same.

    Args:
        thing: an `AcceleratedScheduler`, an `AcceleratedOptimizer`, or anything else.

    Raises:
        TypeError: the schedule takes several steps per update, because its Accelerator has several processes.

        unwrapped(accelerator.prepare(schedule)) is schedule
    """
    # By name: accelerate need not be installed, and its import takes a second.
    name = next((each.__name__ for each in type(thing).__mro__ if each.__module__.startswith("accelerate.")), None)
    if name == "AcceleratedOptimizer":
        return thing.optimizer
    if name != "AcceleratedScheduler":
        return thing
    state = getattr(thing.optimizers[0], "accelerator_state", None)
    n_processes = getattr(state, "num_processes", 1)
    if n_processes > 1 and thing.step_with_optimizer and not thing.split_batches:
        raise TypeError(
            f"A schedule that accelerator.prepare() returned takes {n_processes} steps an update, one for each process "
            "of its Accelerator. Do not prepare the schedule: attach the one of torch."
        )
    return thing.scheduler


def counts_steps(thing: Any) -> bool:
    """Return whether a thing is a schedule of torch that can be stepped to a number of steps.

    Args:
        thing: any object.

        counts_steps(LinearLR(optimizer)), counts_steps(ReduceLROnPlateau(optimizer))  # True, False
    """
    if isinstance(thing, ChainedScheduler):
        return all(map(counts_steps, thing._schedulers))  # its parts may be of a user's own class
    is_stepped_alone = isinstance(thing, LRScheduler) and not isinstance(thing, ReduceLROnPlateau)
    return is_stepped_alone and isinstance(getattr(thing, "last_epoch", None), int)


def steps_counted(schedule: Any) -> int:
    """Return how many steps a schedule has counted.

    Args:
        schedule: one for which `counts_steps` is true.

        steps_counted(schedule)  # 0, before its first step()
    """
    if isinstance(schedule, ChainedScheduler):  # has no count; it steps all its parts together
        return steps_counted(schedule._schedulers[-1])
    counted: int = schedule.last_epoch
    return counted


def last_count_of(schedule: Any) -> int | None:
    """Return how many steps a schedule can take at most: OneCycleLR raises an error beyond its own total.

    Args:
        schedule: one for which `counts_steps` is true.

    Returns:
        None if the schedule has no end.

        last_count_of(OneCycleLR(optimizer, 0.1, total_steps=100))  # 100
    """
    if isinstance(schedule, OneCycleLR):
        return int(schedule.total_steps)
    if isinstance(schedule, SequentialLR):  # its last schedule begins at the last milestone
        last = last_count_of(schedule._schedulers[-1])
        return None if last is None else last + (schedule._milestones[-1] if schedule._milestones else 0)
    if isinstance(schedule, ChainedScheduler):
        return min((last for each in schedule._schedulers if (last := last_count_of(each)) is not None), default=None)
    return None


def check_can_follow(name: str, thing: Any) -> None:
    """Check that a thing is a schedule that can follow the run.

    Args:
        name: the name that it is attached by.
        thing: what the user gave, unwrapped.

    Raises:
        TypeError: it cannot; the message has the remedy for the most usual things.

        check_can_follow("schedule", ReduceLROnPlateau(optimizer))  # TypeError
    """
    if not counts_steps(thing):
        raise TypeError(
            f"attach_state({name!r}, …, follow=True) takes a learning rate schedule of torch that counts its steps "
            f"(last_epoch), got {kind_of(thing)}. {_remedy_of(thing)}"
        )


def _remedy_of(thing: Any) -> str:
    if isinstance(thing, Mapping) and "scheduler" in thing:  # as Lightning's configure_optimizers returns it
        return "Pass its 'scheduler', if that is stepped once per inner step."
    for attribute in ("scheduler", "lr_scheduler"):  # Lightning's LRSchedulerConfig, and wrappers of users
        if hasattr(thing, attribute):
            return f"Pass its .{attribute}, if that is stepped once per inner step."
    if callable(getattr(thing, "step_update", None)):  # timm's schedulers
        return "Leave it unattached, and call its step_update(diloco.inner_step) after each diloco.step()."
    if callable(getattr(thing, "step", None)) and isinstance(getattr(thing, "param_groups", None), list):
        return "An optimizer is attached without follow=True."
    if isinstance(thing, ReduceLROnPlateau) or hasattr(thing, "last_epoch"):  # GreedyLR of transformers, too
        return "It is stepped by a metric: attach it without follow=True, and call its step(metric) yourself."
    return "Make the learning rate a function of `diloco.inner_step` instead."
