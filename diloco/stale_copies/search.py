"""Searches for copies of parameters, in optimizers and in all objects that the user's variables lead to."""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from diloco.stale_copies.samples import Sample, Values, read_samples
from diloco.tensor_names import is_dtensor

MOST_FLAT = 100_000_000
"""The largest number of values of a flat tensor in which copies of parameters are searched."""
MOST_OBJECTS, MOST_DEPTH, MOST_PARTS = 100_000, 6, 10_000
"""The limits of a search: the number of objects, the distance from a variable, and the parts of one object."""
SCALARS = frozenset({str, bytes, int, float, bool, complex, type(None)})
"""Types whose values contain no other objects."""
NOT_USERS = ("diloco", "executors", "torch", "threading", "importlib", "runpy")
"""Packages whose frames have no variables of the user."""
RUNNERS = ("_pytest", "pluggy")
"""Packages that call the user's code in a test. The frames outside of theirs belong to pytest and its plug-ins."""
NOT_SEARCHED = ("diloco", "executors", *RUNNERS)
"""Packages whose objects have no copy of the user's weights. If replicas are threads of one process, objects of diloco
lead from one replica to the others. Objects of pytest lead from each fixture to all tests of a session, so a search
would meet its limit.
"""


class Copy:
    """A tensor that had the values of a parameter.

    Args:
        tensor: a tensor of the parameter's shape, or a longer flat one.
        sample: the values of the parameter.
        start: the position of the first of these values in the flat tensor.

    Example:
        Copy(master, sample, 0).read()
    """

    def __init__(self, tensor: Tensor, sample: Sample, start: int) -> None:
        self.sample = sample
        self._tensor, self._start = ref(tensor), start

    def read(self) -> Values | None:
        """Return the current values of the copy. None: it was deleted."""
        tensor = self._tensor()
        return None if tensor is None else read_samples([Sample(self.sample.name, tensor, self._start)])[0]


def copies_of(samples: Sequence[Sample], tensors: Iterable[Tensor]) -> list[Copy]:
    """Return the tensors that have the same values as parameters, but other memory.

    Args:
        samples: the values of the parameters.
        tensors: the tensors to compare.

    Example:
        copies_of(samples, tensors_in([optimizer]))
    """
    wanted = [(sample, read_samples([sample])[0][: sample.n_values]) for sample in samples]
    shapes = {sample.parameter.shape for sample in samples}
    own = {sample.parameter.data_ptr() for sample in samples}
    found: list[Copy] = []
    for tensor in tensors:
        with suppress(Exception):  # a tensor may have no storage, or may be of a class that cannot be read
            is_flat = tensor.dim() == 1 and tensor.device.type == "cpu" and tensor.numel() <= MOST_FLAT
            if not (tensor.shape in shapes or is_flat) or not tensor.is_floating_point() or tensor.data_ptr() in own:
                continue
            for sample, values in wanted:
                if not values.any():
                    continue
                if tensor.shape == sample.parameter.shape:
                    copy = Copy(tensor, sample, sample.start)
                    if np.array_equal(_rounded(copy.read(), sample)[: len(values)], values):
                        found.append(copy)
                elif is_flat and tensor.numel() > sample.parameter.numel():
                    flat = _rounded(tensor.detach().float().numpy(), sample)
                    starts = np.flatnonzero(flat == values[0])[:100]
                    is_here = (start for start in starts if np.array_equal(flat[start : start + len(values)], values))
                    found += [Copy(tensor, sample, int(start)) for start in is_here]
    return found


def _rounded(values: Values | None, sample: Sample) -> Values:
    """Return float32 values, rounded to the parameter's dtype, which may have fewer digits."""
    exact = torch.from_numpy(np.zeros(0, np.float32) if values is None else values)
    rounded: Values = exact.to(sample.parameter.dtype).float().numpy()
    return rounded


def tensors_in(things: Iterable[Any], depth: int = 4) -> Iterator[Tensor]:
    """Yield the tensors that optimizers have in their states and attributes.

    Args:
        things: optimizers, tensors, mappings and lists.
        depth: how many levels of mappings and lists are searched.

    Example:
        tensors_in([optimizer])
    """
    for thing in things:
        if isinstance(thing, Tensor):
            if not is_dtensor(thing):
                yield thing
        elif depth and isinstance(thing, Mapping):
            yield from tensors_in(thing.values(), depth - 1)
        elif depth and isinstance(thing, (list, tuple)):
            yield from tensors_in(thing, depth - 1)
        elif depth and isinstance(thing, Optimizer):
            yield from tensors_in(vars(thing).values(), depth - 1)


