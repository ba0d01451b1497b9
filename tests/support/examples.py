"""Loads scripts of `examples/` as modules, so that tests can call their functions."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"


@cache
def load_example(name: str) -> Any:
    """Return the module of a script.

    Args:
        name: the script's file in `examples/`, without its folder, as "compare_wires.py".
    """
    path = EXAMPLES / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    # dataclasses look for their module in `sys.modules`
    sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
