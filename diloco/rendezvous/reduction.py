"""The weighted mean of byte ranges, in one pass that also proves every input.

The arithmetic is float32, in the order given (rank order), each product rounded before it is added: the same bits on
every processor. It goes through a block in pieces that stay in the cache, so each input is fetched from memory once
for its digest, its product and its sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128

from diloco.rendezvous.frames import BLOCK_BYTES

Floats = npt.NDArray[np.float32]

PIECE_BYTES = 256 << 10  # accumulator, product and one input fit into 1 MiB of second-level cache


@dataclass(frozen=True)
class Input:
    """One member's share of a byte range: whole blocks, with the digests its head promises."""

    rank: int
    weight: float
    data: memoryview
    digests: Sequence[str]


class BadInputError(Exception):
    """An input is not what its head promises, or not finite; the mean has to be taken without it, or read again."""

    def __init__(self, rank: int, problem: str) -> None:
        super().__init__(f"The contribution of rank {rank} {problem}.")
        self.rank = rank


class Reduce(Protocol):
    """The signature of `weighted_mean`."""

    def __call__(self, inputs: Sequence[Input], out: memoryview, *, block_bytes: int) -> tuple[str, ...]: ...


def weighted_mean(inputs: Sequence[Input], out: memoryview, *, block_bytes: int = BLOCK_BYTES) -> tuple[str, ...]:
    """Write the mean of the inputs to `out` and return the digest of each of its blocks.

    `out` may be the memory of one of the inputs. Weights are normalised to sum 1.

    Raises:
        BadInputError: an input must be left out; `out`, and an input in the same memory, is then overwritten.
    """
    total = sum(source.weight for source in inputs)
    weights = [np.float32(source.weight / total) for source in inputs]
    sources: list[Floats] = [np.frombuffer(source.data, np.float32) for source in inputs]
    result: Floats = np.frombuffer(out, np.float32)
    block, piece = block_bytes // 4, min(block_bytes, PIECE_BYTES) // 4
    acc, product = np.empty(piece, np.float32), np.empty(piece, np.float32)
    digests = []
    for number, block_start in enumerate(range(0, len(result), block)):
        block_end = min(block_start + block, len(result))
        hashes = [xxh3_128() for _ in inputs]
        written = xxh3_128()
        finite = True
        for start in range(block_start, block_end, piece):
            end = min(start + piece, block_end)
            a, p = acc[: end - start], product[: end - start]
            for position, (source, weight, digest) in enumerate(zip(sources, weights, hashes, strict=True)):
                values = source[start:end]
                digest.update(values.data)
                if position == 0:
                    np.multiply(values, weight, out=a)
                else:
                    np.multiply(values, weight, out=p)
                    np.add(a, p, out=a)
            result[start:end] = a
            written.update(a.data)
            finite = finite and is_finite(a)
        for source_, digest in zip(inputs, hashes, strict=True):
            if digest.hexdigest() != source_.digests[number]:
                raise BadInputError(source_.rank, "is not what its head promises")
        if not finite:
            for source_, values in zip(inputs, sources, strict=True):
                if not np.isfinite(values[block_start:block_end]).all():
                    raise BadInputError(source_.rank, "is not finite")
        digests.append(written.hexdigest())
    return tuple(digests)


def is_finite(values: Floats) -> bool:
    """Return whether all values are finite, at the price of one dot product in the usual case."""
    return square_of(values) is not None


def square_of(values: Floats) -> float | None:
    """Return the sum of the squares; None when a value is not finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        square = float(np.dot(values, values))
    if math.isfinite(square):
        return square
    return float(np.dot(values, values.astype(np.float64))) if np.isfinite(values).all() else None
