"""Pickling a callable with its arguments, and saying which modules a replica has to import for it."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any


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
                named.add(each.__name__)
            elif reduced is NotImplemented and isinstance(each, FunctionType | type):
                named.add(str(each.__module__))
            return reduced

    with io.BytesIO() as file:
        Noting(file).dump((function, kwargs))
        pickled = file.getvalue()
    modules = {name.partition(".")[0] for name in named}
    return pickled, sorted(modules - sys.stdlib_module_names - {"__main__"})
