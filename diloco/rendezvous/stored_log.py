"""Reads the log of a run from its store, for a process that does not take part in the run. It never writes.

A replica waits for missing objects and helps to create them. This reader does neither: it treats an entry whose mean is
incomplete as an entry that has not happened.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite, prod
from typing import Any, Self

from diloco.rendezvous.early_end import apply_recorded_end
from diloco.rendezvous.envelope import (
    BadRecordError,
    Buffer,
    Proof,
    aligned,
    frame,
    padded,
    reading,
    typed,
    unframe,
    unproven_fields,
)
from diloco.rendezvous.frames import READ_TRIES, Contribution, MeanHead, Seal, head_bytes
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.phase import RoundPlan
from diloco.rendezvous.reduction import BadInputError, BlockFormat, ShardInput, is_mean, weighted_mean
from diloco.rendezvous.retrying_store import RetryingStore
from diloco.rendezvous.round import Layout, Limits
from diloco.rendezvous.snapshot import SnapshotPointer, decode_part, digest_of, encode_part, get_parts
from diloco.rendezvous.training_state import Agreement, Array, Arrays
from diloco.wires import wire_named
from executors.errors import CorruptObjectError

MOST_TENSORS = 100_000
MOST_STEPS = 10**15
KINDS = ("frozen", "buffer", "tied", "other")
"""The kinds of entries of a model's `state_dict` that are not in the anchor: see `UnsharedEntry`."""


@dataclass(frozen=True, slots=True)
class UnsharedEntry:
    """One entry of a model's `state_dict` that is not in the anchor.

    Example:
        UnsharedEntry("frozen", "float32", (1000, 64)).line()
    """

    kind: str
    """`frozen`: a parameter that is not trained. `buffer`: each replica has its own. `tied`: another name of a tensor
    of the anchor. `other`: not a tensor."""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    same_as: str = ""
    """The name of the tensor in the anchor, if the entry is another name of it."""

    def line(self) -> list[Any]:
        """Return the entry as the JSON list that the agreement contains."""
        return [self.kind, self.dtype, list(self.shape), self.same_as]

    @classmethod
    def parse(cls, line: Any) -> Self:
        """Read an entry from an agreement, which another replica wrote.

        Args:
            line: the JSON list.

        Raises:
            ValueError: a field is out of range.
            TypeError: a field has another type.
        """
        kind, dtype, shape, same_as = typed(list, line)
        if kind not in KINDS:
            raise ValueError(f"{str(kind)[:40]!r} instead of one of {KINDS}")
        return cls(kind, typed(str, dtype)[:40], _shape(shape), typed(str, same_as))


