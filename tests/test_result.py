"""Results are JSON values, or an error that names the place."""

from __future__ import annotations

import json
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executors.errors import ResultError
from executors.result import to_json_value

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSON_VALUES)
def test_a_json_value_comes_back_as_it_is(value: Any) -> None:
    assert json.loads(json.dumps(to_json_value(value))) == value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ((1, (2, 3)), [1, [2, 3]]),
        (torch.tensor(1.5), 1.5),
        (torch.tensor([[7]]), 7),
        (numpy.float32(0.5), 0.5),
        (numpy.int64(3), 3),
        (numpy.bool_(True), True),
        (numpy.array([2.0]), 2.0),
    ],
)
def test_tuples_become_lists_and_one_element_scalars_become_numbers(value: Any, expected: Any) -> None:
    assert to_json_value({"x": value}) == {"x": expected}


def test_a_tensor_is_refused_by_its_path_with_a_way_to_keep_it() -> None:
    with pytest.raises(ResultError) as caught:
        to_json_value({"loss": [1, 2, 3, torch.zeros(2)]})
    assert str(caught.value).startswith("result['loss'][3] is a Tensor; ")
    assert "current_replica().save_artifact" in str(caught.value)


def test_a_key_that_is_no_string_is_refused() -> None:
    with pytest.raises(ResultError, match="result has the key 3, an int; the keys of a result are strings"):
        to_json_value({3: "x"})


def test_a_result_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ResultError, match="does it contain itself"):
        to_json_value(loop)
