"""Another process at a store, for the contract's tests: `python store_process.py <opener> <url> <role> …`.

Run as a file, so that it does not import pytest. It reports in lines of JSON on stdout, `ready` first.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from executors.store import Store

MIB = 1 << 20


def say(what: Any) -> None:
    print(json.dumps(what), flush=True)


def race(store: Store, name: str, prefix: str, n_keys: str) -> None:
    """Try to create keys that others try to create as well; say which were won."""
    sys.stdin.readline()
    say([index for index in range(int(n_keys)) if store.put_if_absent(f"{prefix}{index}", name.encode())])


def replace(store: Store, key: str, size_mib: str) -> None:
    """Replace an object by one of another filling, until killed."""
    for filling in range(1, 1 << 30):
        store.put(key, [bytes([filling % 251]) * MIB] * int(size_mib))
        if filling == 2:
            say("replaced")


def create(store: Store, prefix: str, size_mib: str) -> None:
    """Create one large object after the other, until killed; each filled with its number."""
    for number in range(1 << 30):
        store.put_if_absent(f"{prefix}{number}", [bytes([number % 251]) * MIB] * int(size_mib))
        say(number)


def write_one(store: Store, verb: str, key: str, size_mib: str) -> None:
    """Write one object, large enough to be caught while it is written."""
    getattr(store, verb)(key, [b"x" * MIB] * int(size_mib))


def main(opener: str, url: str, role: str, *rest: str) -> None:
    module, _, function = opener.partition(":")
    store = getattr(importlib.import_module(module), function)(url)
    say("ready")
    {"race": race, "replace": replace, "create": create, "write_one": write_one}[role](store, *rest)  # type: ignore[operator]


if __name__ == "__main__":
    main(*sys.argv[1:])
