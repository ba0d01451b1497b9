"""Converts the result of an entrypoint to a JSON value. An error has the path of the part that cannot be converted."""

from __future__ import annotations

from typing import Any

from executors.errors import ResultError, kind_of

MAX_DEPTH = 200  # the deepest nesting; a deeper value probably contains itself
MAX_INTEGER_BITS = 14_000  # Python refuses to write integers of more than 4,300 digits


def to_json_value(value: Any, path: str = "result", depth: int = 0) -> Any:
    """Return the value with tuples as lists, and numpy or torch values of one element as numbers.

    Args:
        value: the result.
        path: the place of the value within the result, for the error. Default: the result itself.
        depth: the number of containers around the value. Default 0.

    Raises:
        ResultError: a part of it is not a JSON value.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
        raise ResultError(f"{path} is an integer of {value.bit_length()} bits; JSON numbers are shorter. Use a string.")
    if isinstance(value, (int, float)):
        return value
    if depth > MAX_DEPTH:
        raise ResultError(f"{path[:80]}… is nested deeper than {MAX_DEPTH}: does it contain itself?")
    if isinstance(value, (list, tuple)):
        return [to_json_value(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ResultError(
                    f"{path} has the key {key!r}, {kind_of(key)}; the keys of a result are strings. Use {str(key)!r}."
                )
        return {key: to_json_value(item, f"{path}[{key!r}]", depth + 1) for key, item in value.items()}
    if is_scalar(value):
        return to_json_value(value.item(), path, depth + 1)
    raise ResultError(
        f"{path} is {kind_of(value)}; results are JSON values (numbers, strings, lists, dicts with string keys). "
        "Convert it, or keep it as a file with current_replica().save_artifact(name, path)."
    )


def is_scalar(value: Any) -> bool:
    """Return True for a numpy or torch value of one element. Neither package needs to be installed.

    Args:
        value: any object.
    """
    if not callable(getattr(value, "item", None)):
        return False
    count = getattr(value, "numel", None)
    size = count() if callable(count) else getattr(value, "size", None)
    return isinstance(size, int) and size == 1
