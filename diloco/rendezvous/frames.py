"""The objects that replicas exchange, as bytes: contributions, seals and means.

Each is a *frame*: `RPL1`, the length and the xxh3_128 digest of a JSON head, the head, zeros up to a multiple of 64
bytes, and then the payload. A frame proves its head; the head carries the digest of each block of the payload, so any
range of whole blocks can be checked as it is read. The size of the head of a contribution or a mean follows from the
number of blocks alone, so that it can be read without knowing anything else.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

from xxhash import xxh3_64_intdigest, xxh3_128_digest, xxh3_128_hexdigest

from executors.errors import StoreError

Buffer: TypeAlias = bytes | bytearray | memoryview
T = TypeVar("T")

READ_TRIES = 3
"""How often an object is read before its bytes, rather than the reading, are held to be wrong."""
MAX_RANK = 1_000_000
MAX_ATTEMPT = 1_000_000
MAX_SHARDS = 64
"""Every replica reads every shard, so hundreds of them would be hundreds of requests a round, for each replica."""
MAX_WEIGHT = 1e30
"""Far beyond any number of tokens, and no sum of such weights overflows, which would make every share of a mean 0."""

FP32 = "fp32"
"""The wire of a record that names none."""

_PREFIX = struct.Struct("<4sI16s")  # magic, length of the head, its digest
_MAGIC = b"RPL1"
_ALIGN = 64  # payloads start at a cache line, so that float32 views of mapped objects are aligned


class BadRecordError(StoreError):
    """Bytes that are not, or no longer, the record they should be."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """The head of what one replica sends for one entry; the payload follows it, if there is any work."""

    rank: int
    attempt: int
    nonce: str
    weight: float
    """0: the sender presents itself without any work."""
    anchor: str
    """Digest of the sender's anchor and outer state of this fragment, before the entry."""
    size_bytes: int
    blocks: tuple[str, ...]
    norms: tuple[float, ...]
    """Euclidean norm of each block; for people."""
    waited_s: float = 0.0
    """How long the sender waited for others in its last round: the spread of arrivals, by one clock."""
    phase_s: float = 0.0
    """How long all inner steps of an entry take the sender; 0: not known."""
    head_start_s: float = 0.0
    """How much earlier than the others, at most, the sender's inner steps ended."""
    in_phase: bool = True
    """Whether the sender has made its inner steps and waits; else it presents itself and trains on."""
    wire: str = FP32
    """How the payload is encoded."""
    steps: int = 0
    """How many inner steps it is made of."""

    def head(self, n_blocks: int | None = None) -> bytes:
        """Return the head, as long as that of a payload of `n_blocks` blocks."""
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
                "phase_s": float(f"{self.phase_s:.6g}"),
                "head_start_s": round(self.head_start_s, 3),
                "in_phase": self.in_phase,
                "steps": self.steps,
                **_wire_field(self.wire),
            }
        )
        return _padded(head, head_bytes(len(self.blocks) if n_blocks is None else n_blocks))

    @classmethod
    def parse(cls, data: Buffer) -> tuple[Contribution, str]:
        """Return the head and its digest.

        Raises:
            BadRecordError: these bytes are not a contribution.
        """
        fields, digest, _ = unframe(data)
        with reading("contribution"):
            contribution = cls(
                rank=_whole(fields["rank"], MAX_RANK),
                attempt=_whole(fields["attempt"], MAX_ATTEMPT),
                nonce=_nonce(fields["nonce"]),
                weight=_weight(fields["weight"]),
                anchor=_digest(fields["anchor"]),
                size_bytes=_whole(fields["bytes"]),
                blocks=_split_digests(fields["blocks"]),
                norms=tuple(_number(norm) for norm in typed(list, fields["norms"])),
                waited_s=_seconds(fields["waited_s"]),
                phase_s=_seconds(fields["phase_s"]),
                head_start_s=_seconds(fields["head_start_s"]),
                in_phase=typed(bool, fields["in_phase"]),
                wire=_wire_of(fields),
                steps=_whole(fields["steps"]),
            )
        return contribution, digest


@dataclass(frozen=True, slots=True)
class Member:
    """A contribution that counts, or a replica that presented itself without one."""

    nonce: str
    attempt: int
    weight: float
    """0: it brings no input to the mean."""
    digest: str
    """Digest of the contribution's head, and so of its payload."""
    in_phase: bool = True

    @classmethod
    def of(cls, nonce: Any, attempt: Any, weight: Any, digest: Any, in_phase: Any) -> Member:
        """Check the fields of a member, which another replica wrote."""
        return cls(_nonce(nonce), _whole(attempt, MAX_ATTEMPT), _weight(weight), _digest(digest), typed(bool, in_phase))


