"""Masks the values of environment variables and secrets in everything that is printed, such as a dry run."""

from __future__ import annotations

from collections.abc import Mapping

MASK = "***"
"""Shown instead of a value of the environment."""


def masked(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with masked values. Variables of this project are not secret, so they stay.

    Args:
        env: the environment.

    Example:
        masked({"API_KEY": "secret", "REPLICA_RANK": "0"})
    """
    return {name: value if name.startswith("REPLICA_") else MASK for name, value in env.items()}
