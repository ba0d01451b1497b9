"""Sends the numbers of replicas to a tracking service while they train: trackio, W&B, MLflow, or a class of the user.

Each rank has its own run at the service. `launch(tracker=…)` takes a name of `BUILT_IN`, or the user's class as
`pkg.mod:Class`.
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
PROJECT = "replicas"  # the project at the service, unless an environment variable of the service names another one


@dataclass(frozen=True, kw_only=True)
class TrackedReplica:
    """The replica whose numbers are sent to a tracker."""

    run_id: str
    launched_at: float
    """Unix time of the launch."""
    rank: int
    world_size: int
    attempt: int
    """The number of the attempt. If it is more than 0, the rank was restarted. Then a tracker that can do so continues
    its run of the previous attempt.
    """
    config: Mapping[str, Any] = field(default_factory=dict)
    """The settings of the launch as JSON values. Arguments of the entrypoint are named `args.NAME`."""

    @property
    def run(self) -> str:
        """A name of the run that is unique also among removed runs with the same id."""
        return f"{self.run_id}-{hashlib.sha256(repr(self.launched_at).encode()).hexdigest()[:8]}"

    @property
    def name(self) -> str:
        """A name of the rank that is unique among the ranks of all runs."""
        return f"{self.run} rank {self.rank}"


class Tracker(Protocol):
    """The interface of a tracker, which sends numbers to a service.

    Each replica makes one object with its `TrackedReplica`, and calls it from a separate thread. If the tracker raises
    an error, the replica reports that once, and training continues.
    """

    def log(self, numbers: Mapping[str, float], step: int | None, at: float) -> None:
        """Send finite numbers by name: numbers given to `report()`, and `round/…` and `usage/…`.

        Args:
            step: the step that the training code reported, or the entry of a round. None: the numbers have no step.
            at: the Unix time of the numbers.
        """

    def finish(self, *, has_succeeded: bool) -> None:
        """Send everything that is left. The replica calls this once at its end, and waits some seconds."""


@runtime_checkable
class PageTracker(Protocol):
    """The interface of a tracker that also stores the HTML page of the run."""

    def page(self, path: Path) -> None:
        """Store the HTML page of `replicas report`.

        The page is made when rank 0 ends, and its file is deleted after the call.
        """


def check_tracker(name: str) -> None:
    """Check that a tracker exists and its package is installed. Nothing of either is executed.

    Raises:
        ValueError: there is no tracker with this name.
        MissingDependencyError: the package of the tracker is not installed.
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
        raise ValueError(f"The name of your own tracker must be 'pkg.mod:Class', got {name!r}.")
    if find_module(module) is None:
        raise ValueError(f"Tracker {name!r}: there is no module {module!r} on sys.path, which should have {cls!r}.")


def load_tracker(name: str) -> Any:
    """Import a tracker's class and return it. Errors of its module are passed on."""
    module, colon, cls = name.partition(":")
    if not colon:
        importlib.import_module(name)
        module, cls = f"{__name__}.{name}", "Tracker"
    return getattr(importlib.import_module(module), cls)
