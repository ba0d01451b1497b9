"""Turns a row of measurements into named numbers at a step, for TensorBoard and trackers."""

from __future__ import annotations

from executors.metrics.rows import MAX_ENTRY, MAX_NAME, Numbers, Round, Row
from executors.status import TOTAL_STEPS
from executors.view.report.text import one_line

OF_ROUND = (
    "train_s", "late_s", "busy_s", "wait_s", "move_s", "reduce_s", "step_s", "weight", "up", "down", "norm",
    "mean_norm", "stale_steps", "wire_error",
)  # fmt: skip
OF_USAGE = ("cpu", "rss", "gpu_mem", "gpu_use")


def scalars(row: Row) -> tuple[int | None, dict[str, float]]:
    """Return the step of a row, or None if it has no step, and its numbers by name. Names have no control characters.

    The step of a round is the number of its entry. Numbers of a round are named `round/…`, and resources of a process
    `usage/…`.
    """
    if isinstance(row, Numbers):
        step = row.values.get("step")
        numbers = {one_line(name, MAX_NAME): value for name, value in row.values.items()}
        numbers = {name: value for name, value in numbers.items() if name not in ("", "step", TOTAL_STEPS)}
        return (int(step) if step is not None and 0 <= step <= MAX_ENTRY else None), numbers
    if isinstance(row, Round):
        place = "round" if row.name == "main" else f"round/{one_line(row.name, MAX_NAME)}"
        return row.entry, {**_named(place, row, OF_ROUND), f"{place}/ranks": len(row.ranks)}
    return None, _named("usage", row, OF_USAGE)


def _named(place: str, row: Row, names: tuple[str, ...]) -> dict[str, float]:
    values = {name: getattr(row, name) for name in names}
    return {f"{place}/{name}": value for name, value in values.items() if value is not None}
