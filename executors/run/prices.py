"""Turns `--max-cost` into a time limit, by the price that a backend publishes for its replicas."""

from __future__ import annotations

from executors.backend import Backend
from executors.errors import BackendError


def usd_per_hour(backend: Backend, n: int, gpu: str | None) -> float | None:
    """Return the price of `n` replicas per hour, in US dollars. None if the backend does not publish prices.

    Args:
        backend: the backend of all replicas.
        n: the number of replicas.
        gpu: the GPU of each. None: no GPU.

    Example:
        usd_per_hour(backend, 8, "H100")
    """
    price = backend.price_per_hour(gpu)
    return None if price is None else price * n


def affordable_s(backend: Backend, n: int, gpu: str | None, max_cost: float) -> float:
    """Return the time limit in seconds at which `n` replicas have cost `max_cost`.

    Args:
        backend: the backend of all replicas.
        n: the number of replicas.
        gpu: the GPU of each. None: no GPU.
        max_cost: US dollars that all replicas may cost together.

    Raises:
        BackendError: the backend does not publish prices.

    Example:
        affordable_s(backend, 8, "H100", 20.0)
    """
    price = usd_per_hour(backend, n, gpu)
    if not price:
        raise BackendError(
            f"Backend {backend.backend_name!r} has no prices for this, so max_cost={max_cost:g} (--max-cost) cannot be "
            "enforced. Use timeout (--timeout) instead."
        )
    return max_cost / price * 3600
