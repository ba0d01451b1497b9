"""Asking a vendor again while that may help."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import tenacity

from executors.vendor import VendorError

TRIES = 6
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 8.0  # so about 20 s in all, besides what the requests take
LONGEST_TOLD_S = 60.0  # a vendor that wants to be left alone for longer is asked all the same

log = logging.getLogger(__name__)


def patiently(sleep: Callable[[float], None] = time.sleep) -> tenacity.Retrying:
    """Return what repeats a call while the vendor is busy or its answer is lost, and then raises its last error.

    For what may be done twice; `CloudLaunch` looks for the job first.
    """
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(lambda error: isinstance(error, VendorError) and error.kind != "refused"),
        wait=_AsTold() + tenacity.wait_random(0, FIRST_PAUSE_S),
        stop=tenacity.stop_after_attempt(TRIES),
        before_sleep=tenacity.before_sleep_log(log, logging.INFO),
        sleep=sleep,
        reraise=True,
    )


class _AsTold(tenacity.wait.wait_base):
    """Longer from try to try, and at least as long as the vendor said."""

    def __init__(self) -> None:
        self._usual = tenacity.wait_exponential(FIRST_PAUSE_S, LONGEST_PAUSE_S)

    def __call__(self, retry_state: tenacity.RetryCallState) -> float:
        error = retry_state.outcome.exception() if retry_state.outcome else None
        told_s = error.retry_after_s if isinstance(error, VendorError) else 0.0
        return max(self._usual(retry_state), min(told_s, LONGEST_TOLD_S))
