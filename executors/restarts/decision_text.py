"""Describes entries of the decision log in sentences for users.

The sentences quote texts from records of other machines. A caller that prints them must first remove control
characters.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from executors.restarts.decision_log import Decision, policy_of
from executors.restarts.orders import ASKED, BY_RULE
from executors.restarts.rules import MOST_REFUSED
from executors.settings.policy import Restarts
from executors.status import name_ranks

PERMANENT = ("deterministic", "no_progress", BY_RULE)
"""The rules of a give_up or a stop after which another start of the unchanged run does not help."""
MAX_ERROR = 160  # characters of a message that is quoted within a line


class RestartTally:
    """Counts the charged restarts in a log, and has the policy in force at that point of the log.

    A caller that describes a log goes through it once: it describes each entry and then adds the entry to the tally.

    Args:
        launched: the policy that the run was launched with. None: nothing restarted.
        log: the entries to count at once. Default: none.
    """

    def __init__(self, launched: Restarts | None, log: Iterable[Decision] = ()) -> None:
        self.policy = launched
        self.n_charged = 0
        """The charged restarts of the run since the user last resumed a rank."""
        self._charged = defaultdict[int | None, list[float]](list)
        """The sorted Unix times of the charged restarts by rank, since the user last resumed that rank."""
        for entry in log:
            self.add(entry)

    def add(self, entry: Decision) -> None:
        """Count one more entry."""
        if entry.kind == "resume":
            self.n_charged = 0
            for rank in entry.start:
                self._charged.pop(rank, None)
            return
        self.policy = policy_of([entry], self.policy)
        self.n_charged += entry.charged
        if entry.kind == "restart" and entry.charged:
            insort(self._charged[entry.rank], entry.at)

    def charged(self, rank: int | None, now: float) -> int:
        """Return how many charged restarts of a rank count against its budget.

        Args:
            rank: the rank.
            now: Unix time, for a budget per hour or per other span.
        """
        found = self._charged.get(rank, [])
        per_s = None if self.policy is None else self.policy.per_s
        return len(found) if per_s is None else len(found) - bisect_right(found, now - per_s)


def describe_decision(entry: Decision, tally: RestartTally, run: str, alike: Collection[int] = ()) -> str:
    """Return one line on an entry of the log: `restarting rank 3 as attempt 1 (1 of 3): signal, SIGKILL`.

    Args:
        entry: the entry.
        tally: the tally of the entries before it.
        run: the name of the run in a command, as in "brave-otter-7f3a".
        alike: the ranks that ended the same way, if the entry is a stop. Default: not known.
    """
    if entry.kind == "restart":
        count = "free"
        if entry.charged and tally.policy is not None:
            count = f"{1 + tally.charged(entry.rank, entry.at)} of {tally.policy.per_replica}"
        others = [rank for rank in entry.start if rank != entry.rank]
        also = f", and with it {name_ranks(others)}" if others else ""
        number = entry.start.get(entry.rank if entry.rank is not None else -1, 0)
        return f"restarting rank {entry.rank} as attempt {number} ({count}){also}: {entry.words}"
    if entry.kind == "give_up":
        why = _why_given_up(entry, tally)
        return f"rank {entry.rank} given up: {why}. `replicas resume {run} --rank {entry.rank}` tries again."
    if entry.kind == "stop":
        return _line_of_stop(entry, alike)
    if entry.kind == "cancel":
        return f"cancelled: {'all ranks' if entry.rank is None else f'rank {entry.rank}'}"
    if entry.kind == "resume":
        numbers = sorted(set(entry.start.values()))
        attempts = f"attempt{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
        return f"resuming {name_ranks(entry.start)} as {attempts}"
    rules = None if entry.rules is None else "; ".join(entry.rules) or "none"
    changed = {"restarts": entry.restarts, "hang timeout": entry.hang, "rules": rules}
    words = ", ".join(f"{name} {value}" for name, value in changed.items() if value is not None)
    totals = {"steps": entry.total_steps, "rounds": entry.total_rounds}
    if extended := " and ".join(f"{value} {name}" for name, value in totals.items() if value is not None):
        return f"extended to {extended}" + (f"; from here on: {words}" if words else "")
    return f"from here on: {words}" if words else "an entry without the run's key, which has no effect"


def describe_wait(log: Sequence[Decision], index: int, launched: Restarts | None, now: float) -> str:
    """Return a note for a rank that has ended: the restart that it waits for, or the reason why it is not restarted.

    Args:
        log: the entries of the log.
        index: the index of the entry that decided on the end of the rank.
        launched: the policy that the run was launched with.
        now: Unix time.
    """
    entry = log[index]
    if entry.kind == "restart":
        left_s = entry.left_s(now)
        return f"restarts {f'in {math.ceil(left_s)} s' if left_s > 0 else 'now'}: {entry.words}"
    if entry.kind == "give_up" and entry.why == "deterministic":
        return f"given up: failed twice in the same way{_at_place(entry)} ({error_in(entry)})"
    if entry.kind == "give_up":
        return f"given up: {_why_given_up(entry, RestartTally(launched, log[:index]))}"
    return _line_of_stop(entry) if entry.kind == "stop" else ""


def error_in(entry: Decision) -> str:
    """Return the error in an entry's words, without its reason and its place: `ValueError: boom`."""
    words = entry.words.removeprefix(f"{entry.reason}, ")
    for name in ("round", "step"):
        words = words.removesuffix(f", after {name} {entry.reached.get(name, 0):.0f}")
    return words if len(words) <= MAX_ERROR else f"{words[: MAX_ERROR - 1]}…"


