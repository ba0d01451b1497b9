"""Saved buffers that are not averaged: each replica has its own, such as masks, tables, and statistics for which a wire
is too coarse."""

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
"""Values of a table, as quantised weights, that takes too long to read whenever state is kept."""


class LocalBuffers:
    """A model's own buffers, and what has become of them since.

    A `LARGE` table of whole numbers is read again only where it is another tensor, or torch has noted a write to it.
    Floats are always read: batch normalisation writes its statistics without a note.
    """

    def __init__(self, model: nn.Module, fragments: Sequence[Fragment]) -> None:
        self._model = model
        self._averaged = {slot.name for fragment in fragments for slot in fragment.slots}
        self._known: dict[str, tuple[ReferenceType[Tensor], tuple[int, int], bytes]] = {}
        """Of each large table, which tensor it was, what torch had noted of it, and its digest."""
        buffers = self._all()
        self._at_first = {name: self._digest(name, buffer) for name, buffer in buffers.items()}
        self.marks = {name: mark for name, buffer in buffers.items() if isfinite(mark := _mark(buffer))}
        """A number for each of several values, as they are at first, that tells those of two replicas apart."""

    @torch.no_grad()
    def give(self, kept: Mapping[str, Tensor]) -> None:
        """Take back what was kept, as far as the model has it."""
        for name, buffer in self._all().items():
            if name in kept and kept[name].shape == buffer.shape:
                buffer.copy_(kept[name])

    def changed(self) -> dict[str, Tensor]:
        """Return those that training has changed."""
        return {name: b for name, b in self._all().items() if self._digest(name, b) != self._at_first.get(name)}

    def _all(self) -> dict[str, Tensor]:
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
    """Return a number that depends on the places of values, too: permutations have the same ones. NaN: it has none."""
    if buffer.numel() < 2 or buffer.is_complex():
        return float("nan")
    values = buffer.reshape(-1)[:: -(-buffer.numel() // MARK_VALUES) | 1].cpu().double()  # odd: of all columns
    return float((values / torch.arange(1, len(values) + 1, device="cpu")).sum())


def _digest(values: Tensor) -> bytes:
    flat = values.detach().cpu().contiguous().reshape(-1)
    return xxh3_128(flat.view(torch.uint8).numpy().data).digest() if flat.numel() else b""
