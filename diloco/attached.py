"""What a rank keeps for its next attempt: the state of its inner optimizer, data position, generators and the like.

Kept with each snapshot's period, per rank, as safetensors and JSON. Nothing is decided on it: it belongs to one rank
alone, so it may be found by a listing, and a record that is missing or rotten only means an earlier one, or none.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_128, xxh3_128_hexdigest

from diloco.keeping import Background
from diloco.keys import Keys
from diloco.membership import Identity
from diloco.patience import PatientStore
from diloco.records import BadRecordError, Reading, frame, unframe
from diloco.rounds import READ_TRIES
from diloco.snapshot import Arrays, decode_part, encode_part
from diloco.state_arrays import from_arrays, to_arrays

log = logging.getLogger(__name__)

_WAYS = (("state_dict", "load_state_dict"), ("get_state", "set_state"), ("getstate", "setstate"))


@dataclass(frozen=True, slots=True)
class Kept:
    """What an earlier attempt of this rank left."""

    position: int
    arrays: Arrays

    def progress(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return the live work it had, as distances from the anchor, by fragment."""
        found = (self.arrays.get(f"progress/{index}") for index in range(len(sizes)))
        return [
            torch.zeros(size // 4)
            if values is None or values.dtype != np.float32 or values.shape != (size // 4,)
            else torch.from_numpy(np.array(values))
            for values, size in zip(found, sizes, strict=True)
        ]


class Attachments:
    """The states that ride along."""

    def __init__(self, store: PatientStore, keys: Keys, me: Identity, background: Background) -> None:
        self._store = store
        self._keys = keys
        self._me = me
        self._background = background
        self._attached: dict[str, Any] = {}
        self.kept = self._find() if me.attempt else None
        """What an earlier attempt left, if there was one."""

    def __bool__(self) -> bool:
        return bool(self._attached)

    def attach(self, name: str, thing: Any) -> None:
        """Let the state of a thing ride along; when an earlier attempt of this rank left one, load it now.

        Raises:
            TypeError: it has no state that can be taken and given back, or one that is more than tensors and JSON.
            ValueError: the name is taken.
        """
        if name in self._attached:
            raise ValueError(f"Something is attached as {name!r} already.")
        take, give = _ways(name, thing)
        to_arrays(take(), name)
        state = None
        if self.kept is not None:
            try:
                with Reading("state"):
                    state = from_arrays(self.kept.arrays, f"attached/{name}")
            except BadRecordError as error:
                log.warning("rank %s: what it kept as %r cannot be read: %s", self._me.rank, name, error)
        if state is not None:
            give(state)
        self._attached[name] = thing

    def keep(self, position: int, progress: Sequence[Tensor]) -> None:
        """Copy all states as they are now, and store the copy in the background."""
        arrays = {f"progress/{index}": part.numpy() for index, part in enumerate(progress) if part.count_nonzero()}
        for name, thing in self._attached.items():
            arrays |= {
                key: np.array(value) for key, value in to_arrays(_ways(name, thing)[0](), f"attached/{name}").items()
            }
        self._background(lambda: self._put(position, arrays))

    def _put(self, position: int, arrays: Arrays) -> None:
        store, me = self._store.apart(), self._me
        tensors = encode_part(arrays)
        digest = xxh3_128()
        for buffer in tensors:
            digest.update(buffer)
        record = {"rank": me.rank, "attempt": me.attempt, "position": position, "digest": digest.hexdigest()}
        if store.write(self._keys.own_tensors(me.rank, position, me.attempt), tensors):
            store.write(self._keys.own_record(me.rank, position, me.attempt), frame(record))

    def _find(self) -> Kept | None:
        """Return the newest record that can be read."""
        prefix = self._keys.own(self._me.rank)
        for _ in range(READ_TRIES):  # a listing that fails lists nothing
            if listed := self._store.found(prefix):
                break
        matches = (re.fullmatch(r"(\d+)/(\d+)/record", key.removeprefix(prefix)) for key in listed)
        found = [(int(match[1]), int(match[2])) for match in matches if match]
        for position, attempt in sorted(found, reverse=True):
            for _ in range(READ_TRIES):
                if (arrays := self._read(position, attempt)) is not None:
                    return Kept(position, arrays)
        return None

    def _read(self, position: int, attempt: int) -> Arrays | None:
        record = self._store.look(self._keys.own_record(self._me.rank, position, attempt))
        tensors = self._store.look(self._keys.own_tensors(self._me.rank, position, attempt))
        with contextlib.suppress(BadRecordError):
            if record and tensors and unframe(record)[0].get("digest") == xxh3_128_hexdigest(tensors):
                return decode_part(tensors)
        return None


def _ways(name: str, thing: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Return how to take a thing's state, and how to give it back."""
    for take, give in _WAYS:
        if callable(getattr(thing, take, None)) and callable(getattr(thing, give, None)):
            return getattr(thing, take), getattr(thing, give)
    if hasattr(getattr(thing, "bit_generator", None), "state"):  # a numpy Generator
        return lambda: thing.bit_generator.state, lambda state: setattr(thing.bit_generator, "state", state)
    raise TypeError(
        f"attach_state({name!r}) takes something with state_dict() and load_state_dict(), or a random generator of "
        f"torch, numpy or Python, got a {type(thing).__name__}."
    )
