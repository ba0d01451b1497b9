"""Measures for `planner.Processor` how fast this machine's processor makes the computations of a round."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from diloco.fragments import Fragment, Slot
from diloco.outer_optimizer import NesterovSGD, Schedule
from diloco.rendezvous.envelope import UNSIGNED
from diloco.rendezvous.reduction import BlockFormat, ShardInput, weighted_mean
from diloco.wires import WIRES
from diloco.wires.wire import BLOCK_ELEMENTS, PIECE, BlockWriter, decoded

TRIES = 5
N_INPUTS = 4
"""The number of contributions of the measured mean."""


def measure(wire_name: str = "int8") -> dict[str, float]:
    """Return speeds of one thread, in bytes of float32 per second, under the names of the fields of `Processor`.

    Args:
        wire_name: the wire of the measurement: fp32, bf16, int8 or int4.

    Example:
        Processor(**measure())
    """
    wire, n = WIRES[wire_name], BLOCK_ELEMENTS
    anchor, live = (np.random.default_rng(seed).standard_normal(n, np.float32) for seed in (0, 1))
    block, mean, scratch = (
        memoryview(bytearray(wire.size(n))),
        memoryview(bytearray(wire.size(n))),
        np.empty_like(anchor),
    )

    def encode() -> str:
        writer = BlockWriter(wire, block, n, UNSIGNED.hash())
        for start in range(0, n, PIECE):
            piece = slice(start, start + PIECE)
            writer.write(np.subtract(anchor[piece], live[piece], out=scratch[piece]), start)
        return writer.digest()

    digest, blocks = encode(), BlockFormat(n, n, wire, wire, UNSIGNED)
    inputs = [ShardInput(rank, 1.0, block, (digest,)) for rank in range(N_INPUTS)]

    def decode() -> None:
        for start, values in decoded(wire, [block], n, n):
            np.add(live[start : start + len(values)], values, out=scratch[start : start + len(values)])

    return {
        "encode": _rate(encode, n),
        "accumulate": _rate(lambda: weighted_mean(inputs, mean, blocks), N_INPUTS * n),
        "decode": _rate(decode, n),
        "step": _rate(_outer_step(n), n),
    }


def _outer_step(n: int) -> Callable[[], None]:
    """Return a function that makes an outer step of n values."""
    fragment = Fragment(0, (Slot("w", "parameter", (n,), "float32", 0, n),), n, n)
    anchor, mean = torch.zeros(n, dtype=torch.float32, device="cpu"), np.ones(n, np.float32)
    optimizer = NesterovSGD(fragment, anchor, Schedule(0.7, 0.9, 0, 1))
    pieces = [(start, mean[start : start + PIECE]) for start in range(0, n, PIECE)]
    return lambda: optimizer.step(0, iter(pieces))


def _rate(act: Callable[[], object], elements: int) -> float:
    """Return the speed of the fastest of several calls, in bytes of float32 per second."""
    took_s = []
    for _ in range(TRIES):
        began = time.perf_counter()
        act()
        took_s.append(time.perf_counter() - began)
    return 4 * elements / min(took_s)
