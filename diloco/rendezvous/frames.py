"""The objects that replicas exchange, as bytes: contributions, seals and means.

Each object is a frame (`envelope.py`). The head of a contribution or a mean has the digest of each block of the
payload, so a reader can check any range of whole blocks. The number of blocks alone gives the size of such a head, so a
reader can read a range of the payload without reading the head first.
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
"""The number of wrong readings after which an object counts as damaged.

A single wrong reading may be an error of the transfer, and not of the object.
"""
MAX_RANK = 1_000_000
MAX_ATTEMPT = 1_000_000
MAX_SHARDS = 64
"""The most shards of a mean.

Every replica reads every shard, so hundreds of them would cost each replica hundreds of requests per round.
"""
MAX_WEIGHT = 1e30
"""The largest weight, far more than any number of tokens.

A sum of such weights never overflows; an overflow would make every share 0.
"""

FP32 = "fp32"
"""The wire of a record that names no wire."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """The head of a contribution: the work that one replica sends for one entry. The encoded work follows it.

    Example:
        head, digest = Contribution.parse(data, key, proof)
    """

    rank: int
    attempt: int
    nonce: str
    weight: float
    """The weight of the work in the mean. 0: the sender takes part without any work, and there is no payload."""
    anchor: str
    """Digest of the sender's anchor and outer state of this fragment, before the entry."""
    size_bytes: int
    """The size of the payload."""
    blocks: tuple[str, ...]
    """The digest of each block of the payload."""
    norms: tuple[float, ...]
    """The Euclidean norm of each block, for users. No decision depends on it."""
    waited_s: float = 0.0
    """Seconds that the sender waited for others in its last round.

    It shows by a single clock how far apart replicas arrive.
    """
    phase_s: float = 0.0
    """Seconds that the sender needs for all inner steps of an entry. 0: not known."""
    head_start_s: float = 0.0
    """The longest time, in seconds, by which the sender may end its inner steps before the other replicas."""
    in_phase: bool = True
    """True if the sender has made its inner steps and waits. False: it sent the work early and continues to train."""
    wire: str = FP32
    """The encoding of the payload."""
    steps: int = 0
    """The number of inner steps in the work."""
    stop: bool = False
    """True if the sender asks for the end of the run with the round that counts this contribution."""

    def head(self, key: str, proof: Proof, n_blocks: int | None = None) -> bytes:
        """Return the head as bytes for the store.

        Args:
            key: the key of the contribution. A signature covers the key.
            proof: signs the head or adds a checksum.
            n_blocks: pad the head to its size for this number of blocks. None: the number of `blocks`.
        """
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
        """Return the head, and its proof as hexadecimal text.

        Args:
            data: the contribution, or at least its head.
            key: the key of the contribution.
            proof: checks the signature or the checksum.

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
    """A replica that a seal names, with the contribution that counts.

    Example:
        SealedReplica(nonce, attempt=0, weight=1.0, digest=digest)
    """

    nonce: str
    attempt: int
    weight: float
    """The weight of the replica's work in the mean. 0: none of its work is in the mean."""
    digest: str
    """The proof of the contribution's head. The head has the digests of the payload, so it also proves the payload."""
    in_phase: bool = True
    """True if the replica waited for the seal. False: it contributed early and continued to train."""

    @classmethod
    def of(cls, nonce: Any, attempt: Any, weight: Any, digest: Any, in_phase: Any) -> SealedReplica:
        """Return a sealed replica from fields that another replica wrote.

        Raises:
            ValueError: a field is out of range.
            TypeError: a field has another type.
        """
        return cls(_nonce(nonce), _whole(attempt, MAX_ATTEMPT), _weight(weight), _digest(digest), typed(bool, in_phase))


