"""Finds errors in the body of a request, by the official client's models: their `openapi_types` and `attribute_map`.

These models are the published schema. The module `rules` has the rules beyond types.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from kubernetes import client

PLAIN = {"str": str, "int": int, "bool": bool, "float": (int, float), "datetime": str, "object": object, "bytes": str}
# Older clients write list[V1Container] and dict(str, str).
INSIDE = re.compile(r"(?:[Ll]ist\[(?P<item>.+)\]|[Dd]ict[\[(]str, (?P<value>.+)[\])])")


def problems(value: Any, kind: str, path: str = "") -> Iterator[str]:
    """Yield each unknown field, wrong type and missing field in a JSON value, with its path."""
    if inside := INSIDE.fullmatch(kind):
        expected = list if inside["item"] else dict
        if not isinstance(value, expected):
            yield f"{path}: Invalid value: expected {expected.__name__}, got {type(value).__name__}"
            return
        for name, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from problems(each, inside["item"] or inside["value"], f"{path}[{name}]")
    elif kind in PLAIN:
        if not isinstance(value, PLAIN[kind]) or (kind in ("int", "float") and isinstance(value, bool)):  # type: ignore[arg-type]
            yield f"{path}: Invalid value: expected {kind}, got {type(value).__name__}"
    elif not isinstance(value, dict):
        yield f"{path}: Invalid value: expected {kind}, got {type(value).__name__}"
    else:
        yield from _of_model(value, getattr(client, kind), path)


def _of_model(value: dict[str, Any], model: Any, path: str) -> Iterator[str]:
    attributes = {name: attribute for attribute, name in model.attribute_map.items()}
    for name in value.keys() - attributes.keys():
        yield f'unknown field "{path}.{name}"'.replace('".', '"')
    for name, attribute in attributes.items():
        place = f"{path}.{name}".lstrip(".")
        if value.get(name) is not None:
            yield from problems(value[name], model.openapi_types[attribute], place)
        elif _is_required(model, attribute):
            yield f"{place}: Required value"


def _is_required(model: Any, attribute: str) -> bool:
    """Return True if the schema requires an attribute of a model.

    The models of newer clients are those of pydantic. An older model refuses None for a required attribute.
    """
    if hasattr(model, "model_fields"):
        return bool(model.model_fields[attribute].is_required())
    made = object.__new__(model)
    made.local_vars_configuration = client.Configuration()
    try:
        setattr(made, attribute, None)
    except ValueError:
        return True
    return False
