"""Records of an attempt that only a process with the key of a signed run can make, such as its claim and its outcome.

Such a record is JSON with a `proof`, an HMAC over its key in the store and all its other fields. It is written under
two names. The first name, `outcome-5e0f31a2c4d6b788.json`, cannot be predicted without the key, so only its writers can
create it. Its first version counts. The plain name has a copy of the same bytes, for users and processes without the
key. A forged copy has no effect.
"""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import Mapping
from typing import Any, TypeVar

from executors.errors import CorruptObjectError, StoreError
from executors.store import Store
from executors.store.records import Fields, Parse, find_record, to_bytes
from executors.store.run_key import proof_of_fields, secret_name

T = TypeVar("T")
PROOF_BYTES = 100  # the most bytes that a proof adds to a record
MAX_SIGNED_BYTES = 64 << 20


def signed_key(key: str, run_key: bytes) -> str:
    """Return the key of the object that counts, as in `otter/replicas/0000/0/outcome-5e0f31a2c4d6b788.json`.

    Args:
        key: the plain key of the record, which ends in `.json`.
        run_key: the key of the run.

    Example:
        signed_key("otter/replicas/0000/0/outcome.json", run_key)
    """
    return f"{key.removesuffix('.json')}-{secret_name(run_key, key)}.json"


def write_signed(store: Store, key: str, data: bytes, run_key: bytes, *, replaces: bool = False) -> bool:
    """Create a record with its proof, unless a proven one exists.

    Args:
        store: the store of the run.
        key: the plain key of the record.
        data: the record as JSON.
        run_key: the key of the run.
        replaces: True if a proven record is replaced, too. Default False.

    Returns: True if this call wrote the record that counts.

    Raises:
        StoreError: the store did not take the record.

    Example:
        write_signed(store, attempt.key(OUTCOME), encode_outcome(outcome), run_key)
    """
    fields = Fields(data, key, store.url).values
    signed = to_bytes({**fields, "proof": proof_of_record(run_key, key, fields)})
    place = signed_key(key, run_key)
    is_ours = True
    if replaces:
        store.put(place, signed)
    elif not store.put_if_absent(place, signed):
        standing = _read_proven(store, place, key, MAX_SIGNED_BYTES, run_key)
        if standing is None:
            store.put(place, signed)  # a stranger has listed the store and replaced the record, so it is lost already
        else:
            signed, is_ours = bytes(standing), False
    # The copy is for processes without the key. The signed record counts even if a stranger's object blocks the copy.
    with contextlib.suppress(StoreError):
        if replaces:
            store.put(key, signed)
        else:
            store.put_if_absent(key, signed)
    return is_ours


def find_signed(store: Store, key: str, parse: Parse[T], max_bytes: int, run_key: bytes) -> T | None:
    """Return a proven record. None: there is none, even if an unproven object has its name.

    Args:
        store: the store of the run.
        key: the plain key of the record.
        parse: makes the record of its bytes.
        max_bytes: how large the record may be without its proof.
        run_key: the key of the run.

    Raises:
        StoreError: the store does not answer, or holds a proven record that `parse` refuses.

    Example:
        find_signed(store, attempt.key(OUTCOME), parse_outcome, MAX_OUTCOME_BYTES, run_key)
    """
    for place in (signed_key(key, run_key), key):
        try:
            data = find_record(store, place, lambda data, *_: data, max_bytes + PROOF_BYTES)
        except CorruptObjectError:  # it is larger than any record
            continue
        if data is None:
            return None  # a record is created under its signed name first, so there is no plain copy either
        if is_proven(data, key, run_key):
            return parse(data, place, store.url)
    return None


def is_proven(data: Any, key: str, run_key: bytes) -> bool:
    """Return True if the bytes of a record have the proof of this key and this place.

    Args:
        data: the bytes, which may be anything.
        key: the plain key of the record.
        run_key: the key of the run.

    Example:
        is_proven(store.get("otter/replicas/0000/0/outcome.json"), "otter/replicas/0000/0/outcome.json", run_key)
    """
    with contextlib.suppress(CorruptObjectError, ValueError, RecursionError):
        fields = Fields(data, key).values
        proof = fields.get("proof")
        expected = proof_of_record(run_key, key, fields)
        return isinstance(proof, str) and hmac.compare_digest(proof.encode(), expected.encode())
    return False


def _read_proven(store: Store, place: str, key: str, max_bytes: int, run_key: bytes) -> Any:
    """Return the bytes of an object if they are proven for a key, else None."""
    with contextlib.suppress(CorruptObjectError):  # it is larger than any record
        data = find_record(store, place, lambda data, *_: data, max_bytes)
        return data if data is not None and is_proven(data, key, run_key) else None
    return None


def proof_of_record(run_key: bytes, key: str, fields: Mapping[str, Any]) -> str:
    """Return the proof of a record with these fields: 64 hexadecimal digits.

    Args:
        run_key: the key of the run.
        key: the plain key of the record. Its last part names the kind of record.
        fields: the fields of the record as JSON values.

    Example:
        proof_of_record(run_key, "otter/replicas/0000/0/started.json", {"nonce": "3f9a6c0b"})
    """
    return proof_of_fields(run_key, key.rpartition("/")[2].removesuffix(".json"), key, fields)
