"""Reads the files that replicas kept with `save_artifact`, and writes them into a folder.

Any user who can write to a store chooses the names there. So a name is checked before a file is written under it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from executors.errors import CorruptObjectError, KeyNotFoundError, StoreError
from executors.store.protocol import MAX_KEY_BYTES, MAX_SEGMENT_BYTES, Entry, Store
from executors.store.records import get_at_most

PART_BYTES = 256 << 20
KEPT = re.compile(r"(0|[1-9][0-9]{0,3})/artifacts/(.*)", re.DOTALL)


def problem_of(name: str) -> str | None:
    """Return the reason why a name cannot be a path below a folder. None if it can.

    Args:
        name: the name of an artifact.

    Example:
        problem_of("../model.pt")
    """
    segments = name.split("/")
    encoded = [segment.encode(errors="surrogatepass") for segment in segments]
    if not name:
        return "it has no name"
    if any(segment in ("", ".", "..") for segment in segments):
        return "its name has an empty, '.' or '..' part"
    if not name.isprintable():
        return "its name has characters that cannot be shown"
    if max(map(len, encoded)) > MAX_SEGMENT_BYTES or sum(map(len, encoded)) > MAX_KEY_BYTES:
        return "its name is too long"
    return None


@dataclass(frozen=True)
class Artifact:
    """A file that a replica kept with `save_artifact`.

    Example:
        for artifact in run.artifacts():
            artifact.save_below(Path("results"))
        artifact.save("model.pt")
        size_bytes = sum(len(part) for part in artifact.parts())
        content = bytes(artifact.read())
    """

    rank: int
    """The rank that kept the file."""
    name: str
    """The name that the replica chose, with slashes between its parts."""
    size_bytes: int
    """The size of the file when it was listed."""
    store: Store
    """The store of the run."""
    key: str
    """The key of the object."""

    @cached_property
    def problem(self) -> str | None:
        """The reason why the name cannot be a path below a folder. None if it can."""
        return problem_of(self.name)

    def read(self) -> memoryview:
        """Return the file's content.

        Raises:
            StoreError: the content cannot be read.
        """
        return self.store.get(self.key)

    def parts(self) -> Iterator[memoryview]:
        """Yield the file's content in parts that fit into memory. The content may be newer than the listing.

        Raises:
            StoreError: the content cannot be read, or was replaced while it was read.
        """
        with contextlib.suppress(CorruptObjectError):  # the file has grown since it was listed
            if self.size_bytes <= PART_BYTES:
                yield get_at_most(self.store, self.key, PART_BYTES)
                return
        now = self._entry()
        for start in range(0, now.size_bytes, PART_BYTES):
            yield self.store.get(self.key, start=start, size=min(PART_BYTES, now.size_bytes - start))
        if self._entry() != now:
            message = f"{self.key!r} in {self.store.url} was replaced while it was read. Read it again."
            raise StoreError(message, key=self.key, url=self.store.url)

    def save(self, path: str | Path) -> None:
        """Write the content to a file. An older file is replaced, and missing folders are made.

        If anything fails, no file is written and an older file stays as it is.

        Args:
            path: the path of the file.

        Raises:
            OSError: the file cannot be written, or the path is a folder, a device or a pipe.
            StoreError: the content cannot be read, or was replaced while it was read.
        """
        parts = self._parts_from_the_first()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with replacing(Path(path)) as file:
            file.writelines(parts)

    def save_below(self, folder: Path) -> Path:
        """Write the content to a file below a folder, and return its path. The artifact's name is the path there.

        The file is never written outside of the folder. If anything fails, no file is written.

        Args:
            folder: the folder. It is made if it is missing.

        Raises:
            OSError: the name cannot be a path below the folder, or the file cannot be written.
            StoreError: the content cannot be read, or was replaced while it was read.
        """
        if self.problem is not None:
            raise OSError(self.problem)
        path = folder / self.name
        parts = self._parts_from_the_first()
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.parent.resolve().is_relative_to(folder.resolve()):
            raise OSError("a symbolic link on its path leads out of the folder")
        with replacing(path) as file:
            file.writelines(parts)
        return path

    def _entry(self) -> Entry:
        for entry in self.store.list(self.key):
            if entry.key == self.key:
                return entry
        raise KeyNotFoundError(f"No object {self.key!r} in {self.store.url}.", key=self.key, url=self.store.url)

    def _parts_from_the_first(self) -> Iterator[memoryview]:
        """Return the parts after reading the first, so that no folder is made for a file that cannot be read."""
        parts = self.parts()
        return chain([next(parts, memoryview(b""))], parts)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that replaces a file or a link when the block ends. After an error, the old file stays.

    Args:
        path: the path of the file.

    Raises:
        OSError: the folder is missing or cannot be written to, or the path is a device, a pipe or a folder.

    Example:
        with replacing(Path("rows.csv")) as file:
            file.write(b"step,loss\n")
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "There is no such folder", str(path.parent))
    part = path.with_name(f".{os.urandom(8).hex()}.part")
    try:
        with part.open("xb") as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def kept_artifacts(store: Store, rank: int, prefix: str) -> list[Artifact]:
    """Return the files that the attempts of a rank saved. If several attempts saved a file of one name, the newest
    attempt's file counts.

    All attempts count, because an attempt that continues from a checkpoint does not save the files of earlier attempts
    again. Files of newer attempts come first. So if two names cannot both be paths below a folder, the newer file is
    written.

    Args:
        store: the run's store.
        rank: the rank.
        prefix: the beginning of the keys of all attempts of the rank.

    Raises:
        StoreError: the store does not answer.

    Example:
        kept_artifacts(store, 3, replica_prefix("brave-otter-7f3a", 3))
    """
    found = [(match, entry) for entry in store.list(prefix) if (match := KEPT.fullmatch(entry.key, len(prefix)))]
    kept: dict[str, Artifact] = {}
    for match, entry in sorted(found, key=lambda each: -int(each[0][1])):
        kept.setdefault(match[2], Artifact(rank, match[2], entry.size_bytes, store, entry.key))
    return list(kept.values())