def _why_given_up(entry: Decision, tally: RestartTally) -> str:
    policy = tally.policy
    if entry.why == "deterministic":
        return f"it failed twice the same way{_at_place(entry)}: {error_in(entry)}"
    if entry.why == "no_progress":
        return f"{entry.strikes} attempts in a row made no progress, the last: {entry.words}"
    if entry.why == "refused":
        return f"{MOST_REFUSED} starts in a row were refused: {entry.words}"
    if policy is None or entry.why == "not_started":
        return entry.words
    name, most = policy.cap(entry.reason, entry.exit_code)
    span = "" if policy.per_s is None else f" within {policy.per_s:g} s"
    used, of_run = tally.charged(entry.rank, entry.at), policy.run
    if most == 0:
        why = f"the policy has no restart after {_name_cap(name)}"
    elif used >= policy.per_replica:
        why = f"{used} of {policy.per_replica} restarts are used{span}"
    elif of_run is not None and tally.n_charged >= of_run:
        why = f"{of_run} of {of_run} restarts of the run are used"
    elif name is not None and most != math.inf:
        why = f"{most:g} of {most:g} restarts after {_name_cap(name)} are used{span}"
    else:
        why = "the time for restarts has passed"
    return f"{why}: {entry.words}"


def _name_cap(name: str | None) -> str:
    return f"exit code {name}" if name is not None and name.lstrip("-").isdigit() else str(name)


def _line_of_stop(entry: Decision, alike: Collection[int] = ()) -> str:
    if entry.why == "deterministic":
        who = name_ranks(alike) if alike else "replicas"
        return f"stopped: {who} failed the same way before their first step: {error_in(entry)}"
    if entry.why == "min_replicas":
        return "stopped: fewer replicas than --min-replicas asks for can still succeed"
    within = f", within {entry.within_s:g} s" if entry.within_s is not None else ""
    if entry.why == BY_RULE:
        return f"stopping{within}: {entry.words}"
    return f"stopping, as requested{within}" if entry.why == ASKED else f"stopped: {entry.words or entry.why}"


def _at_place(entry: Decision) -> str:
    """Return the place of an end, as in ` at step 812`. Return an empty text if the replica reported none."""
    return next((f" at {name} {entry.reached[name]:.0f}" for name in ("step", "round") if name in entry.reached), "")
