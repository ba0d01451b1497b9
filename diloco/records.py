"""The objects that replicas exchange, as bytes: contributions, seals and means.

Each is a *frame*, `RPL1`, the length and the xxh3_128 digest of a JSON head, the head, zeros up to a multiple of
64 bytes, and then the payload. A frame proves its head; the head carries the digest of each block of the payload, so
any range of whole blocks can be checked as it is read. Heads of contributions and means have a size that follows from
the number of blocks, so that they can be read without knowing anything else.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from xxhash import xxh3_64_intdigest, xxh3_128_digest, xxh3_128_hexdigest

from executors.errors import StoreError

Buffer: TypeAlias = bytes | bytearray | memoryview

BLOCK_BYTES = 4 << 20
"""What one digest covers. Shards are whole blocks."""

_PREFIX = struct.Struct("<4sI16s")  # magic, length of the head, its digest
_MAGIC = b"RPL1"
_ALIGN = 64  # payloads start at a cache line, so that float32 views of mapped objects are aligned


class BadRecordError(StoreError):
    """Bytes that are not, or no longer, the record they should be."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """The head of what one replica sends for one entry; the payload follows it."""

    rank: int
    attempt: int
    nonce: str
    weight: float
    anchor: str
    """Digest of the sender's anchor and outer state of this fragment, before the entry."""
    size_bytes: int
    blocks: tuple[str, ...]
    norms: tuple[float, ...]
    """Euclidean norm of each block; for people."""
    waited_s: float = 0.0
    """How long the sender waited for others in its last round: the spread of arrivals, by one clock."""

    def head(self) -> bytes:
        head = frame(
            {
                "rank": self.rank,
                "attempt": self.attempt,
                "nonce": self.nonce,
                "weight": self.weight,
                "anchor": self.anchor,
                "bytes": self.size_bytes,
                "blocks": "".join(self.blocks),
                "norms": [float(f"{norm:.6g}") for norm in self.norms],
                "waited_s": round(self.waited_s, 3),
            }
        )
        return _padded(head, head_bytes(len(self.blocks)))

    @classmethod
    def parse(cls, data: Buffer) -> tuple[Contribution, str]:
        """Return the head and its digest.

        Raises:
            BadRecordError: these bytes are no contribution.
        """
        fields, digest, _ = unframe(data)
        try:
            contribution = cls(
                rank=int(fields["rank"]),
                attempt=int(fields["attempt"]),
                nonce=str(fields["nonce"]),
                weight=float(fields["weight"]),
                anchor=str(fields["anchor"]),
                size_bytes=int(fields["bytes"]),
                blocks=_split_digests(fields["blocks"]),
                norms=tuple(fields["norms"]),
                waited_s=float(fields["waited_s"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BadRecordError(f"This is no contribution: {error!r}.") from error
        return contribution, digest


@dataclass(frozen=True, slots=True)
class Member:
    """A contribution that counts."""

    nonce: str
    attempt: int
    weight: float
    digest: str
    """Digest of the contribution's head, and so of its payload."""


@dataclass(frozen=True, slots=True)
class Seal:
    """The decision about one entry: who counts, from which anchor, and the mean itself when it is small."""

    members: Mapping[int, Member]
    anchor: str
    shards: int
    """Number of `mean/<shard>` objects; 0: the mean is in here."""
    mean: Buffer = b""
    lost_mean: str | None = None
    """The digest of the mean, when what stands here is not the mean any more."""

    def data(self) -> list[Buffer]:
        fields: dict[str, Any] = {
            "members": {str(r): [m.nonce, m.attempt, m.weight, m.digest] for r, m in sorted(self.members.items())},
            "anchor": self.anchor,
            "shards": self.shards,
        }
        if not self.shards:
            fields["mean"] = xxh3_128_hexdigest(self.mean)
        head = frame(fields)
        return [_padded(head, _aligned(len(head))), self.mean]

    @classmethod
    def parse(cls, data: Buffer, *, whole: bool = True) -> Seal:
        """Read a seal.

        Args:
            whole: refuse a seal whose head is right and whose mean is not.

        Raises:
            BadRecordError: these bytes are no seal, or its mean is not what was sealed.
        """
        fields, _, end = unframe(data)
        try:
            members = {
                int(r): Member(str(m[0]), int(m[1]), float(m[2]), str(m[3])) for r, m in fields["members"].items()
            }
            shards, anchor, digest = int(fields["shards"]), str(fields["anchor"]), fields.get("mean")
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise BadRecordError(f"This is no seal: {error!r}.") from error
        mean = memoryview(data)[end:]
        if not shards and xxh3_128_hexdigest(mean) != digest:
            if whole:
                raise BadRecordError("The mean in this seal is not what was sealed.")
            return cls(members, anchor, shards, b"", str(digest))
        return cls(members, anchor, shards, mean)


@dataclass(frozen=True, slots=True)
class MeanHead:
    """The head of one shard of a mean; the payload follows it."""

    blocks: tuple[str, ...]
    left_out: tuple[int, ...]
    """Ranks whose sealed input could not be used for this shard."""

    def head(self) -> bytes:
        head = frame({"blocks": "".join(self.blocks), "left_out": list(self.left_out)})
        return _padded(head, head_bytes(len(self.blocks)))

    @classmethod
    def parse(cls, data: Buffer) -> MeanHead:
        """Raises: BadRecordError: these bytes are no mean."""
        fields, _, _ = unframe(data)
        try:
            return cls(_split_digests(fields["blocks"]), tuple(int(rank) for rank in fields["left_out"]))
        except (KeyError, TypeError, ValueError) as error:
            raise BadRecordError(f"This is no mean: {error!r}.") from error


def head_bytes(n_blocks: int) -> int:
    """Return the size of the head of a contribution or mean of `n_blocks` blocks, before which its payload starts."""
    return _aligned(1024 + 52 * n_blocks)  # per block a digest of 32 characters and a norm of up to 14


def count_blocks(size_bytes: int, block_bytes: int = BLOCK_BYTES) -> int:
    return -(-size_bytes // block_bytes)


def shard_blocks(n_blocks: int, n_shards: int, shard: int) -> tuple[int, int]:
    """Return the first block of a shard and the one after its last."""
    return shard * n_blocks // n_shards, (shard + 1) * n_blocks // n_shards


def digests_of(payload: Buffer, block_bytes: int = BLOCK_BYTES) -> tuple[str, ...]:
    """Return the xxh3_128 of each block."""
    view = memoryview(payload).cast("B")
    return tuple(xxh3_128_hexdigest(view[at : at + block_bytes]) for at in range(0, len(view), block_bytes))


def hash_order(ranks: Iterable[int], *about: object) -> list[int]:
    """Order ranks by a hash of the rank and of what it is about: the same everywhere, another one each time."""
    salt = "/".join(map(str, about))
    return sorted(ranks, key=lambda rank: (xxh3_64_intdigest(f"{salt}/{rank}".encode()), rank))


def frame(fields: Mapping[str, Any]) -> bytes:
    """Return a JSON object as a head that proves itself."""
    head = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
    return _PREFIX.pack(_MAGIC, len(head), xxh3_128_digest(head)) + head


def unframe(data: Buffer) -> tuple[dict[str, Any], str, int]:
    """Return the head's fields, its digest, and where the payload starts.

    Raises:
        BadRecordError: these bytes are no frame, or no longer what was written.
    """
    view = memoryview(data)
    if len(view) < _PREFIX.size:
        raise BadRecordError(f"A record has at least {_PREFIX.size} bytes, this one has {len(view)}.")
    magic, length, digest = _PREFIX.unpack_from(view)
    head = view[_PREFIX.size : _PREFIX.size + length]
    if magic != _MAGIC or len(head) < length or xxh3_128_digest(head) != digest:
        raise BadRecordError("The head of this record is not what was written.")
    fields: dict[str, Any] = json.loads(bytes(head))
    return fields, digest.hex(), _aligned(_PREFIX.size + length)


def _padded(head: bytes, size: int) -> bytes:
    if len(head) > size:
        raise ValueError(f"A head of {len(head)} bytes does not fit into {size}.")  # a nonce of absurd length
    return head.ljust(size, b"\0")


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _split_digests(text: Sequence[str] | str) -> tuple[str, ...]:
    if not isinstance(text, str) or len(text) % 32:
        raise ValueError("block digests are not a multiple of 32 characters")
    return tuple(text[at : at + 32] for at in range(0, len(text), 32))
