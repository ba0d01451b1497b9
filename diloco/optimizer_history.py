"""Optimizers whose next step is computed from a history of earlier steps, as LBFGS, which a round makes wrong.

LBFGS estimates the curvature from how gradients changed over its last steps. A round moves the parameters between two
steps. The change of the gradient then does not belong to the step, and without a line search LBFGS may diverge.
Momentum and second moments (SGD, Adam, Muon, Shampoo) are averages of gradients, which a round makes a little older.
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
"""How classes of such optimizers are named, in torch and elsewhere: LBFGS, FullBatchLBFGS, LBFGSNew."""
KEYS = re.compile("old|prev|hist|past")
"""How such an optimizer names a list of tensors from earlier steps, in the state of a parameter."""
MOST_LOOKED_AT = 4
"""Parameters whose state is looked at. LBFGS keeps everything in the state of the first one."""


class OptimizerHistory:
    """Warns, once, of an optimizer that uses a history from before a round.

    The warning comes right before the first such step. A training loop that clears the history after each round, or
    makes a new optimizer, sees no warning.

    Args:
        model: the model whose optimizers are looked at. Optimizers of other models may keep their history.

    Example:
        history = OptimizerHistory(model)
        history.last_merge = "round 1"
        optimizer.step(closure)  # a warning, if it is an LBFGS that has made a step before
    """

    def __init__(self, model: nn.Module) -> None:
        self._own = set(map(id, model.parameters()))
        self.last_merge = ""
        """The last merge that has changed the parameters, as the message names it. Empty: none yet."""
        self._looked: WeakKeyDictionary[Optimizer, str] = WeakKeyDictionary()
        """By optimizer, the last merge when it made its last step."""
        me = ref(self)

        def look(optimizer: Optimizer) -> None:
            if (history := me()) is None:  # a DiLoCo that was dropped without close()
                unwatch(look)
            else:
                history._look(optimizer)

        self._callback = look
        watch(look)

    def close(self) -> None:
        """Watch no further steps."""
        unwatch(self._callback)

    def _look(self, optimizer: Optimizer) -> None:
        """Called before each optimizer step of this thread; only the first step after a merge is looked at."""
        # An optimizer that makes its first step has no history, or another run's, as with a loaded state.
        before = self._looked.setdefault(optimizer, self.last_merge)
        if before == self.last_merge:
            return
        self._looked[optimizer] = self.last_merge
        if not has_history(optimizer) or not self._steps_the_model(optimizer):
            return
        self.close()
        warnings.warn(
            f"{type(optimizer).__name__} computes its steps from a history of gradients, which is from before "
            f"{self.last_merge}. It may diverge: call optimizer.state.clear() whenever diloco.step() returns a report.",
            stacklevel=4,
        )

    def _steps_the_model(self, optimizer: Optimizer) -> bool:
        return any(id(p) in self._own for group in optimizer.param_groups for p in group["params"])


def has_history(optimizer: Optimizer) -> bool:
    """Return whether the state of an optimizer has a history of earlier steps.

    Args:
        optimizer: any optimizer. One that has made no step yet has no history.

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
    """Return whether a list in the state of a parameter has tensors of several steps.

    A list alone proves nothing: Shampoo and SOAP have lists of matrices, one for each dimension of the parameter.

    Args:
        key: the name of the list in the state.
        values: the list.
        parameter: the parameter that the state belongs to.
        n_elements: of all parameters of the optimizer, which LBFGS makes one vector of.
    """
    tensors = [value for value in islice(values, MOST_LOOKED_AT) if isinstance(value, Tensor)]
    if not tensors:
        return False
    if all(tensor.dim() == 1 and tensor.numel() == n_elements for tensor in tensors):
        return True
    is_like = isinstance(parameter, Tensor) and all(tensor.shape == parameter.shape for tensor in tensors)
    return is_like and isinstance(key, str) and KEYS.search(key) is not None
