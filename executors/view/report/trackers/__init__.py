"""Trackers: what shows the numbers of replicas elsewhere while they train, such as trackio, W&B or MLflow.

One tracker run for each rank. `launch(tracker=…)` names one of `BUILT_IN`, or a class of the user's as `pkg.mod:Class`.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from executors.errors import MissingDependencyError, unknown_name
from executors.task.entrypoint import find_module

BUILT_IN = {"trackio": ("trackio",), "wandb": ("wandb",), "mlflow": ("mlflow", "mlflow-skinny")}
"""The distributions that contain each tracker, the usual one first. A name here is also a module's name."""
CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
PROJECT = "replicas"  # where trackers ask for one, and their own variables name none


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """The replica whose numbers a tracker gets."""

    run_id: str
    launched_at: float
    """Unix time of the launch."""
    rank: int
    world_size: int
    attempt: int
    """If it is more than 0, the rank was resumed. A tracker that can continues with its run of the attempt before."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """How the run was launched: JSON values, the entrypoint's arguments as `args.NAME`."""

    @property
    def run(self) -> str:
        """A name of the run that no other run has, nor an earlier one of its id, which was removed."""
        return f"{self.run_id}-{hashlib.sha256(repr(self.launched_at).encode()).hexdigest()[:8]}"

    @property
    def name(self) -> str:
        """A name of the rank that no rank of another run has."""
        return f"{self.run} rank {self.rank}"


class Tracker(Protocol):
    """Hands numbers on. Made in the replica with a `Tracked`, and used by one thread that does nothing else.

    An error that it raises is reported once, and training continues.
    """

    def log(self, numbers: Mapping[str, float], step: int | None, at: float) -> None:
        """Take finite numbers by name: what `report()` was given, `round/…` and `usage/…`.

        Args:
            step: the reported step, the entry of a round, or None.
            at: Unix time.
        """

    def finish(self, *, has_succeeded: bool) -> None:
        """Deliver what is left. Called once, at the end of the replica, which waits some seconds for it."""


@runtime_checkable
class TakesPage(Protocol):
    """A tracker that keeps the page of the run beside its numbers."""

    def page(self, path: Path) -> None:
        """Take the HTML page that `replicas report` writes, as the run is when rank 0 ends. The file is gone after."""


def check_tracker(name: str) -> None:
    """Check that a tracker is here, as far as that shows without running any of it.

    Raises:
        ValueError: there is no tracker of that name.
        MissingDependencyError: its package is not installed.
    """
    module, colon, cls = name.partition(":")
    if not colon:
        if name not in BUILT_IN:
            raise ValueError(f"{unknown_name('tracker', name, BUILT_IN)} For your own tracker, give 'pkg.mod:Class'.")
        if find_module(name) is None:
            raise MissingDependencyError(
                f"The tracker {name!r} needs a package that is not installed. Install it with: "
                f"pip install {BUILT_IN[name][0]}"
            )
        return
    if not CLASS.fullmatch(name):
        raise ValueError(f"A tracker of your own is given as 'pkg.mod:Class', got {name!r}.")
    if find_module(module) is None:
        raise ValueError(f"Tracker {name!r}: there is no module {module!r} on sys.path, which should have {cls!r}.")


def load_tracker(name: str) -> Any:
    """Import a tracker's class. Whatever its module raises is passed on."""
    module, colon, cls = name.partition(":")
    if not colon:
        importlib.import_module(name)
        module, cls = f"{__name__}.{name}", "Tracker"
    return getattr(importlib.import_module(module), cls)
