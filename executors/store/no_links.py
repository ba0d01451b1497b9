"""Opening the files of a directory store without following symbolic links.

Otherwise, any user who can write into a shared directory could point a key at a file of its reader, or a folder of keys
at a folder of the reader.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os

OPENAT2 = 437  # the number of the system call on every architecture
AT_FDCWD = -100
RESOLVE_NO_SYMLINKS = 0x04
UNKNOWN_CALL = (errno.ENOSYS, errno.EPERM)  # an old kernel; a sandbox that forbids what it does not know
PATH_ONLY = getattr(os, "O_PATH", os.O_RDONLY)

_libc = ctypes.CDLL(None, use_errno=True)
_has_openat2 = hasattr(os, "O_PATH")  # Linux; whether its kernel knows the call is found out


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def open_without_links(path: str, flags: int) -> int:
    """Open an absolute path; fail with ELOOP where the path or its end is a symbolic link.

    On a system without `openat2`, a link to a folder on the way is ENOTDIR.
    """
    global _has_openat2
    if _has_openat2:
        try:
            return _openat2(path, flags)
        except OSError as error:
            if error.errno not in UNKNOWN_CALL:
                raise
            descriptor = _open_step_by_step(path, flags)  # EPERM may be meant, and is then raised again here
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
    with contextlib.ExitStack() as stack:
        at = os.open("/", PATH_ONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, at)
        for folder in folders:
            at = os.open(folder, PATH_ONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            stack.callback(os.close, at)
        return os.open(name or ".", flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
