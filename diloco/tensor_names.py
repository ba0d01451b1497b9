"""The names of a model's tensors, without what wrappers add to them.

`torch.compile`, `DistributedDataParallel` and others put a module inside another one, and the names of its parameters
get a prefix: `_orig_mod.`, `module.`. Such a wrapper changes how a module runs and not which parameters it has. So one
replica may compile what another does not, and a resumed run may switch it on or off. A *clean name* leaves these
prefixes out, at any depth. A wrapper is recognized by its class alone: your layer with the name `module` keeps its
name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Literal, TypeVar

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
"""By the attribute that holds the wrapped module, the classes of wrappers: module and name. None is imported here."""
SHARDED = ("torch.distributed.fsdp", "FullyShardedDataParallel")
DTENSOR = ("torch.distributed.tensor", "DTensor")


def clean_name(model: nn.Module, name: str) -> str:
    """Return the clean name of a parameter, a buffer or a module.

        clean_name(nn.Sequential(torch.compile(nn.Linear(2, 2))), "0._orig_mod.weight")   # "0.weight"

    Args:
        model: the model that `name` belongs to.
        name: as torch has it. A name that is clean is returned as it is.
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
        # A model may name its parameters itself and leave wrappers out: the rest of the path is then below them.
        child = next((child for layer in layers[at:] if (child := layer._modules.get(part)) is not None), None)
        layers, at = ([], 0) if child is None else (layers_of(child), 0)
    return ".".join(kept)


def by_clean_name(model: nn.Module, named: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Return things of a model by their clean names, in their order.

        by_clean_name(model, model.named_parameters())

    Args:
        model: the model.
        named: pairs of a name, as torch has it, and a thing, as a parameter.

    Raises:
        ValueError: two have one name, in a model that names its parameters itself.
    """
    found: dict[str, T] = {}
    for name, thing in named:
        clean = clean_name(model, name)
        if clean in found:  # one of them would be in no average
            raise ValueError(f"The model has two tensors named {clean!r}, the second as {name!r}. Rename one of them.")
        found[clean] = thing
    return found


def find_tensor(model: nn.Module, name: str, kind: Literal["parameter", "buffer"]) -> Tensor:
    """Return the tensor that has a clean name now.

        find_tensor(nn.Linear(2, 2), "weight", "parameter")

    Args:
        model: the model. It may have been wrapped, unwrapped, or given other parameters since the name was made.
        name: a clean name.
        kind: whether it is a parameter or a buffer.

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
        f"The {kind} {name!r} is in the run's average and no longer in this model. Replace the values of a tensor, or "
        "the tensor by one of its shape, and keep the layers of the model while a DiLoCo is open."
    )


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are saved with a model, by their clean names.

    Some wrappers name what is saved as the wrapped module does, so a buffer is looked for by itself, too.
    """
    saved = model.state_dict(keep_vars=True)
    tensors = {id(tensor) for tensor in saved.values()}
    return by_clean_name(model, ((name, b) for name, b in model.named_buffers() if name in saved or id(b) in tensors))


def modules_by_clean_name(model: nn.Module) -> dict[str, nn.Module]:
    """Return all modules by their clean names; in the place of a wrapper the module inside, which has the same name."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        found.setdefault(clean_name(model, name), layers_of(module)[-1])
    return found


def check_is_unsharded(model: nn.Module) -> None:
    """Refuse a model in pieces.

    Raises:
        TypeError: each process has only a piece of a parameter.
    """
    fsdp, dtensor = _class(SHARDED), _class(DTENSOR)
    for name, module in model.named_modules():
        if fsdp is not None and isinstance(module, fsdp):
            _refuse(f"{name!r} of the model is" if name else "The model is", "wrapped in FullyShardedDataParallel")
    for name, parameter in model.named_parameters():
        if dtensor is not None and isinstance(parameter, dtensor):
            _refuse(f"Parameter {name!r} is", "a DTensor, as fully_shard and tensor parallelism make them")


def _refuse(subject: str, kind: str) -> None:
    raise TypeError(
        f"{subject} {kind}: each process has a piece of it, and DiLoCo averages whole parameters. Train the model as "
        "it is, in one process per replica, and launch more replicas instead."
    )


def layers_of(module: nn.Module) -> list[nn.Module]:
    """Return a module and, if it is a wrapper, the modules inside that share its name, from the outermost on.

    A module is not treated as wrapped if one of its names is also a name of the wrapper, as in a user's own wrapper:
    two tensors would get one name. All that is inside then keeps its full name.
    """
    layers, names = [module], set[str]()
    while (attribute := _wrapped_by(layers[-1])) is not None:
        inner = layers[-1]._modules[attribute]
        assert inner is not None  # `_wrapped_by` looks
        names |= _names_in(layers[-1]) - {attribute}
        if names & _names_in(inner):
            break
        layers.append(inner)
    return layers


def _next(layers: list[nn.Module], number: int) -> nn.Module | None:
    return layers[number + 1] if number + 1 < len(layers) else None


def _wrapped_by(module: nn.Module) -> str | None:
    """Return the attribute that holds the wrapped module; None if this is not a wrapper."""
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
    """Return a class if its module is loaded: else no object can be one of it."""
    found = getattr(sys.modules.get(where[0]), where[1], None)
    return found if isinstance(found, type) else None
