"""Replicas that start again, join later, or exist twice, and the attached states that they save."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from support.training import PLAIN, adam, leave, next_process, nudge, place
from torch import nn

from diloco.attached_state import from_arrays, to_arrays
from diloco.errors import ContributionError, FencedError, QuorumTimeoutError
from diloco.outer import open_diloco
from diloco.rendezvous.contribution import check_weight
from diloco.rendezvous.round import Limits
from diloco.testing import run_replicas
from executors.errors import CorruptObjectError
from executors.store import MemoryStore
from executors.store.faulty import FaultyStore


@pytest.fixture(autouse=True)
def _processes_are_forgotten() -> None:
    next_process()


class Trainer:
    """A small model with momentum, a schedule, random noise and a data position: everything that has a state."""

    def __init__(self, where: Mapping[str, Any], **options: Any) -> None:
        self.model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        own = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.normal_(generator=own)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.02)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 200)
        self.noise = torch.Generator().manual_seed(5 + where["rank"])
        self.data = np.random.default_rng(7 + where["rank"])
        self.shuffle = random.Random(3)
        defaults: dict[str, Any] = {"inner_steps": 4, "snapshot_every": 1, "outer_momentum": 0.5}
        self.diloco = open_diloco(self.model, **{**defaults, **options}, **where)
        for name in ("optimizer", "schedule", "noise", "data", "shuffle"):
            self.diloco.attach_state(name, getattr(self, name))

    def step(self) -> float:
        x = torch.from_numpy(self.data.normal(size=(16, 3)).astype(np.float32))
        x = x + 0.1 * self.shuffle.random() * torch.randn(16, 3, generator=self.noise)
        loss = ((self.model(x) - x.sum(1, keepdim=True)) ** 2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.diloco.step()
        return float(loss.detach())

    def train_until(self, step: int) -> list[float]:
        losses = []
        while self.diloco.inner_step < step:
            losses.append(self.step())
        return losses

    def die(self) -> None:
        """End like a process that is killed, once its uploads are through."""
        self.diloco._workers.uploads.finish()


@pytest.mark.parametrize(("died_at", "n_fragments"), [(20, 1), (21, 1), (23, 1), (20, 2), (21, 2)])
def test_a_restarted_replica_continues_as_if_it_had_never_died(died_at: int, n_fragments: int) -> None:
    whole = Trainer(place(MemoryStore()), fragments=n_fragments, snapshot_every=n_fragments)
    expected = whole.train_until(60)
    whole.diloco.close()
    next_process()
    store = MemoryStore()
    first = Trainer(place(store), fragments=n_fragments, snapshot_every=n_fragments)
    losses = first.train_until(died_at)
    first.die()
    next_process()
    second = Trainer(place(store), fragments=n_fragments, snapshot_every=n_fragments)
    assert second.diloco.inner_step == 20
    losses = losses[:20] + second.train_until(60)
    second.diloco.close()
    if n_fragments == 1:
        assert losses == expected
    else:  # restored parameters are anchor - (anchor - live), so the last bit may differ
        assert losses == pytest.approx(expected, rel=1e-4)
    for name, value in whole.diloco.anchor().items():
        torch.testing.assert_close(second.diloco.anchor()[name], value, rtol=1e-4, atol=1e-5)


def test_with_rare_snapshots_the_loss_has_no_bump() -> None:
    def mean_loss(store: MemoryStore, die_at: int | None) -> float:
        next_process()
        trainer = Trainer(place(store), snapshot_every=5)
        if die_at is not None:
            trainer.train_until(die_at)
            trainer.die()
            next_process()
            trainer = Trainer(place(store), snapshot_every=5)
        trainer.train_until(120)
        losses = trainer.train_until(160)
        trainer.diloco.close()
        return sum(losses) / len(losses)

    assert mean_loss(MemoryStore(), 118) == pytest.approx(mean_loss(MemoryStore(), None), rel=0.2)


def test_attached_state_is_stored_as_safetensors_and_json() -> None:
    store = MemoryStore()
    trainer = Trainer(place(store))
    trainer.train_until(9)
    trainer.diloco.close()
    (key,) = [e.key for e in store.list("test/diloco/main/own/0/2/") if e.key.endswith(".safetensors")]
    arrays = safetensors.numpy.load(bytes(store.get(key)))
    state = from_arrays(arrays, "attached/optimizer")
    assert state is not None
    assert state["param_groups"][0]["betas"] == (0.9, 0.999)
    assert torch.equal(state["state"][0]["step"], torch.tensor(8.0))


def died_after(steps: int, **options: Any) -> MemoryStore:
    """Return the store after a replica has trained for some steps and died."""
    store = MemoryStore()
    trainer = Trainer(place(store), **options)
    trainer.train_until(steps)
    trainer.die()
    next_process()
    return store


def test_the_state_of_an_earlier_attempt_is_released_when_training_continues(caplog: pytest.LogCaptureFixture) -> None:
    again = Trainer(place(died_after(9)))
    assert again.diloco._attached.kept is not None
    arrays = [weakref.ref(values) for values in again.diloco._attached.kept.arrays.values()]
    assert len(arrays) > 10
    again.step()
    gc.collect()
    assert not [values for values in arrays if values() is not None]
    assert "is attached after a step" not in caplog.text
    del again.diloco._attached.things["noise"]
    again.diloco.attach_state("noise", torch.Generator())
    assert "rank 0: 'noise' is attached after a step, so its saved state is lost" in caplog.text
    leave(again.diloco)


def rot(store: MemoryStore, key: str) -> None:
    store.put(key, bytes(store.get(key))[:-1] + b"?")


def test_a_damaged_record_means_the_one_before_it() -> None:
    for name in ("record", "tensors.safetensors"):
        store = died_after(12)
        rot(store, f"test/diloco/main/own/0/3/0/{name}")
        again = Trainer(place(store))
        assert again.diloco._attached.kept is not None
        assert again.diloco._attached.kept.position == 2, name
        again.diloco.close()
        next_process()


def test_a_damaged_agreement_does_not_keep_replicas_away_from_good_snapshots(caplog: pytest.LogCaptureFixture) -> None:
    store = died_after(12)
    rot(store, "test/diloco/main/snapshot/0")
    again = Trainer(place(store), round_timeout_s=0.5)
    assert again.diloco.inner_step == 12
    assert "test/diloco/main/snapshot/0 in memory:// was damaged in each of 3 readings" in caplog.text
    again.diloco.close()


SMALL = Limits(grace_s=0.2, takeover_after_s=0.01)
SHARDED = replace(SMALL, small_bytes=0)


@pytest.mark.parametrize(("key", "limits"), [("seal/2", SMALL), ("r2/mean/0", SHARDED)])
def test_the_newest_round_that_is_damaged_is_named_within_the_grace(
    key: str, limits: Limits, caplog: pytest.LogCaptureFixture
) -> None:
    store = died_after(12, snapshot_every=10, limits=limits)
    rot(store, f"test/diloco/main/{key}")
    with pytest.raises(
        CorruptObjectError, match=rf"^Round 3 cannot be completed: test/diloco/main/{key} is damaged"
    ) as error:
        Trainer(place(store), snapshot_every=10, limits=limits)
    assert "replicas resume test --from-snapshot" in str(error.value)
    assert caplog.messages == [f"test/diloco/main/{key} in memory:// was damaged in each of 3 readings."]


def test_a_damaged_seal_is_waited_for_while_the_others_continue_from_it() -> None:
    store = died_after(12, snapshot_every=10, limits=SMALL)
    rot(store, "test/diloco/main/seal/2")
    store.put("test/diloco/main/seal/3", b"somebody had read it before it rotted")
    with pytest.raises(QuorumTimeoutError, match=r"^Round 3 cannot be completed: its seal \(test/diloco/main/seal/2\)"):
        Trainer(place(store), snapshot_every=10, limits=replace(SMALL, round_timeout_s=0.6))


def test_a_listing_that_fails_costs_no_state() -> None:
    failing = FaultyStore(died_after(12), seed=0)
    failing.fail_at("list", key="*/own/0/", action="error")
    again = Trainer(place(failing))
    assert len(failing.log) == 1
    assert again.diloco._attached.kept is not None
    again.diloco.close()


def test_states_of_all_kinds_come_back_as_they_went() -> None:
    state = {
        "a": [1, 2.5, None, True, "x"], 3: (torch.ones(2, dtype=torch.bfloat16), torch.tensor(7)),
        "n": {"deep": np.arange(3), "half": torch.ones(1, dtype=torch.float16), "empty": torch.empty(0)},
        "number": np.float32(1.5), "big": 1 << 100,
    }  # fmt: skip
    back = from_arrays(to_arrays(state, "p"), "p")
    assert back is not None
    assert back["a"] == state["a"]
    assert back["big"] == 1 << 100
    assert back["number"] == 1.5
    assert torch.equal(back[3][0], torch.ones(2, dtype=torch.bfloat16))
    assert back[3][1].item() == 7
    assert back["n"]["deep"].tolist() == [0, 1, 2]
    assert from_arrays({}, "p") is None


def test_state_that_cannot_be_saved_is_refused_by_name_when_it_is_attached() -> None:
    class Odd:
        def __init__(self, value: Any = print) -> None:
            self.value = value

        def state_dict(self) -> dict[str, Any]:
            return {"hooks": [1, self.value]}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    with open_diloco(nn.Linear(2, 2), **place(MemoryStore())) as diloco:
        with pytest.raises(TypeError, match=r"odd\['hooks'\]\[1\] is a builtin_function_or_method"):
            diloco.attach_state("odd", Odd())
        for dtype in (torch.complex64, torch.float8_e4m3fn):
            with pytest.raises(TypeError, match=rf"odd\['hooks'\]\[1\] is a Tensor of {dtype}, which can be saved"):
                diloco.attach_state("odd", Odd(torch.ones(2).to(dtype)))
        with pytest.raises(TypeError, match=r"odd\['hooks'\]\[1\] is a ndarray of complex128, which can be saved"):
            diloco.attach_state("odd", Odd(np.ones(2, complex)))
        with pytest.raises(TypeError, match="an object with state_dict"):
            diloco.attach_state("number", 3)
        diloco.attach_state("fine", torch.Generator())
        with pytest.raises(ValueError, match="Another object is attached as 'fine'"):
            diloco.attach_state("fine", torch.Generator())


def test_a_newer_attempt_fences_the_older_one() -> None:
    store = MemoryStore()
    older = open_diloco(nn.Linear(2, 2), inner_steps=1, **place(store))
    older.step()
    next_process()
    newer = open_diloco(nn.Linear(2, 2), inner_steps=1, **place(store))
    assert newer.rounds == 1
    with pytest.raises(
        FencedError, match="Attempt 0 of rank 0 in run 'test' ends, because attempt 1 of this rank has begun"
    ):
        older.step()
    newer.step()
    newer.close()
    leave(older)


@pytest.mark.parametrize("outer", [None, adam])
def test_a_process_that_joins_later_starts_from_a_snapshot_and_counts_from_its_second_round_on(outer: Any) -> None:
    store = MemoryStore()
    joined, go_on = threading.Event(), threading.Event()
    options: dict[str, Any] = {"inner_steps": 1, "total_steps": 100_000, "snapshot_every": 2, "outer_optimizer": outer}

    def body(where: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], list[tuple[int, ...]]]:
        joins = where["rank"] == 2
        if joins:
            go_on.wait()
        model = nn.Linear(2, 2)
        place_ = {**where, "world_size": 2, "rank": "join" if joins else where["rank"]}
        ranks = []
        with open_diloco(model, **options, **place_) as diloco:
            if joins:
                assert diloco._model_state.rank == 2
                assert diloco.rounds >= 7
                joined.set()
            while diloco.rounds < 7:
                diloco.step()
            diloco._workers.uploads.finish()
            go_on.set()
            joined.wait()
            while not diloco.is_over:  # on a slow machine, there are many rounds before the late replica is in
                report = diloco.step()
                if report is not None:
                    ranks.append(report.ranks)
                elif not joins and not diloco.is_over:
                    pytest.fail("a replica in phase has a round at every step")
                if ranks.count((0, 1, 2)) == 5:
                    diloco.stop()
            return diloco.anchor(), ranks

    one, two, late = run_replicas(3, body, store=store)
    for name, value in one[0].items():
        assert torch.equal(value, two[0][name])
        assert torch.equal(value, late[0][name])
    assert (0, 1, 2) in late[1][:2]
    assert "test/replicas/0002/0/started.json" in [e.key for e in store.list("test/replicas/")]
    snapshots = [int(e.key.rpartition("/")[2]) for e in store.list("test/diloco/main/snapshot/")]
    assert len(snapshots) > 3


def test_a_run_whose_replicas_all_died_continues_with_its_first_contract() -> None:
    def train(store: MemoryStore, ends: list[int]) -> dict[str, torch.Tensor]:
        for end in ends:
            next_process()
            trainer = Trainer(place(store), total_steps=200, inner_steps=5, snapshot_every=1)
            assert trainer.diloco._settings.warmup == 20
            trainer.train_until(end)
            trainer.die()
        return trainer.diloco.anchor()

    at_once, in_parts = train(MemoryStore(), [200]), train(store := MemoryStore(), [52, 111, 200, 200])
    assert all(torch.equal(at_once[name], value) for name, value in in_parts.items())
    next_process()
    with pytest.raises(ContributionError, match="rank 0 began it with total_steps=200, and it now has total_steps=400"):
        Trainer(place(store), total_steps=400, inner_steps=5, snapshot_every=1, momentum_warmup=20)


def test_an_outer_state_that_is_more_than_tensors_and_json_takes_no_snapshots(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Odd(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "odd": print}

    store = MemoryStore()
    options: dict[str, Any] = {
        "outer_optimizer": lambda ps: Odd(ps, 0.5, momentum=0.5),
        "inner_steps": 1,
        "snapshot_every": 1,
    }
    with open_diloco(nn.Linear(2, 2), **options, **place(store)) as diloco:
        for _ in range(3):
            diloco.step()
    assert "writes no snapshots: outer/0['odd']" in caplog.text
    assert [e.key for e in store.list("test/diloco/main/snapshot/")] == ["test/diloco/main/snapshot/0"]


def test_weights_weigh_and_may_be_the_tokens_of_the_round() -> None:
    weight: Any
    for weight in (lambda rank: [1.0, 3.0][rank], lambda rank: lambda: [100, 300][rank]):

        def body(where: Mapping[str, Any], weight: Any = weight) -> float:
            model, rank = nn.Linear(1, 1, bias=False), where["rank"]
            with open_diloco(model, inner_steps=1, weight=weight(rank), **PLAIN, **where) as diloco:
                start = diloco.anchor()["weight"].item()
                nudge(model, [4.0, 8.0][rank])
                diloco.step()
                return diloco.anchor()["weight"].item() - start

        assert run_replicas(2, body) == [pytest.approx(7.0)] * 2
        next_process()


def asked(value: Any) -> float:
    return check_weight(lambda: value, rank=0, entry=0)


def test_a_weight_may_be_a_scalar_of_torch_or_numpy() -> None:
    for tokens in (torch.tensor(300), torch.tensor([300.0]), np.int64(300), np.float32(300)):
        assert asked(tokens) == 300.0


def test_a_weight_that_is_not_a_positive_number_is_refused() -> None:
    refusal = "rank 0 for round 1: weight must be a positive number"
    values: list[Any] = [0, -1.0, float("nan"), float("inf"), "many", True, 1e300, torch.ones(2)]
    for value in values:
        with pytest.raises(ContributionError, match=refusal):
            asked(value)
    diloco = open_diloco(nn.Linear(1, 1), inner_steps=1, weight=lambda: 0.0, **place())
    with pytest.raises(ContributionError, match=refusal):
        diloco.step()
    leave(diloco)
