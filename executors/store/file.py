"""A directory as a store: one file per object, found under its key.

Objects are written to an anonymous file (`O_TMPFILE`, or a hidden one where the file system has none) and get
their name only when they are whole: by `link`, which fails if the name is taken, or by `rename`, which replaces
it. So nothing half-written is ever visible, a killed writer leaves nothing, and creation is exclusive across
processes and, on a network file system with working `link`, across machines.

No symbolic link below the store's directory is followed: somebody else may be able to write there.

Nothing is fsynced: an object survives its writer, not a power cut.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, TypeVar

from executors.errors import KeyNotFoundError, StoreError, UnsafeStoreError
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

UNFINISHED = ".unfinished~"  # the one reserved name at the top: files that have no key yet
MAP_FROM_BYTES = 128 * 1024  # below this, copying is cheaper than the page faults of a mapping
ALIGNED_BYTES = 2 << 20  # a large page on x86 and most ARM machines
PRUNING_RACES = 1000  # how often in a row a folder may vanish between its making and its use
WRITEV_MAX_BUFFERS = 1024  # IOV_MAX
WRITEV_MAX_BYTES = 1 << 30  # Linux transfers at most 0x7ffff000 bytes a call

T = TypeVar("T")


class FileStore:
    """The store that `open_store("file:///…")` opens.

    Raises:
        UnsafeStoreError: `link` does not create exclusively on this file system.
        StoreError: the directory cannot be created.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._url = self.root.as_uri()
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._fail(error, None, "create this directory for")
        # Links that lead to the directory are its owner's; below it none is followed.
        self._folder = os.path.realpath(self.root)  # a replica's start pays for every object that a path is made of
        self._probe()

    @property
    def url(self) -> str:
        return self._url

    def put_if_absent(self, key: str, data: Data) -> bool:
        path = self._path(key)
        if os.path.isfile(path):
            return False  # spares writing what cannot win
        try:
            return _write_unnamed(self._folder, _writing(data), lambda source: _link(source, path))
        except OSError as error:
            self._fail(error, key, "create")

    def put_if_absent_streamed(self, key: str, head_bytes: int, produce: Produce) -> bool:
        path = self._path(key)
        if os.path.isfile(path):
            return False

        def fill(descriptor: int) -> None:
            os.lseek(descriptor, head_bytes, os.SEEK_SET)
            aligned = _AlignedWrites(descriptor, head_bytes)
            head = produce(aligned.write)
            aligned.finish()
            if len(head) != head_bytes:
                raise ValueError(f"The head of {key!r} has {len(head)} bytes, {head_bytes} were announced.")
            os.lseek(descriptor, 0, os.SEEK_SET)
            _write(descriptor, head)

        try:
            return _write_unnamed(self._folder, fill, lambda source: _link(source, path))
        except OSError as error:
            self._fail(error, key, "create")

    def put(self, key: str, data: Data) -> None:
        path = self._path(key)

        def replace(source: str) -> None:
            staged = _hidden_name(self._folder)
            _link(source, staged)
            try:
                _with_parent(path, lambda folder, name: os.replace(staged, name, dst_dir_fd=folder))
            except OSError:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(staged)
                raise

        try:
            _write_unnamed(self._folder, _writing(data), replace)
        except OSError as error:
            self._fail(error, key, "write")

    def get(self, key: str, *, start: int = 0, size: int | None = None) -> memoryview:
        def read(descriptor: int, size_bytes: int) -> memoryview:
            # The size is checked first: touching a mapping behind the end of its file is a SIGBUS.
            return _read(descriptor, start, check_range(key, self.url, size_bytes, start, size))

        return self._get(key, read)

    def get_at_most(self, key: str, max_bytes: int) -> memoryview:
        def read(descriptor: int, size_bytes: int) -> memoryview:
            # Never mapped: who cuts the file short meanwhile would end this process.
            return _read_copied(descriptor, check_size(key, self.url, size_bytes, max_bytes))

        return self._get(key, read)

    def _get(self, key: str, read: Callable[[int, int], memoryview]) -> memoryview:
        path = self._path(key)
        try:
            descriptor = open_without_links(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe in its place would block
        except (FileNotFoundError, NotADirectoryError):
            raise KeyNotFoundError(f"No object {key!r} in {self.url}.", key=key, url=self.url) from None
        except OSError as error:
            self._fail(error, key, "read")
        try:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode):
                return read(descriptor, status.st_size)
        except OSError as error:
            self._fail(error, key, "read")
        finally:
            os.close(descriptor)
        raise KeyNotFoundError(f"No object {key!r} in {self.url}: it is a folder of keys.", key=key, url=self.url)

    def list(self, prefix: str) -> Iterator[Entry]:
        folder, _, start_of_name = prefix.rpartition("/")
        segments = folder.split("/") if "/" in prefix else []
        if any(segment in ("", ".", "..") for segment in segments) or segments[:1] == [UNFINISHED]:
            return iter(())  # no key starts so
        return self._walk(os.path.join(self._folder, folder), f"{folder}/" if folder else "", start_of_name)

    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            with _opened(os.path.dirname(path)) as folder:
                os.unlink(os.path.basename(path), dir_fd=folder)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return
        except OSError as error:
            self._fail(error, key, "delete")
        with contextlib.suppress(OSError):  # until a folder is in use
            while (path := os.path.dirname(path)) != self._folder:
                os.rmdir(path)

    def _path(self, key: str) -> str:
        check_key(key, self._url)
        if key.startswith(UNFINISHED) and key.split("/", 1)[0] == UNFINISHED:
            raise ValueError(f"Bad key {key!r} for {self.url}: the name {UNFINISHED!r} is reserved.")
        return os.path.join(self._folder, key)

    def _walk(self, folder: str, folder_key: str, start_of_name: str) -> Iterator[Entry]:
        if len(folder_key) > MAX_KEY_BYTES:
            return  # no stack is so deep
        rows: list[tuple[str, os.stat_result | None]] = []
        try:
            with _opened(folder, os.O_RDONLY) as descriptor, os.scandir(descriptor) as found:
                for entry in found:
                    if not entry.name.startswith(start_of_name) or (not folder_key and entry.name == UNFINISHED):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        rows.append((f"{entry.name}/", None))  # a folder sorts as its keys do, with the slash
                        continue
                    with contextlib.suppress(FileNotFoundError):  # deleted while we list
                        rows.append((entry.name, entry.stat(follow_symlinks=False)))
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            self._fail(error, folder_key, "list")
        for name, status in sorted(rows, key=lambda row: row[0]):
            if status is None:
                yield from self._walk(os.path.join(folder, name.rstrip("/")), folder_key + name, "")
            else:
                yield Entry(folder_key + name, status.st_size, status.st_mtime)

    def _probe(self) -> None:
        """Create the same name twice: the second must fail."""
        name = _hidden_name(self._folder)
        try:
            exclusive = _write_unnamed(
                self._folder, lambda _: None, lambda source: _link(source, name) and not _link(source, name)
            )
        except PermissionError as error:
            if error.errno == errno.EACCES:
                return  # ours to read only; a write will say so
            exclusive = False  # EPERM: a file system without hard links
        except OSError as error:
            if error.errno in (errno.EROFS, errno.ENOSPC, errno.EDQUOT):
                return  # can be read all the same; a write will say so
            if error.errno not in (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL):
                self._fail(error, None, "use")
            exclusive = False
        finally:
            with contextlib.suppress(OSError):
                os.unlink(name)
                os.rmdir(os.path.dirname(name))  # unless somebody else is writing
        if not exclusive:
            raise UnsafeStoreError(
                f"{self.root} is on a {_file_system_of(self.root)} file system, where a file cannot be created "
                "exclusively by link(2), so replicas there could not agree on anything. Use a directory on "
                "another file system, or an object store.",
                url=self.url,
            )

    def _fail(self, error: OSError, key: str | None, verb: str) -> NoReturn:
        what = f"{key!r} in {self.url}" if key is not None else self.url
        hint = ""
        if error.errno in (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY):
            hint = " A directory store cannot hold both a key and keys below it."
        elif error.errno == errno.ELOOP:
            hint = " A symbolic link is in the way; those in a store are not followed."
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = " Nothing was written; free some space and try again."
        raise StoreError(f"Cannot {verb} {what}: {error.strerror}.{hint}", key=key, url=self.url) from error


