"""Finds the buffers of a model that are not averaged. Each replica has its own, and saves those that training has
changed.

Examples are masks and tables, or running statistics if the wire is too coarse to average them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from xxhash import xxh3_128

from diloco.fragments import MARK_VALUES, Fragment
from diloco.tensor_names import saved_buffers

LARGE = 1 << 20
"""The largest table, in values, that is read at each save. A larger table, such as quantized weights, would take too
long.
"""


class LocalBuffers:
    """The buffers of a model that are not averaged, and whether training has changed them.

    A table of whole numbers with more than `LARGE` values is read again only if it is another tensor, or if torch has
    counted a write to it. Floats are always read, because batch normalization writes its statistics without that count.

    Args:
        model: the model.
        fragments: the fragments, which have the averaged buffers.

    Example:
        buffers = LocalBuffers(model, fragments)
        train()
        saved = buffers.changed()
    """

    def __init__(self, model: nn.Module, fragments: Sequence[Fragment]) -> None:
        self._model = model
        self._averaged = {slot.name for fragment in fragments for slot in fragment.slots}
        self._known: dict[str, tuple[ReferenceType[Tensor], tuple[int, int], bytes]] = {}
        """For each large table, by its name: the tensor, its address, torch's count of writes to it, and its digest."""
        buffers = self.all()
        self._at_first = {name: self._digest(name, buffer) for name, buffer in buffers.items()}
        self.marks = {name: mark for name, buffer in buffers.items() if isfinite(mark := _mark(buffer))}
        """For each buffer of several values, a number that identifies its first values, so that replicas can compare
        them.
        """

    @torch.no_grad()
    def give(self, kept: Mapping[str, Tensor]) -> None:
        """Load buffers that were saved. Buffers that the model does not have, or has with another shape, are ignored.

        Args:
            kept: the saved buffers, by name.
        """
        for name, buffer in self.all().items():
            if name in kept and kept[name].shape == buffer.shape:
                buffer.copy_(kept[name])

    def changed(self) -> dict[str, Tensor]:
        """Return the buffers that training has changed, by name."""
        return {name: b for name, b in self.all().items() if self._digest(name, b) != self._at_first.get(name)}

    def all(self) -> dict[str, Tensor]:
        """Return the buffers that are saved and not averaged, by name."""
        return {
            name: buffer
            for name, buffer in saved_buffers(self._model).items()
            if name not in self._averaged
            and type(buffer) is Tensor
            and buffer.layout == torch.strided
            and not buffer.is_meta
        }

    def _digest(self, name: str, buffer: Tensor) -> bytes:
        if buffer.numel() <= LARGE or buffer.is_floating_point() or buffer.is_complex() or buffer.is_inference():
            return _digest(buffer)
        written = (buffer.data_ptr(), buffer._version)
        if name in self._known:
            of, then, digest = self._known[name]
            if of() is buffer and then == written:
                return digest
        digest = _digest(buffer)
        self._known[name] = (ref(buffer), written, digest)
        return digest


def _mark(buffer: Tensor) -> float:
    """Return a number that identifies a buffer's values. NaN: the buffer is empty.

    The number also depends on the order of the values, because two random permutations have the same values.
    """
    if buffer.numel() < 2 or buffer.is_complex():
        return float("nan")
    values = (
        buffer.reshape(-1)[:: -(-buffer.numel() // MARK_VALUES) | 1].cpu().double()
    )  # an odd distance takes samples from all columns
    return float((values / torch.arange(1, len(values) + 1, device="cpu")).sum())


def _digest(values: Tensor) -> bytes:
    flat = values.detach().cpu().contiguous().reshape(-1)
    return xxh3_128(flat.view(torch.uint8).numpy().data).digest() if flat.numel() else b""
