"""Tests the bytes of proofs, and that a signed run ignores records that are forged, replayed, swapped or unsigned."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from support.patience import lasting
from support.training import leave, next_process, nudge, place
from torch import nn

from diloco.errors import ContributionError
from diloco.outer import open_diloco
from diloco.rendezvous.envelope import UNSIGNED, BadRecordError, Signatures, frame, proof_of, unframe, unproven_fields
from diloco.rendezvous.frames import Contribution, MeanHead, Seal, SealedReplica
from diloco.rendezvous.reduction import BlockFormat, ShardInput, weighted_mean
from diloco.rendezvous.retrying_store import RetryingStore
from diloco.rendezvous.round import Limits
from diloco.rendezvous.snapshot import SnapshotPointer
from diloco.wires import FP32, WIRES
from diloco.wires.wire import Wire
from executors.replica import Replica, set_current_replica
from executors.settings import Settings
from executors.store import MemoryStore, open_store
from executors.store.run_key import RUN_KEY, key_id

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
SIGNED, ID = proof_of(KEY), key_id(KEY)
D = "d" * 32


@pytest.fixture(autouse=True)
def _processes_are_forgotten() -> None:
    next_process()


def test_the_bytes_of_a_signed_frame_are_those_of_the_decision_record() -> None:
    key = "brave-otter-1f3a/diloco/main/r12/mean/3"
    data = MeanHead((D,), (2,)).head(key, SIGNED)
    head = b'{"blocks":"' + D.encode() + b'","left_out":[2]}'
    proof = hmac.new(KEY, b"RPL1" + key.encode() + b"\0" + head, hashlib.sha256).digest()[:16]
    assert data.rstrip(b"\0") == b"RPL1" + len(head).to_bytes(4, "little") + proof + head
    payload = b"a block"
    assert SIGNED.digest(payload) == blake3(payload).hexdigest()[:32]
    for proves in (SIGNED, UNSIGNED):
        digest = proves.hash()
        digest.update(payload[:3])
        digest.update(memoryview(payload)[3:])
        assert digest.hexdigest() == proves.digest(payload)


def test_a_record_is_believed_under_its_own_key_alone_and_only_with_the_run_s() -> None:
    seal = Seal({0: SealedReplica("x", 0, 1.0, D)}, D, 0, b"mean")
    sent = Contribution(0, 0, "x", 1.0, D, 4, (D,), (1.0,))
    records: dict[Any, bytes] = {
        Seal.parse: b"".join(seal.data("run/diloco/main/seal/1", SIGNED)),
        Contribution.parse: sent.head("run/diloco/main/seal/1", SIGNED),
        MeanHead.parse: MeanHead((D,), ()).head("run/diloco/main/seal/1", SIGNED),
        SnapshotPointer.parse: SnapshotPointer("n", 0, (D,), (D,), {"tensors": {}}).data(
            "run/diloco/main/seal/1", SIGNED
        ),
        unframe: frame({"digest": D}, "run/diloco/main/seal/1", SIGNED),
    }
    for parse, data in records.items():
        parse(data, "run/diloco/main/seal/1", SIGNED)
        for key, proof in {
            "run/diloco/main/seal/2": SIGNED,  # replayed
            "another-run/diloco/main/seal/1": SIGNED,
            "run/diloco/other/seal/1": SIGNED,
            "run/diloco/main/seal/1\0": SIGNED,
            "run/diloco/main/seal/1": proof_of(OTHER),  # forged
            "": UNSIGNED,
        }.items():
            with pytest.raises(BadRecordError, match="other bytes than were written"):
                parse(data, key, proof)
        for at in (8, 23, 24, data.index(b"}")):
            changed = bytearray(data)
            changed[at] ^= 1
            with pytest.raises(BadRecordError):
                parse(bytes(changed), "run/diloco/main/seal/1", SIGNED)
    unsigned = b"".join(seal.data("run/diloco/main/seal/1", UNSIGNED))
    with pytest.raises(BadRecordError):
        Seal.parse(unsigned, "run/diloco/main/seal/1", SIGNED)
    with pytest.raises(BadRecordError, match="mean in this seal is not what was sealed"):
        Seal.parse(records[Seal.parse][:-4] + b"MEAN", "run/diloco/main/seal/1", SIGNED)


# -- replicas with and without the key
# ---------------------------------------------------------------------------------------------------


SOON = Limits(takeover_after_s=0.05, grace_s=0.05)


def model() -> nn.Module:
    return nn.Linear(2, 2, bias=False)


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        (
            KEY,
            None,
            f"This run is signed (key {ID}), and this replica has no key: start it through `replicas`, or pass ",
        ),
        (KEY, OTHER, f"This run is signed (key {ID}), and this replica has another one ({key_id(OTHER)}): start it"),
        (
            None,
            KEY,
            f"This replica has the key {ID}, but the run is not signed with it. If you launched",
        ),
    ],
    ids=["no key", "another key", "not signed"],
)
def test_a_replica_without_the_run_s_key_is_refused_by_name(first: bytes, then: bytes, said: str) -> None:
    store = MemoryStore()
    open_diloco(model(), key=first, **place(store, world_size=2)).close()
    next_process()
    with pytest.raises(ContributionError, match=re.escape(said)):
        open_diloco(model(), key=then, limits=SOON, **place(store, 1, world_size=2))


@pytest.mark.parametrize("contract", [{}, {"signed": "deadbeef"}])
def test_a_forged_agreement_keeps_no_more_replicas_out_than_a_damaged_one(contract: dict[str, str]) -> None:
    store, key = MemoryStore(), "test/diloco/main/snapshot/0"
    settings: dict[str, Any] = {"key": KEY, "inner_steps": 1, "snapshot_every": 1, "limits": SOON}
    first = open_diloco(model(), **settings, **place(store, world_size=2))
    for _ in range(3):
        nudge(first._model_state.model, torch.ones(2, 2))
        first.step()
    first._workers.uploads.finish()
    store.put(key, frame({"contract": contract}, key, UNSIGNED))
    next_process()
    with open_diloco(model(), allow_no_rounds=True, **settings, **place(store, 1, 2)) as second:
        assert second.rounds == 3
        assert torch.equal(second.anchor()["weight"], first.anchor()["weight"])
    leave(first)


@pytest.mark.parametrize(
    ("key", "said"), [("ab" * 32, "key must be bytes, .* got a str"), (b"x" * 15, "at least 16 bytes, got 15")]
)
def test_an_invalid_run_key_is_refused_and_not_shown(key: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said) as caught:
        open_diloco(model(), key=key, **place(MemoryStore()))
    assert str(key) not in str(caught.value)


def test_the_key_from_the_launch_is_used_whatever_is_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    monkeypatch.setenv(RUN_KEY, KEY.hex())
    open_diloco(model(), **place(store)).close()
    pointer = store.get("test/diloco/main/snapshot/0")
    assert unproven_fields(pointer)["contract"]["signed"] == key_id(KEY)
    assert KEY.hex() not in repr(vars(open_diloco(model(), name="other", **place(store)))["_settings"])
    monkeypatch.setenv(RUN_KEY, "secret")
    with pytest.raises(ValueError, match=f"{RUN_KEY} is not a key") as caught:
        open_diloco(model(), **place(store))
    assert "secret" not in str(caught.value)


def test_a_replica_of_a_signed_launch_that_lost_its_key_reports_that(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica(0, 1, "test", 0, "memory://here", claimed_nonce="n")
    replica.__dict__["record"] = type(
        "Record", (), {"key_id": key_id(KEY), "continues": None, "settings": Settings(n=1)}
    )
    monkeypatch.setattr("executors.replica._current", None)
    set_current_replica(replica)
    try:
        with pytest.raises(ContributionError, match=rf"This run is signed \(key {ID}\), .* has no key"):
            open_diloco(model())
        open_diloco(model(), key=KEY).close()
    finally:
        set_current_replica(None)


def test_an_unsigned_agreement_names_no_key() -> None:
    store = MemoryStore()
    open_diloco(model(), **place(store)).close()
    fields, _, _ = unframe(store.get("test/diloco/main/snapshot/0"), "", UNSIGNED)
    assert "signed" not in fields["contract"]
    assert json.loads(json.dumps(fields)) == fields


def test_proven_bytes_cannot_be_changed_through_their_file(tmp_path: Any) -> None:
    store = open_store(tmp_path)
    store.put("large", b"good" * 100_000)
    for copies in (False, True):
        patient = RetryingStore(store, clock=lambda: 0.0, tolerance=lasting(1.0), copies=copies)
        seen = patient.for_thread().peek("large")
        assert seen is not None
        with open(tmp_path / "large", "r+b") as file:
            file.write(b"evil")
        assert bytes(seen[:4]) == (b"good" if copies else b"evil")
        (tmp_path / "large").write_bytes(b"good" * 100_000)


# -- training under forgeries ------------------------------------------------------------------------------------------


def test_a_rank_takes_up_nothing_that_another_user_kept_for_it() -> None:
    """A rank's saved states are signed, too. Under another position, or with other tensors, they are ignored."""
    store = MemoryStore()
    signed: dict[str, Any] = {"key": KEY, "inner_steps": 1, "snapshot_every": 1}

    def attempt(**changes: Any) -> float:
        next_process()
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        with open_diloco(net, **{**signed, **changes}, **place(store)) as diloco:
            diloco.attach_state("optimizer", optimizer)
            found = float(optimizer.param_groups[0]["lr"])
            for _ in range(2):
                optimizer.param_groups[0]["lr"] += 1.0
                diloco.step()
        return found

    assert [attempt(), attempt()] == [0.5, 2.5]
    records = sorted(entry.key for entry in store.list("test/diloco/main/own/0/") if entry.key.endswith("record"))
    for key in records:
        fields, _, _ = unframe(store.get(key), key, SIGNED)
        store.put(key, frame(fields, key, proof_of(OTHER)))
    assert attempt() == 0.5


