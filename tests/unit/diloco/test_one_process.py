"""A replica is one process: others are refused, and damaged records do not keep a replica out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from support.patience import ENDLESS
from support.training import next_process, place
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from diloco import DiLoCo
from diloco.errors import DiLoCoError
from diloco.process_check import check_is_one_process
from diloco.rendezvous.envelope import UNSIGNED, Proof, frame, proof_of
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.membership import Identity, ProcessRecord, RunLocation, claim_process
from diloco.rendezvous.retrying_store import RetryingStore
from executors.replica import Replica
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
    with pytest.raises(DiLoCoError, match="cannot take part as rank 1, because process"):
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
    with pytest.raises(DiLoCoError, match="7 on 'elsewhere'"):
        claim(store)


def where(rank: int = 0, world_size: int = 1) -> RunLocation:
    replica = Replica(rank, world_size, "run", 0, "memory://here")
    return RunLocation(replica, MemoryStore(), "run", rank, world_size)


TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2"}


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_process_that_torchrun_started_is_refused_with_the_number_of_replicas_to_launch(world_size: int) -> None:
    with pytest.raises(DiLoCoError) as caught:
        check_is_one_process(where(0, world_size), None, TORCHRUN)
    assert str(caught.value) == (
        "DiLoCo needs one process per replica, and this is process 1 of 2 in one replica. Launch more "
        f"replicas instead, without torchrun or accelerate launch: replicas launch … --n {2 * world_size}."
    )


@pytest.mark.parametrize(
    "environ",
    [{}, {**TORCHRUN, "WORLD_SIZE": "1"}, {"RANK": "1", "WORLD_SIZE": "2"}, {**TORCHRUN, "WORLD_SIZE": "two"}],
)
def test_variables_that_name_no_other_process_refuse_nothing(environ: dict[str, str]) -> None:
    check_is_one_process(where(), None, environ)


def test_a_process_with_a_given_rank_is_a_separate_replica() -> None:
    check_is_one_process(where(), 0, TORCHRUN)


@pytest.fixture
def _member_of_two() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_member_of_two")
def test_a_member_of_a_process_group_is_refused_and_one_of_a_group_of_all_replicas_is_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(DiLoCoError, match="this is process 1 of 2 in one"):
        DiLoCo(nn.Linear(1, 1))
    for rank, world_size in ((0, 1), (0, 2), (1, 3)):
        with pytest.raises(DiLoCoError, match="this is process 1 of 2 in one"):
            check_is_one_process(where(rank, world_size), None, {})
    check_is_one_process(where(1, 2), None, {})
    DiLoCo(nn.Linear(1, 1), **place()).close()
