"""The live parameters of one fragment: how they are read, packed, copied, and changed by a round.

The training thread copies its live parameters, B, and continues to train. The round runner sends anchor - B and steps
the anchor from A to A'. It then turns the same memory into the values to merge. Let S be the values that the others
decoded. Counted work leaves the live parameters by adding A' - A + S. Later steps stay in them, and so does the
rounding error of the wire. This is the error feedback of 1-bit SGD (Seide et al. 2014), with the live parameters as its
memory. Buffers are statistics, and a variance that is moved in this way may become negative. So buffers are always set
to the values of the anchor.

A sparse wire leaves most of the work to later contributions. If all of that rest were in the live parameters, replicas
would train too far apart. So a share of it waits in a buffer of its own, `WaitingRest`, which only the round runner
changes.

If `step()` waits for each round, the live parameters do not change during it. Then no copy is needed in most cases, and
the rounding error is computed from the live parameters while the anchor is stepped.

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
"""Neighboring parts of tensors, flat, each with the number of its first element in the fragment."""


# -- the held copy -----------------------------------------------------------------------------------------------------


class BufferPool:
    """A pool of memory that fragments take and give back, because only few fragments are in flight at the same time.

    Args:
        n_elements: number of elements of the largest fragment.
        keeps: True: keep memory that is given back, because the first use of a new memory page costs as much as several
            copies.

    Example:
        memory = pool.take(1000, is_pinned=False)
        pool.give(memory, is_pinned=False)
    """

    def __init__(self, n_elements: int, *, keeps: bool) -> None:
        self.keeps = keeps
        self._n_elements = n_elements
        self._free: dict[bool, list[Tensor]] = {False: [], True: []}

    def take(self, n_elements: int, *, is_pinned: bool) -> Tensor:
        """Return memory of (n_elements,) float32 for a fragment.

        Args:
            n_elements: the number of elements of the fragment.
            is_pinned: True: page-locked memory, from which a GPU copies while training continues.
        """
        if not self.keeps:
            return torch.empty(n_elements, dtype=torch.float32, device="cpu")
        if not (free := self._free[is_pinned]):
            free.append(torch.zeros(self._n_elements, dtype=torch.float32, device="cpu", pin_memory=is_pinned))
        return free.pop()[:n_elements]

    def give(self, memory: Tensor, *, is_pinned: bool) -> None:
        """Take memory back. The pool keeps the memory of two fragments. Only a reload uses more, and that is freed.

        Args:
            memory: the memory.
            is_pinned: True if the memory is page-locked.
        """
        if self.keeps and len(self._free[is_pinned]) < 2:
            self._free[is_pinned].append(memory._base if memory._base is not None else memory)


class WireError:
    """Measures the work that was not sent, relative to all work.

    With most wires that is their rounding error. With a sparse wire it is most of the work, in every round.
    """

    def __init__(self) -> None:
        self._lost_square = self._square = 0.0

    def add(self, work: Floats, sent: Floats) -> None:
        """Replace a piece of the work by its rounding error: the sent values minus the work.

        Args:
            work: the piece of the work, anchor - live. It is changed.
            sent: the values that the other replicas decode from the sent work.
        """
        self._square += square_of(work) or 0.0
        np.subtract(sent, work, out=work)
        self._lost_square += square_of(work) or 0.0

    @property
    def share(self) -> float | None:
        """The size of the error relative to the size of the work, |work - sent| / |work|. None: there was no work."""
        return sqrt(self._lost_square / self._square) if self._square else None


class WaitingRest:
    """The work of one fragment that a sparse wire has not sent, as far as it is not in the live parameters.

    It is packed with the next contribution. When a contribution was counted, the rest is divided again: the sender
    gives up a share of it, moves another share into the live parameters, and lets the remainder wait here.

    Args:
        fragment: the fragment.
        wire: the sparse wire, which has both shares.

    Example:
        rest = WaitingRest(fragment, WIRES["top8"])
        rest.add_to(0, work)
    """

    def __init__(self, fragment: Fragment, wire: Wire) -> None:
        self.values = torch.zeros(fragment.n_stepped, dtype=torch.float32, device="cpu")
        """The rest, as float32 with shape (n_stepped,). Buffers are statistics, and not work, so they have no rest."""
        self._keeps, self._live, self._waits = (np.float32(x) for x in (wire.keeps, wire.live, 1 - wire.live))

    def add_to(self, first: int, work: Floats) -> None:
        """Add the rest to a piece of the work, anchor - live.

        Args:
            first: the number of the piece's first element.
            work: the piece. It is changed.
        """
        part = self.values.numpy()[first : first + len(work)]
        np.add(work[: len(part)], part, out=work[: len(part)])

    def divide(self, first: int, lost: Floats) -> None:
        """Keep a share of what was not sent, and let a part of that share wait here.

        Args:
            first: the number of the piece's first element.
            lost: the sent values minus the work. It becomes the change of the live parameters by their share.
        """
        part = self.values.numpy()[first : first + len(lost)]
        kept = lost[: len(part)]
        np.multiply(kept, self._keeps, out=kept)
        np.multiply(kept, -self._waits, out=part)
        np.multiply(kept, self._live, out=kept)

    def restore(self, progress: Tensor) -> Tensor:
        """Divide the whole work of an earlier attempt, and return the share that belongs in the live parameters.

        Nothing is given up: a replica that comes back loses no work.

        Args:
            progress: (n_elements,) float32, the work.
        """
        torch.mul(progress[: len(self.values)], float(self._waits), out=self.values)
        return progress * float(self._live)

    def clear(self) -> None:
        """Give up the rest."""
        self.values.zero_()


class HeldWork:
    """The work of one fragment, on its way from the training thread to the round runner and back.

    Args:
        model: the model.
        fragment: the fragment.
        anchor: (n_elements,) float32; the round runner steps it.
        pool: the pool from which memory is taken while it is needed.
        rest: the work that a sparse wire has not sent. None: the wire is not sparse.

    Example:
        held = HeldWork(model, fragment, anchor, pool)
        held.hold("Contribution of rank 3")
    """

    def __init__(
        self,
        model: nn.Module,
        fragment: Fragment,
        anchor: Tensor,
        pool: BufferPool,
        rest: WaitingRest | None = None,
    ) -> None:
        self.rest = rest
        self.is_held = False
        """True if the memory holds live work. Otherwise the live parameters have not changed since they were sent."""
        self._model = model
        self._fragment = fragment
        self._anchor = anchor
        self._pool = pool
        self._buffers = slice(fragment.n_stepped, fragment.n_elements)
        self._copies = DeviceCopies.of(live_tensors(model, fragment)) if pool.keeps else None
        self._is_pinned = self._copies is not None
        self._memory: Tensor | None = None
        if pool.keeps:
            pool.give(pool.take(fragment.n_elements, is_pinned=self._is_pinned), is_pinned=self._is_pinned)
        self._on_device: list[Tensor] = []
        """The values to merge on the device, by slot."""
        self._kind: Literal["add", "set", "anchor"] | None = None
        """The way to merge: add the held values to the live parameters, or replace the live parameters by the held
        values or by the anchor.
        """
        self._mix = 0.0
        self._shift: Tensor | None = None
        """A change of the anchor that is also added to the live parameters."""

    # -- called by the training thread
    # -----------------------------------------------------------------------------------------

    def hold(self, who: str) -> None:
        """Copy the live parameters.

        Args:
            who: the beginning of an error's message, such as "Contribution of rank 3".

        Raises:
            ContributionError: a parameter has changed its shape.
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
    def has_merge(self) -> bool:
        """True if `merge` will change the live parameters."""
        return self._kind is not None or self._shift is not None

    def merge(self) -> None:
        """Change the live parameters by the prepared values, in float32 on their device."""
        kind, shift = self._kind, self._shift
        if kind is None and shift is None:
            return
        source = self._anchor if kind == "anchor" else self._memory
        if self._copies is not None and self._on_device:
            self._copies.use_on_stream(self._on_device)
        for number, (slot, live) in enumerate(live_tensors(self._model, self._fragment)):
            at = slice(slot.start, slot.end)
            if shift is not None:
                _add(live, shift[at].view(slot.shape))
            if kind is None or source is None:
                continue
            values = self._on_device[number] if self._on_device else source[at].view(slot.shape)
            if kind == "add" and slot.kind == "parameter":
                _add(live, values)
            elif self._mix and slot.kind == "parameter":
                live.copy_(live.to(torch.float32).lerp(values.to(live.device), 1 - self._mix))
            else:
                live.copy_(values)
        self._shift, self._on_device = None, []
        if kind is not None:
            self.forget()

    # -- called by the round runner
    # --------------------------------------------------------------------------------------------

    @property
    def memory(self) -> Tensor:
        """The held values of the fragment, as float32 with shape (n_elements,)."""
        if self._memory is None:
            self._memory = self._pool.take(self._fragment.n_elements, is_pinned=self._is_pinned)
        return self._memory

    def values(self) -> Values:
        """Return the held copy if there is one, and otherwise the live parameters."""
        if not self.is_held:
            return live_tensors(self._model, self._fragment)
        if self._copies is not None:
            self._copies.wait()
        return [(slot, self.memory[slot.start : slot.end].view(slot.shape)) for slot in self._fragment.slots]

    def take_anchor(self, mix: float = 0.0) -> None:
        """Prepare to replace the live parameters by the anchor, as it is at the time of the merge.

        The rest of a sparse wire is given up, too.

        Args:
            mix: the share of the live values that is kept.
        """
        self.forget()
        if self.rest is not None:
            self.rest.clear()
        self._kind, self._mix, self._shift = "anchor", mix, None

    def remove_held(self) -> None:
        """Prepare to remove the held work from the live parameters: add anchor - B, where B is the held copy.

        Use it if the sent values are not known. The rest of a sparse wire is then given up. A part of that rest was
        sent, and no part must be sent twice.
        """
        if not self.is_held:
            self.take_anchor()
            return
        if self.rest is not None:
            self.rest.clear()
        self._turn_into("add").neg_()

    def remove_sent(self, sent: Pieces, *, keeps_later: bool, mix: float) -> float | None:
        """Prepare to remove the sent work from the live parameters, with the values that the other replicas have
        decoded.

        Args:
            sent: the decoded work, in pieces.
            keeps_later: True: keep the steps made since the copy. False: keep only the rounding error.
            mix: the share of the live values that is kept.

        Returns:
            The size of the rounding error relative to the held work.
        """
        anchor, memory = self._anchor.numpy(), self._turn_into("add" if keeps_later else "set", mix).numpy()
        lost = WireError()
        scratch = np.empty(0 if self.rest is None else min(PIECE, len(anchor)), np.float32)
        for first, values in sent:
            a, b = anchor[first : first + len(values)], memory[first : first + len(values)]
            if self.rest is not None:
                work = scratch[: len(values)]
                np.subtract(a, b, out=work)
                self.rest.add_to(first, work)
                lost.add(work, values)
                self.rest.divide(first, work)
                if keeps_later:
                    np.subtract(work, b, out=b)
                else:
                    b[:] = work
                continue
            np.subtract(a, b, out=b)  # the work
            lost.add(b, values)
            if keeps_later:
                np.subtract(values, a, out=b)
        return lost.share

    def stepped_in_place(self, mean: Pieces, *, sent: Pieces, lost: WireError, block_elements: int) -> Pieces:
        """Yield a mean in pieces, and remove the sent work from the live parameters in place, without a held copy.

        Use it only if no step was made since the work was sent. After each piece of the anchor was stepped, the live
        piece is set to it, minus the rounding error. So no memory is needed, and an interrupt leaves no parameter half
        changed.

        Args:
            mean: the mean, in pieces.
            sent: the decoded work, in pieces.
            lost: measures the rounding error.
            block_elements: elements of a block.
        """
        live = live_tensors(self._model, self._fragment)
        work = torch.empty(min(PIECE, self._fragment.n_elements), dtype=torch.float32, device="cpu")
        parts_of_live = pieces_of(live, self._fragment.n_elements, block_elements)
        for (first, g), (_, s), (_, parts) in zip(mean, sent, parts_of_live, strict=True):
            left = work[: len(g)]
            subtract_parts(self._anchor, first, parts, left)
            if self.rest is not None:
                self.rest.add_to(first, left.numpy())
            lost.add(left.numpy(), s)
            if self.rest is not None:
                self.rest.divide(first, left.numpy())
            left[max(0, self._buffers.start - first) :] = 0.0
            yield first, g
            left += self._anchor[first : first + len(g)]
            for number, part in parts:
                part.copy_(left[number - first : number - first + part.numel()])
        if self._kind in ("add", "set"):  # after a reload of the anchor, further values must be merged
            self._take_buffers()

    @property
    def can_step_in_place(self) -> bool:
        """True if the live parameters are on the CPU, and none shares memory with another.

        Parameters that are tied by their data share memory. Parameters on another device would need one more copy.
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
        """Prepare to move the live parameters by the change that the next outer step makes to the anchor."""
        if self._kind is None:
            torch.neg(self._anchor, out=self._turn_into("add"))
        elif self._kind != "anchor":
            self.memory.sub_(self._anchor)

    def after_step(self) -> None:
        """Add the stepped anchor to the prepared values."""
        if self._kind in ("add", "set"):
            self.memory.add_(self._anchor)
            self._take_buffers()

    def _take_buffers(self) -> None:
        self.memory[self._buffers].copy_(self._anchor[self._buffers])

    def prepare_merge(self) -> None:
        """Copy the values to merge to the device of the parameters.

        If the device has no room for them, `merge` copies one tensor after another.
        """
        self._on_device = []  # an earlier result that was not merged had older values
        if self._copies is None or self._kind is None or not self._copies.take_room(self._anchor.nbytes):
            return
        if self._kind == "anchor":
            self.memory.copy_(self._anchor)  # a copy from memory that is not pinned would block the training thread
        slots = self._fragment.slots
        self._on_device = self._copies.copy_to_device([self.memory[s.start : s.end].view(s.shape) for s in slots])

    def follow(self, shift: Tensor, *, is_passed: bool) -> None:
        """Move everything by the change of the anchor, if the anchor changed without a step, as in a reload.

        Args:
            shift: (n_elements,) float32, the change of the anchor. It may be changed here.
            is_passed: True: the held work was for an entry that has passed and did not count it.
        """
        if self._kind == "anchor":
            return
        if self._kind is None and (is_passed or not self.is_held):
            self._turn_into("add").copy_(shift)
            self._take_buffers()
            return
        if self._copies is not None:
            self._copies.wait()
        # The held work moves by the same change. So its distance from the anchor, which is the work that was sent,
        # stays the same.
        if self._kind is None:
            shift[self._buffers] = 0.0
            self._shift = shift if self._shift is None else self._shift.add_(shift)
            self.memory.add_(shift)
        else:
            self.memory.add_(shift)
            self._take_buffers()

    def forget(self) -> None:
        """Return the memory to the pool."""
        self._kind, self._mix, self.is_held = None, 0.0, False
        if self._memory is not None:
            if self._copies is not None:
                self._copies.wait()  # another fragment must not get memory that is still being written
            self._pool.give(self._memory, is_pinned=self._is_pinned)
            self._memory = None


def _add(live: Tensor, values: Tensor) -> None:
    """Add float32 values to a tensor of any dtype and device, and round once."""
    if live.dtype == torch.float32:
        live.add_(values.to(live.device))
    else:
        live.copy_(live.to(torch.float32).add_(values.to(live.device)))


# -- reading and packing -----------------------------------------------------------------------------------------------


def live_tensors(model: nn.Module, fragment: Fragment) -> Values:
    """Return a fragment's tensors in the model, as they are now.

    Args:
        model: the model.
        fragment: the fragment.

    Raises:
        ContributionError: the model no longer has one of them.

    Example:
        for slot, values in live_tensors(model, fragment): ...
    """
    return [(slot, find_tensor(model, slot.name, slot.kind).detach()) for slot in fragment.slots]


def check_shapes(live: Values, who: str) -> None:
    """Check that live tensors have the shapes that the run agreed on.

    Args:
        live: the tensors of a fragment.
        who: the beginning of the message, such as "Contribution of rank 3".

    Raises:
        ContributionError: a tensor has changed its shape.

    Example:
        check_shapes(live_tensors(model, fragment), "Contribution of rank 3")
    """
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
    rest: WaitingRest | None = None,
) -> PackedWork:
    """Encode anchor - live block by block, and digest and check each piece while it is in the processor's cache.

    Args:
        live: all tensors of a fragment.
        anchor: (n_elements,) float32, the fragment's anchor.
        kept: memory for the encoded bytes from `start` on. Its length decides how many bytes are kept.
        wire: the encoding.
        proof: makes the digests.
        start: the first byte that is kept, which is the first byte of a block.
        write: is called with each block, in order. None: nothing is written.
        who: the beginning of an error's message, such as "Contribution of rank 3 for round 12".
        block_elements: elements of a block.
        rest: earlier work that is sent, too. None: there is none.

    Returns:
        The digests and norms of the blocks, and the kept bytes.

    Raises:
        ContributionError: a value is not finite, or a tensor has changed its shape.

    Example:
        pack(live, anchor, memory, wire=FP32, proof=UNSIGNED, who="Contribution of rank 3")
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
            values = wire.encode_buffer(block, n, at, room[: min(PIECE, n - at)])
            subtract_parts(anchor, first, parts, torch.from_numpy(values))
            if rest is not None:
                rest.add_to(first, values)
            try:
                writer.write(values, at)
            except NotFiniteError:
                _refuse_what_is_not_finite(live, anchor, who)
                raise ContributionError(
                    f"{who}: a value is too large for wire={wire.name!r}. Lower the learning rate, or use wire='fp32'."
                ) from None
        blocks.append(writer.digest())
        norms.append(sqrt(writer.square))
        if write is not None:
            write(block)
    return PackedWork(tuple(blocks), tuple(norms), kept, start)


