"""Where this user's directory of runs is: the default store, and what this machine notes of runs in other stores."""

from __future__ import annotations

import contextlib
from pathlib import Path

from executors.errors import StoreError

WHAT_TO_SET = "Set XDG_STATE_HOME to a directory of yours."


def state_path() -> Path:
    """Return where this user's directory of runs is, or would be. It is not created.

    Raises:
        StoreError: this user has no home directory.

    Example:
        state_path() / "brave-otter-7f3a" / RUN_RECORD
    """
    import platformdirs

    with contextlib.suppress(RuntimeError):  # neither HOME nor the system has it; before 4.12 the ~ stays
        if (path := Path(platformdirs.user_state_path("replicas"))).is_absolute():
            return path
    raise StoreError(f"There is no home to keep runs in. {WHAT_TO_SET}")
