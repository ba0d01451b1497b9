"""The data that failed attempts of a rank leave to the next attempt in the same process, which continues in phase.

After a failure a process may stay and call its entrypoint again, as the next attempt (`executors.restartable`). That
takes milliseconds, so the other replicas still wait for this one. The next attempt takes the place of the failed one.
It counts its steps from where the failed attempt has left the phase, and sends its work together with the others. A new
process would be out of phase, and the open round would count none of its work.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EarlierCall:
    """The attempts of a rank that have failed in this process, and the place where the last one has left its phase.

    Example:
        EarlierCall(frozenset({(0, "a1b2")}), position=3, steps_since=2, step_s=0.1, left_s=12.0)
    """

    identities: frozenset[tuple[int, str]]
    """The attempt and the nonce of each of them."""
    position: int
    """The next entry that the last attempt would have applied."""
    steps_since: float
    """The steps of the run since the newest entry."""
    step_s: float
    """The seconds of one step of the plan. 0: not known."""
    left_s: float
    """The time at which the last attempt has left, by the clock of this process."""

    def steps_at(self, position: int, now: float, most: float) -> float:
        """Return the steps of the open phase that count as made, although this process did not make them.

        The other replicas have continued since the failure. So the time since then counts, too, and this replica
        reaches the end of the phase about when they do.

        Args:
            position: the open entry.
            now: the time, by the clock of this process.
            most: the largest result.
        """
        since = self.steps_since if position == self.position else 0.0
        passed = (now - self.left_s) / self.step_s if self.step_s > 0 else 0.0
        return min(since + max(0.0, passed), most)


_earlier: dict[tuple[str, str, str, int], EarlierCall] = {}


def note_call(place: tuple[str, str, str, int], call: EarlierCall) -> None:
    """Remember a failed attempt for the next attempt in this process.

    Args:
        place: the url of the store, the id of the run, the name of the DiLoCo, and the rank.
        call: the attempt.

    Example:
        note_call((url, "otter", "main", 0), call)
    """
    earlier = _earlier.get(place)
    _earlier[place] = (
        call
        if earlier is None
        else EarlierCall(
            earlier.identities | call.identities, call.position, call.steps_since, call.step_s, call.left_s
        )
    )


def earlier_call(place: tuple[str, str, str, int]) -> EarlierCall | None:
    """Return the failed attempts of a rank in this process. None: there are none.

    Args:
        place: the url of the store, the id of the run, the name of the DiLoCo, and the rank.

    Example:
        earlier_call((url, "otter", "main", 0))
    """
    return _earlier.get(place)
