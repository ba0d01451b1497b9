"""The pseudo-gradient, anchor - live, and the way back into the live parameters.

Live tensors are looked up by name in every round, so replaced parameters are found; whatever dtype and device they
have, the arithmetic is float32 on the CPU. Gradients are never touched, so a gradient may be accumulated across a
round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import sqrt

import numpy as np
import torch
from torch import Tensor, nn

from diloco.errors import ContributionError
from diloco.fragments import Fragment, Slot
from diloco.rendezvous.proof import Proof
from diloco.rendezvous.training_state import Packed, shape_difference
from diloco.tensor_names import find_tensor
from diloco.wires.wire import BLOCK_ELEMENTS, PIECE, BlockWriter, NotFiniteError, Wire, blocks_of

Values = Sequence[tuple[Slot, Tensor]]
"""All tensors of a fragment, in their order."""
Parts = list[tuple[int, Tensor]]
"""Parts of tensors that follow each other, flat, each with its first element's number in the fragment."""


def live_tensors(model: nn.Module, fragment: Fragment) -> list[tuple[Slot, Tensor]]:
    """Return a fragment's tensors in the model, as they are now.

    Raises: ContributionError: the model has one of them no more.
    """
    return [(slot, find_tensor(model, slot.name, slot.kind).detach()) for slot in fragment.slots]


def check_shapes(live: Values, who: str) -> None:
    """Raises: ContributionError: a tensor has changed its shape."""
    for slot, values in live:
        if tuple(values.shape) != slot.shape:
            raise ContributionError(f"{who}: {shape_difference(slot.name, tuple(values.shape), slot.shape)}.")


def pack(
    live: Values,
    anchor: Tensor,
    kept: memoryview,
    *,
    wire: Wire,
    proof: Proof,
    start: int = 0,
    write: Callable[[memoryview], object] | None = None,
    who: str,
    block_elements: int = BLOCK_ELEMENTS,
) -> Packed:
    """Encode anchor - live in pieces that stay in the cache while each is digested and checked; write it by blocks.

    Args:
        live: all tensors of a fragment.
        kept: the bytes from `start` on go into this memory, as many as it holds.
        start: the first byte of a block.
        write: is handed each block, in order.

    Raises:
        ContributionError: it is not finite, or a tensor has changed its shape.
    """
    check_shapes(live, who)
    n_elements = anchor.numel()
    room = np.empty(min(PIECE, n_elements), np.float32)
    scratch = np.empty(wire.size(min(block_elements, n_elements)), np.uint8).data
    blocks, norms = [], []
    pieces = pieces_of(live, n_elements, block_elements)
    for n, begin, end in blocks_of(wire, n_elements, block_elements):
        inside = start <= begin and end <= start + len(kept)
        block = kept[begin - start : end - start] if inside else scratch[: end - begin]
        writer = BlockWriter(wire, block, n, proof.hash())
        for at in range(0, n, PIECE):
            first, parts = next(pieces)
            values = wire.place(block, n, at, room[: min(PIECE, n - at)])
            subtract_parts(anchor, first, parts, torch.from_numpy(values))
            try:
                writer.write(values, at)
            except NotFiniteError:
                _refuse_what_is_not_finite(live, anchor, who)
                raise ContributionError(f"{who}: a value is too large for wire={wire.name!r}.") from None
        blocks.append(writer.digest())
        norms.append(sqrt(writer.square))
        if write is not None:
            write(block)
    return Packed(tuple(blocks), tuple(norms), kept, start)


def has_moved(live: Values, anchor: Tensor) -> bool:
    """Tell whether a live value is another than the anchor's, in as many digits as the model has.

    By pieces, since work is mostly in the first: a whole embedding would be copied for it in each round.
    """
    for slot, values in live:
        flat, of_slot, dtype = values.reshape(-1), anchor[slot.start : slot.end], getattr(torch, slot.dtype)
        for at in range(0, of_slot.numel(), PIECE):
            here, there = flat[at : at + PIECE], of_slot[at : at + PIECE]
            if not torch.equal(there.to(dtype), here.cpu().to(dtype)):
                return True
    return False


def difference(model: nn.Module, fragment: Fragment, anchor: Tensor, out: Tensor) -> None:
    """Write anchor - live to `out`."""
    for slot, live in live_tensors(model, fragment):
        subtract_live(anchor[slot.start : slot.end], live.reshape(-1), out[slot.start : slot.end])


def subtract_parts(anchor: Tensor, first: int, parts: Parts, out: Tensor) -> None:
    """Write anchor - live to `out` for a piece of a fragment that begins with its element `first`."""
    for number, part in parts:
        end = number + part.numel()
        subtract_live(anchor[number:end], part, out[number - first : end - first])


def subtract_live(anchor: Tensor, live: Tensor, out: Tensor) -> None:
    """Write anchor - live to `out`; all are flat and of one size, `live` of any dtype and on any device."""
    if live.dtype != torch.float32 or live.device.type != "cpu":
        live = out.copy_(live)
    torch.sub(anchor, live, out=out)


def set_live(model: nn.Module, fragment: Fragment, values: Tensor) -> None:
    """Copy a flat fragment into the model."""
    for slot, live in live_tensors(model, fragment):
        live.copy_(values[slot.start : slot.end].view(slot.shape))


def pieces_of(live: Values, n_elements: int, block: int) -> Iterator[tuple[int, Parts]]:
    """Yield pieces of a fragment: the first element, and the parts of tensors that it is made of. None crosses a block.

    Parts are views of tensors that are contiguous.
    """
    first, parts = 0, Parts()
    for slot, values in live:
        flat, at = values.reshape(-1), slot.start
        while at < slot.end:
            block_start = first // block * block
            end_of_piece = min(first + PIECE, block_start + block, n_elements)
            end = min(slot.end, end_of_piece)
            parts.append((at, flat[at - slot.start : end - slot.start]))
            at = end
            if end == end_of_piece:
                yield first, parts
                first, parts = end, Parts()


def _refuse_what_is_not_finite(live: Values, anchor: Tensor, who: str) -> None:
    for slot, tensor in live:
        values = anchor[slot.start : slot.end] - tensor.reshape(-1).to(torch.float32).cpu()
        bad = int((~torch.isfinite(values)).sum())
        if bad:
            raise ContributionError(
                f"{who}: {slot.name!r} is not finite in {bad} of {values.numel()} values. "
                "The loss has probably diverged: lower the learning rate or clip gradients."
            )
