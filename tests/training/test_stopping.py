"""One replica stops the run: all replicas end after the same round, with one model, for each kind of plan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from support.training import PLAIN, leave, next_process, nudge, place
from torch import nn

from diloco import DiLoCo
from diloco.rendezvous.early_end import EarlyEnd
from diloco.rendezvous.envelope import UNSIGNED, BadRecordError
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.phase import RoundPlan
from diloco.testing import run_replicas
from executors.replica import Replica, set_current_replica
from executors.store import MemoryStore

CASES: dict[str, dict[str, Any]] = {
    "steps": {"inner_steps": 4, "total_steps": 400},
    "without a total": {"inner_steps": 4},
    "fragments": {"inner_steps": 4, "total_steps": 400, "fragments": 2},
    "overlap": {"inner_steps": 4, "total_steps": 400, "overlap_steps": 2, "merge": "carry"},
    "overlap until it comes": {"inner_steps": 4, "total_steps": 400, "overlap_steps": "auto"},
    "int8": {"inner_steps": 4, "total_steps": 400, "wire": "int8", "fragments": 2},
    "by the clock": {"round_seconds": 0.05, "total_rounds": 1000},
    "momentum": {"inner_steps": 4, "total_steps": 400, "outer_lr": 0.7, "outer_momentum": 0.9},
}


@pytest.mark.parametrize("case", CASES)
def test_all_replicas_end_after_the_same_round_with_one_model(case: str) -> None:
    def body(where: Mapping[str, Any]) -> tuple[int, list[float], list[float]]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        diloco = DiLoCo(model, **{**PLAIN, **CASES[case]}, **where)
        draw = torch.Generator().manual_seed(where["rank"])
        while not diloco.is_over:
            nudge(model, 0.01 * float(torch.rand((), generator=draw)))
            if where["rank"] == 1 and diloco.inner_step >= 9:
                diloco.stop()
            diloco.step()
            assert diloco.rounds < 100, "no replica has stopped the run"
        diloco.close()
        values = [float(value) for p in model.parameters() for value in p.detach().flatten()]
        return diloco.rounds, values, [float(v) for t in diloco.anchor().values() for v in t.flatten()]

    (rounds, values, anchor), *others = run_replicas(3, body)
    assert all(other == (rounds, values, anchor) for other in others)
    assert values == anchor
    if case in ("steps", "without a total", "momentum"):
        assert rounds == 3, "step 9 lies in the third round"


def test_a_run_that_was_stopped_has_ended_for_the_process_that_comes_back_to_it() -> None:
    store = MemoryStore()
    for snapshot_every in (1, 100):  # with a snapshot after the last round, and without one
        where = {**place(store), "run_id": f"run-{snapshot_every}"}
        options: dict[str, Any] = {"inner_steps": 2, "total_steps": 100, "snapshot_every": snapshot_every, **PLAIN}
        first = DiLoCo(model := nn.Linear(2, 1), **options, **where)
        for step in first.steps():
            nudge(model, 1.0)
            if step == 5:
                first.stop()
            first.step()
        assert (first.rounds, first.inner_step, first.progress) == (3, 6, 1.0)
        anchor = first.anchor()
        leave(first)
        next_process()
        with DiLoCo(model := nn.Linear(2, 1), **options, **where) as second:
            assert second.is_over
            assert list(second.steps()) == [5], "the loop makes the last pass again, for the code after it"
        assert torch.equal(model.weight.detach(), anchor["weight"])
        next_process()


def test_a_replica_that_did_not_see_the_last_seal_ends_with_the_others_too() -> None:
    """The replica loads a snapshot from after the last seal. Only the snapshot's record shows that the run ends."""
    store = MemoryStore()
    first = DiLoCo(model := nn.Linear(2, 1), inner_steps=2, snapshot_every=1, **PLAIN, **place(store))
    for _ in range(6):
        nudge(model, 1.0)
        first.step()
    first._workers.uploads.finish()
    leave(first)
    next_process()
    keys = Keys("test", "main")
    store.put(keys.end(), EarlyEnd(0, (1,)).data(keys.end(), UNSIGNED))
    again = DiLoCo(nn.Linear(2, 1), inner_steps=2, snapshot_every=1, **PLAIN, **place(store))
    assert (again._settings.plan.total_steps, again.is_over) == (2, True)
    leave(again)


def test_the_line_on_stderr_names_the_replica_that_stopped_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    diloco = DiLoCo(nn.Linear(2, 1), inner_steps=2, total_steps=50, **PLAIN, **place())
    diloco.stop()
    diloco.step()
    diloco.step()
    assert capsys.readouterr().err == "replicas: rank 0 stopped the run, which ends with round 1.\n"
    diloco.close()


