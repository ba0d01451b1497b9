"""The index of runs on this machine: the directory of local runs, and notes on runs in other stores.

<state>/<run_id>/run.json             a run whose store is this directory
<state>/<run_id>/launched.json        where a run is that this machine launched, the digest of its task, and what it was
                                      launched with; of one that was brought back here, only where it is
<state>/<run_id>/jobs.jsonl           the ids of the jobs that this machine started at services; see `job_notes`
<state>/<run_id>/replicas/…/output.log   what local replicas print, whatever the run's store
<state>/<run_id>/removing.json        that the run is being removed, wherever its store is; the last file to be deleted
<state>/<run_id>/supervisors.lock     locked by those who watch over local replicas
<state>/.keys/<run_id>                the key of a signed run, in hexadecimal; where its folder is copied to, it is not
<state>/.preparing/<run_id>.json      a launch that has written nothing else yet, or never did
<state>/.noting.lock                  held while a note is read and written again

Two stores may each have a run with the same id. The folder of an id belongs to the run that this machine launched, so
it is neither shown nor deleted for another run.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from executors.errors import CorruptObjectError, RunExistsError, StoreError
from executors.process import is_alive, start_time
from executors.settings.run_spec import RunSpec
from executors.store import Store, store_at
from executors.store.record_names import REMOVAL, RUN_RECORD
from executors.store.records import (
    FAR_AHEAD,
    LONG_AGO,
    MAX_TEXT,
    SHA256,
    Record,
    checked,
    find_record,
    integer,
    is_json,
    json_object,
    list_of,
    nullable,
    number,
    text,
    to_bytes,
)
from executors.store.run_key import KEYS, RUN_KEY, drop_key, find_key, hold_key, key_file, note_lacking_key
from executors.store.state_folder import STATE_HOME_ADVICE, state_path
from executors.store.url import address_of, check_run_id, directory_of
from executors.task.removal_record import Removal, find_removal

NOTE = "launched.json"
PREPARING = ".preparing"
LOCK = ".noting.lock"
KNOWN_BY = (RUN_RECORD, NOTE, REMOVAL)
"""A folder with one of these files belongs to a run."""
FORGOTTEN_S = 86_400  # the age at which a launch that failed before it wrote its run is no longer shown


def state_dir() -> Path:
    """Return this user's directory of runs. A missing directory is created, readable for this user only."""
    path = state_path()
    try:
        if not path.is_dir():
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(0o700)
    except OSError as error:
        raise StoreError(
            f"Cannot keep runs in {path}: {error.strerror}. {STATE_HOME_ADVICE}", url=path.as_uri()
        ) from error
    return path


def local_store() -> Store:
    """Open the default store: the directory of this user's runs."""
    return store_at(state_dir())


@dataclass(frozen=True)
class Note(Record):
    """This machine's note on a run. Other users cannot write it, although they may write the run's records."""

    rendezvous: str | None = checked(nullable(text()))
    """The url of the run's store. None: the store is the state directory, which may be moved."""
    task_digest: str | None = checked(nullable(text(64, SHA256)), None)
    """The sha256 of the task that this machine launched. None: another machine launched the run, and this machine only
    resumed it.
    """
    executor_options: Mapping[str, Any] = checked(json_object, {})
    """The options with which the run's executor was made."""
    more_options: Mapping[str, Any] = checked(json_object, {})
    """The options of the other executors of a run on several backends, by the name of the backend or of the
    addition.
    """
    secrets: tuple[str, ...] = checked(list_of(text()), ())

    @property
    def store_url(self) -> str:
        return local_store().url if self.rendezvous is None else self.rendezvous


