"""FileStore: a directory as a store, with one file per object. The key is the path of the file.

An object is first written to an anonymous file, or to a hidden file if the system has no anonymous files. The file gets
its name when it is complete: by `link`, which fails if the name exists, or by `rename`, which replaces the old file. So
no reader ever sees half an object. Creation is exclusive across processes. On a network file system whose `link` works,
it is exclusive across machines, too.

A killed writer leaves nothing, or a hidden file. The next opening of the store removes hidden files that are older than
a day. They are in the store's directory itself. A separate folder would belong to its first writer, and other users
could not write to it.

No symbolic link below the store's directory is followed, because other users may be able to write there.

Nothing is fsynced. An object survives the death of its writer, but not a power cut.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from executors.errors import KeyNotFoundError, StoreError, UnsafeStoreError, UnwritableStoreError
from executors.process import open_unnamed
from executors.store.no_links import PATH_ONLY, open_without_links
from executors.store.protocol import (
    MAX_KEY_BYTES,
    Buffer,
    Data,
    Entry,
    Produce,
    buffers_of,
    check_key,
    check_range,
    check_size,
)

UNFINISHED = ".unfinished~"  # the names of hidden files begin with this text, so no key may begin with it
MAP_FROM_BYTES = 128 * 1024  # below this size, a copy is cheaper than the page faults of a mapping
ALIGNED_BYTES = 2 << 20  # a large page on x86 and most ARM machines
PRUNING_RACES = 1000  # how often in a row another process may remove a folder before this one uses it
LEFTOVER_S = 86400  # a hidden file that has not changed for this time was left by a killed writer
WRITEV_MAX_BUFFERS = 1024  # IOV_MAX
WRITEV_MAX_BYTES = 1 << 30  # Linux transfers at most 0x7ffff000 bytes a call
NO_ANONYMOUS_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL)
FULL = (errno.ENOSPC, errno.EDQUOT)
READ_ONLY = (errno.EACCES, errno.EROFS, *FULL)
WRITING = ("create", "write")

T = TypeVar("T")


class FileStore:
    """The store that `open_store("file:///…")` opens.

    Args:
        root: the directory. It is created if it is missing.

    Raises:
        UnsafeStoreError: `link` does not create exclusively on this file system.
        StoreError: the directory cannot be created.

    Example:
        FileStore(Path("/tmp/runs")).put_if_absent("greeting", b"hello")
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._url = self.root.as_uri()
        with self._translated_errors("use the directory"):
            self.root.mkdir(parents=True, exist_ok=True)
        # Symbolic links on the way to the directory are the owner's choice. They are resolved once, here. A short path
        # also makes each later opening faster.
        self._folder = os.path.realpath(self.root)
        self._check_exclusive_creation()

    @property
    def url(self) -> str:
        return self._url

    def put_if_absent(self, key: str, data: Data) -> bool:
        path = self._path(key)
        if os.path.isfile(path):
            return False  # if the object exists, this check saves a useless write
        with self._translated_errors("create", key), self._new_file() as file:
            file.write(data)
            return file.link(path)

    def put_if_absent_streamed(self, key: str, head_bytes: int, produce: Produce) -> bool:
        path = self._path(key)
        if os.path.isfile(path):
            return False
        with self._translated_errors("create", key), self._new_file() as file:
            os.lseek(file.descriptor, head_bytes, os.SEEK_SET)
            pieces = _AlignedWrites(file, head_bytes)
            head = produce(pieces.write)
            file.write(pieces.rest)
            if len(head) != head_bytes:
                raise ValueError(f"The head of {key!r} has {len(head)} bytes, but head_bytes is {head_bytes}.")
            os.lseek(file.descriptor, 0, os.SEEK_SET)
            file.write(head)
            return file.link(path)

    def put(self, key: str, data: Data) -> None:
        path = self._path(key)
        with self._translated_errors("write", key), self._new_file() as file:
            file.write(data)
            staged = self._hidden_path()
            file.link(staged)
            try:
                _in_folder_of(self._folder, path, lambda folder, name: os.replace(staged, name, dst_dir_fd=folder))
            except OSError:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(staged)
                raise

    def get(self, key: str, *, start: int = 0, size: int | None = None) -> memoryview:
        # The size is checked first, because a read of a mapping beyond the end of its file is a SIGBUS.
        return self._read(
            key, lambda file, size_bytes: _read(file, start, check_range(key, self.url, size_bytes, start, size))
        )

    def get_at_most(self, key: str, max_bytes: int) -> memoryview:
        def copy(descriptor: int, size_bytes: int) -> memoryview:
            # The file is copied and not mapped. If a writer truncates a mapped file, the reader dies of a SIGBUS.
            size, read = check_size(key, self.url, size_bytes, max_bytes), bytearray()
            while len(read) < size and (piece := os.pread(descriptor, size - len(read), len(read))):
                read += piece
            return memoryview(read).toreadonly()

        return self._read(key, copy)

    def list(self, prefix: str) -> Iterator[Entry]:
        folder, _, start_of_name = prefix.rpartition("/")
        segments = folder.split("/") if "/" in prefix else []
        if any(segment in ("", ".", "..") for segment in segments) or prefix.startswith(UNFINISHED):
            return iter(())  # no key begins with this text
        return self._walk(os.path.join(self._folder, folder), f"{folder}/" if folder else "", start_of_name)

    def delete(self, key: str) -> None:
        path = self._path(key)
        with self._translated_errors("delete", key):
            try:
                with _opened(os.path.dirname(path)) as folder:
                    os.unlink(os.path.basename(path), dir_fd=folder)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return
        with contextlib.suppress(OSError):  # the loop ends at the first folder that is not empty
            while (path := os.path.dirname(path)) != self._folder:
                os.rmdir(path)

    def _path(self, key: str) -> str:
        check_key(key, self._url)
        if key.startswith(UNFINISHED):
            raise ValueError(f"Bad key {key!r} for {self.url}: names that begin with {UNFINISHED!r} are reserved.")
        return os.path.join(self._folder, key)

    def _hidden_path(self) -> str:
        return f"{self._folder}/{UNFINISHED}{os.urandom(12).hex()}"

    @contextlib.contextmanager
    def _new_file(self) -> Iterator[_NewFile]:
        """Open a file without a name. It disappears when the block ends unless `link` gave it a name."""
        hidden = None
        try:
            descriptor, path = open_unnamed(self._folder, 0o666)
        except OSError as error:  # macOS, and some file systems, have no files without a name
            if error.errno not in NO_ANONYMOUS_FILES:
                raise
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
            path = hidden = self._hidden_path()
            descriptor = _in_folder_of(
                self._folder, hidden, lambda folder, name: os.open(name, flags, 0o666, dir_fd=folder)
            )
        try:
            yield _NewFile(descriptor, path, self._folder)
        finally:
            os.close(descriptor)
            if hidden is not None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(hidden)

    def _read(self, key: str, read: Callable[[int, int], memoryview]) -> memoryview:
        """Open an object, and return what `read` makes of the descriptor and the size of the file."""
        path = self._path(key)
        with self._translated_errors("read", key):
            try:
                # Without O_NONBLOCK, a named pipe in place of the file would block this process.
                descriptor = open_without_links(path, os.O_RDONLY | os.O_NONBLOCK)
            except (FileNotFoundError, NotADirectoryError):
                raise KeyNotFoundError(f"No object {key!r} in {self.url}.", key=key, url=self.url) from None
            try:
                status = os.fstat(descriptor)
                if stat.S_ISREG(status.st_mode):
                    return read(descriptor, status.st_size)
            finally:
                os.close(descriptor)
        raise KeyNotFoundError(f"No object {key!r} in {self.url}: it is a folder of keys.", key=key, url=self.url)

    def _walk(self, folder: str, folder_key: str, start_of_name: str) -> Iterator[Entry]:
        if len(folder_key) > MAX_KEY_BYTES:
            return  # no key is this long, and a deeper recursion would run out of stack
        rows: list[tuple[str, os.stat_result | None]] = []
        with self._translated_errors("list", folder_key):
            try:
                with _opened(folder, os.O_RDONLY) as descriptor, os.scandir(descriptor) as found:
                    for entry in found:
                        is_hidden = not folder_key and entry.name.startswith(UNFINISHED)
                        if is_hidden or not entry.name.startswith(start_of_name):
                            continue
                        if entry.is_dir(follow_symlinks=False):
                            # with the slash, the folder is sorted like the keys in it
                            rows.append((f"{entry.name}/", None))
                            continue
                        # another process deleted the folder during the listing
                        with contextlib.suppress(FileNotFoundError):
                            rows.append((entry.name, entry.stat(follow_symlinks=False)))
            except (FileNotFoundError, NotADirectoryError):
                return
        for name, status in sorted(rows, key=lambda row: row[0]):
            if status is None:
                yield from self._walk(os.path.join(folder, name.rstrip("/")), folder_key + name, "")
            else:
                yield Entry(folder_key + name, status.st_size, status.st_mtime)

    def _check_exclusive_creation(self) -> None:
        """Link one name twice, and check that the second link fails.

        A directory that this process may only read passes the check. The first write raises the error.
        """
        name = self._hidden_path()
        with self._translated_errors("use"):
            try:
                with self._new_file() as file:
                    if file.link(name) and not file.link(name):
                        self._remove_leftovers(os.fstat(file.descriptor).st_mtime - LEFTOVER_S)
                        return
            except OSError as error:
                if error.errno in READ_ONLY:
                    return
                if error.errno not in NO_LINKS:
                    raise
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(name)
        raise UnsafeStoreError(
            f"{self.root} is on a file system where link(2) does not create a file exclusively, so two replicas could "
            "both create the same object. Use a directory on another file system, or a bucket.",
            url=self.url,
        )

    def _remove_leftovers(self, before: float) -> None:
        """Remove the hidden files that were last written before a time by the file system's clock."""
        with contextlib.suppress(OSError), _opened(self._folder, os.O_RDONLY) as folder, os.scandir(folder) as found:
            for entry in found:
                with contextlib.suppress(OSError):  # another user owns the file, or another process has removed it
                    if entry.name.startswith(UNFINISHED) and entry.stat(follow_symlinks=False).st_mtime < before:
                        os.unlink(entry.name, dir_fd=folder)

    def _translated_errors(self, verb: str, key: str | None = None) -> _TranslatedErrors:
        return _TranslatedErrors(self.root, verb, key)