def has_moved(live: Values, anchor: Tensor) -> bool:
    """Return True if a live value differs from the anchor's, in the digits of the model's dtype.

    The comparison goes piece by piece, and usually finds a difference in the first one. A copy of a whole embedding in
    each round would be slow.

    Args:
        live: all tensors of a fragment.
        anchor: (n_elements,) float32, the fragment's anchor.

    Example:
        has_moved(live_tensors(model, fragment), anchor)
    """
    for slot, values in live:
        flat, of_slot, dtype = values.reshape(-1), anchor[slot.start : slot.end], getattr(torch, slot.dtype)
        for at in range(0, of_slot.numel(), PIECE):
            here, there = flat[at : at + PIECE], of_slot[at : at + PIECE]
            if not torch.equal(there.to(dtype), here.cpu().to(dtype)):
                return True
    return False


def difference(model: nn.Module, fragment: Fragment, anchor: Tensor, out: Tensor) -> None:
    """Write anchor - live to `out`.

    Args:
        model: the model.
        fragment: the fragment.
        anchor: (n_elements,) float32, the fragment's anchor.
        out: (n_elements,) float32.

    Example:
        difference(model, fragment, anchor, torch.empty_like(anchor))
    """
    for slot, live in live_tensors(model, fragment):
        subtract_live(anchor[slot.start : slot.end], live.reshape(-1), out[slot.start : slot.end])


