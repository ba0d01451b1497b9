"""What this machine knows of runs: the directory of local runs, which is also the index of those elsewhere.

<state>/<run_id>/run.json             a run whose store is this directory
<state>/<run_id>/launched.json        a run that this machine launched: {"rendezvous": url, or null for this directory,
                                      "task_digest": the sha256 of its task}
<state>/<run_id>/replicas/…/output.log   what local replicas print, whatever the run's store
"""

from __future__ import annotations

from pathlib import Path

from executors.errors import StoreError
from executors.records import find_json, to_bytes
from executors.store import Store, store_at


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


def remember(run_id: str, store_url: str, task_digest: str) -> None:
    """Note what this machine launched, and where, so that the run's id alone finds it again and its task is known."""
    store = local_store()
    elsewhere = store_url if store_url != store.url else None  # a state directory may be moved
    store.put(f"{run_id}/launched.json", to_bytes({"rendezvous": elsewhere, "task_digest": task_digest}))


def locate(run_id: str) -> str | None:
    """Return the url of the store that holds a run, as far as this machine knows."""
    store = local_store()
    note = find_json(store, f"{run_id}/launched.json")
    if note is not None and note["rendezvous"] is not None:
        return str(note["rendezvous"])
    return store.url if (state_dir() / run_id / "run.json").is_file() else None


def kept_digest(run_id: str, store_url: str) -> str | None:
    """Return the sha256 of the task that this machine launched as that run at that store; None: it did not."""
    store = local_store()
    note = find_json(store, f"{run_id}/launched.json")
    return str(note["task_digest"]) if note and (note["rendezvous"] or store.url) == store_url else None


def forget(run_id: str) -> None:
    """Delete what this machine keeps of a run: its logs and its place."""
    import shutil

    shutil.rmtree(state_dir() / run_id, ignore_errors=True)


def known_run_ids() -> list[str]:
    """List the runs that this machine knows of, oldest first."""
    found = [path for path in state_dir().iterdir() if path.is_dir() and not path.name.startswith(".")]
    runs = [path for path in found if (path / "run.json").is_file() or (path / "launched.json").is_file()]
    return [path.name for path in sorted(runs, key=lambda path: path.stat().st_mtime)]