def read_file(path: Path) -> memoryview:
    """Read a file outside any store the way `FileStore.get` does: mapped when it is large."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _read(descriptor, 0, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def _write_unnamed(folder: str, fill: Callable[[int], None], name: Callable[[str], T]) -> T:
    """Fill a file without a name, and let `name` link it from a path that it is given."""
    hidden = None
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        source = f"/proc/self/fd/{descriptor}"
    except (AttributeError, OSError) as error:  # macOS, or a file system without O_TMPFILE
        unsupported = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
        if isinstance(error, OSError) and error.errno not in unsupported:
            raise
        source = hidden = _hidden_name(folder)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        descriptor = _with_parent(hidden, lambda parent, name: os.open(name, flags, 0o666, dir_fd=parent))
    try:
        fill(descriptor)
        return name(source)
    finally:
        os.close(descriptor)
        if hidden is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(hidden)


def _hidden_name(folder: str) -> str:
    return f"{folder}/{UNFINISHED}/{os.urandom(12).hex()}"


def _link(source: str, path: str) -> bool:
    """Give a file its name; False if the name is taken."""
    try:
        # A directory descriptor makes Python call linkat(AT_SYMLINK_FOLLOW); link(2) would not follow /proc/self/fd/N.
        # The source is absolute, so the descriptor itself is never looked at.
        _with_parent(
            path, lambda folder, name: os.link(source, name, src_dir_fd=0, dst_dir_fd=folder, follow_symlinks=True)
        )
    except FileExistsError:
        if os.path.isdir(path):
            raise
        return False
    return True


@contextlib.contextmanager
def _opened(folder: str, flags: int = PATH_ONLY) -> Iterator[int]:
    descriptor = open_without_links(folder, flags | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _with_parent(path: str, act: Callable[[int, str], T]) -> T:
    """Do something in the path's folder, which is made when missing, again when a `delete` just pruned it."""
    parent, name = os.path.split(path)

    def act_there() -> T:
        with _opened(parent) as folder:
            return act(folder, name)

    with contextlib.suppress(FileNotFoundError):
        return act_there()
    for _ in range(PRUNING_RACES):
        with contextlib.suppress(FileNotFoundError, FileExistsError):  # mkdir races with the pruning, too
            os.makedirs(parent, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            return act_there()
    return act_there()


def _writing(data: Data) -> Callable[[int], None]:
    return lambda descriptor: _write(descriptor, data)


def _write(descriptor: int, data: Data) -> None:
    """Write all buffers. Never through a mapping: a full disk is an error here and a SIGBUS there."""
    pending = [
        buffer[at : at + WRITEV_MAX_BYTES]
        for buffer in buffers_of(data)
        for at in range(0, len(buffer), WRITEV_MAX_BYTES)
    ]
    while pending:
        written = os.writev(descriptor, pending[:WRITEV_MAX_BUFFERS])
        while pending and written >= len(pending[0]):
            written -= len(pending.pop(0))
        if written:
            pending[0] = pending[0][written:]


def _read_copied(descriptor: int, size_bytes: int) -> memoryview:
    read = bytearray()
    while len(read) < size_bytes and (piece := os.pread(descriptor, size_bytes - len(read), len(read))):
        read += piece
    return memoryview(read).toreadonly()


def _read(descriptor: int, start: int, end: int) -> memoryview:
    if end - start < MAP_FROM_BYTES:
        data = os.pread(descriptor, end - start, start) if end > start or start == 0 else b""
        return memoryview(data)
    import mmap  # of no use to a process that only claims and reports

    aligned = start - start % mmap.ALLOCATIONGRANULARITY
    mapped = mmap.mmap(
        descriptor,
        end - aligned,
        flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0),
        prot=mmap.PROT_READ,
        offset=aligned,
    )
    return memoryview(mapped)[start - aligned :]