def subtract_parts(anchor: Tensor, first: int, parts: Parts, out: Tensor) -> None:
    """Write anchor - live to `out` for one piece of a fragment.

    Args:
        anchor: (n_elements,) float32, the fragment's anchor.
        first: the number of the piece's first element.
        parts: the parts of live tensors in the piece.
        out: float32, with the number of elements of the piece.

    Example:
        subtract_parts(anchor, first, parts, out)
    """
    for number, part in parts:
        end = number + part.numel()
        subtract_live(anchor[number:end], part, out[number - first : end - first])


def subtract_live(anchor: Tensor, live: Tensor, out: Tensor) -> None:
    """Write anchor - live to `out`. The three tensors are flat and have the same number of elements.

    Args:
        anchor: float32 on the CPU.
        live: any dtype and device.
        out: float32 on the CPU.

    Example:
        subtract_live(anchor, parameter.detach().reshape(-1), out)
    """
    if live.dtype != torch.float32 or live.device.type != "cpu":
        live = out.copy_(live)
    torch.sub(anchor, live, out=out)


def set_live(model: nn.Module, fragment: Fragment, values: Tensor) -> None:
    """Copy a flat fragment into the model.

    Args:
        model: the model.
        fragment: the fragment.
        values: (n_elements,) float32.

    Example:
        set_live(model, fragment, anchor)
    """
    for slot, live in live_tensors(model, fragment):
        live.copy_(values[slot.start : slot.end].view(slot.shape))


