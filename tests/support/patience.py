"""Makes an OutageTolerance for tests, with a limit that the test chooses or without any."""

from __future__ import annotations

import math

from executors.patience import OutageTolerance


def lasting(seconds: float) -> OutageTolerance:
    """Return a tolerance with one limit for all failures."""
    return OutageTolerance("a test", "a store", seconds, "The test chose this.", seconds, seconds)


ENDLESS = lasting(math.inf)
