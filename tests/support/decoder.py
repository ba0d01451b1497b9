"""Reads the log of a run of DiLoCo from its stored objects, by ADRs 0034 and 0037, without importing this project.

Each mean is computed again from the contributions that its seal names, each anchor from the mean that is stored.
"""

from __future__ import annotations

import hmac
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from xxhash import xxh3_128

Floats = npt.NDArray[np.float32]
Objects = Mapping[str, bytes]
"""The objects by key, without the common prefix `<run>/diloco/<name>/`."""
F32 = np.float32


class Proof(NamedTuple):
    """Computes the proof of an object: a signature if the run has a key, or else a checksum."""

    key: bytes | None = None
    prefix: str = ""
    """The prefix of all keys in the store."""

    def of_head(self, name: str, text: bytes) -> bytes:
        if self.key is None:
            return xxh3_128(text).digest()
        return hmac.digest(self.key, b"RPL1" + f"{self.prefix}{name}".encode() + b"\0" + text, "sha256")[:16]

    def digest(self, data: bytes) -> str:
        return xxh3_128(data).hexdigest() if self.key is None else blake3(data).hexdigest()[:32]


UNSIGNED = Proof()


class Frame(NamedTuple):
    head: dict[str, Any]
    digest: str
    end: int
    """The end of the padded head, if the record does not give another one."""


