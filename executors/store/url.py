"""Opens the store at a url, and parses the urls of stores, the addresses of runs and run ids."""

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

    The url is `file:///path` or a plain path, `s3://bucket/prefix?endpoint_url=&region=&profile=` (needs the extra
    `s3`), or `memory://name` (this process only). A missing directory is created.

    A store must create objects exclusively. Opening it checks that: one name is created there twice, and the second
    creation must fail. A store that this process may only read can be opened, too. Then the first write raises the
    error.

        store = open_store("s3://bucket/runs")

    Args:
        url: the address of the store, or a path of this machine.
        is_known: True if the store already has runs. Then a bucket is checked only when the first object is created, so
            a process that only reads runs need not wait. Default False.

    Raises:
        TypeError: the url is neither a string nor a path.
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
    """Check that a url names a kind of store that exists.

    Args:
        url: the address of the store, or a path of this machine.

    Raises:
        ValueError: no kind of store has the url's scheme, or the url is wrong for its scheme.

    Example:
        check_scheme("s3://bucket/runs")
    """
    if directory_of(url) is not None or (scheme := urlsplit(str(url)).scheme) in KNOWN_SCHEMES:
        if str(url).startswith("s3:"):
            from executors.store.s3.address import S3Address

            S3Address.parse(str(url))
        return
    shown = "" if "@" in str(url) else f" (in {str(url)!r})"  # the text before an '@' may be a password
    raise ValueError(
        f"No store has the scheme {scheme!r}{shown}. Use one of {', '.join(KNOWN_SCHEMES)}, or the path of a directory."
    )


def store_at(url: str | Path, *, is_known: bool = False) -> Store:
    """Return the store at a url. A process opens each store once, so the store is checked once.

    Processes that this process forks later share the store.

    Args:
        url: the address of the store, or a path of this machine.
        is_known: True if the store has runs already; see `open_store`. Default False.

    Raises:
        StoreError: the store cannot be opened; see `open_store` for this and other errors.

    Example:
        store_at("s3://bucket/runs").get("otter/run.json")
    """
    directory = directory_of(url) if "://" not in str(url) else None
    place = str(url) if directory is None else directory.absolute().as_uri()
    if place not in _opened:
        _opened.setdefault(place, open_store(place, is_known=is_known))
    return _opened[place]


_opened: dict[str, Store] = {}


def impatient_store(url: str, limit_s: float) -> Store:
    """Return the store at a url for a process that must not wait. Each request to a bucket is tried only once.

    Args:
        url: the address of a store that has runs already.
        limit_s: how long a bucket may take to answer, in seconds.

    Raises:
        StoreError: the store cannot be opened.

    Example:
        impatient_store("s3://bucket/runs", 5.0)
    """
    if not url.startswith("s3:"):
        return store_at(url, is_known=True)
    from executors.store.s3.store import S3Store

    return S3Store(url, checks_later=True, retry_deadline_s=0.0, read_timeout_s=limit_s)


def existing_store(url: str | Path) -> Store:
    """Return the store at a url as `store_at` does, but never create its directory.

    Args:
        url: the address of the store, or a path of this machine.

    Raises:
        RunNotFoundError: there is no such directory.
        StoreError: the directory cannot be looked at.

    Example:
        existing_store("/data/runs")
    """
    directory = directory_of(url)
    if directory is not None and not is_directory(directory):
        raise RunNotFoundError(f"No runs at {directory.absolute()}: there is no such directory.")
    return store_at(url, is_known=True)


def is_directory(path: Path) -> bool:
    """Return True if a path is a directory.

    Args:
        path: the path.

    Raises:
        StoreError: the answer is not known, because the path may not be read, or the disk or the server fails.

    Example:
        is_directory(Path("/data/runs"))
    """
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # a name with a zero byte is a ValueError
        return False
    except OSError as error:  # Path.is_dir raises some of these errors as well
        raise StoreError(f"Cannot look at {path}: {error.strerror}.", url=path.absolute().as_uri()) from error


def directory_of(url: str | Path) -> Path | None:
    """Return the directory that a url names. None if the url names a store of another kind.

    Args:
        url: the address of the store, or a path of this machine.

    Raises:
        TypeError: the url is neither a string nor a path, such as the None of a variable that is not set.
        ValueError: the url is empty, or a `file:` url without an absolute path.

    Example:
        directory_of("file:///data/runs")
    """
    if not isinstance(url, str | os.PathLike):
        raise TypeError(f"The url of a rendezvous must be a string or a path, got {url!r}.")
    text = str(url)
    if not text:
        raise ValueError("The url of a rendezvous is empty. Give a directory, or a url such as 'file:///data/runs'.")
    scheme, colon, rest = text.partition(":")
    if isinstance(url, str) and colon and scheme in KNOWN_SCHEMES and not rest.startswith("//"):
        better = f"{scheme}://{rest if scheme == 'file' else rest.lstrip('/')}"
        raise ValueError(f"{text!r} is not a url: two slashes follow its scheme, as in {better!r}.")
    if isinstance(url, Path) or "://" not in text:
        return Path(os.path.normpath(os.path.expanduser(text)))  # no shell expands the "~" in --rendezvous=~/runs
    parts = urlsplit(text)
    if parts.scheme != "file":
        return None
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ValueError(f"A file url needs an absolute path, as in 'file:///data/runs', got {text!r}.")
    return Path(os.path.normpath(unquote(parts.path)))


