"""Packs records for the store into frames and reads them back. A frame proves that its bytes are the ones that were
written.

A frame begins with `RPL1`, the length of the head (uint32, little-endian) and the proof of the head. The head follows
as JSON, padded with zeros to a multiple of 64 bytes, and then the payload.

The proof is a checksum, or a signature if the replicas share a secret. A checksum finds damaged bytes. A signature also
shows that a replica of the run wrote the record under this key of the store. So the reader refuses a forged record, and
a record that was copied from another round, rank or run.
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
_PREFIX = struct.Struct(f"<4sI{DIGEST_BYTES}s")  # magic, length of the head, proof of the head
_ALIGN = 64  # payloads start at a cache line, so that float32 views of mapped objects are aligned


# -- the frame ---------------------------------------------------------------------------------------------------------


class BadRecordError(StoreError):
    """The bytes are not the expected record: they are damaged, forged, or another kind of object."""


def frame(fields: Mapping[str, Any], key: str, proof: Proof) -> bytes:
    """Return a frame without its payload: prefix, proof and head.

    Args:
        fields: the fields of the head, as JSON values.
        key: the key under which the object will be stored. A signature covers the key.
        proof: signs the head or adds a checksum.
    """
    head = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
    return _PREFIX.pack(MAGIC, len(head), proof.of_head(key, head)) + head


def unframe(data: Buffer, key: str, proof: Proof) -> tuple[dict[str, Any], str, int]:
    """Return the fields of the head, its proof as hexadecimal text, and the offset of the payload in bytes.

    Args:
        data: the object, or at least its head.
        key: the key under which the object was found.
        proof: checks the signature or the checksum.

    Raises:
        BadRecordError: these bytes are not a frame, or they are not the bytes that were written under this key.
    """
    head, found = _split(data)
    if not hmac.compare_digest(proof.of_head(key, head), found):
        raise BadRecordError("The head of this record has other bytes than were written.")
    return _fields(head), found.hex(), aligned(_PREFIX.size + len(head))


def unproven_fields(data: Buffer) -> dict[str, Any]:
    """Return the fields of a head without checking its proof. Use them only to explain why the head is refused.

    Args:
        data: the object, or at least its head.

    Raises:
        BadRecordError: these bytes are not a frame.
    """
    return _fields(_split(data)[0])


def _split(data: Buffer) -> tuple[memoryview, bytes]:
    """Return the head of a frame, and the proof that is stored in front of it."""
    view = memoryview(data)
    if len(view) < _PREFIX.size:
        raise BadRecordError(f"A record has at least {_PREFIX.size} bytes, this one has {len(view)}.")
    magic, length, found = _PREFIX.unpack_from(view)
    head = view[_PREFIX.size : _PREFIX.size + length]
    if magic != MAGIC or len(head) < length:
        raise BadRecordError("The head of this record has other bytes than were written.")
    return head, found


def _fields(head: memoryview) -> dict[str, Any]:
    with reading("record"):
        return typed(dict, json.loads(bytes(head)))


def padded(head: bytes, size: int) -> bytes:
    """Return the head with zeros up to a size in bytes.

    Raises:
        ValueError: the head is longer than the size. Only an extremely long nonce can cause that.
    """
    if len(head) > size:
        raise ValueError(f"A head of {len(head)} bytes does not fit into {size}.")
    return head.ljust(size, b"\0")


def aligned(size: int) -> int:
    """Return the smallest multiple of 64 bytes that is at least this size."""
    return -(-size // _ALIGN) * _ALIGN


UNREADABLE = (AttributeError, LookupError, MemoryError, OverflowError, RuntimeError, TypeError, ValueError)
"""The errors that a parser may raise for foreign bytes.

torch raises RuntimeError, and so does JSON that is nested too deeply.
"""


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn each error that a wrong field raises inside the block into a `BadRecordError`.

    Args:
        what: the kind of record, for the message.

    Example:
        with reading("seal"):
            shards = typed(int, fields["shards"])
    """
    try:
        yield
    except BadRecordError:
        raise
    except UNREADABLE as error:
        raise BadRecordError(f"This is not a {what}: {type(error).__name__}: {str(error)[:200]}.") from error


def typed(kind: type[T], value: Any) -> T:
    """Return the value if it has the given type.

    Raises:
        TypeError: it has another type.
    """
    if not isinstance(value, kind):
        raise TypeError(f"a {type(value).__name__} instead of a {kind.__name__}")
    return value


# -- the proof ---------------------------------------------------------------------------------------------------------


class Proof(Protocol):
    """Makes and checks the proofs of records and payloads. All replicas of one run use the same kind of proof."""

    is_signed: bool
    """True if only a replica with the run's key can make the proof of a record."""
    copies: bool
    """True if data must be copied before it is checked, because another process may write to a mapped file."""

    def of_head(self, key: str, head: Buffer) -> bytes:
        """Return the 16 bytes that prove a head.

        Args:
            key: the key under which the object is stored.
            head: the head as JSON.
        """

    def hash(self) -> Hash:
        """Return a new hash, for a payload or a block that is read piece by piece."""

    def digest(self, data: Buffer) -> str:
        """Return the digest of a whole payload or block."""


class Checksums:
    """The proof of runs without a key: checksums by xxh3_128, which any process can compute."""

    is_signed = False
    copies = False

    def of_head(self, key: str, head: Buffer) -> bytes:
        return xxh3_128_digest(head)

    def hash(self) -> Hash:
        return xxh3_128()

    def digest(self, data: Buffer) -> str:
        return xxh3_128_hexdigest(data)


class Signatures:
    """The proof of signed runs: HMAC-SHA256 of each head, and BLAKE3 of each payload.

    A head contains the digests of its payload, so the signature of the head covers both. BLAKE3 is at least twice as
    fast as SHA-256.

    Args:
        key: the key of the run.
    """

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
    """BLAKE3 with digests of 16 bytes, as a `Hash`."""

    def __init__(self) -> None:
        self._hash = blake3()

    def update(self, data: Buffer) -> None:
        self._hash.update(data)

    def hexdigest(self) -> str:
        return self._hash.hexdigest(length=DIGEST_BYTES)


UNSIGNED = Checksums()


def proof_of(key: bytes | None) -> Proof:
    """Return the proof for a run.

    Args:
        key: the key that the replicas share. None: the run is not signed.
    """
    return UNSIGNED if key is None else Signatures(key)


def check_run_key(key: Any) -> None:
    """Check the argument `key` of a DiLoCo. No message shows the key, because it is a secret.

    Raises:
        TypeError: the key is neither None nor bytes.
        ValueError: the key is too short.
    """
    if key is not None and not isinstance(key, bytes):
        raise TypeError(f"key must be bytes, such as secrets.token_bytes(32), got {kind_of(key)}.")
    if key is not None and len(key) < LEAST_KEY_BYTES:
        raise ValueError(f"key must have at least {LEAST_KEY_BYTES} bytes, got {len(key)}.")


def check_signed(theirs: Any, mine: str | None) -> None:
    """Refuse a replica that does not have the key of the run.

    Args:
        theirs: the id of the run's key, as a record of the run names it. None: the run is not signed.
        mine: the id of this replica's key. None: the replica has no key.

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
