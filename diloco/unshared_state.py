"""Stores the tensors of a model that are not in the anchor with the run, up to a limit of size.

The anchor has the trained parameters and the averaged buffers. A whole model also needs frozen parameters, buffers that
differ between replicas, and second names of tied parameters. The run records all their names, so that a reader knows
which are missing. It stores small tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from diloco.fragments import Fragment
from diloco.rendezvous.envelope import Proof
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.retrying_store import RetryingStore
from diloco.rendezvous.round import Background
from diloco.rendezvous.snapshot import DTYPES
from diloco.rendezvous.stored_log import UnsharedEntry, UnsharedTensors
from diloco.rendezvous.training_state import Array
from diloco.tensor_names import clean_name, find_tensor
from executors.errors import StoreError

log = logging.getLogger(__name__)

FIRST_BYTES = 256 << 20
"""The largest size in bytes of the frozen parameters and buffers that one replica stores once."""
LATER_BYTES = 64 << 20
"""The largest size in bytes of the buffers that training has changed, and that one replica stores between two
snapshots.
"""
MOST_NAMED = 20_000
"""The largest number of names of such tensors in the agreement of a run."""
_HELD_AS = {"bfloat16": torch.int16, "float8_e4m3fn": torch.uint8, "float8_e5m2": torch.uint8}
"""The type whose bits represent a type that numpy lacks."""
_NUMPY = {np.dtype(dtype) for dtype in DTYPES.values()}


class UnsharedState:
    """The tensors of one replica's model that are not in the anchor.

    Args:
        model: the model.
        fragments: its fragments, which have the tensors of the anchor.

    Example:
        UnsharedState(model, fragments).first()
    """

    def __init__(self, model: nn.Module, fragments: Sequence[Fragment]) -> None:
        self._model = model
        slots = [slot for fragment in fragments for slot in fragment.slots]
        first_names = {id(find_tensor(model, slot.name, slot.kind)): slot.name for slot in slots}
        anchored = set(first_names.values())
        parameters = {id(parameter) for parameter in model.parameters()}
        self.more: dict[str, UnsharedEntry] = {}
        for name, value in self._state().items():
            if name in anchored:
                continue
            if not isinstance(value, Tensor):
                self.more[name] = UnsharedEntry("other")
                continue
            kind = "tied" if id(value) in first_names else "frozen" if id(value) in parameters else "buffer"
            same_as = first_names.get(id(value), "")
            self.more[name] = UnsharedEntry(kind, _name_of(value.dtype), tuple(value.shape), same_as)

    def _state(self) -> dict[str, Any]:
        """Return the saved tensors of the model by clean names, which are the names without wrappers."""
        return {clean_name(self._model, name): value for name, value in self._model.state_dict(keep_vars=True).items()}

    def lines(self) -> dict[str, list[object]]:
        """Return the entries for the agreement of a run, at most `MOST_NAMED`."""
        return {name: more.line() for name, more in [*self.more.items()][:MOST_NAMED]}

    def first(self) -> dict[str, Tensor]:
        """Return frozen parameters and buffers as they are now.

        If all of them together have more than `FIRST_BYTES`, return only the buffers. If the buffers alone have more
        bytes, return no tensors.
        """
        state = self._state()
        kinds = (("frozen", "buffer"), ("buffer",))
        for chosen in kinds:
            found = {
                name: state[name] for name, more in self.more.items() if more.kind in chosen and _is_plain(state[name])
            }
            if sum(value.nbytes for value in found.values()) <= FIRST_BYTES:
                return found
        return {}


class UnsharedStateWriter:
    """Stores the unshared tensors of one replica with the run. If that fails, a line in the log reports it.

    Args:
        store: the store of the run.
        keys: the keys of the rendezvous.
        rank: this replica.
        proof: signs records or adds checksums.
        background: runs the upload while training continues.

    Example:
        UnsharedStateWriter(store, keys, 0, UNSIGNED, uploads).keep(0, state.first(), FIRST_BYTES)
    """

    def __init__(self, store: RetryingStore, keys: Keys, rank: int, proof: Proof, background: Background) -> None:
        self._store = store
        self._keys = keys
        self._rank = rank
        self._proof = proof
        self._background = background
        self._kept: set[int] = set()

    def keep(self, position: int, tensors: Mapping[str, Tensor], most_bytes: int) -> None:
        """Copy tensors now, and store the copy while training continues. A second call for the same position does
        nothing.

        Args:
            position: the number of entries that the run has completed.
            tensors: the tensors by name.
            most_bytes: the largest size of all tensors together. If they have more bytes, nothing is stored.
        """
        if position in self._kept or not tensors or sum(value.nbytes for value in tensors.values()) > most_bytes:
            return
        self._kept.add(position)
        arrays: dict[str, Array] = {}
        dtypes: dict[str, str] = {}
        for name, value in tensors.items():
            dtype = _name_of(value.dtype)
            bits = value.detach().cpu().contiguous()
            if dtype in _HELD_AS:
                dtypes[name], bits = dtype, bits.view(_HELD_AS[dtype])
            arrays[name] = np.array(bits.numpy())
        rest = UnsharedTensors(self._rank, arrays, dtypes)
        self._background(lambda: self._put(position, rest))

    def _put(self, position: int, rest: UnsharedTensors) -> None:
        store, key = self._store.for_thread(), self._keys.unshared(position)
        try:
            store.create(key, rest.data(key, self._proof))
        except StoreError as error:
            log.warning("rank %s: unshared tensors could not be stored after round %s: %s", self._rank, position, error)


def restored(rest: UnsharedTensors) -> dict[str, Tensor]:
    """Return stored tensors with their original types.

    Args:
        rest: the stored tensors.

    Raises:
        ValueError, RuntimeError: an array does not fit its recorded type.

    Example:
        restored(rest)["mask"]
    """
    found: dict[str, Tensor] = {}
    for name, array in rest.arrays.items():
        bits = torch.from_numpy(np.array(array))
        dtype = rest.dtypes.get(name)
        if dtype is not None:
            if dtype not in _HELD_AS or bits.dtype != _HELD_AS[dtype]:
                raise ValueError(f"{name!r} is of {dtype[:40]!r}")
            bits = bits.view(getattr(torch, dtype))
        found[name] = bits
    return found


def _is_plain(value: Tensor) -> bool:
    """Return True if a tensor can be stored.

    A tensor of a subclass, such as quantized weights, is more than its values.
    """
    if type(value) not in (Tensor, nn.Parameter) or value.is_meta or value.layout != torch.strided:
        return False
    dtype = _name_of(value.dtype)
    if dtype in _HELD_AS:
        return True
    try:
        return torch.empty(0, dtype=value.dtype, device="cpu").numpy().dtype in _NUMPY
    except TypeError:  # numpy does not have the type
        return False


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