@dataclass(frozen=True, slots=True)
class Seal:
    """The decision about one entry: the replicas that count, their anchor, and the mean itself if it is small.

    If no replica has any weight, there is no mean. The anchor and the momentum stay as they are, and the entry counts
    as a round.

    Example:
        seal = Seal.parse(data, key, proof)
    """

    replicas: Mapping[int, SealedReplica]
    """The replicas that count, by rank."""
    anchor: str
    """Digest of the anchor and outer state from which the contributions were made."""
    shards: int
    """The number of `mean/<shard>` objects. 0: the mean is inside the seal, or there is none."""
    mean: Buffer = b""
    lost_mean: str | None = None
    """The digest of the mean inside the seal, if the bytes of that mean are damaged."""
    phase_s: float = 0.0
    """The longest phase of a replica, in seconds. 0: no replica knew its phase."""
    same: tuple[tuple[int, ...], ...] = ()
    """Groups of ranks that sent equal work, as if they trained on the same data. No decision depends on it."""
    wire: str = FP32
    """The encoding of the mean inside the seal."""
    stops: tuple[int, ...] = ()
    """The ranks that ask for the end of the run. If there is one, the run ends with this round: see `early_end.py`."""
    clipped: tuple[int, ...] = ()
    """The ranks whose work was scaled down in the mean inside the seal."""

    @property
    def inputs(self) -> dict[int, SealedReplica]:
        """The replicas whose work is in the mean, in the order of their ranks."""
        return {rank: replica for rank, replica in sorted(self.replicas.items()) if replica.weight > 0}

    @property
    def whole_mean(self) -> list[memoryview] | None:
        """The mean as consecutive ranges of bytes, if the seal alone has it.

        The list is empty if no replica sent any work. The result is None if the mean is in other objects, or its bytes
        are damaged.
        """
        if not self.inputs:
            return []
        return None if self.shards or self.lost_mean is not None else [memoryview(self.mean)]

    @property
    def owners(self) -> list[int]:
        """The ranks that compute the mean: the replicas in phase, because they wait for it.

        If no replica is in phase, all replicas compute the mean.
        """
        return [rank for rank, replica in self.replicas.items() if replica.in_phase] or list(self.replicas)

    def data(self, key: str, proof: Proof) -> list[Buffer]:
        """Return the seal as buffers for the store.

        Args:
            key: the key of the seal. A signature covers the key.
            proof: signs the head or adds a checksum.
        """
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
            fields |= {"clipped": list(self.clipped)} if self.clipped else {}
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
        """Read a seal from bytes of the store.

        Args:
            data: the bytes.
            key: the key of the seal.
            proof: checks the signature or the checksum.
            size_bytes: the size of the mean of this entry. None: not known, so it is not checked.
            wire: the encoding of the means of the run. None: not known, so it is not checked.
            whole: True: raise an error if the head is intact but the mean is damaged. False: set `lost_mean` instead.

        Raises:
            BadRecordError: these bytes are not a seal of such an entry, or its mean is damaged.
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
            clipped = _some_of(fields.get("clipped", []), members.keys())
            digest, found = (None, FP32) if shards else (_digest(fields["mean"]), _wire_of(fields))
            if not members:
                raise ValueError("it names no replica")
        mean = memoryview(data)[end:]
        if digest is None:
            return cls(members, anchor, shards, phase_s=phase_s, same=same, stops=stops)
        if mean and wire is not None and found != wire:
            raise BadRecordError(f"The mean in this seal is encoded as {found}, not as {wire}.")
        if proof.digest(mean) != digest:
            if whole:
                raise BadRecordError("The mean in this seal is not what was sealed.")
            return cls(members, anchor, shards, b"", digest, phase_s, same, found, stops, clipped)
        seal = cls(members, anchor, shards, mean, None, phase_s, same, found, stops, clipped)
        expected_bytes = len(mean) if size_bytes is None else size_bytes if seal.inputs else 0
        if len(mean) != expected_bytes:
            raise BadRecordError(f"The mean in this seal has {len(mean)} bytes instead of {expected_bytes}.")
        return seal


@dataclass(frozen=True, slots=True)
class MeanHead:
    """The head of one shard of a mean. The encoded shard follows it.

    Example:
        head = MeanHead.parse(data, key, proof, wire="int8")
    """

    blocks: tuple[str, ...]
    """The digest of each block of the payload."""
    left_out: tuple[int, ...]
    """The ranks that the seal counts, but whose contribution to this shard could not be used."""
    wire: str = FP32
    """The encoding of the payload."""
    clipped: tuple[int, ...] = ()
    """The ranks whose contribution was scaled down in a block of this shard."""

    def head(self, key: str, proof: Proof) -> bytes:
        """Return the head as bytes for the store.

        Args:
            key: the key of the shard. A signature covers the key.
            proof: signs the head or adds a checksum.
        """
        fields: dict[str, Any] = {"blocks": "".join(self.blocks), "left_out": list(self.left_out)}
        fields |= {**_wire_field(self.wire), **({"clipped": list(self.clipped)} if self.clipped else {})}
        head = frame(fields, key, proof)
        return padded(head, head_bytes(len(self.blocks)))

    @classmethod
    def parse(cls, data: Buffer, key: str, proof: Proof, *, wire: str | None = None) -> MeanHead:
        """Read the head of a shard from bytes of the store.

        Args:
            data: the shard, or at least its head.
            key: the key of the shard.
            proof: checks the signature or the checksum.
            wire: the encoding of the means of the run. None: not known, so it is not checked.

        Raises:
            BadRecordError: these bytes are not such a shard.
        """
        fields, _, _ = unframe(data, key, proof)
        with reading("mean"):
            left_out = tuple(_whole(rank, MAX_RANK) for rank in typed(list, fields["left_out"]))
            clipped = tuple(_whole(rank, MAX_RANK) for rank in typed(list, fields.get("clipped", [])))
            head = cls(_split_digests(fields["blocks"]), left_out, _wire_of(fields), clipped)
        if wire is not None and head.wire != wire:
            raise BadRecordError(f"This mean is encoded as {head.wire}, not as {wire}.")
        return head


def head_bytes(n_blocks: int) -> int:
    """Return the size of the head of a contribution or a mean, which is the offset of its payload.

    Args:
        n_blocks: the number of blocks of the payload.
    """
    return aligned(1024 + 52 * n_blocks)  # each block has a digest of 32 characters and a norm of up to 14


def digests_of(payload: Buffer, block_bytes: int, proof: Proof) -> tuple[str, ...]:
    """Return the digest of each block of a payload.

    Args:
        payload: the whole payload.
        block_bytes: the size of each block but the last one.
        proof: the kind of digests.
    """
    view = memoryview(payload).cast("B")
    return tuple(proof.digest(view[at : at + block_bytes]) for at in range(0, len(view), block_bytes))


def hash_order(ranks: Iterable[int], *about: object) -> list[int]:
    """Return ranks in an order that is the same on every replica, and different for each subject.

    The order distributes work, such as sealing, over the replicas without any message.

    Args:
        ranks: the ranks.
        about: the subject, such as "seal" and the entry. The order is by a hash of the rank and the subject.

    Example:
        hash_order([0, 1, 2], "seal", 12)[0]
    """
    salt = "/".join(map(str, about))
    return sorted(ranks, key=lambda rank: (xxh3_64_intdigest(f"{salt}/{rank}".encode()), rank))


# -- parsers of fields, which another replica wrote -------------------------------------------------------------------


def _split_digests(text: Any) -> tuple[str, ...]:
    if not isinstance(text, str) or len(text) % 32:
        raise ValueError("block digests are not a multiple of 32 characters")
    return tuple(text[at : at + 32] for at in range(0, len(text), 32))


def _wire_field(wire: str) -> dict[str, str]:
    return {} if wire == FP32 else {"wire": wire}


def _wire_of(fields: Mapping[str, Any]) -> str:
    return matching(_WIRE, "wire", fields.get("wire", FP32))


def _groups(value: Any, ranks: Set[int]) -> tuple[tuple[int, ...], ...]:
    """Read disjoint groups of at least two of these ranks."""
    groups = tuple(tuple(_whole(rank, MAX_RANK) for rank in typed(list, group)) for group in typed(list, value))
    named = [rank for group in groups for rank in group]
    if len(set(named)) < len(named) or not ranks >= set(named) or any(len(group) < 2 for group in groups):
        raise ValueError(f"{str(value)[:40]!r} instead of groups of its ranks")
    return groups


def _some_of(value: Any, ranks: Set[int]) -> tuple[int, ...]:
    """Read a list of some of these ranks, each at most once."""
    named = tuple(_whole(rank, MAX_RANK) for rank in typed(list, value))
    if len(set(named)) < len(named) or not ranks >= set(named):
        raise ValueError(f"{str(value)[:40]!r} instead of some of its ranks")
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
    """Read a duration. A number that cannot be a duration becomes 0, which is safe: 0 means "not known"."""
    seconds = _number(value)
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0


def matching(pattern: re.Pattern[str], what: str, value: Any) -> str:
    """Return a text that matches a pattern as a whole.

    Args:
        pattern: the pattern.
        what: the name of the field, for the message.
        value: the field.

    Raises:
        ValueError: it is not a text, or does not match.
    """
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"{str(value)[:40]!r} instead of a {what}")
    return value


_WIRE = re.compile(r"[\w. ]{1,32}", re.ASCII)
_digest = partial(matching, re.compile(r"[0-9a-f]{32}"), "digest")
_nonce = partial(matching, re.compile(r".{1,64}", re.DOTALL), "nonce")
_rank = partial(matching, re.compile(r"[0-9]{1,7}"), "rank")
