"""The pseudo-gradient, anchor - live, and the way back into the live parameters.

Live tensors are looked up by name in every round, so replaced parameters are found; whatever dtype and device they
have, the arithmetic is float32 on the CPU. Gradients are never touched, so a gradient may be accumulated across a
round.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt

import torch
from torch import Tensor, nn
from xxhash import xxh3_128_hexdigest

from diloco.contract import shape_problem
from diloco.errors import ContributionError
from diloco.fragments import Fragment, Slot
from diloco.outer_optimizer import CHUNK
from diloco.records import BLOCK_BYTES
from diloco.reduction import is_finite
from diloco.work import Packed


def live_tensors(model: nn.Module, fragment: Fragment) -> list[tuple[Slot, Tensor]]:
    """Return a fragment's tensors in the model, as they are now."""
    return [
        (slot, (model.get_parameter if slot.kind == "parameter" else model.get_buffer)(slot.name).detach())
        for slot in fragment.slots
    ]


def check_shapes(model: nn.Module, fragment: Fragment, who: str) -> None:
    """Refuse parameters that no longer have the shape that was agreed.

    Raises: ContributionError: `who` and the first name.
    """
    for slot, live in live_tensors(model, fragment):
        if tuple(live.shape) != slot.shape:
            raise ContributionError(f"{who}: {shape_problem(slot.name, tuple(live.shape), slot.shape)}.")


def pack(
    model: nn.Module,
    fragment: Fragment,
    anchor: Tensor,
    payload: Tensor,
    *,
    who: str,
    block_bytes: int = BLOCK_BYTES,
) -> Packed:
    """Write anchor - live to `payload`, block by block, and digest each block while it is in the cache.

    Raises:
        ContributionError: it is not finite, or a tensor has changed its shape.
    """
    check_shapes(model, fragment, who)
    block = block_bytes // 4
    values = payload.numpy()
    blocks, norms = [], []
    done = 0
    for slot, live, start, end in _pieces(model, fragment, block):
        subtract_live(anchor, live, payload, start, end, slot)
        if end % block and end != fragment.n_elements:
            continue
        written = values[done:end]
        square = float(torch.dot(payload[done:end], payload[done:end]))
        if square == float("inf") or square != square:
            if not is_finite(written):
                _refuse(fragment, payload, end, who)
            square = float(torch.linalg.vector_norm(payload[done:end], dtype=torch.float64)) ** 2
        blocks.append(xxh3_128_hexdigest(written.data))
        norms.append(sqrt(square))
        done = end
    return Packed(values.data.cast("B"), tuple(blocks), tuple(norms))


def difference(model: nn.Module, fragment: Fragment, anchor: Tensor, out: Tensor) -> None:
    """Write anchor - live to `out`."""
    for slot, live, start, end in _pieces(model, fragment, fragment.n_elements):
        subtract_live(anchor, live, out, start, end, slot)


def subtract_live(anchor: Tensor, live: Tensor, out: Tensor, start: int, end: int, slot: Slot) -> None:
    """Write anchor - live to `out` for elements `start` to `end` of the fragment, which lie in one slot."""
    theta = live.reshape(-1)[start - slot.start : end - slot.start]
    if theta.dtype != torch.float32 or theta.device.type != "cpu":
        theta = out[start:end].copy_(theta)
    torch.sub(anchor[start:end], theta, out=out[start:end])


def set_live(model: nn.Module, fragment: Fragment, values: Tensor) -> None:
    """Copy a flat fragment into the model."""
    for slot, live in live_tensors(model, fragment):
        live.copy_(values[slot.start : slot.end].view(slot.shape))


def mix_live(model: nn.Module, fragment: Fragment, anchor: Tensor, mix: float, scratch: Tensor) -> None:
    """Set live to mix * live + (1 - mix) * anchor, in float32; `scratch` is of the fragment's size."""
    for slot, live in live_tensors(model, fragment):
        scratch[slot.start : slot.end].copy_(live.reshape(-1))
    for start in range(0, fragment.n_elements, CHUNK):
        end = min(start + CHUNK, fragment.n_elements)
        kept = scratch[start:end]
        kept.mul_(mix)
        kept.add_(anchor[start:end] * (1 - mix))
    set_live(model, fragment, scratch)


def _pieces(model: nn.Module, fragment: Fragment, block: int) -> Iterator[tuple[Slot, Tensor, int, int]]:
    """Yield the parts of a fragment's tensors that lie in one block each, in order."""
    for slot, live in live_tensors(model, fragment):
        start = slot.start
        while start < slot.end:
            end = min(slot.end, (start // block + 1) * block)
            yield slot, live, start, end
            start = end


def _refuse(fragment: Fragment, payload: Tensor, until: int, who: str) -> None:
    for slot in fragment.slots:
        values = payload[slot.start : min(slot.end, until)]
        bad = int((~torch.isfinite(values)).sum())
        if bad:
            raise ContributionError(
                f"{who}: {slot.name!r} is not finite in {bad} of {values.numel()} values. "
                "The loss has probably diverged: lower the learning rate or clip gradients."
            )
