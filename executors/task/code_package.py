"""The package of code that a backend sends to replicas on other machines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Package:
    """The code of the user and of this package for a replica on another machine, and the packages to install."""

    archive: bytes = field(repr=False)
    """A tar.gz with the folders `workspace` and `packages`."""
    sha256: str
    """The digest of the archive, in hexadecimal."""
    n_files: int
    """The number of the user's files in the archive."""
    size_bytes: int
    """The size of the user's files together, unpacked."""
    commit: str | None = None
    """The commit that is checked out. None outside a git repository."""
    dirty: bool | None = None
    """True if the files differ from that commit."""
    files: tuple[str, ...] = field(default=(), repr=False)
    """The user's files, by their paths in the workspace."""
    left_out: tuple[str, ...] = ()
    """The files that git would take and the archive lacks, each with the reason in brackets."""
    requirements: tuple[str, ...] = ()
    """The packages that a replica installs, as requirements of pip."""
    pins: tuple[str, ...] = ()
    """The requirements of this package itself. An image that has a later version keeps it."""
    paths: tuple[str, ...] = ()
    """Folders of the workspace from which the launcher imports, such as `src`: its `sys.path`, made relative."""

    @property
    def about(self) -> dict[str, Any]:
        """The description of the code in `run.json`."""
        return {name: getattr(self, name) for name in ("sha256", "size_bytes", "n_files", "commit", "dirty")}
