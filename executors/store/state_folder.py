"""The path of this user's directory of runs: the default store, with this machine's notes on runs in other stores."""

from __future__ import annotations

import contextlib
from pathlib import Path

from executors.errors import StoreError

STATE_HOME_ADVICE = "Set XDG_STATE_HOME to a directory that you may write to."


def state_path() -> Path:
    """Return the path of this user's directory of runs. The directory may not exist yet; it is not created.

    Raises:
        StoreError: this user has no home directory.

    Example:
        state_path() / "brave-otter-7f3a" / RUN_RECORD
    """
    import platformdirs

    # Without HOME and an entry in the system's list of users, platformdirs raises, or, before 4.12, leaves the "~".
    with contextlib.suppress(RuntimeError):
        if (path := Path(platformdirs.user_state_path("replicas"))).is_absolute():
            return path
    raise StoreError(f"This user has no home directory to keep runs in. {STATE_HOME_ADVICE}")
