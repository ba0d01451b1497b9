"""Where a replica is between two rounds, by its own count of steps and its own clock.

A replica is *in phase* when it begins its inner steps with the others and meets them at their end. A replica that came
back, joined or was left out is *out of phase*: it presents itself at once with the work it has, trains on, and adopts
the seal at the step at which it sees it. Durations are a replica's own; no clock is compared with another's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

STEPS_APART = 2
"""Steps of the slowest replica that others wait for it, by the clock: in the midst of one the mean arrives, where work
left before it, and in that of another the next round is due."""


@dataclass(slots=True)
class RoundPlan:
    """How the inner steps of a run are divided into entries of the log, or its time.

    With a known total every fragment has its last round at the last step: the last entries, one for each fragment, are
    due there, one after the other.

    A run that was extended has several totals, each with its own last entries. The steps up to one total, and from
    there to the next, are a *stage*. So replicas that know of an extension, and others that do not know of it yet,
    agree on all entries up to the earlier total.

    By the clock, what is called a step of the plan is the time of one entry: `steps_per_entry` is 1, and each replica
    makes as many inner steps in it as it can.
    """

    steps_per_entry: int = 1
    """Inner steps from one fragment's round to the next fragment's."""
    n_fragments: int = 1
    overlap_steps: float | None = 0
    """Inner steps between sending a fragment and applying its mean; None: as few as the mean needs to arrive."""
    total_steps: int | None = None
    entry_s: float | None = None
    """By the clock: seconds from one fragment's round to the next fragment's, by each replica's own."""
    earlier: tuple[int, ...] = ()
    """The totals before the run was extended to `total_steps`, in ascending order."""
    ended_by: tuple[int, ...] = ()
    """The ranks that ended the run before its planned end; none if it was not ended so."""
    _stages: tuple[_Stage, ...] = field(init=False, repr=False, compare=False)
    """Derived from the totals: a training loop asks for them at every step."""

    def __post_init__(self) -> None:
        self._stages = tuple(self._divided())

    def extend(self, total: int) -> bool:
        """Add a stage up to a larger total. Return False, and change nothing, if the plan has no total or a larger one.

        Args:
            total: in the unit of `total_steps`.
        """
        if self.total_steps is None or total <= self.total_steps or self.ended_by:
            return False
        self.earlier, self.total_steps = (*self.earlier, self.total_steps), total
        self._stages = tuple(self._divided())
        return True

    def end_after(self, entry: int, ranks: tuple[int, ...]) -> bool:
        """End the plan at the step of an entry. Return False, and change nothing, if a stage ends there.

        Each other fragment has one more round, at the same step: the entries behind this one.

        At the end of a stage a wish changes nothing, also if the run was extended beyond it. Replicas that know of the
        extension and replicas that do not know of it yet must decide alike. The wish travels with the next round.

        Args:
            entry: the entry whose round is the first of the last ones.
            ranks: the replicas that asked for the end.
        """
        end = self.step_before(entry) + self.steps_per_entry
        stage_end = self._stage_of(entry).end_step
        if stage_end is not None and end >= stage_end:
            return False
        self.ended_by = ranks
        self.earlier, self.total_steps = tuple(total for total in self.earlier if total < end), end
        self._stages = tuple(self._divided())
        return True

    @property
    def overlaps(self) -> bool:
        """Whether training goes on while a contribution travels."""
        return self.overlap_steps != 0

    @property
    def inner_steps(self) -> int:
        """Inner steps from one round of a fragment to its next."""
        return self.steps_per_entry * self.n_fragments

    @property
    def n_entries(self) -> int | None:
        """How many entries a planned run has."""
        return self._stages[-1].end_entry

    @property
    def last_entry(self) -> int | None:
        return None if self.n_entries is None else self.n_entries - 1

    @property
    def last_entries(self) -> tuple[int, ...]:
        """The last entry of each stage; empty if no total is known."""
        return tuple(stage.end_entry - 1 for stage in self._stages if stage.end_entry is not None)

    def step_before(self, position: int) -> int:
        """Return the run's step at which everything before an entry has been adopted."""
        stage = self._stage_of(position)
        step = stage.first_step + (position - stage.first_entry) * self.steps_per_entry
        return step if stage.end_step is None else min(step, stage.end_step)

    def position_at(self, step: int) -> int:
        """Return how many entries have been adopted when a replica in phase has made a step of the run."""
        for stage in self._stages:
            if stage.end_step is None or step < stage.end_step or stage.end_step == self.total_steps:
                break
        position = stage.first_entry + max(0, step - stage.first_step) // self.steps_per_entry
        if stage.end_step is None or stage.end_entry is None:
            return position
        # At the last step of a stage every fragment has a round, so that no entry before its end is the answer.
        return stage.end_entry if step >= stage.end_step else min(position, stage.end_entry - self.n_fragments)

    def end_of(self, position: int) -> int | None:
        """Return the last step of the stage that contains an entry. None: no total is known."""
        return self.total_steps if not self.earlier else self._stage_of(position).end_step

    def is_over(self, position: int) -> bool:
        """Return whether nothing is planned from this entry on: one more would be a round alone."""
        return self.last_entry is not None and position > self.last_entry

    def is_final(self, entry: int) -> bool:
        """Return whether this is the last planned round of its fragment, in the whole plan or before an extension."""
        return any(last - self.n_fragments < entry <= last for last in self.last_entries)

    def _divided(self) -> Iterator[_Stage]:
        first_entry, first_step = 0, 0
        for end in (*self.earlier, self.total_steps):
            n = None if end is None else -(-(end - first_step) // self.steps_per_entry) + self.n_fragments - 1
            end_entry = None if n is None else first_entry + n
            yield _Stage(first_entry, first_step, end_entry, end)
            first_entry, first_step = end_entry or 0, end or 0

    def _stage_of(self, position: int) -> _Stage:
        stages = self._stages
        return next((s for s in stages if s.end_entry is None or position < s.end_entry), stages[-1])


class _Stage(NamedTuple):
    """The entries and steps of a plan up to one of its totals."""

    first_entry: int
    first_step: int
    end_entry: int | None
    """The entry behind its last one. None: no total is known."""
    end_step: int | None


# More than 20 methods: the count of steps, the clock and the plan decide together what is due, and each method is one
# question about that state. Both threads read it, and only the training thread changes the count.
class Phase:
    """Counts the steps of one replica, as it made them and as the run counts them.

    The training counts; the rounds, which may go on beside it, only read what it counted, one value at a time.
    """

    def __init__(self, plan: RoundPlan, clock: Callable[[], float]) -> None:
        self.base_step: float = 0
        """The run's step when the newest entry was adopted."""
        self.position = 0
        """The next entry to merge."""
        self.steps_since: float = 0
        """Steps that the run counts since then; negative where an entry was adopted before its round was due."""
        self.n_steps = 0
        """Steps of this process."""
        self.uncounted_steps = [0] * plan.n_fragments
        """By fragment, how many steps of this process its uncounted work is made of."""
        self.has_restored_work = [False] * plan.n_fragments
        """By fragment, whether that work contains work of an earlier attempt, whose steps nobody knows."""
        self.phase_s = 0.0
        """How long an entry's steps take, from those made so far; 0: not known yet."""
        self.has_trained = False
        """Whether this process has made a step, so that it knows how long a phase takes."""
        self.is_over = False
        """Whether no round is planned any more, so that nothing bounds the steps."""
        self.wants_to_stop = False
        """Whether this replica asks all to end the run with the next round that counts its contribution."""
        # What the rounds know.
        self.is_out_of_phase = False
        """True if this replica is out of phase."""
        self.head_start_s = 0.0
        """How much earlier than the others, at most, this replica will be at the end of this phase."""
        self.looked_s = 0.0
        """When the open entry was last seen to have no seal."""
        self.looked_step = 0
        """How many steps this process had made then."""
        self.ahead_from_s = 0.0
        """When the last of these ended."""
        self._plan = plan
        self._clock = clock
        self._steps = 0
        self._trained_s = 0.0
        self._untold_s = 0.0
        self._held_ahead_s = 0.0
        """By the clock: how long before its round was due the newest work was held."""
        self._left_s = self._counts_from_s = clock()

    # -- what the training counts --------------------------------------------------------------------------------------

    @property
    def resume_point(self) -> dict[str, Any]:
        """The place of this replica in the run: its rounds, the run's step at the last of them, and the steps since."""
        return {"rounds": self.position, "base": self.base_step, "since": self.steps_since}

    @property
    def has_no_work(self) -> bool:
        """True if every step of this replica is counted, and no work of an earlier attempt is left."""
        return not any(self.uncounted_steps) and not any(self.has_restored_work)

    @property
    def run_step(self) -> float:
        """The run's step: that of its newest entry, and at most the steps beyond of what is open or on its way."""
        end, plan = self._end, self._plan
        if self.is_over or (end is not None and self.base_step >= end):
            return self.base_step + self.steps_since  # beyond what was planned
        most = plan.steps_per_entry * (2 if plan.overlap_steps is None and plan.entry_s is None else 1)
        return _capped(self.base_step + min(self.steps_since, most), end)

    @property
    def is_at_the_end(self) -> bool:
        """Whether all planned steps were made, or all up to a total that the run was extended from."""
        end = self._end
        return end is not None and self.run_step >= end

    @property
    def _end(self) -> int | None:
        """The last step of the stage that this replica is in."""
        return self._plan.end_of(self.position)

    @property
    def is_due(self) -> bool:
        """Whether the open entry's round is due."""
        return self.steps_since >= self._plan.steps_per_entry or self.is_at_the_end

    @property
    def is_next_due(self) -> bool:
        """Whether the round after the open one is due. By the clock it is so only some time after that was applied."""
        is_due = self._plan.entry_s is None and self.steps_since >= 2 * self._plan.steps_per_entry
        return is_due or self.is_at_the_end

    @property
    def has_one_step(self) -> bool:
        """Whether a phase has a single step."""
        entry_s = self._plan.entry_s
        return self._plan.steps_per_entry == 1 if entry_s is None else self.phase_s >= 2 * entry_s

    def is_time_to_send(self, position: int) -> bool:
        """Return whether a contribution to this entry is to leave before its mean is applied."""
        plan = self._plan
        ahead = 0 if plan.overlap_steps is None else plan.overlap_steps
        return plan.overlaps and self.steps_since >= plan.steps_per_entry - ahead and not plan.is_final(position)

    def count_step(self) -> None:
        """Count a step; called when the training calls the rendezvous."""
        self._trained_s += self.stop_training_clock()
        self._steps += 1
        self.n_steps += 1
        self.uncounted_steps = [steps + 1 for steps in self.uncounted_steps]
        step_s, entry_s = self._trained_s / self._steps, self._plan.entry_s
        if entry_s is None:
            self.steps_since += 1
            self.phase_s = step_s * self._plan.steps_per_entry
        else:
            self.steps_since = (self._clock() - self._counts_from_s) / entry_s
            self.phase_s = entry_s + step_s  # the step in whose midst the round is due is made to its end
        self.has_trained = True

    def note_held(self) -> None:
        """Note that work is held, to be sent for the open entry."""
        self._held_ahead_s = max(0.0, 1 - self.steps_since) * (self._plan.entry_s or 0.0)

    def stop_training_clock(self) -> float:
        """Note that the training calls the rendezvous; return how long it has gone on since the last call."""
        trained_s = self._clock() - self._left_s
        self._untold_s += trained_s
        return trained_s

    def take_trained_s(self) -> float:
        """Return how long the training has gone on since this was asked."""
        told, self._untold_s = self._untold_s, 0.0
        return told

    def start_training_clock(self) -> None:
        """Note that training goes on from here: the time of the rendezvous is not part of it."""
        self._left_s = self._clock()

    def begin(self, base: float, since: float = 0, *, position: int = 0) -> None:
        """Continue from the step that others, or a checkpoint, have reached.

        Args:
            base: the run's step when the newest entry was adopted.
            since: steps since then.
            position: the next entry.
        """
        self.position = position
        self.base_step, self.is_over = _capped(base, self._end), False
        self.set_steps_since(since)

    def set_steps_since(self, since: float) -> None:
        """Count on from so many steps since the newest entry."""
        self.steps_since = since
        self._counts_from_s = self._clock() - since * (self._plan.entry_s or 0.0)

    def advance_in_phase(self, n_entries: int, ready_s: float) -> None:
        """Continue after the rounds of a boundary, from which all replicas continue together.

        By the clock, the next phase begins at the time of the result, or when the last round was due if that is later.

        Args:
            n_entries: the number of entries that were passed.
            ready_s: the time at which the result was complete.
        """
        spe, entry_s = self._plan.steps_per_entry, self._plan.entry_s
        end = self._end
        step = _capped(self.run_step + (n_entries - 1) * spe, end)
        self._advance(n_entries)
        if entry_s is None:  # steps before the end of a stage are none of the next one
            self.steps_since = self._within_the_plan(step - self.base_step) if self._end == end else 0
        else:
            self._count_from(max(ready_s, self._counts_from_s + entry_s))

    def advance_after_catch_up(self, n_entries: int, looked_step: int, looked_s: float) -> None:
        """Go on after seals that were seen in the midst of a phase, which began after the last look without them."""
        self._advance(n_entries)
        if self._plan.entry_s is None:
            since = max(0, self.n_steps - looked_step - (self._plan.overlap_steps or 0))
            self.steps_since = self._within_the_plan(since)
        else:
            self._count_from(looked_s + self._overlap_s)

    def _within_the_plan(self, since: float) -> float:
        """Return 0 at the last planned step: steps before or beyond it are in no average."""
        return 0 if self.base_step == self._end else since

    def _count_from(self, from_s: float) -> None:
        """Count from a time; nothing is due before the next step was made. A plan's end is not waited for."""
        now, end = self._clock(), self._end
        self._counts_from_s = from_s if end is None or self.base_step < end else min(from_s, now)
        self.steps_since = min(0.0, (now - self._counts_from_s) / (self._plan.entry_s or 1.0))

    def advance_after_sync(self, step: float, base: float) -> None:
        """Go on after rounds outside their time: they are worth the steps that were made, not an entry's."""
        self.base_step = _capped(base, self._end)
        self.set_steps_since(_capped(step, self._end) - self.base_step)

    def _advance(self, n_entries: int) -> None:
        self.position += n_entries
        if self._plan.earlier:  # each stage begins at its own step, wherever the entries of the one before end
            self.base_step = self._plan.step_before(self.position)
        else:
            self.base_step = _capped(self.base_step + n_entries * self._plan.steps_per_entry, self._plan.total_steps)
        self._steps, self._trained_s = 0, 0.0

    # -- what the rounds know ------------------------------------------------------------------------------------------

    def note_unsealed(self, at_s: float, at_step: int, *, in_background: bool = False) -> None:
        """Note that the open entry had no seal.

        Args:
            at_s: the time of the look.
            at_step: the number of steps that this process had made then.
            in_background: True if the look was made while training continued. It then fell into a step, and that step
                counts from its beginning.
        """
        self.looked_s, self.looked_step = at_s, at_step
        is_in_step = in_background and self._plan.entry_s is None
        self.ahead_from_s = min(at_s, self._left_s) if is_in_step else at_s

    def slack_s(self, entry: int) -> float:
        """Return how far apart the overlap may hold replicas that are in phase, where an entry is not overlapped."""
        return self._overlap_s if self._plan.is_final(entry) else 0.0

    def ahead_s(self, entry: int) -> float:
        """Return how long training goes on after a contribution to an entry was sent, before it waits for the mean."""
        if self._plan.is_final(entry):
            return 0.0
        return self._overlap_s if self._plan.entry_s is None else self._held_ahead_s

    def apart_s(self, phase_s: float) -> float:
        """Return how far apart replicas come that are due at one time, where the longest phase is so long.

        By the clock each comes at the end of a step. One whose step is longer than a phase is not waited for.
        """
        entry_s = self._plan.entry_s
        return 0.0 if entry_s is None else min(STEPS_APART * max(0.0, phase_s - entry_s), entry_s)

    @property
    def _overlap_s(self) -> float:
        plan = self._plan
        if plan.entry_s is not None:
            return (plan.overlap_steps or 0.0) * plan.entry_s
        steps = plan.steps_per_entry if plan.overlap_steps is None else plan.overlap_steps
        return steps * self.phase_s / plan.steps_per_entry


def _capped(step: float, end: float | None) -> float:
    """Return the step, or the last planned step if that is smaller."""
    return step if end is None else min(step, end)
