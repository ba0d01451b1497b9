"""Declares settings: the values that a record may contain, and the ways in which users set them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from executors.store.records import Check

RUN, WHERE, LIMITS, WATCH, SETTINGS, TESTING = "Run", "Where", "Limits and restarts", "Watch", "Settings", "Testing"
PANELS = (RUN, WHERE, LIMITS, WATCH, SETTINGS, TESTING)
"""The panels of `replicas launch --help`, in their order there."""


class Duration(float):
    """A setting in seconds. Users may also write a text such as `1h30m`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """The ways in which users set a value: an option of the CLI, a key of a settings file, a variable, or an
    argument.

    Args:
        help: the text in the CLI's help, with meaning, unit, legal values and default.
        panel: the panel of the help that lists it, one of `PANELS`.
        kind: the type of the value when it is given as text: `str`, `int`, `float`, `bool`, `Duration` or `list[str]`.
        metavar: the placeholder of the value in the help. Empty: the default for the type.
        flags: its flags. Empty: `--` and the name of the field, with hyphens.
        example: an example value for the template of a settings file. None: an example that fits `kind`.
        types: the types that `launch()` accepts.
        words: the middle part of the error for a wrong type, as in `must be a number of seconds`. The name comes
            before it, and the value after it.

    Example:
        Option(help="The GPU of each replica.", panel=RUN, metavar="GPU", types=(str,), words="must be a GPU")
    """

    help: str
    panel: str
    kind: Any = str
    metavar: str = ""
    flags: tuple[str, ...] = ()
    example: Any = None
    types: tuple[type, ...] = ()
    words: str = ""


def setting(check: Check[Any], *default: Any, option: Option) -> Any:
    """Declare a field of `Settings`, with its check, its default, and the ways in which users set it.

    Args:
        check: returns the value of a record, or raises ValueError.
        default: the default value. Without it, the field is required.
        option: the ways in which users set it.

    Example:
        fail_fast: bool = setting(flag, False, option=Option(help="End at a failure.", panel=LIMITS, kind=bool))
    """
    metadata = {"check": check, "option": option}
    if not default:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default[0], metadata=metadata)


def declared_options(declared: type[Any]) -> Mapping[str, Option]:
    """Return the options of all settings, by the names of the fields, in the order of their declaration.

    Args:
        declared: the class whose fields are settings.

    Example:
        declared_options(Settings)["fail_fast"].help
    """
    return {each.name: each.metadata["option"] for each in dataclasses.fields(declared)}


def key_of(name: str, option: Option) -> str:
    """Return the key of a setting in a settings file: its long flag without the hyphens in front.

    Args:
        name: the field.
        option: its declaration.

    Example:
        key_of("gather_s", declared_options(Settings)["gather_s"])  # "gather"
    """
    long = next((flag for flag in option.flags if flag.startswith("--")), f"--{name.replace('_', '-')}")
    return long.removeprefix("--")
