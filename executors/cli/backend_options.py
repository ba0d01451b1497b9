"""The options of a backend: the keyword arguments of its executor's constructor."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from executors.cli.options import refuse


@dataclass(frozen=True)
class BackendOption:
    """One option, as its constructor declares it."""

    name: str
    type: Any
    """Its annotation; `inspect.Parameter.empty` when it has none."""
    default: Any
    help: str

    @property
    def type_name(self) -> str:
        """The type as Python writes it, without module names."""
        if self.type is inspect.Parameter.empty:
            return ""
        name = self.type.__name__ if isinstance(self.type, type) and not typing.get_args(self.type) else str(self.type)
        return re.sub(r"\b(?:\w+\.)+(\w)", r"\1", name)


def options_of(cls: type) -> list[BackendOption]:
    """List the options of an executor's class."""
    constructor: Any = vars(cls).get("__init__")  # as written in the class; an inherited one tells less
    texts = _texts_of_arguments(f"{inspect.getdoc(cls)}\n{inspect.getdoc(constructor)}")
    try:
        hints = typing.get_type_hints(constructor)
    except (NameError, TypeError, AttributeError):  # a stranger's annotations may name what is not there
        hints = {}
    found = []
    for parameter in inspect.signature(cls).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            hint = hints.get(parameter.name, inspect.Parameter.empty)
            found.append(BackendOption(parameter.name, hint, parameter.default, texts.get(parameter.name, "")))
    return found


def check_options(backend: str, cls: type, values: Mapping[str, Any]) -> None:
    """Refuse a value whose type the constructor does not declare. Names are checked where the executor is made.

    Raises:
        UsageProblem: the message names the option, its type and the value.
    """
    by_name = {option.name: option for option in options_of(cls)}
    for name, value in values.items():
        option = by_name.get(name)
        if option is not None and not _fits(value, option.type):
            refuse(f"Option {name!r} of backend {backend!r} takes {option.type_name}, got {value!r}.")


def _fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value is of a type, as far as JSON has it; a type that JSON knows nothing of takes anything."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is typing.Literal:
        return value in parts
    if hint is type(None) or hint is None:
        return value is None
    if hint in (bool, str):
        return isinstance(value, hint)
    if hint in (int, float):
        numbers = (int, float) if hint is float else (int,)
        return isinstance(value, numbers) and not isinstance(value, bool)
    kind = origin or hint
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return isinstance(value, dict)
    if isinstance(kind, type) and issubclass(kind, Sequence):
        return isinstance(value, list) and (not parts or all(_fits(item, parts[0]) for item in value))
    return True


def _texts_of_arguments(doc: str) -> dict[str, str]:
    """Read the `Args:` section of a Google style docstring."""
    texts: dict[str, str] = {}
    name = ""
    for line in doc.partition("Args:\n")[2].splitlines():
        if line and not line.startswith(" "):
            break
        start = re.match(r" {4}(\w+)(?: \([^)]*\))?: (.*)", line)
        if start:
            name, texts[start[1]] = start[1], start[2].strip()
        elif name and line.strip():
            texts[name] += " " + line.strip()
    return texts
