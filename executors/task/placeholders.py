"""`${rank}` and its like in arguments and in the environment, which each replica fills in for itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

NAMES = ("rank", "run_id", "attempt", "world_size")
PLACEHOLDER = re.compile(rf"(\$?)\$\{{({'|'.join(NAMES)})\}}")
CONTAINERS = (dict, list, tuple)  # exactly these: what another class does with its items is its own


def fill(value: Any, of: Mapping[str, object]) -> Any:
    """Return a value whose texts have the replica's own in place of `${rank}` …; any other `$` stays as it is.

    `$${rank}` is the text `${rank}`. What holds no placeholder is returned as the very same object, and what is given
    in two places is one object in both. Copied are only the dicts, lists and tuples around a filled text.

    Args:
        of: what stands for each of `NAMES`.
    """
    around = _around_placeholders(value)
    copies: dict[int, Any] = {at: type(each)() for at, each in around.items() if type(each) is not tuple}

    def filled(item: Any) -> Any:
        if _has_placeholder(item):
            return PLACEHOLDER.sub(lambda found: found[0][1:] if found[1] else str(of[found[2]]), item)
        if id(item) in around and id(item) not in copies:  # a tuple: made when its items are there
            copies[id(item)] = tuple(map(filled, item))
        return copies.get(id(item), item)

    for at, each in around.items():  # once all copies are there, so that one may hold itself
        if type(each) is dict:
            copies[at].update((key, filled(item)) for key, item in each.items())
        elif type(each) is list:
            copies[at].extend(map(filled, each))
    return filled(value)


def _around_placeholders(value: Any) -> dict[int, Any]:
    """Return the containers that hold a placeholder at any depth, by their `id`.

    A walk and not a recursion: a pickle takes containers that hold themselves.
    """
    holders: dict[int, list[Any]] = {}  # of each container that is in another
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
