"""Helpers for tests of wires: values, blocks, and each form of a block that the sparse wire refuses."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np

from diloco.wires import WIRES
from diloco.wires.wire import PIECE, Floats, Wire

F = np.float32


def values(n: int) -> Floats:
    """Return values of many magnitudes, the same on every machine. Some groups are zeros, and some are tiny."""
    rng = np.random.default_rng(n)
    found = np.ldexp(rng.integers(-(1 << 23), 1 << 23, n), rng.integers(-60, -20, n)).astype(np.float32)
    found[300:700] = 0.0
    found[3000:3400] = np.ldexp(found[3000:3400], -100)
    return found


def encoded(wire: Wire, of: Floats) -> bytes:
    block = memoryview(bytearray(wire.size(len(of))))
    for start in range(0, len(of), PIECE):
        wire.encode(of[start : start + PIECE].copy(), block, len(of), start)
    return bytes(block)


def decoded(wire: Wire, block: bytes, n: int) -> Floats:
    out = np.empty(n, np.float32)
    for start in range(0, n, PIECE):
        room = out[start : start + PIECE]
        room[:] = wire.decode(memoryview(block), n, start, room)
    return out


def of_bits(*bits: int) -> Callable[[bytearray], None]:
    """Set the bits of the positions in a block of 24 values, whose positions have three bits in one byte."""

    def change(block: bytearray) -> None:
        block[8] = sum(1 << bit for bit in bits)

    return change


def of_scale(scale: float) -> Callable[[bytearray], None]:
    return lambda block: struct.pack_into("<f", block, 0, scale)


def of_byte(at: int, value: int) -> Callable[[bytearray], None]:
    return lambda block: block.__setitem__(at, value)


N = 23
"""A block of 23 values: one scale, 4 zeros, a byte of 6 bits for 3 positions, and 2 bytes of 3 halves."""
REFUSED: dict[str, Callable[[bytearray], None]] = {
    "a negative scale": of_scale(-1.0),
    "a scale of minus zero": of_scale(-0.0),
    "a scale of NaN": of_scale(float("nan")),
    "an infinite scale": of_scale(float("inf")),
    "a scale above half of the largest float32": of_scale(1.8e38),
    "a byte after the scales": of_byte(5, 1),
    "one position too few": of_bits(0, 2),
    "one position too many": of_bits(0, 1, 2, 4),
    "no position": of_bits(),
    "a position after the last value": of_byte(10, 7),
    "a bit after the last one": of_bits(0, 1, 7),
    "one position twice": lambda block: (of_bits(0, 1, 2)(block), of_byte(9, 0x33)(block))[0],
    "positions that fall": lambda block: (of_bits(0, 1, 2)(block), of_byte(9, 0x35)(block))[0],
    "a half after the last one": of_byte(10, 0x16),
}


def block_of_three() -> bytearray:
    """Return a block whose positions are 3, 12 and 22."""
    of = np.zeros(N, F)
    of[[3, 12, 22]] = 1, -2, 3
    block = bytearray(encoded(WIRES["top8"], of))
    assert block[8:] == bytes([0b10101, 0x43 | 0x80, 0x06])
    return block
