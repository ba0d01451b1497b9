"""Text for the demo: the sources of the running Python's standard library, or a file or folder of the user's."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

MAX_BYTES = 24 << 20
HELD_OUT = 20
"""One chunk in so many is held out."""
CHUNK_BYTES = 8 << 10
SHORTEST_BYTES = 1 << 10


@dataclass(frozen=True)
class Text:
    """Bytes to learn from and bytes to be judged by."""

    name: str
    training: tuple[Tensor, ...]  # chunks of uint8
    held_out: Tensor  # (n,) uint8

    def share(self, rank: int, world_size: int) -> Tensor:
        """Return a replica's own part; when there are fewer chunks than replicas, several have the same."""
        chunks = self.training[rank::world_size] or (self.training[rank % len(self.training)],)
        return torch.cat(chunks)


def load_text(data: str | None = None) -> Text:
    """Read the text.

    Raises:
        FileNotFoundError: there is nothing at `data`.
        ValueError: there is too little text.
    """
    name, files = _files(data)
    joined = bytearray()
    for file in files:
        joined += file.read_bytes()
        if len(joined) >= MAX_BYTES:
            break
    if len(joined) < SHORTEST_BYTES:
        raise ValueError(f"{name} has {len(joined)} bytes of text; the demo needs at least {SHORTEST_BYTES}.")
    # small texts are cut finer, so that every replica has something; a window of 65 bytes must fit into each
    size = max(130, min(CHUNK_BYTES, len(joined) // (4 * HELD_OUT)))
    chunks = list(torch.split(torch.frombuffer(joined, dtype=torch.uint8)[:MAX_BYTES], size))
    if len(chunks[-1]) < size:
        chunks.pop()
    held_out = chunks[HELD_OUT - 1 :: HELD_OUT] or chunks[-1:]
    training = [chunk for index, chunk in enumerate(chunks) if index % HELD_OUT != HELD_OUT - 1]
    if len(chunks) < HELD_OUT:
        training = chunks[:-1]
    return Text(name, tuple(training), torch.cat(held_out))


def _files(data: str | None) -> tuple[str, list[Path]]:
    if data is None:
        library = Path(sysconfig.get_path("stdlib"))
        files = [p for p in library.rglob("*.py") if not {"site-packages", "test", "tests"} & set(p.parts)]
        return "the sources of Python's standard library", sorted(files)
    path = Path(data).expanduser()
    if path.is_file():
        return str(path), [path]
    if path.is_dir():
        return str(path), sorted(p for p in path.rglob("*") if p.is_file())
    raise FileNotFoundError(f"There is no file or folder {str(path)!r} to train on (data={data!r}).")
