"""Rules that could be undone unnoticed once; see `test_rendezvous_survivors.py`. Here with the real training state."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from diloco import DiLoCo
from diloco.keys import Keys
from diloco.membership import _claimed
from diloco.records import Member, Seal
from diloco.rounds import Pace
from diloco.sharding import owners
from diloco.testing import run_replicas
from diloco.work import Settled
from executors.store import Data, MemoryStore
from executors.store.faulty import FaultyStore

PLAIN: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0}
BLOCK_BYTES = 64
NO_HURRY_S = 1e6
"""Nobody takes over what another is to do."""
SHARDED = Pace(small_bytes=0, block_bytes=BLOCK_BYTES, patience_s=NO_HURRY_S, grace_s=NO_HURRY_S)
KEYS = Keys("test", "main")


@pytest.fixture(autouse=True)
def _processes_are_forgotten() -> None:
    _claimed.clear()


def place(store: Any, rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    return {"store": store, "run_id": "test", "rank": rank, "world_size": world_size}


def zeros(n_blocks: int = 4) -> nn.Linear:
    """Return a model of so many blocks, in which whatever was done can be read off."""
    model = nn.Linear(n_blocks * BLOCK_BYTES // 4, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def nudge(model: nn.Module, by: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by)


def values_in(tensor: torch.Tensor) -> list[float]:
    return sorted(set(tensor.flatten().tolist()))


def leave(diloco: DiLoCo) -> None:
    """Leave without what `close` says of steps that nobody averaged."""
    diloco._close(in_order=False)


# -- what is counted, and how ------------------------------------------------------------------------------------------


def test_weights_weigh_in_sharded_rounds() -> None:
    def body(where: Mapping[str, Any]) -> torch.Tensor:
        model, rank = zeros(), where["rank"]
        with DiLoCo(model, inner_steps=1, weight=1.0 + rank, **PLAIN, **where, _pace=SHARDED) as diloco:
            nudge(model, 6.0 * (1 + rank))
            diloco.step()
            return diloco.anchor()["weight"]

    for anchor in run_replicas(3, body):
        torch.testing.assert_close(anchor, torch.full_like(anchor, (1 * 6 + 2 * 12 + 3 * 18) / 6))


class InTurn(MemoryStore):
    """Lets contributions in one after the other, by rank in a given order."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self._order = order
        self._came = 0
        self._next = threading.Condition()

    def put_if_absent(self, key: str, data: Data) -> bool:
        if "/contribution/" not in key:
            return super().put_if_absent(key, data)
        rank = int(key.rpartition("/")[2])
        with self._next:
            self._next.wait_for(lambda: self._order[self._came % len(self._order)] == rank, timeout=30)
            created = super().put_if_absent(key, data)
            self._came += created
            self._next.notify_all()
        return created


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=lambda order: "".join(map(str, order)))
def test_a_sharded_mean_is_the_sum_in_rank_order_in_whatever_order_replicas_arrive(order: tuple[int, ...]) -> None:
    n_blocks, n = 6, 3
    shape = (n, n_blocks * BLOCK_BYTES // 4)
    values = np.random.default_rng(1).lognormal(0.0, 6.0, shape).astype(np.float32)

    def body(where: Mapping[str, Any]) -> bytes:
        model = zeros(n_blocks)
        with DiLoCo(model, inner_steps=1, **PLAIN, **where, _pace=SHARDED) as diloco:
            nudge(model, torch.from_numpy(-values[where["rank"]]))
            diloco.step()
            return diloco.anchor()["weight"].neg().numpy().tobytes()

    def mean(ranks: tuple[int, ...]) -> bytes:
        total = values[ranks[0]] * np.float32(1 / n)
        for rank in ranks[1:]:
            total = total + values[rank] * np.float32(1 / n)
        return bytes(total.tobytes())

    assert len({mean(ranks) for ranks in itertools.permutations(range(n))}) == 3  # two that begin a sum may swap
    assert set(run_replicas(n, body, store=InTurn(order))) == {mean((0, 1, 2))}


class Creations:
    """A replica's view of the common store, which counts the means that it creates."""

    def __init__(self, store: MemoryStore, rank: int, created: Counter[tuple[str, int]]) -> None:
        self._store = store
        self._rank = rank
        self._created = created

    def put_if_absent(self, key: str, data: Data) -> bool:
        if "/mean/" in key:
            self._created[key, self._rank] += 1
        return self._store.put_if_absent(key, data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_in_calm_sharded_rounds_each_shard_is_reduced_once_and_by_its_owner() -> None:
    n, rounds = 4, 5
    store = MemoryStore("calm")
    created: Counter[tuple[str, int]] = Counter()

    def body(where: Mapping[str, Any]) -> None:
        model = zeros(n)
        place = {**where, "store": Creations(store, where["rank"], created)}
        with DiLoCo(model, inner_steps=1, snapshot_every=100, **place, _pace=SHARDED) as diloco:
            for _ in range(rounds):
                nudge(model, 1.0)
                diloco.step()

    run_replicas(n, body, store=store)
    shards = [(entry, shard) for entry in range(rounds) for shard in range(n)]
    assert created == {(KEYS.mean(entry, shard), owners(entry, range(n), shard)[0]): 1 for entry, shard in shards}


# -- what another copy of a rank did -----------------------------------------------------------------------------------


@pytest.mark.parametrize("late", ["carry", "drop"])
def test_work_that_another_copy_s_replaces_is_not_in_the_live_parameters_any_more(late: Any) -> None:
    store = MemoryStore()
    model = zeros()
    diloco = DiLoCo(model, inner_steps=1, late=late, **PLAIN, **place(store))
    nudge(model, 1.0)
    mean = np.full(model.weight.numel(), -3.0, np.float32)  # a pseudo-gradient is anchor - live
    other = Seal({0: Member("another", 0, 1.0, "d" * 32)}, diloco._training.digest(0), 0, mean.tobytes())
    store.put_if_absent(KEYS.seal(0), other.data())
    report = diloco.step()
    assert report is not None
    assert not report.counted
    assert values_in(model.weight) == values_in(diloco.anchor()["weight"]) == [3.0]
    leave(diloco)


def payload(value: float) -> memoryview:
    return np.full(zeros().weight.numel(), value, np.float32).data.cast("B")


def test_of_work_that_is_to_be_dropped_in_part_the_rest_stays() -> None:
    model = zeros()
    diloco = DiLoCo(model, inner_steps=1, **PLAIN, **place(MemoryStore()))
    nudge(model, 5.0)
    diloco._training.apply(0, [payload(-3.0)], Settled.DROPPED, [payload(-4.0)])
    assert values_in(diloco.anchor()["weight"]) == [3.0]
    assert values_in(model.weight) == [3.0 + 5.0 - 4.0]
    leave(diloco)


@pytest.mark.parametrize("mix", [0.0, 0.5])
@pytest.mark.parametrize(
    ("settled", "stays"), [(None, 1.0), (Settled.KEPT, 1.0), (Settled.COUNTED, None), (Settled.DROPPED, 0.0)]
)
def test_of_restored_work_that_stays_which_no_mean_contains(
    settled: Settled | None, stays: float | None, mix: float
) -> None:
    model = zeros()
    diloco = DiLoCo(model, inner_steps=1, mix=mix, **PLAIN, **place(MemoryStore()))
    nudge(model, 2.0)
    diloco._training.restore(diloco._training.progress(), [settled])
    assert values_in(model.weight) == [2.0 * (mix if stays is None else stays)]
    leave(diloco)


def test_what_a_seal_counted_after_a_state_was_kept_is_not_there_again_in_who_starts_from_it() -> None:
    died, gone_on, was_back = threading.Event(), threading.Event(), threading.Event()
    pace = Pace(grace_s=0.05, patience_s=0.01)
    options: dict[str, Any] = {"inner_steps": 4, "fragments": 2, "snapshot_every": 2, "_pace": pace, **PLAIN}

    def begin(where: Mapping[str, Any]) -> tuple[nn.Module, DiLoCo]:
        model = nn.Sequential(zeros(1), zeros(1))
        diloco = DiLoCo(model, **options, **where)
        diloco.attach_state("data", torch.Generator())
        return model, diloco

    def train_until(position: int, model: nn.Module, diloco: DiLoCo) -> None:
        while diloco.rounds < position:
            nudge(model, 1.0)
            diloco.step()
        diloco._background.finish()

    def lasting(where: Mapping[str, Any]) -> None:
        model, diloco = begin(where)
        train_until(3, model, diloco)
        died.wait()
        train_until(9, model, diloco)
        gone_on.set()
        was_back.wait()
        leave(diloco)

    def dying(where: Mapping[str, Any]) -> None:
        train_until(3, *begin(where))
        del _claimed["memory://", "test", 0]  # from here on as another process
        died.set()
        gone_on.wait()
        model, diloco = begin(where)
        kept = diloco._attachments.kept
        assert kept is not None
        assert kept.position == 2  # before the entry that counted the work which the first fragment then had
        assert values_in(kept.progress(diloco._training.sizes())[0]) == [-2.0]
        assert diloco.rounds == 9
        for name, anchor in diloco.anchor().items():
            assert torch.equal(model.get_parameter(name), anchor), f"{name}: work is there that was counted"
        leave(diloco)

    def body(where: Mapping[str, Any]) -> None:
        try:
            (lasting if where["rank"] else dying)(where)
        finally:
            for event in (died, gone_on, was_back) if not where["rank"] else (gone_on,):
                event.set()

    store = MemoryStore()
    run_replicas(2, body, store=store)
    seals = [Seal.parse(store.get(KEYS.seal(entry))).members for entry in range(9)]
    assert [set(members) for members in seals] == [{0, 1}] * 3 + [{1}] * 6


# -- leaving -----------------------------------------------------------------------------------------------------------


def test_close_applies_what_is_in_flight() -> None:
    def body(where: Mapping[str, Any]) -> tuple[int, float]:
        model = zeros()
        options: dict[str, Any] = {"inner_steps": 4, "overlap_steps": 2, "allow_no_rounds": True, **PLAIN}
        diloco = DiLoCo(model, **options, **where, _pace=Pace(grace_s=NO_HURRY_S))
        for _ in range(2):
            nudge(model, 1.0 + where["rank"])
            diloco.step()
        assert diloco.rounds == 0
        diloco.close()
        return diloco.rounds, diloco.anchor()["weight"].mean().item()

    assert run_replicas(2, body) == [(1, 3.0)] * 2


def test_a_bye_whose_first_writes_fail_is_said_again() -> None:
    store = FaultyStore(MemoryStore(), seed=0)
    for nth in (1, 2, 3):
        store.fail_at("put", key="*/bye/*", count=nth, action="error")
    DiLoCo(zeros(), **place(store)).close()
    assert len(store.log) == 3
    assert [entry.key for entry in store.list("test/diloco/main/bye/")] == [KEYS.bye(0, 0)]


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 0.1)


# -- snapshots ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outer_optimizer", "flipped"),
    [(None, None), (None, "before it is sent"), (None, "after it is sent"), (adam, None), (adam, "after it is sent")],
)
def test_a_bit_that_flips_between_an_outer_step_and_the_copy_of_its_result_is_in_no_snapshot(
    outer_optimizer: Any, flipped: str | None
) -> None:
    store = FaultyStore(MemoryStore(), seed=0)
    model = zeros()
    diloco = DiLoCo(model, inner_steps=1, snapshot_every=1, outer_optimizer=outer_optimizer, **place(store))

    def flip() -> None:
        diloco._training.anchors[0].view(torch.int32)[5] ^= 1 << 20

    if flipped == "after it is sent":
        store.fail_at("put_if_absent", key="*/r2/contribution/0", after=flip)
    for entry in range(3):
        nudge(model, 1.0)
        if flipped == "before it is sent" and entry == 2:
            flip()
        diloco.step()
        diloco._background.finish()  # who is still at one snapshot takes no other
    pointers = sorted(entry.key for entry in store.list("test/diloco/main/snapshot/"))
    assert pointers == [KEYS.snapshot(entry) for entry in range(3 if flipped is None else 2)]
    leave(diloco)
