"""Writes the parts of a debug archive into one tar file. Everything passes through one `Masker` on its way."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from executors.cli.documents import DebugFile
from executors.errors import CorruptObjectError, KeyNotFoundError, ReplicasError, StoreError
from executors.masking import Masker
from executors.store.artifacts import replacing
from executors.store.parallel import within
from executors.view.report.text import one_line

PART_S, SLOW_PART_S = 20.0, 90.0  # seconds that one part may take, and one that asks services or reads much
MAX_BYTES = 512 << 20  # of all files together, before compression
MAX_SECRET = 64 << 10  # characters of a secret
MAX_SILENT = 3  # parts that may time out in a row before the others from the same store are left out


@dataclass(frozen=True)
class Part:
    """A part of the archive: one file, or several files that are read together.

    Example:
        Part("keys.txt", lambda: [("keys.txt", "brave-otter-7f3a/run.json")])
    """

    name: str
    """The path in the archive. A folder ends with a slash."""
    read: Callable[[], Sequence[tuple[str, Any]]]
    """Returns the files of the part: the path of each, and its content as a text or as a JSON value."""
    size_bytes: int | None = None
    """The largest size of the part. None: not known before it is read."""
    limit_s: float = PART_S
    """The longest time that the part may take, in seconds."""
    asks_store: bool = True
    """True if the part is read from the store of the run."""


@dataclass
class Written:
    """The content of an archive that was written."""

    files: list[DebugFile] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """A masked sentence for each part that could not be read whole."""
    size_bytes: int = 0
    """The size of the archive."""


class ArchiveWriter:
    """Reads parts, masks them, and writes them into an archive.

    Args:
        folder: the folder in the archive that has all files.
        masker: masks names, contents and messages.
        where: the url of the store, for messages.

    Example:
        ArchiveWriter("replicas-debug-otter", Masker(), store.url).write(Path("otter.tar.gz"), parts, {}, print)
    """

    def __init__(self, folder: str, masker: Masker, where: str) -> None:
        self._folder = folder
        self._masker = masker
        self._where = where
        self._names: set[str] = set()
        self.problems: list[str] = []
        """Sentences about parts that were not read whole. Readers of parts append to it."""

    def write(
        self, path: Path, parts: Sequence[Part], about: dict[str, Any], on_progress: Callable[[str], None]
    ) -> Written:
        """Write the archive, and return what it has. An older file is replaced only when the new one is complete.

        Only this user can read the file. Equal parts give equal bytes.

        Args:
            path: the file.
            parts: the parts, in the order of the archive.
            about: more fields of the file `manifest.json`, which comes last.
            on_progress: called with a short text for each part.

        Raises:
            OSError: the file cannot be written.
        """
        written = Written()
        with replacing(path) as file:
            os.chmod(file.fileno(), 0o600)
            # Neither the time nor the name of this file is in the archive.
            with (
                gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed,
                tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as tar,
            ):
                for name, data in self._texts(parts, on_progress):
                    self._add(tar, name, data, written)
                written.problems = [self._masker.text(one_line(each, 600)) for each in dict.fromkeys(self.problems)]
                manifest = {**about, "files": list(written.files), "problems": written.problems}
                text = json.dumps(self._masker.json(manifest), indent=1) + "\n"
                self._add(tar, "manifest.json", text.encode(errors="replace"), written)
            written.size_bytes = file.tell()
        return written

    def _texts(self, parts: Sequence[Part], on_progress: Callable[[str], None]) -> Iterator[tuple[str, bytes]]:
        """Yield the masked content of each file. A part that cannot be read is a problem and not the end."""
        total, n_silent = 0, 0
        for number, part in enumerate(parts, start=1):
            on_progress(f"{number} of {len(parts)}, {part.name}")
            if part.asks_store and n_silent >= MAX_SILENT:
                self.problems.append(f"{part.name}: not read, because the store did not answer for other parts")
                continue
            try:
                found = within(part.limit_s, part.read, self._where)
            except Exception as error:  # noqa: BLE001 - a broken run is the reason for this command
                # A damaged or missing object is an answer.
                is_answer = not isinstance(error, StoreError) or isinstance(
                    error, CorruptObjectError | KeyNotFoundError
                )
                n_silent += part.asks_store and not is_answer
                why = str(error) if isinstance(error, ReplicasError | OSError) else f"{type(error).__name__}: {error}"
                self.problems.append(f"{part.name}: {why}")
                continue
            n_silent = 0 if part.asks_store else n_silent
            for name, content in found:
                if total > MAX_BYTES:
                    self.problems.append(f"{name}: left out, because the archive has {MAX_BYTES >> 20} MiB already")
                    continue
                try:
                    text = content if isinstance(content, str) else None
                    data = self._masked(content) if text is None else self._masker.text(text)
                except (ValueError, RecursionError) as error:
                    self.problems.append(f"{name}: {type(error).__name__}")
                    continue
                encoded = data.encode(errors="replace")
                total += len(encoded)
                yield name, encoded

    def _masked(self, content: Any) -> str:
        if isinstance(content, Page):
            return content.render(self._masker.json(content.document))
        if isinstance(content, Lines):
            return "".join(json.dumps(self._masker.json(each), ensure_ascii=False) + "\n" for each in content.values)
        if isinstance(content, LogEnd):
            return content.masked(self._masker)
        return json.dumps(self._masker.json(content), indent=1, ensure_ascii=False) + "\n"

    def _add(self, tar: tarfile.TarFile, name: str, data: bytes, written: Written) -> None:
        name = f"{self._folder}/{self._masker.name(name)}"
        stem, dot, ending = name.rpartition(".")
        number = 2
        while name in self._names:  # two keys may have the same name without their unusual characters
            name, number = f"{stem}-{number}{dot}{ending}" if stem else f"{name}-{number}", number + 1
        self._names.add(name)
        entry = tarfile.TarInfo(name[:250])
        entry.size, entry.mode, entry.mtime = len(data), 0o600, 0
        tar.addfile(entry, io.BytesIO(data))
        written.files.append({"name": name[:250], "size_bytes": len(data)})


@dataclass(frozen=True)
class Lines:
    """JSON values that are written one a line."""

    values: Sequence[Any]


@dataclass(frozen=True)
class LogEnd:
    """The end of a log."""

    text: str
    max_characters: int
    """The number of characters to keep."""
    is_cut: bool = False
    """True if the text begins within the log."""

    def masked(self, masker: Masker) -> str:
        """Return the end of the log. No part of a secret is left, also not of one at the cut."""
        text = self.text
        if self.is_cut:
            # The first line may begin within a secret. A line that is longer than all secrets is kept in part.
            end = text.find("\n", 0, MAX_SECRET)
            text = masker.text(text[end + 1 :]) if end >= 0 else masker.text(text)[MAX_SECRET:]
        else:
            text = masker.text(text)
        if len(text) <= self.max_characters:
            return text
        start = len(text) - self.max_characters
        return text[text.find("\n", start) + 1 or start :]


@dataclass(frozen=True)
class Page:
    """A document that a function makes into a page after it was masked."""

    document: Any
    render: Callable[[Any], str]