class _TranslatedErrors:
    """Replaces an operating system's error by a StoreError that names the failure, the place, and what to do."""

    def __init__(self, root: Path, verb: str, key: str | None) -> None:
        self._call = root, verb, key

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if not isinstance(error, OSError) or isinstance(error, StoreError):
            return
        root, verb, key = self._call
        url = root.as_uri()
        where = f"{key!r} in {url}" if key is not None else url
        hint = ""
        if key is None and error.errno in (errno.EEXIST, errno.ENOTDIR):
            hint = " A file has this name. Choose another directory."
        elif error.errno in (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY):
            hint = " A directory store cannot hold both a key and keys below it."
        elif error.errno == errno.ELOOP:
            hint = " A symbolic link is on the path, and links in a store are not followed. Remove the link."
        elif error.errno in FULL:
            hint = " Nothing was written. Free some space and try again."
        elif error.errno == errno.EACCES:
            hint = _owner_hint(root / (key or ""))
        kind = UnwritableStoreError if verb in WRITING and error.errno in READ_ONLY else StoreError
        raise kind(f"Cannot {verb} {where}: {error.strerror}.{hint}", key=key, url=url) from error


def _owner_hint(path: Path) -> str:
    """Return a sentence that names the owner of the first folder on a path that this process may not read."""
    found = ""
    for place in (*reversed(path.parents), path):
        # the path is below a folder that cannot be read, or its owner has no name on this machine
        with contextlib.suppress(OSError, KeyError):
            found = f" {str(place)!r} belongs to {place.owner()}."
            asked = os.R_OK | (os.X_OK if place.is_dir() else 0)
            if not os.access(place, asked, effective_ids=os.access in os.supports_effective_ids):
                break
    return found


