"""What the replicas of a new run cost, where their backend tells it."""

from __future__ import annotations

from executors.errors import BackendError
from executors.native import KnowsPrices
from executors.protocol import ServerlessExecutor


def usd_per_hour(executor: ServerlessExecutor, n: int, gpu: str | None) -> float | None:
    """Return what an hour of `n` replicas costs in US dollars; None: nobody tells."""
    price = executor.price_per_hour(gpu) if isinstance(executor, KnowsPrices) else None
    return None if price is None else price * n


def affordable_s(executor: ServerlessExecutor, n: int, gpu: str | None, max_cost: float) -> float:
    """Return for how many seconds `n` replicas may run.

    Raises:
        BackendError: nobody tells what they cost.
    """
    price = usd_per_hour(executor, n, gpu)
    if not price:
        raise BackendError(
            f"Backend {executor.backend_name!r} tells no price for this, so it cannot keep max_cost={max_cost:g}. "
            "Limit the time instead: timeout= or --timeout."
        )
    return max_cost / price * 3600