def named_tensors(values: Mapping[Any, Any], depth: int = 3) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in the state of one parameter with their innermost keys. They may be in mappings and lists.

    Args:
        values: the state of the parameter.
        depth: how many levels of mappings are searched.

    Example:
        named_tensors(optimizer.state[parameter])
    """
    for key, value in values.items():
        parts = value if isinstance(value, (list, tuple)) else (value,)
        for part in parts:
            if isinstance(part, Tensor):
                yield str(key), part
            elif depth and isinstance(part, Mapping):
                yield from named_tensors(part, depth - 1)


def wrappers_with_state() -> Iterator[Any]:
    """Yield the user's objects that have a `step` and a `state` of their own, as wrappers of an optimizer have.

    Example:
        for wrapper in wrappers_with_state(): ...
    """
    for thing in reachable_objects():
        kind = type(thing)
        if callable(getattr(kind, "step", None)) and not issubclass(kind, nn.Module):
            state = getattr(thing, "__dict__", {}).get("state")
            if isinstance(state, dict) and any(isinstance(key, Tensor) for key in islice(state, 1)):
                yield thing


def reachable_tensors() -> Iterator[Tensor]:
    """Yield the tensors that can be reached from the variables of the code that called DiLoCo.

    Example:
        for tensor in reachable_tensors(): ...
    """
    for thing in reachable_objects():
        # isinstance would call the __class__ of proxies, which may load data. The values of a DTensor are read by all
        # processes of a replica together, and only the first process searches.
        if issubclass(type(thing), Tensor) and not is_dtensor(thing):
            yield thing


def reachable_objects() -> Iterator[Any]:
    """Yield the objects that can be reached from the variables of the code that called DiLoCo, near objects first.

    It does not use `gc.get_objects()` or `gc.get_referrers()`. These return tuples that other threads are still
    building, and a thread fails if its unfinished tuple has another reference. They also take seconds in a process with
    millions of objects.

    Example:
        for thing in reachable_objects(): ...
    """
    things = deque[tuple[Any, int]]()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in RUNNERS:
            break
        if package not in NOT_USERS:
            things += [(value, 0) for value in (*frame.f_locals.values(), *frame.f_globals.values())]
        frame = frame.f_back
    seen = set[int]()
    kept = list[Any]()  # this list keeps the objects alive, so that no new object gets an id that is in `seen`
    # Near objects come first. Otherwise a data set of millions of items would use up the limit.
    while things and len(seen) < MOST_OBJECTS:
        thing, depth = things.popleft()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        kept.append(thing)
        yield thing
        if depth < MOST_DEPTH and not issubclass(type(thing), Tensor):
            with suppress(Exception):  # an object of the user may refuse access to its attributes
                parts = islice(_parts_of(thing), MOST_PARTS)
                things += [(part, depth + 1) for part in parts if type(part) not in SCALARS]


def _parts_of(thing: Any) -> Iterable[Any]:
    """Return the parts of an object in which a copy of weights may be.

    A container of a user's class is read by the methods of the built-in class, because its own `values()` may load
    data.
    """
    kind = type(thing)
    if kind in SCALARS or isinstance(thing, (type, ModuleType)):
        return ()
    if kind.__module__.partition(".")[0] in NOT_SEARCHED:
        return ()
    if isinstance(thing, OrderedDict) and hasattr(thing, "_metadata"):
        return ()  # a copy of `model.state_dict()`, which scripts keep for their best model
    own: Iterable[Any] = getattr(thing, "__dict__", {}).values()
    if isinstance(thing, dict):
        return chain(dict.values(thing), own)
    containers: tuple[Any, ...] = (list, tuple, set, deque)
    for container in containers:
        if isinstance(thing, container):
            return chain(container.__iter__(thing), own)
    if isinstance(thing, MethodType):
        return [thing.__self__]
    if isinstance(thing, FunctionType):
        return (cell.cell_contents for cell in thing.__closure__ or ())
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    return own


def names_of(optimizers: Sequence[Optimizer]) -> str:
    """Return text for a message that names the optimizers that made a step, and the objects that wrap them.

    Args:
        optimizers: the optimizers.

    Example:
        names_of([optimizer])  # "optimizer FP16_Optimizer (around AdamW)"
    """
    wrappers = dict[int, str]()
    wanted = set(map(id, optimizers))
    for thing in reachable_objects() if wanted else ():
        kind = type(thing)
        with suppress(Exception):  # a missing name must not cause a second error
            is_wrapper = callable(getattr(kind, "step", None)) and not kind.__module__.startswith(("torch.", "diloco."))
            if not is_wrapper:
                continue
            for part in vars(thing).values():
                for held in part if type(part) in (list, tuple) else (part,):
                    if id(held) in wanted and held is not thing and kind.__name__ != type(held).__name__:
                        wrappers.setdefault(id(held), kind.__name__)
    names = [
        f"{wrappers[id(each)]} (around {type(each).__name__})" if id(each) in wrappers else type(each).__name__
        for each in optimizers
    ]
    return f"optimizer {' or '.join(dict.fromkeys(names))}" if names else "the optimizer"


def is_close_to(value: Tensor, parameter: Tensor) -> bool:
    """Return True if a tensor is within a fifth of a parameter, by norm, and the parameter is not zero.

    Args:
        value: a tensor of the parameter's shape.
        parameter: the parameter.

    Example:
        is_close_to(master, parameter)
    """
    norm = float(parameter.float().norm())
    return norm > 0 and float((value.to(parameter.device).float() - parameter.float()).norm()) <= 0.2 * norm
