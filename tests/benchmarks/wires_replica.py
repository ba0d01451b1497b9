"""The task of the process in the benchmark of wires: encode and reduce, and count the bytes of a round."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from diloco.fragments import plan_fragments
from diloco.live_parameters import live_tensors, pack
from diloco.outer import open_diloco
from diloco.rendezvous.envelope import UNSIGNED
from diloco.rendezvous.round import Limits
from diloco.testing import run_replicas
from diloco.wires import WIRES
from diloco.wires.wire import BLOCK_ELEMENTS, PIECE, Wire, blocks_of, decoded


def time_wires(n_elements: int, repetitions: int) -> dict[str, dict[str, list[float]]]:
    """Time packing (W3), adding (W4) and decoding for each wire, in turn; the first round is not counted."""
    torch.set_num_threads(1)
    samples: dict[str, dict[str, list[float]]] = {"W3": {}, "W4": {}, "decode": {}}
    tasks = {name: _tasks(wire, n_elements) for name, wire in WIRES.items()}
    with torch.no_grad():
        for _ in range(repetitions + 1):
            for name, acts in tasks.items():
                for what, act in zip(samples, acts, strict=True):
                    began = time.perf_counter()
                    act()
                    samples[what].setdefault(name, []).append(time.perf_counter() - began)
    return {what: {name: taken[1:] for name, taken in each.items()} for what, each in samples.items()}


def _tasks(wire: Wire, n_elements: int) -> tuple[Callable[[], object], ...]:
    """Return functions that pack a model as a sender does, add one such payload as a reducer does, and decode it."""
    model = flat(n_elements)
    (fragment,) = plan_fragments(model, 1, sync_buffers=False)
    anchor = model.get_parameter("flat").detach() + 0.01 * torch.randn(n_elements)
    payload = bytearray()
    acc, product = np.zeros(PIECE, np.float32), np.empty(PIECE, np.float32)

    def packed(write: Callable[[memoryview], object]) -> None:
        pack(live_tensors(model, fragment), anchor, memoryview(b""), wire=wire, proof=UNSIGNED, write=write, who="I")

    def added() -> None:
        for block in blocks_of(wire, n_elements, BLOCK_ELEMENTS):
            data, digest = sent[block.start : block.end], UNSIGNED.hash()
            digest.update(data[: wire.span(block.n, 0, block.n).start])
            for start in range(0, block.n, PIECE):
                end = min(start + PIECE, block.n)
                a, p = acc[: end - start], product[: end - start]
                digest.update(data[wire.span(block.n, start, end)])
                wire.accumulate(data, block.n, start, np.float32(0.25), a, p, first=False)

    def read() -> None:
        for _ in decoded(wire, [sent], n_elements, BLOCK_ELEMENTS):
            pass

    with torch.no_grad():
        packed(payload.extend)
    sent = memoryview(payload)
    return lambda: packed(len), added, read


def bytes_of_a_round(n_elements: int, block_elements: int, rounds: int) -> dict[str, list[float]]:
    """Return the bytes that 4 replicas together move in a round, by wire."""
    limits = Limits(small_bytes=0, block_elements=block_elements)
    wires: dict[str, dict[str, Any]] = {
        "fp32": {},
        "bf16, means too": {"wire": "bf16"},
        "int8, means too": {"wire": "int8"},
        "int4, means int8": {"wire": "int4"},
        "top8, means int4": {"wire": "top8"},
        "top8, each": {"wire": "top8", "mean_wire": "each"},
    }

    def moved(options: Mapping[str, Any], where: Mapping[str, Any]) -> list[int]:
        model = flat(n_elements)
        found = []
        with open_diloco(model, inner_steps=1_000_000, sync_buffers=False, limits=limits, **options, **where) as diloco:
            for _ in range(rounds):
                with torch.no_grad():
                    model.get_parameter("flat").add_(0.001 * (where["rank"] + 1))
                (report,) = diloco.sync()
                found.append(report.bytes_up + report.bytes_down)
        return found

    found = {}
    for name, options in wires.items():
        replicas = run_replicas(4, partial(moved, options))
        found[name] = [float(sum(each)) for each in zip(*replicas, strict=True)]
    return found


def flat(n_elements: int) -> nn.Module:
    model = nn.Module()
    model.flat = nn.Parameter(torch.randn(n_elements, generator=torch.Generator().manual_seed(0)))
    return model
