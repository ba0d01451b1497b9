"""The weighted mean of encoded blocks, in one pass that also proves every input.

The arithmetic is float32, in the order given (rank order), each product rounded before it is added: the same bits on
every processor. It goes through a block in pieces that stay in the cache, so each input is fetched from memory once
for its digest, its product and its sum. The mean is encoded on the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from diloco.rendezvous.envelope import Proof
from diloco.wires.wire import PIECE, BlockWriter, NotFiniteError, Wire, blocks_of, decoded


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


@dataclass(frozen=True)
class Blocks:
    """Of what a range is made: so many elements in whole blocks, how they come in, and how their mean goes out."""

    n_elements: int
    block_elements: int
    wire: Wire
    mean_wire: Wire
    proof: Proof


Write: TypeAlias = Callable[[memoryview], object]


class Reduce(Protocol):
    """The signature of `weighted_mean`."""

    def __call__(
        self, inputs: Sequence[Input], out: memoryview, blocks: Blocks, write: Write | None = None
    ) -> tuple[str, ...]: ...


def weighted_mean(
    inputs: Sequence[Input], out: memoryview, blocks: Blocks, write: Write | None = None
) -> tuple[str, ...]:
    """Write the mean of the inputs to `out`, encoded, and return the digest of each of its blocks.

    Weights are normalised to sum 1; of no inputs the mean is zero. Where both wires are the same exact one, `out` may
    be the memory of an input.

    Args:
        write: is handed each block, in order; then `out` is memory for one of them.

    Raises:
        BadInputError: an input must be left out; `out`, and an input in the same memory, is then overwritten.
    """
    wire, mean_wire, sizes = blocks.wire, blocks.mean_wire, (blocks.n_elements, blocks.block_elements)
    total = math.fsum(source.weight for source in inputs)  # Python's own sum has other bits since 3.12
    weights = [np.float32(source.weight / total) for source in inputs]
    acc, product = np.empty(PIECE, np.float32), np.empty(PIECE, np.float32)
    digests = []
    for number, (block, to) in enumerate(zip(blocks_of(wire, *sizes), blocks_of(mean_wire, *sizes), strict=True)):
        n, finite = block.n, True
        place = out[to.start : to.end] if write is None else out[: to.end - to.start]
        writer = BlockWriter(mean_wire, place, n, blocks.proof.hash())
        sources = [source.data[block.start : block.end] for source in inputs]
        if blocks.proof.copies:
            sources = [memoryview(bytes(source)) for source in sources]
        hashes = [blocks.proof.hash() for _ in sources]
        for source, digest in zip(sources, hashes, strict=True):
            digest.update(source[: wire.span(n, 0, n).start])
        for start in range(0, n, PIECE):
            end = min(start + PIECE, n)
            span, a, p = wire.span(n, start, end), acc[: end - start], product[: end - start]
            if not inputs:
                a.fill(0.0)
            for position, (source, weight, digest) in enumerate(zip(sources, weights, hashes, strict=True)):
                digest.update(source[span])
                wire.accumulate(source, n, start, weight, a, p, first=position == 0)
            try:
                writer.write(a, start)
            except NotFiniteError:
                finite = False
        for source_, digest in zip(inputs, hashes, strict=True):
            if digest.hexdigest() != source_.digests[number]:
                raise BadInputError(source_.rank, "is not what its head promises")
        if not finite:
            raise _worst(wire, inputs, sources, n)
        digests.append(writer.digest())
        if write is not None:
            write(place)
    return tuple(digests)


def is_mean(data: memoryview, blocks: Blocks, digests: Sequence[str] | None) -> bool:
    """Return whether these bytes are an encoded mean of finite values.

    Args:
        digests: what each block must have; None: they are proven otherwise.
    """
    cut = list(blocks_of(blocks.mean_wire, blocks.n_elements, blocks.block_elements))
    if len(data) != cut[-1].end or (digests is not None and len(digests) != len(cut)):
        return False
    for number, (n, start, end) in enumerate(cut):  # each is fetched from memory once
        block = data[start:end]
        if digests is not None and blocks.proof.digest(block) != digests[number]:
            return False
        if not blocks.mean_wire.is_finite(block, n):
            return False
    return True


def _worst(wire: Wire, inputs: Sequence[Input], sources: Sequence[memoryview], n: int) -> BadInputError:
    """Return whose block is not finite; where each is, the largest makes a sum that no wire can hold."""
    for of, source in zip(inputs, sources, strict=True):
        if not wire.is_finite(source, n):
            return BadInputError(of.rank, "is not finite")
    largest = [max(float(np.abs(values).max()) for _, values in decoded(wire, [source], n, n)) for source in sources]
    return BadInputError(inputs[largest.index(max(largest))].rank, "is too large")
