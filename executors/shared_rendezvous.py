"""Which store a launch uses whose replicas see nothing of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from executors.errors import BackendError
from executors.store.opening import directory_of


def shared_rendezvous(backend: str, rendezvous: str | Path | None, entrypoint: str | Callable[..., Any], n: int) -> str:
    """Return the url of a store that replicas in a cloud reach as well: the one given, else `$REPLICAS_RENDEZVOUS`.

    Raises:
        BackendError: there is none, or it is a directory of this machine.
    """
    chosen = rendezvous if rendezvous is not None else os.environ.get("REPLICAS_RENDEZVOUS")
    if chosen and directory_of(chosen) is None:
        return str(chosen)
    why = f" {str(chosen)!r} is a directory of this machine." if chosen else ""
    name = entrypoint if isinstance(entrypoint, str) else "train.py:main"
    raise BackendError(
        f"Backend {backend!r} needs a rendezvous that both sides reach.{why} Try: replicas launch {name} "
        f"--backend {backend} --n {n} --rendezvous s3://BUCKET/PREFIX (or set REPLICAS_RENDEZVOUS)."
    )
