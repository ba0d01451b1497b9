"""The body of a request over many buffers, and of a reply into one: nothing is joined, nothing is read twice."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

READ_BYTES = 256 * 1024  # what is read at once passes through a buffer of this size, which stays in the CPU's cache


class BufferBody:
    """A file over buffers, as an HTTP client wants it: `read`, `seek`, `tell` and `len`.

    A read within one buffer is a view of it. Only where small buffers meet are they joined, up to the size asked for.
    """

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = buffers
        self._size = sum(len(buffer) for buffer in buffers)
        self.seek(0)

    def __len__(self) -> int:
        return self._size

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: getattr(self, "_position", 0), os.SEEK_END: self._size}[whence]
        self._position = rest = min(max(0, base + offset), self._size)
        self._index = 0
        while self._index < len(self._buffers) and rest >= len(self._buffers[self._index]):
            rest -= len(self._buffers[self._index])
            self._index += 1
        self._offset = rest
        return self._position

    def read(self, size: int | None = None) -> bytes | memoryview:
        wanted = self._size - self._position if size is None or size < 0 else size
        piece = self._next(wanted)
        if len(piece) in (wanted, self._size - self._position + len(piece)):
            return piece
        pieces = []
        while len(piece):
            pieces.append(piece)
            wanted -= len(piece)
            piece = self._next(wanted)
        return b"".join(pieces)

    def _next(self, size: int) -> memoryview:
        """Return at most `size` bytes of the current buffer, and go on."""
        if self._index == len(self._buffers):
            return memoryview(b"")
        buffer = self._buffers[self._index]
        piece = buffer[self._offset : self._offset + size]
        self._position += len(piece)
        self._offset += len(piece)
        if self._offset == len(buffer):
            self._index, self._offset = self._index + 1, 0
        return piece


def read_into(body: Any, view: memoryview) -> bool:
    """Fill the view from a streaming reply; False if the reply ends before."""
    at = 0
    while at < len(view):
        count = body.readinto(view[at : at + READ_BYTES])
        if not count:
            return False
        at += count
    return True


def is_made_of(value: memoryview, buffers: Sequence[memoryview]) -> bool:
    """Tell whether a value is the buffers joined."""
    at = 0
    for buffer in buffers:
        if value[at : at + len(buffer)] != buffer:
            return False
        at += len(buffer)
    return at == len(value)
