"""Records as JSON objects in a store."""

from __future__ import annotations

import json
from typing import Any

from executors.errors import CorruptObjectError, KeyNotFoundError
from executors.store import Store


def to_bytes(record: Any) -> bytes:
    """Encode a record: UTF-8, one line."""
    return (json.dumps(record) + "\n").encode()


def read_json(store: Store, key: str) -> Any:
    """Read a record.

    Raises:
        KeyNotFoundError: nothing stands there.
        CorruptObjectError: what stands there is no JSON.
    """
    data = bytes(store.get(key))
    try:
        return json.loads(data)
    except ValueError as error:
        raise CorruptObjectError(f"{key!r} in {store.url} is no JSON: {error}", key=key, url=store.url) from None


def find_json(store: Store, key: str) -> Any | None:
    """Read a record, or None when nothing stands there."""
    try:
        return read_json(store, key)
    except KeyNotFoundError:
        return None


def exists(store: Store, key: str) -> bool:
    """Tell whether an object stands under `key`."""
    try:
        store.get(key, size=0)
    except KeyNotFoundError:
        return False
    return True
