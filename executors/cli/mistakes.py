"""Explains mistakes in the command line that typer finds: an unknown option, a missing value, a wrong number."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from executors.errors import did_you_mean

CONFUSED = {
    "-n": "The number of replicas is --n; -n is a number of lines.",
    "--arg": "A run keeps the arguments of its launch.",
    "-o": "An option of the backend is --option; -o is the folder of `replicas collect`.",
}
"""Advice for options that the verb does not have, and that users confuse with another option."""
TYPES = {"int": "a whole number", "float": "a number"}
NOT_OF_TYPE = re.compile(r"'(?P<value>.*)' is not a valid (?P<type>int|float)\.?", re.DOTALL)
NOT_IN_RANGE = re.compile(r"(?P<value>\S+) is not in the range x>=(?P<least>\S+?)\.")
UNEXPECTED = re.compile(r"Got unexpected extra arguments?(?:\(s\))? \((?P<words>.*)\)", re.DOTALL)


def explain(error: Any, arguments: Sequence[str]) -> str:
    """Return the message for a mistake that typer has found: the mistake with the user's words, and a remedy.

    Args:
        error: the error of typer.
        arguments: the command line, without the part after `--`.

    Example:
        explain(NoSuchOption("--bakend", possibilities=["--backend"]), ["launch", "--bakend", "modal"])
    """
    message = str(error.format_message())
    kind = type(error).__name__
    if kind == "NoSuchOption":
        return _unknown_option(error, arguments)
    if found := UNEXPECTED.match(message):
        return _unexpected(found["words"], arguments)
    if kind == "BadOptionUsage" and message.endswith("requires an argument."):
        return f"{error.option_name} needs a value."
    if (parameter := getattr(error, "param", None)) is None:
        return message
    name = parameter.opts[0] if parameter.param_type_name == "option" else parameter.metavar or parameter.name.upper()
    if kind == "MissingParameter":
        about = str(parameter.help or "").partition(". ")[0].removesuffix(".")
        return f"Missing {name}: {about[:1].lower()}{about[1:]}."
    if found := NOT_OF_TYPE.search(str(error.message)):
        return f"{name} must be {TYPES[found['type']]}, got {found['value']!r}."
    if found := NOT_IN_RANGE.search(message):
        return f"{name} must be at least {found['least']}, got {found['value']}."
    return message


def _unknown_option(error: Any, arguments: Sequence[str]) -> str:
    option = str(error.option_name)
    text = f"No such option: {option}."
    if option in CONFUSED:
        return f"{text} {CONFUSED[option]}"
    script = _script_in(arguments)
    if script is not None:
        return f"{text} Arguments of {script} go after --: replicas launch {script} --n 4 -- {option} …"
    if arguments[:1] == ["launch"] and any(":" in word for word in arguments[1:2]) and option.startswith("--"):
        return f"{text} An argument of the function is --arg {option.removeprefix('--').replace('-', '_')}=…"
    return text + did_you_mean(option, error.possibilities or ())


def _unexpected(words: str, arguments: Sequence[str]) -> str:
    text = f"Unexpected argument {words!r}."
    script = _script_in(arguments)
    if script is None:
        return text
    return f"{text} Arguments of {script} go after --: replicas launch {script} --n 4 -- {words}"


def _script_in(arguments: Sequence[str]) -> str | None:
    """Return the script that a command line launches. None: it launches none."""
    if arguments[:1] != ["launch"]:
        return None
    return next((each for each in arguments if each.endswith(".py")), None)
