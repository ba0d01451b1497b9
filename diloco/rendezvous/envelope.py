"""A record in the store: the frame around its head, and the proof of it.

A frame is `RPL1`, the length of the head (uint32, little-endian), the proof of the head, the head as JSON, zeros up to
a multiple of 64 bytes or more, and the payload. A checksum shows that the bytes are the written ones. If replicas share
a key, a signature takes its place, which also shows that a replica of the run wrote them, under this very key of the
store. A forged record, or one that was copied from another round, rank or run, is not proven.
"""

from __future__ import annotations

import hmac
import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias, TypeVar

from blake3 import blake3
from xxhash import xxh3_128, xxh3_128_digest, xxh3_128_hexdigest

from diloco.errors import ContributionError
from diloco.wires.wire import Hash
from executors.errors import StoreError, kind_of
from executors.store.run_key import KEY_ID, LEAST_KEY_BYTES

T = TypeVar("T")
Buffer: TypeAlias = bytes | bytearray | memoryview

MAGIC = b"RPL1"
DIGEST_BYTES = 16
_PREFIX = struct.Struct(f"<4sI{DIGEST_BYTES}s")  # magic, length of the head, its proof
_ALIGN = 64  # payloads start at a cache line, so that float32 views of mapped objects are aligned


# -- the frame ---------------------------------------------------------------------------------------------------------


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


def unproven_fields(data: Buffer) -> dict[str, Any]:
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
"""The errors that reading foreign bytes may raise. RuntimeError is raised by torch, and for bytes nested too deeply."""


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


# -- the proof ---------------------------------------------------------------------------------------------------------


class Proof(Protocol):
    """How the replicas of a run prove what they write."""

    is_signed: bool
    """True if only a replica with the run's key can make what proves a record."""
    copies: bool
    """True if data must be copied before it is proven: another process may write to a mapped file."""

    def of_head(self, key: str, head: Buffer) -> bytes:
        """Return the 16 bytes that prove the head of an object with this key."""

    def hash(self) -> Hash:
        """Return the digest of a payload, or of a block of one, in the making."""

    def digest(self, data: Buffer) -> str:
        """Return the digest of a whole one."""


class Checksums:
    """Checksums by xxh3_128, which any process can compute."""

    is_signed = False
    copies = False

    def of_head(self, key: str, head: Buffer) -> bytes:
        return xxh3_128_digest(head)

    def hash(self) -> Hash:
        return xxh3_128()

    def digest(self, data: Buffer) -> str:
        return xxh3_128_hexdigest(data)


class Signatures:
    """HMAC-SHA256 of heads, and BLAKE3 of payloads, for which a head vouches: twice as fast as SHA-256 or more."""

    is_signed = True
    copies = True

    def __init__(self, key: bytes) -> None:
        self._key = key

    def of_head(self, key: str, head: Buffer) -> bytes:
        return hmac.digest(self._key, b"".join((MAGIC, key.encode(), b"\0", head)), "sha256")[:DIGEST_BYTES]

    def hash(self) -> Hash:
        return _Blake3()

    def digest(self, data: Buffer) -> str:
        return blake3(data).hexdigest(length=DIGEST_BYTES)


class _Blake3:
    def __init__(self) -> None:
        self._hash = blake3()

    def update(self, data: Buffer) -> None:
        self._hash.update(data)

    def hexdigest(self) -> str:
        return self._hash.hexdigest(length=DIGEST_BYTES)


UNSIGNED = Checksums()


def proof_of(key: bytes | None) -> Proof:
    """Return the proof of records of replicas that share a key. None: they share no key."""
    return UNSIGNED if key is None else Signatures(key)


def check_key(key: Any) -> None:
    """Raises: TypeError, ValueError: it is not a key. The message does not show it."""
    if key is not None and not isinstance(key, bytes):
        raise TypeError(f"key is bytes, as of secrets.token_bytes(32), got {kind_of(key)}.")
    if key is not None and len(key) < LEAST_KEY_BYTES:
        raise ValueError(f"key has at least {LEAST_KEY_BYTES} bytes, got {len(key)}.")


def check_signed(theirs: Any, mine: str | None) -> None:
    """Refuse a replica that has not the key of the run.

    Args:
        theirs: the id of the run's key in a record; None if the record is of a run that is not signed.
        mine: the id of this replica's key; None if it has no key.

    Raises:
        ContributionError: the keys differ. The message names the remedy.
    """
    if theirs == mine:
        return
    if theirs is None:
        raise ContributionError(
            f"This replica has the key {mine}, but the run is not signed with it. If you launched the run without "
            "--signed, start the replica without a key; otherwise another process has changed the run's first records."
        )
    shown = theirs if isinstance(theirs, str) and KEY_ID.fullmatch(theirs) else "unknown"
    has = "no key" if mine is None else f"another one ({mine})"
    raise ContributionError(
        f"This run is signed (key {shown}), and this replica has {has}: start it through `replicas`, or pass "
        "DiLoCo(key=…)."
    )
