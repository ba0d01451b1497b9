"""Decides when the next round of a replica is due: `RoundPlan` divides the steps, and `Phase` counts them.

A replica is *in phase* if it begins its inner steps together with the others and meets them at the end. A replica that
has come back, joined or was left out is *out of phase*. It sends the work that it has at once, and continues to train.
When it sees the seal after one of its steps, it applies the round.

Each replica measures durations by its own clock. No clock is compared with the clock of another replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

STEPS_APART = 2
"""With rounds by the clock: the number of steps of the slowest replica for which the others wait.

It is not 1, because a mean arrives in the middle of one step, and the next round is due in the middle of another one.
"""


@dataclass(slots=True)
class RoundPlan:
    """Divides the inner steps, or the time, of a run into entries of the log.

    If the total is known, every fragment has its last round at the last step. The last entries, one for each fragment,
    are due there, one after the other.

    A run that was extended has several totals, and each total has its own last entries. The steps from one total to the
    next are a *stage*. Replicas that know of an extension, and replicas that do not know of it yet, agree on all
    entries up to the earlier total.

    With rounds by the clock, one step of the plan is the time of one entry. `steps_per_entry` is then 1, and each
    replica makes as many inner steps in that time as it can.

    Example:
        RoundPlan(steps_per_entry=10, n_fragments=2, total_steps=400).step_before(7)
    """

    steps_per_entry: int = 1
    """Inner steps from one fragment's round to the next fragment's."""
    n_fragments: int = 1
    overlap_steps: float | None = 0
    """Inner steps between sending a fragment and applying its mean. None: the mean is applied as soon as it arrives."""
    total_steps: int | None = None
    """The planned steps of the run. None: the number is not known."""
    entry_s: float | None = None
    """With rounds by the clock: seconds from the round of one fragment to the round of the next fragment."""
    earlier: tuple[int, ...] = ()
    """The totals before the run was extended to `total_steps`, in ascending order."""
    ended_by: tuple[int, ...] = ()
    """The ranks that ended the run before its planned end. Empty: no rank did."""
    _stages: tuple[_Stage, ...] = field(init=False, repr=False, compare=False)
    """The stages, computed once, because a training loop needs them at every step."""

    def __post_init__(self) -> None:
        self._stages = tuple(self._divided())

    def extend(self, total: int) -> bool:
        """Add a stage up to a larger total. Return False, and change nothing, if the plan has no total or a larger one.

        Args:
            total: the new total, in the unit of `total_steps`.
        """
        if self.total_steps is None or total <= self.total_steps or self.ended_by:
            return False
        self.earlier, self.total_steps = (*self.earlier, self.total_steps), total
        self._stages = tuple(self._divided())
        return True

    def end_after(self, entry: int, ranks: tuple[int, ...]) -> bool:
        """End the plan at the step of an entry. Return False, and change nothing, if a stage ends there.

        Each other fragment has one more round, at the same step: the entries after this one.

        At the end of a stage, the request changes nothing, even if the run was extended beyond that stage. Replicas
        that know of the extension must decide in the same way as replicas that do not know of it yet. The replicas send
        the request again with the next round.

        Args:
            entry: the first of the last entries.
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
        """True if training continues between sending a contribution and applying the mean."""
        return self.overlap_steps != 0

    @property
    def inner_steps(self) -> int:
        """Inner steps from one round of a fragment to the next round of the same fragment."""
        return self.steps_per_entry * self.n_fragments

    @property
    def n_entries(self) -> int | None:
        """The number of entries of the run. None: no total is known."""
        return self._stages[-1].end_entry

    @property
    def last_entry(self) -> int | None:
        """The last entry of the run. None: no total is known."""
        return None if self.n_entries is None else self.n_entries - 1

    @property
    def last_entries(self) -> tuple[int, ...]:
        """The last entry of each stage. Empty: no total is known."""
        return tuple(stage.end_entry - 1 for stage in self._stages if stage.end_entry is not None)

    def step_before(self, position: int) -> int:
        """Return the step of the run at which all entries before an entry are applied.

        Args:
            position: the entry.
        """
        stage = self._stage_of(position)
        step = stage.first_step + (position - stage.first_entry) * self.steps_per_entry
        return step if stage.end_step is None else min(step, stage.end_step)

    def position_at(self, step: int) -> int:
        """Return the number of entries that a replica in phase has applied when it has made a step of the run.

        Args:
            step: the step of the run.
        """
        for stage in self._stages:
            if stage.end_step is None or step < stage.end_step or stage.end_step == self.total_steps:
                break
        position = stage.first_entry + max(0, step - stage.first_step) // self.steps_per_entry
        if stage.end_step is None or stage.end_entry is None:
            return position
        # At the last step of a stage every fragment has a round. Before that step, none of these rounds has happened.
        return stage.end_entry if step >= stage.end_step else min(position, stage.end_entry - self.n_fragments)

    def end_of(self, position: int) -> int | None:
        """Return the last step of the stage that contains an entry. None: no total is known."""
        return self.total_steps if not self.earlier else self._stage_of(position).end_step

    def is_over(self, position: int) -> bool:
        """Return True if no entry is planned from this one on. No other replica would take part in another round."""
        return self.last_entry is not None and position > self.last_entry

    def is_final(self, entry: int) -> bool:
        """Return True if an entry is the last round of its fragment in a stage.

        A replica that does not know of an extension yet sees the first stage as the whole plan.
        """
        return any(last - self.n_fragments < entry <= last for last in self.last_entries)

    def _divided(self) -> Iterator[_Stage]:
        """Yield the stages, computed from the totals."""
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
    """The entry after the last one of the stage. None: no total is known."""
    end_step: int | None


