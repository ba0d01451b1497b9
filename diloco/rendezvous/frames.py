"""The objects that replicas exchange, as bytes: contributions, seals and means.

Each is a frame (`envelope.py`). Its head carries the digest of each block of the payload, so any range of whole blocks
can be checked as it is read. The size of the head of a contribution or a mean follows from the number of blocks alone,
so that it can be read without knowing anything else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

from xxhash import xxh3_64_intdigest

from diloco.rendezvous.envelope import BadRecordError, Buffer, Proof, aligned, frame, padded, reading, typed, unframe

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
    stop: bool = False
    """Whether the sender wants the run to end with the round that counts this."""

    def head(self, key: str, proof: Proof, n_blocks: int | None = None) -> bytes:
        """Return the head of an object with this key, as long as that of a payload of `n_blocks` blocks."""
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
                **({"stop": True} if self.stop else {}),
                **_wire_field(self.wire),
            },
            key,
            proof,
        )
        return padded(head, head_bytes(len(self.blocks) if n_blocks is None else n_blocks))

    @classmethod
    def parse(cls, data: Buffer, key: str, proof: Proof) -> tuple[Contribution, str]:
        """Return the head and what proves it.

        Raises:
            BadRecordError: these bytes are not a contribution.
        """
        fields, digest, _ = unframe(data, key, proof)
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
                stop=typed(bool, fields.get("stop", False)),
            )
        return contribution, digest


@dataclass(frozen=True, slots=True)
class SealedReplica:
    """A contribution that counts, or a replica that presented itself without one."""

    nonce: str
    attempt: int
    weight: float
    """0: it brings no input to the mean."""
    digest: str
    """What proves the contribution's head, and so its payload."""
    in_phase: bool = True

    @classmethod
    def of(cls, nonce: Any, attempt: Any, weight: Any, digest: Any, in_phase: Any) -> SealedReplica:
        """Check the fields of a member, which another replica wrote."""
        return cls(_nonce(nonce), _whole(attempt, MAX_ATTEMPT), _weight(weight), _digest(digest), typed(bool, in_phase))


