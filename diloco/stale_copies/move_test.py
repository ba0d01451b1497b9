"""Tests whether an optimizer steps the model's own parameters: moves suspected values before a step, and compares them
after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import Optimizer

from diloco.stale_copies.optimizer_hook import is_in_backward, unwatch, watch
from diloco.stale_copies.samples import Sample, Values, largest
from diloco.stale_copies.search import Copy

FAR = 16.0
"""The test moves values by this multiple of the largest recent change of any compared value."""


class MoveTest:
    """Moves suspected values right before the next optimizer step, and reports afterwards whether they kept the move.

    Args:
        samples: the suspected values.
        change: the largest recent change of any compared value.
        copies: the copies of these values that a search has found.
        when: the merge in the words of an error, such as "round 3".
        owners: the optimizers that step the parameters themselves. Empty: none is known.

    Example:
        test = MoveTest(undone.samples, undone.change, copies, "round 3")
        optimizer.step()
        test.end()  # the names of parameters that were put back
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        change: float,
        copies: Sequence[Copy],
        when: str,
        *,
        owners: Sequence[Optimizer] = (),
    ) -> None:
        self._owned = {id(p) for owner in owners for group in owner.param_groups for p in group["params"]}
        """The parameters that an optimizer of torch steps itself, by identity."""
        self.samples, self.copies = samples, copies
        self._change = change
        self.when = when
        self.optimizers: list[Optimizer] = []
        self._moved: list[tuple[Sample, Values, float]] = []
        self._next: list[Sample] = []
        watch(self._take)

    def _take(self, optimizer: Optimizer) -> MoveTest | None:
        """Return this test if the optimizer can step the values. It is called before each step of any optimizer of
        torch.

        An optimizer can step the values if it has the parameters themselves. If no optimizer has them, an optimizer
        with tensors of the same shapes is enough, because copies have these shapes. The shapes alone do not prove it: a
        discriminator may have layers of the generator's shapes. At its step, the generator's values are still needed
        for gradients.
        """
        stepped = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        shapes, own = {tensor.shape for tensor in stepped}, {id(tensor) for tensor in stepped}
        parameters = [sample.parameter for sample in self.samples]
        if not any(id(p) in own or (p.shape in shapes and not self._owned) for p in parameters):
            return None  # the optimizer belongs to another model, such as a discriminator
        if all(optimizer is not other for other in self.optimizers):
            self.optimizers.append(optimizer)
        # The networks of a GAN may be in one DiLoCo, with an optimizer for each. A parameter that another optimizer
        # steps is moved before that optimizer's step. A parameter that no optimizer of torch steps is moved before the
        # first step of any of them.
        moved, others = {id(sample) for sample, *_ in self._moved}, self._owned - own
        waiting = [sample for sample in self.samples if id(sample) not in moved]
        self._next = [sample for sample in waiting if id(sample.parameter) not in others]
        if is_in_backward():
            # The backward pass still needs the other parameters, and raises an error if they have changed.
            self._next = [sample for sample in self._next if id(sample.parameter) in own]
        return self if self._next else None

    @torch.no_grad()
    def move(self) -> None:
        """Move the values that the next step must keep."""
        for sample in self._next:
            before = sample.read().copy()
            by = FAR * max(self._change, 1e-3 * largest(before))
            sample.view().add_(by)
            self._moved.append((sample, before, by))
        self._next = []

    def around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that computes the loss and its gradients at the values that were not moved.

        LBFGS calls its closure several times in one step. Each time the values are moved back before the call.

        Args:
            closure: the closure of the optimizer's step.
        """

        def unmoved() -> Any:
            with torch.no_grad():
                for sample, _, by in self._moved:
                    sample.view().sub_(by)
            result = closure()
            with torch.no_grad():
                for sample, _, by in self._moved:
                    sample.view().add_(by)
            self.move()
            return result

        return unmoved

    @property
    def was_of_owner(self) -> bool:
        """True if an optimizer that made a step has one of the suspected parameters itself, and not only a copy."""
        own = {id(tensor) for each in self.optimizers for group in each.param_groups for tensor in group["params"]}
        return any(id(sample.parameter) in own for sample in self.samples)

    @torch.no_grad()
    def end(self) -> list[str] | None:
        """Move the values back, and return the names of parameters that were put back. None: no step was made."""
        unwatch(self._take)
        if not self._moved:
            return None
        found = []
        for sample, before, by in self._moved:
            moved = sample.read() - before
            if abs(float(np.median(moved))) < by / 4:
                found.append(sample.name)
            else:
                sample.view().sub_(by)
        return found