# More than 20 methods: the count of steps, the clock and the plan together decide when a round is due, and each method
# is one question about that state. Both threads read it, and only the training thread changes the count.
class Phase:
    """Counts the steps of one replica: the steps that it has made, and the steps as the run counts them.

    The training thread counts. The round runner may work while training continues, and only reads single values.

    Args:
        plan: divides the steps into entries.
        clock: returns seconds of a monotonic clock.

    Example:
        phase = Phase(RoundPlan(steps_per_entry=10), monotonic)
        phase.count_step()
        phase.is_due
    """

    def __init__(self, plan: RoundPlan, clock: Callable[[], float]) -> None:
        self.base_step: float = 0
        """The step of the run at which the newest entry was applied."""
        self.position = 0
        """The next entry to merge."""
        self.steps_since: float = 0
        """Steps that the run counts since `base_step`. Negative if an entry was applied before its round was due."""
        self.n_steps = 0
        """The number of steps that this process has made."""
        self.uncounted_steps = [0] * plan.n_fragments
        """For each fragment, the number of steps of this process whose work no seal has counted yet."""
        self.has_restored_work = [False] * plan.n_fragments
        """For each fragment, True if the uncounted work contains work of an earlier attempt, whose number of steps
        is not known.
        """
        self.is_short = [False] * plan.n_fragments
        """For each fragment, True if this replica has begun in the middle of its phase, so that its work has fewer
        steps than the work of the others."""
        self.phase_s = 0.0
        """Seconds that the steps of one entry take, measured so far. 0: not known yet."""
        self.has_trained = False
        """True if this process has made a step, so that it knows how long a phase takes."""
        self.is_over = False
        """True if no round is planned any more, so that nothing limits the steps."""
        self.wants_to_stop = False
        """True if this replica asks all replicas to end the run with the next round that counts its contribution."""
        # The round runner writes the values below.
        self.is_out_of_phase = False
        """True if this replica is out of phase."""
        self.head_start_s = 0.0
        """The longest time, in seconds, by which this replica may reach the end of this phase before the others."""
        self.looked_s = 0.0
        """The time of the last look at which the open entry had no seal."""
        self.looked_step = 0
        """The number of steps that this process had made at the time `unsealed_s`."""
        self.ahead_from_s = 0.0
        """The time from which this replica may be ahead of the others. This value belongs to the time `unsealed_s`."""
        self._plan = plan
        self._clock = clock
        self._steps = 0
        self._trained_s = 0.0
        self._untold_s = 0.0
        """Seconds of training since the last call of `take_trained_s`."""
        self._held_ahead_s = 0.0
        """With rounds by the clock: seconds between holding the newest work and the time at which its round was due."""
        self._left_s = self._counts_from_s = clock()

    # -- for the training thread ---------------------------------------------------------------------------------------

    @property
    def resume_point(self) -> dict[str, Any]:
        """The values for a checkpoint: the rounds, the step of the run at the last round, and the steps since then."""
        return {"rounds": self.position, "base": self.base_step, "since": self.steps_since}

    @property
    def has_no_work(self) -> bool:
        """True if every step of this replica is counted, and no work of an earlier attempt is left."""
        return not any(self.uncounted_steps) and not any(self.has_restored_work)

    @property
    def run_step(self) -> float:
        """The step of the run that this replica has reached.

        It is the step of the newest entry, plus the steps since. Steps since then count at most to the next round, or
        with overlap_steps="auto" to the round after it. So a replica that waits for a mean does not get ahead of the
        plan.
        """
        end, plan = self._end, self._plan
        if self.is_over or (end is not None and self.base_step >= end):
            return self.base_step + self.steps_since  # after the end of the plan, no round limits the count
        most = plan.steps_per_entry * (2 if plan.overlap_steps is None and plan.entry_s is None else 1)
        return _capped(self.base_step + min(self.steps_since, most), end)

    @property
    def is_at_the_end(self) -> bool:
        """True if all steps of the current stage are made."""
        end = self._end
        return end is not None and self.run_step >= end

    @property
    def _end(self) -> int | None:
        """The last step of the stage that this replica is in."""
        return self._plan.end_of(self.position)

    @property
    def is_due(self) -> bool:
        """True if the round of the open entry is due."""
        return self.steps_since >= self._plan.steps_per_entry or self.is_at_the_end

    @property
    def is_next_due(self) -> bool:
        """True if the round after the open one is due. By the clock, it is never due before the open one is applied."""
        is_due = self._plan.entry_s is None and self.steps_since >= 2 * self._plan.steps_per_entry
        return is_due or self.is_at_the_end

    @property
    def has_one_step(self) -> bool:
        """True if a phase has a single step."""
        entry_s = self._plan.entry_s
        return self._plan.steps_per_entry == 1 if entry_s is None else self.phase_s >= 2 * entry_s

    def is_time_to_send(self, position: int) -> bool:
        """Return True if it is time to send the contribution to an entry, before its round is due.

        Args:
            position: the open entry.
        """
        plan = self._plan
        ahead = 0 if plan.overlap_steps is None else plan.overlap_steps
        return plan.overlaps and self.steps_since >= plan.steps_per_entry - ahead and not plan.is_final(position)

    @property
    def steps_now(self) -> float:
        """The steps since the newest entry. By the clock, the time since then, measured in entries."""
        entry_s = self._plan.entry_s
        return self.steps_since if entry_s is None else (self._clock() - self._counts_from_s) / entry_s

    @property
    def step_s(self) -> float:
        """The seconds of one step of the plan. 0: not known."""
        entry_s = self._plan.entry_s
        return self.phase_s / self._plan.steps_per_entry if entry_s is None else entry_s

    def begin_short(self, since: float) -> None:
        """Begin in the middle of a phase, in the place of an earlier attempt of this process.

        Args:
            since: the number of steps of the phase that this process does not make.
        """
        self.is_short = [True] * len(self.is_short)
        self.set_steps_since(since)

    def count_step(self) -> None:
        """Count an inner step. Call it first when the training thread enters the rendezvous."""
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
            self.phase_s = entry_s + step_s  # the round is due in the middle of a step, and that step is completed
        self.has_trained = True

    def note_held(self) -> None:
        """Record the time at which the training thread holds work for the open entry."""
        self._held_ahead_s = max(0.0, 1 - self.steps_since) * (self._plan.entry_s or 0.0)

    def stop_training_clock(self) -> float:
        """Record that the training thread enters the rendezvous. Return the seconds of training since it last left."""
        trained_s = self._clock() - self._left_s
        self._untold_s += trained_s
        return trained_s

    def take_trained_s(self) -> float:
        """Return the seconds of training since the last call of this method."""
        told, self._untold_s = self._untold_s, 0.0
        return told

    def start_training_clock(self) -> None:
        """Record the time at which the training thread leaves the rendezvous, so that time in the rendezvous does
        not count as training.
        """
        self._left_s = self._clock()

    def begin(self, base: float, since: float = 0, *, position: int = 0) -> None:
        """Continue from the step that the other replicas have reached, or from the step of a checkpoint.

        Args:
            base: the step of the run at which the newest entry was applied.
            since: the number of steps after `base`.
            position: the next entry to apply.
        """
        self.position = position
        self.base_step, self.is_over = _capped(base, self._end), False
        self.set_steps_since(since)

    def set_steps_since(self, since: float) -> None:
        """Set the number of steps since the newest entry, and continue to count from there.

        Args:
            since: the number of steps.
        """
        self.steps_since = since
        self._counts_from_s = self._clock() - since * (self._plan.entry_s or 0.0)

    def advance_in_phase(self, n_entries: int, ready_s: float) -> None:
        """Continue after rounds that were due at one step. All replicas in phase continue from there together.

        With rounds by the clock, the next phase begins when the result was complete, or when the last round was due if
        that is later.

        Args:
            n_entries: the number of entries that were passed.
            ready_s: the time at which the result was complete.
        """
        spe, entry_s = self._plan.steps_per_entry, self._plan.entry_s
        end = self._end
        step = _capped(self.run_step + (n_entries - 1) * spe, end)
        self._advance(n_entries)
        if entry_s is None:  # surplus steps at the end of a stage do not count for the next stage
            self.steps_since = self._within_the_plan(step - self.base_step) if self._end == end else 0
        else:
            self._count_from(max(ready_s, self._counts_from_s + entry_s))

    def advance_after_catch_up(self, n_entries: int, looked_step: int, looked_s: float) -> None:
        """Continue after rounds that this replica applied out of phase.

        The new phase begins at the last look at which the entry had no seal.

        Args:
            n_entries: the number of entries that were passed.
            looked_step: the number of steps of this process at that look.
            looked_s: the time of that look.
        """
        self._advance(n_entries)
        if self._plan.entry_s is None:
            since = max(0, self.n_steps - looked_step - (self._plan.overlap_steps or 0))
            self.steps_since = self._within_the_plan(since)
        else:
            self._count_from(looked_s + self._overlap_s)

    def _within_the_plan(self, since: float) -> float:
        """Return the given number of steps.

        Return 0 at the last planned step, because no average contains later steps.
        """
        return 0 if self.base_step == self._end else since

    def _count_from(self, from_s: float) -> None:
        """Begin to count seconds from a time. No round is due before the next step is made.

        At the end of the plan, the count begins at the current time, because a replica that has ended must not wait.
        """
        now, end = self._clock(), self._end
        self._counts_from_s = from_s if end is None or self.base_step < end else min(from_s, now)
        self.steps_since = min(0.0, (now - self._counts_from_s) / (self._plan.entry_s or 1.0))

    def advance_after_sync(self, step: float, base: float) -> None:
        """Continue after rounds that the user asked for with `DiLoCo.sync`, before they were due.

        Such a round averages the steps that were made, and not the planned steps of an entry.

        Args:
            step: the step of the run that this replica has reached.
            base: the step of the run at which the newest entry counts as applied.
        """
        self.base_step = _capped(base, self._end)
        self.set_steps_since(_capped(step, self._end) - self.base_step)

    def _advance(self, n_entries: int) -> None:
        self.position += n_entries
        if self._plan.earlier:  # each stage begins at its own step, so the sum of the entries' steps is not exact
            self.base_step = self._plan.step_before(self.position)
        else:
            self.base_step = _capped(self.base_step + n_entries * self._plan.steps_per_entry, self._plan.total_steps)
        self._steps, self._trained_s = 0, 0.0

    # -- for the round runner ------------------------------------------------------------------------------------------

    def note_unsealed(self, at_s: float, at_step: int, *, in_background: bool = False) -> None:
        """Record that the open entry had no seal.

        Args:
            at_s: the time of the look.
            at_step: the number of steps that this process had made then.
            in_background: True if the look was made while training continued. Then it was made during a step, and that
                whole step counts as after the look.
        """
        self.looked_s, self.looked_step = at_s, at_step
        is_in_step = in_background and self._plan.entry_s is None
        self.ahead_from_s = min(at_s, self._left_s) if is_in_step else at_s

    def slack_s(self, entry: int) -> float:
        """Return the seconds by which replicas in phase may differ because of the overlap of earlier entries.

        It is 0 unless the entry is a last one. No training overlaps a last round, so its wait includes that time.

        Args:
            entry: the entry.
        """
        return self._overlap_s if self._plan.is_final(entry) else 0.0

    def ahead_s(self, entry: int) -> float:
        """Return the seconds for which training continues between sending a contribution and waiting for the mean.

        Args:
            entry: the entry of the contribution.
        """
        if self._plan.is_final(entry):
            return 0.0
        return self._overlap_s if self._plan.entry_s is None else self._held_ahead_s

    def apart_s(self, phase_s: float) -> float:
        """Return the seconds by which arrivals may differ although all replicas are due at the same time.

        With rounds by the clock, each replica arrives at the end of a step. The others do not wait for a replica whose
        step is longer than an entry. With rounds by step the result is 0.

        Args:
            phase_s: the longest phase of any replica, in seconds.
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