@dataclass(frozen=True, slots=True)
class Seal:
    """The decision about one entry: who counts, from which anchor, and the mean itself when it is small.

    Where no member has any weight there is no mean: anchor and momentum stay, and the entry is counted.
    """

    replicas: Mapping[int, SealedReplica]
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
    stops: tuple[int, ...] = ()
    """The members that want the run to end with this round. If there is one, it does: see `early_end.py`."""

    @property
    def inputs(self) -> dict[int, SealedReplica]:
        """The members whose work is in the mean."""
        return {rank: member for rank, member in sorted(self.replicas.items()) if member.weight > 0}

    @property
    def whole_mean(self) -> list[memoryview] | None:
        """The mean, as consecutive ranges, if no other object is needed to know it.

        It is empty if no member sent any work. None: the mean is in objects of its own, or its bytes are damaged.
        """
        if not self.inputs:
            return []
        return None if self.shards or self.lost_mean is not None else [memoryview(self.mean)]

    @property
    def owners(self) -> list[int]:
        """The ranks that reduce the mean: those that wait for it, or all members where nobody waits."""
        return [rank for rank, member in self.replicas.items() if member.in_phase] or list(self.replicas)

    def data(self, key: str, proof: Proof) -> list[Buffer]:
        fields: dict[str, Any] = {
            "replicas": {
                str(r): [m.nonce, m.attempt, m.weight, m.digest, m.in_phase] for r, m in sorted(self.replicas.items())
            },
            "anchor": self.anchor,
            "shards": self.shards,
            "phase_s": float(f"{self.phase_s:.6g}"),
            "same": self.same,
            **({"stops": list(self.stops)} if self.stops else {}),
        }
        if not self.shards:
            fields |= {"mean": proof.digest(self.mean), **_wire_field(self.wire)}
        head = frame(fields, key, proof)
        return [padded(head, aligned(len(head))), self.mean]

    @classmethod
    def parse(
        cls,
        data: Buffer,
        key: str,
        proof: Proof,
        *,
        size_bytes: int | None = None,
        wire: str | None = None,
        whole: bool = True,
    ) -> Seal:
        """Read a seal.

        Args:
            size_bytes: of the entry's mean; None: not known here.
            wire: of the run's means; None: not known here.
            whole: refuse a seal whose head is right and whose mean is not what was sealed.

        Raises:
            BadRecordError: these bytes are not a seal of such an entry, or its mean is not what was sealed.
        """
        fields, _, end = unframe(data, key, proof)
        with reading("seal"):
            members = {
                int(_rank(rank)): SealedReplica.of(*typed(list, m))
                for rank, m in typed(dict, fields["replicas"]).items()
            }
            anchor, phase_s = _digest(fields["anchor"]), _seconds(fields["phase_s"])
            shards, same = _whole(fields["shards"], MAX_SHARDS), _groups(fields["same"], members.keys())
            stops = _some_of(fields.get("stops", []), members.keys())
            digest, found = (None, FP32) if shards else (_digest(fields["mean"]), _wire_of(fields))
            if not members:
                raise ValueError("it names nobody")
        mean = memoryview(data)[end:]
        if digest is None:
            return cls(members, anchor, shards, phase_s=phase_s, same=same, stops=stops)
        if mean and wire is not None and found != wire:
            raise BadRecordError(f"The mean in this seal is {found} and not {wire}.")
        if proof.digest(mean) != digest:
            if whole:
                raise BadRecordError("The mean in this seal is not what was sealed.")
            return cls(members, anchor, shards, b"", digest, phase_s, same, found, stops)
        seal = cls(members, anchor, shards, mean, phase_s=phase_s, same=same, wire=found, stops=stops)
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

    def head(self, key: str, proof: Proof) -> bytes:
        fields = {"blocks": "".join(self.blocks), "left_out": list(self.left_out), **_wire_field(self.wire)}
        head = frame(fields, key, proof)
        return padded(head, head_bytes(len(self.blocks)))

    @classmethod
    def parse(cls, data: Buffer, key: str, proof: Proof, *, wire: str | None = None) -> MeanHead:
        """Read the head of a mean.

        Args:
            wire: of the run's means; None: not known here.

        Raises: BadRecordError: these bytes are not such a mean.
        """
        fields, _, _ = unframe(data, key, proof)
        with reading("mean"):
            left_out = tuple(_whole(rank, MAX_RANK) for rank in typed(list, fields["left_out"]))
            head = cls(_split_digests(fields["blocks"]), left_out, _wire_of(fields))
        if wire is not None and head.wire != wire:
            raise BadRecordError(f"This mean is {head.wire} and not {wire}.")
        return head


def head_bytes(n_blocks: int) -> int:
    """Return the size of the head of a contribution or mean of `n_blocks` blocks, before which its payload starts."""
    return aligned(1024 + 52 * n_blocks)  # per block a digest of 32 characters and a norm of up to 14


def digests_of(payload: Buffer, block_bytes: int, proof: Proof) -> tuple[str, ...]:
    """Return the digest of each block."""
    view = memoryview(payload).cast("B")
    return tuple(proof.digest(view[at : at + block_bytes]) for at in range(0, len(view), block_bytes))


def hash_order(ranks: Iterable[int], *about: object) -> list[int]:
    """Order ranks by a hash of the rank and of a subject: the same everywhere, another order for each subject."""
    salt = "/".join(map(str, about))
    return sorted(ranks, key=lambda rank: (xxh3_64_intdigest(f"{salt}/{rank}".encode()), rank))


# -- fields of a record, which another replica wrote -----------------------------------------------------------------


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


def _some_of(value: Any, ranks: Set[int]) -> tuple[int, ...]:
    """Read some of these ranks, each once."""
    named = tuple(_whole(rank, MAX_RANK) for rank in typed(list, value))
    if len(set(named)) < len(named) or not ranks >= set(named):
        raise ValueError(f"{str(value)[:40]!r} instead of some of its members")
    return named


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
