"""The key of a signed run. It proves the records of the run, and only a process that has it may resume the run.

The key as text is hexadecimal. It is never recorded and never shown. The key's id is recorded and shown, and nothing
about the key can be computed from it.

A process has one table with the keys of the runs that it works on (`hold_key`). Many functions read and write records
of attempts. If each had to pass the key on, one that forgot it would accept a forged record.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from executors.errors import StoreError
from executors.store.state_folder import state_path
from executors.store.url import check_run_id, real_url

RUN_KEY = "REPLICAS_RUN_KEY"
"""The environment variable with the key of a signed run. Replicas have it. The user sets it to resume a run on another
machine."""
KEY_BYTES, LEAST_KEY_BYTES = 32, 16
KEY_ID = re.compile(r"[0-9a-f]{8}")
KEYS = ".keys"
"""The folder with the keys of signed runs, in this user's directory of runs. A file's name is the id of a run."""


def new_key() -> str:
    """Return a new random key as text.

    Example:
        hold_key(store.url, "brave-otter-7f3a", new_key())
    """
    return os.urandom(KEY_BYTES).hex()


def key_id(key: bytes) -> str:
    """Return the id of a key: the first 8 hexadecimal digits of its SHA-256.

    Args:
        key: the key.

    Example:
        key_id(parse_key(new_key()))
    """
    return hashlib.sha256(key).hexdigest()[:8]


def parse_key(text: str) -> bytes:
    """Return a key that was given as text.

    Args:
        text: the key as hexadecimal digits.

    Raises:
        ValueError: the text is not a key. The message does not repeat the text, which may be a secret.

    Example:
        parse_key(os.environ["REPLICAS_RUN_KEY"])
    """
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) < LEAST_KEY_BYTES:
        raise ValueError(f"{RUN_KEY} is not a key: a key has at least {2 * LEAST_KEY_BYTES} hexadecimal digits.")
    return key


def key_file(run_id: str) -> Path:
    """Return the path of the file in which this machine keeps the key of a signed run.

    Args:
        run_id: the run.

    Raises:
        StoreError: this user has no home directory.
        ValueError: the text is not the id of a run.

    Example:
        key_file("brave-otter-7f3a").read_text()
    """
    return state_path() / KEYS / check_run_id(run_id)


def find_key(run_id: str, wanted: str) -> str | None:
    """Return the key of a run from the environment or from this machine's file. None: neither has it.

    Args:
        run_id: the run.
        wanted: the key's id. A key with another id is not returned.

    Example:
        find_key("brave-otter-7f3a", run.record.key_id)
    """
    found = [os.environ.get(RUN_KEY, "")]
    with contextlib.suppress(OSError, ValueError, StoreError):
        found.append(key_file(run_id).read_text())
    for key in found:
        with contextlib.suppress(ValueError):
            if key_id(parse_key(key)) == wanted:
                return key
    return None


_held: dict[tuple[str, str], bytes | None] = {}
"""Keys of signed runs by the store and the run id. None: the run is signed, and this process has no key of it."""
_place = functools.lru_cache(maxsize=1024)(real_url)


def hold_key(store_url: str, run_id: str, key: str | None) -> None:
    """Hold the key of a run in this process and in the processes that it forks. From now on it checks the run's proofs.

    Args:
        store_url: the store of the run, as `Store.url` names it.
        run_id: the run.
        key: the key as text. None: this process got no key, and a key that it already has stays.

    Raises:
        ValueError: the text is not a key.

    Example:
        hold_key(store.url, spec.run_id, spec.key)
    """
    if key is not None:
        _held[_place(store_url), run_id] = parse_key(key)


def drop_key(store_url: str, run_id: str) -> None:
    """Remove the key of a run from this process, because a new run takes the id.

    Args:
        store_url: the store of the run, as `Store.url` names it.
        run_id: the run.

    Example:
        drop_key(store.url, "brave-otter-7f3a")
    """
    _held.pop((_place(store_url), run_id), None)


def note_lacking_key(store_url: str, run_id: str) -> None:
    """Note that a run is signed and that this process does not have its key. An existing key of the run stays.

    Args:
        store_url: the store of the run, as `Store.url` names it.
        run_id: the run.

    Example:
        note_lacking_key(store.url, "brave-otter-7f3a")
    """
    _held.setdefault((_place(store_url), run_id), None)


def hold_named_key(store_url: str, run_id: str, wanted: str) -> None:
    """Hold the key that a handle of a signed run names. Without it, this process notes that it lacks the key.

    A script may ask an executor about a handle and never read the run's record. Its outcomes must be proven as well.
    Nothing changes if this process already holds a key of the run, or knows that it lacks the key.

    Args:
        store_url: the store of the run, as `Store.url` names it.
        run_id: the run.
        wanted: the key's id.

    Example:
        hold_named_key(store.url, "brave-otter-7f3a", handle.metadata["key_id"])
    """
    if (_place(store_url), run_id) not in _held:
        hold_key(store_url, run_id, find_key(run_id, wanted))
        note_lacking_key(store_url, run_id)


def held_key(store_url: str, run_id: str) -> bytes | None:
    """Return the key of a run if this process has it. None: the run is not signed, or its key is not known here.

    Args:
        store_url: the store of the run, as `Store.url` names it.
        run_id: the run.

    Example:
        is_signed = held_key(store.url, "brave-otter-7f3a") is not None
    """
    return _held.get((_place(store_url), run_id)) if _held else None


def lacks_key(store_url: str, run_id: str) -> bool:
    """Return True if a run is known to be signed and this process has no key of it.

    Args:
        store_url: the store of the run, as `Store.url` names it.
        run_id: the run.

    Example:
        may_write = not lacks_key(store.url, "brave-otter-7f3a")
    """
    return bool(_held) and _held.get((_place(store_url), run_id), b"") is None


def proof_of_fields(key: bytes, kind: str, object_key: str, fields: Mapping[str, Any]) -> str:
    """Return the proof of a JSON record: an HMAC (RFC 2104) over its kind, its key in the store and all its fields.

    Args:
        key: the key of the run.
        kind: the kind of the record, such as "decision". A record of one kind never proves another.
        object_key: the key of the object that holds the record. It begins with the run id.
        fields: the fields of the record as JSON values. `proof` is left out.

    Returns:
        64 hexadecimal digits.

    Example:
        proof_of_fields(key, "decision", "otter/decisions/000000.json", {"kind": "stop"})
    """
    proven_fields = {name: value for name, value in fields.items() if name != "proof"}
    proven = f"{kind}\0{object_key}\0".encode() + json.dumps(proven_fields, sort_keys=True).encode()
    return hmac.digest(key, proven, "sha256").hex()


def secret_name(key: bytes, object_key: str) -> str:
    """Return the digits of a name that only a process with the key can predict.

    Another process cannot create an object of this name before its owner does.

    Args:
        key: the key of the run.
        object_key: the key of the object that the name is for.

    Returns:
        16 hexadecimal digits.

    Example:
        secret_name(key, "otter/replicas/0000/0/outcome.json")
    """
    return hmac.digest(key, f"name\0{object_key}".encode(), "sha256").hex()[:16]
