"""V10: compares a real `ModelState` with the `IntegerState` of the simulation, after each merge and each contribution.

Both get the same calls and share one outer step of the anchor. Each of them finds by itself which work is in its live
parameters, and both must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from diloco.fragments import plan_fragments
from diloco.live_parameters import WaitingRest
from diloco.model_state import ModelState
from diloco.outer_optimizer import NesterovSGD
from diloco.rendezvous.training_state import ApplyStats, PackedWork, Verdict
from diloco.settings import DiLoCoSettings
from diloco.wires.wire import Pieces
from simulation.integer_state import BLOCK_ELEMENTS, IntegerState, values_of


class ImitatingOptimizer(NesterovSGD):
    """An outer optimizer that lets another state step the anchor, and then copies the result piece by piece."""

    step_anchor: Callable[[], object]

    def step(self, entry: int, mean: Pieces) -> None:
        before = self._anchor.clone()
        self.step_anchor()
        after = self._anchor.clone()
        self._anchor.copy_(before)
        for first, values in mean:
            self._anchor[first : first + len(values)] = after[first : first + len(values)]


class ImitatingModelState(ModelState):
    """A model state that lets another state step its anchor."""

    def step_by(self, step_anchor: Callable[[], object]) -> None:
        for outer in self.anchor.outer:
            assert isinstance(outer, ImitatingOptimizer)
            outer.step_anchor = step_anchor

    def replay(self, entry: int, mean: Sequence[memoryview]) -> float | None:
        if not mean:
            self.anchor.outer[0].step(entry, iter(()))
        return super().replay(entry, mean)


class CheckedModelState(IntegerState):
    """An `IntegerState` with a real model of one parameter for each fragment, which must agree with it."""

    def prepare(self, *, is_final: Callable[[int], bool], trains_on: bool) -> None:
        super().prepare(is_final=is_final, trains_on=trains_on)
        model = nn.Module()
        for fragment, anchor in enumerate(self.anchor):
            model.register_parameter(f"part{fragment}", nn.Parameter(torch.from_numpy(anchor.copy())))
        given = {
            "inner_steps": 2,
            "overlap_steps": int(trains_on),
            "background": False,
            "merge": "carry" if self.keeps_later_work else "anchor",
            "late": "carry" if self.carries else "drop",
            "wire": "fp32",
            "outer_lr": 1.0,
            "outer_momentum": 0.0,
            "momentum_warmup": 0,
            "mix": 0.0,
        }
        fragments = plan_fragments(model, [[f"part{f}"] for f in range(len(self.anchor))], sync_buffers=False)
        self.live = [model.get_parameter(f"part{f}") for f in range(len(self.anchor))]
        settings = DiLoCoSettings.of(given, n_fragments=len(fragments), world_size=1, rank=0)
        self.real = ImitatingModelState(model, fragments, settings, block_elements=BLOCK_ELEMENTS)
        self.real.wire, self.real.mean_wire, self.real._is_final = self.wire, self.mean_wire, is_final  # type: ignore[assignment]
        for part, held in zip(fragments, self.real._held, strict=True):
            held.rest = WaitingRest(part, self.wire) if self.wire.is_sparse else None
        self.real.anchor.outer = [
            ImitatingOptimizer(f, a, settings.schedule) for f, a in zip(fragments, self.real.anchors, strict=True)
        ]

    def _follow_the_anchor(self) -> None:
        for mine, anchor in zip(self.real.anchors, self.anchor, strict=True):
            mine.copy_(torch.from_numpy(anchor))

    def _check(self, when: str) -> None:
        for f, (live, anchor, undone) in enumerate(zip(self.live, self.anchor, self.undone, strict=True)):
            found = anchor - live.detach().numpy()
            assert np.allclose(found, undone, atol=0.01), f"V10: {when} fragment {f} has {found}, not {undone}"
            if (rest := self.real._held[f].rest) is not None and self.held[f].owner == "the training":
                found, waiting = rest.values.numpy(), self.waiting[f]
                assert np.allclose(found, waiting, atol=0.01), (
                    f"V10: {when} beside fragment {f} waits {found}, not {waiting}"
                )

    def train_step(self) -> None:
        super().train_step()
        with torch.no_grad():
            for live in self.live:
                live[self.slot] -= 1

    def flip(self, fragment: int) -> None:
        """Do nothing: another anchor would change the live work, which is the distance from it."""

    def load(self, arrays: Any) -> None:
        super().load(arrays)
        if hasattr(self, "real"):
            self._follow_the_anchor()

    def hold(self, fragment: int, *, is_early: bool) -> None:
        super().hold(fragment, is_early=is_early)
        self.real.hold(fragment, is_early=is_early)

    def merge(self) -> None:
        super().merge()
        self.real.merge()
        self._check("merged,")

    def pack(
        self, entry: int, write: Callable[[memoryview], object] | None = None, keep: tuple[int, int] | None = None
    ) -> PackedWork:
        mine = self.real.pack(entry)
        packed = super().pack(entry)
        found, expected = (values_of(self.wire, [each.kept]) for each in (mine, packed))
        assert np.allclose(found, expected, atol=0.01), f"V10: for entry {entry} it sends {found}, not {expected}"
        return super().pack(entry, write, keep)

    def apply(
        self, entry: int, mean: Sequence[memoryview], verdict: Verdict, packed: PackedWork | None, *, partly: bool
    ) -> ApplyStats:
        # The real state calls this in the middle of its own `apply`, at the outer step.
        self.real.step_by(partial(super().apply, entry, mean, verdict, packed, partly=partly))
        return self.real.apply(entry, mean, verdict, packed, partly=partly)

    def replay(self, entry: int, mean: Sequence[memoryview]) -> None:
        super().replay(entry, mean)
        self._follow_the_anchor()

    def prepare_merge(self) -> None:
        self.real.prepare_merge()

    def anchors_now(self) -> list[Tensor]:
        return self.real.anchors_now()

    def follow(self, anchors: list[Tensor], verdicts: Sequence[Verdict | None], *, partly: int | None) -> None:
        super().follow(None, verdicts, partly=partly)
        self._follow_the_anchor()
        self.real.follow(anchors, verdicts, partly=partly)

    def resume(self, progress: Any, verdicts: Sequence[Verdict | None] = ()) -> None:
        super().resume(progress, verdicts)
        self._follow_the_anchor()
        self.real.resume(None if progress is None else [torch.from_numpy(each.copy()) for each in progress], verdicts)
        self._check("resumed,")


class DroppingModelState(CheckedModelState):
    """A `CheckedModelState` that drops work which came too late for its round."""

    carries = False
