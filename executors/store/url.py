"""The urls of stores, and the addresses of runs in them."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from executors.errors import BackendError, RunNotFoundError, StoreError
from executors.store.protocol import Store

KNOWN_SCHEMES = ("file", "memory", "s3")
RUN_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
ADJECTIVES = (
    "able amber ample brave bright brisk calm candid clear clever cosy crisp daring eager early fair fleet fond "
    "frank fresh gentle glad golden grand happy hardy honest humble jolly keen kind lively lucid lucky mellow merry "
    "mild neat nimble noble patient plain polite proud quick quiet ready robust rosy sharp silent silver smart snug "
    "solid spry steady stout sunny swift tidy warm wise witty"
)
ANIMALS = (
    "badger bear beaver bison bittern crane curlew deer dolphin dove eagle egret falcon ferret finch fox gecko goose "
    "grouse hare hawk heron ibex ibis jackdaw jay kestrel kite lark lemur linnet lynx marten mole moose newt orca "
    "oriole osprey otter owl panda pika plover puffin quail raven robin seal shrew sparrow starling stoat stork swan "
    "swift tern thrush toad trout turtle viper vole walrus weasel whale wombat wren yak"
)


def open_store(url: str | Path, *, is_known: bool = False) -> Store:
    """Open the store at `url`.

    That is `file:///path` or a plain path, `s3://bucket/prefix?endpoint_url=&region=&profile=` (needs the extra `s3`),
    or `memory://name` (this process only). Opening a directory creates it when it is missing.

    Opening a directory or a bucket is the check that it creates exclusively: one name is created there twice, and the
    second must fail. A store in which nothing may be written opens as well, and the first write raises the error.

        store = open_store("s3://bucket/runs")

    Args:
        url: the address of the store, or a path of this machine.
        is_known: runs live there already. A bucket is then checked before something is created in it, and looks at
            these runs do not wait for that.

    Raises:
        ValueError: the url has an unknown scheme, or is wrong for its scheme.
        MissingDependencyError: the store's extra is not installed.
        UnsafeStoreError: the file system or server does not create exclusively.
        StoreError: the directory or bucket cannot be created or used.
    """
    directory = directory_of(url)
    if directory is not None:
        from executors.store.file import FileStore

        return FileStore(directory)
    text = str(url)
    parts = urlsplit(text)
    if parts.scheme == "memory":
        from executors.store.memory import MemoryStore

        return MemoryStore.named(parts.netloc + parts.path)
    if parts.scheme == "s3":
        from executors.store.s3.store import S3Store

        return S3Store(text, checks_later=is_known)
    check_scheme(url)
    raise AssertionError("unreachable")


def check_scheme(url: str | Path) -> None:
    """Check that there is a kind of store for a url.

    Raises:
        ValueError: there is none, or it is not a url.
    """
    if directory_of(url) is not None or (scheme := urlsplit(str(url)).scheme) in KNOWN_SCHEMES:
        if str(url).startswith("s3:"):
            from executors.store.s3.address import S3Address

            S3Address.parse(str(url))
        return
    shown = "" if "@" in str(url) else f" (in {str(url)!r})"  # the text before an '@' may be a password
    raise ValueError(
        f"No store serves {scheme!r}{shown}. Known schemes: {', '.join(KNOWN_SCHEMES)}. A plain path is a directory."
    )


def store_at(url: str | Path, *, is_known: bool = False) -> Store:
    """Return the open store at `url`: opened once for this process and those it forks, so that it is checked once."""
    directory = directory_of(url) if "://" not in str(url) else None
    place = str(url) if directory is None else directory.absolute().as_uri()
    if place not in _opened:
        _opened.setdefault(place, open_store(place, is_known=is_known))
    return _opened[place]


_opened: dict[str, Store] = {}


def impatient_store(url: str, limit_s: float) -> Store:
    """Return the store at `url`, which holds runs, for a process that must not wait: a request is tried once."""
    if not url.startswith("s3:"):
        return store_at(url, is_known=True)
    from executors.store.s3.store import S3Store

    return S3Store(url, checks_later=True, retry_deadline_s=0.0, read_timeout_s=limit_s)


def existing_store(url: str | Path) -> Store:
    """Return the open store at `url`, as `store_at` does, but never make its directory.

    Raises:
        RunNotFoundError: there is no such directory.
        StoreError: the answer is not known, as for `is_directory`.
    """
    directory = directory_of(url)
    if directory is not None and not is_directory(directory):
        raise RunNotFoundError(f"No runs at {directory.absolute()}: there is no such directory.")
    return store_at(url, is_known=True)


def is_directory(path: Path) -> bool:
    """Return whether there is such a directory.

    Raises:
        StoreError: the answer is not known, because reading is not allowed, or the disk or the server fails.
    """
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a name with a zero byte
        return False
    except OSError as error:  # Path.is_dir raises some of these, too
        raise StoreError(f"Cannot look at {path}: {error.strerror}.", url=path.absolute().as_uri()) from error


def directory_of(url: str | Path) -> Path | None:
    """Return the directory that a url names; None when it names a store of another kind.

    Raises:
        TypeError: it is neither a string nor a path: None is what a variable gives that is not set.
        ValueError: the url is empty, or a `file:` url without an absolute path.
    """
    if not isinstance(url, str | os.PathLike):
        raise TypeError(f"The url of a rendezvous is a string or a path, got {url!r}.")
    text = str(url)
    if not text:
        raise ValueError("The url of a rendezvous is empty. Give a directory, or a url such as 'file:///data/runs'.")
    scheme, colon, rest = text.partition(":")
    if isinstance(url, str) and colon and scheme in KNOWN_SCHEMES and not rest.startswith("//"):
        better = f"{scheme}://{rest if scheme == 'file' else rest.lstrip('/')}"
        raise ValueError(f"{text!r} is not a url: two slashes follow its scheme, as in {better!r}.")
    if isinstance(url, Path) or "://" not in text:
        return Path(os.path.normpath(os.path.expanduser(text)))  # a shell leaves the ~ of --rendezvous=~/runs
    parts = urlsplit(text)
    if parts.scheme != "file":
        return None
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ValueError(f"A file url needs an absolute path, as in 'file:///data/runs', got {text!r}.")
    return Path(os.path.normpath(unquote(parts.path)))


def real_url(url: str) -> str:
    """Return a store's url by which it is always the same; of a directory, that to which all links lead."""
    directory = directory_of(url)
    return url if directory is None else Path(os.path.realpath(directory)).as_uri()


