"""Lets DiLoCo average tensors outside the model: an EMA of the weights, or an optimizer's copies of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn

from executors.errors import kind_of

ExtraTensors: TypeAlias = nn.Module | Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor]]
"""A module, tensors by name, or a function that returns tensors by name, for an optimizer that replaces its tensors."""


class ExtraTensorsModule(nn.Module):
    """A module whose parameters share their memory with given tensors, so that a DiLoCo can average them.

    Args:
        thing: the tensors. Only float tensors are used. For a module, these are all its parameters, also frozen ones,
            and its saved buffers.

    Raises:
        TypeError: `thing` is neither a module, nor a mapping, nor a function, or it has an element that is not a
            tensor.
        ValueError: `thing` has no float tensor.

    Example:
        ExtraTensorsModule({"z": z})
    """

    def __init__(self, thing: ExtraTensors) -> None:
        super().__init__()
        self._thing = thing if not isinstance(thing, nn.Module) else None
        # in a tuple, so that torch does not make it a submodule
        self._module = (thing,) if isinstance(thing, nn.Module) else ()
        self._names: list[str] = []
        for number, (name, tensor) in enumerate(self.tensors().items()):
            # A parameter's name may not have dots, so the tensor's name is only for messages, and the number makes it
            # unique.
            self._names.append(name)
            self.register_parameter(f"{number}:{name.replace('.', '/')}", nn.Parameter(tensor.detach()))
        if not self._names:
            raise ValueError(
                f"average_also() needs float tensors, and {kind_of(thing)} has none. Pass a module, or a mapping from "
                "names to float tensors."
            )

    @property
    def module_of_copies(self) -> nn.Module | None:
        """The module that the user gave. None: the user gave a mapping or a function."""
        return self._module[0] if self._module else None

    def tensors(self) -> dict[str, Tensor]:
        """Return the current tensors, by name."""
        if self._module:
            (module,) = self._module
            saved = module.state_dict(keep_vars=True).keys()
            found: Mapping[str, Tensor] = {
                **dict(module.named_parameters()),
                **{name: buffer for name, buffer in module.named_buffers() if name in saved},
            }
        else:
            given = self._thing() if callable(self._thing) else self._thing
            if not isinstance(given, Mapping):
                raise TypeError(
                    "average_also() takes a module, a mapping from names to tensors, or a function that returns such a "
                    f"mapping, got {kind_of(given)}."
                )
            found = given
        for name, tensor in found.items():
            if not isinstance(tensor, Tensor):
                raise TypeError(f"average_also() takes tensors, got {kind_of(tensor)} as {name!r}.")
        return {str(name): tensor for name, tensor in found.items() if tensor.is_floating_point()}

    @torch.no_grad()
    def refresh(self) -> None:
        """Share memory with the current tensors. An optimizer may have replaced the earlier ones by new ones."""
        tensors = self.tensors()
        for name, parameter in zip(self._names, self.parameters(), strict=True):
            if parameter.data_ptr() != tensors[name].data_ptr():
                parameter.data = tensors[name].detach()


def addresses_of(averaged: Iterable[tuple[object, ExtraTensorsModule]]) -> set[int]:
    """Return the memory addresses of all tensors of some `ExtraTensorsModule`.

    Args:
        averaged: pairs of a DiLoCo and the tensors that it averages.

    Example:
        addresses_of([(diloco, ExtraTensorsModule(ema))])
    """
    return {tensor.data_ptr() for _, tensors in averaged for tensor in tensors.tensors().values()}