@dataclass(frozen=True, slots=True)
class Seal:
    """The decision about one entry: who counts, from which anchor, and the mean itself when it is small.

    Where no member has any weight there is no mean: anchor and momentum stay, and the entry is counted.
    """

    members: Mapping[int, Member]
    anchor: str
    shards: int
    """Number of `mean/<shard>` objects; 0: the mean is in here, or there is none."""
    mean: Buffer = b""
    lost_mean: str | None = None
    """The digest of the mean, when these bytes are not the mean any more."""
    phase_s: float = 0.0
    """The longest inner phase of a member; 0: nobody knew."""
    same: tuple[tuple[int, ...], ...] = ()
    """Groups of members that sent the same work, as on the same data. No decision depends on it."""
    wire: str = FP32
    """How the mean in here is encoded."""

    @property
    def inputs(self) -> dict[int, Member]:
        """The members whose work is in the mean."""
        return {rank: member for rank, member in sorted(self.members.items()) if member.weight > 0}

    @property
    def owners(self) -> list[int]:
        """The ranks that reduce the mean: those that wait for it, or all members where nobody waits."""
        return [rank for rank, member in self.members.items() if member.in_phase] or list(self.members)

    def data(self) -> list[Buffer]:
        fields: dict[str, Any] = {
            "members": {
                str(r): [m.nonce, m.attempt, m.weight, m.digest, m.in_phase] for r, m in sorted(self.members.items())
            },
            "anchor": self.anchor,
            "shards": self.shards,
            "phase_s": float(f"{self.phase_s:.6g}"),
            "same": self.same,
        }
        if not self.shards:
            fields |= {"mean": xxh3_128_hexdigest(self.mean), **_wire_field(self.wire)}
        head = frame(fields)
        return [_padded(head, _aligned(len(head))), self.mean]

    @classmethod
    def parse(cls, data: Buffer, *, size_bytes: int | None = None, wire: str | None = None, whole: bool = True) -> Seal:
        """Read a seal.

        Args:
            size_bytes: of the entry's mean; None: not known here.
            wire: of the run's means; None: not known here.
            whole: refuse a seal whose head is right and whose mean is not what was sealed.

        Raises:
            BadRecordError: these bytes are not a seal of such an entry, or its mean is not what was sealed.
        """
        fields, _, end = unframe(data)
        with reading("seal"):
            members = {
                int(_rank(rank)): Member.of(*typed(list, m)) for rank, m in typed(dict, fields["members"]).items()
            }
            anchor, phase_s = _digest(fields["anchor"]), _seconds(fields["phase_s"])
            shards, same = _whole(fields["shards"], MAX_SHARDS), _groups(fields["same"], members.keys())
            digest, found = (None, FP32) if shards else (_digest(fields["mean"]), _wire_of(fields))
            if not members:
                raise ValueError("it names nobody")
        mean = memoryview(data)[end:]
        if digest is None:
            return cls(members, anchor, shards, phase_s=phase_s, same=same)
        if mean and wire is not None and found != wire:
            raise BadRecordError(f"The mean in this seal is {found} and not {wire}.")
        if xxh3_128_hexdigest(mean) != digest:
            if whole:
                raise BadRecordError("The mean in this seal is not what was sealed.")
            return cls(members, anchor, shards, b"", digest, phase_s, same, found)
        seal = cls(members, anchor, shards, mean, phase_s=phase_s, same=same, wire=found)
        expected_bytes = len(mean) if size_bytes is None else size_bytes if seal.inputs else 0
        if len(mean) != expected_bytes:
            raise BadRecordError(f"The mean in this seal has {len(mean)} bytes instead of {expected_bytes}.")
        return seal


@dataclass(frozen=True, slots=True)
class MeanHead:
    """The head of one shard of a mean; the payload follows it."""

    blocks: tuple[str, ...]
    left_out: tuple[int, ...]
    """Ranks whose sealed input could not be used for this shard."""
    wire: str = FP32
    """How the payload is encoded."""

    def head(self) -> bytes:
        fields = {"blocks": "".join(self.blocks), "left_out": list(self.left_out), **_wire_field(self.wire)}
        head = frame(fields)
        return _padded(head, head_bytes(len(self.blocks)))

    @classmethod
    def parse(cls, data: Buffer, *, wire: str | None = None) -> MeanHead:
        """Read the head of a mean.

        Args:
            wire: of the run's means; None: not known here.

        Raises: BadRecordError: these bytes are not such a mean.
        """
        fields, _, _ = unframe(data)
        with reading("mean"):
            left_out = tuple(_whole(rank, MAX_RANK) for rank in typed(list, fields["left_out"]))
            head = cls(_split_digests(fields["blocks"]), left_out, _wire_of(fields))
        if wire is not None and head.wire != wire:
            raise BadRecordError(f"This mean is {head.wire} and not {wire}.")
        return head


