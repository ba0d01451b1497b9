"""A second process without a group is refused, and damaged records do not keep a replica out."""

from __future__ import annotations

from typing import Any

import pytest
from support.patience import ENDLESS
from support.training import next_process

from diloco.errors import DiLoCoError
from diloco.rendezvous.claims import ProcessRecord, claim_process
from diloco.rendezvous.envelope import UNSIGNED, Proof, frame, proof_of
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.membership import Identity
from diloco.rendezvous.retrying_store import RetryingStore
from executors.store import MemoryStore

KEYS = Keys("run", "main")
ME = Identity(1, 2, 0, "nonce of the replica")
KEY = KEYS.process(1, 0)


@pytest.fixture(autouse=True)
def _processes_are_forgotten() -> None:
    next_process()


def claim(store: MemoryStore, proof: Proof = UNSIGNED) -> None:
    patient = RetryingStore(store, clock=lambda: 0.0, tolerance=ENDLESS)
    claim_process(patient, KEYS, ME, proof, lambda: None)


def test_one_process_may_claim_its_part_again_and_another_one_may_not() -> None:
    store = MemoryStore()
    claim(store)
    claim(store)
    next_process()
    with pytest.raises(
        DiLoCoError, match=r"Another process of this replica \(pid \d+\) has the DiLoCo 'main' open\. Several processes"
    ):
        claim(store)


@pytest.mark.parametrize(
    "fields",
    [
        None,
        {},
        {"nonce": 1, "pid": 1, "host": "h"},
        {"nonce": "n", "pid": "1", "host": "h"},
        {"nonce": "n", "pid": 1, "host": ["h"]},
        {"nonce": "n", "pid": 1, "host": "h" * 256},
        {"nonce": "n" * 256, "pid": 1, "host": "h"},
    ],
)
def test_a_damaged_record_of_a_process_keeps_no_replica_out(
    fields: dict[str, Any] | None, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    store.put(KEY, b"\0" * 100 if fields is None else frame(fields, KEY, UNSIGNED))
    claim(store)
    assert "Rank 1 cannot check that only one of its processes takes part" in caplog.text


def test_a_forged_record_of_a_process_keeps_no_replica_out_of_a_signed_run() -> None:
    store = MemoryStore()
    store.put(KEY, ProcessRecord("another", 7, "elsewhere").data(KEY, UNSIGNED))
    claim(store, proof_of(b"k" * 32))
    with pytest.raises(DiLoCoError, match="pid 7 on 'elsewhere'"):
        claim(store)
