"""Placeholders such as `${rank}` in arguments and environment variables, which each replica replaces for itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

NAMES = ("rank", "member", "run_id", "attempt", "world_size")
PLACEHOLDER = re.compile(rf"(\$?)\$\{{({'|'.join(NAMES)})\}}")
CONTAINERS = (dict, list, tuple)  # exactly these types, because a subclass may treat its items in its own way


def fill(value: Any, of: Mapping[str, object]) -> Any:
    """Return a value with the replica's own values in place of the placeholders. Any other `$` stays as it is.

    `$${rank}` becomes the text `${rank}`. An object without placeholders is returned itself, and not as a copy. An
    object that occurs twice is one object in both places again. Only the dicts, lists and tuples around a replaced text
    are copied.

    Args:
        value: a text, or dicts, lists and tuples with texts, at any depth.
        of: the value for each name in `NAMES`.

    Example:
        fill({"out": "model-${rank}.pt"}, {"rank": 3, "member": 0, "run_id": "otter", "attempt": 0, "world_size": 8})
    """
    around = _around_placeholders(value)
    copies: dict[int, Any] = {at: type(each)() for at, each in around.items() if type(each) is not tuple}

    def filled(item: Any) -> Any:
        if _has_placeholder(item):
            return PLACEHOLDER.sub(lambda found: found[0][1:] if found[1] else str(of[found[2]]), item)
        if id(item) in around and id(item) not in copies:  # a tuple can be made only after its items
            copies[id(item)] = tuple(map(filled, item))
        return copies.get(id(item), item)

    for at, each in around.items():  # filled after all copies exist, because a container may hold itself
        if type(each) is dict:
            copies[at].update((key, filled(item)) for key, item in each.items())
        elif type(each) is list:
            copies[at].extend(map(filled, each))
    return filled(value)


def _around_placeholders(value: Any) -> dict[int, Any]:
    """Return the containers that hold a placeholder at any depth, by their `id`.

    This is a loop and not a recursion, because a pickle may have containers that hold themselves.
    """
    holders: dict[int, list[Any]] = {}  # the containers around each container, by its id
    found: list[Any] = []
    seen: set[int] = set()
    pending = [value]
    while pending:
        holder = pending.pop()
        if type(holder) not in CONTAINERS or id(holder) in seen:
            continue
        seen.add(id(holder))
        for item in _items(holder):
            if type(item) in CONTAINERS:
                holders.setdefault(id(item), []).append(holder)
                pending.append(item)
            elif _has_placeholder(item):
                found.append(holder)
    around: dict[int, Any] = {}
    while found:
        holder = found.pop()
        if id(holder) not in around:
            around[id(holder)] = holder
            found += holders.get(id(holder), [])
    return around


def _items(container: Any) -> Iterable[Any]:
    return container.values() if type(container) is dict else container


def _has_placeholder(item: Any) -> bool:
    return isinstance(item, str) and PLACEHOLDER.search(item) is not None
