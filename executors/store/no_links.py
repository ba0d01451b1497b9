"""Opens the files of a directory store without following symbolic links.

Otherwise any user who can write into a shared directory could replace an object by a link to a private file of its
reader. The same holds for a folder.
"""

from __future__ import annotations

import ctypes
import errno
import os

OPENAT2 = 437  # the number of the system call on every architecture
AT_FDCWD = -100
RESOLVE_NO_SYMLINKS = 0x04
# An old kernel returns the first, and a sandbox that forbids unknown calls the second.
UNKNOWN_CALL = (errno.ENOSYS, errno.EPERM)
PATH_ONLY = getattr(os, "O_PATH", os.O_RDONLY)

_libc = ctypes.CDLL(None, use_errno=True)
_has_openat2 = hasattr(os, "O_PATH")  # true on Linux, until a call shows that the kernel does not know openat2


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def open_without_links(path: str, flags: int) -> int:
    """Open an absolute path, and return the descriptor. No part of the path may be a symbolic link.

    Args:
        path: the absolute path.
        flags: flags of `os.open`. O_CLOEXEC is added.

    Raises:
        OSError: the path cannot be opened. The error is ELOOP for a symbolic link. On a system without `openat2`, it is
            ENOTDIR for a link in place of a folder.

    Example:
        os.close(open_without_links("/data/runs/otter/run.json", os.O_RDONLY))
    """
    global _has_openat2
    if _has_openat2:
        try:
            return _openat2(path, flags)
        except OSError as error:
            if error.errno not in UNKNOWN_CALL:
                raise
            # EPERM may also mean that the file itself is forbidden. Then this call raises it again.
            descriptor = _open_step_by_step(path, flags)
            _has_openat2 = False
            return descriptor
    return _open_step_by_step(path, flags)


def _openat2(path: str, flags: int) -> int:
    how = _OpenHow(flags | os.O_CLOEXEC, 0, RESOLVE_NO_SYMLINKS)
    encoded = os.fsencode(path)
    while True:
        descriptor = int(_libc.syscall(OPENAT2, AT_FDCWD, encoded, ctypes.byref(how), ctypes.sizeof(how)))
        if descriptor >= 0:
            return descriptor
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number), path)


def _open_step_by_step(path: str, flags: int) -> int:
    *folders, name = path.strip("/").split("/")
    at = os.open("/", PATH_ONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for folder in folders:
            # Two descriptors at a time, because a process that has used up its descriptors still writes its outcome.
            before, at = at, os.open(folder, PATH_ONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            os.close(before)
        return os.open(name or ".", flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    finally:
        os.close(at)
