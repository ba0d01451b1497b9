"""Store calls that are worth another try, where nobody else would make it: a hiccup must not cost a replica."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from executors.errors import KeyNotFoundError, StoreError

RETRY_S = 10.0

T = TypeVar("T")


def insist(act: Callable[[], T], limit_s: float = RETRY_S) -> T:
    """Do something that may be done twice, again while the store fails, `limit_s` seconds at most.

    That nothing stands under a key is an answer and no failure.

    Raises:
        StoreError: what the store said last.
    """
    try:
        return act()
    except KeyNotFoundError:
        raise
    except StoreError:
        import tenacity  # 30 ms, on the way of every replica otherwise

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(_may_pass),
        wait=tenacity.wait_random_exponential(multiplier=0.1, max=1),
        stop=tenacity.stop_after_delay(limit_s),
        reraise=True,
    )
    return retrying(act)


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, StoreError) and not isinstance(error, KeyNotFoundError)
