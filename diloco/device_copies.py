"""Copies tensors between a CUDA device and pinned memory, on a separate CUDA stream, while training continues.

Each side waits only for the copy that it needs. The next optimizer step waits until its old values were read. The round
runner waits before it packs, and again until the values to merge are on the device. The training thread waits for no
copy. Parameters are copied in their own dtype and converted to float32 on the CPU, so a bf16 value needs two bytes. The
order of events follows torch's notes on CUDA semantics. This module was not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diloco.fragments import Values


class DeviceCopies:
    """The stream, events and copies of one fragment.

    Args:
        device: the CUDA device of the fragment's parameters.

    Example:
        copies = DeviceCopies.of(live)
        if copies is not None:
            copies.hold(live, memory)
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None
        self._kept_bytes = 0
        """The size of the largest copies so far."""
        self._narrow: list[tuple[Tensor, Tensor]] = []
        """For each tensor that is not float32: its place in the memory, and its copy in its own dtype."""

    @classmethod
    def of(cls, live: Values) -> DeviceCopies | None:
        """Return the `DeviceCopies` for some tensors. None: the tensors are not all on one CUDA device.

        Args:
            live: the tensors of a fragment.
        """
        devices = {values.device for _, values in live}
        return cls(next(iter(devices))) if len(devices) == 1 and next(iter(devices)).type == "cuda" else None

    def take_room(self, n_bytes: int) -> bool:
        """Return True if the device has memory for copies and as much again for the training. Then make the copies.

        Args:
            n_bytes: the size of the copies.
        """
        # The driver counts the memory of earlier copies as used, because torch keeps it for further copies of this
        # stream. Without it, a nearly full GPU would have room for the first copies alone.
        if 2 * n_bytes > torch.cuda.mem_get_info(self._device)[0] + self._kept_bytes:
            return False
        self._kept_bytes = max(self._kept_bytes, n_bytes)
        return True

    def hold(self, live: Values, memory: Tensor) -> None:
        """Begin to copy live parameters into pinned memory. The next call on the current stream may change the
        parameters.

        Args:
            live: the tensors of a fragment.
            memory: (n_elements,) float32, pinned.
        """
        side, current = self._side, torch.cuda.current_stream(self._device)
        side.wait_stream(current)
        tensors = [values for _, values in live]
        has_room = self.take_room(sum(values.nbytes for values in tensors))
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
        """Wait until the held values are in their memory."""
        if self._copied is not None:
            self._copied.synchronize()  # this call releases the interpreter's lock while it waits
            for to, narrow in self._narrow:
                to.copy_(narrow)
        self._copied, self._narrow = None, []

    def copy_to_device(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Copy the values to merge to the device, and return the copies. The pieces may change after this call.

        Args:
            pieces: the values, in pinned memory.
        """
        with torch.cuda.stream(self._side):
            copies = [piece.to(self._device, non_blocking=True) for piece in pieces]
            copied = self._side.record_event()
        # The merge returns the pieces to the pool, and another fragment writes to them at once. So it is not enough
        # that the stream of the training waits. The call runs in the round runner, so training continues.
        copied.synchronize()
        return copies

    def use_on_stream(self, copies: Sequence[Tensor]) -> None:
        """Keep the memory of copies from `copy_to_device` until the current stream has read them.

        Args:
            copies: the copies.
        """
        current = torch.cuda.current_stream(self._device)
        for piece in copies:
            piece.record_stream(current)
