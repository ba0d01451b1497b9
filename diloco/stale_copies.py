"""Copies of the parameters outside the model: recognized when they undo a round, or were made before the first anchor.

An optimizer with a copy of its own (float32 master weights, the `z` of schedule-free optimizers) writes that copy into
the model at its next step, and so undoes each round without a word. `StaleCopies` compares a few values of the
parameters one step after a merge. Values nearer to where they were before the merge are a suspicion, and no proof: with
rounds as short as a step, or a loss that one step minimizes, an honest optimizer does the same. Three things follow a
suspicion:

1. The optimizer is searched for copies of the suspected values; or all that the training loop's variables lead to, if
   no optimizer of torch steps the model's own parameters. Where there is none, only several merges in a row that were
   clearly undone lead on to the next point.
2. The next optimizer step is a test. The suspected values are moved far right before it, when the gradient is already
   computed, and looked at after it. An optimizer that steps the model's own parameters keeps the move, and one that
   writes a copy does not. The move costs a few values their last bits, so it is made only here.
3. A copy alone is no fault: the training loop may give it the merged values after each round. So the copies are looked
   at when the next merge is over and the next optimizer step begins. One that has the merged values follows the rounds.
"""

from __future__ import annotations

import functools
import re
import sys
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from threading import get_ident
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias
from weakref import ReferenceType, ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from diloco.errors import StaleCopyError
from diloco.fragments import Fragment
from diloco.tensor_names import by_clean_name, find_tensor

MOST_TENSORS = 6
"""Parameters compared after one merge; the next merge compares the next ones. 6 take about 40 microseconds."""
VALUES = 32
"""Neighboring values compared of each."""
CLEARED = 3
"""Suspicions that the test refuted, after which an optimizer is trusted."""
MOST_SEARCHES = 10
"""Searches for copies, each of which takes milliseconds; then an optimizer without copies is trusted."""
MOST_FLAT = 100_000_000
"""Values of one flat tensor in which copies of parameters are searched for."""
STRIKES = 3
"""Merges in a row, each clearly undone, that convict an optimizer whose copy cannot be found, or which cannot be tested
because it is none of torch."""
FEW = 8
"""A parameter with fewer values, as the bias of one output, is near its old value by chance too often."""
MOST_OBJECTS, MOST_DEPTH, MOST_PARTS = 100_000, 6, 10_000
"""Of the objects that variables lead to, how many are looked into, how far, and how many parts of each."""
SCALARS = frozenset({str, bytes, int, float, bool, complex, type(None)})
"""Types of values that hold nothing else."""
NOT_USERS = ("diloco", "executors", "torch", "threading", "importlib", "runpy")
"""Packages whose frames have no variables of the user's."""
AVERAGE = re.compile(r"(?<![A-Z])EMA(?![a-z])|Ema(?![a-z])|ExponentialMovingAverage|AveragedModel")
"""How classes of averages of weights are named: ModelEmaV3 (timm), EMAModel (diffusers), AveragedModel (torch)."""
FAR = 16.0
"""How many times the largest recent change of any compared value the test moves values."""
CLEARLY = 0.75
"""A merge was clearly undone if all compared values are back to within this share of the way that it had moved them."""
ENOUGH = 64
"""Values, of two parameters at least, that are needed to say so. Few values go straight back by chance, too."""
MOST_WAITS = 64
"""Calls of `check` after a merge in which no compared value changes, after which the merge is no longer compared."""
LATER_MERGES, LATER_STEPS = 8, 16
"""The first merges of a run, after which more steps than one are compared, and how many steps. Lookahead mixes in its
copy every 5 steps. Later in the run, nothing is read between two rounds."""
TAKEN_BACK = 0.2
"""Share of a merge that one of these steps must take back before it counts."""
STRAIGHT = 0.9
"""Least correlation of such a step with the way back. Steps of common optimizers reached 0.76 in tests."""
Values = NDArray[np.float32]
Watcher: TypeAlias = "Callable[[Optimizer], _Test | None]"
"""Called before an optimizer step; returns a test that this step is to undergo, or None."""


# One hook for the process, which stays: torch iterates over its hooks while another thread may add one.
_watchers: dict[int, tuple[Watcher, ...]] = {}
"""By thread, what to call before each optimizer step that the thread makes. Each replica of a test has a thread."""


def watch(callback: Watcher) -> None:
    """Call something before each optimizer step of this thread, until `unwatch`."""
    _register()
    _watchers[get_ident()] = (*_watchers.get(get_ident(), ()), callback)


def unwatch(callback: Watcher) -> None:
    for thread, callbacks in list(_watchers.items()):
        if callback in callbacks:
            _watchers[thread] = tuple(each for each in callbacks if each != callback)


