"""The live work of one fragment: how it is read, packed and held, and how a result is merged into it.

The training thread copies its live parameters, B, and continues to train. The round runner sends anchor - B and steps
the anchor from A to A'. It then turns the same memory into the values to merge. Let S be the values that the others
decoded. Counted work leaves the live parameters by adding A' - A + S. Later steps stay in them, and so does the
rounding error of the wire. This is the error feedback of 1-bit SGD (Seide et al. 2014), with the live parameters as its
memory. Buffers are statistics, and not work: a variance that is moved in this way may become negative. They take the
values of the anchor, whatever becomes of the work.

If every step waits for its round, a copy is made only if it is needed. Otherwise the rounding error is computed from
the live parameters while the anchor is stepped.

The memory belongs to the training thread until the work is handed over, then to the round runner until the result is
ready, and then to the training thread again. No lock guards it.

Work is the pseudo-gradient, anchor - live. Live tensors are found by name in every round, so replaced parameters are
found. The arithmetic is float32 on the CPU, for any dtype and device. Gradients are never touched, so a gradient may be
accumulated across a round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import sqrt
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from diloco.device_copies import DeviceCopies
from diloco.errors import ContributionError
from diloco.fragments import Fragment, Values
from diloco.rendezvous.envelope import Proof
from diloco.rendezvous.training_state import PackedWork, shape_difference
from diloco.tensor_names import by_clean_name, find_tensor
from diloco.wires.wire import (
    BLOCK_ELEMENTS,
    PIECE,
    BlockWriter,
    Floats,
    NotFiniteError,
    Pieces,
    Wire,
    blocks_of,
    square_of,
)

Parts = list[tuple[int, Tensor]]
"""Parts of tensors that follow each other, flat, each with its first element's number in the fragment."""


# -- the held copy -----------------------------------------------------------------------------------------------------


class BufferPool:
    """Memory that fragments use in turn, as few are on their way at a time.

    Args:
        n_elements: of the largest fragment.
        keeps: keep what is given back: the first use of a page costs several times a copy.
    """

    def __init__(self, n_elements: int, *, keeps: bool) -> None:
        self.keeps = keeps
        self._n_elements = n_elements
        self._free: dict[bool, list[Tensor]] = {False: [], True: []}

    def take(self, n_elements: int, *, is_pinned: bool) -> Tensor:
        """Return memory of (n_elements,) float32 for a fragment, page-locked or not."""
        if not self.keeps:
            return torch.empty(n_elements, dtype=torch.float32, device="cpu")
        if not (free := self._free[is_pinned]):
            free.append(torch.zeros(self._n_elements, dtype=torch.float32, device="cpu", pin_memory=is_pinned))
        return free.pop()[:n_elements]

    def give(self, memory: Tensor, *, is_pinned: bool) -> None:
        """Take memory back. Two fragments are kept; more are in use only during a reload, and their memory is freed."""
        if self.keeps and len(self._free[is_pinned]) < 2:
            self._free[is_pinned].append(memory._base if memory._base is not None else memory)


class WireError:
    """Adds up the rounding error of a wire, relative to the work."""

    def __init__(self) -> None:
        self._lost_square = self._square = 0.0

    def leave(self, work: Floats, sent: Floats) -> None:
        """Replace a piece of the work, anchor - live, by what was sent of it less that work."""
        self._square += square_of(work) or 0.0
        np.subtract(sent, work, out=work)
        self._lost_square += square_of(work) or 0.0

    @property
    def share(self) -> float | None:
        """|work - sent| / |work|."""
        return sqrt(self._lost_square / self._square) if self._square else None


