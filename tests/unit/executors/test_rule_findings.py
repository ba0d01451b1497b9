"""Tests which records about rules a view shows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from executors.attempt import Attempt
from executors.errors import StoreError
from executors.settings.rule_finding import BROKEN, RuleFinding
from executors.store import MemoryStore
from executors.view.replica_records import ReplicaRecords
from executors.view.rule_findings import RuleFindings

FINDING = RuleFinding(
    rank=0,
    attempt=0,
    index=0,
    rule="loss > 8",
    verdict=BROKEN,
    evidence="loss is 9 in report 3",
    action="notify",
    member=None,
    at=1.0,
)


class FailsOnce(MemoryStore):
    """A store whose first read is not answered."""

    has_failed = False

    def get(self, key: str, *, start: int = 0, size: int | None = None) -> memoryview:
        if not self.has_failed:
            self.has_failed = True
            raise StoreError("The store does not answer.", key=key, url=self.url)
        return super().get(key, start=start, size=size)


def findings_of(store: MemoryStore) -> RuleFindings:
    key = (FINDING.rank, FINDING.attempt, FINDING.index, True)
    records: Any = SimpleNamespace(store=store, run_id="run", inventory=SimpleNamespace(rules={key}), map=map)
    return RuleFindings(cast("ReplicaRecords", records))


def test_a_broken_rule_that_the_store_did_not_return_is_shown_by_the_next_look() -> None:
    store = FailsOnce()
    store.put(Attempt(store, "run", 0, 0).key(FINDING.name), FINDING.to_bytes())
    findings = findings_of(store)
    assert [list(findings.read()), list(findings.read()), list(findings.read())] == [[], [FINDING], [FINDING]]


def test_a_damaged_record_of_a_rule_is_left_out() -> None:
    store = MemoryStore()
    store.put(Attempt(store, "run", 0, 0).key(FINDING.name), b"{")
    findings = findings_of(store)
    assert [list(findings.read()), list(findings.read())] == [[], []]
