"""A directory store that counts bytes: payload bytes exactly, and all others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from diloco.rendezvous.frames import head_bytes
from diloco.rendezvous.round import Layout, Limits
from diloco.wires import FP32
from executors.store import Buffer, Data, Produce
from executors.store.file import FileStore
from executors.store.protocol import buffers_of


@dataclass
class Bytes:
    """The bytes of one direction."""

    payload: int = 0
    """Payloads: pseudo-gradients and means."""
    other: int = 0
    """Heads, seals, claims and snapshots."""


class CountingStore(FileStore):
    """Counts for a rendezvous in which each replica sends one fragment and reduces one shard of it."""

    def __init__(self, root: Path, fragment_bytes: int, n_shards: int) -> None:
        super().__init__(root)
        self.read, self.written = Bytes(), Bytes()
        self._layout = Layout(fragment_bytes // 4, Limits(), FP32, FP32)
        self._n_shards = n_shards
        self._streamed: set[str] = set()
        """Objects that this process has created. A read of them is mapped from the same memory, so no bytes move."""

    def reset(self) -> None:
        self.read, self.written = Bytes(), Bytes()

    def put_if_absent(self, key: str, data: Data) -> bool:
        self._count(self.written, key, 0, sum(map(len, buffers_of(data))))
        return super().put_if_absent(key, data)

    def put_if_absent_streamed(self, key: str, head_bytes: int, produce: Produce) -> bool:
        def counting(write: Callable[[Buffer], None]) -> Buffer:
            end = head_bytes

            def count_and_write(piece: Buffer) -> None:
                nonlocal end
                end += len(piece)
                write(piece)

            head = produce(count_and_write)
            self._count(self.written, key, 0, end)
            self._streamed.add(key)
            return head

        return super().put_if_absent_streamed(key, head_bytes, counting)

    def put(self, key: str, data: Data) -> None:
        self._count(self.written, key, 0, sum(map(len, buffers_of(data))))
        super().put(key, data)

    def get(self, key: str, *, start: int = 0, size: int | None = None) -> memoryview:
        data = super().get(key, start=start, size=size)
        if key not in self._streamed:
            self._count(self.read, key, start, start + len(data))
        return data

    def _count(self, where: Bytes, key: str, start: int, end: int) -> None:
        *_, kind, number = ("", *key.split("/"))
        head = end
        if kind == "contribution":
            head = self._layout.head_bytes
        elif kind == "mean":
            shard = self._layout.shard(int(number), self._n_shards)
            head = head_bytes(shard.end_block - shard.first_block)
        payload = max(0, end - max(start, head))
        where.payload += payload
        where.other += end - start - payload