class HeldWork:
    """One fragment's part between the training and the rounds.

    Args:
        anchor: (n_elements,) float32; the rounds step it.
        room: where its memory is taken from, while it is used.
    """

    def __init__(self, model: nn.Module, fragment: Fragment, anchor: Tensor, room: BufferPool) -> None:
        self.is_held = False
        """Whether the memory holds live work; else the live parameters are as they were when that was sent."""
        self._model = model
        self._fragment = fragment
        self._anchor = anchor
        self._room = room
        self._buffers = slice(fragment.n_stepped, fragment.n_elements)
        self._copies = DeviceCopies.of(live_tensors(model, fragment)) if room.keeps else None
        self._is_pinned = self._copies is not None
        self._memory: Tensor | None = None
        if room.keeps:
            room.give(room.take(fragment.n_elements, is_pinned=self._is_pinned), is_pinned=self._is_pinned)
        self._landed: list[Tensor] = []
        """The values to merge on the device, by slot."""
        self._kind: Literal["add", "set", "anchor"] | None = None
        """The way to merge: add the memory, or replace the live parameters by the memory, or by the anchor."""
        self._mix = 0.0
        self._shift: Tensor | None = None
        """A shift that is added to the live parameters as well."""

    # -- the training's side -----------------------------------------------------------------------------------------

    def hold(self, who: str) -> None:
        """Copy the live parameters.

        Raises: ContributionError: one has changed its shape.
        """
        live = live_tensors(self._model, self._fragment)
        check_shapes(live, who)
        if self._copies is not None:
            self._copies.hold(live, self.memory)
        else:
            for slot, values in live:
                self.memory[slot.start : slot.end].copy_(values.reshape(-1))
        self.is_held = True

    @property
    def has_landed(self) -> bool:
        """Whether `merge` changes the live parameters."""
        return self._kind is not None or self._shift is not None

    def merge(self) -> None:
        """Take what has landed into the live parameters, in float32 on their device."""
        kind, shift = self._kind, self._shift
        if kind is None and shift is None:
            return
        source = self._anchor if kind == "anchor" else self._memory
        if self._copies is not None and self._landed:
            self._copies.arrive(self._landed)
        for number, (slot, live) in enumerate(live_tensors(self._model, self._fragment)):
            at = slice(slot.start, slot.end)
            if shift is not None:
                _add(live, shift[at].view(slot.shape))
            if kind is None or source is None:
                continue
            values = self._landed[number] if self._landed else source[at].view(slot.shape)
            if kind == "add" and slot.kind == "parameter":
                _add(live, values)
            elif self._mix and slot.kind == "parameter":
                live.copy_(live.to(torch.float32).lerp(values.to(live.device), 1 - self._mix))
            else:
                live.copy_(values)
        self._shift, self._landed = None, []
        if kind is not None:
            self.forget()

    # -- the rounds' side --------------------------------------------------------------------------------------------

    @property
    def memory(self) -> Tensor:
        """(n_elements,) float32."""
        if self._memory is None:
            self._memory = self._room.take(self._fragment.n_elements, is_pinned=self._is_pinned)
        return self._memory

    def values(self) -> Values:
        """Return what is held, or the live parameters."""
        if not self.is_held:
            return live_tensors(self._model, self._fragment)
        if self._copies is not None:
            self._copies.wait()
        return [(slot, self.memory[slot.start : slot.end].view(slot.shape)) for slot in self._fragment.slots]

    def take_anchor(self, mix: float = 0.0) -> None:
        """Let the anchor take the place of the live parameters, as it is when they are merged."""
        self.forget()
        self._kind, self._mix, self._shift = "anchor", mix, None

    def take_away_held(self) -> None:
        """Let what is held leave the live parameters: anchor - B."""
        if not self.is_held:
            self.take_anchor()
            return
        self._turn_into("add").neg_()

    def take_away(self, sent: Pieces, *, keeps_later: bool, mix: float) -> float | None:
        """Let what others have decoded leave the live parameters.

        Args:
            keeps_later: keep what was done since; else only what the wire has lost.

        Returns: the share of what was held that the wire lost.
        """
        anchor, memory = self._anchor.numpy(), self._turn_into("add" if keeps_later else "set", mix).numpy()
        lost = WireError()
        for first, values in sent:
            a, b = anchor[first : first + len(values)], memory[first : first + len(values)]
            np.subtract(a, b, out=b)  # the work
            lost.leave(b, values)
            if keeps_later:
                np.subtract(values, a, out=b)
        return lost.share

    def stepped_in_place(self, mean: Pieces, *, sent: Pieces, lost: WireError, block_elements: int) -> Pieces:
        """Yield a mean's pieces, and let what was sent leave the live parameters themselves: no step was made since.

        As soon as a piece of the anchor was stepped, the live piece is set to it, less the rounding error. So no memory
        is taken, and an interrupt leaves no parameter half done.
        """
        live = live_tensors(self._model, self._fragment)
        room = torch.empty(min(PIECE, self._fragment.n_elements), dtype=torch.float32, device="cpu")
        parts_of_live = pieces_of(live, self._fragment.n_elements, block_elements)
        for (first, g), (_, s), (_, parts) in zip(mean, sent, parts_of_live, strict=True):
            left = room[: len(g)]
            subtract_parts(self._anchor, first, parts, left)
            lost.leave(left.numpy(), s)
            left[max(0, self._buffers.start - first) :] = 0.0
            yield first, g
            left += self._anchor[first : first + len(g)]
            for number, part in parts:
                part.copy_(left[number - first : number - first + part.numel()])
        if self._kind in ("add", "set"):  # after a reload, other values must be merged, too
            self._take_buffers()

    @property
    def is_within_reach(self) -> bool:
        """Whether live parameters can be stepped in place: none shares memory with another, as if tied by its data.

        From a device they would be copied once more for it.
        """
        tensors = [values for _, values in live_tensors(self._model, self._fragment)]
        if not all(values.is_contiguous() and values.device.type == "cpu" for values in tensors):
            return False
        ranges = sorted((values.data_ptr(), values.data_ptr() + values.nbytes) for values in tensors)
        return all(end <= start for (_, end), (start, _) in pairwise(ranges))

    def _turn_into(self, kind: Literal["add", "set"], mix: float = 0.0) -> Tensor:
        if self._copies is not None:
            self._copies.wait()
        self._kind, self._mix, self.is_held = kind, mix, False
        return self.memory

    def keep_work(self) -> None:
        """Let the live parameters follow the anchor from where it is now."""
        if self._kind is None:
            torch.neg(self._anchor, out=self._turn_into("add"))
        elif self._kind != "anchor":
            self.memory.sub_(self._anchor)

    def after_step(self) -> None:
        """Add the anchor, as it is now."""
        if self._kind in ("add", "set"):
            self.memory.add_(self._anchor)
            self._take_buffers()

    def _take_buffers(self) -> None:
        self.memory[self._buffers].copy_(self._anchor[self._buffers])

    def prepare_merge(self) -> None:
        """Begin to copy the values to merge to the device of the parameters."""
        if self._copies is not None and self._kind in ("add", "set"):
            slots = self._fragment.slots
            self._landed = self._copies.land([self.memory[s.start : s.end].view(s.shape) for s in slots])

    def follow(self, shift: Tensor, *, is_passed: bool) -> None:
        """Move everything by as much as the anchor has moved, apart from any step.

        Args:
            is_passed: the entry for which something may be held was passed, and did not count it.
        """
        if self._kind == "anchor":
            return
        if self._kind is None and (is_passed or not self.is_held):
            self._turn_into("add").copy_(shift)
            self._take_buffers()
            return
        if self._copies is not None:
            self._copies.wait()
        if self._kind is None:  # held work moves along, so that the work that was sent of it stays the same
            shift[self._buffers] = 0.0
            self._shift = shift if self._shift is None else self._shift.add_(shift)
            self.memory.add_(shift)
        else:
            self.memory.add_(shift)
            self._take_buffers()

    def forget(self) -> None:
        """Return the memory to the training."""
        self._kind, self._mix, self.is_held = None, 0.0, False
        if self._memory is not None:
            if self._copies is not None:
                self._copies.wait()  # no other fragment gets memory that is still being written
            self._room.give(self._memory, is_pinned=self._is_pinned)
            self._memory = None


