"""Computes the weighted mean of encoded contributions, in one pass that also checks every input.

The arithmetic is float32, in the order of the ranks. Each product is rounded before it is added, so every processor
computes the same bits. The function works on pieces of a block that stay in the cache. So it reads each input from
memory only once, for its digest, its product and its sum, and encodes the mean in the same pass.

With `clips`, a contribution that is much larger than the others is scaled down, block by block. That is a second pass
over the block, because the norms of all inputs must be known first. The norms are computed from the inputs, and not
taken from their heads. They follow from the inputs alone, so every replica computes the same mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from diloco.rendezvous.envelope import Proof
from diloco.wires.wire import PIECE, BlockWriter, MalformedBlockError, NotFiniteError, Wire, blocks_of, decoded


@dataclass(frozen=True)
class ShardInput:
    """The blocks of one shard from one contribution, with the digests that its head has."""

    rank: int
    weight: float
    data: memoryview
    digests: Sequence[str]


class BadInputError(Exception):
    """An input does not match its digests, is malformed, or is not finite.

    The caller reads the input again, or computes the mean without it.

    Args:
        rank: the rank of the contribution.
        problem: the end of the message, such as "was cut off".
    """

    def __init__(self, rank: int, problem: str) -> None:
        super().__init__(f"The contribution of rank {rank} {problem}.")
        self.rank = rank


@dataclass(frozen=True)
class BlockFormat:
    """The format of a range of whole blocks: how inputs and means are encoded and digested."""

    n_elements: int
    block_elements: int
    """The elements of each block but the last one."""
    wire: Wire
    """The encoding of the inputs."""
    mean_wire: Wire
    """The encoding of the mean."""
    proof: Proof
    """The kind of digests."""
    clips: bool = False
    """True if inputs that are much larger than the others are scaled down."""


LEAST_INPUTS = 3
"""The least number of inputs that are compared. With two, nothing shows which of them is wrong."""
MOST_MEDIANS = 3.0
"""An input whose norm is more than this number of medians is scaled down to the median.

