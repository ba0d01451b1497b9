"""What proves a record and its payload: checksums, or, where replicas share a key, signatures.

A checksum shows that the bytes are those that were written. A signature shows besides that a replica of the run wrote
them, under this very key of the store: what is forged, or copied from another round, rank or run, is not proven.
"""

from __future__ import annotations

import hmac
from typing import Any, Protocol, TypeAlias

from blake3 import blake3
from xxhash import xxh3_128, xxh3_128_digest, xxh3_128_hexdigest

from diloco.errors import ContributionError
from diloco.wires.wire import Hash
from executors.errors import kind_of
from executors.store.run_key import KEY_ID, LEAST_KEY_BYTES

Buffer: TypeAlias = bytes | bytearray | memoryview

MAGIC = b"RPL1"
DIGEST_BYTES = 16


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
    """xxh3_128, which anybody can make."""

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
    """Return how the replicas that share a key prove what they write; None: they share none."""
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
