"""Finds objects by name: the executor of a backend, the backends of a run's ranks, and the runs of this machine.

Read this file first: `get_executor` makes an executor from the name of its backend. An executor imports its SDK when it
first needs it. `placements.py` knows the backend of each rank. `run_placements.py` reads this from the records of a
run. `run_index.py` knows the runs of this machine.

The user may name any class as `pkg.mod:Class`, but a record may not. Otherwise, any process that can write to a bucket
could choose code that runs on every machine that reads it. `executor_of_record` accepts only the names of known
backends, and only options that their classes allow.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from executors.backend import Recordable, as_backend
from executors.errors import BackendError, ReplicasError, UnknownBackendError, did_you_mean, unknown_name
from executors.protocol import ServerlessExecutor
from executors.store.records import is_plain_number
from executors.task.arguments import json_or_text
from executors.task.record import Placement

ENTRY_POINTS = "replicas.backends"
BUILT_IN = {
    "hf": "executors.backends.hf_jobs:HFJobsExecutor",
    "inline": "executors.backends.inline:InlineExecutor",
    "k8s": "executors.backends.kubernetes:KubernetesExecutor",
    "local": "executors.backends.local.executor:LocalProcessExecutor",
    "modal": "executors.backends.modal:ModalExecutor",
    "ray": "executors.backends.ray:RayExecutor",
    "slurm": "executors.backends.slurm:SlurmExecutor",
}
OTHER_NAMES = {"kubernetes": "k8s", "huggingface": "hf", "sbatch": "slurm", "cpu": "local"}
"""Names that users try, with the backend that they mean."""
VERBS = ("launch_replicas", "poll", "stream_logs", "cancel", "collect")
ATTRIBUTES = ("backend_name", "supports_inter_replica_network")


class OptionText(str):
    """The value of a backend's option, as text that the user typed.

    The option's type decides how the text is read. For an option of type str, such as a version of Python, `3.14` stays
    a text. For an option of type float, it becomes a number.
    """


def known_backends() -> dict[str, str]:
    """Return the known backends: `module:Class` by name. They are built in, or registered by an installed package."""
    from importlib.metadata import entry_points

    return {**{point.name: point.value for point in entry_points(group=ENTRY_POINTS)}, **BUILT_IN}


def executor_class(name: str) -> type[ServerlessExecutor]:
    """Return the class of a backend, given its name or `pkg.mod:Class`.

    Raises:
        UnknownBackendError: no backend has this name. The message names the most similar one.
        BackendError: the class cannot be imported, or is not an executor.
    """
    path = name if ":" in name else BUILT_IN.get(name) or known_backends().get(name)
    if path is None:
        if name in OTHER_NAMES:
            raise UnknownBackendError(f"No backend named {name!r}. Did you mean {OTHER_NAMES[name]!r}?")
        raise UnknownBackendError(unknown_name("backend named", name, known_backends()))
    module, _, attribute = path.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
        raise BackendError(f"Backend {name!r}: a class is given as 'pkg.mod:Class'.")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise BackendError(
            f"Backend {name!r} cannot be loaded: {error}. Install it, or run the command in the folder that has it."
        ) from error
    if not isinstance(found, type):
        raise BackendError(f"Backend {name!r} is {type(found).__name__} {attribute!r}; a class was expected.")
    if lacking := ", ".join(verb for verb in VERBS if not callable(getattr(found, verb, None))):
        raise BackendError(f"Backend {name!r} is {found.__name__}, which is not an executor: it lacks {lacking}.")
    return found


def get_executor(name: str, options: Mapping[str, Any] | None = None) -> ServerlessExecutor:
    """Make the executor of a backend.

    Args:
        options: keyword arguments of its constructor. An `OptionText` is converted to the type of its option.

    Raises:
        UnknownBackendError, BackendError: see `executor_class`. It is also raised if the backend's registered name
            differs from `backend_name`.
        ValueError: the backend does not have one of the options. The message names the most similar one.
    """
    cls = executor_class(name)
    options = read_options(cls, options or {})
    check_option_names(name, cls, options)
    executor = check_executor(cls(**options))
    if ":" not in name and executor.backend_name != name:  # the name in the records of its runs would find no backend
        raise BackendError(
            f"A backend is registered as {name!r}, and the backend_name of its class, {import_path(executor)}, is "
            f"{executor.backend_name!r}. Make them one, in the package that registers it, or name the class: "
            f"--backend {import_path(executor)}."
        )
    return executor


def check_option_names(backend: str, cls: type, names: Iterable[str]) -> None:
    """Raises: ValueError: the backend does not have one of the options. The message names the most similar one."""
    taken = inspect.signature(cls).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        for option in names:
            if option not in taken:
                known = ", ".join(sorted(taken)) or "none"
                hint = did_you_mean(option, taken)
                raise ValueError(f"Backend {backend!r} has no option {option!r}.{hint} Its options: {known}.")


def read_options(cls: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options. Each `OptionText` is converted to the type of its option.

    Args:
        cls: the executor's class, whose constructor declares the types.
        options: the values by name. A value that is not an `OptionText` is not changed.

    Example:
        read_options(ModalExecutor, {"python_version": OptionText("3.14"), "memory_mb": OptionText("512")})
        # {"python_version": "3.14", "memory_mb": 512}
    """
    parameters = parameters_of(cls)
    empty = inspect.Parameter.empty
    return {
        name: _read(value, parameters[name].annotation if name in parameters else empty)
        if isinstance(value, OptionText)
        else value
        for name, value in options.items()
    }


