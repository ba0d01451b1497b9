"""Computes the availability of a run, the share of failed attempts, and the ranks that need the user's attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple, TypedDict

from executors.attempt import Attempt, Claim
from executors.attempt.outcome import says_alive
from executors.protocol import Outcome, Reason, ReplicaStatus
from executors.status import WAITS_FOR_CONTROLLER, ReplicaState, RunStatus
from executors.store.inventory import Inventory
from executors.store.parallel import at_store
from executors.store.record_names import CLAIM
from executors.store.records import get_at_most
from executors.view.report.event_reader import SEGMENT_BYTES, lines_in, read_stacks

# The longest time from the last line of a segment to its upload: usage is added every 30 s (`recorder.USAGE_S`).
LATE_S = 35.0


class RankUptime(TypedDict):
    """The number of times that one rank was down, and the seconds."""

    attempts: int
    """The number of its attempts."""
    down_s: float
    """The time between its failed attempts and the next ones, in seconds."""


class UptimeDocument(TypedDict):
    """The number of times that the replicas of a run were down, and the seconds."""

    availability: float | None
    """The share of their time in which replicas were up, from 0 to 1. None: no time has passed."""
    flakiness: float | None
    """The share of attempts that failed, from 0 to 1. None: there is no attempt."""
    replicas: list[RankUptime]
    """One object per rank."""


class AttemptTimes(NamedTuple):
    """The times and the end of an attempt, without its output: a long run has thousands of attempts."""

    claimed_at: float | None
    """None: not known."""
    status: ReplicaStatus | None = None
    """The status at the end of the attempt. None while the attempt continues."""
    reason: Reason | None = None
    ended_at: float = 0.0

    @classmethod
    def of(cls, claimed_at: float | None, outcome: Outcome | None) -> AttemptTimes:
        if outcome is None:
            return cls(claimed_at)
        return cls(claimed_at, outcome.status, outcome.reason, outcome.finished_at)


def uptime_document(now: RunStatus, launched_at: float, newest: Callable[[int], Attempt]) -> UptimeDocument:
    """Return as JSON how often, and for how long, the replicas of a run were down.

    `availability` is 1 - down time / time, summed over all ranks. A rank is down from the end of a failed attempt to
    the claim of the next one. The time of a rank begins at the launch. It ends with the rank's success or cancellation,
    with the end of the run, or now. `flakiness` is the share of attempts that failed. Only ranks that were restarted
    cost requests, all at the same time.

    Args:
        now: the state of the run.
        launched_at: when the run was launched, in Unix time.
        newest: returns the newest attempt of a rank.

    Example:
        uptime_document(run.status(), view.record.created_at, view.newest_attempt)["availability"]
    """
    rows, time_s, n_failed = list[RankUptime](), 0.0, 0
    for lives in _lives(now.replicas, newest):
        last = lives[-1]
        is_out = last.status not in (None, ReplicaStatus.FAILED)
        over_at = last.ended_at if is_out else max(now.last_at, launched_at)
        down_s = _down_s(lives, over_at)
        rows.append({"attempts": len(lives), "down_s": down_s})
        time_s += max(0.0, over_at - launched_at)
        n_failed += sum(life.status is ReplicaStatus.FAILED and life.reason != "fenced" for life in lives)
    n_attempts, down_s = sum(row["attempts"] for row in rows), sum(row["down_s"] for row in rows)
    return {
        "availability": 1.0 - min(1.0, down_s / time_s) if time_s else None,
        "flakiness": n_failed / n_attempts if n_attempts else None,
        "replicas": rows,
    }


def _lives(states: Sequence[ReplicaState], newest: Callable[[int], Attempt]) -> list[list[AttemptTimes]]:
    """Return all attempts of each rank. A rank without restarts has one attempt, and its state has the times."""
    again = [state for state in states if state.attempt or state.restart.is_awaited]
    attempts = [newest(state.rank).at(number) for state in again for number in range(state.attempt + 1)]
    found = iter(at_store(attempts[0].store, _life, attempts)) if attempts else iter(())
    told = {state.rank: [*islice(found, state.attempt + 1)] for state in again}
    return [told.get(state.rank) or [AttemptTimes.of(None, state.outcome)] for state in states]


def _life(attempt: Attempt) -> AttemptTimes:
    return AttemptTimes.of(_claimed_at(attempt), attempt.outcome())


def _claimed_at(attempt: Attempt) -> float | None:
    claim = attempt.find(CLAIM, Claim.parse)
    return None if claim is None else claim.at


def _down_s(lives: Sequence[AttemptTimes], over_at: float) -> float:
    """Return the seconds that a rank was down: from the end of each failed attempt to the next claim."""
    claims = [*(life.claimed_at for life in lives[1:]), over_at]
    spans = (
        max(0.0, (over_at if claimed_at is None else min(claimed_at, over_at)) - life.ended_at)
        for life, claimed_at in zip(lives, claims, strict=True)
        if life.status is ReplicaStatus.FAILED
    )
    return sum(spans, 0.0)


def wants_attention(now: RunStatus, inventory: Inventory, newest: Callable[[int], Attempt]) -> dict[int, str]:
    """Return the ranks that need the user's attention, with the reason for each.

    Such a rank hangs, waits for a controller, or will not be restarted.

    Args:
        now: the state of the run.
        inventory: the list of the run's records.
        newest: returns a rank's newest attempt.

    Example:
        wants_attention(run.status(), view.reader.records.inventory, view.newest_attempt)  # {3: "may hang: …"}
    """
    found = {}
    for state in now.replicas:
        kind = None if state.restart.decision is None else state.restart.decision["kind"]
        dumps = [dump for dump in inventory.stacks if dump[:2] == (state.rank, state.attempt)]
        # A failed rank with a note will not be restarted, also without a recorded decision. This happens if the
        # decision log cannot be read.
        is_left = kind in ("give_up", "stop") or (state.status is ReplicaStatus.FAILED and state.restart.note)
        if state.restart.note.startswith(WAITS_FOR_CONTROLLER) or (state.is_over and is_left):
            found[state.rank] = state.restart.note
        elif dumps and state.status is ReplicaStatus.RUNNING:
            number, at = max((dump[2], dump[3]) for dump in dumps)
            attempt = newest(state.rank).at(state.attempt)
            stacks = read_stacks(attempt, number)
            # The supervisor has noted that the replica works. It knows better than the reports, as an evaluation
            # reports nothing.
            if not says_alive(stacks) and not _goes_on(attempt, at):
                found[state.rank] = f"may hang: {stacks.partition(chr(10))[0]}"
    return found


def _goes_on(attempt: Attempt, since: float) -> bool:
    """Return True if an attempt has reported something since a time of the store's clock.

    Each line has its seconds since the claim, by a clock that stops while the machine sleeps. The time of the claim
    itself may be wrong. So the time of a line is computed backward from the upload of its segment or of a later one.
    The replica uploads usage to its end, also if nothing is reported.
    """
    prefix = f"{attempt.run_id}/metrics/{attempt.rank:04d}/{attempt.number}/"
    new = [entry for entry in attempt.store.list(prefix) if entry.modified_at >= since]
    zero_at = math.inf  # the latest possible time of second 0 of the lines
    for entry in reversed(new):
        lines = list(lines_in(get_at_most(attempt.store, entry.key, SEGMENT_BYTES)))
        zero_at = min([zero_at, *(entry.modified_at - t for t, _ in lines)])
        if any(is_progress and zero_at + t > since + LATE_S for t, is_progress in lines):
            return True
    return False
