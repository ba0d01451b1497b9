"""Undoes each rule of restarts in turn: the simulation must notice it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from executors.protocol import Outcome
from executors.restarts import controller, rules
from executors.restarts.controller import RestartController
from executors.restarts.decision_log import Decision, DecisionLog
from simulation.invariants import Violation
from simulation.restarts.simulation import RestartSimulation, run_schedule

Patch = Callable[[pytest.MonkeyPatch], None]
BROKEN = re.compile("TypeError|AttributeError|NameError")


def without(*rules: str) -> Patch:
    """Switch off rules of the simulated processes, and not of the product."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        for rule in rules:
            monkeypatch.setattr(RestartSimulation, rule, False)

    return patch


def replaced(owner: Any, name: str, value: Any) -> Patch:
    return lambda patch: patch.setattr(owner, name, value)


def seeing(change: Callable[..., Any]) -> Patch:
    """Change the arguments of `decide`: `change(log, end, ends, policy, facts, now)` returns the new ones."""
    original = rules.decide
    return replaced(controller, "decide", lambda *seen: original(*change(*seen)))


def answering(change: Callable[[Decision], Decision]) -> Patch:
    """Change the decision that `decide` returns."""

    def decide(*seen: Any) -> Decision | None:
        answer: Decision | None = original(*seen)
        return None if answer is None else change(answer)

    original = rules.decide
    return replaced(controller, "decide", decide)


def believe_the_own_answer(patch: pytest.MonkeyPatch) -> None:
    """Treat an entry as decided as soon as this process has written it, without reading it back."""

    def append(self: DecisionLog, compute: Any) -> Decision | None:
        entry: Decision | None = compute(self.read())
        if entry is None:
            return None
        last_s = self.entries[-1].at if self.entries else 0.0
        entry = replace(entry, nonce="mine", by="", at=max(self._clock(), last_s))
        self.store.put_if_absent(self.key(len(self.entries)), entry.to_bytes())
        self.entries.append(entry)
        return entry

    patch.setattr(DecisionLog, "append", append)


def own(log: Any, *rest: Any) -> Any:
    """Show a controller only those restarts in the log that it has ordered itself."""
    mine = [entry for entry in log if entry.kind != "restart" or entry.by == (log[-1].by if log else "")]
    return (mine, *rest)


def forgiving(log: Any, rank: int) -> list[Decision]:
    return [entry for entry in log if entry.kind == "restart" and entry.rank == rank and entry.charged]


def with_policy(**changes: Any) -> Patch:
    return seeing(lambda log, end, ends, policy, *rest: (log, end, ends, replace(policy, **changes), *rest))


def next_attempts(log: Any, ends: Any, facts: rules.RunFacts) -> dict[int, int]:
    return {rank: number + 1 for rank, number in facts.newest.items()}


def later(log: Any, end: Outcome, *rest: Any) -> Any:
    return (log, replace(end, attempt=end.attempt + 1), *rest)


MUTANTS: dict[str, Patch] = {
    "a controller believes the reply to its own create": believe_the_own_answer,
    "a controller counts only its own restarts": seeing(own),
    "there is no intent": without("has_intents"),
    "a cancel leaves no entry": without("appends_cancel"),
    "a claim does not read the log": without("looks_when_claiming"),
    "a cancel marks claimed attempts only, and a claim does not read the log": without(
        "marks_decided", "looks_when_claiming"
    ),
    "not_before is ignored": replaced(RestartController, "_ready_in", lambda self, entry: 0.0),
    "no stop is considered after a give_up": replaced(controller, "too_few_left", lambda *seen: False),
    "a resume keeps old strikes": replaced(rules, "charged_of", forgiving),
    "a stop or cancel blocks no rank": replaced(rules, "is_blocked", lambda log, rank: False),
    "two decisions follow one end": replaced(rules, "decision_on", lambda log, rank, attempt: None),
    "free restarts are charged": answering(lambda answer: replace(answer, charged=True)),
    "caps of reasons and exit codes are ignored": replaced(rules, "_is_capped", lambda *seen: False),
    "budgets of a replica have no window": replaced(rules, "_recent", lambda mine, policy, now: mine),
    "a replica has no budget": with_policy(per_replica=1000),
    "the run has no budget": with_policy(run=None),
    "restarts continue after the time in within": with_policy(within_s=None),
    "strikes are not counted": with_policy(no_progress=1000),
    "together restarts one rank": with_policy(together=False),
    "a restart of all ranks includes ranks that were given up": replaced(rules, "_others", next_attempts),
    "a policy in the log has no effect": replaced(controller, "policy_of", lambda log, launched: launched),
    "different failures of two ranks stop the run": replaced(rules, "_is_common_failure", lambda *seen: True),
    "nothing is carried out": replaced(RestartController, "due", lambda self, snapshot: {}),
    "a process that has ended runs the next attempt": answering(
        lambda answer: replace(answer, how="process") if answer.start else answer
    ),
    "one process runs all attempts without progress": replaced(rules, "MOST_PROCESS_STRIKES", 1000),
    "a process takes its own claim for that of another process": without("renews_pages"),
    "a process waits for an attempt that will not come": without("dismisses"),
    "a decision follows the end of any attempt": seeing(later),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_undoing_a_rule_of_restarts_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[mutant](monkeypatch)
    found = first_violation()
    assert found, f"4,000 schedules did not notice that {mutant}."
    assert not BROKEN.search(found), f"the mutant itself is broken: {found}"


def first_violation() -> str:
    for seed in range(4000):
        try:
            run_schedule(seed, is_traced=False)
        except Violation as violation:
            return str(violation)
    return ""