def _read(text: str, hint: Any) -> Any:
    text = str(text)
    value = json_or_text(text)
    # A list or an object is not converted to text, because the user has probably made a mistake.
    is_text = isinstance(value, bool | int | float | None) and not fits(value, hint) and fits(text, hint)
    return text if is_text else value


def parameters_of(cls: type) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a class's constructor by name, with their types if these can be resolved."""
    try:
        return inspect.signature(cls, eval_str=True).parameters
    # Annotations of another package may name a type that is not imported.
    except (NameError, TypeError, AttributeError):
        return inspect.signature(cls).parameters


def fits(value: Any, hint: Any) -> bool:
    """Return True if a JSON value has a type. If JSON cannot express the type, every value has it.

    Args:
        value: the value, as `json.loads` returns it.
        hint: the type, as an annotation.

    Example:
        fits([64, 128], list[int])  # True
    """
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, part) for part in parts)
    if origin is typing.Literal:
        return value in parts
    if hint is None or hint is type(None):
        return value is None
    if hint in (bool, str):
        return isinstance(value, hint)
    if hint in (int, float):
        return isinstance(value, (int, float) if hint is float else int) and not isinstance(value, bool)
    kind = origin or hint
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return isinstance(value, dict)
    if isinstance(kind, type) and issubclass(kind, Sequence):
        return isinstance(value, list) and (not parts or all(fits(item, parts[0]) for item in value))
    return True


def executor_of_record(
    record: Placement, *, named: str | None = None, options: Mapping[str, Any] | None = None
) -> ServerlessExecutor:
    """Make the executor of a run from its record: a known backend, by its name.

    Args:
        record: the record of the placement.
        named: the backend's name or class, as the user gives it. Default: the backend of the record.
        options: the options that this machine noted at the launch. Default: the options that a record may give.

    Raises:
        BackendError: the backend in the record is not known, differs from `named`, or has an option that a record may
            not give.
    """
    if named is None:
        _check_is_known(record)
    name = record.backend if named is None else named
    try:
        cls = executor_class(name)
        check_backend_of(record, cls)
        if options is None:
            options = _options_of_record(record, getattr(cls, "recordable_options", {}))
        executor = get_executor(name, options)
    except ReplicasError:
        raise
    except (ValueError, TypeError) as error:
        raise BackendError(f"Backend {name!r} cannot be made as the run's record says: {error}") from error
    check_backend_of(record, executor)
    return executor


def check_backend_of(record: Placement, executor: ServerlessExecutor | type[ServerlessExecutor]) -> None:
    """Check that an executor, or its class, belongs to the backend on which the run was launched.

    Raises:
        BackendError: it belongs to another backend.
    """
    name: object = executor.backend_name
    if name != record.backend and (isinstance(name, str) or not isinstance(executor, type)):
        cls = executor if isinstance(executor, type) else type(executor)
        raise BackendError(
            f"The run was launched on the backend {record.backend!r}; {cls.__name__} is of the backend {name!r}."
        )