@dataclass(frozen=True, kw_only=True)
class StoredAgreement:
    """The fields of the replicas' agreement that a reader of the log needs, with checked types.

    Example:
        StoredAgreement.parse(pointer.agreement).plan()
    """

    tensors: dict[str, tuple[tuple[int, ...], str, int]]
    """The shape, the dtype in the live model, and the fragment of each tensor, by its name."""
    n_fragments: int
    stepped: tuple[int, ...]
    """The number of elements of each fragment that the outer optimizer steps.

    The other elements are averaged buffers.
    """
    wire: str
    """The encoding of contributions."""
    mean_wire: str
    """The encoding of means."""
    outer_lr: float
    outer_momentum: float
    warmup: int
    final_average: bool
    inner_steps: int | None
    """None: the run has rounds by the clock."""
    total_steps: int | None
    """The total with which the run began: steps, or rounds of a fragment if rounds go by the clock.

    None: the run had no total.
    """
    outer_optimizer: str | None
    """The name of the user's own outer optimizer. None: the run has the built-in one."""
    clips: bool = False
    """True if means scale down contributions that are much larger than the others."""
    unshared: dict[str, UnsharedEntry] = field(default_factory=dict)

    @classmethod
    def parse(cls, agreement: Agreement) -> Self:
        """Read an agreement, which another replica wrote.

        Args:
            agreement: the JSON object.

        Raises:
            BadRecordError: the object is not an agreement, or a value is out of its range.
        """
        with reading("agreement of a run"):
            found = {name: typed(list, about) for name, about in typed(dict, agreement["tensors"]).items()}
            n_fragments = _whole(agreement["fragments"], 1, MOST_TENSORS)
            tensors = {
                name: (_shape(shape), typed(str, dtype)[:40], _whole(fragment, 0, n_fragments - 1))
                for name, (shape, dtype, fragment) in found.items()
            }
            stepped = tuple(_whole(n, 0, MOST_STEPS) for n in typed(list, agreement["stepped"]))
            if len(stepped) != n_fragments or not tensors or len(tensors) > MOST_TENSORS:
                raise ValueError(f"{len(tensors)} tensors, and {len(stepped)} of {n_fragments} fragments")
            is_given = "outer_optimizer" in agreement
            by_clock = "round_seconds" in agreement
            given = typed(dict, agreement["given"])
            total = agreement.get("total_rounds") if by_clock else given.get("total_steps")
            inner_steps = None if by_clock else _whole(agreement["inner_steps"], 1, MOST_STEPS)
            unshared = {
                name: UnsharedEntry.parse(line) for name, line in typed(dict, agreement.get("unshared", {})).items()
            }
            agreed = cls(
                tensors=tensors,
                n_fragments=n_fragments,
                stepped=stepped,
                wire=wire_named(typed(str, agreement["wire"])).name,
                mean_wire=wire_named(typed(str, agreement["mean_wire"])).name,
                outer_lr=0.0 if is_given else _number(agreement["outer_lr"]),
                outer_momentum=0.0 if is_given else _number(agreement["outer_momentum"]),
                warmup=_whole(agreement["momentum_warmup"], 0, MOST_STEPS),
                final_average=typed(bool, agreement["final_average"]),
                inner_steps=inner_steps,
                total_steps=None if total is None else _whole(total, 1, MOST_STEPS),
                outer_optimizer=str(agreement["outer_optimizer"])[:200] if is_given else None,
                clips=agreement.get("robust") == "clip",
                unshared=unshared,
            )
            if any(n > size for n, size in zip(stepped, agreed.sizes, strict=True)) or 0 in agreed.sizes:
                raise ValueError("a fragment has no elements, or has fewer elements than the outer optimizer steps")
        return agreed

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of elements of each fragment."""
        sizes = [0] * self.n_fragments
        for shape, _, fragment in self.tensors.values():
            sizes[fragment] += prod(shape)
        return tuple(sizes)

    def plan(self, extensions: Mapping[str, Sequence[int]] | None = None) -> RoundPlan:
        """Return the plan that divides the run into entries.

        Args:
            extensions: the totals to which the run was extended, as lists under `total_steps` and `total_rounds`.
                None: it was not extended.
        """
        n, by_clock = self.n_fragments, self.inner_steps is None
        unit = n if by_clock else 1
        steps_per_entry = 1 if self.inner_steps is None else self.inner_steps // n
        plan = RoundPlan(max(1, steps_per_entry), n, 0, None if self.total_steps is None else unit * self.total_steps)
        for total in (extensions or {}).get("total_rounds" if by_clock else "total_steps", ()):
            plan.extend(unit * total)
        return plan


class StoredRoundLog:
    """Reads the log of one DiLoCo of a run.

    Args:
        store: the store of the run.
        keys: the keys of the DiLoCo.
        proof: checks the records.
        limits: the sizes of blocks and small entries that the run was made with. None: the default ones.

    Example:
        log = StoredRoundLog(store, Keys("first-try", "main"), UNSIGNED)
        log.agreed.plan().last_entry
    """

    def __init__(self, store: RetryingStore, keys: Keys, proof: Proof, limits: Limits | None = None) -> None:
        self._store = store
        self._keys = keys
        self._proof = proof
        self._limits = limits or Limits()

    def plan(self, extensions: Mapping[str, Sequence[int]] | None = None) -> RoundPlan:
        """Return the plan that divides the run into entries. If a replica has stopped the run, the plan ends there.

        Args:
            extensions: the totals to which the run was extended, as `StoredAgreement.plan` takes them.

        Raises:
            CorruptObjectError: the agreement cannot be read.
        """
        plan = self.agreed.plan(extensions)
        apply_recorded_end(plan, self._store, self._keys, self._proof)
        return plan

    @cached_property
    def start(self) -> SnapshotPointer | None:
        """The pointer of the first snapshot, which has the agreement. None: no replica has begun under this name.

        Raises:
            CorruptObjectError: the pointer is damaged, or was signed with another key.
        """
        key = self._keys.snapshot(0)
        data: memoryview | None = None
        for _ in range(READ_TRIES):
            if (data := self._store.peek(key)) is None:
                return None
            with suppress(BadRecordError):
                return SnapshotPointer.parse(data, key, self._proof)
        assert data is not None
        signed: Any = None
        with suppress(BadRecordError), reading("agreement"):
            signed = typed(dict, unproven_fields(data)["contract"]).get("signed")
        reason = "it is damaged"
        if signed is not None:
            reason = f"it was signed with the key {str(signed)[:8]!r}, and this process does not have that key"
        raise CorruptObjectError(f"{key!r} in {self._store.store.url} cannot be used: {reason}.", key=key)

    @cached_property
    def agreed(self) -> StoredAgreement:
        """The replicas' agreement.

        Raises:
            CorruptObjectError: the agreement cannot be read.
        """
        assert self.start is not None
        try:
            return StoredAgreement.parse(self.start.agreement)
        except BadRecordError as error:
            key = self._keys.snapshot(0)
            raise CorruptObjectError(f"{key!r} in {self._store.store.url}: {error}", key=key) from error

    @property
    def first(self) -> int:
        """The first entry of this log."""
        return 0 if self.start is None else self.start.first

    def snapshots(self) -> list[int]:
        """Return the entries of all snapshots that a listing of the store contains, the newest first."""
        return sorted({self.first, *self._entries_below(self._keys.snapshots()) - {0}}, reverse=True)

    def load(self, entry: int) -> tuple[SnapshotPointer, dict[str, Array]] | None:
        """Return a snapshot: its pointer and its arrays. None: a part of it was deleted or is damaged.

        Args:
            entry: the entry of the snapshot.
        """
        pointer = self.start if entry == self.first else self._pointer(entry)
        if pointer is None:
            return None
        number = 0 if entry == self.first else entry
        arrays = get_parts(self._store, self._keys, number, pointer, self._proof)
        return None if arrays is None else (pointer, arrays)

    def has_parts(self, entry: int) -> bool:
        """Return True if the first part of a snapshot still exists.

        Args:
            entry: the entry of the snapshot.
        """
        pointer = self.start if entry == self.first else self._pointer(entry)
        number = 0 if entry == self.first else entry
        if pointer is None or not pointer.parts:
            return False
        return self._store.peek(self._keys.part(number, pointer.nonce, 0), size=0) is not None

    def is_sealed(self, entry: int) -> bool:
        """Return True if an entry has a seal."""
        return self._store.peek(self._keys.seal(entry), size=0) is not None

    def round(self, entry: int) -> tuple[Seal, list[memoryview]] | None:
        """Return the seal of an entry, and its mean as consecutive ranges. None: the mean is incomplete or was deleted.

        Args:
            entry: the entry.
        """
        layout = self._layouts[entry % len(self._layouts)]
        key = self._keys.seal(entry)
        for _ in range(READ_TRIES):
            if (data := self._store.peek(key)) is None:
                return None
            with suppress(BadRecordError):
                wire, size_bytes = layout.mean_wire.name, layout.mean_bytes
                found = Seal.parse(data, key, self._proof, size_bytes=size_bytes, wire=wire)
                if not found.inputs:
                    return found, []
                if not layout.stores_mean:
                    mean = self._computed(entry, layout, found)
                    return None if mean is None else (found, [mean])
                if found.shards:
                    shards = [self._shard(entry, layout, shard, found.shards) for shard in range(found.shards)]
                    whole = [shard for shard in shards if shard is not None]
                    return (found, whole) if len(whole) == found.shards else None
                if is_mean(memoryview(found.mean), self._blocks(layout, layout.n_elements), None):
                    return found, [memoryview(found.mean)]
            self._store.record_misread(key, data)
        return None

    def _computed(self, entry: int, layout: Layout, seal: Seal) -> memoryview | None:
        """Return a mean that is not stored, computed from the contributions. None: one is missing or damaged."""
        key = self._keys.mean(entry, 0)
        data = self._store.peek(key)
        if data is None:
            return None
        inputs: list[ShardInput] = []
        try:
            head = MeanHead.parse(data, key, self._proof, wire=layout.mean_wire.name)
            for rank, member in seal.inputs.items():
                if rank in head.left_out:
                    continue
                of_rank = self._keys.contribution(entry, rank)
                if (sent := self._store.peek(of_rank)) is None:
                    return None
                contribution, digest = Contribution.parse(sent, of_rank, self._proof)
                payload = sent[layout.head_bytes :]
                fits = digest == member.digest and len(contribution.blocks) == layout.n_blocks
                if not fits or len(payload) != layout.size_bytes:
                    return None
                inputs.append(ShardInput(rank, member.weight, payload, contribution.blocks))
            out = memoryview(bytearray(layout.mean_bytes))
            digests = weighted_mean(inputs, out, self._blocks(layout, layout.n_elements))
        except (BadRecordError, BadInputError):
            return None
        return out if digests == head.blocks else None

    def unshared_rounds(self) -> list[int]:
        """Return the rounds after which a replica stored its unshared tensors, the newest first."""
        return sorted(self._entries_below(self._keys.all_unshared()), reverse=True)

    def read_unshared(self, entry: int) -> UnsharedTensors | None:
        """Return the unshared tensors that a replica stored after a number of rounds. None: they were deleted or are
        damaged.

        Args:
            entry: the number of rounds.
        """
        key = self._keys.unshared(entry)
        for _ in range(READ_TRIES):
            if (data := self._store.peek(key)) is None:
                return None
            with suppress(BadRecordError):
                return UnsharedTensors.parse(data, key, self._proof)
            self._store.record_misread(key, data)
        return None

    def _entries_below(self, prefix: str) -> set[int]:
        """Return the entry numbers of all keys with a prefix."""
        names = (key.removeprefix(prefix) for key in self._store.list_keys(prefix))
        return {int(name) for name in names if re.fullmatch(r"\d{1,15}", name, re.ASCII)}

    def _pointer(self, entry: int) -> SnapshotPointer | None:
        """Return the pointer of a snapshot. None: there is none, or it is damaged."""
        key = self._keys.snapshot(entry)
        for _ in range(READ_TRIES):
            if (data := self._store.peek(key)) is None:
                return None
            with suppress(BadRecordError):
                return SnapshotPointer.parse(data, key, self._proof)
            self._store.record_misread(key, data)
        return None

    @cached_property
    def _layouts(self) -> tuple[Layout, ...]:
        agreed = self.agreed
        wires = wire_named(agreed.wire), wire_named(agreed.mean_wire)
        return tuple(Layout(size, self._limits, *wires, agreed.clips) for size in agreed.sizes)

    def _blocks(self, layout: Layout, n_elements: int) -> BlockFormat:
        """Return the format of a range of whole blocks."""
        return layout.blocks(n_elements, self._proof)

    def _shard(self, entry: int, layout: Layout, shard: int, n_shards: int) -> memoryview | None:
        """Return the payload of one shard of a mean. None: it does not exist, or is damaged."""
        part, key = layout.shard(shard, n_shards), self._keys.mean(entry, shard)
        for _ in range(READ_TRIES):
            if (data := self._store.peek(key)) is None:
                return None
            with suppress(BadRecordError):
                head = MeanHead.parse(data, key, self._proof, wire=layout.mean_wire.name)
                payload = data[head_bytes(part.end_block - part.first_block) :]
                if is_mean(payload, self._blocks(layout, part.n_elements), head.blocks):
                    return payload
            self._store.record_misread(key, data)
        return None


@dataclass(frozen=True, slots=True)
class UnsharedTensors:
    """The tensors of one replica's model that are not in the anchor: the content of `rest/<entry>`.

    Example:
        UnsharedTensors(rank=0, arrays=arrays, dtypes={}).data(key, proof)
    """

    rank: int
    """The rank of the replica."""
    arrays: Arrays
    dtypes: dict[str, str]
    """The torch dtype, by name, of each array whose dtype numpy does not have. The array holds the same bits."""

    def data(self, key: str, proof: Proof) -> list[Buffer]:
        """Return the object as buffers for the store: a frame, and a safetensors file after it.

        Args:
            key: the key of the object. A signature covers the key.
            proof: signs the head or adds a checksum.
        """
        part = encode_part(self.arrays)
        fields = {"rank": self.rank, "dtypes": self.dtypes, "digest": digest_of(part, proof)}
        head = frame(fields, key, proof)
        return [padded(head, aligned(len(head))), *part]

    @classmethod
    def parse(cls, data: memoryview, key: str, proof: Proof) -> Self:
        """Read the object from bytes of the store.

        Args:
            data: the bytes.
            key: the key of the object.
            proof: checks the signature or the checksum.

        Raises:
            BadRecordError: these bytes are not such an object.
        """
        fields, _, end = unframe(data, key, proof)
        with reading("record of unshared tensors"):
            dtypes = {name: typed(str, dtype)[:40] for name, dtype in typed(dict, fields["dtypes"]).items()}
            if proof.digest(data[end:]) != fields["digest"]:
                raise ValueError("the tensors do not match their digest")
            return cls(_whole(fields["rank"], 0, 10**6), decode_part(data[end:]), dtypes)


def _whole(value: Any, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{str(value)[:40]!r} instead of a number from {least} to {most}")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
        raise ValueError(f"{str(value)[:40]!r} instead of a number")
    return float(value)


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(_whole(length, 0, MOST_STEPS) for length in typed(list, value))
