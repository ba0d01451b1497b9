"""Shortens every wait for a store by one factor. Tests preload this module into the process that forks replicas.

`REPLICAS_TEST_PATIENCE` has the factor. The first line about a wait is then printed at once, and the next ones every
second.
"""

from __future__ import annotations

import os

from executors import patience

patience.SCALE = float(os.environ.get("REPLICAS_TEST_PATIENCE", "1"))
patience.FIRST_WORD_S, patience.AGAIN_S = 0.0, 1.0 / patience.SCALE