def _check_is_known(record: Placement) -> None:
    if record.executor is not None:
        raise BackendError(
            f"The run was launched with {record.executor!r}, which no installed package registers as a backend, and "
            "nothing is imported because a record names it. If you trust that class, name it yourself: "
            f"--backend {record.executor}, or attach(…, executor={record.executor!r})."
        )
    if record.backend not in BUILT_IN and record.backend not in known_backends():
        known = ", ".join(sorted(known_backends()))
        raise UnknownBackendError(
            f"The run was launched on the backend {record.backend!r}, which is not known here. Known: {known}. Install "
            "the package that registers it, or name its class: --backend pkg.mod:Class."
        )


def _options_of_record(record: Placement, recordable: Recordable) -> Mapping[str, Any]:
    for name, value in record.executor_options.items():
        if name not in recordable or not is_recordable(value, recordable[name]):
            known = ", ".join(sorted(recordable)) or "none"
            raise BackendError(
                f"The run's record gives backend {record.backend!r} the option {name[:100]!r} = {str(value)[:100]!r}, "
                f"which is not taken from a record. Options that are: {known}. To use this one, give the backend and "
                f"its options yourself: --backend {record.backend} --option NAME=VALUE."
            )
    return record.executor_options


def describe_executor(executor: ServerlessExecutor) -> dict[str, Any]:
    """Return the executor's part of a run's record: backend, executor, executor_options, unrecorded_options."""
    backend = as_backend(executor)
    recordable, options = backend.recordable_options, backend.options_to_keep
    recorded = {
        name: value for name, value in options.items() if name in recordable and is_recordable(value, recordable[name])
    }
    others = sorted(
        name for name, value in options.items() if name not in recorded and value not in (None, [], (), {}, "")
    )
    return {
        "backend": executor.backend_name,
        "executor": _unregistered_path(executor),
        "executor_options": recorded,
        "unrecorded_options": tuple(others),
    }


def is_given(value: Any) -> bool:
    """Return True if an option has a value.

    None, an empty text and an empty collection count as no value. An object of an SDK counts as a value.
    """
    return value is not None and not (isinstance(value, str | Sequence | Mapping) and len(value) == 0)


def check_executor(executor: Any) -> ServerlessExecutor:
    """Return the object if it is an executor.

    Raises:
        TypeError: one of the five methods or two attributes is missing, or the object is a class. The message names it.
    """
    missing = [name for name in VERBS if not callable(getattr(executor, name, None))]
    missing += [name for name in ATTRIBUTES if not hasattr(executor, name)]
    if missing:
        raise TypeError(
            f"{type(executor).__name__} is not a ServerlessExecutor: it lacks {', '.join(missing)}. "
            "See executors/protocol.py; executors.testing.ExecutorContract tests all of it."
        )
    if isinstance(executor, type):
        raise TypeError(f"{executor.__name__} is a class of executors. Give an executor, as in {executor.__name__}().")
    return executor  # type: ignore[no-any-return]


def import_path(executor: ServerlessExecutor) -> str:
    """Return the path of the executor's class as `pkg.mod:Class`, which `--backend` takes."""
    cls = type(executor)
    return f"{cls.__module__}:{cls.__qualname__}"


def _unregistered_path(executor: ServerlessExecutor) -> str | None:
    """Return the path of an executor's class. None if the name of its backend is enough to find the class."""
    path = import_path(executor)
    if executor.backend_name in BUILT_IN:
        return None if BUILT_IN[executor.backend_name] == path else path
    with contextlib.suppress(BackendError):  # the class is not registered
        if executor_class(executor.backend_name) is type(executor):
            return None
    return path


def is_recordable(value: Any, expected: type | re.Pattern[str]) -> bool:
    """Return True if a record may contain this value of an option. None is always allowed."""
    if value is None:
        return True
    if isinstance(expected, re.Pattern):
        return isinstance(value, str) and expected.fullmatch(value) is not None
    if expected is float:
        return is_plain_number(value) and value == value  # NaN is not equal to itself
    if expected is dict:
        return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())
    return isinstance(value, expected) and (expected is bool or not isinstance(value, bool))
