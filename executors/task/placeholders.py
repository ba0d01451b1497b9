"""`${rank}` and its like in arguments and in the environment, which each replica fills in for itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

NAMES = ("rank", "run_id", "attempt", "world_size")
PLACEHOLDER = re.compile(rf"\$(?:\$|\{{({'|'.join(NAMES)})\}})")


def fill(value: Any, of: Mapping[str, object]) -> Any:
    """Return a value whose texts have the replica's own in place of `${rank}` …; `$$` is `$`, any other `$` stays.

    Args:
        of: what stands for each of `NAMES`.
    """
    if isinstance(value, str):
        return PLACEHOLDER.sub(lambda found: "$" if found[1] is None else str(of[found[1]]), value)
    if type(value) is dict:
        return {key: fill(item, of) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(fill(item, of) for item in value)
    return value