class Meddling(Signatures):
    """Simulates a process that writes to the mapped file of an input as soon as a part of it was digested."""

    def __init__(self, file: bytearray) -> None:
        super().__init__(KEY)
        self._file = file

    def hash(self) -> Any:
        digest, file = super().hash(), self._file

        class Hash:
            hexdigest = digest.hexdigest

            def update(self, data: Any) -> None:
                digest.update(data)
                file[:] = bytes(len(file))

        return Hash()


@pytest.mark.parametrize("wire", [WIRES["fp32"], WIRES["int8"]], ids=["fp32", "int8"])
def test_the_added_bytes_are_the_proven_bytes_although_their_file_changes(wire: Wire) -> None:
    n, file = 600, bytearray(wire.size(600))
    wire.encode(np.linspace(1, 2, n, dtype=np.float32), memoryview(file), n, 0)
    honest, mean = bytes(file), bytearray(FP32.size(n))
    blocks = BlockFormat(n, n, wire, FP32, Meddling(file))
    weighted_mean([ShardInput(0, 1.0, memoryview(file), (SIGNED.digest(honest),))], memoryview(mean), blocks)
    assert bytes(file) == bytes(len(file)), "the file did not change, so nothing was tested"
    again = bytearray(FP32.size(n))
    weighted_mean(
        [ShardInput(0, 1.0, memoryview(honest), (SIGNED.digest(honest),))],
        memoryview(again),
        replace(blocks, proof=SIGNED),
    )
    assert mean == again
