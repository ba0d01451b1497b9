"""What passes between the training and the rounds for one fragment: work that is held, and what becomes of it.

The training holds a copy of its live parameters, B, and trains on. The rounds send anchor - B, step the anchor from A
to A', and turn the same memory into what is to be merged. With S what the others decoded of it, work that was counted
leaves the live parameters by adding A' - A + S: what is left of them is what was done since, and what the wire lost
(error feedback as of 1-bit SGD, Seide et al. 2014, whose memory here is the live parameters). So the memory belongs to
the training until it is handed over, then to the rounds until it has landed, and then to the training again; no lock
guards it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from diloco.errors import ContributionError
from diloco.fragments import Fragment
from diloco.pseudo_gradient import live_tensors
from diloco.rendezvous.training_state import Packed, shape_difference


class Shadow:
    """One fragment's memory between the training and the rounds.

    Args:
        anchor: (n_elements,) float32; the rounds step it.
        keeps: take the memory now, and keep it: the first use of a page costs several times a copy.
    """

    def __init__(self, model: nn.Module, fragment: Fragment, anchor: Tensor, *, keeps: bool) -> None:
        self.sent: Packed | None = None
        """What was packed of the held work."""
        self.is_held = False
        """Whether the memory holds live work; else the live parameters are as they were when that was sent."""
        self._model = model
        self._fragment = fragment
        self._anchor = anchor
        self._keeps = keeps
        self._memory: Tensor | None = torch.zeros(fragment.n_elements) if keeps else None
        self._kind: Literal["add", "set", "anchor"] | None = None
        """What to merge: the memory is to be added, or to take the place of the live parameters, or the anchor is."""
        self._mix = 0.0
        self._shift: Tensor | None = None
        """What is to be added besides."""

    # -- the training's side -----------------------------------------------------------------------------------------

    def hold(self, who: str) -> None:
        """Copy the live parameters.

        Raises: ContributionError: one has changed its shape.
        """
        memory = self.memory
        for slot, live in live_tensors(self._model, self._fragment):
            if tuple(live.shape) != slot.shape:
                raise ContributionError(f"{who}: {shape_difference(slot.name, tuple(live.shape), slot.shape)}.")
            memory[slot.start : slot.end].copy_(live.reshape(-1))
        self.is_held = True

    def merge(self) -> None:
        """Take what has landed into the live parameters, in float32 on their device."""
        kind, shift = self._kind, self._shift
        if kind is None and shift is None:
            return
        source = self._anchor if kind == "anchor" else self._memory
        for slot, live in live_tensors(self._model, self._fragment):
            at = slice(slot.start, slot.end)
            if shift is not None:
                _add(live, shift[at].view(slot.shape))
            if kind is None or source is None:
                continue
            values = source[at].view(slot.shape)
            if kind == "add":
                _add(live, values)
            elif self._mix:
                live.copy_(live.to(torch.float32).lerp(values.to(live.device), 1 - self._mix))
            else:
                live.copy_(values)
        self._shift = None
        if kind is not None:
            self.forget()

    # -- the rounds' side --------------------------------------------------------------------------------------------

    @property
    def memory(self) -> Tensor:
        """(n_elements,) float32."""
        if self._memory is None:
            self._memory = torch.empty(self._fragment.n_elements)
        return self._memory

    def take_anchor(self, mix: float = 0.0) -> None:
        """Let the anchor take the place of the live parameters, as it is when they are merged."""
        self.forget()
        self._kind, self._mix, self._shift = "anchor", mix, None

    def before_step(self, kind: Literal["add", "set"], mix: float = 0.0) -> Tensor:
        """Return the memory, in which the caller leaves what is to be merged, less the new anchor."""
        self._kind, self._mix, self.is_held, self.sent = kind, mix, False, None
        return self.memory

    def keep_work(self) -> None:
        """Let the live parameters follow the anchor from where it is now."""
        if self._kind is None:
            torch.neg(self._anchor, out=self.before_step("add"))
        elif self._kind != "anchor":
            self.memory.sub_(self._anchor)

    def after_step(self) -> None:
        """Add the anchor, as it is now."""
        if self._kind in ("add", "set"):
            self.memory.add_(self._anchor)

    def follow(self, shift: Tensor) -> None:
        """Move everything by as much as the anchor has moved, apart from any step."""
        if self._kind == "anchor":
            return
        if self._kind is None and not self.is_held:
            self.before_step("add").copy_(shift)
            return
        self.memory.add_(shift)
        if self._kind is None:  # what is held moves along, so that what was sent of it stays what it was
            self._shift = shift if self._shift is None else self._shift.add_(shift)

    def forget(self) -> None:
        """Return the memory to the training."""
        self._kind, self._mix, self.is_held, self.sent = None, 0.0, False, None
        if not self._keeps:
            self._memory = None


def _add(live: Tensor, values: Tensor) -> None:
    """Add float32 values to a tensor of any dtype and device, rounded once."""
    if live.dtype == torch.float32:
        live.add_(values.to(live.device))
    else:
        live.copy_(live.to(torch.float32).add_(values.to(live.device)))
