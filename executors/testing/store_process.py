"""A helper process that uses a store, for `StoreRaces`: `python store_process.py <opener> <url> <role> …`.

It is run as a file, so that it does not import pytest. It prints lines of JSON, and the first is "ready".
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from executors.store import Store

MIB = 1 << 20


def print_json(value: Any) -> None:
    """Print a value as a line of JSON.

    Args:
        value: the value.
    """
    print(json.dumps(value), flush=True)


def race(store: Store, name: str, prefix: str, n_keys: str) -> None:
    """Wait for a line, try to create keys in a race with other processes, and report the keys that were created here.

    Args:
        store: the store.
        name: the content of the objects.
        prefix: the beginning of the keys.
        n_keys: the number of keys.
    """
    sys.stdin.readline()
    print_json([index for index in range(int(n_keys)) if store.put_if_absent(f"{prefix}{index}", name.encode())])


def replace(store: Store, key: str, size_mib: str) -> None:
    """Replace an object again and again until this process is killed. Each version has another byte.

    Args:
        store: the store.
        key: the key of the object.
        size_mib: the size of the object in MiB.
    """
    for filling in range(1, 1 << 30):
        store.put(key, [bytes([filling % 251]) * MIB] * int(size_mib))
        if filling == 2:
            print_json("replaced")


def create(store: Store, prefix: str, size_mib: str) -> None:
    """Create one large object after the other until this process is killed. Each is filled with its number.

    Args:
        store: the store.
        prefix: the beginning of the keys.
        size_mib: the size of each object in MiB.
    """
    for number in range(1 << 30):
        store.put_if_absent(f"{prefix}{number}", [bytes([number % 251]) * MIB] * int(size_mib))
        print_json(number)


def write_one(store: Store, verb: str, key: str, size_mib: str) -> None:
    """Write one object that is so large that the test can kill this process during the write.

    Args:
        store: the store.
        verb: the method of the store: "put" or "put_if_absent".
        key: the key of the object.
        size_mib: the size of the object in MiB.
    """
    getattr(store, verb)(key, [b"x" * MIB] * int(size_mib))


def main(opener: str, url: str, role: str, *rest: str) -> None:
    """Open a store, report "ready", and play a role.

    Args:
        opener: the function that opens the store, as `module:function`.
        url: the url of the store.
        role: "race", "replace", "create" or "write_one".
        rest: the arguments of the role.
    """
    module, _, function = opener.partition(":")
    store = getattr(importlib.import_module(module), function)(url)
    print_json("ready")
    {"race": race, "replace": replace, "create": create, "write_one": write_one}[role](store, *rest)  # type: ignore[operator]


if __name__ == "__main__":
    main(*sys.argv[1:])
