"""Compares parameters before a merge, after it and one step later, and decides if an optimizer undid the merge."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.optim.optimizer import Optimizer

from diloco.errors import StaleCopyError
from diloco.fragments import Fragment
from diloco.stale_copies.move_test import MoveTest
from diloco.stale_copies.optimizer_hook import unwatch, watch
from diloco.stale_copies.samples import VALUES, Sample, Values, distance, largest, read_samples
from diloco.stale_copies.search import (
    Copy,
    copies_of,
    is_close_to,
    named_tensors,
    names_of,
    reachable_tensors,
    tensors_in,
    wrappers_with_state,
)
from diloco.tensor_names import by_clean_name, find_tensor

MOST_TENSORS = 6
"""Number of parameters that are compared after one merge.

The next merge compares the next parameters. 6 parameters take about 40 microseconds.
"""
CLEARED = 3
"""Number of suspicions that the test refuted, after which an optimizer is trusted."""
MOST_SEARCHES = 10
"""Number of searches for copies, after which an optimizer without copies is trusted. Each search takes milliseconds."""
STRIKES = 3
"""Number of clearly undone merges in a row that prove a copy if the optimizer cannot be tested.

A tensor with the values of a parameter must have been found, or an optimizer of torch that steps such tensors.
Otherwise the merges cause a warning only, because gradients may lead straight back to the values before a merge.
"""
FEW = 8
"""Least number of values of a compared parameter.

A parameter with fewer values, such as the bias of one output, returns to its old value by chance too often.
"""
CLEARLY = 0.75
"""A merge was clearly undone if all compared values are back to within this share of their change by the merge."""
ENOUGH = 64
"""Least number of values, of at least two parameters, for that decision. A few values may return by chance."""
MOST_WAITS = 64
"""After this number of calls of `check` in which no compared value has changed, a merge is no longer compared."""
LATER_MERGES, LATER_STEPS = 8, 16
"""After each of the first 8 merges of a run, 16 steps are compared, because Lookahead mixes in its copy every 5 steps.
Later in the run, nothing is read between two rounds."""
TAKEN_BACK = 0.2
"""Share of a merge that one of these later steps must undo to be suspicious."""
STRAIGHT = 0.9
"""Least correlation of such a step with the direction back to the values before the merge.

