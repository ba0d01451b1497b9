"""Packs the user's workspace and our packages into an archive for replicas on other machines.

    workspace/…   files that git tracks, or would track because no rule ignores them
    packages/…    `executors` and `diloco`, as they are installed here

Without git or a repository, all files are packed except hidden ones, `__pycache__`, `node_modules` and virtual
environments. The archive has only plain files. A link to a file or folder of the workspace becomes a copy of its
target. These are left out, and `Package.left_out` names them:

- links to targets that do not exist, or that are outside of the workspace
- submodules that are not checked out
- files with the name of a secret, as `.env`, `.netrc`, `id_ed25519` or `*.p12`
- `*.pem` and `*.key` files with a private key

Equal files give an equal archive and so an equal digest, because names are sorted, and owners and times are zero.
"""

from __future__ import annotations

import contextlib
import fnmatch
import gzip
import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from executors.errors import EntrypointError
from executors.shipping.checkout import GitQuery, git
from executors.task.code_package import Package

WORKSPACE, PACKAGES = "workspace", "packages"  # the archive's two folders
LIMIT_BYTES = 64 << 20  # the largest size of all the user's files together
OURS = ("executors", "diloco")
SKIPPED_FOLDERS = {"__pycache__", "node_modules"}
SECRET_NAMES = (
    ".env", ".env.*", ".netrc", "_netrc", ".pypirc", ".git-credentials", ".htpasswd",
    "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "*.p12", "*.pfx", "*.jks", "*.kdbx",
)  # fmt: skip
EXAMPLES_OF_SECRETS = (".env.example", ".env.sample", ".env.template", ".env.dist")
KEY_FILES = ("*.pem", "*.key")  # certificates have such names as well, and the training may need them
LARGEST_KEY_BYTES = 1 << 20
KEY_MARK = b"PRIVATE KEY-----"
LIST = ("ls-files", "-z", "--cached", "--others", "--exclude-standard")


def snapshot_workspace(root: Path) -> Package:
    """Pack a workspace and our packages.

    Args:
        root: the folder of the workspace.

    Raises:
        EntrypointError: the workspace is too large, a file cannot be read, or git refuses to list the files.
    """
    root = root.resolve()
    left_out: list[str] = []
    try:
        files = dict(sorted(_choose(root, git(root, *LIST), left_out)))
        size_bytes = _checked_size(files)
        contents = [(f"{WORKSPACE}/{name}", path) for name, path in files.items()]
        contents += [(f"{PACKAGES}/{name}", path) for name, path in _our_files()]
        archive = _pack(contents)
    except OSError as error:
        raise EntrypointError(
            f"The workspace {str(root)!r} cannot be packed: {error}. Make the file readable, or name it in .gitignore."
        ) from error
    with contextlib.closing(GitQuery(root)) as look:
        checkout = look.result(patience_s=None)
    return Package(
        archive,
        hashlib.sha256(archive).hexdigest(),
        n_files=len(files),
        size_bytes=size_bytes,
        commit=checkout.commit,
        dirty=checkout.dirty,
        files=tuple(files),
        left_out=tuple(sorted(left_out)),
    )


def _checked_size(files: Mapping[str, Path]) -> int:
    """Return the size of all files together, in bytes. Raise EntrypointError if it exceeds the limit."""
    sizes = {name: path.stat().st_size for name, path in files.items()}
    if (size_bytes := sum(sizes.values())) > LIMIT_BYTES:
        largest = sorted(sizes, key=lambda name: sizes[name], reverse=True)[:5]
        raise EntrypointError(
            f"The workspace has {_mib(size_bytes)}, and at most {_mib(LIMIT_BYTES)} are sent to replicas. "
            f"Largest: {', '.join(f'{name} ({_mib(sizes[name])})' for name in largest)}. Add files that "
            "replicas do not need to .gitignore, and let replicas read data from a bucket."
        )
    return size_bytes


