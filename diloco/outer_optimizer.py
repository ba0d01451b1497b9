"""The outer step, which moves the anchor by a mean: Nesterov SGD on flat float32 memory, or the user's own optimizer.

The built-in optimizer computes the same as `torch.optim.SGD(nesterov=True)`: b = mu*b + g, d = g + mu*b,
anchor -= lr*d. It works in place, on pieces that fit into the cache, and digests each piece while it is in the cache.
Products and sums are separate operations. A fused multiply-add rounds once instead of twice, and not every processor or
torch kernel has it. So with a fused multiply-add, the same step would give other bits on another machine.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from xxhash import xxh3_128, xxh3_128_hexdigest

from diloco.attached_state import from_arrays, to_arrays
from diloco.errors import DiLoCoError
from diloco.fragments import Fragment, Slot
from diloco.rendezvous.training_state import Array, Arrays
from diloco.wires.wire import PIECE, Floats, Pieces

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def never(entry: int) -> bool:
    """Return False: no entry is a plain average.

    Args:
        entry: any entry.

    Example:
        Schedule(0.7, 0.9, 0, 1, is_average=never)
    """
    return False


@dataclass(frozen=True, slots=True)
class Schedule:
    """The outer learning rate and momentum at each entry.

    At a cold start all replicas move in the same direction for a while, and a momentum whose gain is 1 / (1 - mu)
    overshoots. So it grows over the fragment's first `warmup` rounds. The last planned round of each fragment is a
    plain average, which removes the noise that the momentum carries.

    Args:
        lr: the learning rate.
        momentum: the full momentum.
        warmup: rounds of a fragment over which the momentum grows. 0: it has its full value from the first round.
        n_fragments: the number of fragments.
        is_average: returns True if an entry is a plain average.

    Example:
        Schedule(0.7, 0.9, warmup=20, n_fragments=1).at(10)  # (0.7, 0.45)
    """

    lr: float
    momentum: float
    warmup: int
    """Rounds of a fragment over which the momentum grows. 0: it has its full value from the first round."""
    n_fragments: int
    is_average: Callable[[int], bool] = never
    """Returns True if an entry is a plain average, such as the last planned round of each fragment."""

    def at(self, entry: int) -> tuple[float, float]:
        """Return the learning rate and the momentum for an entry.

        Args:
            entry: the entry.
        """
        if self.is_average(entry):
            return 1.0, 0.0
        ramp = min(1.0, (entry // self.n_fragments) / self.warmup) if self.warmup else 1.0
        return self.lr, self.momentum * ramp


class OuterOptimizer(ABC):
    """Interface of the two outer optimizers: an object that steps the anchor of one fragment."""

    _digest: str | None = None
    """The digest of anchor and state. None: it must be computed first."""

    goes_by_pieces: bool
    """True if each piece of the anchor is stepped before the next piece of the mean is read."""

    @abstractmethod
    def step(self, entry: int, mean: Pieces) -> None:
        """Step the anchor by the mean pseudo-gradient.

        Args:
            entry: the entry of the mean.
            mean: the mean, in pieces of at most `PIECE` elements.
        """

    def digest(self) -> str:
        """Return the digest of the anchor and the optimizer's state."""
        return self.fresh_digest() if self._digest is None else self._digest

    @abstractmethod
    def fresh_digest(self) -> str:
        """Compute the digest from memory at the next request, and forget the digest that a step has computed."""

    @abstractmethod
    def arrays(self) -> Mapping[str, Array]:
        """Return the optimizer's state. Empty if it is the initial state.

        Raises:
            TypeError: the state is more than tensors and JSON.
        """

    @abstractmethod
    def load_arrays(self, arrays: Mapping[str, Array]) -> None:
        """Load a state after the anchor was replaced.

        Args:
            arrays: the state as `arrays` returned it, among other arrays. Without a state in it, the initial state is
                restored.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the optimizer's state."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned.

        Args:
            state: the state.
        """


