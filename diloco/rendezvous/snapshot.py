"""Writes, reads and deletes snapshots: the state before an entry, as parts in safetensors form and a pointer to them.

A writer stores the parts under its own nonce, waits until the store has acknowledged each of them, and then creates the
pointer. The pointer decides which writer's parts count, so incomplete or competing parts do no harm. The first pointer,
`snapshot/0`, also has the agreement. This file works with numpy arrays and does not import torch.
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
from diloco.rendezvous.retrying_store import RetryingStore, read_ahead
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
_NONCE = re.compile(r"\w[\w.-]{0,63}", re.ASCII)  # the nonce becomes a segment of keys
_OWN = re.compile(r"(\d+(?:\.\d{1,5})?)/(\d{1,15})/(\d{1,15})/[^/]+$")
"""The keys of the states that ranks keep for their next attempts. A replica writes no other key below that prefix."""


@dataclass(frozen=True, slots=True)
class SnapshotPointer:
    """The content of `snapshot/<entry>`: the writer of the snapshot, and the digests of its parts.

    Example:
        pointer = SnapshotPointer.parse(data, key, proof)
    """

    nonce: str
    """The nonce of the writer, which is part of the keys of the parts."""
    rank: int
    """The rank of the writer."""
    parts: tuple[str, ...]
    """The digest of each part."""
    state: tuple[str, ...]
    """The digest of the anchor and outer state of each fragment."""
    agreement: Agreement
    """The agreement of the run in `snapshot/0`. Empty in all other pointers."""
    first: int = 0
    """The first entry of this log, in `snapshot/0`. The entries before it belong to another run."""

    def data(self, key: str, proof: Proof) -> bytes:
        """Return the pointer as bytes for the store.

        Args:
            key: the key of the pointer. A signature covers the key.
            proof: signs the pointer or adds a checksum.
        """
        fields = {"nonce": self.nonce, "rank": self.rank, "parts": self.parts, "state": self.state}
        return frame({**fields, "contract": self.agreement, "first": self.first}, key, proof)

    @classmethod
    def parse(cls, data: Buffer, key: str, proof: Proof) -> SnapshotPointer:
        """Read a pointer from bytes of the store.

        Args:
            data: the bytes.
            key: the key of the pointer.
            proof: checks the signature or the checksum.

        Raises:
            BadRecordError: these bytes are not a pointer.
        """
        fields, _, _ = unframe(data, key, proof)
        with reading("snapshot pointer"):
            nonce, agreement = matching(_NONCE, "nonce", fields["nonce"]), typed(dict, fields["contract"])
            for shape, _, _ in agreement.get("tensors", {}).values():
                tuple(shape)
            if not all(isinstance(mark, float) for mark in typed(dict, agreement.get("frozen", {})).values()):
                raise TypeError("frozen")
            # error messages show the agreement together with the arguments of this replica
            given = typed(dict, agreement.get("given", {}))
            if not all(isinstance(value, str | int | float | None) for value in given.values()):
                raise TypeError("given")
            parts, state = (tuple(typed(str, digest) for digest in typed(list, fields[k])) for k in ("parts", "state"))
            return cls(nonce, int(fields["rank"]), parts, state, agreement, max(0, typed(int, fields["first"])))


def put_parts(
    store: RetryingStore, keys: Keys, entry: int, nonce: str, arrays: Arrays, proof: Proof
) -> tuple[str, ...] | None:
    """Store a state as parts, and return their digests. None: the store did not acknowledge a part.

    Args:
        store: the store of the run.
        keys: the keys of the rendezvous.
        entry: the entry of the snapshot.
        nonce: the nonce of this process.
        arrays: the state.
        proof: the kind of digests.
    """
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
    """Return the arrays of a snapshot. None: a part is missing, damaged, or not a safetensors file.

    Args:
        store: the store of the run.
        keys: the keys of the rendezvous.
        entry: the entry of the snapshot.
        pointer: the pointer of the snapshot.
        proof: the kind of digests.
    """
    named = [(keys.part(entry, pointer.nonce, index), digest) for index, digest in enumerate(pointer.parts)]
    arrays: dict[str, Array] = {}
    for data in read_ahead(store, lambda part: proven_part(store, *part, proof), named):
        if data is None:
            return None
        try:
            arrays.update(decode_part(data))
        except BadRecordError:
            return None
    return arrays


def proven_part(
    store: RetryingStore, key: str, digest: str, proof: Proof, tries: int = READ_TRIES
) -> memoryview | None:
    """Return a part of a state. None: it is missing, or it has other bytes than were written.

    Args:
        store: the store of the run.
        key: the key of the part.
        digest: the digest of the part.
        proof: the kind of digest.
        tries: the number of wrong readings after which the part counts as damaged.
    """
    for _ in range(tries):
        data = store.peek(key)
        if data is not None and proof.digest(data) == digest:
            return data
        if data is not None:
            store.record_misread(key, data)
    return None


# The library `safetensors` would copy all data twice in each direction, and attached states may be several times as
# large as the model. The two functions below write arrays from their own memory, and read them as views of the bytes.


def encode_part(arrays: Arrays) -> list[Buffer]:
    """Return a safetensors file as buffers: a header, and the memory of the arrays themselves.

    Args:
        arrays: the arrays by name.
    """
    header: dict[str, Any] = {}
    buffers: list[Buffer] = []
    at = 0
    for name, array in arrays.items():
        offsets = [at, at + array.nbytes]
        header[name] = {"dtype": _NAMES[array.dtype], "shape": array.shape, "data_offsets": offsets}
        buffers.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        at += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)  # the format pads the header with spaces
    return [len(text).to_bytes(8, "little") + text, *buffers]


def decode_part(data: memoryview) -> dict[str, Array]:
    """Return the arrays of a safetensors file as views of its bytes.

    Args:
        data: the file.

    Raises:
        BadRecordError: these bytes are not such a file.
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
                # with a negative length, numpy would read to the end of the data
                raise ValueError(f"{name!r} has a negative length or offset")
            values: Array = np.frombuffer(data, dtype, count=prod(shape), offset=header_end + start)
            arrays[name] = values.reshape(shape)
        return arrays


