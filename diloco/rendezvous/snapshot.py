"""The state before an entry, as objects: parts in safetensors form and a pointer that decides.

A snapshot's parts are put under their writer's own nonce, each is acknowledged, and then the pointer is created; the
stored pointer decides whose parts count, so half-written or competing parts do no harm. `snapshot/0`, the first anchor,
also carries the agreement. Nothing here knows torch: arrays in, arrays out.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from diloco.rendezvous.envelope import BadRecordError, Buffer, Proof, frame, reading, typed, unframe
from diloco.rendezvous.frames import READ_TRIES, Seal, hash_order, matching
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.retrying_store import RetryingStore
from diloco.rendezvous.round import Context
from diloco.rendezvous.training_state import Agreement, Array, Arrays
from executors.errors import StoreError

log = logging.getLogger(__name__)

PART_BYTES = 64 << 20
PUT_TRIES = 5
DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BOOL": np.bool_,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8,
}  # fmt: skip
_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
_NONCE = re.compile(r"\w[\w.-]{0,63}", re.ASCII)  # becomes a segment of keys
_OWN = re.compile(r"(\d+)/(\d{1,15})/(\d{1,15})/[^/]+$")
"""What a rank keeps for its next attempts; anything else below that prefix is not a replica's."""


@dataclass(frozen=True, slots=True)
class SnapshotPointer:
    """The content of `snapshot/<entry>`."""

    nonce: str
    rank: int
    parts: tuple[str, ...]
    """Digest of each part."""
    state: tuple[str, ...]
    """Digest of the anchor and outer state of each fragment."""
    agreement: Agreement
    first: int = 0
    """Of `snapshot/0`: the first entry of this log; those before it are another run's."""

    def data(self, key: str, proof: Proof) -> bytes:
        fields = {"nonce": self.nonce, "rank": self.rank, "parts": self.parts, "state": self.state}
        return frame({**fields, "contract": self.agreement, "first": self.first}, key, proof)

    @classmethod
    def parse(cls, data: Buffer, key: str, proof: Proof) -> SnapshotPointer:
        """Raises: BadRecordError: these bytes are not a pointer."""
        fields, _, _ = unframe(data, key, proof)
        with reading("snapshot pointer"):
            nonce, agreement = matching(_NONCE, "nonce", fields["nonce"]), typed(dict, fields["contract"])
            for shape, _, _ in agreement.get("tensors", {}).values():
                tuple(shape)
            if not all(isinstance(mark, float) for mark in typed(dict, agreement.get("frozen", {})).values()):
                raise TypeError("frozen")
            given = typed(dict, agreement.get("given", {}))  # shown in errors, beside what this replica was given
            if not all(isinstance(value, str | int | float | None) for value in given.values()):
                raise TypeError("given")
            parts, state = (tuple(typed(str, digest) for digest in typed(list, fields[k])) for k in ("parts", "state"))
            return cls(nonce, int(fields["rank"]), parts, state, agreement, max(0, typed(int, fields["first"])))


def put_parts(
    store: RetryingStore, keys: Keys, entry: int, nonce: str, arrays: Arrays, proof: Proof
) -> tuple[str, ...] | None:
    """Put the state as parts and return their digests; None when the store did not acknowledge one: begin again."""
    digests = []
    for index, part in enumerate(parts_of(arrays, PART_BYTES)):
        data = encode_part(part)
        if not store.write(keys.part(entry, nonce, index), data):
            return None
        digests.append(digest_of(data, proof))
    return tuple(digests)


def get_parts(
    store: RetryingStore, keys: Keys, entry: int, pointer: SnapshotPointer, proof: Proof
) -> dict[str, Array] | None:
    """Read a snapshot's arrays; None when a part is missing, rotten after re-reads, or was never a part."""
    arrays: dict[str, Array] = {}
    for index, digest in enumerate(pointer.parts):
        key = keys.part(entry, pointer.nonce, index)
        for _ in range(READ_TRIES):
            data = store.peek(key)
            if data is not None and proof.digest(data) == digest:
                break
            if data is not None:
                store.record_misread(key, data)
        else:
            return None
        try:
            arrays.update(decode_part(data))
        except BadRecordError:
            return None
    return arrays


# The library `safetensors` would copy everything twice, each way: attached states may be as large as the model several
# times over. Here arrays are written from their own memory, and read as views of the bytes.


def encode_part(arrays: Arrays) -> list[Buffer]:
    """Return a safetensors file as buffers: a header, and the arrays' own memory."""
    header: dict[str, Any] = {}
    buffers: list[Buffer] = []
    at = 0
    for name, array in arrays.items():
        offsets = [at, at + array.nbytes]
        header[name] = {"dtype": _NAMES[array.dtype], "shape": array.shape, "data_offsets": offsets}
        buffers.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        at += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)  # the format pads with spaces
    return [len(text).to_bytes(8, "little") + text, *buffers]


def decode_part(data: memoryview) -> dict[str, Array]:
    """Return the arrays of a safetensors file as views of its bytes.

    Raises: BadRecordError: these bytes are not such a file.
    """
    header_end = 8 + int.from_bytes(data[:8], "little")
    with reading("safetensors file"):
        header: dict[str, Any] = json.loads(bytes(data[8:header_end]))
        arrays = {}
        for name, about in header.items():
            if name == "__metadata__":
                continue
            start, dtype, shape = about["data_offsets"][0], DTYPES[about["dtype"]], about["shape"]
            if start < 0 or any(length < 0 for length in shape):
                raise ValueError(f"{name!r} has a negative length or offset")  # numpy would take all that follows
            values: Array = np.frombuffer(data, dtype, count=prod(shape), offset=header_end + start)
            arrays[name] = values.reshape(shape)
        return arrays