def _add(live: Tensor, values: Tensor) -> None:
    """Add float32 values to a tensor of any dtype and device, rounded once."""
    if live.dtype == torch.float32:
        live.add_(values.to(live.device))
    else:
        live.copy_(live.to(torch.float32).add_(values.to(live.device)))


# -- reading and packing -----------------------------------------------------------------------------------------------


def live_tensors(model: nn.Module, fragment: Fragment) -> Values:
    """Return a fragment's tensors in the model, as they are now.

    Raises: ContributionError: the model has one of them no more.
    """
    return [(slot, find_tensor(model, slot.name, slot.kind).detach()) for slot in fragment.slots]


def check_shapes(live: Values, who: str) -> None:
    """Raises: ContributionError: a tensor has changed its shape."""
    for slot, values in live:
        if tuple(values.shape) != slot.shape:
            raise ContributionError(f"{who}: {shape_difference(slot.name, tuple(values.shape), slot.shape)}.")


def pack(
    live: Values,
    anchor: Tensor,
    kept: memoryview,
    *,
    wire: Wire,
    proof: Proof,
    start: int = 0,
    write: Callable[[memoryview], object] | None = None,
    who: str,
    block_elements: int = BLOCK_ELEMENTS,
) -> PackedWork:
    """Encode anchor - live in pieces that stay in the cache while each is digested and checked; write it by blocks.

    Args:
        live: all tensors of a fragment.
        kept: the bytes from `start` on go into this memory, as many as it holds.
        start: the first byte of a block.
        write: is handed each block, in order.

    Raises:
        ContributionError: it is not finite, or a tensor has changed its shape.
    """
    check_shapes(live, who)
    n_elements = anchor.numel()
    room = np.empty(min(PIECE, n_elements), np.float32)
    scratch = np.empty(wire.size(min(block_elements, n_elements)), np.uint8).data
    blocks, norms = [], []
    pieces = pieces_of(live, n_elements, block_elements)
    for n, begin, end in blocks_of(wire, n_elements, block_elements):
        inside = start <= begin and end <= start + len(kept)
        block = kept[begin - start : end - start] if inside else scratch[: end - begin]
        writer = BlockWriter(wire, block, n, proof.hash())
        for at in range(0, n, PIECE):
            first, parts = next(pieces)
            values = wire.place(block, n, at, room[: min(PIECE, n - at)])
            subtract_parts(anchor, first, parts, torch.from_numpy(values))
            try:
                writer.write(values, at)
            except NotFiniteError:
                _refuse_what_is_not_finite(live, anchor, who)
                raise ContributionError(f"{who}: a value is too large for wire={wire.name!r}.") from None
        blocks.append(writer.digest())
        norms.append(sqrt(writer.square))
        if write is not None:
            write(block)
    return PackedWork(tuple(blocks), tuple(norms), kept, start)


