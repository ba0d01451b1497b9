"""Divides a model into fragments: groups of parameters and float buffers that are averaged together, laid out flat.

Everything is identified by its name, without prefixes that wrappers such as `torch.compile` add (`tensor_names`).
Frozen parameters are not sent. Tied parameters are sent once, under their first name. Integer buffers stay local, and
so do buffers that the model does not save or that contain infinities: these are masks and tables, not statistics.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite, prod
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from diloco.rendezvous.frames import head_bytes
from diloco.tensor_names import by_clean_name, check_is_unsharded, clean_name, modules_by_clean_name, saved_buffers
from diloco.wires import wire_named
from diloco.wires.wire import BLOCK_ELEMENTS
from executors.errors import kind_of
from executors.store import Store
from executors.store.protocol import LimitedStore

FragmentSpec: TypeAlias = int | Sequence[Sequence[nn.Module | str]]
MARK_VALUES = 256
"""The number of values by which a frozen parameter or buffer is identified.

The number is small, so that two seeds give different means.
"""


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one tensor in its fragment.

    Attributes:
        name: the tensor's name, without prefixes of wrappers.
        kind: "parameter" or "buffer".
        shape: its shape.
        dtype: its dtype in the model, such as "bfloat16".
        start: the number of its first element in the flat fragment.
        end: the number of the element after the tensor's last element.
    """

    name: str
    kind: Literal["parameter", "buffer"]
    shape: tuple[int, ...]
    dtype: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Fragment:
    """Tensors that are averaged together: first the parameters, then the buffers.

    Attributes:
        index: the number of the fragment, from 0.
        slots: the places of its tensors, in order.
        n_stepped: the number of elements before the first buffer. The outer optimizer steps these.
        n_elements: the number of all elements.
    """

    index: int
    slots: tuple[Slot, ...]
    n_stepped: int
    n_elements: int


Values: TypeAlias = Sequence[tuple[Slot, Tensor]]
"""All tensors of a fragment, in their order."""


