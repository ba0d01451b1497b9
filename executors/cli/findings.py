"""What `replicas doctor` says of one thing it looked at, and the look at a store that every part of it shares."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from executors.errors import ReplicasError


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    state: Literal["ok", "note", "wrong"]
    found: str
    advice: str = ""


def tried(what: str, probe: Callable[[], str], advice: str) -> Finding:
    try:
        return Finding(what, "ok", probe())
    except (ReplicasError, OSError, ValueError) as error:
        return Finding(what, "wrong", str(error), advice)


def look_at_store(rendezvous: str) -> Finding:
    """Prove that a store creates exclusively and reads what it wrote."""
    return tried("rendezvous", lambda: write_once(rendezvous), "Replicas that cannot write there cannot meet there.")


def write_once(url: str) -> str:
    """Prove that a store creates exclusively and reads what it wrote; leave none of it there."""
    from executors.errors import UnsafeStoreError
    from executors.store import open_store

    store = open_store(url)
    key = f"doctor-{secrets.token_hex(8)}/probe"
    try:
        first, second = store.put_if_absent(key, b"first"), store.put_if_absent(key, b"second")
        read = bytes(store.get(key))
        if (first, second) != (True, False) or read != b"first":
            raise UnsafeStoreError(f"{store.url}: an object could be created twice (read {read!r}).", url=store.url)
    finally:
        store.delete(key)
    return f"{store.url}: writes, creates exclusively, reads its writes"