def _choose(root: Path, listed: bytes | None, left_out: list[str]) -> Iterator[tuple[str, Path]]:
    """Yield the files to pack, each with its name in the workspace."""
    paths = {name: root / name for name in _names(root, listed, left_out)}
    links = {name: path for name, path in paths.items() if path.is_symlink()}
    # Git also lists files that were deleted.
    plain = {name: path for name, path in paths.items() if name not in links and path.is_file()}
    for name, path in sorted(links.items()):  # sorted, because a link may lead to a folder with other links
        target = Path(os.path.realpath(path))  # unlike Path.resolve, this accepts a link that leads in a circle
        if not target.is_relative_to(root) or not target.exists():
            left_out.append(f"{name} (a link to {os.readlink(path)})")
        elif target.is_file():
            plain.setdefault(name, target)
        else:
            inside = target.relative_to(root).as_posix()
            below = "" if inside == "." else f"{inside}/"
            for other in [other for other in plain if other.startswith(below) and not other.startswith(f"{name}/")]:
                plain.setdefault(f"{name}/{other.removeprefix(below)}", plain[other])
    for name, path in plain.items():
        if _is_secret(name, path):
            left_out.append(f"{name} (it may hold a secret)")
        else:
            yield name, path


def _names(root: Path, listed: bytes | None, left_out: list[str]) -> Iterator[str]:
    """Yield the names of the workspace's files and links, relative to `root`."""
    if not listed:  # there is no repository, or it ignores this whole folder, such as one around the home directory
        yield from _walk(root, left_out)
        return
    for name in {os.fsdecode(name) for name in listed.split(b"\0") if name}:
        path = root / name
        if path.is_symlink() or not path.is_dir():
            yield name
        elif (path / ".git").exists():  # a submodule, or another repository inside this one
            yield from (f"{name.rstrip('/')}/{inner}" for inner in _names(path, git(path, *LIST), left_out))
        else:
            left_out.append(f"{name} (a submodule that is not checked out)")


def _walk(root: Path, left_out: list[str]) -> Iterator[str]:
    def note(error: OSError) -> None:
        if error.filename == str(root):
            raise error
        if not isinstance(error, FileNotFoundError):  # the folder was deleted just now
            left_out.append(f"{os.path.relpath(error.filename, root)} (it cannot be read)")

    for folder, folders, names in os.walk(root, onerror=note):
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".")
            and name not in SKIPPED_FOLDERS
            and not os.path.exists(os.path.join(folder, name, "pyvenv.cfg"))
        ]
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in (*names, *links):
            if not name.startswith("."):
                yield os.path.relpath(os.path.join(folder, name), root)


def _is_secret(name: str, path: Path) -> bool:
    for called in (Path(name).name.lower(), path.name.lower()):  # the name of a link may differ from its target's
        if any(fnmatch.fnmatchcase(called, pattern) for pattern in SECRET_NAMES) and called not in EXAMPLES_OF_SECRETS:
            return True
        if any(fnmatch.fnmatchcase(called, pattern) for pattern in KEY_FILES):
            with open(path, "rb") as file:
                return KEY_MARK in file.read(LARGEST_KEY_BYTES)
    return False


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.1f} MiB"


def _our_files() -> Iterator[tuple[str, Path]]:
    """Yield the files of our packages as they are installed here."""
    for package in OURS:
        spec = find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        folder = Path(spec.origin).parent
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder.parent)
            if path.is_file() and not SKIPPED_FOLDERS.intersection(name.parts) and path.suffix != ".pyc":
                yield name.as_posix(), path


def _pack(contents: Iterable[tuple[str, Path]]) -> bytes:
    packed = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", compresslevel=3, fileobj=packed, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name, path in contents:
            data = path.read_bytes()
            member = tarfile.TarInfo(name)  # time, owner and group are zero
            member.size = len(data)
            member.mode = 0o755 if path.stat().st_mode & stat.S_IXUSR else 0o644
            tar.addfile(member, io.BytesIO(data))
    return packed.getvalue()
