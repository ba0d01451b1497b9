"""Tests which modules a process needs in order to load a pickled call."""

from __future__ import annotations

import json
import sys
from types import FunctionType, ModuleType

import numpy as np
import pytest

from executors.errors import ReplicasError
from executors.task.pickles import pickle_call


def test_modules_that_are_imported_by_name_are_noted() -> None:
    assert pickle_call(json.dumps, {"value": ReplicasError, "array": np.zeros(2)})[1] == ["executors", "numpy"]


def test_a_module_that_is_pickled_by_value_is_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ModuleType("made_here")
    assert "made_here" not in pickle_call(print, {"settings": made})[1]
    monkeypatch.setitem(sys.modules, "lies_somewhere", other := ModuleType("lies_somewhere"))
    assert "lies_somewhere" in pickle_call(print, {"settings": other})[1]


def test_a_function_of_no_module_names_none() -> None:
    function = FunctionType(compile("1", "cell", "eval"), {}, "nameless")
    function.__module__ = None  # type: ignore[assignment]
    assert "None" not in pickle_call(function, {})[1]