def digest_of(data: Sequence[Buffer], proof: Proof) -> str:
    """Return the digest of an object that is given as several buffers."""
    digest = proof.hash()
    for buffer in data:
        digest.update(buffer)
    return digest.hexdigest()


def parts_of(arrays: Arrays, most_bytes: int) -> Iterator[dict[str, Array]]:
    """Yield the arrays in parts, at least one part.

    Args:
        arrays: the arrays by name.
        most_bytes: the size limit of a part. A larger array is a part of its own.
    """
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
    """A copy of the state of this replica before an entry, which may become a snapshot."""

    entry: int
    arrays: Arrays
    state: Sequence[str]
    """The digest of each fragment's state."""


class SnapshotWriter:
    """Writes a snapshot when it is the turn of this replica.

    Args:
        context: the services of the rendezvous.

    Example:
        SnapshotWriter(context).before_step(entry, seal)
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._me = context.me
        self.copy: StateCopy | None = None
        """The copy that waits for seals that confirm it. None: there is none."""
        self._busy = False
        """True while a snapshot is being uploaded."""
        self._possible = True
        """False if the state of the outer optimizer cannot be stored."""

    def before_step(self, entry: int, seal: Seal) -> None:
        """Copy the state if it is the turn of this replica. Upload an earlier copy once the seals confirm it.

        Call it before the outer step of each entry. A copy is confirmed if the next seal of each fragment names its
        digest as the anchor. So a replica with a wrong state never stores a snapshot.

        Args:
            entry: the entry that is about to be applied.
            seal: its seal.
        """
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
        """Copy the state before an entry."""
        try:
            arrays, state = self._context.training.snapshot()
        except TypeError as error:
            self._possible = False
            log.warning("Rank %s writes no snapshots: %s", self._me.rank, error)
        else:
            self.copy = StateCopy(entry, arrays, state)

    def _agrees(self, copy: StateCopy, entry: int, seal: Seal) -> bool:
        """Return True if the seal of an entry names the copied state of its fragment."""
        return seal.anchor == copy.state[entry % len(copy.state)]

    def _publish(self, copy: StateCopy) -> None:
        """Store a snapshot, and delete objects that are no longer needed. It runs in the thread for uploads."""
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
                raise store.last_error or StoreError("the store did not accept it")
        except StoreError as error:
            log.warning("Rank %s could not store the snapshot after round %s: %s", self._me.rank, copy.entry, error)
        finally:
            self._busy = False


def collect_garbage(store: RetryingStore, keys: Keys, newest: int, snapshot_every: int, proof: Proof) -> None:
    """Delete the contributions, means and snapshots before the second newest snapshot.

    A replica that has not yet reached that point finds them missing, and loads a newer snapshot. Seals and pointers are
    never deleted, because they are decisions.

    Args:
        store: the store of the run.
        keys: the keys of the rendezvous.
        newest: the entry of the newest snapshot.
        snapshot_every: entries from one snapshot to the next.
        proof: checks pointers.
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
    listed = store.list_keys(keys.rounds())  # the prefix "r" also has the copies of unshared tensors, below "rest/"
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
        if 0 < entry < newest_before:  # copy 0 has the frozen parameters, and later copies do not repeat them
            store.remove(keys.unshared(entry))
    _collect_own(store, keys, horizon)


def _pointer(store: RetryingStore, keys: Keys, entry: int, proof: Proof) -> SnapshotPointer | None:
    """Return the pointer of a snapshot. None: there is none, or this reading of it failed."""
    key = keys.snapshot(entry)
    data = store.peek(key)
    with suppress(BadRecordError):
        return None if data is None else SnapshotPointer.parse(data, key, proof)
    return None


def _collect_own(store: RetryingStore, keys: Keys, horizon: int) -> None:
    """Delete the states that ranks saved before the horizon.

    The newest state of each rank stays, because the rank may start again late.
    """
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
