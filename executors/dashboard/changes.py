"""Computes what is new for a page: the parts that changed, and a patch of the values that its script draws."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KEPT = 8  # versions from which a page can be updated; a page with an older one gets everything


def patch_of(old: Any, new: Any) -> dict[str, Any]:
    """Return what turns an old JSON value into a new one. The script `page.js` applies it.

    Args:
        old: the old value.
        new: the new value.

    Returns:
        An empty object if nothing changed. Otherwise "=" with the new value, "+" with values to append to a list, or
        "." with patches by key and "-" with keys to remove.

    Example:
        patch_of({"x": [1, 2]}, {"x": [1, 2, 3]})  # {".": {"x": {"+": [3]}}}
    """
    if old == new:
        return {}
    if isinstance(old, dict) and isinstance(new, dict):
        changed = {key: patch_of(old[key], new[key]) if key in old else {"=": new[key]} for key in new}
        found: dict[str, Any] = {".": {key: patch for key, patch in changed.items() if patch}}
        if gone := [key for key in old if key not in new]:
            found["-"] = gone
        return found
    if isinstance(old, list) and isinstance(new, list):
        if len(new) > len(old) and new[: len(old)] == old:
            return {"+": new[len(old) :]}
        if len(new) == len(old) and all(isinstance(each, dict | list) for each in new):
            patches = ((str(at), patch_of(*pair)) for at, pair in enumerate(zip(old, new, strict=True)))
            return {".": {at: patch for at, patch in patches if patch}}
    return {"=": new}


@dataclass(frozen=True)
class Shown:
    """Everything that a page shows."""

    version: int
    parts: Mapping[str, str]
    """The HTML of each part, by name."""
    charts: Mapping[str, Any]
    order: Sequence[str]
    """The names of the parts, as the page orders them."""


class Versions:
    """The last versions of what a page shows.

    Example:
        versions = Versions()
        versions.add({"summary": "<p>…"}, {})
        versions.since(0)  # everything
    """

    def __init__(self) -> None:
        # Not from 0: a page that another server made must not look as if it had one of these versions.
        self._number = int(time.time() * 1000)
        self._kept = deque[Shown](maxlen=KEPT)
        self._patches = dict[tuple[int, int], dict[str, Any]]()
        self._lock = threading.Lock()

    @property
    def newest(self) -> Shown | None:
        """The newest version. None: nothing is known yet."""
        return self._kept[-1] if self._kept else None

    def add(self, parts: Mapping[str, str], charts: Mapping[str, Any]) -> None:
        """Add a version, unless nothing has changed.

        Args:
            parts: the HTML of each part, in the order of the page.
            charts: the values that the script of the page draws.
        """
        with self._lock:
            last = self.newest
            if last is not None and (last.parts, last.charts, last.order) == (parts, charts, [*parts]):
                return
            self._number += 1
            self._kept.append(Shown(self._number, parts, charts, [*parts]))
            self._patches.clear()

    def since(self, version: int) -> dict[str, Any]:
        """Return what a page with a version needs to show the newest version.

        Args:
            version: the version that the page shows. An unknown version gives everything.
        """
        with self._lock:
            new = self.newest
            if new is None or new.version == version:
                return {"version": version}
            old = next((each for each in self._kept if each.version == version), None)
            known = (0 if old is None else version, new.version)
            if known not in self._patches:  # all tabs with this version get the same changes
                self._patches[known] = _changes(old, new)
            return self._patches[known]


def _changes(old: Shown | None, new: Shown) -> dict[str, Any]:
    if old is None:
        return {
            "version": new.version, "parts": dict(new.parts), "charts": {"=": new.charts}, "order": [*new.order],
        }  # fmt: skip
    parts = {name: html for name, html in new.parts.items() if old.parts.get(name) != html}
    changes = {"version": new.version, "parts": parts, "charts": patch_of(old.charts, new.charts) or {".": {}}}
    return changes if old.order == new.order else {**changes, "order": [*new.order]}
