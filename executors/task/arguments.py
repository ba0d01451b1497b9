"""Converts arguments from the command line, which are texts, by the annotations of the entrypoint's parameters.

The launcher reads the annotations in the source, without running it, and refuses texts that do not fit. The replica has
the function itself, and converts the texts again. It also knows annotations that are defined in other modules.
"""

from __future__ import annotations

import ast
import collections.abc
import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn, Optional, Union

from executors.errors import EntrypointArgumentsError
from executors.module_search import PARSING
from executors.task.entrypoint import runs_nothing

REST = "**"  # the name under which the annotation of **kwargs is kept
BOOLS = {**dict.fromkeys(("true", "yes", "on", "1"), True), **dict.fromkeys(("false", "no", "off", "0"), False)}
NONES = ("none", "null")
NAMES = {
    bool: "true or false",
    int: "an int",
    float: "a float",
    str: "a string",
    Path: "a path",
    type(None): "none",
    dict: "a JSON object",
}
SEQUENCES = (list, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
BY_NAME: dict[str, Any] = {kind.__name__: kind for kind in (bool, int, float, str, Path, list, tuple, dict)}
ENUMS = ("Enum", "IntEnum", "StrEnum", "Flag", "IntFlag")


class _Unknown(Exception):
    """The annotation has no rule for the conversion of texts."""


def from_texts(texts: Mapping[str, str], annotations: Mapping[str, Any], function: str) -> dict[str, Any]:
    """Convert the texts of arguments by their annotations.

    Without a known annotation, a text is parsed as JSON. If it is not JSON, the value is the text itself.

    Args:
        texts: the texts, by the names of the arguments.
        annotations: the annotations, by the names of the parameters.
        function: the name of the function, for the error.

    Returns: the values, by the names of the arguments.

    Raises:
        EntrypointArgumentsError: a text does not fit its annotation.
    """
    values = {}
    for name, text in texts.items():
        annotation = annotations.get(name, annotations.get(REST, Any))
        try:
            values[name] = _convert_or_keep(text, annotation)
        except (ValueError, RecursionError):
            raise EntrypointArgumentsError(
                f"--arg {name}={text}: {function}() takes {name} as {describe_annotation(annotation)}."
            ) from None
    return values


def json_or_text(text: str) -> Any:
    """Return the value of a text as JSON, or the text itself if it is not JSON.

    Args:
        text: the text.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return text


def to_json(value: Any) -> Any:
    """Return a converted argument as a JSON value: a path as its text, and a member of an enum as its name.

    Args:
        value: the argument.
    """
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def convert(text: str, annotation: Any) -> Any:
    """Convert a text by an annotation.

    Args:
        text: the text.
        annotation: a type, a `Literal`, an enum, a union, or a list or tuple of these.

    Raises:
        ValueError: the text does not fit the annotation.
    """
    parts = typing.get_args(annotation)
    if annotation is bool:
        return _one_of(BOOLS, text.lower())
    if annotation in (int, float, str, Path):
        return annotation(text)
    if annotation in (None, type(None)):
        return _one_of(dict.fromkeys(NONES), text.lower())
    if isinstance(annotation, enum.EnumMeta):
        members: list[Any] = list(annotation)
        by_value = {str(member.value): member for member in members}
        return _one_of({**by_value, **annotation.__members__}, text)
    kind = typing.get_origin(annotation) or annotation
    if kind is Literal:
        return _one_of({str(choice): choice for choice in parts}, text)
    if kind in (Union, types.UnionType):
        return _convert_to_any(text, sorted(parts, key=lambda part: (part is str) - (part is type(None))))
    if kind in (*SEQUENCES, tuple):
        items = json.loads(text) if text.startswith("[") else [item.strip() for item in text.split(",")] if text else []
        is_fixed = kind is tuple and parts[-1:] != (...,) and annotation is not tuple
        each = parts if is_fixed else [parts[0] if parts else Any] * len(items)
        texts = [item if isinstance(item, str) else json.dumps(item) for item in items]
        # a text that is not a number raises ValueError
        found = [_convert_or_keep(*pair) for pair in zip(texts, each, strict=True)]
        return tuple(found) if kind is tuple else found
    if kind is dict:
        if isinstance(value := json.loads(text, parse_constant=_refuse_constant), dict):
            return value
        raise ValueError
    if kind is typing.Annotated:
        return convert(text, parts[0])
    raise _Unknown


def _convert_or_keep(text: str, annotation: Any) -> Any:
    try:
        return convert(text, annotation)
    except _Unknown:
        return json_or_text(text)


def _convert_to_any(text: str, annotations: list[Any]) -> Any:
    is_known = True
    for annotation in annotations:
        try:
            return convert(text, annotation)
        except _Unknown:
            is_known = False
        except ValueError:
            continue
    if not is_known:
        raise _Unknown
    raise ValueError


def _one_of(choices: Mapping[str, Any], text: str) -> Any:
    if text not in choices:
        raise ValueError
    return choices[text]


def describe_annotation(annotation: Any) -> str:
    """Describe the values of an annotation, as in `a float` or `one of 'fast', 'slow'`.

    Args:
        annotation: the annotation.
    """
    parts = typing.get_args(annotation)
    kind = typing.get_origin(annotation) or annotation
    if kind is Literal:
        return f"one of {', '.join(map(repr, parts))}"
    if isinstance(annotation, enum.EnumMeta):
        return f"one of {', '.join(annotation.__members__)}"
    if kind in (Union, types.UnionType):
        return " or ".join(map(describe_annotation, parts))
    if kind in SEQUENCES:
        return f"a list, each item {describe_annotation(parts[0])}" if parts else "a list"
    if kind is tuple:
        if parts[-1:] == (...,):
            return f"a tuple, each item {describe_annotation(parts[0])}"
        return f"a tuple of {', '.join(map(describe_annotation, parts))}" if parts else "a tuple"
    if kind is dict:
        return NAMES[dict]
    return describe_annotation(parts[0]) if kind is typing.Annotated else NAMES.get(annotation, str(annotation))


def annotations_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of a function's parameters that can be evaluated, by the names of the parameters.

    Args:
        function: the function.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError, NameError):
        return {}
    names = getattr(inspect.unwrap(function), "__globals__", {})
    found = {}
    for name, parameter in parameters.items():
        annotation = parameter.annotation
        if isinstance(annotation, str):
            try:
                annotation = eval(annotation, names)
            except Exception:  # noqa: BLE001 - some annotations only work for a type checker, and are ignored
                continue
        if annotation is not parameter.empty:
            found[REST if parameter.kind is parameter.VAR_KEYWORD else name] = annotation
    return found


def annotations_in(module: ast.Module, taken: ast.arguments) -> dict[str, Any]:
    """Return the annotations of parameters that the source of a module defines. The source is not run.

    Args:
        module: the parsed source.
        taken: the parameters of the function.
    """
    named: dict[str, ast.AST] = {}
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            named[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            named[node.targets[0].id] = node.value
    found = {}
    rest = [ast.arg(REST, taken.kwarg.annotation)] if taken.kwarg else []
    for arg in [*taken.args, *taken.kwonlyargs, *rest]:
        if arg.annotation is not None:
            try:
                found[arg.arg] = _read(arg.annotation, named)
            except (_Unknown, ValueError, TypeError, LookupError, SyntaxError, RecursionError):
                continue
    return found


def _read(node: ast.AST, named: Mapping[str, ast.AST]) -> Any:
    match node:
        case ast.Constant(value=None):
            return None
        case ast.Constant(value=value) if value is ...:
            return ...
        case ast.Constant(value=str() as text):
            with PARSING:
                parsed = ast.parse(text, mode="eval")
            return _read(parsed.body, named)
        case ast.Name(id=name) if name in named:
            definition = named[name]
            return _read_enum(definition) if isinstance(definition, ast.ClassDef) else _read(definition, named)
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in BY_NAME:
            return BY_NAME[name]
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return Union[_read(left, named), _read(right, named)]  # noqa: UP007 - of values
        case ast.Subscript(value=ast.Name(id=kind) | ast.Attribute(attr=kind), slice=inner):
            items = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            if kind == "Literal":
                return Literal[tuple(ast.literal_eval(item) for item in items)]
            if kind in ("dict", "Dict"):
                return dict
            parts = [_read(item, named) for item in (items[:1] if kind == "Annotated" else items)]
            if kind in ("tuple", "Tuple"):
                return tuple[tuple(parts)]  # type: ignore[misc]
            if kind in ("list", "List", "Sequence"):
                return list[parts[0]]  # type: ignore[valid-type]
            if kind == "Optional":
                return Optional[parts[0]]  # noqa: UP045 - of a value
            if kind in ("Union", "Annotated"):
                return Union[tuple(parts)]  # noqa: UP007
    raise _Unknown


def _read_enum(definition: ast.ClassDef) -> enum.EnumMeta:
    """Make an enum with the names and the literal values of an enum class in the source."""
    bases = [getattr(base, "id", getattr(base, "attr", "")) for base in definition.bases]
    members: dict[str, Any] = {}
    for node in definition.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            is_auto = re.fullmatch(r"(enum\.)?auto\(\)", ast.unparse(node.value))
            auto = name.lower() if "StrEnum" in bases else len(members) + 1
            members[name] = auto if is_auto else ast.literal_eval(node.value)
    if not members or not set(bases) & set(ENUMS):
        raise _Unknown
    return enum.Enum(definition.name, members)  # type: ignore[return-value]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def split_rank_env(args: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Split `rank_env`, the name of one more environment variable for the rank, from the arguments.

    Args:
        args: the arguments of the launch.

    Returns: the other arguments, and the name of the variable. The name is None if there is none.

    Raises:
        TypeError: the name of an argument is not a string.
        ValueError: `rank_env` cannot be the name of a variable.
    """
    rest = dict(args)
    for name in rest:
        if not isinstance(name, str):
            raise TypeError(f"The name of an argument must be a string, got {name!r}.")
    rank_env = rest.pop("rank_env", None)
    if rank_env is not None and (not isinstance(rank_env, str) or not rank_env.isidentifier()):
        raise ValueError(f"rank_env must be the name of an environment variable, got {rank_env!r}.")
    return rest, rank_env


def check_call(function: Callable[..., Any], args: Mapping[str, Any], what: str) -> None:
    """Check that a function is a plain one and takes these keyword arguments, without calling it.

    Args:
        function: the function.
        args: the keyword arguments.
        what: the name of the function, for the error.

    Raises:
        EntrypointArgumentsError: the function does not take these arguments.
        EntrypointError: the function is async or a generator, so a call would run none of its code.
    """
    for kind, is_one in (("async", inspect.iscoroutinefunction), ("a generator", inspect.isgeneratorfunction)):
        if is_one(function) or is_one(type(function).__call__):
            raise runs_nothing(what, kind)
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        return  # a builtin function may have no signature
    try:
        signature.bind(**args)
    except TypeError as error:
        raise EntrypointArgumentsError(
            f"{what} cannot be called with the arguments {sorted(args)}: {error}. Its signature is {signature}."
        ) from None