Normal steps of common optimizers reached 0.76 in tests.
"""


class StaleCopies:
    """Watches one model for optimizers that restore the values from before a merge.

    Args:
        model: the model whose trainable parameters are shared.
        fragments: its fragments. Only parameters are compared, because buffers are statistics.

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
        self._samples: list[Sample] = []
        """The samples that are compared around the current merge. Empty between two merges."""
        self._before: Values | None = None
        """The values before the current merge, with shape (n_samples, VALUES)."""
        self._merge: Merge | None = None
        """The last merge. None once the next step was compared with it."""
        self._n_waits = 0
        """Calls of `check` since that merge in which no compared value had changed."""
        self._later: LaterSteps | None = None
        """Compares the steps after the first one with a merge, until the next merge."""
        self._n_later = 0
        """Number of merges after which several steps were compared."""
        self._takes_back: list[str] = []
        """Merges that a later step has undone in part, as text for the message."""
        self._test: MoveTest | None = None
        self._n_cleared = self._n_strikes = self._n_searches = 0
        self._copies: list[Copy] = []
        """Copies of parameters that the optimizer seems to have. The next merge shows if they follow the rounds."""
        self._looks = False
        """True if the copies will be compared at the next optimizer step."""
        self._stale = ""
        """A parameter whose copy did not take the merged values."""
        self._named = "the optimizer"
        """The optimizer, as text for the message."""
        self._optimizers: list[Optimizer] = []
        """The optimizers that make a step before the first `check`."""
        self._owners: list[ReferenceType[Optimizer]] = []
        """The optimizers that step the parameters themselves, and not copies. If there are any, only these are searched
        and tested.
        """
        self._watches_first_step = True
        watch(self._note_optimizer)
        self._warned_of: set[str] = set()

    @property
    def is_trusted(self) -> bool:
        """True if nothing is compared any more, because the optimizer was tested often enough."""
        return self._n_cleared >= CLEARED or (self._n_searches >= MOST_SEARCHES and not self._n_strikes)

    def before_merge(self) -> None:
        """Read the values that a merge will change. A second call before `after_merge` does nothing."""
        if self._samples or self.is_trusted:
            return
        n = min(MOST_TENSORS, len(self.names))
        turn = [self.names[(self._next + i) % len(self.names)] for i in range(n)]
        self._samples = list({id(copy.sample): copy.sample for copy in self._copies}.values())
        for number, name in enumerate(turn[: max(0, n - len(self._samples))]):
            parameter = find_tensor(self._model, name, "parameter")
            # Compare other values each time, because most rows of an embedding have not changed since the last round.
            start = (self._next * 7919 + number * 104729) % max(1, parameter.numel() - VALUES + 1)
            self._samples.append(Sample(name, parameter, start))
        self._before = read_samples(self._samples)
        self._next += n

    def after_merge(self, when: str, *, may_return: bool = False) -> None:
        """Read the values that the merge has changed.

        Args:
            when: the merge in the words of an error, such as "round 3".
            may_return: True if gradients may lead straight back to the values before the merge, as after a round with
                the wrong work of another replica. Then only a copy that is found is a proof.
        """
        samples, self._samples = self._samples, []
        self._merge, self._later, self._n_waits = None, None, 0
        if samples and self._before is not None:
            self._merge = Merge(samples, self._before, read_samples(samples), when, may_return=may_return)
            if self._copies and not self._looks:
                self._looks = True
                watch(self._look_at_copies)

    def _look_at_copies(self, optimizer: Optimizer) -> None:
        """Compare the copies with the merged values. Called before the first optimizer step after a merge."""
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
            if distance(was, merged) <= 1e-6 * float(np.linalg.norm(merged)):
                continue  # this merge has not changed the copied parameter
            if distance(values, merged) < distance(values, was):
                self._n_cleared, self._copies = CLEARED, []  # the copy has the merged values, so it follows the rounds
                return
            stale = copy.sample.name
        self._stale = stale

    def _note_optimizer(self, optimizer: Optimizer) -> None:
        if all(optimizer is not other for other in self._optimizers):
            self._optimizers.append(optimizer)

    def warn_of_copies(self, optimizer: Any, averaged: Collection[int]) -> None:
        """Warn about states of an optimizer that are copies of its parameters, once for each key.

        A state that differs by less than a fifth from its parameter counts as a copy. An average of gradients is not
        that near by chance.

        Args:
            optimizer: any object. An object without a `state` as in optimizers of torch causes no warning.
            averaged: the memory addresses of tensors that `average_also` averages.
        """
        state = getattr(optimizer, "state", None)
        names = {p: name for name, p in by_clean_name(self._model, self._model.named_parameters()).items()}
        entries = state.items() if isinstance(state, dict) else ()
        looked = [(p, v) for p, v in entries if p in names and isinstance(v, dict) and p.numel() >= VALUES]
        for parameter, values in looked[:MOST_TENSORS]:  # an optimizer treats all parameters in the same way
            for key, value in named_tensors(values):
                if key in self._warned_of or value.shape != parameter.shape:
                    continue
                if value.data_ptr() in averaged or not is_close_to(value, parameter.detach()):
                    continue
                self._warned_of.add(key)
                warnings.warn(
                    f"{type(optimizer).__name__} keeps a copy of {names[parameter]!r} in its state ({key!r}), which "
                    "rounds do not change. Average such copies with diloco.average_also(): see "
                    "docs/explanation/what-does-not-fit.md.",
                    stacklevel=4,
                )

    def check(self, averaged: Callable[[], Collection[int]] = tuple) -> None:
        """Compare the values after the first step that follows a merge. If that step was tested, evaluate the test.

        Args:
            averaged: returns the memory addresses of tensors that `average_also` averages.

        Raises:
            StaleCopyError: the optimizer has put a parameter back.
        """
        if self._watches_first_step:
            self._watches_first_step = False
            unwatch(self._note_optimizer)
            own = set(map(id, self._model.parameters()))
            for optimizer in (*self._optimizers, *wrappers_with_state()):
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
        # An optimizer that accumulates gradients over several steps writes its copy at the last of them. Until then no
        # value changes, and a comparison would find the merge in place.
        merge, now = self._merge, read_samples(self._merge.samples)
        if self._n_waits < MOST_WAITS and merge.is_in_place(now):
            self._n_waits += 1
            return
        self._merge = None
        if self.is_trusted or self._copies:
            return
        n_values = sum(sample.n_values for sample in merge.samples)
        if self._n_later < LATER_MERGES and n_values >= ENOUGH and not merge.may_return:
            self._n_later += 1
            self._later = LaterSteps(merge, now)
        undone = None if merge.is_kept(now) else Undone.of(merge, now)
        if undone is None:
            self._n_strikes = 0
            return
        self._n_searches += 1
        if not merge.may_return:
            self._n_strikes = self._n_strikes + 1 if undone.is_clear else 0
        # If the loop has replaced an optimizer by a new one, the weak reference to the old one is dead.
        owners = [each for owner in self._owners if (each := owner()) is not None]
        tensors = tensors_in(owners) if owners else reachable_tensors()
        if (found := copies_of(undone.samples, tensors)) or self._n_strikes >= STRIKES:
            self._test = MoveTest(undone.samples, undone.change, found, merge.when, owners=owners)

    def _look_later(self, later: LaterSteps) -> None:
        """Warn once about an optimizer that undoes merges some steps later, as Lookahead does."""
        share = later.look()
        if later.is_over:
            self._later = None
        if share is None:
            return
        self._takes_back.append(f"{share:.0%} of {later.when}")
        if len(self._takes_back) < 2:  # one large step may have that direction by chance
            return
        self._n_later = LATER_MERGES
        warnings.warn(
            f"Single steps undid {' and '.join(self._takes_back)}, so the optimizer mixes in a copy of the weights "
            "that rounds do not change, like Lookahead. Average that copy with diloco.average_also(): see "
            "docs/explanation/what-does-not-fit.md.",
            stacklevel=4,
        )

    def _end_test(self, test: MoveTest) -> None:
        self._test = None
        names = test.end()
        if names is not None and not names and not test.was_of_owner:
            # The values kept their move, but the optimizer that made the step does not step these parameters itself. It
            # may write its copy later, for example before the next forward pass. So only several clearly undone merges
            # are a proof.
            names = None
        if names is not None and not names:
            self._n_cleared, self._n_strikes = self._n_cleared + 1, 0
        elif names and test.copies:
            self._named = names_of(test.optimizers)
            self._copies = [copy for copy in test.copies if copy.sample.name in names]
        elif names or (self._n_strikes >= STRIKES and (test.copies or test.optimizers)):
            # Without names, the optimizer is not one of torch, or one of torch steps tensors beside the parameters.
            raise StaleCopyError(
                _message((names or [sample.name for sample in test.samples])[0], test.when, names_of(test.optimizers))
            )
        elif self._n_strikes >= STRIKES:
            # Near its minimum, a replica without any copy undoes each merge, too. So this does not prove a copy, and
            # more rounds would not prove it either.
            self._n_strikes, self._n_searches = 0, MOST_SEARCHES
            warnings.warn(
                f"The first step after each of {STRIKES} rounds up to {test.when.removeprefix('round ')} put "
                f"{test.samples[0].name!r} back. Either the optimizer keeps a copy of the weights (see "
                "docs/explanation/what-does-not-fit.md), or the gradients of this replica lead away from the others: "
                "compare the losses of all ranks.",
                stacklevel=4,
            )

    def trust(self) -> None:
        """Compare nothing from now on. Used for tensors that no optimizer steps."""
        self.close()
        self._n_cleared = CLEARED

    def close(self) -> None:
        """Stop watching, and end a test that is running."""
        unwatch(self._note_optimizer)
        unwatch(self._look_at_copies)
        if self._test is not None:
            self._test.end()
            self._test = None


