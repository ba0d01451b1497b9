"""A run that is extended beyond its planned end: all replicas continue to the new total, whenever they learn of it."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import decoder
from support.training import nudge
from torch import nn

from diloco.errors import ContributionError, DiLoCoError
from diloco.outer import open_diloco
from diloco.outer_defaults import LONG_ROUND_OUTER
from diloco.rendezvous.extension import check_extension
from diloco.rendezvous.phase import RoundPlan
from diloco.trained_model import ModelSource, read_model
from executors.replica import Replica, set_current_replica
from executors.restarts.decision_log import Decision, DecisionLog, extensions_of
from executors.restarts.orders import order_policy
from executors.settings import Settings
from executors.store import MemoryStore

OPTIONS: dict[str, Any] = {"inner_steps": 4, "snapshot_every": 3}

pytestmark = pytest.mark.filterwarnings("ignore:Only .* rounds")


@pytest.fixture(autouse=True)
def _no_replica_is_left() -> Iterator[None]:
    yield
    set_current_replica(None)


def extend(store: MemoryStore, key: str | None = None, **totals: int) -> None:
    order_policy(DecisionLog(store, "run", key=key), totals=totals)


class Attempt:
    """One attempt of the only replica of a run."""

    def __init__(self, store: MemoryStore, attempt: int = 0, **options: Any) -> None:
        replica = Replica(rank=0, world_size=1, run_id="run", attempt=attempt, rendezvous=store.url)
        record = SimpleNamespace(continues=None, key_id=None, settings=Settings(n=1))
        replica.__dict__ |= {"store": store, "record": record, "claimed_nonce": secrets.token_hex(8)}
        store.put(replica.key("started.json"), f'{{"nonce": "{replica.nonce}"}}'.encode())
        set_current_replica(replica)
        torch.manual_seed(0)
        self.replica = replica
        self.model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))
        self.diloco = open_diloco(self.model, **{**OPTIONS, **options})
        self.rounds_at: dict[int, int] = {}
        """By step, how many rounds there were after it."""

    def train(self, until: int = 10**9) -> Attempt:
        for step in self.diloco.steps():
            if step >= until:
                break
            nudge(self.model, 0.01 * (1 + step % 7))
            self.diloco.step()
            self.rounds_at[self.diloco.inner_step] = self.diloco.rounds
        return self

    def die(self) -> None:
        self.diloco._close(in_order=False)


def test_an_extension_keeps_the_outer_settings_that_the_run_began_with() -> None:
    """A plan of 1200 steps from the start would have the paper's settings."""
    store = MemoryStore()
    Attempt(store, inner_steps=100, total_steps=200).train().diloco.close()
    extend(store, total_steps=1200)
    again = Attempt(store, 1, inner_steps=100, total_steps=200).train()
    assert again.diloco.inner_step == 1200
    schedule = again.diloco._model_state.settings.schedule
    again.diloco.close()
    assert (schedule.lr, schedule.momentum) == LONG_ROUND_OUTER