def plan_fragments(
    model: nn.Module,
    fragments: FragmentSpec,
    *,
    sync_buffers: bool | None,
    wires: Sequence[str] = (),
    has_members: bool = False,
) -> list[Fragment]:
    """Divide a model into fragments.

    Args:
        model: the model.
        fragments: a number of fragments, over which layers are distributed in turn, as Streaming DiLoCo found best
            (arXiv 2501.18512, section 2.3). Or lists of modules, or of names of modules or parameters. The lists must
            contain each trainable parameter exactly once.
        sync_buffers: True: float buffers are averaged. False: they are not. None: they are, unless the wire is too
            coarse for them. A warning reports a wire that is too coarse.
        wires: the names of the encodings of contributions and means.
        has_members: True if the model belongs to several processes of one replica, so that its parameters may be
            sharded.

    Returns:
        The fragments, in their order.

    Raises:
        ValueError: the model has no trainable parameters, or too few layers. Or the lists do not contain each trainable
            parameter exactly once. Or buffers must be averaged, and a wire is too coarse for them.
        TypeError: the model is not a module, or its parameters cannot be averaged: they are sharded, or not numbers.

    Example:
        plan_fragments(model, 4, sync_buffers=None, wires=("fp32",))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {kind_of(model)}.")
    check_is_unsharded(model, has_members=has_members)
    parameters = by_clean_name(model, ((name, p) for name, p in model.named_parameters() if p.requires_grad))
    if not parameters:
        raise ValueError("The model has no trainable parameters, so there is nothing to average. Unfreeze some first.")
    for name, parameter in parameters.items():
        if not parameter.is_floating_point() or parameter.is_meta:
            kind = "on the meta device" if parameter.is_meta else f"{parameter.dtype}"
            raise TypeError(f"Parameter {name!r} is {kind}. DiLoCo averages real numbers: freeze it, or convert it.")
    if isinstance(fragments, (bool, str)) or not isinstance(fragments, (int, Sequence)):
        raise TypeError(f"fragments must be a number, or lists of modules or names, got fragments={fragments!r}.")
    if not isinstance(sync_buffers, bool | None):
        raise TypeError(f"sync_buffers must be True, False or None, got sync_buffers={sync_buffers!r}.")
    if isinstance(fragments, int):
        groups = _dealt_out(model, parameters, fragments)
    else:
        groups = _listed(model, parameters, fragments)
    buffers = {} if sync_buffers is False else synchronized_buffers(model)
    if buffers and (coarse := next((wire for wire in wires if not wire_named(wire).is_relative), None)):
        _warn_too_coarse(coarse, list(buffers), is_asked_for=sync_buffers is True)
        buffers = {}
    homes = _homes(groups, buffers)
    plan = []
    for index, group in enumerate(groups):
        own = {name: parameters[name] for name in parameters if name in group}
        plan.append(_laid_out(index, own, {name: b for name, b in buffers.items() if homes[name] == index}))
    return plan


def check_sizes(fragments: Sequence[Fragment], wire: str, store: Store) -> None:
    """Check that no contribution is larger than the largest object that the store accepts.

    Args:
        fragments: the fragments of the model.
        wire: the name of the encoding of contributions.
        store: the store of the run.

    Raises:
        ValueError: a contribution is larger than an object in this store may be.

    Example:
        check_sizes(fragments, "fp32", store)
    """
    if not isinstance(store, LimitedStore):
        return
    n_elements = [fragment.n_elements for fragment in fragments]
    sizes = [head_bytes(-(-n // BLOCK_ELEMENTS)) + wire_named(wire).size(n) for n in n_elements]
    if max(sizes) > store.max_object_bytes:
        raise ValueError(
            f"With fragments={len(fragments)} and wire={wire!r}, a contribution of fragment {sizes.index(max(sizes))} "
            f"has {max(sizes) / 1e9:.3g} GB, and {store.url} allows {store.max_object_bytes / 1e9:.3g} GB. "
            f"Use at least fragments={-(-sum(sizes) // store.max_object_bytes)}, or a smaller wire."
        )


def marks_of_frozen(model: nn.Module) -> dict[str, float]:
    """Return a number for each frozen parameter that identifies its weights. The number is the same on every machine.

    Args:
        model: the model.

    Example:
        marks_of_frozen(model)  # {"embedding.weight": 0.0123}
    """
    marks = {}
    for name, p in by_clean_name(model, model.named_parameters()).items():
        if not p.requires_grad and type(p.data) is Tensor and p.is_floating_point() and not p.is_meta and p.numel():
            mark = p.detach().reshape(-1)[:: -(-p.numel() // MARK_VALUES)].cpu().double().abs().mean().item()
            marks.update({name: mark} if isfinite(mark) else {})
    return marks


def synchronized_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are averaged: floats, saved with the model, and finite.

    Args:
        model: the model.

    Example:
        synchronized_buffers(torch.nn.BatchNorm1d(4)).keys()  # running_mean, running_var
    """
    return {
        name: buffer
        for name, buffer in saved_buffers(model).items()
        if buffer.is_floating_point() and bool(torch.isfinite(buffer).all())
    }


def _warn_too_coarse(wire: str, buffers: list[str], *, is_asked_for: bool) -> None:
    """Warn that each replica keeps its own buffers.

    Raises:
        ValueError: the user asked to average them.
    """
    more = f" and {len(buffers) - 1} more" if len(buffers) > 1 else ""
    why = (
        f"wire={wire!r} is too coarse to average running statistics ({buffers[0]!r}{more}), because its rounding could "
        "make a small variance negative."
    )
    if is_asked_for:
        raise ValueError(
            f"sync_buffers=True is not possible: {why} Use wire='bf16', or sync_buffers=False, which lets each replica "
            "keep its own."
        )
    warnings.warn(
        f"Each replica keeps its own float buffers: {why} Pass sync_buffers=False if that is intended, or "
        "use wire='bf16'.",
        stacklevel=4,
    )


def _dealt_out(model: nn.Module, parameters: dict[str, nn.Parameter], count: int) -> list[set[str]]:
    if count < 1:
        raise ValueError(f"fragments must be at least 1, got fragments={count}.")
    if count == 1:
        return [set(parameters)]
    layers, rest = _layers(model, parameters, count)
    if len(layers) + len(rest) < count:
        raise ValueError(
            f"fragments={count} is more than the model has modules with trainable parameters. Use at most "
            f"fragments={len(layers) + len(rest)}."
        )
    groups: list[set[str]] = [set() for _ in range(count)]
    for index, layer in enumerate(layers):
        groups[index % count].update(layer)
    for unit in rest:  # embeddings, heads and other modules go into the smallest fragment
        sizes = [sum(parameters[name].numel() for name in group) for group in groups]
        groups[sizes.index(min(sizes))].update(unit)
    return groups


