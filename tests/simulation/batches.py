"""Runs a batch of random schedules in a process of its own."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

from simulation.invariants import Violation

BATCH = 100
"""Schedules in a batch."""


def run_batch(start: int, run: Callable[..., object], end: int) -> list[str]:
    """Run a batch of schedules, and return the texts of the violations.

    Args:
        start: the seed of the first schedule.
        run: runs the schedule of a seed.
        end: the seed after the last schedule of all batches.
    """
    found = []
    logging.disable(logging.WARNING)  # the schedules cause warnings on purpose
    gc.disable()  # this saves a twentieth of the time, and the garbage of the batch is collected at its end
    for seed in range(start, min(start + BATCH, end)):
        try:
            run(seed, is_traced=False)
        except Violation as violation:
            found.append(str(violation))
    gc.collect()
    return found