def test_closing_before_the_last_round_warns_that_the_others_continue() -> None:
    diloco = DiLoCo(nn.Linear(2, 1), inner_steps=2, total_steps=50, **PLAIN, **place())
    diloco.step()
    diloco.step()
    diloco.stop()
    with pytest.warns(UserWarning, match="other replicas continue"):
        diloco.close()


def test_stopping_in_the_last_planned_round_changes_nothing() -> None:
    diloco = DiLoCo(nn.Linear(2, 1), inner_steps=2, total_steps=4, **PLAIN, **place())
    for _ in diloco.steps():
        if diloco.inner_step >= 2:
            diloco.stop()
        diloco.step()
    assert (diloco.rounds, diloco._settings.plan.ended_by) == (2, ())
    diloco.close()


def test_a_wish_at_the_end_of_a_stage_means_the_same_whether_a_replica_knows_of_the_extension_or_not() -> None:
    """Otherwise some replicas would end at the end of the stage, and the others would continue without them."""
    knowing, unknowing = (RoundPlan(steps_per_entry=2, n_fragments=2, total_steps=8) for _ in range(2))
    knowing.extend(20)
    assert [plan.end_after(3, (1,)) for plan in (knowing, unknowing)] == [False, False]
    unknowing.extend(20)
    assert knowing == unknowing
    assert [plan.end_after(2, (1,)) for plan in (knowing, unknowing)] == [True, True]
    assert (knowing, knowing.total_steps) == (unknowing, 6)


def test_a_schedule_of_epochs_ends_with_the_epoch_in_which_a_replica_stops_the_run() -> None:
    """This tests the tutorial's loop. Without its break, the schedule would be stepped for each remaining epoch."""

    def body(where: Mapping[str, Any]) -> tuple[int, float, int]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        with DiLoCo(model, inner_steps=2, total_steps=80, **PLAIN, **where) as diloco:
            diloco.attach_state("optimizer", optimizer)
            diloco.attach_state("schedule", schedule)
            for epoch in range(diloco.inner_step // 8, 10):
                if diloco.is_over:
                    break
                for _ in range(8):
                    if diloco.is_over:
                        break
                    optimizer.step()
                    nudge(model, 1.0 + where["rank"])
                    diloco.step()
                schedule.step()
                if epoch == 1 and where["rank"] == 0:
                    diloco.stop()
        return schedule.last_epoch, optimizer.param_groups[0]["lr"], diloco.inner_step

    first, second = run_replicas(2, body)
    assert first == second == (3, 0.125, 18)


class ContinuesOld(Replica):
    """A replica of a run that begins from the newest snapshot of the run `old`."""

    @property
    def continues(self) -> str | None:
        return "old"


def test_a_run_that_continues_from_a_snapshot_of_a_run_that_was_stopped_has_its_own_end() -> None:
    store = MemoryStore()
    options: dict[str, Any] = {"inner_steps": 2, "total_steps": 40, "snapshot_every": 1, **PLAIN}
    for run_id, kind in (("old", Replica), ("new", ContinuesOld)):
        replica = kind(0, 1, run_id, 0, store.url, claimed_nonce=f"nonce-{run_id}")
        replica.store = store
        store.put(replica.key("started.json"), json.dumps({"nonce": replica.claimed_nonce}).encode())
        set_current_replica(replica)
        try:
            diloco = DiLoCo(model := nn.Linear(2, 1), **options)
            assert diloco._settings.plan.total_steps == 40
            for step in diloco.steps():
                nudge(model, 1.0)
                if run_id == "old" and step == 9:
                    diloco.stop()
                diloco.step()
            diloco.close()
            assert diloco.inner_step == (10 if run_id == "old" else 40)
        finally:
            set_current_replica(None)


@pytest.mark.parametrize(
    "fields", [{"entry": -1, "ranks": [0]}, {"entry": 1, "ranks": []}, {"entry": "1", "ranks": [0]}, {"entry": 1}]
)
def test_a_hostile_record_of_an_end_is_refused_and_ends_nothing(fields: dict[str, Any]) -> None:
    from diloco.rendezvous.envelope import frame

    key = Keys("test", "main").end()
    data = frame(fields, key, UNSIGNED)
    with pytest.raises(BadRecordError):
        EarlyEnd.parse(data, key, UNSIGNED)
    store = MemoryStore()
    store.put(key, data)
    diloco = DiLoCo(nn.Linear(2, 1), inner_steps=2, total_steps=4, **PLAIN, **place(store))
    assert not diloco.is_over
    leave(diloco)