Replicas that train on equal terms differ by less than a third. A replica that makes a fifth of the steps of another one
differs by a factor of up to five. To be scaled down does little harm to such a replica, because its direction counts.
"""
Write: TypeAlias = Callable[[memoryview], object]


class Reduce(Protocol):
    """The signature of `weighted_mean`."""

    def __call__(
        self,
        inputs: Sequence[ShardInput],
        out: memoryview,
        blocks: BlockFormat,
        write: Write | None = None,
        clipped: set[int] | None = None,
    ) -> tuple[str, ...]: ...


def weighted_mean(
    inputs: Sequence[ShardInput],
    out: memoryview,
    blocks: BlockFormat,
    write: Write | None = None,
    clipped: set[int] | None = None,
) -> tuple[str, ...]:
    """Write the encoded mean of the inputs to `out`, and return the digest of each of its blocks.

    The weights are normalized to the sum 1. The mean of no inputs is zero.

    Args:
        inputs: this range of each contribution, in the order of their ranks.
        out: memory for the mean. It may be the memory of an input if both wires are the same exact wire.
        blocks: the format of the range.
        write: called with each block of the mean, in order. `out` is then memory for one block. None: `out` is memory
            for the whole mean.
        clipped: the ranks that were scaled down in a block are added to this set. None: they are not reported.

    Raises:
        BadInputError: an input must be left out. The content of `out`, and of an input in the same memory, is then
        lost.

    Example:
        digests = weighted_mean([ShardInput(0, 1.0, data, (digest,))], out, blocks)
    """
    wire, mean_wire, sizes = blocks.wire, blocks.mean_wire, (blocks.n_elements, blocks.block_elements)
    total = math.fsum(source.weight for source in inputs)  # Python's own `sum` rounds in another way since 3.12
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
        scaled = weights
        if blocks.clips:
            factors = clip_factors(wire, inputs, sources, n)
            scaled = [weight * factor for weight, factor in zip(weights, factors, strict=True)]
            if clipped is not None:
                clipped.update(of.rank for of, factor in zip(inputs, factors, strict=True) if factor < 1)
        hashes = [blocks.proof.hash() for _ in sources]
        for source, digest in zip(sources, hashes, strict=True):
            digest.update(source[: wire.span(n, 0, n).start])
        for start in range(0, n, PIECE):
            end = min(start + PIECE, n)
            span, a, p = wire.span(n, start, end), acc[: end - start], product[: end - start]
            if not inputs:
                a.fill(0.0)
            for position, (source, weight, digest) in enumerate(zip(sources, scaled, hashes, strict=True)):
                digest.update(source[span])
                try:
                    wire.accumulate(source, n, start, weight, a, p, first=position == 0)
                except MalformedBlockError as error:
                    # The sum is incomplete, and the digest would not change that. So leave the rest of the block.
                    raise BadInputError(inputs[position].rank, str(error)) from None
            try:
                writer.write(a, start)
            except NotFiniteError:
                finite = False
        for source_, digest in zip(inputs, hashes, strict=True):
            if digest.hexdigest() != source_.digests[number]:
                raise BadInputError(source_.rank, "does not match the digests in its head")
        if not finite:
            raise _worst(wire, inputs, sources, n)
        digests.append(writer.digest())
        if write is not None:
            write(place)
    return tuple(digests)


def clip_factors(wire: Wire, inputs: Sequence[ShardInput], sources: Sequence[memoryview], n: int) -> list[np.float32]:
    """Return a factor from 0 to 1 for each input of one block.

    An input whose norm is above `MOST_MEDIANS` times the median is scaled down to the median. If the number of norms is
    even, the median is the lower one of the two in the middle, so that half of the inputs cannot raise it. Factors are
    rounded down to bfloat16. Sums of squares are float64 in a fixed order, so all processors find the same factors.

    Args:
        wire: the encoding of the inputs.
        inputs: the inputs, for their ranks.
        sources: the block of each input.
        n: the number of values of the block.

    Raises:
        BadInputError: an input is malformed.
    """
    one = np.float32(1)
    if len(inputs) < LEAST_INPUTS:
        return [one] * len(inputs)
    squares = []
    for source, block in zip(inputs, sources, strict=True):
        total = 0.0
        try:
            for _, values in decoded(wire, [block], n, n):
                total += float(np.square(values, dtype=np.float64).sum())
        except MalformedBlockError as error:
            raise BadInputError(source.rank, str(error)) from None
        squares.append(total if math.isfinite(total) else math.inf)
    median = sorted(squares)[(len(squares) - 1) // 2]
    # If most replicas sent nothing but zeros, for example because their parameters are frozen, nothing is compared.
    if not 0 < median < math.inf:
        return [one] * len(inputs)
    most = MOST_MEDIANS**2 * median
    # The reduction refuses an input that is not finite, so such an input needs no factor.
    return [_rounded_down(math.sqrt(median / s)) if most < s < math.inf else one for s in squares]


def _rounded_down(factor: float) -> np.float32:
    """Return the next bfloat16 toward zero."""
    bits = np.float32(factor).view(np.uint32) & np.uint32(0xFFFF0000)
    rounded: np.float32 = bits.view(np.float32)
    return rounded


def is_mean(data: memoryview, blocks: BlockFormat, digests: Sequence[str] | None) -> bool:
    """Return True if these bytes are an encoded mean of finite values.

    Args:
        data: the bytes.
        blocks: the format of the range.
        digests: the expected digest of each block. None: the caller has checked the bytes already.
    """
    cut = list(blocks_of(blocks.mean_wire, blocks.n_elements, blocks.block_elements))
    if len(data) != cut[-1].end or (digests is not None and len(digests) != len(cut)):
        return False
    # check finiteness and digest together, so that each block is read from memory once
    for number, (n, start, end) in enumerate(cut):
        block = data[start:end]
        if digests is not None and blocks.proof.digest(block) != digests[number]:
            return False
        if not blocks.mean_wire.is_finite(block, n):
            return False
    return True


def _worst(wire: Wire, inputs: Sequence[ShardInput], sources: Sequence[memoryview], n: int) -> BadInputError:
    """Return the error for the input that made a mean not finite.

    If every input is finite, the wire cannot represent the sum, and the error names the input with the largest value.
    """
    for of, source in zip(inputs, sources, strict=True):
        if not wire.is_finite(source, n):
            return BadInputError(of.rank, "is not finite")
    largest = [max(float(np.abs(values).max()) for _, values in decoded(wire, [source], n, n)) for source in sources]
    return BadInputError(inputs[largest.index(max(largest))].rank, "is too large")