def digest_of(data: Sequence[Buffer], proof: Proof) -> str:
    digest = proof.hash()
    for buffer in data:
        digest.update(buffer)
    return digest.hexdigest()


def parts_of(arrays: Arrays, most_bytes: int) -> Iterator[dict[str, Array]]:
    """Yield arrays in parts of so many bytes, or of one array; at least one part."""
    part: dict[str, Array] = {}
    size = 0
    for name, array in arrays.items():
        if part and size + array.nbytes > most_bytes:
            yield part
            part, size = {}, 0
        part[name] = array
        size += array.nbytes
    yield part


@dataclass(frozen=True, slots=True)
class StateCopy:
    """The state before an entry, as this replica had it."""

    entry: int
    arrays: Arrays
    state: Sequence[str]


class SnapshotWriter:
    """Writes this replica's share of the snapshots."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._me = context.me
        self.copy: StateCopy | None = None
        """The state that waits for the seals that agree with it."""
        self._busy = False
        self._possible = True

    def before_step(self, entry: int, seal: Seal) -> None:
        """StateCopy the state if it is this replica's turn, and publish the copy once the seals agree with it."""
        is_multiple = entry > 0 and entry % self._context.snapshot_every == 0
        is_free = is_multiple and self._possible and not self._busy
        if is_free and hash_order(seal.replicas, "snapshot", entry)[0] == self._me.rank:
            self._take_copy(entry)
        copy = self.copy
        if copy is None:
            return
        last = copy.entry + len(copy.state) - 1
        if entry > last or not self._agrees(copy, entry, seal):
            self.copy = None
        elif entry == last:
            self.copy = None
            self._busy = True
            self._context.background(lambda: self._publish(copy))

    def _take_copy(self, entry: int) -> None:
        try:
            arrays, state = self._context.training.snapshot()
        except TypeError as error:
            self._possible = False
            log.warning("rank %s takes no snapshots: %s", self._me.rank, error)
        else:
            self.copy = StateCopy(entry, arrays, state)

    def _agrees(self, copy: StateCopy, entry: int, seal: Seal) -> bool:
        """Return whether the entry was made from the state that was copied, as far as its fragment goes."""
        return seal.anchor == copy.state[entry % len(copy.state)]

    def _publish(self, copy: StateCopy) -> None:
        context = self._context
        store, keys, proof = context.store.for_thread(), context.keys, context.proof
        try:
            for _ in range(PUT_TRIES):
                digests = put_parts(store, keys, copy.entry, self._me.nonce, copy.arrays, proof)
                if digests is not None:
                    pointer = SnapshotPointer(self._me.nonce, self._me.rank, digests, tuple(copy.state), {})
                    key = keys.snapshot(copy.entry)
                    store.create(key, pointer.data(key, proof))
                    collect_garbage(store, keys, copy.entry, context.snapshot_every, proof)
                    break
            else:
                raise store.last_error or StoreError("the store did not take it")
        except StoreError as error:
            log.warning("rank %s could not keep the snapshot after round %s: %s", self._me.rank, copy.entry, error)
        finally:
            self._busy = False


def collect_garbage(store: RetryingStore, keys: Keys, newest: int, snapshot_every: int, proof: Proof) -> None:
    """Delete what nobody needs any more: payloads of entries before the second newest snapshot.

    A replica that is still behind that finds them gone and jumps to a snapshot. Records that decide are never deleted.
    """
    if not _pointer(store, keys, newest, proof):
        return
    start = _pointer(store, keys, 0, proof)
    for horizon in (*range(newest - snapshot_every, start.first if start else 0, -snapshot_every), 0):
        if _pointer(store, keys, horizon, proof):
            break
    else:
        return
    numbered = re.compile(rf"{re.escape(keys.rounds())}(\d+)/|{re.escape(keys.parts())}(\d+)/")
    listed = store.list_keys(keys.rounds())  # what is kept beside the anchor is below the same prefix
    for key in [*listed, *store.list_keys(keys.parts())]:
        found = numbered.match(key)
        if found and int(found[1] or found[2]) < horizon:
            store.remove(key)
    rests = [
        int(key.rpartition("/")[2])
        for key in listed
        if re.fullmatch(rf"{re.escape(keys.all_unshared())}\d{{1,15}}", key)
    ]
    newest_before = max((entry for entry in rests if entry <= horizon), default=0)
    for entry in rests:
        if 0 < entry < newest_before:  # the first has the frozen parameters, which no later one repeats
            store.remove(keys.unshared(entry))
    _collect_own(store, keys, horizon)


def _pointer(store: RetryingStore, keys: Keys, entry: int, proof: Proof) -> SnapshotPointer | None:
    key = keys.snapshot(entry)
    data = store.peek(key)
    with suppress(BadRecordError):
        return None if data is None else SnapshotPointer.parse(data, key, proof)
    return None


def _collect_own(store: RetryingStore, keys: Keys, horizon: int) -> None:
    """Delete what ranks kept before the horizon, but for the newest of each: a rank may come back after long."""
    prefix = keys.own_state()
    kept: dict[str, dict[tuple[int, int], list[str]]] = {}
    for key in store.list_keys(prefix):
        if own := _OWN.match(key.removeprefix(prefix)):
            kept.setdefault(own[1], {}).setdefault((int(own[2]), int(own[3])), []).append(key)
    for records in kept.values():
        whole = [when for when, names in records.items() if any(name.endswith("/record") for name in names)]
        newest = max(whole, default=None)
        for when, names in records.items():
            if when[0] < horizon and newest is not None and when < newest:
                for name in names:
                    store.remove(name)