def read_file(path: Path) -> memoryview:
    """Read a file that is not in a store as `FileStore.get` does: a large file is mapped into memory.

    Args:
        path: the file.

    Example:
        read_file(Path("model.safetensors"))
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _read(descriptor, 0, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


class _NewFile:
    """A file without a key, open for writing."""

    def __init__(self, descriptor: int, path: str, root: str) -> None:
        self.descriptor = descriptor
        self._path = path
        self._root = root

    def write(self, data: Data) -> None:
        """Write all buffers.

        The buffers are not written through a mapping. With a mapping, a full disk would be a SIGBUS instead of an
        error.
        """
        pending = [
            buffer[at : at + WRITEV_MAX_BYTES]
            for buffer in buffers_of(data)
            for at in range(0, len(buffer), WRITEV_MAX_BYTES)
        ]
        while pending:
            written = os.writev(self.descriptor, pending[:WRITEV_MAX_BUFFERS])
            while pending and written >= len(pending[0]):
                written -= len(pending.pop(0))
            if written:
                pending[0] = pending[0][written:]

    def link(self, path: str) -> bool:
        """Give the file a name. Return False if the name is taken."""
        # A directory descriptor makes Python call linkat(AT_SYMLINK_FOLLOW); link(2) would not follow /proc/self/fd/N.
        # The source is absolute, so the descriptor itself is never looked at.
        try:
            _in_folder_of(
                self._root,
                path,
                lambda folder, name: os.link(self._path, name, src_dir_fd=0, dst_dir_fd=folder, follow_symlinks=True),
            )
        except FileExistsError:
            if os.path.isdir(path):
                raise
            return False
        return True


class _AlignedWrites:
    """Writes pieces up to a multiple of `ALIGNED_BYTES`, and keeps the rest for the next write.

    Linux makes the pages of its file cache as large as the offset and the size of a write allow. Pages of 2 MiB take a
    third less time to write than smaller pages, and a fiftieth of the time to map.
    """

    def __init__(self, file: _NewFile, at: int) -> None:
        self.rest = bytearray()
        self._file = file
        self._at = at

    def write(self, piece: Buffer) -> None:
        view = memoryview(piece).cast("B")
        end = self._at + len(self.rest) + len(view)
        cut = len(view) - end % ALIGNED_BYTES
        if cut < 0:
            self.rest += view
            return
        self._file.write([self.rest, view[:cut]])
        self._at, self.rest = end - end % ALIGNED_BYTES, bytearray(view[cut:])


@contextlib.contextmanager
def _opened(folder: str, flags: int = PATH_ONLY) -> Iterator[int]:
    descriptor = open_without_links(folder, flags | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _in_folder_of(root: str, path: str, act: Callable[[int, str], T]) -> T:
    """Call `act` with the path's folder and name. The folder is made if it is missing.

    A `delete` in another process removes empty folders, so the folder may vanish before it is used. Then it is made
    again.
    """
    parent, name = os.path.split(path)
    for _ in range(PRUNING_RACES):
        with contextlib.suppress(FileNotFoundError), _opened(parent) as folder:
            return act(folder, name)
        # a `delete` that removes empty folders also interferes with mkdir
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            make_folder(root, parent)
    with _opened(parent) as folder:
        return act(folder, name)


def make_folder(root: str, folder: str) -> None:
    """Make a folder below a store's directory, with its parents.

    Only this user may read a run's folder, which is at the top: it has logs, arguments, results and tracebacks. The
    exception is a directory into which its group may write. It is shared on purpose, so its folders get the permissions
    of the user's umask. A sticky bit, as on /tmp, marks a directory that is not shared in this sense.

    Args:
        root: the store's directory.
        folder: the folder, as an absolute path.

    Raises:
        OSError: the folder cannot be made.
    """
    os.makedirs(root, exist_ok=True)
    mode = os.stat(root).st_mode
    is_shared = bool(mode & stat.S_IWGRP) and not mode & stat.S_ISVTX
    if not is_shared and (parts := os.path.relpath(folder, root).split(os.sep)) != [os.curdir]:
        with contextlib.suppress(FileExistsError):
            os.mkdir(os.path.join(root, parts[0]), 0o700)
    os.makedirs(folder, exist_ok=True)


def _read(descriptor: int, start: int, end: int) -> memoryview:
    if end - start < MAP_FROM_BYTES:
        data = os.pread(descriptor, end - start, start) if end > start or start == 0 else b""
        return memoryview(data)
    import mmap  # not at the top: most processes read only small records

    aligned = start - start % mmap.ALLOCATIONGRANULARITY
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    mapped = mmap.mmap(descriptor, end - aligned, flags=flags, prot=mmap.PROT_READ, offset=aligned)
    return memoryview(mapped)[start - aligned :]