def has_moved(live: Values, anchor: Tensor) -> bool:
    """Tell whether a live value is another than the anchor's, in as many digits as the model has.

    By pieces, since work is mostly in the first: a whole embedding would be copied for it in each round.
    """
    for slot, values in live:
        flat, of_slot, dtype = values.reshape(-1), anchor[slot.start : slot.end], getattr(torch, slot.dtype)
        for at in range(0, of_slot.numel(), PIECE):
            here, there = flat[at : at + PIECE], of_slot[at : at + PIECE]
            if not torch.equal(there.to(dtype), here.cpu().to(dtype)):
                return True
    return False


def difference(model: nn.Module, fragment: Fragment, anchor: Tensor, out: Tensor) -> None:
    """Write anchor - live to `out`."""
    for slot, live in live_tensors(model, fragment):
        subtract_live(anchor[slot.start : slot.end], live.reshape(-1), out[slot.start : slot.end])


def subtract_parts(anchor: Tensor, first: int, parts: Parts, out: Tensor) -> None:
    """Write anchor - live to `out` for a piece of a fragment that begins with its element `first`."""
    for number, part in parts:
        end = number + part.numel()
        subtract_live(anchor[number:end], part, out[number - first : end - first])


def subtract_live(anchor: Tensor, live: Tensor, out: Tensor) -> None:
    """Write anchor - live to `out`; all are flat and of one size, `live` of any dtype and on any device."""
    if live.dtype != torch.float32 or live.device.type != "cpu":
        live = out.copy_(live)
    torch.sub(anchor, live, out=out)


def set_live(model: nn.Module, fragment: Fragment, values: Tensor) -> None:
    """Copy a flat fragment into the model."""
    for slot, live in live_tensors(model, fragment):
        live.copy_(values[slot.start : slot.end].view(slot.shape))


def pieces_of(live: Values, n_elements: int, block: int) -> Iterator[tuple[int, Parts]]:
    """Yield pieces of a fragment: the first element, and the parts of tensors that it is made of. None crosses a block.

    Parts are views of tensors that are contiguous.
    """
    first, parts = 0, Parts()
    for slot, values in live:
        flat, at = values.reshape(-1), slot.start
        while at < slot.end:
            block_start = first // block * block
            end_of_piece = min(first + PIECE, block_start + block, n_elements)
            end = min(slot.end, end_of_piece)
            parts.append((at, flat[at - slot.start : end - slot.start]))
            at = end
            if end == end_of_piece:
                yield first, parts
                first, parts = end, Parts()


def _refuse_what_is_not_finite(live: Values, anchor: Tensor, who: str) -> None:
    for slot, tensor in live:
        values = anchor[slot.start : slot.end] - tensor.reshape(-1).to(torch.float32).cpu()
        bad = int((~torch.isfinite(values)).sum())
        if bad:
            raise ContributionError(
                f"{who}: {slot.name!r} is not finite in {bad} of {values.numel()} values. "
                "The loss has probably diverged: lower the learning rate or clip gradients."
            )


def check_is_whole(model: nn.Module, fragments: Sequence[Fragment], who: str) -> None:
    """Check that every trained parameter is in a fragment.

    Args:
        model: the model.
        fragments: its fragments.
        who: the begin of the message, as in "Contribution of rank 3".

    Raises:
        ContributionError: a parameter was frozen, or not in the model, when this DiLoCo was made.

    Example:
        check_is_whole(model, fragments, "Contribution of rank 3")
    """
    known = {slot.name for fragment in fragments for slot in fragment.slots}
    trained = by_clean_name(model, ((name, p) for name, p in model.named_parameters() if p.requires_grad))
    if new := [name for name in trained if name not in known]:
        raise ContributionError(
            f"{who}: {new[0]!r} is trained and in no average: when this DiLoCo was made it was frozen, or not in "
            f"the model ({len(new)} such). Make DiLoCo when all that is ever trained requires gradients; freeze later."
        )
