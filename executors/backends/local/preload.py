"""Finds the modules that replicas can preload: the option `preload="auto"`.

These are the imports at the top of the entrypoint's file. Their time is measured in the process that checks the
entrypoint, and noted for the next launch of the file. The zygote of that launch imports them once for all replicas.

An import may depend on the environment and on code before it. So only imports of installed modules count that come
before any other code of the file, and only for replicas with this process's environment.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from executors.errors import EntrypointError, StoreError
from executors.process import CAN_FORK, open_paths, threads_lost_by_a_fork
from executors.store.state_folder import state_path
from executors.task.entrypoint import find_definition, find_module, find_source

PRELOAD = ("torch", "torch._dynamo")
AUTO = "auto"
WORTH_S = 0.3  # imports that take less time are not preloaded, because they take memory
NOTES = ".preload"  # a folder in the state directory
OURS = ("executors", "diloco")
INSTALLED = ("site-packages", "dist-packages")


def default_preload() -> tuple[str, ...]:
    """Return the modules that are imported before a fork unless the user names others.

    There are none without torch. There are none either where no process forks, because each replica would import them
    for itself, and the user's code imports what it needs.

    Example:
        default_preload()  # ("torch", "torch._dynamo")
    """
    return PRELOAD if CAN_FORK and find_spec("torch") is not None else ()


def imports_at_the_top(entrypoint: str) -> list[str]:
    """Return the imports of an entrypoint's file that come before other code, as `module` or `module:name`.

    Args:
        entrypoint: the entrypoint, as in "train.py:main".

    Example:
        imports_at_the_top("train.py:main")
    """
    try:
        found = find_definition(entrypoint)
    except EntrypointError:
        return []
    names: dict[str, None] = {}
    for node in found[0].body if found else ():
        if isinstance(node, ast.Import):
            names |= dict.fromkeys(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= dict.fromkeys(f"{node.module}:{alias.name}" for alias in node.names if alias.name != "*")
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):  # a docstring
            break
    return list(names)


def noted_imports(entrypoint: str) -> tuple[str, ...]:
    """Return the imports that earlier launches of an entrypoint's file noted and that the file still has.

    Args:
        entrypoint: the entrypoint.

    Example:
        noted_imports("train.py:main")
    """
    with contextlib.suppress(OSError, ValueError, EntrypointError, StoreError):
        noted = json.loads(_note_of(entrypoint).read_bytes())
        return tuple(name for name in imports_at_the_top(entrypoint) if name in noted)
    return ()


def note_imports(entrypoint: str, measured: dict[str, Any]) -> None:
    """Note the imports that the next launch of an entrypoint's file should preload.

    Args:
        entrypoint: the entrypoint.
        measured: the result of `measure_imports`.

    Example:
        note_imports("train.py:main", measure_imports(imports_at_the_top("train.py:main")))
    """
    known = noted_imports(entrypoint)
    names = [*known, *measured["taken"]] if measured["seconds"] > WORTH_S else [*known]
    if set(names) != set(known):
        for name, why in measured["left_out"].items():
            print(f"replicas: preload leaves {name!r} out: importing it {why}", file=sys.stderr)
        with contextlib.suppress(
            OSError, EntrypointError, StoreError
        ):  # without a note, the next launch is only slower
            path = _note_of(entrypoint)
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.write_text(json.dumps(names))


def _note_of(entrypoint: str) -> Path:
    found = find_source(entrypoint)
    file = "" if found is None else os.path.realpath(found[0])
    return state_path() / NOTES / f"{hashlib.sha256(f'{sys.executable} {file}'.encode()).hexdigest()[:32]}.json"


def measure_imports(names: Sequence[str]) -> dict[str, Any]:
    """Import modules that a zygote could import, and return the names, the time and the reasons for others.

    It is called in a process that ends afterwards. It stops at the first module that is not installed. Such a module is
    the user's own, and later imports may depend on it.

    Args:
        names: the imports, as `imports_at_the_top` returns them.

    Returns:
        `taken` has the names to preload, `left_out` the others with reasons, and `seconds` the time of the import.

    Example:
        measure_imports(["torch", "transformers:Trainer"])["seconds"]
    """
    taken: list[str] = []
    left_out: dict[str, str] = {}
    seconds = 0.0
    for name in names:
        top = name.partition(":")[0].partition(".")[0]
        spec = find_module(top)
        place = (spec.origin or "") if spec else ""
        if top not in (*OURS, *sys.stdlib_module_names) and not set(INSTALLED) & {*Path(place).parts}:
            break
        n_threads, gpus, began = len(threads_lost_by_a_fork()), _gpus(), time.perf_counter()
        try:
            import_named(name)
        except BaseException:  # noqa: BLE001 - the file is imported next, and then raises the same error
            break
        took_s = time.perf_counter() - began
        if _gpus() > gpus:
            left_out[name] = "opens a GPU"
        elif len(threads_lost_by_a_fork()) > n_threads:
            left_out[name] = "starts threads"
        else:
            taken.append(name)
            seconds += took_s
    return {"taken": taken, "left_out": left_out, "seconds": seconds}


def import_named(name: str) -> None:
    """Import `module`, or `module:name` as `from module import name` does.

    Args:
        name: the import.

    Raises:
        Exception: the import failed.

    Example:
        import_named("transformers:Trainer")
    """
    module, _, attribute = name.partition(":")
    found = importlib.import_module(module)
    if attribute and not hasattr(found, attribute):
        importlib.import_module(f"{module}.{attribute}")


def _gpus() -> int:
    """Return the number of open files of GPUs."""
    return sum(path.startswith(("/dev/nvidia", "/dev/kfd")) for path in open_paths())