class Merge:
    """The values that a merge has changed.

    Args:
        samples: the compared values.
        before: (n_samples, VALUES), the values before the merge. Zero if a sample has fewer values.
        after: (n_samples, VALUES), the values after the merge.
        when: the merge in the words of an error, such as "round 3".
        may_return: True if gradients may lead straight back to the values before the merge.

    Example:
        Merge(samples, before, read_samples(samples), "round 3")
    """

    def __init__(
        self, samples: list[Sample], before: Values, after: Values, when: str, *, may_return: bool = False
    ) -> None:
        self.samples, self.before, self.after, self.when = samples, before, after, when
        self.may_return = may_return
        # Computed now, as part of the merge, so that the user's next step does not take longer.
        self.moved = after - before
        self._halfway = before + np.float32(0.5) * self.moved
        self._after_bytes = after.tobytes()

    def is_in_place(self, now: Values) -> bool:
        """Return True if no value has changed since the merge.

        Args:
            now: (n_samples, VALUES), the values now.
        """
        return now.tobytes() == self._after_bytes

    def is_kept(self, now: Values) -> bool:
        """Return True if no sample is nearer to its values before the merge than to its values after it.

        Args:
            now: (n_samples, VALUES), the values now.
        """
        # A plain sum, because `einsum` takes three times as long if it was not called just before. A value that is not
        # finite gets an error of its own when it is sent, so numpy need not warn of it.
        with np.errstate(invalid="ignore", over="ignore"):
            along = np.add.reduce((now - self._halfway) * self.moved, axis=1)
        return float(min(along.tolist())) >= 0


