"""Preloaded into the process that forks replicas: shortens every wait for a store by one factor.

`REPLICAS_TEST_PATIENCE` has the factor. The first line of a wait then comes at once, and the next ones a second apart.
"""

from __future__ import annotations

import os

from executors import patience

patience.SCALE = float(os.environ.get("REPLICAS_TEST_PATIENCE", "1"))
patience.FIRST_WORD_S, patience.AGAIN_S = 0.0, 1.0 / patience.SCALE
