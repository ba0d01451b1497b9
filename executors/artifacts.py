"""What a replica kept with `save_artifact`, seen from outside."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from executors.store import Store


@dataclass(frozen=True)
class Artifact:
    """A file that a replica kept with `save_artifact`."""

    rank: int
    name: str
    size_bytes: int
    store: Store
    key: str

    def read(self) -> memoryview:
        """Return its content."""
        return self.store.get(self.key)

    def save(self, path: str | Path) -> None:
        """Write it to a file, making the folders it needs."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(self.read())
