"""From the name of a backend to an executor. SDKs are imported by their own adapter, when it is asked for."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from executors.errors import BackendError, UnknownBackendError
from executors.protocol import ServerlessExecutor

ENTRY_POINTS = "replicas.backends"
BUILT_IN = {
    "hf": "executors.hf_jobs:HFJobsExecutor",
    "local": "executors.local:LocalProcessExecutor",
    "modal": "executors.modal:ModalExecutor",
}
VERBS = ("launch_replicas", "poll", "stream_logs", "cancel", "collect")
ATTRIBUTES = ("backend_name", "supports_inter_replica_network")


def known_backends() -> dict[str, str]:
    """Return every backend's name and `module:Class`: ours, and those that installed packages offer."""
    from importlib.metadata import entry_points

    return {**{point.name: point.value for point in entry_points(group=ENTRY_POINTS)}, **BUILT_IN}


def executor_class(name: str) -> type[ServerlessExecutor]:
    """Find the class of a backend by its name, or by `pkg.mod:Class`.

    Raises:
        UnknownBackendError: there is none; the message names the nearest.
        BackendError: it cannot be imported, or is no executor.
    """
    path = name if ":" in name else known_backends().get(name)
    if path is None:
        known = sorted(known_backends())
        import difflib

        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UnknownBackendError(f"No backend named {name!r}.{hint} Known: {', '.join(known)}.")
    module, _, attribute = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise BackendError(f"Backend {name!r} cannot be loaded: {error}. Is it installed, or here?") from error
    if not isinstance(found, type):
        raise BackendError(f"Backend {name!r} is {type(found).__name__} {attribute!r}; a class was expected.")
    return found


def get_executor(name: str, options: Mapping[str, Any] | None = None) -> ServerlessExecutor:
    """Make the executor of a backend.

    Args:
        options: keyword arguments of its constructor.

    Raises:
        UnknownBackendError, BackendError: as `executor_class`.
        ValueError: an option that the backend does not have; the message names the nearest.
    """
    cls = executor_class(name)
    options = dict(options or {})
    taken = inspect.signature(cls).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        for option in options:
            if option not in taken:
                import difflib

                near = difflib.get_close_matches(option, taken, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                known = ", ".join(sorted(taken)) or "none"
                raise ValueError(f"Backend {name!r} has no option {option!r}.{hint} Its options: {known}.")
    return check_executor(cls(**options))


def check_executor(executor: Any) -> ServerlessExecutor:
    """Return the executor, if it is one.

    Raises:
        TypeError: it lacks one of the five verbs or two attributes; the message names what.
    """
    missing = [name for name in VERBS if not callable(getattr(executor, name, None))]
    missing += [name for name in ATTRIBUTES if not hasattr(executor, name)]
    if missing:
        raise TypeError(
            f"{type(executor).__name__} is no ServerlessExecutor: it lacks {', '.join(missing)}. "
            "See executors/protocol.py; executors.testing.ExecutorContract tests all of it."
        )
    return executor  # type: ignore[no-any-return]


def import_path(executor: ServerlessExecutor) -> str:
    """Name the executor's class so that another process finds it: what `run.json` records."""
    cls = type(executor)
    return f"{cls.__module__}:{cls.__qualname__}"
