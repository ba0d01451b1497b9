"""The key of a signed run: it proves the records that its replicas exchange, and says who may resume the run.

As text it is hexadecimal. It is never recorded and never shown; its id, which is both, tells nothing about it.
"""

from __future__ import annotations

import hashlib
import os
import re

from executors.native import RUN_KEY

KEY_BYTES, LEAST_KEY_BYTES = 32, 16
KEY_ID = re.compile(r"[0-9a-f]{8}")


def new_key() -> str:
    """Draw a key."""
    return os.urandom(KEY_BYTES).hex()


def key_id(key: bytes) -> str:
    """Return what tells a key from others: 8 hexadecimal digits of its sha256."""
    return hashlib.sha256(key).hexdigest()[:8]


def parse_key(text: str) -> bytes:
    """Return a key that was given as text.

    Raises:
        ValueError: the text is not one; it is not repeated.
    """
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) < LEAST_KEY_BYTES:
        raise ValueError(f"{RUN_KEY} is not a key: it has at least {2 * LEAST_KEY_BYTES} hexadecimal digits.")
    return key
