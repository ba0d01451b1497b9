"""Results are JSON values, or an error that names the place."""

from __future__ import annotations

import json
import math
from collections import namedtuple
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executors.errors import ResultError
from executors.worker.result import to_json_value

# to draw from all characters takes seconds, because Hypothesis first makes a table of them
TEXTS = st.text('a"\\/ \n\0\x1f\x7fé\u2028\ufeff\uffff🦦')
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
)
Point = namedtuple("Point", "x y")


async def coroutine() -> int:
    return 1


def circle() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


@given(JSON_VALUES)
def test_a_json_value_comes_back_as_it_is(value: Any) -> None:
    assert json.loads(json.dumps(to_json_value(value))) == value


def test_tuples_become_lists_and_one_element_scalars_become_numbers() -> None:
    table: list[tuple[Any, Any]] = [
        ((1, (2, 3)), [1, [2, 3]]),
        (Point(4, 5), [4, 5]),
        (torch.tensor(1.5), 1.5),
        (torch.tensor(1.5, dtype=torch.bfloat16), 1.5),
        (torch.tensor([[7]]), 7),
        (torch.tensor(True), True),
        (numpy.float32(0.5), 0.5),
        (numpy.float64(0.25), 0.25),
        (numpy.int64(3), 3),
        (numpy.bool_(True), True),
        (numpy.array([[2.0]]), 2.0),
        (math.inf, math.inf),
        ("lone \udcff surrogate", "lone \udcff surrogate"),
    ]
    for value, expected in table:
        found = json.loads(json.dumps(to_json_value({"x": value})))["x"]
        assert (found, type(found)) == (expected, type(expected)), repr(value)


def test_a_value_that_is_not_json_is_refused_with_its_path_and_the_remedy() -> None:
    table: list[tuple[Any, str]] = [
        ({"loss": [1, 2, 3, torch.zeros(2)]}, "result['loss'][3] is a Tensor; "),
        ({"loss": [torch.zeros(2)]}, "current_replica().save_artifact"),
        ({"names": {1}}, "result['names'] is a set"),
        ([b"x"], "result[0] is a bytes"),
        ({"f": [len]}, "result['f'][0]"),
        (1j, "result is a complex"),
        ({3: "x"}, "result has the key 3, an int; the keys of a result are strings"),
        ({"a": {("a", "b"): 1}}, "result['a'] has the key ('a', 'b')"),
        (circle(), "does it contain itself"),
        ({"n": 10**10_000}, "result['n'] is an integer of"),
    ]
    for value, words in table:
        with pytest.raises(ResultError) as caught:
            to_json_value(value)
        assert words in str(caught.value), words
    pending = coroutine()
    with pytest.raises(ResultError, match="is a coroutine"):
        to_json_value(pending)
    pending.close()
