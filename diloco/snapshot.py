"""The state before an entry, as objects: parts in safetensors form and a pointer that decides.

A snapshot's parts are put under their writer's own nonce, each is acknowledged, and then the pointer is created; the
pointer that stands decides whose parts count, so half-written or competing parts do no harm. `snapshot/0`, the first
anchor, also carries the contract. Nothing here knows torch: arrays in, arrays out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128, xxh3_128_hexdigest

from diloco.contract import Contract
from diloco.keys import Keys
from diloco.patience import PatientStore
from diloco.records import BadRecordError, Buffer, Reading, frame, unframe

PART_BYTES = 64 << 20
READ_TRIES = 3

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]

DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BOOL": np.bool_,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8,
}  # fmt: skip
_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Pointer:
    """What `snapshot/<entry>` says."""

    nonce: str
    rank: int
    parts: tuple[str, ...]
    """Digest of each part."""
    state: tuple[str, ...]
    """Digest of the anchor and outer state of each fragment."""
    contract: Contract

    def data(self) -> bytes:
        fields = {"nonce": self.nonce, "rank": self.rank, "parts": self.parts, "state": self.state}
        return frame({**fields, "contract": self.contract})

    @classmethod
    def parse(cls, data: Buffer) -> Pointer:
        """Raises: BadRecordError: these bytes are no pointer."""
        fields, _, _ = unframe(data)
        with Reading("snapshot pointer"):
            return cls(
                nonce=_nonce(fields["nonce"]),
                rank=int(fields["rank"]),
                parts=_texts(fields["parts"]),
                state=_texts(fields["state"]),
                contract=_contract(fields["contract"]),
            )


def put_parts(store: PatientStore, keys: Keys, entry: int, nonce: str, arrays: Arrays) -> tuple[str, ...] | None:
    """Put the state as parts and return their digests; None when the store did not acknowledge one: begin again."""
    digests = []
    for index, part in enumerate(_parts(arrays)):
        data = encode_part(part)
        if not store.write(keys.part(entry, nonce, index), data):
            return None
        digests.append(_digest(data))
    return tuple(digests)


def get_parts(store: PatientStore, keys: Keys, entry: int, pointer: Pointer) -> dict[str, Array] | None:
    """Read a snapshot's arrays; None when a part is missing, rotten after re-reads, or never was one."""
    arrays: dict[str, Array] = {}
    for index, digest in enumerate(pointer.parts):
        for _ in range(READ_TRIES):
            data = store.look(keys.part(entry, pointer.nonce, index))
            if data is None:
                continue
            if xxh3_128_hexdigest(data) == digest:
                try:
                    arrays.update(decode_part(data))
                except BadRecordError:
                    return None
                break
        else:
            return None
    return arrays


def encode_part(arrays: Arrays) -> list[Buffer]:
    """Return a safetensors file as buffers: a header, and the arrays' own memory."""
    header: dict[str, Any] = {}
    buffers: list[Buffer] = []
    at = 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": array.shape,
            "data_offsets": [at, at + array.nbytes],
        }
        buffers.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        at += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)  # the format pads with spaces
    return [len(text).to_bytes(8, "little") + text, *buffers]


def decode_part(data: memoryview) -> dict[str, Array]:
    """Return the arrays of a safetensors file as views of its bytes.

    Raises: BadRecordError: these bytes are no such file.
    """
    header_end = 8 + int.from_bytes(data[:8], "little")
    with Reading("safetensors file"):
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


def _nonce(value: Any) -> str:
    """Check what becomes a segment of keys."""
    if not isinstance(value, str) or not re.fullmatch(r"\w[\w.-]{0,63}", value, re.ASCII):
        raise ValueError(f"{str(value)[:40]!r} instead of a nonce")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise TypeError("something else instead of a list of digests")
    return tuple(value)


def _contract(value: Any) -> Contract:
    if not isinstance(value, dict):
        raise TypeError(f"a {type(value).__name__} instead of a contract")
    for shape, _, _ in value.get("tensors", {}).values():
        tuple(shape)
    return value


def _parts(arrays: Arrays) -> Iterator[dict[str, Array]]:
    part: dict[str, Array] = {}
    size = 0
    for name, array in arrays.items():
        if part and size + array.nbytes > PART_BYTES:
            yield part
            part, size = {}, 0
        part[name] = array
        size += array.nbytes
    yield part


def _digest(data: Sequence[Buffer]) -> str:
    digest = xxh3_128()
    for buffer in data:
        digest.update(buffer)
    return digest.hexdigest()
