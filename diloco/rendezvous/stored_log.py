"""The log of a run, read from its store by a process that takes no part in the run. Nothing here writes.

A replica waits for what is missing, and helps to make it. A reader from outside does neither: an entry whose mean is
not complete has not happened for it.
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
from diloco.rendezvous.frames import READ_TRIES, MeanHead, Seal, head_bytes
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.phase import RoundPlan
from diloco.rendezvous.reduction import Blocks, is_mean
from diloco.rendezvous.retrying_store import RetryingStore
from diloco.rendezvous.round import Layout, Limits
from diloco.rendezvous.snapshot import SnapshotPointer, decode_part, digest_of, encode_part, get_parts
from diloco.rendezvous.training_state import Agreement, Array, Arrays
from diloco.wires import wire_named
from executors.errors import CorruptObjectError

MOST_TENSORS = 100_000
MOST_STEPS = 10**15
KINDS = ("frozen", "buffer", "tied", "other")
"""The kinds of entries that a model's `state_dict` has beside the anchor; see `UnsharedEntry`."""


@dataclass(frozen=True, slots=True)
class UnsharedEntry:
    """One entry of a model's `state_dict` that is not in the anchor."""

    kind: str
    """`frozen`: a parameter that is not trained. `buffer`: each replica has its own. `tied`: another name of a tensor
    of the anchor. `other`: not a tensor."""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    same_as: str = ""
    """The name of the same tensor in the anchor, if the entry is tied."""

    def line(self) -> list[Any]:
        """Return the entry as the agreement keeps it."""
        return [self.kind, self.dtype, list(self.shape), self.same_as]

    @classmethod
    def parse(cls, line: Any) -> Self:
        """Read an entry, which another replica wrote.

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
    """The part of the replicas' agreement that a reader of the log needs."""

    tensors: dict[str, tuple[tuple[int, ...], str, int]]
    """By name: the shape, the live model's dtype, and the fragment."""
    n_fragments: int
    stepped: tuple[int, ...]
    """By fragment, how many elements the outer optimizer steps. The others are buffers, which are averaged."""
    wire: str
    mean_wire: str
    outer_lr: float
    outer_momentum: float
    warmup: int
    final_average: bool
    inner_steps: int | None
    """None: rounds by the clock."""
    total_steps: int | None
    """As the run began, in the unit of its plan: steps, or by the clock rounds of a fragment. None: it had no total."""
    outer_optimizer: str | None
    """The name of an outer optimizer of the user's. None: the built-in one."""
    unshared: dict[str, UnsharedEntry] = field(default_factory=dict)

    @classmethod
    def parse(cls, agreement: Agreement) -> Self:
        """Read an agreement, which another replica wrote.

        Raises:
            BadRecordError: it is not one, or a value is out of its range.
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
                unshared=unshared,
            )
            if any(n > size for n, size in zip(stepped, agreed.sizes, strict=True)) or 0 in agreed.sizes:
                raise ValueError("a fragment without elements, or with fewer than are stepped")
        return agreed

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of elements of each fragment."""
        sizes = [0] * self.n_fragments
        for shape, _, fragment in self.tensors.values():
            sizes[fragment] += prod(shape)
        return tuple(sizes)

    def plan(self, extensions: Mapping[str, Sequence[int]] | None = None) -> RoundPlan:
        """Return how the run is divided into entries.

        Args:
            extensions: the totals that the run was extended to since: `total_steps`, or by the clock `total_rounds`.
        """
        n, by_clock = self.n_fragments, self.inner_steps is None
        unit = n if by_clock else 1
        steps_per_entry = 1 if self.inner_steps is None else self.inner_steps // n
        plan = RoundPlan(max(1, steps_per_entry), n, 0, None if self.total_steps is None else unit * self.total_steps)
        for total in (extensions or {}).get("total_rounds" if by_clock else "total_steps", ()):
            plan.extend(unit * total)
        return plan


