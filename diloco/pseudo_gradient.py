"""The pseudo-gradient, anchor - live, and the way back into the live parameters.

Live tensors are looked up by name in every round, so replaced parameters are found; whatever dtype and device they
have, the arithmetic is float32 on the CPU. Gradients are never touched, so a gradient may be accumulated across a
round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isfinite, sqrt

import torch
from torch import Tensor, nn
from xxhash import xxh3_128

from diloco.errors import ContributionError
from diloco.fragments import Fragment, Slot
from diloco.rendezvous.frames import BLOCK_BYTES
from diloco.rendezvous.reduction import is_finite
from diloco.rendezvous.training_state import Packed, shape_difference

PIECE = 64 << 10
"""Elements that are packed at a time: anchor, live and the difference fit into a second-level cache of 1 MiB."""


def live_tensors(model: nn.Module, fragment: Fragment) -> list[tuple[Slot, Tensor]]:
    """Return a fragment's tensors in the model, as they are now."""
    return [
        (slot, (model.get_parameter if slot.kind == "parameter" else model.get_buffer)(slot.name).detach())
        for slot in fragment.slots
    ]


def pack(
    model: nn.Module,
    fragment: Fragment,
    anchor: Tensor,
    kept: Tensor,
    *,
    start: int = 0,
    write: Callable[[memoryview], object] | None = None,
    who: str,
    block_bytes: int = BLOCK_BYTES,
) -> Packed:
    """Compute anchor - live in pieces that stay in the cache while each is digested and checked; write it by blocks.

    Args:
        kept: the elements from `start` on go into this memory, as many as it holds.
        start: a multiple of the block.
        write: is handed each block, in order.

    Raises:
        ContributionError: it is not finite, or a tensor has changed its shape.
    """
    for slot, live in live_tensors(model, fragment):
        if tuple(live.shape) != slot.shape:
            raise ContributionError(f"{who}: {shape_difference(slot.name, tuple(live.shape), slot.shape)}.")
    block = block_bytes // 4
    scratch = torch.empty(min(block, fragment.n_elements))
    blocks, norms = [], []
    digest, square = xxh3_128(), 0.0
    for first, end, parts in _pieces(model, fragment, block):
        block_start = first // block * block
        block_end = min(block_start + block, fragment.n_elements)
        inside = start <= block_start and block_end <= start + kept.numel()
        whole = kept[block_start - start : block_end - start] if inside else scratch[: block_end - block_start]
        values = whole[first - block_start : end - block_start]
        for at, live in parts:
            subtract_live(anchor[at : at + live.numel()], live, values[at - first : at - first + live.numel()])
        digest.update(values.numpy().data)
        square += _square(model, fragment, anchor, values, who)
        if end == block_end:
            if write is not None:
                write(whole.numpy().data.cast("B"))
            blocks.append(digest.hexdigest())
            norms.append(sqrt(square))
            digest, square = xxh3_128(), 0.0
    return Packed(tuple(blocks), tuple(norms), kept.numpy().data.cast("B"), 4 * start)


def difference(model: nn.Module, fragment: Fragment, anchor: Tensor, out: Tensor) -> None:
    """Write anchor - live to `out`."""
    for slot, live in live_tensors(model, fragment):
        subtract_live(anchor[slot.start : slot.end], live.reshape(-1), out[slot.start : slot.end])


def subtract_live(anchor: Tensor, live: Tensor, out: Tensor) -> None:
    """Write anchor - live to `out`; all are flat and of one size, `live` of any dtype and on any device."""
    if live.dtype != torch.float32 or live.device.type != "cpu":
        live = out.copy_(live)
    torch.sub(anchor, live, out=out)


def set_live(model: nn.Module, fragment: Fragment, values: Tensor) -> None:
    """Copy a flat fragment into the model."""
    for slot, live in live_tensors(model, fragment):
        live.copy_(values[slot.start : slot.end].view(slot.shape))


def mix_live(model: nn.Module, fragment: Fragment, anchor: Tensor, mix: float, scratch: Tensor) -> None:
    """Set live to mix * live + (1 - mix) * anchor, in float32; `scratch` is of the fragment's size."""
    for slot, live in live_tensors(model, fragment):
        scratch[slot.start : slot.end].copy_(live.reshape(-1))
    set_live(model, fragment, scratch.lerp_(anchor, 1 - mix))


def _pieces(model: nn.Module, fragment: Fragment, block: int) -> Iterator[tuple[int, int, list[tuple[int, Tensor]]]]:
    """Yield pieces of the fragment: the first element, the one after the last, and the live parts it is made of.

    None crosses the end of a block.
    """
    first, parts = 0, []
    for slot, live in live_tensors(model, fragment):
        flat, at = live.reshape(-1), slot.start
        while at < slot.end:
            end_of_piece = min(first + PIECE, (first // block + 1) * block, fragment.n_elements)
            end = min(slot.end, end_of_piece)
            parts.append((at, flat[at - slot.start : end - slot.start]))
            at = end
            if end == end_of_piece:
                yield first, end, parts
                first, parts = end, []


def _square(model: nn.Module, fragment: Fragment, anchor: Tensor, values: Tensor, who: str) -> float:
    """Return the sum of the squares; finite values are shown to be so on the way."""
    square = float(torch.dot(values, values))
    if isfinite(square):
        return square
    if not is_finite(values.numpy()):
        _refuse(model, fragment, anchor, who)
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2


def _refuse(model: nn.Module, fragment: Fragment, anchor: Tensor, who: str) -> None:
    for slot, live in live_tensors(model, fragment):
        values = anchor[slot.start : slot.end] - live.reshape(-1).to(torch.float32).cpu()
        bad = int((~torch.isfinite(values)).sum())
        if bad:
            raise ContributionError(
                f"{who}: {slot.name!r} is not finite in {bad} of {values.numel()} values. "
                "The loss has probably diverged: lower the learning rate or clip gradients."
            )
