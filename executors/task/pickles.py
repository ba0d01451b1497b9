"""Pickling a callable with its arguments, and saying which modules a replica has to import for it."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

_PICKLING = threading.Lock()  # what cloudpickle takes by value holds for the whole process


def pickle_call(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> tuple[bytes, list[str]]:
    """Return the pickle, and the names of the top-level modules that it imports, without Python's own.

    cloudpickle writes functions and classes of `__main__` and local ones into the pickle. Of the others there is only
    the name, so what they are is decided where the pickle is loaded.
    """
    import cloudpickle

    named: set[str] = set()

    class Noting(cloudpickle.Pickler):  # type: ignore[misc]
        """Notes what is pickled by its name."""

        def reducer_override(self, each: Any) -> Any:
            reduced = super().reducer_override(each)
            if isinstance(each, ModuleType):
                is_by_name = sys.modules.get(each.__name__) is each and not is_by_value(each.__name__)
                named.update([each.__name__] if is_by_name else [])  # else what it holds is written, too
            elif reduced is NotImplemented and isinstance(each, FunctionType | type):
                named.update([each.__module__] if isinstance(each.__module__, str) else [])
            return reduced

    with io.BytesIO() as file, _script_by_value():
        Noting(file).dump((function, kwargs))
        pickled = file.getvalue()
    modules = {name.partition(".")[0] for name in named}
    return pickled, sorted(modules - sys.stdlib_module_names - {"__main__"})


def is_by_value(module: str) -> bool:
    """Return whether the user has registered a module, or the package it is in, to be written into pickles."""
    import cloudpickle

    registered = cloudpickle.list_registry_pickle_by_value()
    return any(module == name or module.startswith(f"{name}.") for name in registered)


@contextlib.contextmanager
def _script_by_value() -> Iterator[None]:
    """Have cloudpickle take the script's functions by value, also where `multiprocessing` imported it again.

    A child of "spawn" or "forkserver" knows the script as `__mp_main__`, which no replica can import.
    """
    import cloudpickle

    script = sys.modules.get("__mp_main__")
    if script is None or script.__name__ == "__main__":  # of a parent of such children: it is taken by value anyway
        yield
        return
    with _PICKLING:
        is_known = script.__name__ in cloudpickle.list_registry_pickle_by_value()
        cloudpickle.register_pickle_by_value(script)
        try:
            yield
        finally:
            if not is_known:  # by the user
                cloudpickle.unregister_pickle_by_value(script)