class StoredLog:
    """The log of the DiLoCo of one name of one run.

    Args:
        store: the store of the run.
        keys: the run's and the DiLoCo's name.
        proof: what proves its records.
        limits: how payloads are cut; as the run was made with.
    """

    def __init__(self, store: RetryingStore, keys: Keys, proof: Proof, limits: Limits | None = None) -> None:
        self._store = store
        self._keys = keys
        self._proof = proof
        self._limits = limits or Limits()

    def plan(self, extensions: Mapping[str, Sequence[int]] | None = None) -> RoundPlan:
        """Return how the run is divided into entries, up to the end that a replica has set, if one has.

        Args:
            extensions: the totals that the run was extended to, as `StoredAgreement.plan` takes them.

        Raises:
            CorruptObjectError: the agreement cannot be read.
        """
        plan = self.agreed.plan(extensions)
        apply_recorded_end(plan, self._store, self._keys, self._proof)
        return plan

    @cached_property
    def start(self) -> SnapshotPointer | None:
        """The pointer of the first state, which has the agreement. None: no replica has begun under this name.

        Raises:
            CorruptObjectError: there is one, and it is not what was written, or it was made with another key.
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
        why = "it is not what was written"
        if signed is not None:
            why = f"the key that is known here does not prove it; it was signed with the key {str(signed)[:8]!r}"
        raise CorruptObjectError(f"{key!r} in {self._store.store.url} cannot be used: {why}.", key=key)

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
        """Return the entries before which a whole state is kept, according to a list; the newest first."""
        return sorted({self.first, *self._entries_below(self._keys.snapshots()) - {0}}, reverse=True)

    def load(self, entry: int) -> tuple[SnapshotPointer, dict[str, Array]] | None:
        """Read the state before an entry. None: some of it was deleted, or is not what was written."""
        pointer = self.start if entry == self.first else self._pointer(entry)
        if pointer is None:
            return None
        number = 0 if entry == self.first else entry
        arrays = get_parts(self._store, self._keys, number, pointer, self._proof)
        return None if arrays is None else (pointer, arrays)

    def has_parts(self, entry: int) -> bool:
        """Return whether the first part of a state is still there."""
        pointer = self.start if entry == self.first else self._pointer(entry)
        number = 0 if entry == self.first else entry
        if pointer is None or not pointer.parts:
            return False
        return self._store.peek(self._keys.part(number, pointer.nonce, 0), size=0) is not None

    def is_sealed(self, entry: int) -> bool:
        """Return whether an entry was decided."""
        return self._store.peek(self._keys.seal(entry), size=0) is not None

    def round(self, entry: int) -> tuple[Seal, list[memoryview]] | None:
        """Read the seal of an entry and its mean, in consecutive ranges. None: it has not happened yet, or is gone."""
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
                if found.shards:
                    shards = [self._shard(entry, layout, shard, found.shards) for shard in range(found.shards)]
                    whole = [shard for shard in shards if shard is not None]
                    return (found, whole) if len(whole) == found.shards else None
                if is_mean(memoryview(found.mean), self._blocks(layout, layout.n_elements), None):
                    return found, [memoryview(found.mean)]
            self._store.record_misread(key, data)
        return None

    def unshared_rounds(self) -> list[int]:
        """Return the rounds after which a replica kept what its model has beside the anchor; the newest first."""
        return sorted(self._entries_below(self._keys.all_unshared()), reverse=True)

    def read_unshared(self, entry: int) -> UnsharedTensors | None:
        """Read what a replica kept of its model beside the anchor. None: it is gone, or is not what was written."""
        key = self._keys.unshared(entry)
        for _ in range(READ_TRIES):
            if (data := self._store.peek(key)) is None:
                return None
            with suppress(BadRecordError):
                return UnsharedTensors.parse(data, key, self._proof)
            self._store.record_misread(key, data)
        return None

    def _entries_below(self, prefix: str) -> set[int]:
        names = (key.removeprefix(prefix) for key in self._store.list_keys(prefix))
        return {int(name) for name in names if re.fullmatch(r"\d{1,15}", name, re.ASCII)}

    def _pointer(self, entry: int) -> SnapshotPointer | None:
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
        return tuple(Layout(size, self._limits, *wires) for size in agreed.sizes)

    def _blocks(self, layout: Layout, n_elements: int) -> Blocks:
        return layout.blocks(n_elements, self._proof)

    def _shard(self, entry: int, layout: Layout, shard: int, n_shards: int) -> memoryview | None:
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
    """The tensors of a replica's model beside the anchor, as stored in `rest/<entry>`."""

    rank: int
    arrays: Arrays
    dtypes: dict[str, str]
    """By name, the dtype in torch of each array whose dtype numpy lacks; its bits are in the array."""

    def data(self, key: str, proof: Proof) -> list[Buffer]:
        """Return the object: a frame, and a safetensors file behind it."""
        part = encode_part(self.arrays)
        fields = {"rank": self.rank, "dtypes": self.dtypes, "digest": digest_of(part, proof)}
        head = frame(fields, key, proof)
        return [padded(head, aligned(len(head))), *part]

    @classmethod
    def parse(cls, data: memoryview, key: str, proof: Proof) -> Self:
        """Read the object from bytes of a store.

        Raises:
            BadRecordError: these bytes are not such an object.
        """
        fields, _, end = unframe(data, key, proof)
        with reading("rest of a model"):
            dtypes = {name: typed(str, dtype)[:40] for name, dtype in typed(dict, fields["dtypes"]).items()}
            if proof.digest(data[end:]) != fields["digest"]:
                raise ValueError("tensors of other bytes")
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
