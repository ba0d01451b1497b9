"""Pickles a callable with its arguments, and lists the modules that a replica must import for it."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

_PICKLING = threading.Lock()  # cloudpickle has one registry of modules by value for the whole process


def pickle_call(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> tuple[bytes, list[str]]:
    """Return the pickle of a call, and the names of the top-level modules that it imports.

    cloudpickle writes local functions and classes, and those of `__main__`, into the pickle. For other functions and
    classes it writes only the name, and the process that loads the pickle imports them.

    Args:
        function: the callable.
        kwargs: its keyword arguments.

    Returns: the pickle, and the names of the modules without the standard library.
    """
    import cloudpickle

    named: set[str] = set()

    class ModuleNotingPickler(cloudpickle.Pickler):  # type: ignore[misc]
        """Notes the modules of objects that are pickled by their names."""

        def reducer_override(self, each: Any) -> Any:
            reduced = super().reducer_override(each)
            if isinstance(each, ModuleType):
                is_by_name = sys.modules.get(each.__name__) is each and not is_by_value(each.__name__)
                # a module that is pickled by value is in the pickle itself
                named.update([each.__name__] if is_by_name else [])
            elif reduced is NotImplemented and isinstance(each, FunctionType | type):
                named.update([each.__module__] if isinstance(each.__module__, str) else [])
            return reduced

    with io.BytesIO() as file, _script_by_value():
        ModuleNotingPickler(file).dump((function, kwargs))
        pickled = file.getvalue()
    modules = {name.partition(".")[0] for name in named}
    return pickled, sorted(modules - sys.stdlib_module_names - {"__main__"})


def is_by_value(module: str) -> bool:
    """Return True if the user has registered a module or its package with cloudpickle to be pickled by value.

    Args:
        module: the dotted name of the module.
    """
    import cloudpickle

    registered = cloudpickle.list_registry_pickle_by_value()
    return any(module == name or module.startswith(f"{name}.") for name in registered)


@contextlib.contextmanager
def _script_by_value() -> Iterator[None]:
    """Make cloudpickle pickle the script's functions by value, also in children of `multiprocessing`.

    A child of "spawn" or "forkserver" knows the script as `__mp_main__`, which no replica can import.
    """
    import cloudpickle

    script = sys.modules.get("__mp_main__")
    # In a parent of such children the module is `__main__`, which cloudpickle always pickles by value.
    if script is None or script.__name__ == "__main__":
        yield
        return
    with _PICKLING:
        is_known = script.__name__ in cloudpickle.list_registry_pickle_by_value()
        cloudpickle.register_pickle_by_value(script)
        try:
            yield
        finally:
            if not is_known:  # a registration by the user stays
                cloudpickle.unregister_pickle_by_value(script)
