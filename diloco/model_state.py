"""The training state of a torch model: its anchor, its outer optimizers and its live parameters.

The state needs memory for one float32 copy of the anchor and one of the momentum. A sparse wire needs one more, for the
work that it has not sent. The state also keeps encoded work for upload: one shard if the store streams and the wire is
exact, and otherwise the whole encoded work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from diloco.fragments import Fragment, marks_of_frozen
from diloco.live_parameters import (
    BufferPool,
    HeldWork,
    WaitingRest,
    WireError,
    check_is_whole,
    difference,
    has_moved,
    live_tensors,
    pack,
    set_live,
)
from diloco.local_buffers import LocalBuffers
from diloco.outer_optimizer import Anchor, GivenOptimizer, NesterovSGD, OuterOptimizer
from diloco.rendezvous.envelope import proof_of
from diloco.rendezvous.training_state import Agreement, ApplyStats, PackedWork, Verdict
from diloco.settings import DiLoCoSettings
from diloco.unshared_state import UnsharedState
from diloco.wires import wire_named
from diloco.wires.wire import BLOCK_ELEMENTS, Pieces, blocks_of, decoded, square_of


# More than 20 methods: `TrainingState` has 17 of them, and each wraps one access to the same tensors and buffers.
class ModelState:
    """The state of a torch model, behind the interface `TrainingState` that the rendezvous uses.

    Args:
        model: the model.
        fragments: its fragments.
        settings: the settings of the DiLoCo.
        block_elements: elements of a block, which has one digest.

    Example:
        state = ModelState(model, plan_fragments(model, 1, sync_buffers=None), settings)
    """

    def __init__(
        self,
        model: nn.Module,
        fragments: Sequence[Fragment],
        settings: DiLoCoSettings,
        *,
        block_elements: int = BLOCK_ELEMENTS,
    ) -> None:
        self.model = model
        self.fragments = tuple(fragments)
        self.anchors = [torch.empty(fragment.n_elements, dtype=torch.float32, device="cpu") for fragment in fragments]
        self.rank = settings.rank
        self.before_hold: Callable[[], None] = lambda: None
        """Is called before work is held. The round runner is idle until the work is handed over."""
        self.before_merge: Callable[[], None] = lambda: None
        """Is called before a round changes the live parameters, possibly several times for one round."""
        self.is_back = False
        """True if this is a later attempt of its rank, whose own buffers may have changed since the run began."""
        self._frozen = marks_of_frozen(model)
        self.local_buffers = LocalBuffers(model, fragments)
        self.unshared = UnsharedState(model, fragments)
        self._unmoved: dict[int, int] = {}
        """The newest entry of each fragment for which no parameter had changed."""
        self.carries = settings.late == "carry"
        self.keeps_later_work = settings.merge == "carry"
        self.settings = settings
        self._is_final = settings.plan.is_final
        self._mix = settings.mix
        self.wire = wire_named(settings.wire)
        self.mean_wire = wire_named(settings.resolved_mean_wire)
        self.clips = settings.robust == "clip"
        self.leaves_no_work = self.wire.is_exact and not self.keeps_later_work and not self._mix
        """True if a round that counted all work leaves the live parameters equal to the anchor."""
        self._proof = proof_of(settings.key)
        self._block_elements = block_elements
        self._memory = np.empty(0, np.uint8)
        for fragment, anchor in zip(self.fragments, self.anchors, strict=True):
            for slot, live in live_tensors(model, fragment):
                anchor[slot.start : slot.end].copy_(live.reshape(-1))
        self._trains_on = settings.plan.overlaps or settings.in_background
        pool = BufferPool(max(fragment.n_elements for fragment in self.fragments), keeps=self._trains_on)
        self._held = [
            HeldWork(model, fragment, anchor, pool, WaitingRest(fragment, self.wire) if self.wire.is_sparse else None)
            for fragment, anchor in zip(self.fragments, self.anchors, strict=True)
        ]
        outer: list[OuterOptimizer] = [
            NesterovSGD(fragment, anchor, settings.schedule)
            if settings.outer_optimizer is None
            else GivenOptimizer(fragment, anchor, settings.outer_optimizer)
            for fragment, anchor in zip(self.fragments, self.anchors, strict=True)
        ]
        self.anchor = anchor_ = Anchor(self.fragments, self.anchors, outer)
        # These are the anchor's own methods, so that the rendezvous calls them without a wrapper.
        self.arrays, self.load, self.snapshot, self.digest = (
            anchor_.arrays,
            anchor_.load,
            anchor_.snapshot,
            anchor_.digest,
        )
        self.anchors_now = anchor_.copies

    def sizes(self) -> list[int]:
        return [fragment.n_elements for fragment in self.fragments]

    def agreement(self) -> Agreement:
        tensors = {
            slot.name: [list(slot.shape), slot.dtype, fragment.index]
            for fragment in self.fragments
            for slot in fragment.slots
        }
        marks = self._frozen if self.is_back else self._frozen | self.local_buffers.marks
        frozen = {"frozen": marks} if marks else {}
        stepped = [fragment.n_stepped for fragment in self.fragments]  # parameters come before the buffers
        more = {"unshared": self.unshared.lines()} if self.unshared.more else {}
        return {"tensors": tensors, "stepped": stepped, **self.settings.agreed_settings(), **frozen, **more}

    # -- called by the training thread
    # -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def hold(self, fragment: int, *, is_early: bool) -> None:
        self.before_hold()
        check_is_whole(self.model, self.fragments, f"Contribution of rank {self.rank}")
        held = self._held[fragment]
        if self._trains_on or is_early or not (self.wire.is_exact or self._steps_in_place(fragment)):
            held.hold(f"Contribution of rank {self.rank}")

    def _steps_in_place(self, fragment: int) -> bool:
        """Return True if the rounding error of a fragment can be computed from the live parameters while the anchor is
        stepped.
        """
        return self.anchor.outer[fragment].goes_by_pieces and not self._mix and self._held[fragment].can_step_in_place

    @torch.no_grad()
    def prepare_merge(self) -> None:
        for held in self._held:
            held.prepare_merge()

    @torch.no_grad()
    def merge(self) -> None:
        if any(held.has_merge for held in self._held):
            self.before_merge()
        for held in self._held:
            held.merge()

    # -- called by the round runner
    # --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def pack(
        self, entry: int, write: Callable[[memoryview], object] | None = None, keep: tuple[int, int] | None = None
    ) -> PackedWork:
        self.anchor.check_is_whole()
        fragment, anchor, held = self._of(entry)
        *_, last = blocks_of(self.wire, fragment.n_elements, self._block_elements)
        first, end = (0, last.end) if keep is None else keep
        is_new = keep is None and end > self._memory.nbytes
        if not is_new:
            self.reserve(end - first)
        live = held.values()
        if not has_moved(live, anchor):
            self._unmoved[fragment.index] = entry
        return pack(
            live,
            anchor,
            np.empty(end, np.uint8).data if is_new else self._memory[: end - first].data,
            wire=self.wire,
            proof=self._proof,
            start=first,
            write=write,
            who=f"Contribution of rank {self.rank} for round {entry + 1}",
            block_elements=self._block_elements,
            rest=held.rest,
        )

    def had_moved(self, entry: int) -> bool:
        """Return True if a parameter had changed when the work for an entry was packed.

        Changes below the precision of the model's dtype do not count.

        Args:
            entry: the entry.
        """
        return self._unmoved.get(entry % len(self.fragments)) != entry

    @torch.no_grad()
    def apply(
        self, entry: int, mean: Sequence[memoryview], verdict: Verdict, packed: PackedWork | None, *, partly: bool
    ) -> ApplyStats:
        fragment, _, held = self._of(entry)
        lost, keeps = None, self._keeps(verdict) or (partly and verdict is Verdict.KEPT)
        may_tell_lost = held.is_held or self._steps_in_place(fragment.index)
        if self._is_final(entry) or not (partly or keeps or verdict is Verdict.COUNTED):
            held.take_anchor()  # a planned run must end with the same model on all replicas
        elif keeps:
            held.keep_work()
        elif verdict is Verdict.COUNTED and packed is not None and not self.wire.is_exact and may_tell_lost:
            sent = decoded(self.wire, [packed.kept], fragment.n_elements, self._block_elements)
            if not held.is_held:
                self.before_merge()
                error, block = WireError(), self._block_elements
                around = partial(held.stepped_in_place, sent=sent, lost=error, block_elements=block)
                return ApplyStats(self._step(entry, mean, around), error.share)
            lost = held.remove_sent(sent, keeps_later=partly or self.keeps_later_work, mix=self._mix)
        elif partly or self.keeps_later_work:
            held.remove_held()
        else:
            held.take_anchor(self._mix)
        mean_norm = self.replay(entry, mean)
        held.after_step()
        return ApplyStats(mean_norm, lost)

    def _keeps(self, verdict: Verdict | None) -> bool:
        """Return True if the live work of a fragment stays in the live parameters.

        Args:
            verdict: the decision about the work. None: no decision was made yet.
        """
        return verdict is None or (verdict is Verdict.KEPT and self.carries)

    @torch.no_grad()
    def replay(self, entry: int, mean: Sequence[memoryview]) -> float | None:
        return self._step(entry, mean) if mean else None

    def _step(self, entry: int, mean: Sequence[memoryview], around: Callable[[Pieces], Pieces] | None = None) -> float:
        """Step the anchor by a mean, and return the norm of the mean.

        Args:
            entry: the entry of the mean.
            mean: the encoded mean.
            around: receives the pieces and yields them unchanged, for example to add up their squares.
        """
        fragment, _, _ = self._of(entry)
        square = _Square()
        pieces = square.of(decoded(self.mean_wire, mean, fragment.n_elements, self._block_elements))
        self.anchor.step(entry, pieces if around is None else around(pieces))
        return square.root

    @torch.no_grad()
    def follow(self, anchors: list[Tensor], verdicts: Sequence[Verdict | None], *, partly: int | None) -> None:
        for index, (before, verdict, held) in enumerate(zip(anchors, verdicts, self._held, strict=True)):
            if self._keeps(verdict):
                held.follow(torch.sub(self.anchors[index], before, out=before), is_passed=verdict is not None)
            elif index == partly:
                held.remove_held()
                held.after_step()
            else:
                held.take_anchor(self._mix if verdict is Verdict.COUNTED else 0.0)

    # -- while no round is in flight ---------------------------------------------------------------------------------

    @torch.no_grad()
    def progress(self) -> list[Tensor]:
        progress = [torch.empty_like(anchor) for anchor in self.anchors]
        for fragment, anchor, held, out in zip(self.fragments, self.anchors, self._held, progress, strict=True):
            difference(self.model, fragment, anchor, out)
            out[fragment.n_stepped :] = 0.0  # buffers are statistics, and not work
            if held.rest is not None:
                held.rest.add_to(0, out.numpy())
        return progress

    def has_moved(self) -> bool:
        """Return True if the live parameters differ from the anchor."""
        return any(bool(away.any()) for away in self.progress())

    @torch.no_grad()
    def resume(self, progress: list[Tensor] | None, verdicts: Sequence[Verdict | None] = ()) -> None:
        for index, (fragment, anchor, held) in enumerate(zip(self.fragments, self.anchors, self._held, strict=True)):
            verdict, rest = verdicts[index] if verdicts else None, held.rest
            if rest is not None:
                rest.clear()
            if progress is None or verdict is Verdict.DROPPED:
                set_live(self.model, fragment, anchor)
            elif self._keeps(verdict):
                work = progress[index] if rest is None else rest.restore(progress[index])
                set_live(self.model, fragment, anchor - work)
            else:
                set_live(self.model, fragment, anchor - self._mix * progress[index])

    def checkpoint(self) -> dict[str, Any]:
        """Return a copy of the anchor, of the outer optimizers' states, and of the work that waits outside of the
        model.
        """
        rests = [held.rest.values.clone() for held in self._held if held.rest is not None]
        return {**self.anchor.checkpoint(), **({"rest": rests} if rests else {})}

    @torch.no_grad()
    def load_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Load what `checkpoint` returned. The live parameters do not change.

        Args:
            state: the checkpoint.
        """
        self.anchor.load_checkpoint(state)
        rests = [held.rest for held in self._held if held.rest is not None]
        for rest, values in zip(rests, state.get("rest") or [None] * len(rests), strict=True):
            # A checkpoint of another version has no rest. Then that work is lost, as after a round that dropped it.
            if values is None:
                rest.clear()
            else:
                rest.values.copy_(values)

    def take_anchor(self) -> None:
        """Set the live parameters to the anchor.

        If an interrupted outer step has damaged the anchor, change nothing.
        """
        if not self.anchor.is_torn:
            self.resume(None)

    def reserve(self, size_bytes: int) -> None:
        """Reserve memory for encoded work now, because the first use of a memory page costs as much as several copies.

        Args:
            size_bytes: the size of the part.
        """
        if self._memory.nbytes < size_bytes:
            self._memory = torch.zeros(size_bytes, dtype=torch.uint8, device="cpu").numpy()

    def _of(self, entry: int) -> tuple[Fragment, Tensor, HeldWork]:
        """Return the fragment of an entry, its anchor and its held work."""
        index = entry % len(self.fragments)
        return self.fragments[index], self.anchors[index], self._held[index]


class _Square:
    """Adds up the squares of values that pass through."""

    def __init__(self) -> None:
        self._sum = 0.0

    def of(self, pieces: Pieces) -> Pieces:
        """Yield the pieces unchanged, and add up their squares."""
        for first, values in pieces:
            self._sum += square_of(values) or 0.0
            yield first, values

    @property
    def root(self) -> float:
        return sqrt(self._sum)