def frame(data: bytes, name: str, proof: Proof) -> Frame:
    magic, length = struct.unpack_from("<4sI", data)
    text = data[24 : 24 + length]
    assert magic == b"RPL1"
    assert proof.of_head(name, text) == data[8:24]
    return Frame(json.loads(text), data[8:24].hex(), -(-(24 + length) // 64) * 64)


def head_bytes(n_blocks: int) -> int:
    return -(-(1024 + 52 * n_blocks) // 64) * 64


# -- wires -------------------------------------------------------------------------------------------------------------

GROUP, MOST = {"int8": 256, "int4": 128}, {"int8": 127, "int4": 7}


def size(wire: str, n: int) -> int:
    return {
        "fp32": 4 * n,
        "bf16": 2 * n,
        "int8": 4 * -(-n // 256) + n,
        "int4": -(-4 * -(-n // 128) // 8) * 8 + -(-n // 2),
        "top8": -(-4 * -(-n // 4096) // 8) * 8 + n // 4096 * 384 + top8_chunk_size(n % 4096),
    }[wire]


def top8_chunk_size(n: int) -> int:
    k = -(-n // 8)
    return -(-2 * k // 8) + -(-k // 2)


def parts(wire: str, block: bytes, n: int) -> tuple[Floats, Floats]:
    """Return the numbers of a block, and the scale of each; exact values have the scale 1."""
    if wire == "fp32":
        return np.frombuffer(block, "<f4"), np.ones(n, F32)
    if wire == "bf16":
        return (np.frombuffer(block, "<u2").astype(np.uint32) << 16).view(F32), np.ones(n, F32)
    if wire == "top8":
        return top8_parts(block, n)
    groups = -(-n // GROUP[wire])
    scales = np.repeat(np.frombuffer(block, "<f4", groups), GROUP[wire])[:n]
    if wire == "int8":
        return np.frombuffer(block, np.int8, n, 4 * groups).astype(F32), scales
    whole, rest = [], block[size(wire, n) - -(-n // 2) :]
    for first in range(0, n, 8192):
        half = -(-min(8192, n - first) // 2)
        page, rest = np.frombuffer(rest[:half], np.uint8), rest[half:]
        whole += [page & 15, page >> 4]
    return (np.concatenate(whole).astype(F32) - F32(8))[:n], scales


def top8_parts(block: bytes, n: int) -> tuple[Floats, Floats]:
    """Return 1, -1 or 0 for each value, and the scale of its chunk."""
    n_chunks = -(-n // 4096)
    numbers, at = np.zeros(n, F32), -(-4 * n_chunks // 8) * 8
    assert not any(block[4 * n_chunks : at])
    for first in range(0, n, 4096):
        m = min(4096, n - first)
        k = -(-m // 8)
        high = int.from_bytes(block[at : at + -(-2 * k // 8)], "little")
        low = int.from_bytes(block[at + -(-2 * k // 8) : at + top8_chunk_size(m)], "little")
        bits = [bit for bit in range(2 * k) if high >> bit & 1]
        assert high >> 2 * k == low >> 4 * k == 0
        halves = [low >> 4 * j & 15 for j in range(k)]
        positions = [8 * (bit - j) + (half & 7) for j, (bit, half) in enumerate(zip(bits, halves, strict=True))]
        assert positions == sorted(set(positions))
        assert positions[-1] < m
        numbers[[first + position for position in positions]] = [-1 if half & 8 else 1 for half in halves]
        at += top8_chunk_size(m)
    assert at == len(block)
    scales = np.frombuffer(block, "<f4", n_chunks)
    assert all(0 <= scale <= np.finfo(F32).max / 2 for scale in scales)
    return numbers, np.repeat(scales, 4096)[:n]


def decoded(wire: str, block: bytes, n: int) -> Floats:
    numbers, scales = parts(wire, block, n)
    return numbers * scales if wire in GROUP or wire == "top8" else numbers


def encoded(wire: str, values: Floats) -> bytes:
    if wire == "fp32":
        return values.tobytes()
    if wire == "bf16":
        bits = values.view(np.uint32)
        return bytes(((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes())
    group, most = GROUP[wire], MOST[wire]
    n = len(values)
    rows = np.zeros((-(-n // group), group), F32)
    rows.reshape(-1)[:n] = values
    top = np.abs(rows).max(axis=1)
    tiny = top < F32(2.0**-100)
    scales = np.where(tiny, F32(0), top * F32(1 / most))
    inverse = F32(most) / np.where(tiny, F32(np.inf), top)
    whole = np.clip(np.rint(rows * inverse[:, None]), -most, most).astype(np.int8).reshape(-1)[:n]
    if wire == "int8":
        return bytes(scales.tobytes() + whole.tobytes())
    data = scales.tobytes()
    data += bytes(-len(data) % 8)
    codes = np.append(whole + 8, [8] * (n % 2)).astype(np.uint8)
    for first in range(0, len(codes), 8192):
        low, high = np.split(codes[first : first + 8192], 2)
        data += (low | high << 4).tobytes()
    return bytes(data)


# -- the log -----------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A range of whole blocks of a payload."""

    first: int
    """The number of the first element."""
    sizes: list[int]
    """Elements of each block."""
    blocks: list[bytes]


class Run:
    """The log of one run, from its first state on."""

    def __init__(
        self,
        objects: Objects,
        block_elements: int = 1 << 20,
        proof: Proof = UNSIGNED,
        extensions: Sequence[int] = (),
    ) -> None:
        self._objects = objects
        self._proof = proof
        self._block = block_elements
        self.read: set[str] = set()
        """The keys that were read so far."""
        start = self._frame("snapshot/0").head
        self.contract = contract = start["contract"]
        self.position = start["first"]
        """The next entry."""
        self.last_entries = self._last_entries(extensions)
        self.names = [
            [name for name, (_, _, fragment) in contract["tensors"].items() if fragment == index]
            for index in range(contract["fragments"])
        ]
        tensors = self._tensors(0, start)
        self.anchors = [self._flat(tensors, "anchor", names) for names in self.names]
        if (total := contract["given"].get("total_steps")) is not None:
            n_fragments, inner_steps = contract["fragments"], contract["inner_steps"]
            assert contract["last_entry"] == -(-total * n_fragments // inner_steps) + n_fragments - 2
        has_momentum = contract["outer_momentum"] != 0
        self.momenta = [np.zeros(n if has_momentum else 0, F32) for n in contract["stepped"]]
        for names, momentum in zip(self.names, self.momenta, strict=True):
            # the state is from the run that this run continues
            if stepped := [name for name in names if f"momentum/{name}" in tensors]:
                momentum[:] = self._flat(tensors, "momentum", stepped)
        assert start["state"] == [self.state(index) for index in range(contract["fragments"])]

    def _last_entries(self, extensions: Sequence[int]) -> list[int]:
        """Return the last entry of the first plan and of each total that the run was extended to."""
        c = self.contract
        if c["last_entry"] is None:
            return []
        by_clock = c["inner_steps"] is None
        unit, per_entry = (c["fragments"], 1) if by_clock else (1, c["inner_steps"] // c["fragments"])
        lasts, before = [c["last_entry"]], unit * (c["total_rounds"] if by_clock else c["given"]["total_steps"])
        for total in extensions:
            lasts.append(lasts[-1] + -(-(unit * total - before) // per_entry) + c["fragments"] - 1)
            before = unit * total
        return lasts

    def _get(self, key: str) -> bytes:
        self.read.add(key)
        return self._objects[key]

    def _frame(self, key: str) -> Frame:
        return frame(self._get(key), key, self._proof)

    def _tensors(self, entry: int, pointer: Mapping[str, Any]) -> dict[str, Floats]:
        found: dict[str, Floats] = {}
        for index, digest in enumerate(pointer["parts"]):
            data = self._get(f"part/{entry}/{pointer['nonce']}/{index}")
            assert self._proof.digest(data) == digest
            found |= safetensors(data)
        return found

    @staticmethod
    def _flat(tensors: Mapping[str, Floats], kind: str, names: list[str]) -> Floats:
        return np.concatenate([tensors[f"{kind}/{name}"].reshape(-1) for name in names])

    @property
    def rests(self) -> list[int]:
        """The rounds after which a replica stored the tensors of its model that are not in the anchor."""
        return sorted(int(key.removeprefix("rest/")) for key in self._objects if key.startswith("rest/"))

    def rest(self, entry: int) -> dict[str, Any]:
        """Return these stored tensors by name. If numpy does not have the type of a tensor, its bits are returned."""
        data, found = self._get(f"rest/{entry}"), self._frame(f"rest/{entry}")
        assert found.head["rank"] in range(10**6)
        assert self._proof.digest(data[found.end :]) == found.head["digest"]
        tensors = safetensors(data[found.end :])
        assert tensors.keys() <= self.contract["unshared"].keys()
        return tensors

    def state(self, fragment: int) -> str:
        """Return the digest of a fragment's anchor and momentum."""
        both = (self.anchors[fragment], self.momenta[fragment])
        return xxh3_128(b"".join(xxh3_128(each.tobytes()).digest() for each in both)).hexdigest()

    def anchor(self, fragment: int) -> dict[str, Floats]:
        """Return a fragment's anchor by name."""
        sizes = [int(np.prod(self.contract["tensors"][name][0])) for name in self.names[fragment]]
        parts = np.split(self.anchors[fragment], np.cumsum(sizes)[:-1])
        return dict(zip(self.names[fragment], parts, strict=True))

    def __iter__(self) -> Iterator[int]:
        """Apply the entries of the log in order, and yield each one after it was applied."""
        while f"seal/{self.position}" in self._objects:
            self._check_snapshot()
            self._apply(self.position)
            self.position += 1
            yield self.position - 1
        self._check_snapshot()

    def _check_snapshot(self) -> None:
        key = f"snapshot/{self.position}"
        if self.position == 0 or key not in self._objects:
            return
        pointer = self._frame(key).head
        assert pointer["first"] == 0
        assert pointer["state"] == [self.state(index) for index in range(len(self.names))]
        tensors = self._tensors(self.position, pointer)
        for names, anchor, momentum in zip(self.names, self.anchors, self.momenta, strict=True):
            assert self._flat(tensors, "anchor", names).tobytes() == anchor.tobytes()
            stepped = [name for name in names if f"momentum/{name}" in tensors]
            if stepped:
                assert self._flat(tensors, "momentum", stepped).tobytes() == momentum.tobytes()
            else:
                assert not momentum.any()

    def _apply(self, entry: int) -> None:
        fragment = entry % len(self.names)
        data = self._get(f"seal/{entry}")
        seal = self._frame(f"seal/{entry}")
        assert seal.head["anchor"] == self.state(fragment)
        # [nonce, attempt, weight, digest of the contribution's head, in phase]
        weights = {int(rank): member[2] for rank, member in seal.head["replicas"].items() if member[2] > 0}
        if not weights:
            return  # no replica sent any work
        n = len(self.anchors[fragment])
        n_blocks, n_shards = -(-n // self._block), seal.head["shards"]
        mean = []
        for shard in range(max(1, n_shards)):
            first, end = shard * n_blocks // max(1, n_shards), (shard + 1) * n_blocks // max(1, n_shards)
            used = weights
            is_stored = self.contract["mean_wire"] != "each"
            self.scaled_down: set[int] = set()
            if n_shards:
                stored = self._get(f"r{entry}/mean/{shard}")
                head = self._frame(f"r{entry}/mean/{shard}").head
                payload = stored[head_bytes(end - first) :]
                used = {rank: weight for rank, weight in weights.items() if rank not in head["left_out"]}
            else:
                head, payload = seal.head, data[seal.end :]
                assert self._proof.digest(payload) == head["mean"]
            wire = head.get("wire", "fp32")
            assert wire == self.contract["mean_wire"]
            if not is_stored:
                assert not payload
                computed = list(self._means(entry, seal.head, used, first, end))
                assert head["blocks"] == "".join(self._proof.digest(values.tobytes()) for values in computed)
                assert head.get("clipped", []) == sorted(self.scaled_down)
                mean += computed
                continue
            part = self._cut(payload, wire, n, first, end)
            if n_shards:
                assert head["blocks"] == "".join(map(self._proof.digest, part.blocks))
            assert part.blocks == [encoded(wire, values) for values in self._means(entry, seal.head, used, first, end)]
            assert head.get("clipped", []) == sorted(self.scaled_down)
            mean += [decoded(wire, block, n) for block, n in zip(part.blocks, part.sizes, strict=True)]
        self._step(entry, fragment, np.concatenate(mean))

    def _cut(self, payload: bytes, wire: str, n_elements: int, first: int, end: int) -> Part:
        """Return a range of whole blocks of a payload, from a given block on."""
        sizes = [min(self._block, n_elements - block * self._block) for block in range(first, end)]
        blocks, at = [], 0
        for n in sizes:
            blocks.append(payload[at : at + size(wire, n)])
            at += size(wire, n)
        assert at == len(payload)
        return Part(first * self._block, sizes, blocks)

    def _means(
        self, entry: int, seal: Mapping[str, Any], weights: Mapping[int, float], first: int, end: int
    ) -> Iterator[Floats]:
        """Yield the mean of each block in a range, computed from the contributions."""
        n = len(self.anchors[entry % len(self.names)])
        total = math.fsum(weights.values())
        sent = {rank: self._contribution(entry, rank, seal["replicas"][str(rank)], n) for rank in sorted(weights)}
        for block in range(first, end):
            acc: Floats | None = None
            factors = self._factors({rank: (part.blocks[block], part.sizes[block]) for rank, part in sent.items()})
            for rank, part in sent.items():
                weight = F32(weights[rank] / total) * factors[rank]
                if factors[rank] < 1:
                    self.scaled_down.add(rank)
                numbers, scales = parts(self.contract["wire"], part.blocks[block], part.sizes[block])
                product = numbers * (scales * weight)
                if acc is None and self.contract["wire"] == "top8":
                    acc = np.zeros(len(product), F32)
                acc = product if acc is None else acc + product
            yield np.zeros(min(self._block, n - block * self._block), F32) if acc is None else acc

    def _factors(self, blocks: Mapping[int, tuple[bytes, int]]) -> dict[int, np.float32]:
        """Return the factor of each rank's block: less than 1 if it is more than three times the median."""
        factors = dict.fromkeys(blocks, F32(1))
        if self.contract.get("robust") != "clip" or len(blocks) < 3:
            return factors
        squares = dict.fromkeys(blocks, 0.0)
        for rank, (block, n) in blocks.items():
            values = decoded(self.contract["wire"], block, n)
            for first in range(0, n, 1 << 19):
                squares[rank] += float(np.square(values[first : first + (1 << 19)], dtype=np.float64).sum())
        median = sorted(squares.values())[(len(squares) - 1) // 2]
        for rank, square in squares.items():
            if median and square > 9 * median:
                factors[rank] = (F32(math.sqrt(median / square)).view(np.uint32) & np.uint32(0xFFFF0000)).view(F32)
        return factors

    def _contribution(self, entry: int, rank: int, member: list[Any], n: int) -> Part:
        data = self._get(f"r{entry}/contribution/{rank}")
        head, digest, _ = self._frame(f"r{entry}/contribution/{rank}")
        assert digest == member[3]
        assert (head["rank"], head["nonce"], head["attempt"], head["weight"]) == (rank, *member[:3])
        assert head.get("wire", "fp32") == self.contract["wire"]
        payload = data[head_bytes(-(-n // self._block)) :]
        assert len(payload) == head["bytes"]
        part = self._cut(payload, self.contract["wire"], n, 0, -(-n // self._block))
        assert head["blocks"] == "".join(map(self._proof.digest, part.blocks))
        assert len(head["norms"]) == len(part.blocks)
        return part

    def _step(self, entry: int, fragment: int, g: Floats) -> None:
        """Take the outer step; each operation is rounded to float32."""
        c, n_fragments, n = self.contract, len(self.names), self.contract["stepped"][fragment]
        lasts = self.last_entries if c["final_average"] else []
        lr, mu = c["outer_lr"], c["outer_momentum"]
        if any(last - n_fragments < entry <= last for last in lasts):
            lr, mu = 1.0, 0.0
        elif c["momentum_warmup"]:
            mu *= min(1.0, (entry // n_fragments) / c["momentum_warmup"])
        anchor, b = self.anchors[fragment], self.momenta[fragment]
        d = g[:n]
        if len(b):
            b[:] = b * F32(mu) + g[:n]
            d = b * F32(mu) + g[:n]
        anchor[:n] -= d * F32(lr)
        anchor[n:] -= g[n:]


def state_of_given(anchor: Floats, tensors: Mapping[str, Any], fragment: int) -> str:
    """Return the digest of a fragment that an outer optimizer of the user's steps, from the tensors of a snapshot."""
    digest = xxh3_128(anchor.tobytes())

    def walk(value: Any) -> None:
        kind = next(iter(value)) if isinstance(value, dict) else ""
        if kind == "dict":
            for key, item in sorted(value["dict"], key=lambda pair: str(pair[0])):
                digest.update(str(key).encode())
                walk(item)
        elif kind in ("list", "tuple"):
            for item in value[kind]:
                walk(item)
        elif kind in ("tensor", "array"):
            digest.update(tensors[value[kind]].tobytes())
        else:
            digest.update(repr(value).encode())

    text = tensors.get(f"outer/{fragment}/json")
    if text is not None:
        walk(dict(json.loads(text.tobytes())["dict"])["state"])
    return digest.hexdigest()


def safetensors(data: bytes) -> dict[str, Any]:
    """Return the arrays of a file."""
    end = 8 + int.from_bytes(data[:8], "little")
    kinds = {"F32": "<f4", "U8": "u1", "I64": "<i8", "I16": "<i2", "I32": "<i4", "BOOL": "?"}
    found: dict[str, Any] = {}
    for name, about in json.loads(data[8:end]).items():
        start, stop = about["data_offsets"]
        found[name] = np.frombuffer(data[end + start : end + stop], kinds[about["dtype"]]).reshape(about["shape"])
    return found