def pieces_of(live: Values, n_elements: int, block: int) -> Iterator[tuple[int, Parts]]:
    """Yield the pieces of a fragment: the number of the first element, and the parts of tensors in the piece.

    No piece crosses the end of a block. Parts are views, if the tensor is contiguous.

    Args:
        live: all tensors of the fragment.
        n_elements: the number of elements of the fragment.
        block: elements of a block.

    Example:
        for first, parts in pieces_of(live, 1000, 256): ...
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
    """Raise an error that names the first tensor whose work is not finite, if there is one."""
    for slot, tensor in live:
        values = anchor[slot.start : slot.end] - tensor.reshape(-1).to(torch.float32).cpu()
        bad = int((~torch.isfinite(values)).sum())
        if bad:
            raise ContributionError(
                f"{who}: {slot.name!r} is not finite in {bad} of {values.numel()} values. "
                "The loss has probably diverged: lower the learning rate or clip gradients."
            )


def check_is_whole(model: nn.Module, fragments: Sequence[Fragment], who: str) -> None:
    """Check that every parameter that requires gradients is in a fragment.

    Args:
        model: the model.
        fragments: its fragments.
        who: the beginning of the message, such as "Contribution of rank 3".

    Raises:
        ContributionError: a parameter was frozen, or not in the model, when this DiLoCo was created.

    Example:
        check_is_whole(model, fragments, "Contribution of rank 3")
    """
    known = {slot.name for fragment in fragments for slot in fragment.slots}
    trained = by_clean_name(model, ((name, p) for name, p in model.named_parameters() if p.requires_grad))
    if new := [name for name in trained if name not in known]:
        raise ContributionError(
            f"{who}: {new[0]!r} is trained but not averaged, because it was frozen or not in the model when this "
            f"DiLoCo was created ({len(new)} such). Create DiLoCo while all of these require gradients, and freeze "
            "them later."
        )
