"""Knows the open DiLoCos of this process. Several threads may open, close and read them at the same time."""

from __future__ import annotations

from typing import Any
from weakref import ref


class OpenDiLoCos:
    """The open DiLoCos of this process, by the nonce of their replica and their name.

    The other replicas would take two DiLoCos with the same name for one model. An object that was deleted without
    `close()` is no longer open.

    Example:
        open_dilocos.add((replica.nonce, "main"), diloco)
    """

    def __init__(self) -> None:
        # A WeakValueDictionary raises RuntimeError if another thread adds an object during a loop over it. The copy of
        # a dictionary is made in one step.
        self._found: dict[tuple[str, str], ref[Any]] = {}

    def __contains__(self, key: tuple[str, str]) -> bool:
        found = self._found.get(key)
        return found is not None and found() is not None

    def add(self, key: tuple[str, str], diloco: Any) -> None:
        """Note that a DiLoCo is open.

        Args:
            key: the nonce of the replica, and the name of the DiLoCo.
            diloco: the DiLoCo. This object does not keep it alive.
        """
        self._found[key] = ref(diloco)

    def remove(self, key: tuple[str, str]) -> None:
        """Note that a DiLoCo is closed.

        Args:
            key: the nonce of the replica, and the name of the DiLoCo.
        """
        self._found.pop(key, None)

    def of(self, nonce: str) -> dict[tuple[str, str], Any]:
        """Return the open DiLoCos of a replica, by nonce and name.

        Args:
            nonce: the nonce of the replica's claim.
        """
        found = self._found.copy()
        return {key: each for key, its in found.items() if key[0] == nonce and (each := its()) is not None}


open_dilocos = OpenDiLoCos()
