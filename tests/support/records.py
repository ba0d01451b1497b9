"""Reads records of a run without parsing them."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from executors.errors import KeyNotFoundError
from executors.store import Store


def read_json(store: Store, key: str) -> Any:
    return json.loads(bytes(store.get(key)))


def find_json(store: Store, key: str) -> Any | None:
    with contextlib.suppress(KeyNotFoundError):
        return read_json(store, key)
    return None
