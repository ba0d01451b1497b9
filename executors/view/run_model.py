"""Reads the trained model of a run through the package `diloco`. The executors know nothing about rounds or tensors."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from executors.errors import MissingDependencyError, ReplicasError, StoreError, install_command
from executors.patience import retry
from executors.protocol import Outcome
from executors.registry.run_index import needed_key
from executors.restarts.decision_log import DecisionLog, extensions_of
from executors.store import Store
from executors.store.records import exists
from executors.store.run_key import parse_key
from executors.view.run_view import RunView

READERS = "replicas.model"  # the group of Python entry points by which a package announces that it reads models


def load_reader(name: str = "default") -> Any:
    """Return the object that reads models of runs, from the package that announces it.

    Args:
        name: "default" for the module that reads models, or "extension" for the function that checks an extension.

    Raises:
        ReplicasError: no installed package announces such an object.
        MissingDependencyError: the package needs another package, such as torch, which is not installed on this
            machine.
    """
    found = list(entry_points(group=READERS, name=name))
    if not found:
        raise ReplicasError(f"No installed package reads models (group {READERS!r}). Install this package again.")
    try:
        return found[0].load()
    except ImportError as error:
        missing = (getattr(error, "name", None) or str(error)).partition(".")[0]
        raise MissingDependencyError(
            f"The model of a run cannot be read without the package {missing!r}, which is not installed here. Use a "
            f"machine that has it, or install what training needs with: {install_command('diloco')}"
        ) from error


def source_of(store: Store, run_id: str, key_id: str | None, name: str) -> Any:
    """Return the place of a run's model, which a reader of models takes. It has the run's key and extensions.

    Args:
        store: the store of the run.
        run_id: the id of the run.
        key_id: the id of a signed run's key, from its record; None if the run is not signed.
        name: the name of its DiLoCo.

    Raises:
        ValueError: the run is signed, and this machine does not have its key.
    """
    key = None if key_id is None else needed_key(run_id, key_id)
    extensions = extensions_of(retry(DecisionLog(store, run_id, key=key).read))
    found = None if key is None else parse_key(key)
    return load_reader().ModelSource(store=store, run_id=run_id, name=name, key=found, extensions=extensions)


def read_run_model(view: RunView, *, step: int | None = None, name: str = "main", **more: Any) -> Any:
    """Return the trained model of a run. The result has `tensors`, `step`, `rounds` and more.

    Args:
        view: the run.
        step: the step of the run. The model is the newest round at or before this step. None: the newest round.
        name: the name of the DiLoCo. Default "main".
        more: the options `rounds`, `dtype` and `outer_optimizer`, as `Run.model` describes them.

    Raises:
        RunNotFoundError: the run has no DiLoCo of this name.
        ReplicasError: the store no longer has this round.
        ValueError: the run is signed, and this machine does not have its key.
        MissingDependencyError: torch is not installed on this machine.

    Example:
        read_run_model(view_of(attach("first-try"))).tensors
    """
    source = source_of(view.store, view.run_id, view.record.key_id, name)
    return load_reader().read_model(source, step=step, **more)


def save_run_model(view: RunView, path: Path, *, step: int | None = None, name: str = "main", **more: Any) -> Any:
    """Write the trained model of a run to a safetensors file, and return a description of the file's content.

    Args:
        view: the run.
        path: the file. An existing file is replaced.
        step: the step of the run. The model is the newest round at or before this step. None: the newest round.
        name: the name of the DiLoCo. Default "main".
        more: the options `rounds`, `dtype` and `outer_optimizer`, as `Run.model` describes them.

    Raises:
        OSError: the file cannot be written.
        RunNotFoundError, ReplicasError, ValueError, MissingDependencyError: see `read_run_model`.

    Example:
        save_run_model(view_of(attach("first-try")), Path("model.safetensors"))
    """
    found = read_run_model(view, step=step, name=name, **more)
    load_reader().save_model(found, path)
    return found


def has_model(store: Store, run_id: str, outcomes: Iterable[Outcome]) -> bool:
    """Return True if an ended run has a model of the DiLoCo `main`, so that the CLI can print a hint to write it.

    Args:
        store: the store of the run. It is only read if a replica reported a round.
        run_id: the id of the run.
        outcomes: the outcomes of its replicas.
    """
    if not any("round" in (outcome.reached or {}) for outcome in outcomes):
        return False
    try:
        return exists(store, f"{run_id}/diloco/main/snapshot/0")
    except StoreError:  # the caller only prints a hint, so an outage is not an error here
        return False
