"""The training state of a torch model: the anchor, the outer optimizers, and the live parameters.

Beside the model it takes memory for the anchor and the momentum, one float32 copy each, and for the kept part of a
payload: all of it where the store does not stream, else one shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from diloco.fragments import Fragment
from diloco.outer_optimizer import CHUNK, GivenOptimizer, NesterovSGD, OuterOptimizer
from diloco.pseudo_gradient import difference, live_tensors, mix_live, pack, set_live, subtract_part
from diloco.rendezvous.proof import proof_of
from diloco.rendezvous.training_state import Agreement, Array, Arrays, Packed, Part, Verdict
from diloco.settings import Settings
from diloco.wires import FP32, wire_named
from diloco.wires.wire import BLOCK_ELEMENTS, blocks_of, decoded


class ModelState:
    """The `TrainingState` of a torch model."""

    def __init__(
        self,
        model: nn.Module,
        fragments: Sequence[Fragment],
        settings: Settings,
        *,
        block_elements: int = BLOCK_ELEMENTS,
    ) -> None:
        self.model = model
        self.fragments = tuple(fragments)
        self.anchors = [torch.empty(fragment.n_elements) for fragment in fragments]
        self.rank = settings.rank
        self.carries = settings.late == "carry"
        self._settings = settings
        self._is_final = settings.plan.is_final
        self._mix = settings.mix
        self.wire = wire_named(settings.wire)
        self.mean_wire = wire_named(settings.wire_of_means)
        self._proof = proof_of(settings.key)
        self._block_elements = block_elements
        self._memory = np.empty(0, np.uint8)
        for fragment, anchor in zip(self.fragments, self.anchors, strict=True):
            for slot, live in live_tensors(model, fragment):
                anchor[slot.start : slot.end].copy_(live.reshape(-1))
        self.outer: list[OuterOptimizer] = [
            NesterovSGD(fragment, anchor, settings.schedule)
            if settings.outer_optimizer is None
            else GivenOptimizer(fragment, anchor, settings.outer_optimizer)
            for fragment, anchor in zip(self.fragments, self.anchors, strict=True)
        ]

    def sizes(self) -> list[int]:
        return [fragment.n_elements for fragment in self.fragments]

    def agreement(self) -> Agreement:
        tensors = {
            slot.name: [list(slot.shape), slot.dtype, fragment.index]
            for fragment in self.fragments
            for slot in fragment.slots
        }
        return {"tensors": tensors, **self._settings.agreed()}

    def arrays(self) -> Arrays:
        arrays: dict[str, Array] = {f"anchor/{name}": values.numpy() for name, values in self.anchor_views().items()}
        for outer in self.outer:
            arrays |= outer.arrays()
        return arrays

    def snapshot(self) -> tuple[Arrays, tuple[str, ...]]:
        state = tuple(outer.fresh_digest() for outer in self.outer)
        return {name: np.array(values) for name, values in self.arrays().items()}, state

    @torch.no_grad()
    def load(self, arrays: Arrays) -> None:
        for name, values in self.anchor_views().items():
            values.numpy()[...] = arrays[f"anchor/{name}"]
        for outer in self.outer:
            outer.load_arrays(arrays)

    def digest(self, fragment: int) -> str:
        return self.outer[fragment].digest()

    @torch.no_grad()
    def pack(
        self, entry: int, write: Callable[[memoryview], object] | None = None, keep: tuple[int, int] | None = None
    ) -> Packed:
        fragment, anchor = self._of(entry)
        *_, last = blocks_of(self.wire, fragment.n_elements, self._block_elements)
        first, end = (0, last.end) if keep is None else keep
        return pack(
            self.model,
            fragment,
            anchor,
            np.empty(end, np.uint8).data if keep is None and end > self._memory.nbytes else self._room(end - first),
            wire=self.wire,
            proof=self._proof,
            start=first,
            write=write,
            who=f"Contribution of rank {self.rank} for round {entry + 1}",
            block_elements=self._block_elements,
        )

    @torch.no_grad()
    def apply(self, entry: int, mean: Sequence[memoryview], verdict: Verdict, part: Part | None = None) -> None:
        fragment, anchor = self._of(entry)
        if self._is_final(entry):  # a planned run ends with one model
            self.replay(entry, mean)
            set_live(self.model, fragment, anchor)
        elif part is not None or (verdict is Verdict.KEPT and self.carries):
            # Where a part stays, the mean may be in the memory that is used again and again.
            rest = self._floats(fragment.n_elements) if part is None else torch.empty(fragment.n_elements)
            difference(self.model, fragment, anchor, rest)
            if part is not None:
                subtract_part(rest, part, self._block_elements)
            self.replay(entry, mean)
            torch.sub(anchor, rest, out=rest)
            if self._mix and verdict is Verdict.COUNTED and part is not None and not part.wire.is_exact:
                mix_live(self.model, fragment, rest, self._mix, torch.empty_like(rest))
            else:
                set_live(self.model, fragment, rest)
        else:
            self.replay(entry, mean)
            if self._mix and verdict is not Verdict.DROPPED:
                mix_live(self.model, fragment, anchor, self._mix, self._floats(fragment.n_elements))
            else:
                set_live(self.model, fragment, anchor)

    @torch.no_grad()
    def replay(self, entry: int, mean: Sequence[memoryview]) -> None:
        if mean:
            fragment, _ = self._of(entry)
            pieces = decoded(self.mean_wire, mean, fragment.n_elements, self._block_elements, CHUNK)
            self.outer[fragment.index].step(entry, pieces)

    @torch.no_grad()
    def progress(self) -> list[Tensor]:
        progress = [torch.empty_like(anchor) for anchor in self.anchors]
        for fragment, anchor, out in zip(self.fragments, self.anchors, progress, strict=True):
            difference(self.model, fragment, anchor, out)
        return progress

    @torch.no_grad()
    def work(self, entry: int) -> Part:
        fragment, anchor = self._of(entry)
        progress = torch.empty_like(anchor)
        difference(self.model, fragment, anchor, progress)
        return Part(FP32, [progress.numpy().data.cast("B")])

    @torch.no_grad()
    def restore(self, progress: list[Tensor] | None, verdicts: Sequence[Verdict | None] = ()) -> None:
        for index, (fragment, anchor) in enumerate(zip(self.fragments, self.anchors, strict=True)):
            verdict = verdicts[index] if verdicts else None
            if progress is None or verdict is Verdict.DROPPED:
                set_live(self.model, fragment, anchor)
            elif verdict is None or (verdict is Verdict.KEPT and self.carries):
                set_live(self.model, fragment, anchor - progress[index])
            else:
                set_live(self.model, fragment, anchor - self._mix * progress[index])

    def anchor_views(self) -> dict[str, Tensor]:
        """Return the anchor by name, as views."""
        return {
            slot.name: anchor[slot.start : slot.end].view(slot.shape)
            for fragment, anchor in zip(self.fragments, self.anchors, strict=True)
            for slot in fragment.slots
        }

    def reserve(self, size_bytes: int) -> None:
        """Take memory for so much of a payload now: the first use of a page costs several times a copy."""
        if self._memory.nbytes < size_bytes:
            self._memory = torch.zeros(size_bytes, dtype=torch.uint8).numpy()

    def _room(self, size_bytes: int) -> memoryview:
        """Return memory that is used again and again."""
        self.reserve(size_bytes)
        return self._memory[:size_bytes].data

    def _floats(self, n_elements: int) -> Tensor:
        """Return the same memory as numbers."""
        return torch.frombuffer(self._room(4 * n_elements), dtype=torch.float32)

    def _of(self, entry: int) -> tuple[Fragment, Tensor]:
        index = entry % len(self.fragments)
        return self.fragments[index], self.anchors[index]
