"""What this machine knows of runs: the directory of local runs, which is also the index of those elsewhere.

<state>/<run_id>/run.json             a run whose store is this directory
<state>/<run_id>/location.json        a run whose store is elsewhere: its url, and what this machine launched it with
<state>/<run_id>/replicas/…/output.log   what local replicas print, whatever the run's store
<state>/<run_id>/supervisors.lock     locked by those who watch over local replicas

Two stores may both hold a run of one id. The folder of an id is of the one run that this machine launched: what it
keeps there is neither shown nor deleted for another.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executors.errors import RunExistsError, StoreError
from executors.records import Fields, find_record, json_object, list_of, nullable, text, to_bytes
from executors.store import Store, store_at
from executors.store.opening import directory_of


def state_path() -> Path:
    """Return where this user's directory of runs is, or would be."""
    import platformdirs

    return Path(platformdirs.user_state_path("replicas"))


def state_dir() -> Path:
    """Return this user's directory of runs, made for this user alone when it is missing."""
    path = state_path()
    if not path.is_dir():
        try:
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(0o700)
        except OSError as error:
            raise StoreError(
                f"Cannot keep runs in {path}: {error.strerror}. Set XDG_STATE_HOME to a directory of yours.",
                url=path.as_uri(),
            ) from error
    return path


def local_store() -> Store:
    """Open the default rendezvous: the state directory."""
    return store_at(state_dir())


@dataclass(frozen=True)
class Location:
    """What this machine noted of a run whose store is elsewhere. Unlike the run's records nobody else wrote it."""

    rendezvous: str
    executor_options: Mapping[str, Any] | None = None
    """What it was launched with. None: it was launched elsewhere, and brought back here."""
    secrets: tuple[str, ...] = ()

    @classmethod
    def parse(cls, data: Any, key: str = "location.json", url: str = "") -> Location:
        fields = Fields(data, key, url)
        return cls(
            fields.take("rendezvous", text()),
            fields.take("executor_options", nullable(json_object), None),
            fields.take("secrets", list_of(text()), ()),
        )


def remember(
    run_id: str, store_url: str, executor_options: Mapping[str, Any] | None = None, secrets: tuple[str, ...] = ()
) -> None:
    """Note where a run is, so that its id alone finds it again on this machine, and what it was launched with."""
    store = local_store()
    if store_url != store.url:
        noted = {"rendezvous": store_url, "executor_options": executor_options, "secrets": secrets}
        store.put(f"{run_id}/location.json", to_bytes(noted))


def noted_at_launch(run_id: str, store_url: str) -> Location | None:
    """Return what this machine noted of a run that it launched, and whose store is elsewhere."""
    location = find_record(local_store(), f"{run_id}/location.json", Location.parse)
    if location is None or location.executor_options is None:
        return None
    return location if _is_same_place(location.rendezvous, store_url) else None


def was_launched_here(run_id: str, store_url: str) -> bool:
    """Tell whether this machine launched a run, as far as it has noted it itself."""
    return noted_at_launch(run_id, store_url) is not None or (
        locate(run_id) == local_store().url and _is_same_place(local_store().url, store_url)
    )


def locate(run_id: str) -> str | None:
    """Return the url of the store that holds a run, as far as this machine knows."""
    store = local_store()
    location = find_record(store, f"{run_id}/location.json", Location.parse)
    if location is not None:
        return location.rendezvous
    return store.url if (state_dir() / run_id / "run.json").is_file() else None


def folder_of_run(run_id: str, store_url: str) -> Path | None:
    """Return the folder that this machine has of a run; None when it has none, or one of another run of this id."""
    known = locate(run_id)
    return state_dir() / run_id if known is not None and _is_same_place(known, store_url) else None


def settle(run_id: str, store_url: str) -> None:
    """Make sure that this machine's folder of a run id is of the run in this store.

    Raises:
        RunExistsError: it is of another run.
    """
    known = locate(run_id)
    if known is not None and not _is_same_place(known, store_url):
        directory = directory_of(known)
        if directory is None or (directory / run_id / "run.json").exists():
            raise RunExistsError(
                f"This machine knows another run {run_id!r}, at {known}, and keeps its logs under that id. "
                f"Remove it first: `replicas rm {run_id}`."
            )
        known = None  # the store has moved since
    if known is None:
        remember(run_id, store_url)


def forget(folder: Path | None) -> None:
    """Delete what this machine keeps of a run: its logs and its place.

    Args:
        folder: as `folder_of_run` said before the run was deleted.
    """
    import shutil

    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _is_same_place(url: str, other: str) -> bool:
    if url == other:
        return True
    here, there = directory_of(url), directory_of(other)
    with contextlib.suppress(OSError):  # one of them is not there
        return here is not None and there is not None and os.path.samefile(here, there)
    return False


def known_run_ids() -> list[str]:
    """List the runs that this machine knows of, oldest first."""
    found = [path for path in state_dir().iterdir() if path.is_dir() and not path.name.startswith(".")]
    runs = [path for path in found if (path / "run.json").is_file() or (path / "location.json").is_file()]
    return [path.name for path in sorted(runs, key=lambda path: path.stat().st_mtime)]
