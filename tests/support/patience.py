"""OutageTolerance of tests: as long as a test says, or without end."""

from __future__ import annotations

import math

from executors.patience import OutageTolerance


def lasting(seconds: float) -> OutageTolerance:
    """Return a patience of so many seconds, whatever the failure."""
    return OutageTolerance("a test", "a store", seconds, "The test says so.", seconds, seconds)


ENDLESS = lasting(math.inf)