def located_url(url: str) -> str:
    """Return a store's url with the part that only this machine knows: a bucket's endpoint. No request is made."""
    if not url.startswith("s3:"):
        return url
    from executors.store.s3.address import S3Address
    from executors.store.s3.client import located

    address = S3Address.parse(url)
    return replace(address, endpoint_url=located(address).endpoint_url).url


def is_near(url: str) -> bool:
    """Return whether looking into a store costs next to nothing: a directory, or this process's memory."""
    return directory_of(url) is not None or url.startswith("memory:")


def remote_access(store: Store) -> tuple[str, dict[str, str]]:
    """Return how another machine opens a store: a url that needs nothing of this machine, and variables.

    The variables hold credentials: they may travel as a secret of a service, and nowhere else.

    Raises:
        StoreError: this machine has no credentials to give.
    """
    of_store = getattr(store, "remote_access", None)
    return of_store() if of_store is not None else (store.url, {})


def default_rendezvous() -> str | None:
    """Return `$REPLICAS_RENDEZVOUS`, in which replicas on other machines meet. None if it is not set."""
    return os.environ.get("REPLICAS_RENDEZVOUS") or None


def shared_rendezvous(backend: str, rendezvous: str | Path | None, entrypoint: str | Callable[..., Any], n: int) -> str:
    """Choose the rendezvous of replicas on other machines: the one given, else `$REPLICAS_RENDEZVOUS`.

    Args:
        backend, entrypoint, n: of the launch, for the command that the error suggests.

    Raises:
        BackendError: there is none, or it is a directory of this machine.
    """
    chosen = rendezvous if rendezvous is not None else default_rendezvous()
    if chosen and directory_of(chosen) is None:
        return str(chosen)
    why = f" {str(chosen)!r} is a directory of this machine." if chosen else ""
    name = entrypoint if isinstance(entrypoint, str) else "train.py:main"
    raise BackendError(
        f"Backend {backend!r} needs a rendezvous that both sides reach.{why} Try: replicas launch {name} "
        f"--backend {backend} --n {n} --rendezvous s3://BUCKET/PREFIX (or set REPLICAS_RENDEZVOUS)."
    )


def check_run_id(run_id: str) -> str:
    """Return the run id.

    Raises:
        ValueError: it cannot be a name everywhere (paths, labels, buckets).
    """
    if not RUN_ID.fullmatch(run_id):
        raise ValueError(
            f"Bad run id {run_id!r}: use 1 to 40 lower-case letters, digits and hyphens, not a hyphen first, "
            "as in 'my-run-1'."
        )
    return run_id


def new_run_id() -> str:
    """Make a run id that people can tell apart: two words and four hex digits, as in `brave-otter-09af`."""
    return f"{secrets.choice(ADJECTIVES.split())}-{secrets.choice(ANIMALS.split())}-{os.urandom(2).hex()}"


def address_of(store_url: str, run_id: str) -> str:
    """Return the address of a run: its id after the store's path, before the options that a url may have."""
    path, question_mark, options = _without_options(store_url)
    return f"{path.rstrip('/')}/{run_id}{question_mark}{options}"


def command_to_delete(store_url: str, key: str) -> str:
    """Return the shell command that deletes one object of a store. Empty: no common tool can.

    Args:
        store_url: the url of the store.
        key: the key of the object.

    Example:
        command_to_delete("s3://bucket/runs", "otter/diloco/main/seal/11")
    """
    if (directory := directory_of(store_url)) is not None:
        return shlex.join(["rm", str(directory / key)])
    if not store_url.startswith("s3:"):
        return ""
    from executors.store.s3.address import S3Address

    where = S3Address.parse(store_url)
    given = {"--endpoint-url": where.endpoint_url, "--region": where.region, "--profile": where.profile}
    options = [word for name, value in given.items() if value for word in (name, value)]
    return shlex.join(["aws", "s3", "rm", f"s3://{where.bucket}/{where.prefix}{key}", *options])


def split_address(address: str) -> tuple[str, str]:
    """Return the url of the store and the run id in an address, which `address_of` or the user wrote."""
    path, question_mark, options = _without_options(address)
    store_url, _, run_id = path.rstrip("/").rpartition("/")
    return f"{store_url}{question_mark}{options}", run_id


def _without_options(url: str) -> tuple[str, str, str]:
    return url.partition("?") if url.startswith("s3:") else (url, "", "")