class Undone:
    """The samples that one step after a merge seems to have set back to earlier values.

    Args:
        samples: the samples that are nearer to their values before the merge.
        change: the largest change of any compared value, by the merge or since.
        is_clear: True if so many values are back that chance, or one large step, cannot be the cause.

    Example:
        Undone.of(merge, read_samples(merge.samples))
    """

    def __init__(self, samples: Sequence[Sample], change: float, *, is_clear: bool) -> None:
        self.samples, self.change, self.is_clear = samples, change, is_clear
        self.names = [sample.name for sample in samples]

    @classmethod
    def of(cls, merge: Merge, now: Values) -> Undone | None:
        """Compare the values of a merge with the values now. None: no parameter was put back.

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
        change = max(largest(back), largest(ahead), largest(moved))
        counted = is_moved & is_large
        n_values = sum(sample.n_values for sample, each in zip(samples, counted, strict=True) if each)
        is_back = float(back_square[counted].sum()) <= CLEARLY**2 * float(moved_square[counted].sum())
        is_clear = is_back and n_values >= ENOUGH and int(counted.sum()) > 1
        return cls(near, change, is_clear=is_clear)


class LaterSteps:
    """Finds a step that undoes much of a merge, some steps after the first one.

    Lookahead steps the parameters themselves, and mixes in its slow copy every few steps only. Such a step goes
    straight back to the values before the merge, or to somewhat earlier ones. Normal steps may also go back, because
    each replica has its own data. But gradients do not point straight at old values.

    Args:
        merge: the merge.
        now: (n_samples, VALUES), the values one step later.

    Example:
        later = LaterSteps(merge, now)
        share = later.look()  # after each step
    """

    def __init__(self, merge: Merge, now: Values) -> None:
        self.when = merge.when
        self._samples, self._before, self._merge, self._now = merge.samples, merge.before, merge.moved, now
        back, merged = merge.after - now, float(np.vdot(self._merge, self._merge))
        # Normal steps may also lead back: gradually by momentum, or at once if the gradient points back. Compare with
        # these first steps.
        self._usual = [float(np.vdot(back, self._merge)) / merged if merged else 0.0] * 2
        """For each of the two examined directions, the largest share that one step has undone so far."""
        self._n_calls = self._n_steps = 0

    @property
    def is_over(self) -> bool:
        """True if enough steps were compared, or if values no longer change."""
        return self._n_steps >= LATER_STEPS or self._n_calls >= MOST_WAITS

    def look(self) -> float | None:
        """Compare one more step. Return the share of the merge that the step undid, if the share is large. Otherwise
        return None.
        """
        self._n_calls += 1
        last, self._now = self._now, read_samples(self._samples)
        step = self._now - last
        if not step.any():
            return None
        self._n_steps += 1
        merged = float(np.vdot(self._merge, self._merge))
        for number, way in enumerate((self._merge, last - self._before)):
            along, square = -float(np.vdot(step, way)), float(np.vdot(way, way))
            if not 0 < square <= 4 * merged:
                continue  # normal training steps have made most of this distance
            share, usual = along / square, self._usual[number]
            self._usual[number] = max(usual, share)
            is_straight = along > 0 and along**2 >= STRAIGHT**2 * square * float(np.vdot(step, step))
            # An optimizer that mixes in a copy goes back no further than to that copy. A larger step is a normal
            # training step.
            if is_straight and max(TAKEN_BACK, 3 * usual) <= share <= 1:
                self._n_steps = LATER_STEPS
                return share
        return None


def _message(name: str, when: str, optimizer: str) -> str:
    remedy = "After each round, that is when step() returns a report, copy the model's parameters into that copy"
    if when == "the first anchor":
        remedy = "Create the optimizer after DiLoCo(model), and copy the model's parameters into that copy each round"
    return (
        f"{optimizer[:1].upper()}{optimizer[1:]} put {name!r} back to its value before {when}: it keeps a copy of the "
        f"weights, or computes them from its first weights. {remedy}, or create the optimizer again. Examples are "
        "in docs/explanation/what-does-not-fit.md."
    )
