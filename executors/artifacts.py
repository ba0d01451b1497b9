"""What a replica kept with `save_artifact`, seen from outside.

Whoever can write to a store chooses the names there, so a name says nothing about where a file may be written.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from executors.replica import replica_key
from executors.store import Store
from executors.store.protocol import MAX_KEY_BYTES, MAX_SEGMENT_BYTES


@dataclass(frozen=True)
class Artifact:
    """A file that a replica kept with `save_artifact`."""

    rank: int
    name: str
    size_bytes: int
    store: Store
    key: str

    @cached_property
    def problem(self) -> str | None:
        """What keeps the name from being a path below any folder; None if nothing does."""
        segments = self.name.split("/")
        if not self.name:
            return "it has no name"
        if any(segment in ("", ".", "..") for segment in segments):
            return "its name has an empty, '.' or '..' part"
        if not self.name.isprintable():
            return "its name has characters that cannot be shown"
        encoded = [segment.encode(errors="surrogatepass") for segment in segments]
        if max(map(len, encoded)) > MAX_SEGMENT_BYTES or sum(map(len, encoded)) > MAX_KEY_BYTES:
            return "its name is too long"
        return None

    def read(self) -> memoryview:
        """Return its content."""
        return self.store.get(self.key)

    def save(self, path: str | Path) -> None:
        """Write it to a file, making the folders it needs."""
        data = self.read()  # first: nothing is made for what cannot be read
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(data)

    def save_below(self, folder: Path) -> Path:
        """Write it under its name below a folder, and nowhere else; return where.

        Raises:
            OSError: the name is not to be written to, or something is in the way.
            StoreError: it cannot be read.
        """
        if self.problem is not None:
            raise OSError(self.problem)
        path = folder / self.name
        data = self.read()
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.parent.resolve().is_relative_to(folder.resolve()):
            raise OSError("a symbolic link on the way leads out of the folder")
        with contextlib.suppress(FileNotFoundError):
            path.unlink()  # and not through it, if it is a link
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb") as file:
            file.write(data)
        return path


def find_artifacts(store: Store, run_id: str, rank: int, attempt: int) -> list[Artifact]:
    """List what stands where an attempt keeps its files, whatever its name."""
    prefix = replica_key(run_id, rank, attempt, "artifacts/")
    return [
        Artifact(rank, entry.key.removeprefix(prefix), entry.size_bytes, store, entry.key)
        for entry in store.list(prefix)
    ]