def remember(
    run_id: str,
    store_url: str,
    task_digest: str | None = None,
    executor_options: Mapping[str, Any] | None = None,
    secrets: Sequence[str] = (),
    more_options: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Note the store, the task and the options of a run, so that this machine finds the run by its id alone.

    Only this user can read the file, because it names secrets and an option may be secret. An option that is not JSON,
    such as an image object, is left out. The user gives it again for a resume.
    """
    store = local_store()
    more = {name: as_noted(each) for name, each in (more_options or {}).items()}
    rendezvous = store_url if store_url != store.url else None
    note = Note(rendezvous, task_digest, as_noted(executor_options or {}), more, tuple(secrets))
    key = f"{run_id}/{NOTE}"
    store.put(key, to_bytes(asdict(note)))
    with contextlib.suppress(OSError):  # the file system has no permissions
        (state_dir() / key).chmod(0o600)
    # The user must find a run that costs money also after a power cut.
    for path in (state_dir() / key, state_dir() / run_id, state_dir()):
        sync(path)


def remember_launch(
    spec: RunSpec, options: Mapping[str, Any], more_options: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """Note a run that is about to start, and keep its key. Then this machine can find and resume the run later.

    Args:
        spec: the run.
        options: the options of its executor.
        more_options: the options of each other executor, by the name of its placement. Default: there is one executor.

    Raises:
        StoreError: this machine cannot write notes.

    Example:
        remember_launch(spec, *placements.options_to_note())
    """
    remember(spec.run_id, spec.store_url, spec.task_digest, options, spec.secret_names, more_options)
    keep_key(spec.run_id, spec.key)
    drop_key(spec.store_url, spec.run_id)  # this process may still have the key of a removed run with the same id
    hold_key(spec.store_url, spec.run_id, spec.key)


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk and survive a power cut.

    Args:
        path: the file or folder. If a file system cannot do this for folders, nothing is done.

    Example:
        sync(state_dir())
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def as_noted(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that JSON can express, as a note contains them."""
    return {name: json.loads(json.dumps(value)) for name, value in options.items() if is_json(value)}


def remember_added(run_id: str, store_url: str, name: str, options: Mapping[str, Any]) -> None:
    """Note that this machine added ranks to a run, and the options of their executor, by the name of the addition."""
    if locate(run_id) is not None and folder_of_run(run_id, store_url) is None:
        return  # the folder of this id belongs to another run
    with _noting():
        note = _find_note(run_id) or Note(store_url)
        more = {**note.more_options, name: options}
        remember(run_id, store_url, note.task_digest, note.executor_options, note.secrets, more)


@contextlib.contextmanager
def _noting() -> Iterator[None]:
    """Lock the notes of this machine, so that no other process changes them within the block.

    Without locks, do nothing.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl  # fcntl is missing on some systems that can launch in a cloud

            fcntl.flock(stack.enter_context(open(state_dir() / LOCK, "ab")), fcntl.LOCK_EX)
        yield


def noted_options(run_id: str, store_url: str, name: str) -> Mapping[str, Any] | None:
    """Return the noted options of an executor of a run. None: this machine has no such note."""
    note = _find_note(run_id)
    found = None if note is None or not _is_same_place(note.store_url, store_url) else note.more_options.get(name)
    return found if isinstance(found, dict) else None


def _find_note(run_id: str) -> Note | None:
    # A power cut may cut off the note; the run can still be found by its address.
    with contextlib.suppress(CorruptObjectError):
        return find_record(local_store(), f"{run_id}/{NOTE}", Note.parse)
    return None


def damage_of_note(run_id: str) -> CorruptObjectError | None:
    """Return the error of reading the note on a run. None: the note can be read, or there is none."""
    try:
        find_record(local_store(), f"{run_id}/{NOTE}", Note.parse)
    except CorruptObjectError as error:
        return error
    return None


def check_is_located(run_id: str, store_url: str) -> None:
    """Check that a run without records in the state directory is not one whose note cannot be read.

    Raises:
        CorruptObjectError: the run has a note that would name its store, and the note cannot be read.
    """
    if _is_same_place(state_path().as_uri(), store_url) and (damage := damage_of_note(run_id)) is not None:
        raise CorruptObjectError(
            f"{damage} It holds the place of run {run_id!r}. Give the address, as in 's3://BUCKET/PREFIX/{run_id}'.",
            key=damage.key,
            url=damage.url,
        )


def noted_at_launch(run_id: str, store_url: str) -> Note | None:
    """Return the note of this machine's launch of a run. None: this machine did not launch the run in this store."""
    note = _find_note(run_id)
    if note is None or note.task_digest is None:
        return None
    return note if _is_same_place(note.store_url, store_url) else None


def locate(run_id: str) -> str | None:
    """Return the url of a run's store, as far as this machine knows. For a lost run it is the state directory.

    A run is lost if its note cannot be read, and its records are not in the state directory.
    """
    store = local_store()
    note = _find_note(run_id)
    if note is not None and note.rendezvous is not None:
        return note.rendezvous
    return store.url if _is_here(run_id) or damage_of_note(run_id) is not None else None


def _is_here(run_id: str) -> bool:
    """Return True if the state directory has a run, or the rest of it after an interrupted removal."""
    return any(os.path.isfile(state_dir() / run_id / name) for name in (RUN_RECORD, REMOVAL))


def is_state_dir(store_url: str) -> bool:
    """Return True if a store is this user's state directory.

    Args:
        store_url: the url of the store.

    Example:
        >>> is_state_dir("s3://bucket/prefix")
        False
    """
    return _is_same_place(state_path().as_uri(), store_url)


def reference(run_id: str, store_url: str) -> str:
    """Return the shortest text by which a shell command finds the run from this machine: its id or its address."""
    with contextlib.suppress(StoreError):  # some machines have no state directory, such as the machine of a replica
        if os.path.isdir(state_path()) and locate(run_id) == store_url:
            return run_id
    return shlex.quote(address_of(store_url, run_id))


def folder_of_run(run_id: str, store_url: str) -> Path | None:
    """Return this machine's folder of a run. None: it has none, or the folder belongs to another run with this id.

    If the note cannot be read, the folder is returned for every run with this id.
    """
    known = locate(run_id)
    is_its = known is not None and _is_same_place(known, store_url)
    # An interrupted removal may have left its record in the folder. The run still counts as lost.
    has_record = os.path.isfile(state_dir() / run_id / RUN_RECORD)
    is_lost = not is_its and damage_of_note(run_id) is not None and not has_record
    return state_dir() / run_id if is_its or is_lost else None


def claim_run_folder(run_id: str, store_url: str, task_digest: str) -> None:
    """Check that this machine's folder for a run id belongs to the run in this store.

    Raises:
        RunExistsError: it belongs to another run.
    """
    known = locate(run_id)
    if known is not None and _is_same_place(known, store_url):
        return
    note = None
    if known is not None:
        directory = directory_of(known)
        if directory is None or (directory / run_id / RUN_RECORD).exists():
            raise RunExistsError(
                f"This machine knows another run {run_id!r}, at {known}, and keeps its logs under that id. "
                f"Remove it first: `replicas rm {run_id}`."
            )
        note = _find_note(run_id)
    if note is not None and note.task_digest == task_digest:  # the store of this run was moved since the note
        remember(run_id, store_url, task_digest, note.executor_options, note.secrets, note.more_options)
    else:
        remember(run_id, store_url)


def keep_key(run_id: str, key: str | None) -> None:
    """Store the key of a run that this machine launches. Only this user can read it. None: the run has no key.

    Raises:
        StoreError: the key cannot be stored, so the run could not be resumed later.
    """
    path = key_file(run_id)
    try:
        path.unlink(missing_ok=True)  # a deleted run with the same id may have left its key
        if key is None:
            return
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with open(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(key)
    except OSError as error:
        problem = f"Cannot keep the key of run {run_id!r} in {path}: {error.strerror}."
        raise StoreError(problem, url=path.as_uri()) from error


def needed_key(run_id: str, wanted: str) -> str:
    """Return the key of a signed run, from the environment or from this machine's folder of keys.

    Args:
        run_id: the run.
        wanted: the id of the key.

    Raises:
        ValueError: neither the environment nor the folder has this key.
    """
    key = find_key(run_id, wanted)
    if key is None:
        given = f"; {RUN_KEY} holds a different key" if RUN_KEY in os.environ else ""
        raise ValueError(
            f"Run {run_id!r} is signed (key {wanted}), and this machine does not have its key{given}. Set {RUN_KEY} to "
            f"what {KEYS}/{run_id} holds on the machine that launched the run, by default in ~/.local/state/replicas."
        )
    return key


def hold_key_of(run_id: str, store_url: str, wanted: str | None) -> None:
    """Load the key of a signed run into this process, if this machine has the key.

    If this machine launched the run as signed, the run counts as signed, whatever its record contains now. Another
    process that can write to the store could have replaced the record.

    Args:
        run_id: the run.
        store_url: the store of the run, as `Store.url` names it.
        wanted: the id of the run's key in its record. None: the record describes an unsigned run.

    Example:
        hold_key_of(run.run_id, run.store.url, run.record.key_id)
    """
    key = None if wanted is None else find_key(run_id, wanted)
    if key is None:
        with contextlib.suppress(OSError, ValueError, StoreError):
            path = key_file(run_id)
            if path.exists() and (known := locate(run_id)) is not None and _is_same_place(known, store_url):
                key = path.read_text()
    hold_key(store_url, run_id, key)
    if wanted is not None:
        note_lacking_key(store_url, run_id)


def forget(folder: Path | None) -> None:
    """Delete everything that this machine has of a run: its logs, its key, its note, and the record of its removal.

    Args:
        folder: the result of `folder_of_run` before the run was deleted. None: this machine has nothing.
    """
    import shutil

    if folder is None:
        return
    # The note and the record of the removal are deleted last, because a later command needs them to complete the
    # removal.
    last = [folder / NOTE, folder / REMOVAL]
    with contextlib.suppress(OSError):
        key_file(folder.name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        for path in set(folder.iterdir()) - {*last}:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        for path in last:
            path.unlink(missing_ok=True)
        folder.rmdir()


def find_removal_here(run_id: str, store_url: str) -> Removal | None:
    """Return the removal of a run whose store is already empty, from this machine's folder.

    Args:
        run_id: the run.
        store_url: the url of the store.
    """
    if folder_of_run(run_id, store_url) is None:
        return None
    with contextlib.suppress(StoreError):
        return find_removal(local_store(), run_id)
    return None


def _is_same_place(url: str, other: str) -> bool:
    if url == other:
        return True
    here, there = directory_of(url), directory_of(other)
    with contextlib.suppress(OSError):  # one of the two does not exist
        return here is not None and there is not None and os.path.samefile(here, there)
    return False


def known_run_ids() -> list[str]:
    """List the runs that this machine knows of, oldest first."""
    changed: dict[str, float] = {}
    for path in state_dir().iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process is removing it
            if not path.name.startswith(".") and any(os.path.isfile(path / name) for name in KNOWN_BY):
                changed[path.name] = path.stat().st_mtime
    return sorted(changed, key=changed.__getitem__)


def noted_at(run_id: str) -> float:
    """Return the Unix time of the last note on a run. 0.0 if there is no note."""
    try:
        return (state_dir() / run_id / NOTE).stat().st_mtime
    except OSError:  # the note does not exist, or the folder belongs to another user
        return 0.0


@dataclass(frozen=True)
class Preparation(Record):
    """A launch that has not written its run: it is being checked, or it failed."""

    at: float = checked(number(LONG_AGO, FAR_AHEAD))
    pid: int = checked(integer(1, 2**31 - 1))
    pid_started: int = checked(integer(0, 2**63))
    error: str | None = checked(nullable(text()), None)

    @property
    def is_going_on(self) -> bool:
        return self.error is None and is_alive(self.pid, self.pid_started)

    def describe(self, run_id: str) -> str:
        """Return a sentence on the progress of the launch, or on the reason of its failure."""
        if self.is_going_on:
            age_s = time.time() - self.at
            return f"Run {run_id!r} is being prepared: process {self.pid} has checked it for {age_s:.0f} s."
        why = self.error or f"process {self.pid}, which was about to, has ended."
        return f"Run {run_id!r} was never started: {why}"


@contextlib.contextmanager
def preparing(run_id: str) -> Iterator[None]:
    """Note within the block that this machine prepares a launch. If the block fails, the note keeps the error."""
    pid = os.getpid()
    note = Preparation(time.time(), pid, start_time(pid) or 0)
    path = _write_preparation(run_id, note)
    try:
        yield
    except RunExistsError:  # the id belongs to another run, and so would the note
        if path is not None:
            path.unlink(missing_ok=True)
        raise
    except BaseException as error:
        said = "it was interrupted." if isinstance(error, KeyboardInterrupt) else str(error)[:MAX_TEXT] or repr(error)
        _write_preparation(run_id, replace(note, error=said))
        raise
    if path is not None:
        path.unlink(missing_ok=True)


def find_preparation(run_id: str) -> Preparation | None:
    """Return this machine's note on a launch that has not written its run. None if there is none."""
    with contextlib.suppress(OSError, StoreError):
        return Preparation.parse((state_path() / PREPARING / f"{check_run_id(run_id)}.json").read_bytes())
    return None


def _write_preparation(run_id: str, note: Preparation) -> Path | None:
    """Write the note, and delete notes that are too old to be shown. None if this machine cannot write notes."""
    with contextlib.suppress(OSError, StoreError):
        folder = state_dir() / PREPARING
        folder.mkdir(exist_ok=True)
        for old in folder.iterdir():
            if old.stat().st_mtime < note.at - FORGOTTEN_S:
                old.unlink()
        path = folder / f"{run_id}.json"
        path.write_bytes(to_bytes(asdict(note)))
        return path
    return None