def _layers(
    model: nn.Module, parameters: dict[str, nn.Parameter], count: int
) -> tuple[list[list[str]], list[list[str]]]:
    """Return parameter names by module: the layers of the model's longest list of layers, and all other modules."""
    stacks = []
    for path, module in modules_by_clean_name(model).items():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            prefixes = [f"{path}.{child}." if path else f"{child}." for child, _ in module.named_children()]
            layers = [[name for name in parameters if name.startswith(prefix)] for prefix in prefixes]
            stacks.append([layer for layer in layers if layer])
    stack = max(stacks, key=len, default=[])
    if len(stack) < count:
        stack = []
    stacked = {name for layer in stack for name in layer}
    rest: dict[str, list[str]] = {}
    for name in parameters:
        if name not in stacked:
            rest.setdefault(name.rpartition(".")[0], []).append(name)
    return stack, list(rest.values())


def _listed(
    model: nn.Module, parameters: dict[str, nn.Parameter], fragments: Sequence[Sequence[nn.Module | str]]
) -> list[set[str]]:
    name_of = {id(p): name for name, p in parameters.items()}
    groups: list[set[str]] = []
    for index, items in enumerate(fragments):
        if isinstance(items, (str, nn.Module)):
            raise ValueError(f"fragments[{index}] must be a list of modules or names, got a {type(items).__name__}.")
        group: set[str] = set()
        for item in items:
            group.update(name_of[id(p)] for p in _parameters_of(model, item, index) if id(p) in name_of)
        if not group:
            raise ValueError(f"fragments[{index}] has no trainable parameters. Remove it, or add a trained module.")
        for earlier, other in enumerate(groups):
            if group & other:
                raise ValueError(
                    f"{min(group & other)!r} is in fragments[{earlier}] and in fragments[{index}]. Remove it from one."
                )
        groups.append(group)
    left = [name for name in parameters if not any(name in group for group in groups)]
    if left:
        raise ValueError(
            f"{left[0]!r} is in none of the {len(groups)} fragments ({len(left)} such). Add it to one of them."
        )
    return groups


def _parameters_of(model: nn.Module, item: nn.Module | str, index: int) -> Iterator[nn.Parameter]:
    if isinstance(item, nn.Module):
        yield from item.parameters()
        return
    named = [*model.named_parameters(remove_duplicate=False)]
    # Names with the prefixes of wrappers are accepted, too, because the user may have printed them. Names without
    # prefixes are tried first: a layer may be named "module", and that name must not select all parameters inside a
    # wrapper.
    for name_of in (partial(clean_name, model), str):
        found = [p for name, p in named if f"{name_of(name)}.".startswith(f"{item}.")]
        if found:
            break
    if not found:
        raise ValueError(
            f"fragments[{index}] has the name {item!r}, and the model has no such parameter or module. "
            "model.named_parameters() lists the names."
        )
    yield from found


def _homes(groups: Sequence[set[str]], buffers: dict[str, Tensor]) -> dict[str, int]:
    """Assign each buffer to the fragment of the parameters closest to it in the tree of modules."""
    homes = dict.fromkeys(buffers, 0)
    for name in buffers:
        path = name
        while path := path.rpartition(".")[0]:
            near = [i for i, group in enumerate(groups) if any(p.startswith(f"{path}.") for p in group)]
            if near:
                homes[name] = near[0]
                break
    return homes


def _laid_out(index: int, parameters: dict[str, nn.Parameter], buffers: dict[str, Tensor]) -> Fragment:
    slots: list[Slot] = []
    at = 0
    for name, tensor in {**parameters, **buffers}.items():
        kind: Literal["parameter", "buffer"] = "parameter" if name in parameters else "buffer"
        dtype = str(tensor.dtype).removeprefix("torch.")
        slots.append(Slot(name, kind, tuple(tensor.shape), dtype, at, at + prod(tensor.shape)))
        at = slots[-1].end
    return Fragment(index, tuple(slots), sum(p.numel() for p in parameters.values()), at)