@functools.cache
def _register() -> None:
    def call(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        tests = [test for callback in _watchers.get(get_ident(), ()) if (test := callback(optimizer)) is not None]
        # torch passes the optimizer as the first of args, so a closure is the second.
        given = args[1] if len(args) > 1 else kwargs.get("closure")
        closure = given if callable(given) else None
        for test in tests:
            if closure is None:
                test.move()
            else:
                closure = test.around(closure)
        if not tests or closure is None:
            return None
        return ((args[0], closure, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": closure})

    register_optimizer_step_pre_hook(call)


def _is_in_backward() -> bool:
    """Return whether this thread computes gradients now, as when an optimizer steps in a hook of a parameter."""
    task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
    return task() != -1


class _Sample:
    """A few neighboring values of one parameter.

    Args:
        name, parameter: as the model has them.
        start: the first value, of the flat parameter.
    """

    __slots__ = ("_array", "_pointer", "name", "parameter", "start")

    def __init__(self, name: str, parameter: Tensor, start: int) -> None:
        self.name, self.parameter, self.start = name, parameter, start
        self._pointer = -1
        self._array: Values | None = None

    @property
    def n_values(self) -> int:
        return min(VALUES, self.parameter.numel())

    def read(self) -> Values:
        """Return the values as they are now in float32, perhaps as a view of the parameter."""
        # The view is kept, since making it takes ten times as long as reading it: the check is part of a step.
        if self._array is None or self._pointer != self.parameter.data_ptr():
            view = self.view()
            if view.dtype != torch.float32 or view.device.type != "cpu":
                return view.float().cpu().numpy()
            self._array, self._pointer = view.numpy(), self.parameter.data_ptr()
        return self._array

    def view(self) -> Tensor:
        """Return the values as they are now, as a view of the parameter: what is written to it is written there."""
        values = self.parameter.detach()
        if values.is_contiguous():
            return values.view(-1)[self.start : self.start + VALUES]
        while values.dim() > 1:  # a convolution in channels_last: values beside each other in its last dimension
            values = values[self.start % len(values)]
        return values[:VALUES]


def _read(samples: Sequence[_Sample]) -> Values:
    """Return the values of some samples as (n_samples, VALUES), with zeros where a sample has fewer."""
    values = np.zeros((len(samples), VALUES), np.float32)
    for row, sample in zip(values, samples, strict=True):
        now = sample.read()
        row[: len(now)] = now
    return values


class _Merge:
    """What a merge has changed.

    Args:
        samples: the compared values.
        before, after: (n_samples, VALUES), the values before and after it; zeros where a sample has fewer.
        when: names the merge in an error, as in "round 3".
    """

    def __init__(self, samples: list[_Sample], before: Values, after: Values, when: str) -> None:
        self.samples, self.before, self.after, self.when = samples, before, after, when
        # Made here, in the time of the merge: the step after it is the user's.
        self.moved = after - before
        self._halfway = before + np.float32(0.5) * self.moved
        self._after_bytes = after.tobytes()

    def is_in_place(self, now: Values) -> bool:
        """Return whether no value has changed since."""
        return now.tobytes() == self._after_bytes

    def is_kept(self, now: Values) -> bool:
        """Return whether no sample is nearer to its values before the merge than to those after it."""
        # Plain sums: `einsum` takes three times as long where it was not called just before.
        # A value that is not finite is refused when it is sent, with an error of its own, so numpy need not warn of it.
        with np.errstate(invalid="ignore", over="ignore"):
            along = np.add.reduce((now - self._halfway) * self.moved, axis=1)
        return float(min(along.tolist())) >= 0


class StaleCopies:
    """Watches one model for optimizers that put back what a merge has changed.

    Args:
        model: the one whose trainable parameters are shared.
        fragments: its parts; only parameters are compared, since buffers are statistics.

    Example:
        stale = StaleCopies(model, fragments)
        stale.before_merge(); merge(); stale.after_merge("round 3")
        optimizer.step()
        stale.check()  # StaleCopyError
    """

    def __init__(self, model: nn.Module, fragments: Sequence[Fragment]) -> None:
        self._model = model
        self.names = [
            slot.name for f in fragments for slot in f.slots if slot.kind == "parameter" and slot.end > slot.start
        ]
        self._next = 0
        """The first parameter to compare after the next merge."""
        self._samples: list[_Sample] = []
        """What is compared around the merge that goes on; empty between two merges."""
        self._before: Values | None = None
        """(n_samples, VALUES): what was read before it."""
        self._merge: _Merge | None = None
        """The last merge, until the next step was made."""
        self._n_waits = 0
        """Calls of `check` since that merge in which no compared value had changed."""
        self._later: _LaterSteps | None = None
        """Compares the steps behind the first one with a merge, until the next merge."""
        self._n_later = 0
        """Merges after which it did so."""
        self._takes_back: list[str] = []
        """Merges of which a later step has taken back much, as the message names them."""
        self._test: _Test | None = None
        self._n_cleared = self._n_strikes = self._n_searches = 0
        self._copies: list[_Copy] = []
        """Copies of parameters that the optimizer seems to have, which the next merge will tell of."""
        self._looks = False
        """Whether the next optimizer step is waited for, to look at them."""
        self._stale = ""
        """A parameter whose copy did not take the merged values."""
        self._named = "the optimizer"
        """As the message names it."""
        self._optimizers: list[Optimizer] = []
        """Those that make a step before the first `check`."""
        self._owners: list[ReferenceType[Optimizer]] = []
        """Those of them that step the parameters themselves, not copies: then only these are searched and tested."""
        self._watches_first_step = True
        watch(self._note_optimizer)
        self._warned_of: set[str] = set()

    @property
    def is_trusted(self) -> bool:
        """Whether nothing is compared any more: the optimizer was tested often enough."""
        return self._n_cleared >= CLEARED or (self._n_searches >= MOST_SEARCHES and not self._n_strikes)

    def before_merge(self) -> None:
        """Read the values that a merge is about to change. Further calls before `after_merge` change nothing."""
        if self._samples or self.is_trusted:
            return
        n = min(MOST_TENSORS, len(self.names))
        turn = [self.names[(self._next + i) % len(self.names)] for i in range(n)]
        self._samples = list({id(copy.sample): copy.sample for copy in self._copies}.values())
        for number, name in enumerate(turn[: max(0, n - len(self._samples))]):
            parameter = find_tensor(self._model, name, "parameter")
            # Another place each time: of an embedding, most rows have not changed since the last round.
            start = (self._next * 7919 + number * 104729) % max(1, parameter.numel() - VALUES + 1)
            self._samples.append(_Sample(name, parameter, start))
        self._before = _read(self._samples)
        self._next += n

    def after_merge(self, when: str) -> None:
        """Read the values that the merge has changed.

        Args:
            when: names the merge in an error, as in "round 3".
        """
        samples, self._samples = self._samples, []
        self._merge, self._later, self._n_waits = None, None, 0
        if samples and self._before is not None:
            self._merge = _Merge(samples, self._before, _read(samples), when)
            if self._copies and not self._looks:
                self._looks = True
                watch(self._look_at_copies)

    def _look_at_copies(self, optimizer: Optimizer) -> None:
        """Called before the first optimizer step after a merge: compare the copies with the merged values."""
        self._looks = False
        unwatch(self._look_at_copies)
        if self._merge is None:
            return
        before, after = self._merge.before, self._merge.after
        rows = {id(sample): row for row, sample in enumerate(self._merge.samples)}
        stale = ""
        for copy in self._copies:
            if (values := copy.read()) is None or (row := rows.get(id(copy.sample))) is None:
                continue
            was, merged = before[row], after[row]
            if _distance(was, merged) <= 1e-6 * float(np.linalg.norm(merged)):
                continue  # this merge has not moved it
            if _distance(values, merged) < _distance(values, was):
                self._n_cleared, self._copies = CLEARED, []  # it follows the rounds
                return
            stale = copy.sample.name
        self._stale = stale

    def _note_optimizer(self, optimizer: Optimizer) -> None:
        if all(optimizer is not other for other in self._optimizers):
            self._optimizers.append(optimizer)

    def warn_of_copies(self, optimizer: Any, averaged: Collection[int]) -> None:
        """Warn, once for each key, of states of an optimizer that are copies of the parameters it steps.

        A state within a fifth of its parameter is a copy, and no moment of gradients: these are not near it by chance.

        Args:
            optimizer: anything; without a `state` of torch's kind, it has no such states.
            averaged: where tensors lie in memory that `average_also` was given.
        """
        state = getattr(optimizer, "state", None)
        names = {p: name for name, p in by_clean_name(self._model, self._model.named_parameters()).items()}
        entries = state.items() if isinstance(state, dict) else ()
        looked = [(p, v) for p, v in entries if p in names and isinstance(v, dict) and p.numel() >= VALUES]
        for parameter, values in looked[:MOST_TENSORS]:  # an optimizer treats them alike
            for key, value in _named_tensors(values):
                if key in self._warned_of or value.shape != parameter.shape:
                    continue
                if value.data_ptr() in averaged or not _is_near(value, parameter.detach()):
                    continue
                self._warned_of.add(key)
                warnings.warn(
                    f"{type(optimizer).__name__} keeps a copy of {names[parameter]!r} in its state ({key!r}), which "
                    "rounds do not change. Average such copies with diloco.average_also(), as README shows under "
                    "'What does not go with DiLoCo'.",
                    stacklevel=4,
                )

    def check(self, averaged: Callable[[], Collection[int]] = tuple) -> None:
        """Compare, once, in the first step after a merge; a test that was begun a step earlier ends here.

        Args:
            averaged: returns where tensors lie in memory that `average_also` was given.

        Raises:
            StaleCopyError: the optimizer has put a parameter back.
        """
        if self._watches_first_step:
            self._watches_first_step = False
            unwatch(self._note_optimizer)
            own = set(map(id, self._model.parameters()))
            for optimizer in (*self._optimizers, *_wrappers_with_state()):
                self.warn_of_copies(optimizer, averaged())
            for optimizer in self._optimizers:
                if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
                    self._owners.append(ref(optimizer))
            self._optimizers = []
        if self._test is not None:
            self._end_test(self._test)
        if self._later is not None:
            self._look_later(self._later)
        if self._merge is None:
            return
        if self._stale:
            raise StaleCopyError(_message(self._stale, self._merge.when, self._named))
        # An optimizer that gathers gradients for several steps writes its copy at the last of them. Until then no
        # value changes, and a comparison now would find the merge in place.
        merge, now = self._merge, _read(self._merge.samples)
        if self._n_waits < MOST_WAITS and merge.is_in_place(now):
            self._n_waits += 1
            return
        self._merge = None
        if self.is_trusted or self._copies:
            return
        if self._n_later < LATER_MERGES and sum(sample.n_values for sample in merge.samples) >= ENOUGH:
            self._n_later += 1
            self._later = _LaterSteps(merge, now)
        undone = None if merge.is_kept(now) else _Undone.of(merge, now)
        if undone is None:
            self._n_strikes = 0
            return
        self._n_searches += 1
        self._n_strikes = self._n_strikes + 1 if undone.is_clear else 0
        # An optimizer that the loop has replaced by a new one is gone, and so is its weak reference.
        owners = [each for owner in self._owners if (each := owner()) is not None]
        tensors = _tensors_in(owners) if owners else _reachable_tensors()
        if (found := _copies_of(undone.samples, tensors)) or self._n_strikes >= STRIKES:
            self._test = _Test(undone, found, merge.when, owners=owners)

    def _look_later(self, later: _LaterSteps) -> None:
        """Warn, once, of an optimizer that takes back merges a few steps after them, as Lookahead does."""
        share = later.look()
        if later.is_over:
            self._later = None
        if share is None:
            return
        self._takes_back.append(f"{share:.0%} of {later.when}")
        if len(self._takes_back) < 2:  # one large step may go that way for reasons of its own
            return
        self._n_later = LATER_MERGES
        warnings.warn(
            f"Single steps took back {' and '.join(self._takes_back)}, as Lookahead's do: the optimizer mixes in a "
            "copy of the weights that rounds do not change. Average that copy with diloco.average_also(), as README "
            "shows under 'What does not go with DiLoCo'.",
            stacklevel=4,
        )

    def _end_test(self, test: _Test) -> None:
        self._test = None
        names = test.end()
        if names is not None and not names and not test.was_of_owner:
            # The values stayed moved, and the optimizer that made the step does not step them: it may write its copy
            # later, as before the next forward pass. So only the strikes count.
            names = None
        if names is not None and not names:
            self._n_cleared, self._n_strikes = self._n_cleared + 1, 0
        elif names and test.copies:
            self._named = _named(test.optimizers)
            self._copies = [copy for copy in test.copies if copy.sample.name in names]
        elif names or self._n_strikes >= STRIKES:  # without names, the optimizer is none of torch
            raise StaleCopyError(_message((names or test.undone.names)[0], test.when, _named(test.optimizers)))

    def trust(self) -> None:
        """Compare nothing from now on: no optimizer steps these tensors."""
        self.close()
        self._n_cleared = CLEARED

    def close(self) -> None:
        """Watch nothing any more."""
        unwatch(self._note_optimizer)
        unwatch(self._look_at_copies)
        if self._test is not None:
            self._test.end()
            self._test = None


class _Undone:
    """What one step after a merge seems to have undone.

    Args:
        samples: nearer to their values before the merge than to the merged ones.
        change: the largest change of any compared value, by the merge or since.
        is_clear: whether so many values are back that chance, or one large step, cannot have done it.
    """

    def __init__(self, samples: Sequence[_Sample], change: float, *, is_clear: bool) -> None:
        self.samples, self.change, self.is_clear = samples, change, is_clear
        self.names = [sample.name for sample in samples]

    @classmethod
    def of(cls, merge: _Merge, now: Values) -> _Undone | None:
        """Compare what a merge changed with the values now; None: no parameter is nearer to its values before it.

        Args:
            merge: the merge.
            now: (n_samples, VALUES), the values one step later.
        """
        samples, after, moved = merge.samples, merge.after, merge.moved
        if not np.isfinite(now).all():
            return None
        back, ahead = now - merge.before, now - after
        back_square = np.einsum("ij,ij->i", back, back)
        is_near: NDArray[np.bool_] = back_square < np.einsum("ij,ij->i", ahead, ahead)
        moved_square = np.einsum("ij,ij->i", moved, moved)
        is_moved = moved_square > 1e-12 * np.einsum("ij,ij->i", after, after)
        is_near &= is_moved
        is_large = np.array([sample.n_values >= FEW for sample in samples])
        near = [sample for sample, each in zip(samples, is_near & is_large, strict=True) if each]
        if not near:
            return None
        change = max(_largest(back), _largest(ahead), _largest(moved))
        counted = is_moved & is_large
        n_values = sum(sample.n_values for sample, each in zip(samples, counted, strict=True) if each)
        is_back = float(back_square[counted].sum()) <= CLEARLY**2 * float(moved_square[counted].sum())
        is_clear = is_back and n_values >= ENOUGH and int(counted.sum()) > 1
        return cls(near, change, is_clear=is_clear)


class _LaterSteps:
    """Looks for a step that takes back much of a merge, some steps after the first one.

    Lookahead steps the parameters themselves and mixes in its slow copy every few steps only. Such a step leads
    straight back, to where the values were before the merge or somewhat earlier. The training's own steps may go back
    as well, since each replica has its own data, but gradients do not point straight at old values.

    Args:
        merge: the merge.
        now: (n_samples, VALUES), the values one step later.
    """

    def __init__(self, merge: _Merge, now: Values) -> None:
        self.when = merge.when
        self._samples, self._before, self._merge, self._now = merge.samples, merge.before, merge.moved, now
        back, merged = merge.after - now, float(np.vdot(self._merge, self._merge))
        # Momentum turns the training's own steps around gradually, and a loss that pulls back does so at once.
        self._usual = [float(np.vdot(back, self._merge)) / merged if merged else 0.0] * 2
        """For each of the two ways that are looked at, the largest share that one step has taken back so far."""
        self._n_calls = self._n_steps = 0

    @property
    def is_over(self) -> bool:
        """Whether enough steps were compared, or none is made."""
        return self._n_steps >= LATER_STEPS or self._n_calls >= MOST_WAITS

    def look(self) -> float | None:
        """Compare one more step; return the share of the merge that it took back if that is much, else None."""
        self._n_calls += 1
        last, self._now = self._now, _read(self._samples)
        step = self._now - last
        if not step.any():
            return None
        self._n_steps += 1
        merged = float(np.vdot(self._merge, self._merge))
        for number, way in enumerate((self._merge, last - self._before)):
            along, square = -float(np.vdot(step, way)), float(np.vdot(way, way))
            if not 0 < square <= 4 * merged:
                continue  # most of this way the training has made itself
            share, usual = along / square, self._usual[number]
            self._usual[number] = max(usual, share)
            is_straight = along > 0 and along**2 >= STRAIGHT**2 * square * float(np.vdot(step, step))
            # A copy mixed in leads back at most as far as it was: a larger step is the training's own.
            if is_straight and max(TAKEN_BACK, 3 * usual) <= share <= 1:
                self._n_steps = LATER_STEPS
                return share
        return None


class _Test:
    """Moves suspected values right before the next optimizer step, and says afterwards whether they stayed moved."""

    def __init__(
        self, undone: _Undone, copies: Sequence[_Copy], when: str, *, owners: Sequence[Optimizer] = ()
    ) -> None:
        self._owned = {id(p) for owner in owners for group in owner.param_groups for p in group["params"]}
        """The parameters that an optimizer of torch steps itself, by identity."""
        self.undone, self.copies = undone, copies
        self.when = when
        self.optimizers: list[Optimizer] = []
        self._moved: list[tuple[_Sample, Values, float]] = []
        self._next: list[_Sample] = []
        watch(self._take)

    def _take(self, optimizer: Optimizer) -> _Test | None:
        """Called before each step of any optimizer of torch: take part if it can step the values.

        That is an optimizer with the parameters themselves. If none has them, it is one with tensors of their shapes,
        as copies are. A discriminator may have layers of the generator's shapes: when it makes a step, the values of
        the generator are still needed for gradients.
        """
        stepped = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        shapes, own = {tensor.shape for tensor in stepped}, {id(tensor) for tensor in stepped}
        parameters = [sample.parameter for sample in self.undone.samples]
        if not any(id(p) in own or (p.shape in shapes and not self._owned) for p in parameters):
            return None  # of another model, as a discriminator's
        if all(optimizer is not other for other in self.optimizers):
            self.optimizers.append(optimizer)
        # The networks of a GAN may be in one DiLoCo, with an optimizer for each. What another optimizer steps waits for
        # that optimizer. A parameter that no optimizer of torch steps moves with the first of them.
        moved, others = {id(sample) for sample, *_ in self._moved}, self._owned - own
        waiting = [sample for sample in self.undone.samples if id(sample) not in moved]
        self._next = [sample for sample in waiting if id(sample.parameter) not in others]
        if _is_in_backward():
            # The backward pass still needs the other parameters, and refuses them if they have changed.
            self._next = [sample for sample in self._next if id(sample.parameter) in own]
        return self if self._next else None

    @torch.no_grad()
    def move(self) -> None:
        """Move the values that the next step is to keep."""
        for sample in self._next:
            before = sample.read().copy()
            by = FAR * max(self.undone.change, 1e-3 * _largest(before))
            sample.view().add_(by)
            self._moved.append((sample, before, by))
        self._next = []

    def around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that computes the loss and its gradients at the values that were not moved.

        LBFGS evaluates its closure several times in one step. Each time the values are moved back for it.

        Args:
            closure: the one that the optimizer's step was given.
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
        """Whether an optimizer that made a step has one of the suspected parameters itself, not a copy of it."""
        own = {id(tensor) for each in self.optimizers for group in each.param_groups for tensor in group["params"]}
        return any(id(sample.parameter) in own for sample in self.undone.samples)

    @torch.no_grad()
    def end(self) -> list[str] | None:
        """Move the values back, and return the names of parameters that were put back; None: no step was made."""
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


class EarlyCopies:
    """Finds copies of the parameters that were made before the first anchor replaced them.

    An EMA of the weights that is made before `DiLoCo(model)` begins at values that the run does not have.

    Args:
        model: with the values that it has before the first anchor.
        names: its parameters that the anchor replaces.
    """

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        self._before: dict[tuple[int, ...], list[tuple[_Sample, Values]]] = {}
        for name in names:
            parameter = find_tensor(model, name, "parameter")
            if parameter.numel() >= VALUES:  # values of a bias are often equal by chance
                sample = _Sample(name, parameter, 0)
                self._before.setdefault(tuple(parameter.shape), []).append((sample, sample.read().copy()))
        self._found: list[tuple[ReferenceType[Tensor], _Sample, Values]] = []

    def look(self) -> None:
        """Look for tensors that still have the values from before the anchor. Takes milliseconds; call it once."""
        changed: dict[tuple[int, ...], list[tuple[_Sample, Values]]] = {}
        for shape, samples in self._before.items():
            if moved := [(s, b) for s, b in samples if not np.array_equal(s.read(), b) and _largest(b)]:
                changed[shape] = moved
        own = {s.parameter.data_ptr() for samples in self._before.values() for s, _ in samples}
        for thing in _reachable_tensors() if changed else ():
            with suppress(Exception):  # a tensor without storage, or of a class that refuses to be read
                if not thing.is_floating_point() or thing.data_ptr() in own:
                    continue
                for sample, before in changed.get(tuple(thing.shape), ()):
                    values = thing.detach().reshape(-1)[:VALUES].float().cpu().numpy()
                    if np.array_equal(values, before):
                        self._found.append((ref(thing), sample, before))
        self._before = {}

    def take_anchor(self, tensors: Iterable[Tensor]) -> None:
        """Give copies among these tensors the values that the parameters have now."""
        pointers = {tensor.data_ptr() for tensor in tensors}
        left = []
        for reference, sample, before in self._found:
            tensor = reference()
            if tensor is not None and tensor.data_ptr() in pointers:
                with torch.no_grad():
                    tensor.copy_(sample.parameter)
            else:
                left.append((reference, sample, before))
        self._found = left

    def warn(self) -> None:
        """Warn, once, of copies that still have the old values."""
        found, self._found = self._found, []
        names = []
        for reference, sample, before in found:
            tensor = reference()
            if tensor is not None and np.array_equal(tensor.detach().reshape(-1)[:VALUES].float().cpu(), before):
                names.append(sample.name)
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            warnings.warn(
                f"A tensor outside the model holds {names[0]!r}{more} as it was before the first anchor, like an EMA "
                "made too early. Make copies of the weights after DiLoCo(model), or pass them to "
                "diloco.average_also().",
                stacklevel=4,
            )


def _message(name: str, when: str, optimizer: str) -> str:
    remedy = "After each round, that is when step() returns a report, copy the model's parameters into that copy"
    if when == "the first anchor":
        remedy = "Create the optimizer after DiLoCo(model), and copy the model's parameters into that copy each round"
    return (
        f"{optimizer[:1].upper()}{optimizer[1:]} put {name!r} back to its value before {when}: it keeps a copy of the "
        f"weights, or computes them from where it began. {remedy}, or create the optimizer again; README, 'What does "
        "not go with DiLoCo', has examples."
    )


class _Copy:
    """A tensor that had the values of a parameter.

    Args:
        tensor: of the parameter's shape, or a longer flat one.
        sample: the values of the parameter.
        start: the first of these values in the flat tensor.
    """

    def __init__(self, tensor: Tensor, sample: _Sample, start: int) -> None:
        self.sample = sample
        self._tensor, self._start = ref(tensor), start

    def read(self) -> Values | None:
        """Return the values that the copy has now; None: it is gone."""
        tensor = self._tensor()
        return None if tensor is None else _read([_Sample(self.sample.name, tensor, self._start)])[0]


def _copies_of(samples: Sequence[_Sample], tensors: Iterable[Tensor]) -> list[_Copy]:
    """Return those of some tensors that equal parameters now, in other memory."""
    wanted = [(sample, _read([sample])[0][: sample.n_values]) for sample in samples]
    shapes = {sample.parameter.shape for sample in samples}
    own = {sample.parameter.data_ptr() for sample in samples}
    found: list[_Copy] = []
    for tensor in tensors:
        with suppress(Exception):  # a tensor without storage, or of a class that refuses to be read
            is_flat = tensor.dim() == 1 and tensor.device.type == "cpu" and tensor.numel() <= MOST_FLAT
            if not (tensor.shape in shapes or is_flat) or not tensor.is_floating_point() or tensor.data_ptr() in own:
                continue
            for sample, values in wanted:
                if not values.any():
                    continue
                if tensor.shape == sample.parameter.shape:
                    copy = _Copy(tensor, sample, sample.start)
                    if np.array_equal(_rounded(copy.read(), sample)[: len(values)], values):
                        found.append(copy)
                elif is_flat and tensor.numel() > sample.parameter.numel():
                    flat = _rounded(tensor.detach().float().numpy(), sample)
                    starts = np.flatnonzero(flat == values[0])[:100]
                    is_here = (start for start in starts if np.array_equal(flat[start : start + len(values)], values))
                    found += [_Copy(tensor, sample, int(start)) for start in is_here]
    return found


def _rounded(values: Values | None, sample: _Sample) -> Values:
    """Return float32 values as they are in the parameter's type, which may have fewer digits."""
    exact = torch.from_numpy(np.zeros(0, np.float32) if values is None else values)
    rounded: Values = exact.to(sample.parameter.dtype).float().numpy()
    return rounded


def _tensors_in(things: Iterable[Any], depth: int = 4) -> Iterator[Tensor]:
    """Yield the tensors that optimizers hold in their states and attributes."""
    for thing in things:
        if isinstance(thing, Tensor):
            yield thing
        elif depth and isinstance(thing, Mapping):
            yield from _tensors_in(thing.values(), depth - 1)
        elif depth and isinstance(thing, (list, tuple)):
            yield from _tensors_in(thing, depth - 1)
        elif depth and isinstance(thing, Optimizer):
            yield from _tensors_in(vars(thing).values(), depth - 1)


def warn_of_own_averages(model: nn.Module, averaged: Container[int]) -> None:
    """Warn, once, of an average of the weights that each replica makes for itself, such as an EMA of timm.

    It is found by the name of its class, among all that the caller's variables lead to. Its values say nothing: right
    after it was made they are the model's, and a copy of the best model looks the same.

    Args:
        model: the model that is trained.
        averaged: the `data_ptr()` of all tensors that `average_also()` averages over the replicas.

    Example:
        warn_of_own_averages(model, {tensor.data_ptr() for tensor in also})
    """
    own = {parameter.data_ptr() for parameter in model.parameters()}
    shapes = {tuple(p.shape) for p in model.parameters() if p.requires_grad and p.numel() >= VALUES}
    for thing in _reachable_objects():
        if AVERAGE.search(type(thing).__name__) is None:
            continue
        copies: list[Tensor] = []
        with suppress(Exception):  # an object of the user's may refuse to be looked into
            held = (
                [*thing.parameters(), *thing.buffers()] if isinstance(thing, nn.Module) else _tensors_in([vars(thing)])
            )
            copies = [each for each in held if tuple(each.shape) in shapes and each.data_ptr() not in own]
        if not copies or any(each.data_ptr() in averaged for each in copies):
            continue
        warnings.warn(
            f"{type(thing).__name__} averages the weights of this replica alone, so each replica ends with another "
            "average. Pass it to diloco.average_also() before the first step. In a trainer, call "
            "DiLoCoCallback.diloco.average_also() in on_train_begin of a callback that comes after DiLoCoCallback.",
            stacklevel=3,
        )
        return


def _named_tensors(values: Mapping[Any, Any], depth: int = 3) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in the state of one parameter, which may be in mappings and lists, with their innermost key."""
    for key, value in values.items():
        parts = value if isinstance(value, (list, tuple)) else (value,)
        for part in parts:
            if isinstance(part, Tensor):
                yield str(key), part
            elif depth and isinstance(part, Mapping):
                yield from _named_tensors(part, depth - 1)


def _wrappers_with_state() -> Iterator[Any]:
    """Yield objects of the caller's with a `step` and a `state` of their own, as optimizers around another have."""
    for thing in _reachable_objects():
        kind = type(thing)
        if callable(getattr(kind, "step", None)) and not issubclass(kind, nn.Module):
            state = getattr(thing, "__dict__", {}).get("state")
            if isinstance(state, dict) and any(isinstance(key, Tensor) for key in islice(state, 1)):
                yield thing


def _reachable_tensors() -> Iterator[Tensor]:
    """Yield the tensors that the variables of the code that called DiLoCo lead to."""
    for thing in _reachable_objects():
        if issubclass(type(thing), Tensor):  # isinstance would call __class__ of proxies
            yield thing


def _reachable_objects() -> Iterator[Any]:
    """Yield the objects that the variables of the code that called DiLoCo lead to, near ones first.

    Not `gc.get_objects()` or `gc.get_referrers()`: they hand out tuples that other threads are still building, which
    then fail to build them. They also take seconds in a process with millions of objects.
    """
    things = deque[tuple[Any, int]]()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in NOT_USERS:
            things += [(value, 0) for value in (*frame.f_locals.values(), *frame.f_globals.values())]
        frame = frame.f_back
    seen = set[int]()
    kept = list[Any]()  # so that no id in `seen` is given to a new object meanwhile
    # Near objects come first. Otherwise a data set of millions of items would use up the limit.
    while things and len(seen) < MOST_OBJECTS:
        thing, depth = things.popleft()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        kept.append(thing)
        yield thing
        if depth < MOST_DEPTH and not issubclass(type(thing), Tensor):
            with suppress(Exception):  # objects of the user's may refuse to be looked into
                parts = islice(_parts_of(thing), MOST_PARTS)
                things += [(part, depth + 1) for part in parts if type(part) not in SCALARS]


def _parts_of(thing: Any) -> Iterable[Any]:
    """Return what an object holds, as far as a copy of weights may be in it.

    Containers are read as the built-in ones that they are, since a user's class may load data in its own `values()`.
    """
    kind = type(thing)
    if kind in SCALARS or isinstance(thing, (type, ModuleType)):
        return ()
    if kind.__module__.partition(".")[0] in ("diloco", "executors"):
        return ()  # they lead to other replicas, where these are threads of one process
    if isinstance(thing, OrderedDict) and hasattr(thing, "_metadata"):
        return ()  # a copy of `model.state_dict()`, as scripts keep one of their best model
    own: Iterable[Any] = getattr(thing, "__dict__", {}).values()
    if isinstance(thing, dict):
        return chain(dict.values(thing), own)
    containers: tuple[Any, ...] = (list, tuple, set, deque)
    for container in containers:
        if isinstance(thing, container):
            return chain(container.__iter__(thing), own)
    if isinstance(thing, MethodType):
        return [thing.__self__]
    if isinstance(thing, FunctionType):
        return (cell.cell_contents for cell in thing.__closure__ or ())
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    return own


def _named(optimizers: Sequence[Optimizer]) -> str:
    """Name the optimizers that made a step, with an object that wraps one, as for master weights."""
    wrappers = dict[int, str]()
    wanted = set(map(id, optimizers))
    for thing in _reachable_objects() if wanted else ():
        kind = type(thing)
        with suppress(Exception):  # a name is worth no second error
            is_wrapper = callable(getattr(kind, "step", None)) and not kind.__module__.startswith(("torch.", "diloco."))
            if not is_wrapper:
                continue
            for part in vars(thing).values():
                for held in part if type(part) in (list, tuple) else (part,):
                    if id(held) in wanted and held is not thing and kind.__name__ != type(held).__name__:
                        wrappers.setdefault(id(held), kind.__name__)
    names = [
        f"{wrappers[id(each)]} (around {type(each).__name__})" if id(each) in wrappers else type(each).__name__
        for each in optimizers
    ]
    return f"optimizer {' or '.join(dict.fromkeys(names))}" if names else "the optimizer"


def _is_near(value: Tensor, parameter: Tensor) -> bool:
    """Return whether a tensor is within a fifth of a parameter, by norm, and not zero."""
    norm = float(parameter.float().norm())
    return norm > 0 and float((value.to(parameter.device).float() - parameter.float()).norm()) <= 0.2 * norm


def _distance(a: Values, b: Values) -> float:
    return float(np.linalg.norm(a - b))


def _largest(values: Values) -> float:
    return float(np.abs(values).max()) if values.size else 0.0
