"""The hardware of Hugging Face Jobs: which flavor has a GPU, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from executors.errors import BackendError

CPU_FLAVOR = "cpu-basic"
UNITS_PER_HOUR = {"second": 3600, "minute": 60, "hour": 1}


def flavor_of(hardware: Sequence[Any], gpu: str) -> str:
    """Return the cheapest flavor with a GPU.

    Args:
        hardware: what the service lists.
        gpu: as in "A100" or "A100:4".

    Raises:
        BackendError: there is none.
    """
    cheapest = {}
    for each in sorted(hardware, key=lambda each: each.unit_cost_usd, reverse=True):
        if each.accelerator:
            cheapest[_model(each.accelerator.model), str(each.accelerator.quantity)] = each.name
    model, _, count = gpu.partition(":")
    if (found := cheapest.get((_model(model), count or "1"))) is None:
        known = ", ".join(name if n == "1" else f"{name}:{n}" for name, n in sorted(cheapest))
        raise BackendError(
            f"Hugging Face Jobs have no flavor for gpu={gpu!r}. Known: {known}. "
            "Or name one of `hf jobs hardware`: --option flavor=NAME."
        )
    return str(found)


def price_per_hour(hardware: Sequence[Any], flavor: str) -> float | None:
    """Return what an hour of a flavor costs in US dollars; None: the service does not tell."""
    found = next((each for each in hardware if each.name == flavor), None)
    units = None if found is None else UNITS_PER_HOUR.get(found.unit_label)
    return None if found is None or units is None else found.unit_cost_usd * units


def _model(name: str) -> str:
    """Return the name of a GPU in one spelling: `rtx pro 6000` is `RTX-PRO-6000`."""
    return name.upper().replace("_", "-").replace(" ", "-").removeprefix("NVIDIA-")