@pytest.mark.parametrize("fragments", [1, 2, 4])
@pytest.mark.parametrize("total", [20, 18])
@pytest.mark.parametrize("died_at", [20, 14, 5])
def test_a_run_that_ended_or_died_continues_to_the_new_total(fragments: int, total: int, died_at: int) -> None:
    store = MemoryStore()
    first = Attempt(store, fragments=fragments, total_steps=total).train(until=died_at)
    first.diloco.close() if first.diloco.is_over else first.die()
    extend(store, total_steps=37)
    second = Attempt(store, 1, fragments=fragments, total_steps=total).train()
    assert second.diloco.inner_step == 37
    assert second.diloco.is_over
    second.diloco.close()
    plan = RoundPlan(4 // fragments, fragments, total_steps=total)
    at_old_end = plan.n_entries
    plan.extend(37)
    assert second.diloco.rounds == plan.n_entries
    if died_at < total:
        assert second.rounds_at[total] == at_old_end, "every fragment has a round at the old end, too"
    anchor = second.model.state_dict()
    found = read_model(ModelSource(store=store, run_id="run", extensions={"total_steps": [37]}))
    assert (found.step, found.rounds) == (37, plan.n_entries)
    assert all(torch.equal(found.tensors[name], values) for name, values in anchor.items())


def test_a_replica_that_trains_learns_of_it_at_its_old_end_and_makes_the_same_anchors() -> None:
    alone, store = MemoryStore("before"), MemoryStore("meanwhile")
    Attempt(alone, total_steps=20).train().diloco.close()
    extend(alone, total_steps=40)
    before = Attempt(alone, 1, total_steps=20).train()
    running = Attempt(store, total_steps=20).train(until=11)
    extend(store, total_steps=40)
    running.train()
    assert running.diloco.rounds == before.diloco.rounds == 10
    assert running.replica.reported["total_steps"] == 40
    assert [outer.digest() for outer in running.diloco._model_state.anchor.outer] == [
        outer.digest() for outer in before.diloco._model_state.anchor.outer
    ]


@pytest.mark.parametrize("options", [{"overlap_steps": 1}, {"overlap_steps": "auto"}, {"background": True}])
def test_rounds_during_training_are_extended_too(options: dict[str, Any]) -> None:
    store = MemoryStore()
    running = Attempt(store, fragments=2, total_steps=18, **options).train(until=7)
    extend(store, total_steps=31)
    running.train().diloco.close()
    plan = RoundPlan(2, 2, total_steps=18)
    plan.extend(31)
    assert (running.diloco.rounds, running.diloco.inner_step) == (plan.n_entries, 31)
    found = read_model(ModelSource(store=store, run_id="run", extensions={"total_steps": [31]}))
    assert all(torch.equal(found.tensors[name], values) for name, values in running.model.state_dict().items())


def test_the_log_of_an_extended_run_is_computed_again_by_the_adr() -> None:
    class Keeping(MemoryStore):
        def delete(self, key: str) -> None:
            pass

    store = Keeping()
    Attempt(store, total_steps=16, fragments=2).train().diloco.close()
    extend(store, total_steps=30)
    extend(store, total_steps=43)
    again = Attempt(store, 1, total_steps=16, fragments=2).train()
    prefix = "run/diloco/main/"
    objects = {entry.key.removeprefix(prefix): bytes(store.get(entry.key)) for entry in store.list(prefix)}
    run = decoder.Run(objects, extensions=(30, 43))
    assert [*run][-1] + 1 == again.diloco.rounds
    values = {name: part for fragment in range(2) for name, part in run.anchor(fragment).items()}
    for name, anchor in again.diloco.anchor().items():
        assert values[name].tobytes() == anchor.numpy().tobytes()


def test_rounds_by_the_clock_are_extended_by_their_number() -> None:
    store = MemoryStore()
    options: dict[str, Any] = {"inner_steps": None, "round_seconds": 1e-6, "total_rounds": 4}
    Attempt(store, **options).train().diloco.close()
    extend(store, total_rounds=9)
    again = Attempt(store, 1, **options).train()
    assert again.diloco.rounds == 9
    assert read_model(ModelSource(store=store, run_id="run", extensions={"total_rounds": [9]})).rounds == 9


def test_a_loop_that_ends_at_its_own_total_fails_because_it_trained_nothing() -> None:
    store = MemoryStore()
    Attempt(store, total_steps=8).train().diloco.close()
    extend(store, total_steps=16)
    again = Attempt(store, 1, total_steps=8)
    with pytest.raises(
        DiLoCoError, match=r"extended to total_steps=16, and the training loop has ended at 8\. .*steps\(\)"
    ):
        again.diloco.close()
    part = Attempt(store, 2, total_steps=8).train(until=12)
    with pytest.warns(UserWarning, match="the training loop has ended at 12"):
        part.diloco.close()


def test_an_order_that_a_replica_cannot_follow_is_a_warning_and_another_one_still_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A warning of a logger of this project is an event of the run, and a line on stderr is not."""
    store = MemoryStore()
    Attempt(store, total_steps=8).train().diloco.close()
    extend(store, total_rounds=16)
    wrong = Attempt(store, 1, total_steps=8)
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "extended by --total-rounds 16, and this DiLoCo counts total_steps" in warning.getMessage()
    assert wrong.diloco.is_over
    with pytest.raises(DiLoCoError, match="Nothing was trained"):
        wrong.diloco.close()
    extend(store, total_steps=16)
    assert Attempt(store, 2, total_steps=8).train().diloco.inner_step == 16
    trainer = Attempt(store, 3, total_steps=8, is_trainers=True)
    assert "launch … --from RUN" in caplog.records[-1].getMessage()
    trainer.die()


def test_replicas_whose_own_totals_differ_within_a_round_agree_on_the_extension() -> None:
    store = MemoryStore()
    Attempt(store, total_steps=18).train().diloco.close()
    extend(store, total_steps=29)
    again = Attempt(store, 1, total_steps=20)
    assert again.diloco.inner_step == 18
    assert again.train().diloco.rounds == 5 + 3


def test_the_error_of_a_replica_resumed_with_a_larger_total_explains_how_to_extend_the_run() -> None:
    store = MemoryStore()
    Attempt(store, total_steps=8).train().diloco.close()
    with pytest.raises(ContributionError, match=r"Give total_steps=8 again\. .*replicas resume RUN --total-steps 16"):
        Attempt(store, 1, total_steps=16)


@pytest.mark.parametrize(
    ("options", "asked", "says"),
    [
        ({"total_steps": 8}, {"total_steps": 8}, "was begun with total_steps=8, and --total-steps must be more: got 8"),
        ({"total_steps": 8}, {"total_rounds": 9}, "has rounds by steps: use --total-steps instead of --total-rounds"),
        ({}, {"total_steps": 9}, "has no total_steps, because the script did not give it"),
        (
            {"inner_steps": None, "round_seconds": 9.0, "total_rounds": 3},
            {"total_steps": 9},
            "has rounds by the clock: use --total-rounds instead of --total-steps",
        ),
    ],
)
def test_an_impossible_extension_is_refused_before_it_is_ordered(
    options: dict[str, Any], asked: dict[str, int], says: str
) -> None:
    store = MemoryStore()
    with pytest.raises(ValueError, match="has nothing to extend"):
        check_extension(store, "run", None, asked)
    Attempt(store, **options).die()
    with pytest.raises(ValueError, match=says):
        check_extension(store, "run", None, asked)


def test_a_signed_run_is_not_extended_without_its_key() -> None:
    store, key = MemoryStore(), "ab" * 32
    store.put("run/decisions/000000.json", Decision(kind="policy", total_steps=99).to_bytes())
    extend(store, key, total_steps=50)
    assert extensions_of(DecisionLog(store, "run", key=key).read())["total_steps"] == [50]
    assert extensions_of(DecisionLog(store, "run").read())["total_steps"] == [99]


def test_a_plan_divides_steps_before_and_after_an_extension_alike() -> None:
    plan = RoundPlan(steps_per_entry=5, n_fragments=4, total_steps=102)
    assert (plan.n_entries, plan.last_entries) == (24, (23,))
    assert not plan.extend(102)
    assert plan.extend(150)
    assert plan.last_entries == (23, 23 + 10 + 3)
    assert [plan.step_before(entry) for entry in (20, 21, 24, 25, 33, 34, 37)] == [100, 102, 102, 107, 147, 150, 150]
    assert [entry for entry in range(40) if plan.is_final(entry)] == [20, 21, 22, 23, 33, 34, 35, 36]
    assert [plan.position_at(step) for step in (0, 99, 101, 102, 106, 107, 149, 150, 999)] == [
        0,
        19,
        20,
        24,
        24,
        25,
        33,
        37,
        37,
    ]
    assert (plan.end_of(23), plan.end_of(24), plan.is_over(36), plan.is_over(37)) == (102, 150, False, True)