def real_url(url: str) -> str:
    """Return a url that is the same for every name of a store. For a directory, symbolic links are resolved.

    Args:
        url: the url of a store.

    Example:
        real_url("file:///tmp/link-to-runs")
    """
    directory = directory_of(url)
    return url if directory is None else Path(os.path.realpath(directory)).as_uri()


def located_url(url: str) -> str:
    """Return a store's url with the endpoint and the region that this machine's settings give a bucket.

    No request is made.

    Args:
        url: the url of a store.

    Example:
        located_url("s3://bucket/runs")
    """
    if not url.startswith("s3:"):
        return url
    from executors.store.s3.address import S3Address
    from executors.store.s3.client import located

    address = S3Address.parse(url)
    return replace(address, endpoint_url=located(address).endpoint_url).url


def is_near(url: str) -> bool:
    """Return True if reading from a store costs almost nothing, as in a directory or in this process's memory.

    Args:
        url: the url of a store.

    Example:
        is_near("file:///data/runs")
    """
    return directory_of(url) is not None or url.startswith("memory:")


def remote_access(store: Store) -> tuple[str, dict[str, str]]:
    """Return a url and environment variables with which another machine can open a store.

    The variables have credentials. Send them as a secret of a service, and in no other way.

    Args:
        store: the store.

    Raises:
        StoreError: this machine has no credentials for the store.

    Example:
        url, variables = remote_access(store)
    """
    of_store = getattr(store, "remote_access", None)
    return of_store() if of_store is not None else (store.url, {})


def default_rendezvous() -> str | None:
    """Return the store's url in `$REPLICAS_RENDEZVOUS`. None if the variable is not set or empty.

    Example:
        default_rendezvous()
    """
    return os.environ.get("REPLICAS_RENDEZVOUS") or None


def shared_rendezvous(backend: str, rendezvous: str | Path | None, entrypoint: str | Callable[..., Any], n: int) -> str:
    """Return the url of a store that replicas on other machines can reach.

    Args:
        backend: the name of the backend, for the message.
        rendezvous: the store of the launch. None: the store in `$REPLICAS_RENDEZVOUS`.
        entrypoint: the entrypoint of the launch, for the command in the message.
        n: the number of replicas, for the command in the message.

    Raises:
        BackendError: no store is given, or the store is a directory of this machine.

    Example:
        shared_rendezvous("modal", "s3://bucket/runs", "train.py:main", 8)
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
    """Return a run id, after checking that it can be part of a path, of a label and of a key in a bucket.

    Args:
        run_id: the run id.

    Raises:
        ValueError: the text is not a run id.

    Example:
        check_run_id("my-run-1")
    """
    if not RUN_ID.fullmatch(run_id):
        raise ValueError(
            f"Bad run id {run_id!r}: use 1 to 40 lower-case letters, digits and hyphens, and do not begin with a "
            "hyphen, as in 'my-run-1'."
        )
    return run_id


def new_run_id() -> str:
    """Return a new run id that people can remember: two words and four hexadecimal digits, as in `brave-otter-09af`.

    Example:
        new_run_id()
    """
    return f"{secrets.choice(ADJECTIVES.split())}-{secrets.choice(ANIMALS.split())}-{os.urandom(2).hex()}"


def address_of(store_url: str, run_id: str) -> str:
    """Return the address of a run: the store's url with the run id after its path and before its options.

    Args:
        store_url: the url of the store.
        run_id: the run.

    Example:
        address_of("s3://bucket/runs?region=eu-west-1", "my-run-1")
    """
    path, question_mark, options = _without_options(store_url)
    return f"{path.rstrip('/')}/{run_id}{question_mark}{options}"


def command_to_delete(store_url: str, key: str) -> str:
    """Return the shell command that deletes one object of a store. An empty string if no common tool can delete it.

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
    """Return the url of the store and the run id in the address of a run.

    Args:
        address: the address, as `address_of` returns it, or as the user wrote it.

    Example:
        store_url, run_id = split_address("s3://bucket/runs/my-run-1")
    """
    path, question_mark, options = _without_options(address)
    store_url, _, run_id = path.rstrip("/").rpartition("/")
    return f"{store_url}{question_mark}{options}", run_id


def _without_options(url: str) -> tuple[str, str, str]:
    return url.partition("?") if url.startswith("s3:") else (url, "", "")
