"""A `state_dict` as arrays: its tensors under names of their own, and the rest as JSON. Never a pickle.

What can be kept: dictionaries, lists and tuples of tensors, numpy arrays, numbers, strings, booleans and None.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diloco.snapshot import DTYPES, Array

_KEPT = {np.dtype(dtype) for dtype in DTYPES.values()}


def to_arrays(state: Any, prefix: str) -> dict[str, Array]:
    """Take a state apart: `<prefix>/0`, `<prefix>/1`, … are its tensors, `<prefix>/json` is the rest.

    The arrays share memory with the tensors where those are on the CPU.

    Raises:
        TypeError: names what cannot be kept, and where it is.
    """
    arrays: dict[str, Array] = {}
    text = json.dumps(_apart(state, arrays, prefix, prefix), separators=(",", ":"))
    return {**arrays, f"{prefix}/json": np.frombuffer(text.encode(), np.uint8)}


def from_arrays(arrays: Mapping[str, Array], prefix: str) -> Any | None:
    """Put a state together again, of copies; None when there is none under this prefix."""
    text = arrays.get(f"{prefix}/json")
    return None if text is None else _together(json.loads(text.tobytes()), arrays)


def _apart(value: Any, arrays: dict[str, Array], prefix: str, where: str) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value if not isinstance(value, np.generic) else value.item()
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, (bool, int, float, str, type(None))):
                raise TypeError(f"{where} has a key of type {type(key).__name__}, which cannot be kept as JSON.")
        items = [[key, _apart(item, arrays, prefix, f"{where}[{key!r}]")] for key, item in value.items()]
        return {"dict": items}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_apart(item, arrays, prefix, f"{where}[{at}]") for at, item in enumerate(value)]}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Tensor):
        return _tensor_apart(value.detach(), arrays, prefix)
    if isinstance(value, np.ndarray) and value.dtype in _KEPT:
        return {"array": _added(value, arrays, prefix)}
    raise TypeError(f"{where} is a {type(value).__name__}, which can be kept neither as a tensor nor as JSON.")


def _tensor_apart(tensor: Tensor, arrays: dict[str, Array], prefix: str) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    values = tensor.cpu()
    if dtype == "bfloat16":
        values = values.contiguous().view(torch.int16)  # numpy has no such type
    return {"tensor": _added(values.numpy(), arrays, prefix), "dtype": dtype}


def _added(values: Array, arrays: dict[str, Array], prefix: str) -> str:
    name = f"{prefix}/{len(arrays)}"
    arrays[name] = values
    return name


def _together(value: Any, arrays: Mapping[str, Array]) -> Any:
    if not isinstance(value, dict):
        return value
    if "dict" in value:
        return {key: _together(item, arrays) for key, item in value["dict"]}
    if "list" in value:
        return [_together(item, arrays) for item in value["list"]]
    if "tuple" in value:
        return tuple(_together(item, arrays) for item in value["tuple"])
    if "array" in value:
        return np.array(arrays[value["array"]])
    tensor = torch.from_numpy(np.array(arrays[value["tensor"]]))
    return tensor.view(torch.bfloat16) if value["dtype"] == "bfloat16" else tensor