class NesterovSGD(OuterOptimizer):
    """The built-in outer optimizer: SGD with Nesterov momentum.

    Args:
        fragment: the fragment.
        anchor: (n_elements,) float32; it is stepped in place.
        schedule: the learning rate and momentum at each entry.

    Example:
        NesterovSGD(fragment, anchor, Schedule(0.7, 0.9, 0, 1)).step(0, pieces)
    """

    goes_by_pieces = True

    def __init__(self, fragment: Fragment, anchor: Tensor, schedule: Schedule) -> None:
        self._fragment = fragment
        self._stepped = [slot for slot in fragment.slots if slot.kind == "parameter"]
        self._anchor = anchor  # (n_elements,) float32
        n_momenta = fragment.n_stepped if schedule.momentum else 0
        self._momentum = torch.zeros(n_momenta, dtype=torch.float32, device="cpu")
        self._schedule = schedule
        self._step = np.empty(min(PIECE, fragment.n_elements), np.float32)

    def step(self, entry: int, mean: Pieces) -> None:
        lr, mu = (np.float32(value) for value in self._schedule.at(entry))
        all_anchors, all_momenta = self._anchor.numpy(), self._momentum.numpy()
        anchors, momenta = xxh3_128(), xxh3_128()
        for start, end, g in _cut(mean, self._fragment.n_stepped):
            # A call of numpy takes a third of the time of torch's, and float32 products and sums have the same bits.
            anchor = all_anchors[start:end]
            if start < self._fragment.n_stepped:
                d = self._step[: end - start]
                if all_momenta.size:
                    b = all_momenta[start:end]
                    np.multiply(b, mu, out=b)
                    np.add(b, g, out=b)
                    np.multiply(b, mu, out=d)
                    np.add(d, g, out=d)
                    np.multiply(d, lr, out=d)
                    momenta.update(b.data)
                else:
                    np.multiply(g, lr, out=d)
                np.subtract(anchor, d, out=anchor)
            else:
                np.subtract(anchor, g, out=anchor)  # buffers are set to the plain average
            anchors.update(anchor.data)
        self._digest = xxh3_128_hexdigest(anchors.digest() + momenta.digest())

    def fresh_digest(self) -> str:
        digests = (xxh3_128(_bytes(t)).digest() for t in (self._anchor, self._momentum))
        self._digest = xxh3_128_hexdigest(b"".join(digests))
        return self._digest

    def arrays(self) -> Mapping[str, Array]:
        if not self._momentum.count_nonzero():
            return {}
        return {f"momentum/{slot.name}": self._of(slot) for slot in self._stepped}

    def load_arrays(self, arrays: Mapping[str, Array]) -> None:
        self._digest = None
        self._momentum.zero_()
        if self._momentum.numel():
            for slot in self._stepped:
                if (values := arrays.get(f"momentum/{slot.name}")) is not None:
                    self._of(slot)[...] = values

    def _of(self, slot: Slot) -> Array:
        values: Array = self._momentum[slot.start : slot.end].view(slot.shape).numpy()
        return values

    def state_dict(self) -> dict[str, Any]:
        return {"momentum": self._momentum.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._momentum.copy_(state["momentum"])
        self._digest = None


class GivenOptimizer(OuterOptimizer):
    """An outer optimizer that the user gave. It gets parameters that are views of the anchor.

    Args:
        fragment: the fragment.
        anchor: (n_elements,) float32; it is stepped in place.
        factory: returns the optimizer of a list of parameters.

    Raises:
        TypeError: the factory did not return an optimizer.

    Example:
        GivenOptimizer(fragment, anchor, lambda parameters: torch.optim.SGD(parameters, 0.7)).step(0, pieces)
    """

    goes_by_pieces = False

    def __init__(self, fragment: Fragment, anchor: Tensor, factory: OptimizerFactory) -> None:
        self._fragment = fragment
        self._anchor = anchor
        self._slots = [slot for slot in fragment.slots if slot.kind == "parameter"]
        self._parameters = [nn.Parameter(anchor[slot.start : slot.end].view(slot.shape)) for slot in self._slots]
        with torch.device("cpu"):
            self._optimizer = factory(self._parameters)
        if not isinstance(self._optimizer, torch.optim.Optimizer):
            kind = type(self._optimizer).__name__
            raise TypeError(f"outer_optimizer must return a torch.optim.Optimizer, got a {kind}.")
        self._factory = factory

    def step(self, entry: int, mean: Pieces) -> None:
        gradient = torch.empty_like(self._anchor)
        for start, values in mean:
            gradient.numpy()[start : start + len(values)] = values
        for slot, parameter in zip(self._slots, self._parameters, strict=True):
            parameter.grad = gradient[slot.start : slot.end].view(slot.shape)
        # The anchor is on the CPU. With another default device, an optimizer would create its own tensors there.
        with torch.device("cpu"):
            self._optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None
        self._anchor[self._fragment.n_stepped :].sub_(gradient[self._fragment.n_stepped :])
        self._digest = None

    def fresh_digest(self) -> str:
        self._digest = digest_of_given(self._anchor, self._optimizer.state_dict()["state"])
        return self._digest

    def arrays(self) -> Mapping[str, Array]:
        state = self._optimizer.state_dict()
        return to_arrays(state, f"outer/{self._fragment.index}") if state["state"] else {}

    def load_arrays(self, arrays: Mapping[str, Array]) -> None:
        self._digest = None
        with torch.device("cpu"):
            self._optimizer = self._factory(self._parameters)
        state = from_arrays(arrays, f"outer/{self._fragment.index}")
        if state is not None:
            self._optimizer.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self._optimizer.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Without the copy, the optimizer would change the tensors of the caller's checkpoint.
        self._optimizer.load_state_dict(copy.deepcopy(state))
        self._digest = None


def digest_of_given(anchor: Tensor, state: Any) -> str:
    """Return the digest of an anchor and of the state of a user's outer optimizer.

    Args:
        anchor: (n_elements,) float32.
        state: the value of "state" in the optimizer's `state_dict`.

    Example:
        digest_of_given(anchor, optimizer.state_dict()["state"])
    """
    digest = xxh3_128(_bytes(anchor))
    _digest_state(digest, state)
    return digest.hexdigest()


def _cut(mean: Pieces, n_stepped: int) -> Iterable[tuple[int, int, Floats]]:
    """Yield the pieces of a mean: first element, end and values. No piece crosses the end of the stepped part."""
    for start, values in mean:
        end = start + len(values)
        if start < n_stepped < end:
            yield start, n_stepped, values[: n_stepped - start]
            yield n_stepped, end, values[n_stepped - start :]
        else:
            yield start, end, values


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().numpy().data.cast("B") if tensor.numel() else memoryview(b"")


def _digest_state(digest: Any, value: Any) -> None:
    """Add an optimizer's state to a digest: tensors by their bytes, everything else by its text."""
    if isinstance(value, Tensor):
        digest.update(_bytes(value.detach().cpu().contiguous().reshape(-1)))
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            digest.update(str(key).encode())
            _digest_state(digest, value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            _digest_state(digest, item)
    else:
        digest.update(repr(value).encode())


class Anchor:
    """The shared parameters of a model, in float32 on the CPU, with the outer optimizers that step them.

    Args:
        fragments: the fragments of the model.
        values: the first values of each fragment, (n_elements,) float32.
        outer: the optimizer of each fragment, which steps its values in place.

    Example:
        anchor = Anchor(fragments, values, [NesterovSGD(f, v, schedule) for f, v in zip(fragments, values)])
        anchor.step(0, pieces)
    """

    def __init__(self, fragments: Sequence[Fragment], values: list[Tensor], outer: list[OuterOptimizer]) -> None:
        self._fragments = tuple(fragments)
        self.values = values
        self.outer = outer
        self.is_torn = False
        """True if an outer step was interrupted, so that an unknown part of a fragment was stepped."""

    def arrays(self) -> Arrays:
        """Return views of the anchor, and the state of the outer optimizers, by the names in a snapshot."""
        arrays: dict[str, Array] = {f"anchor/{name}": values.numpy() for name, values in self.views().items()}
        for outer in self.outer:
            arrays |= outer.arrays()
        return arrays

    def snapshot(self) -> tuple[Arrays, tuple[str, ...]]:
        """Return copies of the arrays of a snapshot, and the digest of each fragment."""
        state = tuple(outer.fresh_digest() for outer in self.outer)
        return {name: np.array(values) for name, values in self.arrays().items()}, state

    @torch.no_grad()
    def load(self, arrays: Arrays) -> None:
        """Load the arrays of a snapshot.

        Args:
            arrays: the arrays, as `arrays` returned them.
        """
        for name, values in self.views().items():
            values.numpy()[...] = arrays[f"anchor/{name}"]
        for outer in self.outer:
            outer.load_arrays(arrays)
        self.is_torn = False

    def digest(self, fragment: int) -> str:
        """Return the digest of a fragment's anchor and outer state.

        Args:
            fragment: the number of the fragment.
        """
        return self.outer[fragment].digest()

    def check_is_whole(self) -> None:
        """Refuse a damaged anchor.

        Raises:
            DiLoCoError: an outer step was interrupted before it had stepped the whole anchor.
        """
        if self.is_torn:
            raise DiLoCoError(
                "An outer step was interrupted, so this replica's anchor differs from the run's anchor. The live "
                "parameters are intact. Start the replica again: it loads the run's anchor."
            )

    def copies(self) -> list[Tensor]:
        """Return a copy of the anchor, by fragment."""
        return [anchor.clone() for anchor in self.values]

    def by_name(self) -> dict[str, Tensor]:
        """Return a copy of the anchor, by name."""
        self.check_is_whole()
        return {name: values.clone() for name, values in self.views().items()}

    def checkpoint(self) -> dict[str, Any]:
        """Return copies of the anchor, by name, and of the outer optimizers' states."""
        return {"anchor": self.by_name(), "outer": [outer.state_dict() for outer in self.outer]}

    def check_checkpoint(self, state: Mapping[str, Any], first: int, rounds: int) -> None:
        """Raise an error if `load_checkpoint` could not load this checkpoint.

        Args:
            state: the checkpoint.
            first: the number of rounds after which the run began.
            rounds: the number of rounds of the run.

        Raises:
            ValueError: the checkpoint belongs to another model, or its rounds show that it belongs to another run.
        """
        if not first <= state["rounds"] <= rounds:
            at = f"is at {rounds}" if not first else f"began at {first} and is at {rounds}"
            raise ValueError(
                f"This checkpoint belongs to another run: it is of round {state['rounds']}, and the run {at}. To begin "
                "a new run from a checkpoint, load the model's own state before creating a DiLoCo."
            )
        shapes = {name: values.shape for name, values in self.views().items()}
        if {name: values.shape for name, values in state["anchor"].items()} != shapes:
            names = ", ".join(sorted(shapes.keys() ^ state["anchor"].keys())[:3]) or "their shapes differ"
            raise ValueError(
                f"This checkpoint belongs to a model with other parameters ({names}). Build the model as in that run."
            )

    @torch.no_grad()
    def load_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Load anchor and outer state from a checkpoint. Live work does not change.

        Args:
            state: the checkpoint.
        """
        for name, view in self.views().items():
            view.copy_(state["anchor"][name])
        for outer, outer_state in zip(self.outer, state["outer"], strict=True):
            outer.load_state_dict(outer_state)
        self.is_torn = False

    def views(self) -> dict[str, Tensor]:
        """Return the anchor by name, as views."""
        return {
            slot.name: anchor[slot.start : slot.end].view(slot.shape)
            for fragment, anchor in zip(self._fragments, self.values, strict=True)
            for slot in fragment.slots
        }

    def step(self, entry: int, pieces: Pieces) -> None:
        """Step a fragment by a mean.

        Args:
            entry: the entry of the mean. It belongs to fragment entry % P.
            pieces: the decoded mean.

        Raises:
            DiLoCoError: an earlier step was interrupted.
        """
        self.check_is_whole()
        self.is_torn = True
        self.outer[entry % len(self.outer)].step(entry, pieces)
        self.is_torn = False
