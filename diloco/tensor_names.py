"""Names of a model's tensors without the prefixes that wrappers such as `torch.compile` add.

`torch.compile`, `DistributedDataParallel` and others put a module inside another one, and the names of its parameters
get a prefix: `_orig_mod.`, `module.`. Such a wrapper changes how a module runs and not which parameters it has. So one
replica may compile its model while another does not, and a resumed run may do the opposite. A *clean name* omits these
prefixes, at any depth. A wrapper is recognized by its class alone: your layer with the name `module` keeps its name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Literal, TypeVar

from torch import Tensor, nn

from diloco.errors import ContributionError

T = TypeVar("T")

WRAPPERS: dict[str, tuple[tuple[str, str], ...]] = {
    "_orig_mod": (("torch._dynamo.eval_frame", "OptimizedModule"),),
    "module": (
        ("torch.nn.parallel", "DistributedDataParallel"),
        ("torch.nn.parallel", "DataParallel"),
        ("torch.optim.swa_utils", "AveragedModel"),
    ),
    "_checkpoint_wrapped_module": (
        ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper"),
    ),
    "_forward_module": (("lightning.fabric.wrappers", "_FabricModule"), ("lightning_fabric.wrappers", "_FabricModule")),
}
"""For each attribute that holds a wrapped module, the classes of wrappers and the Python modules that define them.

These modules are not imported.
"""
SHARDED = ("torch.distributed.fsdp", "FullyShardedDataParallel")
DTENSOR = ("torch.distributed.tensor", "DTensor")


def clean_name(model: nn.Module, name: str) -> str:
    """Return the clean name of a parameter, a buffer or a module.

        clean_name(nn.Sequential(torch.compile(nn.Linear(2, 2))), "0._orig_mod.weight")   # "0.weight"

    Args:
        model: the model that `name` belongs to.
        name: the name that torch uses. A clean name is returned as it is.
    """
    parts = name.split(".")
    if WRAPPERS.keys().isdisjoint(parts):
        return name
    kept, layers, at = [], layers_of(model), 0
    for part in parts:
        if at + 1 < len(layers) and layers[at + 1] is layers[at]._modules.get(part):
            at += 1
            continue
        kept.append(part)
        # A model may name its parameters itself and omit wrappers. Then the rest of the path is inside the omitted
        # wrappers.
        child = next((child for layer in layers[at:] if (child := layer._modules.get(part)) is not None), None)
        layers, at = ([], 0) if child is None else (layers_of(child), 0)
    return ".".join(kept)


def by_clean_name(model: nn.Module, named: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Return named objects of a model by their clean names, in their order.

        by_clean_name(model, model.named_parameters())

    Args:
        model: the model.
        named: pairs of the name that torch uses, and an object such as a parameter.

    Raises:
        ValueError: two objects have one name, in a model that names its parameters itself.
    """
    found: dict[str, T] = {}
    for name, thing in named:
        clean = clean_name(model, name)
        if clean in found:  # otherwise one of the two tensors would not be averaged
            raise ValueError(f"The model has two tensors named {clean!r}, the second as {name!r}. Rename one of them.")
        found[clean] = thing
    return found


