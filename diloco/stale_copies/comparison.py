"""Compares the parameters around a merge, and decides whether an optimizer undoes the rounds."""

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
from diloco.stale_copies.samples import VALUES, Sample, Values, distance, largest, read
from diloco.stale_copies.search import (
    Copy,
    copies_of,
    is_near,
    named_tensors,
    names_of,
    reachable_tensors,
    tensors_in,
    wrappers_with_state,
)
from diloco.tensor_names import by_clean_name, find_tensor

MOST_TENSORS = 6
"""Parameters compared after one merge; the next merge compares the next ones. 6 take about 40 microseconds."""
CLEARED = 3
"""Suspicions that the test refuted, after which an optimizer is trusted."""
MOST_SEARCHES = 10
"""Searches for copies, each of which takes milliseconds; then an optimizer without copies is trusted."""
STRIKES = 3
"""Merges in a row, each clearly undone, that convict an optimizer whose copy cannot be found, or which cannot be tested
because it is none of torch."""
FEW = 8
"""A parameter with fewer values, as the bias of one output, is near its old value by chance too often."""
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
        self._samples: list[Sample] = []
        """The samples around the merge that is under way; empty between two merges."""
        self._before: Values | None = None
        """(n_samples, VALUES): what was read before it."""
        self._merge: Merge | None = None
        """The last merge, until the next step was made."""
        self._n_waits = 0
        """Calls of `check` since that merge in which no compared value had changed."""
        self._later: LaterSteps | None = None
        """Compares the steps behind the first one with a merge, until the next merge."""
        self._n_later = 0
        """Merges after which it did so."""
        self._takes_back: list[str] = []
        """Merges of which a later step has taken back much, as the message names them."""
        self._test: MoveTest | None = None
        self._n_cleared = self._n_strikes = self._n_searches = 0
        self._copies: list[Copy] = []
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
            self._samples.append(Sample(name, parameter, start))
        self._before = read(self._samples)
        self._next += n

    def after_merge(self, when: str) -> None:
        """Read the values that the merge has changed.

        Args:
            when: names the merge in an error, as in "round 3".
        """
        samples, self._samples = self._samples, []
        self._merge, self._later, self._n_waits = None, None, 0
        if samples and self._before is not None:
            self._merge = Merge(samples, self._before, read(samples), when)
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
            if distance(was, merged) <= 1e-6 * float(np.linalg.norm(merged)):
                continue  # this merge has not moved it
            if distance(values, merged) < distance(values, was):
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
            for key, value in named_tensors(values):
                if key in self._warned_of or value.shape != parameter.shape:
                    continue
                if value.data_ptr() in averaged or not is_near(value, parameter.detach()):
                    continue
                self._warned_of.add(key)
                warnings.warn(
                    f"{type(optimizer).__name__} keeps a copy of {names[parameter]!r} in its state ({key!r}), which "
                    "rounds do not change. Average such copies with diloco.average_also(): see "
                    "docs/explanation/what-does-not-fit.md.",
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
        # An optimizer that gathers gradients for several steps writes its copy at the last of them. Until then no
        # value changes, and a comparison now would find the merge in place.
        merge, now = self._merge, read(self._merge.samples)
        if self._n_waits < MOST_WAITS and merge.is_in_place(now):
            self._n_waits += 1
            return
        self._merge = None
        if self.is_trusted or self._copies:
            return
        if self._n_later < LATER_MERGES and sum(sample.n_values for sample in merge.samples) >= ENOUGH:
            self._n_later += 1
            self._later = LaterSteps(merge, now)
        undone = None if merge.is_kept(now) else Undone.of(merge, now)
        if undone is None:
            self._n_strikes = 0
            return
        self._n_searches += 1
        self._n_strikes = self._n_strikes + 1 if undone.is_clear else 0
        # An optimizer that the loop has replaced by a new one is gone, and so is its weak reference.
        owners = [each for owner in self._owners if (each := owner()) is not None]
        tensors = tensors_in(owners) if owners else reachable_tensors()
        if (found := copies_of(undone.samples, tensors)) or self._n_strikes >= STRIKES:
            self._test = MoveTest(undone.samples, undone.change, found, merge.when, owners=owners)

    def _look_later(self, later: LaterSteps) -> None:
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
            "copy of the weights that rounds do not change. Average that copy with diloco.average_also(): see "
            "docs/explanation/what-does-not-fit.md.",
            stacklevel=4,
        )

    def _end_test(self, test: MoveTest) -> None:
        self._test = None
        names = test.end()
        if names is not None and not names and not test.was_of_owner:
            # The values stayed moved, and the optimizer that made the step does not step them: it may write its copy
            # later, as before the next forward pass. So only the strikes count.
            names = None
        if names is not None and not names:
            self._n_cleared, self._n_strikes = self._n_cleared + 1, 0
        elif names and test.copies:
            self._named = names_of(test.optimizers)
            self._copies = [copy for copy in test.copies if copy.sample.name in names]
        elif names or self._n_strikes >= STRIKES:  # without names, the optimizer is none of torch
            raise StaleCopyError(
                _message((names or [sample.name for sample in test.samples])[0], test.when, names_of(test.optimizers))
            )

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


class Merge:
    """The values that a merge has changed.

    Args:
        samples: the compared values.
        before, after: (n_samples, VALUES), the values before and after it; zeros where a sample has fewer.
        when: names the merge in an error, as in "round 3".
    """

    def __init__(self, samples: list[Sample], before: Values, after: Values, when: str) -> None:
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


class Undone:
    """The samples that one step after a merge seems to have put back.

    Args:
        samples: nearer to their values before the merge than to the merged ones.
        change: the largest change of any compared value, by the merge or since.
        is_clear: whether so many values are back that chance, or one large step, cannot have done it.
    """

    def __init__(self, samples: Sequence[Sample], change: float, *, is_clear: bool) -> None:
        self.samples, self.change, self.is_clear = samples, change, is_clear
        self.names = [sample.name for sample in samples]

    @classmethod
    def of(cls, merge: Merge, now: Values) -> Undone | None:
        """Compare the values of a merge with the values now. None: no parameter is nearer to its values before it.

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
    """Looks for a step that takes back much of a merge, some steps after the first one.

    Lookahead steps the parameters themselves and mixes in its slow copy every few steps only. Such a step leads
    straight back, to where the values were before the merge or somewhat earlier. The training's own steps may go back
    as well, since each replica has its own data, but gradients do not point straight at old values.

    Args:
        merge: the merge.
        now: (n_samples, VALUES), the values one step later.
    """

    def __init__(self, merge: Merge, now: Values) -> None:
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
        last, self._now = self._now, read(self._samples)
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


def _message(name: str, when: str, optimizer: str) -> str:
    remedy = "After each round, that is when step() returns a report, copy the model's parameters into that copy"
    if when == "the first anchor":
        remedy = "Create the optimizer after DiLoCo(model), and copy the model's parameters into that copy each round"
    return (
        f"{optimizer[:1].upper()}{optimizer[1:]} put {name!r} back to its value before {when}: it keeps a copy of the "
        f"weights, or computes them from where it began. {remedy}, or create the optimizer again. Examples are "
        "in docs/explanation/what-does-not-fit.md."
    )
