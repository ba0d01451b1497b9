"""A frame: a JSON head, what proves it, and a payload behind it.

`RPL1`, the length of the head (uint32, little-endian), its proof, the head, zeros up to a multiple of 64 bytes or
more, the payload. The proof is of the head and, in a signed run, of the object's key.
"""

from __future__ import annotations

import hmac
import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from diloco.rendezvous.proof import DIGEST_BYTES, MAGIC, Buffer, Proof
from executors.errors import StoreError

T = TypeVar("T")

_PREFIX = struct.Struct(f"<4sI{DIGEST_BYTES}s")  # magic, length of the head, its proof
_ALIGN = 64  # payloads start at a cache line, so that float32 views of mapped objects are aligned


class BadRecordError(StoreError):
    """Bytes that are not, or no longer, the record they should be."""


def frame(fields: Mapping[str, Any], key: str, proof: Proof) -> bytes:
    """Return a JSON object as the head of an object with this key, with what proves it."""
    head = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
    return _PREFIX.pack(MAGIC, len(head), proof.of_head(key, head)) + head


def unframe(data: Buffer, key: str, proof: Proof) -> tuple[dict[str, Any], str, int]:
    """Return the fields of the head of an object with this key, what proves it, and where the payload starts.

    Raises:
        BadRecordError: these bytes are not a frame, or no longer what was written under this key.
    """
    head, found = _split(data)
    if not hmac.compare_digest(proof.of_head(key, head), found):
        raise BadRecordError("The head of this record is not what was written.")
    return _fields(head), found.hex(), aligned(_PREFIX.size + len(head))


def unproven(data: Buffer) -> dict[str, Any]:
    """Return the fields of a head that nothing vouches for, to say why it is refused.

    Raises:
        BadRecordError: these bytes are not a frame.
    """
    return _fields(_split(data)[0])


def _split(data: Buffer) -> tuple[memoryview, bytes]:
    """Return the head of a frame, and the proof that it comes with."""
    view = memoryview(data)
    if len(view) < _PREFIX.size:
        raise BadRecordError(f"A record has at least {_PREFIX.size} bytes, this one has {len(view)}.")
    magic, length, found = _PREFIX.unpack_from(view)
    head = view[_PREFIX.size : _PREFIX.size + length]
    if magic != MAGIC or len(head) < length:
        raise BadRecordError("The head of this record is not what was written.")
    return head, found


def _fields(head: memoryview) -> dict[str, Any]:
    with reading("record"):
        return typed(dict, json.loads(bytes(head)))


def padded(head: bytes, size: int) -> bytes:
    if len(head) > size:
        raise ValueError(f"A head of {len(head)} bytes does not fit into {size}.")  # a nonce of absurd length
    return head.ljust(size, b"\0")


def aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


UNREADABLE = (AttributeError, LookupError, MemoryError, OverflowError, RuntimeError, TypeError, ValueError)
"""What reading foreign bytes may raise; RuntimeError: nested too deeply, or torch's own."""


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn whatever a wrong field raises into a `BadRecordError` that names the kind of record."""
    try:
        yield
    except BadRecordError:
        raise
    except UNREADABLE as error:
        raise BadRecordError(f"This is not a {what}: {type(error).__name__}: {str(error)[:200]}.") from error


def typed(kind: type[T], value: Any) -> T:
    """Return the value, which must be of that type."""
    if not isinstance(value, kind):
        raise TypeError(f"a {type(value).__name__} instead of a {kind.__name__}")
    return value