def find_tensor(model: nn.Module, name: str, kind: Literal["parameter", "buffer"]) -> Tensor:
    """Return the current tensor with a clean name.

        find_tensor(nn.Linear(2, 2), "weight", "parameter")

    Args:
        model: the model. It may have been wrapped, unwrapped, or given other parameters since the name was computed.
        name: a clean name.
        kind: "parameter" or "buffer".

    Raises:
        ContributionError: the model no longer has such a tensor.
    """
    *path, leaf = name.split(".")
    layers = layers_of(model)
    for part in path:
        child = next(
            (
                child
                for number, layer in enumerate(layers)
                if (child := layer._modules.get(part)) is not None and child is not _next(layers, number)
            ),
            None,
        )
        layers = [] if child is None else layers_of(child)
    for layer in layers:
        tensor = (layer._parameters if kind == "parameter" else layer._buffers).get(leaf)
        if tensor is not None:
            return tensor
    raise ContributionError(
        f"The {kind} {name!r} is in the run's average and no longer in this model. Keep the layers of the model while "
        "a DiLoCo is open; a tensor may be replaced by one of the same shape."
    )


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are saved with a model, by their clean names.

    Some wrappers save a buffer under the name that the wrapped module uses, so a buffer is also compared by identity.

    Args:
        model: the model.

    Example:
        saved_buffers(torch.nn.BatchNorm1d(4)).keys()
    """
    saved = model.state_dict(keep_vars=True)
    tensors = {id(tensor) for tensor in saved.values()}
    return by_clean_name(model, ((name, b) for name, b in model.named_buffers() if name in saved or id(b) in tensors))


def modules_by_clean_name(model: nn.Module) -> dict[str, nn.Module]:
    """Return all modules by their clean names. A wrapper is replaced by the module inside, which has the same name.

    Args:
        model: the model.

    Example:
        modules_by_clean_name(torch.compile(model))["layers.0"]
    """
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        found.setdefault(clean_name(model, name), layers_of(module)[-1])
    return found


def check_is_unsharded(model: nn.Module, *, has_members: bool = False) -> None:
    """Refuse a sharded model. If it belongs to several processes of one replica, DTensors in shards are accepted.

    Args:
        model: the model.
        has_members: True: the replica has several processes, which train this model together.

    Raises:
        TypeError: the model is sharded, so each process has only a piece of a parameter, and the pieces cannot be put
            together.

    Example:
        check_is_unsharded(model)
    """
    fsdp, dtensor = _class(SHARDED), _class(DTENSOR)
    for name, module in model.named_modules():
        if fsdp is not None and isinstance(module, fsdp):
            _refuse(f"{name!r} of the model is" if name else "The model is", "wrapped in FullyShardedDataParallel")
    for name, parameter in model.named_parameters():
        if dtensor is None or not isinstance(parameter, dtensor):
            continue
        if not has_members:
            _refuse(f"Parameter {name!r} is", "a DTensor, as fully_shard and tensor parallelism make them")
        placements: Any = getattr(parameter, "placements", ())
        if odd := next((each for each in placements if type(each).__name__ not in ("Shard", "Replicate")), None):
            raise TypeError(
                f"Parameter {name!r} is a DTensor with the placement {odd}, and DiLoCo knows Shard and Replicate. Use "
                "fully_shard, or tensor parallelism whose parameters are sharded evenly."
            )


def _refuse(subject: str, kind: str) -> None:
    raise TypeError(
        f"{subject} {kind}, so this process has only a piece of it, and DiLoCo averages whole parameters. Shard the "
        "model with fully_shard in a process group, or train the whole model in one process per replica."
    )


def layers_of(module: nn.Module) -> list[nn.Module]:
    """Return a module and the wrapped modules inside that share its name, from the outermost to the innermost.

    A module does not count as wrapped if one of its names is also a name of the wrapper, as in a user's own wrapper.
    Otherwise two tensors would get one name. Everything inside then keeps its full name.

    Args:
        module: any module.

    Example:
        layers_of(torch.compile(model))[-1] is model
    """
    layers, names = [module], set[str]()
    while (attribute := _wrapped_by(layers[-1])) is not None:
        inner = layers[-1]._modules[attribute]
        assert inner is not None  # `_wrapped_by` has checked the type
        names |= _names_in(layers[-1]) - {attribute}
        if names & _names_in(inner):
            break
        layers.append(inner)
    return layers


def _next(layers: list[nn.Module], number: int) -> nn.Module | None:
    return layers[number + 1] if number + 1 < len(layers) else None


def _wrapped_by(module: nn.Module) -> str | None:
    """Return the name of the attribute that holds the wrapped module. None: this module is not a wrapper."""
    if WRAPPERS.keys().isdisjoint(module._modules):
        return None
    for attribute, classes in WRAPPERS.items():
        if module._modules.get(attribute) is not None and any(
            kind is not None and isinstance(module, kind) for kind in map(_class, classes)
        ):
            return attribute
    return None


def _names_in(module: nn.Module) -> set[str]:
    return {*module._parameters, *module._buffers, *module._modules}


def _class(where: tuple[str, str]) -> type | None:
    """Return a class. None: its module is not loaded, so no object can be an instance of it."""
    found = getattr(sys.modules.get(where[0]), where[1], None)
    return found if isinstance(found, type) else None


def is_dtensor(tensor: object) -> bool:
    """Return True if a tensor is a DTensor, of which each process holds a part.

    Args:
        tensor: any object.
    """
    kind = _class(DTENSOR)
    return kind is not None and isinstance(tensor, kind)