def head_bytes(n_blocks: int) -> int:
    """Return the size of the head of a contribution or mean of `n_blocks` blocks, before which its payload starts."""
    return _aligned(1024 + 52 * n_blocks)  # per block a digest of 32 characters and a norm of up to 14


def digests_of(payload: Buffer, block_bytes: int) -> tuple[str, ...]:
    """Return the xxh3_128 of each block."""
    view = memoryview(payload).cast("B")
    return tuple(xxh3_128_hexdigest(view[at : at + block_bytes]) for at in range(0, len(view), block_bytes))


def hash_order(ranks: Iterable[int], *about: object) -> list[int]:
    """Order ranks by a hash of the rank and of a subject: the same everywhere, another order for each subject."""
    salt = "/".join(map(str, about))
    return sorted(ranks, key=lambda rank: (xxh3_64_intdigest(f"{salt}/{rank}".encode()), rank))


def frame(fields: Mapping[str, Any]) -> bytes:
    """Return a JSON object as a head that proves itself."""
    head = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
    return _PREFIX.pack(_MAGIC, len(head), xxh3_128_digest(head)) + head


def unframe(data: Buffer) -> tuple[dict[str, Any], str, int]:
    """Return the head's fields, its digest, and where the payload starts.

    Raises:
        BadRecordError: these bytes are not a frame, or no longer what was written.
    """
    view = memoryview(data)
    if len(view) < _PREFIX.size:
        raise BadRecordError(f"A record has at least {_PREFIX.size} bytes, this one has {len(view)}.")
    magic, length, digest = _PREFIX.unpack_from(view)
    head = view[_PREFIX.size : _PREFIX.size + length]
    if magic != _MAGIC or len(head) < length or xxh3_128_digest(head) != digest:
        raise BadRecordError("The head of this record is not what was written.")
    with reading("record"):
        fields = typed(dict, json.loads(bytes(head)))
    return fields, digest.hex(), _aligned(_PREFIX.size + length)


def _padded(head: bytes, size: int) -> bytes:
    if len(head) > size:
        raise ValueError(f"A head of {len(head)} bytes does not fit into {size}.")  # a nonce of absurd length
    return head.ljust(size, b"\0")


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


# -- fields of a record, which another replica wrote -----------------------------------------------------------------

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


def _split_digests(text: Any) -> tuple[str, ...]:
    if not isinstance(text, str) or len(text) % 32:
        raise ValueError("block digests are not a multiple of 32 characters")
    return tuple(text[at : at + 32] for at in range(0, len(text), 32))


def _wire_field(wire: str) -> dict[str, str]:
    return {} if wire == FP32 else {"wire": wire}


def _wire_of(fields: Mapping[str, Any]) -> str:
    return matching(_WIRE, "wire", fields.get("wire", FP32))


def _groups(value: Any, ranks: Set[int]) -> tuple[tuple[int, ...], ...]:
    """Read groups of some of these ranks, each rank in one group at most."""
    groups = tuple(tuple(_whole(rank, MAX_RANK) for rank in typed(list, group)) for group in typed(list, value))
    named = [rank for group in groups for rank in group]
    if len(set(named)) < len(named) or not ranks >= set(named) or any(len(group) < 2 for group in groups):
        raise ValueError(f"{str(value)[:40]!r} instead of groups of its members")
    return groups


def _whole(value: Any, most: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0 or (most is not None and value > most):
        raise ValueError(f"{str(value)[:40]!r} instead of a number from 0 to {most}")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"a {type(value).__name__} instead of a number")
    return float(value)


def _weight(value: Any) -> float:
    weight = _number(value)
    if not 0 <= weight <= MAX_WEIGHT:
        raise ValueError(f"a weight of {weight}")
    return weight


def _seconds(value: Any) -> float:
    """Read a duration; what cannot be one is read as 0, which is safe: no decision needs one."""
    seconds = _number(value)
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0


def matching(pattern: re.Pattern[str], what: str, value: Any) -> str:
    """Return the text, which must match a pattern as a whole."""
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"{str(value)[:40]!r} instead of a {what}")
    return value


_WIRE = re.compile(r"[\w. ]{1,32}", re.ASCII)
_digest = partial(matching, re.compile(r"[0-9a-f]{32}"), "digest")
_nonce = partial(matching, re.compile(r".{1,64}", re.DOTALL), "nonce")
_rank = partial(matching, re.compile(r"[0-9]{1,7}"), "rank")
