"""Copies between a CUDA device and the memory a fragment is held in, on a stream of their own.

Nobody waits for them but who needs what is copied: the next optimizer step only for what it would overwrite, the rounds
before they pack, and the training before it adds what has landed. Parameters are copied in their own dtype, so bf16
moves two bytes a value, and widened on the CPU. Written after torch's notes on CUDA semantics; not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diloco.fragments import Values


class DeviceCopies:
    """What one fragment needs for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None
        self._narrow: list[tuple[Tensor, Tensor]] = []
        """Where in the memory what has another dtype goes, and its copy."""
        self._landed: torch.cuda.Event | None = None

    @classmethod
    def of(cls, live: Values) -> DeviceCopies | None:
        """Return what copies these tensors, if all are on one CUDA device."""
        devices = {values.device for _, values in live}
        return cls(next(iter(devices))) if len(devices) == 1 and next(iter(devices)).type == "cuda" else None

    def hold(self, live: Values, memory: Tensor) -> None:
        """Begin to copy live parameters into pinned memory; what comes next on the current stream may change them."""
        side, current = self._side, torch.cuda.current_stream(self._device)
        side.wait_stream(current)
        tensors = [values for _, values in live]
        has_room = 2 * sum(values.nbytes for values in tensors) <= torch.cuda.mem_get_info(self._device)[0]
        self._narrow = []
        with torch.cuda.stream(side):
            sources = [values.clone() for values in tensors] if has_room else tensors
            cloned = side.record_event()
            for (slot, _), source in zip(live, sources, strict=True):
                to = memory[slot.start : slot.end].view(slot.shape)
                if source.dtype != torch.float32:
                    narrow = torch.empty(slot.shape, dtype=source.dtype, device="cpu", pin_memory=True)
                    self._narrow.append((to, narrow))
                    to = narrow
                to.copy_(source, non_blocking=True)
            self._copied = side.record_event()
        for values in tensors:
            values.record_stream(side)
        current.wait_event(cloned if has_room else self._copied)

    def wait(self) -> None:
        """Return when what is held is in its memory."""
        if self._copied is not None:
            self._copied.synchronize()  # gives up the interpreter's lock
            for to, narrow in self._narrow:
                to.copy_(narrow)
        self._copied, self._narrow = None, []

    def land(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Begin to copy to the device what is to be merged."""
        with torch.cuda.stream(self._side):
            landed = [piece.to(self._device, non_blocking=True) for piece in pieces]
            self._landed = self._side.record_event()
        return landed

    def arrive(self, landed: Sequence[Tensor]) -> None:
        """Let the current stream wait for what was landed."""
        current = torch.cuda.current_stream(self._device)
        if self._landed is not None:
            current.wait_event(self._landed)
        for piece in landed:
            piece.record_stream(current)