class _AlignedWrites:
    """Writes pieces in sequence, so that each write ends at a multiple of `ALIGNED_BYTES` if the pieces are that long.

    Linux makes the pages of a file's cache as large as a write and its offset allow. Pages of 2 MiB take a third less
    to write than those that other offsets lead to, and a fiftieth to map.
    """

    def __init__(self, descriptor: int, at: int) -> None:
        self._descriptor = descriptor
        self._at = at
        self._rest = bytearray()

    def write(self, piece: Buffer) -> None:
        view = memoryview(piece).cast("B")
        end = self._at + len(self._rest) + len(view)
        cut = len(view) - end % ALIGNED_BYTES
        if cut < 0:
            self._rest += view
            return
        _write(self._descriptor, [self._rest, view[:cut]])
        self._at, self._rest = end - end % ALIGNED_BYTES, bytearray(view[cut:])

    def finish(self) -> None:
        _write(self._descriptor, self._rest)


def _file_system_of(path: Path) -> str:
    """Name the type of the file system that holds `path`, as in /proc/mounts."""
    best, name = "", "unknown"
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_bytes().splitlines():
            _, mount_point, kind, *_ = line.split()
            unescaped = re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), mount_point)  # space is \040
            mount = os.fsdecode(unescaped)
            if len(mount) > len(best) and path.is_relative_to(mount):
                best, name = mount, kind.decode()
    return name
