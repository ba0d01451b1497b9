"""The files that a replica kept with `save_artifact`, seen from outside.

Any user who can write to a store chooses the names there, so a name does not say where a file may be written.
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
    """Say why a name cannot be a path below a folder; None if it can."""
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
    """A file that a replica kept with `save_artifact`."""

    rank: int
    name: str
    size_bytes: int
    store: Store
    key: str

    @cached_property
    def problem(self) -> str | None:
        """Why the name cannot be a path below a folder; None if it can."""
        return problem_of(self.name)

    def read(self) -> memoryview:
        """Return the file's content."""
        return self.store.get(self.key)

    def parts(self) -> Iterator[memoryview]:
        """Yield the file's content as it is now, which may be newer than the listing, in parts that fit into memory.

        Raises:
            StoreError: it cannot be read, or was replaced meanwhile.
        """
        with contextlib.suppress(CorruptObjectError):  # by now it is too large
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
        """Write the content to a file, all of it or nothing, over the file if there is one; make its folders.

        Raises:
            OSError: it cannot be written to; or the path is a folder, a device, a pipe.
            StoreError: the content cannot be read, or was replaced meanwhile.
        """
        parts = self._parts_from_the_first()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with replacing(Path(path)) as file:
            file.writelines(parts)

    def save_below(self, folder: Path) -> Path:
        """Write the content under its name below a folder, and nowhere else, all of it or nothing; return where.

        Raises:
            OSError: the name cannot be a path, or something is in the way.
            StoreError: the content cannot be read, or was replaced meanwhile.
        """
        if self.problem is not None:
            raise OSError(self.problem)
        path = folder / self.name
        parts = self._parts_from_the_first()
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.parent.resolve().is_relative_to(folder.resolve()):
            raise OSError("a symbolic link on the way leads out of the folder")
        with replacing(path) as file:
            file.writelines(parts)
        return path

    def _entry(self) -> Entry:
        for entry in self.store.list(self.key):
            if entry.key == self.key:
                return entry
        raise KeyNotFoundError(f"No object {self.key!r} in {self.store.url}.", key=self.key, url=self.store.url)

    def _parts_from_the_first(self) -> Iterator[memoryview]:
        """Return the parts when the first is read: no folder is made for what cannot be read."""
        parts = self.parts()
        return chain([next(parts, memoryview(b""))], parts)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the place of another, or of a link, all of it or nothing.

    Raises:
        OSError: there is no such folder, or it cannot be written to; or the path is a device, a pipe, a folder.
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
    """Return the files that the attempts of a rank kept, whatever their names; of one name the newest attempt's.

    An attempt that continues from a checkpoint does not save again the files that earlier attempts saved.
    The newest attempt's come first: where two names cannot both be paths below a folder, the newer is written.

    Args:
        prefix: of all attempts' objects.
    """
    found = [(match, entry) for entry in store.list(prefix) if (match := KEPT.fullmatch(entry.key, len(prefix)))]
    kept: dict[str, Artifact] = {}
    for match, entry in sorted(found, key=lambda each: -int(each[0][1])):
        kept.setdefault(match[2], Artifact(rank, match[2], entry.size_bytes, store, entry.key))
    return list(kept.values())
