"""Decides which events of a run are notices. It reads the records in the store, and asks no backend.

So each process that can read the store finds the same notices, with the same ids: the supervisor in a container, a
local supervisor, the launching process, and `replicas watch`. Events that leave no record, such as rounds that stop,
come from the supervisor that sees them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence

from executors.attempt import Attempt, Beat, Claim
from executors.attempt.rule_record import find_finding
from executors.errors import CorruptObjectError, StoreError
from executors.protocol import Outcome, ReplicaStatus
from executors.restarts.decision_log import Decision, DecisionLog, blocking_order, decision_on, policy_of
from executors.restarts.decision_text import RestartTally, describe_decision
from executors.settings.durations import name_duration
from executors.settings.notify import KINDS
from executors.settings.policy import ONLY_PREEMPTED, Restarts
from executors.settings.rule_finding import RuleFinding
from executors.status import name_ranks
from executors.store import Store
from executors.store.inventory import Inventory
from executors.store.parallel import at_store
from executors.store.record_names import CLAIM, HEARTBEAT, OUTCOME
from executors.store.staleness import StalenessTracker
from executors.task.notice_record import Notice, shorten
from executors.task.record import RunRecord

MOST_USED = 0.8
"""The used share of a budget from which there is a notice."""
PREEMPTION_S = 60.0
"""How long the end of a container may stay without a decision if the service may have taken the machine back."""
BEGINNINGS = ("started", "handle", "intent", "outcome")
MAX_BEATS = 64  # heartbeats that are read for the last loss, because each costs a request
MAX_NAMED = 5
MAX_RULES_READ = 1000  # records about rules that one look reads


class NoticeReader:
    """Finds the notices of a run in its records. Each record is read once.

    Args:
        store: the store of the run.
        run_id: the run.
        record: the record of the run.
        key: the key of a signed run, in hexadecimal. None, the default: the run is not signed.
        usd_per_hour: the price of one replica, in US dollars per hour. None, the default: it is not known.
        now: returns Unix time. Default: the system's clock.
        clock: returns the seconds of a monotonic clock. Default: the system's clock.

    Example:
        for notice in NoticeReader(store, "brave-otter-7f3a", record).look():
            print(notice.text)
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        record: RunRecord,
        *,
        key: str | None = None,
        usd_per_hour: float | None = None,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._record = record
        self._usd_per_hour = usd_per_hour
        self._now = now
        self._log = DecisionLog(store, run_id, key=key)
        self._policy = Restarts.of(record.settings.restarts)
        self._inventory = Inventory()
        self._outcomes: dict[tuple[int, int], Outcome] = {}
        self._damaged = set[tuple[int, int]]()
        self._claims: dict[tuple[int, int], Claim | None] = {}
        self._undecided = StalenessTracker(clock)
        self._findings: dict[tuple[int, int, int, bool], RuleFinding | None] = {}
        """The records about rules, by their names in the inventory."""
        self._planned: dict[int, int] = {}
        """By rank, the last attempt that the decision log starts."""
        self.is_over = False
        """True if, as of the last look, every rank has ended and none will be started again."""

    def look(self) -> list[Notice]:
        """Read the new records, and return all notices of the run so far, the oldest first.

        Raises:
            StoreError: the store does not answer.
        """
        self._inventory |= Inventory.of(self._store, self._run_id)
        self._read_outcomes()
        log = list(self._log.read())
        self._planned = {}
        for entry in log:
            for rank, number in entry.start.items():
                self._planned[rank] = max(number, self._planned.get(rank, number))
        found = [*self._hangs(), *self._rules(), *self._decisions(log), *self._time_and_cost(log)]
        self.is_over = all(self._has_ended(rank, log) for rank in self._ranks)
        if self.is_over:
            found.append(self._end(log))
        return sorted(found, key=lambda notice: notice.at)

    @property
    def _ranks(self) -> list[int]:
        return self._inventory.ranks(self._record.world_size)

    def _attempt(self, rank: int, number: int) -> Attempt:
        return Attempt(self._store, self._run_id, rank, number)

    def _read_outcomes(self) -> None:
        ended = {(rank, number) for rank, number, name in self._inventory.records if f"{name}.json" == OUTCOME}
        new = sorted(ended - self._outcomes.keys() - self._damaged)

        def read(key: tuple[int, int]) -> tuple[tuple[int, int], Outcome | None]:
            try:
                return key, self._attempt(*key).outcome()
            except CorruptObjectError:  # it stays damaged, so it is not read again
                self._damaged.add(key)
                return key, None

        for key, outcome in at_store(self._store, read, new):
            if outcome is not None:
                self._outcomes[key] = outcome

    # Events of single attempts

    def _hangs(self) -> Iterator[Notice]:
        for (rank, number), outcome in sorted(self._outcomes.items()):
            if outcome.reason == "hang":
                words = outcome.error_line or outcome.headline or "it hung"
                yield Notice(
                    id=f"hang-{rank}-{number}",
                    kind="hang",
                    text=shorten(f"A hang of rank {rank} was ended: {words}"),
                    rank=rank,
                    attempt=number,
                    at=outcome.finished_at,
                )

    def _rules(self) -> Iterator[Notice]:
        new = sorted(self._inventory.rules - self._findings.keys())

        def read(key: tuple[int, int, int, bool]) -> tuple[tuple[int, int, int, bool], RuleFinding | None]:
            try:
                return key, find_finding(self._store, self._run_id, key)
            except CorruptObjectError:  # it stays damaged, so it is not read again
                return key, None

        self._findings |= dict(at_store(self._store, read, new[:MAX_RULES_READ]))
        unjudged = set[str]()
        for finding in filter(None, (self._findings[key] for key in sorted(self._findings))):
            words, place = shorten(f"Rank {finding.rank}: {finding.sentence}"), f"{finding.rank}-{finding.attempt}"
            if finding.is_broken:
                yield Notice(
                    id=f"rule-{place}-{finding.index}",
                    kind="rule",
                    text=words,
                    rank=finding.rank,
                    attempt=finding.attempt,
                    at=finding.at,
                )
            elif finding.rule not in unjudged:  # usually each rank has it, and one message is enough
                unjudged.add(finding.rule)
                # The number of a rule is not enough, because a resume may have given new rules.
                name = hashlib.sha256(finding.rule.encode()).hexdigest()[:12]
                yield Notice(id=f"rule-unjudged-{name}", kind="rule", text=words, at=finding.at)

    def _decisions(self, log: Sequence[Decision]) -> Iterator[Notice]:
        tally, n_resumes = RestartTally(self._policy), 0
        for index, entry in enumerate(log):
            if entry.kind == "give_up" or (entry.kind == "stop" and entry.why in ("deterministic", "min_replicas")):
                yield Notice(
                    id=f"given_up-{index}",
                    kind="given_up",
                    text=shorten(describe_decision(entry, tally, self._run_id)),
                    rank=entry.rank if entry.kind == "give_up" else None,
                    attempt=entry.ended if entry.kind == "give_up" else None,
                    at=entry.at,
                )
            tally.add(entry)
            n_resumes += entry.kind == "resume"
            if entry.kind == "restart" and entry.charged and tally.policy is not None and entry.rank is not None:
                used, most = tally.charged(entry.rank, entry.at), tally.policy.per_replica
                if most and used >= MOST_USED * most:
                    yield Notice(
                        id=f"budget-restarts-{entry.rank}-{n_resumes}",
                        kind="budget",
                        text=f"Rank {entry.rank} has used {used} of its {most} restarts.",
                        rank=entry.rank,
                        attempt=entry.ended,
                        at=entry.at,
                    )
                if tally.policy.run and tally.n_charged >= MOST_USED * tally.policy.run:
                    yield Notice(
                        id=f"budget-run-{n_resumes}",
                        kind="budget",
                        text=f"{tally.n_charged} of the {tally.policy.run} restarts of the run are used.",
                        at=entry.at,
                    )

    # Budgets of time and money

    def _time_and_cost(self, log: Sequence[Decision]) -> Iterator[Notice]:
        policy, now, settings = policy_of(log, self._policy), self._now(), self._record.settings
        launched = self._record.created_at
        # The budget of a run that has ended is of no interest any more, also if it is read long after its end.
        if policy is not None and policy.within_s is not None and not self.is_over:
            due_at = launched + MOST_USED * policy.within_s
            if now >= due_at and any(not self._has_ended(rank, log) for rank in self._ranks):
                words = f"{name_duration(policy.within_s)} in which replicas are restarted"
                yield Notice(id="budget-within", kind="budget", text=f"80 % of the {words} have passed.", at=due_at)
        if settings.max_cost is not None:
            share = self._used_share_of_cost(now)
            if share >= MOST_USED:
                words = f"About {share * settings.max_cost:.2f} of at most {settings.max_cost:.2f} US dollars are used."
                yield Notice(id="budget-cost", kind="budget", text=words, at=now)

    def _used_share_of_cost(self, now: float) -> float:
        """Return the used share of `max_cost`, from the price, or else from the time that the amount pays for."""
        settings, used_s = self._record.settings, self._used_s(now)
        if settings.max_cost and self._usd_per_hour:
            return used_s / 3600 * self._usd_per_hour / settings.max_cost
        paid_s = (settings.timeout or 0.0) * (settings.n + settings.spares)
        return used_s / paid_s if paid_s else 0.0

    def _used_s(self, now: float) -> float:
        """Return the seconds that all attempts have run so far, by the clocks of their hosts."""
        begun = {(rank, number) for rank, number, name in self._inventory.records if f"{name}.json" == CLAIM}
        new = sorted(begun - self._claims.keys())

        def read(key: tuple[int, int]) -> tuple[tuple[int, int], Claim | None] | None:
            try:
                return key, self._attempt(*key).find(CLAIM, Claim.parse)
            except CorruptObjectError:  # it stays damaged, so it is not read again
                return key, None
            except StoreError:  # the next look reads it
                return None

        self._claims |= dict(filter(None, at_store(self._store, read, new)))
        used_s = 0.0
        for key in self._claims.keys() | self._outcomes.keys():
            claim, outcome = self._claims.get(key), self._outcomes.get(key)
            begun_at = claim.at if claim is not None else None if outcome is None else outcome.started_at
            if begun_at is not None:
                used_s += max(0.0, (now if outcome is None else outcome.finished_at) - begun_at)
        return used_s

    # The end of the run

    def _has_ended(self, rank: int, log: Sequence[Decision]) -> bool:
        """Return True if a rank has ended and nothing in the records leads to a further attempt."""
        number = self._inventory.newest(rank)
        outcome = self._outcomes.get((rank, number))
        is_blocked = blocking_order(log, rank) is not None
        if outcome is None:
            if (rank, number) in self._damaged:
                return True
            has_begun = any(self._inventory.has(rank, number, name) for name in BEGINNINGS)
            return is_blocked and not has_begun
        if is_blocked:
            return True
        if self._planned.get(rank, -1) > number:
            return False
        if outcome.status is not ReplicaStatus.FAILED:
            return True
        entry = decision_on(log, rank, number)
        if entry is not None:
            return entry.kind in ("give_up", "stop")
        policy = policy_of(log, self._policy)
        if policy is None or policy.nothing or outcome.reason in ("stopped", "fenced"):
            return True
        if str(policy) == ONLY_PREEMPTED and (outcome.reason == "lost" or outcome.was_told_to_end):
            # The launching process asks the service for the reason, and may then restart the rank.
            return self._undecided.note((rank, number)) >= PREEMPTION_S
        return not policy.answers(outcome.reason, was_refused=outcome.was_refused)

    def _end(self, log: Sequence[Decision]) -> Notice:
        newest = {rank: self._outcomes.get((rank, self._inventory.newest(rank))) for rank in self._ranks}
        counts: dict[str, int] = {}
        for outcome in newest.values():
            name = "cancelled" if outcome is None else str(outcome.status)
            counts[name] = counts.get(name, 0) + 1
        least = self._record.settings.min_replicas or len(newest)
        status = (
            "succeeded" if counts.get("succeeded", 0) >= least else "failed" if counts.get("failed") else "cancelled"
        )
        ended = [outcome.finished_at for outcome in newest.values() if outcome is not None]
        at = max([*ended, self._record.created_at])
        numbers = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        took, verb = name_duration(at - self._record.created_at), "was" if status == "cancelled" else "has"
        parts = [f"The run {verb} {status} after {took}: {numbers}."]
        parts += self._facts(newest, at)
        n_resumes = sum(entry.kind == "resume" for entry in log)
        return Notice(id=f"end-{n_resumes}", kind="end", text=shorten(" ".join(parts)), at=at)

    def _facts(self, newest: dict[int, Outcome | None], at: float) -> Iterator[str]:
        """Yield sentences about the cost, the loss, the warnings and the failures of a run that has ended."""
        hours = self._used_s(at) / 3600
        cost = "" if self._usd_per_hour is None else f", about {hours * self._usd_per_hour:.2f} US dollars"
        yield f"It used {hours:.2f} replica hours{cost}."
        losses = self._losses(newest)
        if losses:
            low, high = f"{min(losses):.4g}", f"{max(losses):.4g}"
            yield f"Last loss: {low}." if low == high else f"Last loss: {low} to {high}."
        warned = [outcome.warned for outcome in newest.values() if outcome is not None and outcome.warned is not None]
        if warned:
            n = sum(each.count for each in warned)
            yield f"{n} warning{'s' * (n != 1)}, the first: {shorten(warned[0].first, 200)}"
        failed = [each for each in newest.values() if each is not None and each.status is ReplicaStatus.FAILED]
        for outcome in failed[:MAX_NAMED]:
            yield f"Rank {outcome.rank}: {shorten(outcome.headline or outcome.reason or 'failed', 300)}"
        if len(failed) > MAX_NAMED:
            yield f"Also failed: {name_ranks(each.rank for each in failed[MAX_NAMED:])}."

    def _losses(self, newest: dict[int, Outcome | None]) -> list[float]:
        def read(outcome: Outcome) -> float | None:
            reported = outcome.reported
            if reported is None:
                try:
                    beat = self._attempt(outcome.rank, outcome.attempt).find(HEARTBEAT, Beat.parse)
                except StoreError:
                    return None
                reported = {} if beat is None else beat.reported
            return reported.get("loss")

        known = [outcome for outcome in newest.values() if outcome is not None][:MAX_BEATS]
        return [loss for loss in at_store(self._store, read, known) if isinstance(loss, int | float)]


def wanted(notices: Sequence[Notice], kinds: Sequence[str]) -> list[Notice]:
    """Return the notices of the kinds that the user asked for.

    Args:
        notices: the notices.
        kinds: the kinds. Empty: all kinds.
    """
    return [each for each in notices if each.kind in (kinds or KINDS)]
