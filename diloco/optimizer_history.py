"""Warns of optimizers that compute their next step from a history of earlier steps, such as LBFGS.

A round makes such a history wrong. LBFGS estimates the curvature from the change of gradients over its last steps. A
round moves the parameters between two steps, so the change of the gradient no longer comes from the step alone. Without
a line search, LBFGS may then diverge. Momentum and second moments (SGD, Adam, Muon, Shampoo) are averages of gradients.
A round does them little harm.
"""

from __future__ import annotations

import re
import warnings
from collections import deque
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from diloco.stale_copies.optimizer_hook import unwatch, watch

NAMES = re.compile("BFGS|Anderson", re.IGNORECASE)
"""Matches the class names of such optimizers, in torch and elsewhere: LBFGS, FullBatchLBFGS, LBFGSNew."""
KEYS = re.compile("old|prev|hist|past")
"""Matches the key of a list of tensors from earlier steps, in the state of a parameter."""
MOST_LOOKED_AT = 4
"""The number of parameters whose state is examined. LBFGS keeps its whole state at the first parameter."""


class OptimizerHistory:
    """Warns once about an optimizer that uses a history from before a round.

    The warning comes right before the first such step. A training loop that clears the history after each round, or
    creates a new optimizer, gets no warning.

    Args:
        model: the model whose optimizers are examined. Optimizers of other models may keep their history.

    Example:
        history = OptimizerHistory(model)
        history.last_merge = "round 1"
        optimizer.step(closure)  # a warning, if it is an LBFGS that has made a step before
    """

    def __init__(self, model: nn.Module) -> None:
        self._own = set(map(id, model.parameters()))
        self.last_merge = ""
        """The last merge that changed the parameters, as text for the message. Empty: there was none yet."""
        self._looked: WeakKeyDictionary[Optimizer, str] = WeakKeyDictionary()
        """The value of `last_merge` at the last step of each optimizer."""
        me = ref(self)

        def look(optimizer: Optimizer) -> None:
            if (history := me()) is None:  # a DiLoCo that was dropped without close()
                unwatch(look)
            else:
                history._look(optimizer)

        self._callback = look
        watch(look)

    def close(self) -> None:
        """Stop watching optimizers."""
        unwatch(self._callback)

    def _look(self, optimizer: Optimizer) -> None:
        """Examine the first step of an optimizer after a merge. Called before each optimizer step of this thread."""
        # At its first step, an optimizer has no history, or a history that was loaded from another run. Neither is a
        # reason to warn.
        before = self._looked.setdefault(optimizer, self.last_merge)
        if before == self.last_merge:
            return
        self._looked[optimizer] = self.last_merge
        if not has_history(optimizer) or not self._steps_the_model(optimizer):
            return
        self.close()
        warnings.warn(
            f"{type(optimizer).__name__} computes its steps from a history of gradients, which is from before "
            f"{self.last_merge}, so it may diverge. Call optimizer.state.clear() when diloco.step() returns a report.",
            stacklevel=4,
        )

    def _steps_the_model(self, optimizer: Optimizer) -> bool:
        return any(id(p) in self._own for group in optimizer.param_groups for p in group["params"])


def has_history(optimizer: Optimizer) -> bool:
    """Return True if the state of an optimizer has a history of earlier steps.

    Args:
        optimizer: any optimizer. It has no history before its first step.

    Example:
        has_history(torch.optim.LBFGS(model.parameters()))  # False before its first step, then True
    """
    states = [each for each in islice(optimizer.state.items(), MOST_LOOKED_AT) if isinstance(each[1], dict) and each[1]]
    if states and NAMES.search(type(optimizer).__name__):
        return True
    n_elements = sum(p.numel() for group in optimizer.param_groups for p in group["params"]) if states else 0
    return any(
        _is_history(key, value, parameter, n_elements)
        for parameter, state in states
        for key, value in state.items()
        if isinstance(value, (list, tuple, deque)) and value
    )


def _is_history(key: Any, values: Any, parameter: Any, n_elements: int) -> bool:
    """Return True if a list in the state of a parameter has tensors of several steps.

    A list alone proves nothing: Shampoo and SOAP have lists of matrices, one for each dimension of the parameter.

    Args:
        key: the name of the list in the state.
        values: the list.
        parameter: the parameter that the state belongs to.
        n_elements: the number of elements of all the optimizer's parameters, which LBFGS joins to one vector.
    """
    tensors = [value for value in islice(values, MOST_LOOKED_AT) if isinstance(value, Tensor)]
    if not tensors:
        return False
    if all(tensor.dim() == 1 and tensor.numel() == n_elements for tensor in tensors):
        return True
    is_like = isinstance(parameter, Tensor) and all(tensor.shape == parameter.shape for tensor in tensors)
    return is_like and isinstance(key, str) and KEYS.search(key) is not None
