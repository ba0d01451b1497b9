"""From a url to a store."""

from __future__ import annotations

import functools
from pathlib import Path
from urllib.parse import unquote, urlsplit

from executors.store.protocol import Store

KNOWN_SCHEMES = ("file", "memory", "s3")


def open_store(url: str | Path) -> Store:
    """Open the store at `url`.

    That is `file:///path` or a plain path, `s3://bucket/prefix?endpoint_url=&region=&profile=` (needs the extra `s3`),
    or `memory://name` (this process only). Opening a directory creates it when it is missing; opening a directory or a
    bucket proves that exclusive creation works there.

    Raises:
        ValueError: the url has a scheme that no store serves, or is wrong for its scheme.
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
        from executors.store.s3 import S3Store

        return S3Store(text)
    shown = "" if "@" in text else f" (in {text!r})"  # what stands before an '@' may be a password
    raise ValueError(
        f"No store serves {parts.scheme!r}{shown}. Known schemes: {', '.join(KNOWN_SCHEMES)}; "
        "a plain path is a directory."
    )


def address_of(store_url: str, run_id: str) -> str:
    """Join the url of a store and a key in it, such as a run's id, before the options that a url may have."""
    path, question_mark, options = store_url.partition("?") if store_url.startswith("s3:") else (store_url, "", "")
    return f"{path.rstrip('/')}/{run_id}{question_mark}{options}"


def split_address(address: str) -> tuple[str, str]:
    """Take apart what `address_of` joined, or a person wrote: the url of the store, and the last part of the path."""
    path, question_mark, options = address.partition("?") if address.startswith("s3:") else (address, "", "")
    store_url, _, run_id = path.rstrip("/").rpartition("/")
    return f"{store_url}{question_mark}{options}", run_id


def store_at(url: str | Path) -> Store:
    """Open a store once for this process and those it forks: the probe of a directory is not repeated."""
    text = str(url)
    return _opened(text if "://" in text or not text else Path(text).absolute().as_uri())


_opened = functools.cache(open_store)


def directory_of(url: str | Path) -> Path | None:
    """Return the directory that a url names; None when it names a store of another kind.

    Raises:
        ValueError: the url is empty, or a `file:` url without an absolute path.
    """
    text = str(url)
    if not text:
        raise ValueError("The url of a store is empty. Give a directory, or a url such as 'file:///data/runs'.")
    if isinstance(url, Path) or "://" not in text:
        return Path(text)
    parts = urlsplit(text)
    if parts.scheme != "file":
        return None
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ValueError(f"A file url needs an absolute path, as in 'file:///data/runs', got {text!r}.")
    return Path(unquote(parts.path))


def reach_from_elsewhere(store: Store) -> tuple[str, dict[str, str]]:
    """Return how another machine opens a store: a url that needs nothing of this machine, and variables.

    The variables hold credentials: they may travel in a vendor's secret object, and nowhere else.

    Raises:
        StoreError: this machine has no credentials to give.
    """
    reach = getattr(store, "reach_from_elsewhere", None)
    return reach() if reach is not None else (store.url, {})
