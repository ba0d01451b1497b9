"""Tests the bytes of a signed outcome by ADR 0037, and reading if another object is in its place."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.hostile_records import BAD_OUTCOMES, outcome_json

from diloco.errors import FencedError
from diloco.rendezvous.claims import claim
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.membership import Identity, Membership
from diloco.rendezvous.retrying_store import RetryingStore
from executors.attempt import Attempt, Claim
from executors.attempt.outcome import MAX_OUTCOME_BYTES
from executors.attempt.signed_record import is_proven, signed_key
from executors.protocol import Outcome, ReplicaHandle, ReplicaStatus
from executors.store import MemoryStore
from executors.store.inventory import Inventory
from executors.store.record_names import CLAIM, HANDLE, INTENT, OUTCOME
from executors.store.records import to_bytes
from executors.store.run_key import drop_key, held_key, hold_key, lacks_key, note_lacking_key
from executors.supervisor.exits import is_fenced
from executors.worker.claim import claim_alone

KEY = bytes(range(32))
PLAIN = "otter/replicas/0000/0/outcome.json"
FORGED = to_bytes(outcome_json(0, result="forged"))


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    store = MemoryStore()
    hold_key(store.url, "otter", KEY.hex())
    yield store
    drop_key(store.url, "otter")


def record(store: MemoryStore, result: Any = "true", rank: int = 0, number: int = 0) -> Outcome:
    attempt = Attempt(store, "otter", rank, number)
    return attempt.record(attempt.new_outcome(ReplicaStatus.SUCCEEDED, result=result))


def read(store: MemoryStore) -> Any:
    found = Attempt(store, "otter", 0).outcome()
    return None if found is None else found.result


def hidden(plain: str = PLAIN) -> str:
    return signed_key(plain, KEY)


def test_the_bytes_are_those_of_the_adr(store: MemoryStore) -> None:
    record(store, result={"é": [1.5, float("nan")]})
    digits = hmac.digest(KEY, b"name\0" + PLAIN.encode(), "sha256").hex()[:16]
    assert sorted(entry.key for entry in store.list("otter/")) == [
        f"otter/replicas/0000/0/outcome-{digits}.json",
        PLAIN,
    ]
    data = bytes(store.get(f"otter/replicas/0000/0/outcome-{digits}.json"))
    assert data == bytes(store.get(PLAIN))
    fields = json.loads(data)
    proof = fields.pop("proof")
    said = b"outcome\0" + PLAIN.encode() + b"\0" + json.dumps(fields, sort_keys=True).encode()
    assert proof == hmac.new(KEY, said, hashlib.sha256).hexdigest()


def test_every_change_of_a_field_and_every_other_place_loses_the_proof(store: MemoryStore) -> None:
    record(store)
    fields = json.loads(bytes(store.get(PLAIN)))
    assert is_proven(to_bytes(fields), PLAIN, KEY)
    assert not is_proven(to_bytes(fields), PLAIN, bytes(32))
    for name, value in fields.items():
        other = "x" if value != "x" else "y"
        assert not is_proven(to_bytes({**fields, name: other}), PLAIN, KEY), name
    assert not is_proven(to_bytes({**fields, "more": 1}), PLAIN, KEY)
    for place in (
        "otter/replicas/0001/0/outcome.json",
        "otter/replicas/0000/1/outcome.json",
        "other/replicas/0000/0/outcome.json",
        "otter/replicas/0000/0/service.json",
        "otter/spares/0000/0/outcome.json",
    ):
        assert not is_proven(to_bytes(fields), place, KEY), place


@pytest.mark.parametrize("name", BAD_OUTCOMES)
def test_whatever_takes_the_place_of_an_outcome_the_true_one_is_recorded(store: MemoryStore, name: str) -> None:
    store.put(PLAIN, BAD_OUTCOMES[name])
    assert read(store) is None
    assert record(store).result == "true"
    assert read(store) == "true"
    assert bytes(store.get(PLAIN)) == BAD_OUTCOMES[name], "the forged object is left as evidence"


def test_an_object_larger_than_any_outcome_is_not_an_outcome(store: MemoryStore) -> None:
    for place in (PLAIN, hidden()):
        store.put(place, b" " * (MAX_OUTCOME_BYTES + 200))
    assert read(store) is None
    assert Attempt(store, "otter", 0).has_forged_outcome
    assert record(store).result == "true"
    assert read(store) == "true"


def test_the_first_proven_outcome_counts(store: MemoryStore) -> None:
    assert [record(store, result=number).result for number in range(3)] == [0, 0, 0]


def test_one_of_the_two_copies_is_enough_and_without_both_the_attempt_has_not_ended(store: MemoryStore) -> None:
    record(store)
    store.put(PLAIN, FORGED)
    assert read(store) == "true"
    store.put(PLAIN, bytes(store.get(hidden())))
    store.put(hidden(), FORGED)
    assert read(store) == "true"
    store.put(PLAIN, FORGED)
    assert read(store) is None
    assert record(store, result="again").result == "again", "a writer replaces an outcome that is not proven"
    assert read(store) == "again"


def test_an_inventory_has_the_outcomes_with_the_key_and_names_the_others(store: MemoryStore) -> None:
    record(store, rank=1)
    for rank, attempt in ((0, 0), (1, 1)):
        store.put(f"otter/replicas/{rank:04d}/{attempt}/outcome.json", FORGED)
    store.put("otter/replicas/0000/0/outcome-0123456789abcdef.json", FORGED)
    store.put(hidden().replace("/0000/", "/0002/"), bytes(store.get("otter/replicas/0001/0/outcome.json")))
    found = Inventory.of(store, "otter")
    assert found.records == {(1, 0, "outcome")}
    assert found.newest(1) == 0
    assert set(found.dubious) == {(0, 0), (1, 1)}
    assert (Inventory() | found).dubious == found.dubious


def test_the_record_of_a_services_reason_needs_the_key_too(store: MemoryStore) -> None:
    """A restart after `preempted` is free."""
    attempt = Attempt(store, "otter", 0)
    store.put(attempt.key("service.json"), to_bytes({"reason": "preempted", "error": "forged"}))
    told = attempt.record(attempt.new_outcome(ReplicaStatus.FAILED, "signal", notice="SIGTERM", error="it was told to"))
    assert (told.reason, told.error) == ("signal", "it was told to")
    attempt.record_service_reason("preempted", "its machine was taken")
    explained = attempt.outcome()
    assert explained is not None
    assert (explained.reason, explained.error) == ("preempted", "its machine was taken")


HANDLE_OF = {"rank": 0, "backend_name": "local", "metadata": {}}
BEGINNINGS = {
    CLAIM: {"nonce": "theirs", "pid": 4711, "host": "elsewhere", "at": 1.8e9},
    HANDLE: HANDLE_OF,
    INTENT: {"nonce": "theirs", "by": "elsewhere:4711", "at": 1.8e9},
    OUTCOME: outcome_json(0, attempt=1),
}


@pytest.mark.parametrize("name", BEGINNINGS)
def test_no_record_without_the_key_makes_an_attempt_the_newest_one(store: MemoryStore, name: str) -> None:
    later = Attempt(store, "otter", 0, 1)
    store.put(later.key(name), to_bytes(BEGINNINGS[name]))
    store.put(later.key(name).replace(".json", "-0123456789abcdef.json"), to_bytes(BEGINNINGS[name]))
    assert Attempt(store, "otter", 0).newest().number == 0
    assert Inventory.of(store, "otter").newest(0) == 0
    assert later.started_by() is None
    later.create(name, to_bytes(BEGINNINGS[name]))
    assert Attempt(store, "otter", 0).newest().number == 1
    assert Inventory.of(store, "otter").newest(0) == 1


def test_an_attempt_can_be_claimed_although_a_forged_claim_took_its_place(store: MemoryStore) -> None:
    attempt = Attempt(store, "otter", 0)
    store.put(attempt.key(CLAIM), to_bytes(BEGINNINGS[CLAIM]))
    assert claim_alone(attempt)
    assert not claim_alone(attempt), "only the first process with the key claims the attempt"
    store.put(hidden(attempt.key(CLAIM)), to_bytes(BEGINNINGS[CLAIM]))
    assert claim_alone(attempt), "an attempt without both copies of its claim can be claimed again"


def test_a_handle_that_was_replaced_does_not_send_a_look_to_another_process(store: MemoryStore) -> None:
    attempt = Attempt(store, "otter", 0)
    true = ReplicaHandle(0, "local", {"supervisor_pid": 1})
    attempt.create(HANDLE, true.to_json().encode())
    store.put(attempt.key(HANDLE), to_bytes(HANDLE_OF))
    assert attempt.handle("local") == true
    attempt.create(HANDLE, to_bytes({**HANDLE_OF, "metadata": {"supervisor_pid": 2}}), replaces=True)
    found = attempt.handle("local")
    assert found is not None
    assert found.metadata["supervisor_pid"] == 2


def test_a_supervisor_ends_its_process_only_for_a_later_claim_with_the_key(store: MemoryStore) -> None:
    attempt = Attempt(store, "otter", 0)
    running: Any = SimpleNamespace(page=SimpleNamespace(claimed=1), attempt=attempt, pid=1)
    store.put(attempt.at(1).key(CLAIM), to_bytes(BEGINNINGS[CLAIM]))
    assert not is_fenced(running)
    assert claim_alone(attempt.at(1))
    assert is_fenced(running)


@pytest.mark.parametrize("is_signed", [True, False])
def test_only_a_claim_with_the_key_fences_a_living_replica(store: MemoryStore, is_signed: bool) -> None:
    keys = Keys("otter", "main", KEY if is_signed else None)
    members = Membership(RetryingStore(store, clock=lambda: 0.0), keys, Identity(0, 1, 0, "mine"), lambda: 0.0)
    store.put(keys.plain_claim(0, 1), b'{"nonce": "theirs"}')
    store.put(keys.plain_claim(1, 0), b'{"nonce": "theirs"}')
    if is_signed:
        members.check_fence()
        members.look_for_joiners()
        assert members.claimed == {0}, "a forged claim adds no replica"
        assert claim_alone(Attempt(store, "otter", 0, 1))
    with pytest.raises(FencedError):
        members.check_fence()


def test_a_process_joins_past_forged_claims_and_its_own_claim_is_proven(store: MemoryStore) -> None:
    keys = Keys("otter", "main", KEY)
    store.put(keys.plain_claim(1, 0), b'{"nonce": "theirs"}')
    me = claim(RetryingStore(store, clock=lambda: 0.0), keys, None, 1, "mine", lambda: None)
    assert (me.rank, me.nonce) == (1, "mine")
    found = Attempt(store, "otter", 1).find(CLAIM, Claim.parse)
    assert found is not None
    assert found.nonce == "mine"


def test_a_process_without_the_key_reads_records_as_unproven_and_writes_none(store: MemoryStore) -> None:
    drop_key(store.url, "otter")
    note_lacking_key(store.url, "otter")
    assert record(store).unproven
    assert [*store.list("otter/")] == []
    store.put(PLAIN, FORGED)
    found = Attempt(store, "otter", 0).outcome()
    assert found is not None
    assert (found.result, found.unproven) == ("forged", True)
    Attempt(store, "otter", 0).record_service_reason("preempted", "so it says")
    assert [entry.key for entry in store.list("otter/")] == [PLAIN]


def test_a_key_that_is_held_stays_until_a_new_run_takes_the_id(store: MemoryStore) -> None:
    hold_key(store.url, "otter", None)
    note_lacking_key(store.url, "otter")
    assert held_key(store.url, "otter") == KEY
    assert not lacks_key(store.url, "otter")
    assert held_key(store.url, "other") is None
    assert held_key("memory://elsewhere", "otter") is None
