"""Rounds by the clock: replicas of different speeds, each of which makes as many steps as it can."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from support.trainer_tasks import LOCAL
from support.training import PLAIN, leave, next_process, nudge, place
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from diloco import DiLoCo
from diloco.errors import DiLoCoError
from diloco.rendezvous.envelope import proof_of
from diloco.rendezvous.frames import Seal
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.phase import Phase, RoundPlan
from diloco.testing import run_replicas
from executors import current_replica, launch
from executors.run.run import view_of
from executors.store import MemoryStore, Store

STEPS_S = (0.002, 0.002, 0.02)
ROUNDS = 6


@pytest.fixture(autouse=True)
def _processes_are_forgotten() -> None:
    next_process()


def trained(where: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """Train until the plan has ended, and return the steps and rounds of this replica."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    works, shares, steps = {}, [0.0], 0
    with DiLoCo(model, **{"round_seconds": 0.1, "total_rounds": ROUNDS, **PLAIN, **options}, **where) as diloco:
        while diloco.progress < 1:
            time.sleep(STEPS_S[where["rank"]])
            nudge(model, torch.rand(()) * 0.1)
            steps += 1
            if (report := diloco.step()) is not None:
                works[report.round - 1] = report.work
            shares.append(diloco.progress)
        assert diloco.inner_step == steps
        assert diloco._training_side.phase.uncounted_steps == [0] * options.get("fragments", 1)
        assert shares == sorted(shares)
        anchor = {name: values.tolist() for name, values in diloco.anchor().items()}
    live = {name: values.detach().tolist() for name, values in model.named_parameters()}
    return {"steps": steps, "rounds": diloco.rounds, "works": works, "anchor": anchor, "live": live}


def seals(store: Store, key: bytes | None = None, run_id: str = "test") -> list[Seal]:
    keys, proof, found = Keys(run_id, "main"), proof_of(key), list[Seal]()
    while any(store.list(name := keys.seal(len(found)))):
        found.append(Seal.parse(bytes(store.get(name)), name, proof))
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap_seconds": 0.05, "merge": "carry", "wire": "int8"},
        {"overlap_seconds": "auto", "merge": "carry", "wire": "int4", "fragments": 2, "key": b"the key of a run"},
        {"background": True, "fragments": 2},
    ],
    ids=["in turn", "overlap, int8", "auto, int4, fragments, signed", "beside"],
)
@pytest.mark.filterwarnings("ignore:Only")
def test_the_weight_of_a_slow_replica_is_its_number_of_steps_and_all_end_with_one_model(
    options: dict[str, Any],
) -> None:
    store = MemoryStore()
    ends = run_replicas(3, lambda where: trained(where, **options), store=store)
    n_fragments = options.get("fragments", 1)
    found = seals(store, options.get("key"))
    assert len(found) == ROUNDS * n_fragments + n_fragments - 1
    for end in ends:
        assert end["rounds"] == len(found)
        assert end["anchor"] == ends[0]["anchor"]
        assert all(end["live"][name] == values for name, values in end["anchor"].items())
    for rank, end in enumerate(ends):
        counted = {entry: seal.replicas[rank].weight for entry, seal in enumerate(found) if rank in seal.replicas}
        told = {entry: work for entry, work in end["works"].items() if entry in counted}
        assert told == {entry: counted[entry] for entry in told}
        if n_fragments == 1:
            assert sum(counted.values()) == end["steps"], "each step is in exactly one mean"
    assert ends[2]["steps"] < ends[0]["steps"], "the slow replica makes fewer steps"


def test_a_number_is_the_weight_of_a_step_and_a_callable_returns_the_whole_weight() -> None:
    def body(where: Mapping[str, Any]) -> None:
        model = nn.Linear(1, 1)
        weight = 2.5 if where["rank"] else lambda: 7.0
        with DiLoCo(model, round_seconds=1e-6, total_rounds=2, weight=weight, **PLAIN, **where) as diloco:
            while diloco.progress < 1:
                nudge(model, 1.0 + where["rank"])
                diloco.step()

    store = MemoryStore()
    run_replicas(2, body, store=store)
    assert [{rank: member.weight for rank, member in seal.replicas.items()} for seal in seals(store)] == [
        {0: 7.0, 1: 2.5}
    ] * 2


@pytest.mark.filterwarnings("ignore:Only", "ignore:Detected call")
def test_a_replica_that_comes_back_counts_its_own_steps_on_and_continues_where_the_run_is() -> None:
    options: dict[str, Any] = {"round_seconds": 1e-6, "total_rounds": 10, "snapshot_every": 2, **PLAIN}

    def begun(where: dict[str, Any]) -> tuple[nn.Module, DiLoCo, LambdaLR]:
        next_process()
        model, optimizer = nn.Linear(2, 2), torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0)
        diloco = DiLoCo(model, **options, **where)
        optimizer.step()
        schedule = LambdaLR(optimizer, lambda step: 1 - diloco.progress)
        diloco.attach_state("schedule", schedule, follow=True)
        return model, diloco, schedule

    where = place()
    model, diloco, _ = begun(where)
    for _ in range(5):
        nudge(model, 1.0)
        diloco.step()
    assert (diloco.inner_step, diloco.rounds, diloco.progress) == (5, 5, 0.5)
    diloco._workers.uploads.finish()
    leave(diloco)
    model, diloco, schedule = begun(where)
    assert diloco.rounds == 5
    assert diloco.inner_step == 4, "the count continues from the newest record of the replica"
    assert 0.5 <= diloco.progress < 0.7
    state = diloco.state_dict()
    while diloco.progress < 1:
        nudge(model, 1.0)
        diloco.step()
    assert (diloco.inner_step, diloco.rounds, schedule.get_last_lr()) == (9, 10, [0.0])
    diloco.load_state_dict(state)
    assert (diloco.inner_step, diloco.rounds) == (4, 10)
    diloco.close()


def test_sync_takes_the_next_rounds_and_brings_the_run_as_much_nearer_to_its_end() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with DiLoCo(model, round_seconds=1e6, total_rounds=40, fragments=2, **PLAIN, **place()) as diloco:
        nudge(model, 1.0)
        diloco.step()
        assert diloco.progress < 1e-3
        assert [report.fragment for report in diloco.sync()] == [0, 1]
        assert diloco.progress == pytest.approx(1 / 40)


def test_progress_needs_a_plan_and_goes_by_steps_too() -> None:
    with DiLoCo(nn.Linear(2, 2), inner_steps=2, total_steps=400, **place()) as diloco:
        diloco.step()
        assert diloco.progress == 1 / 400
        diloco.step()
        diloco.step()
        assert diloco.progress == 3 / 400
    next_process()
    with (
        DiLoCo(nn.Linear(2, 2), round_seconds=5, **place()) as diloco,
        pytest.raises(DiLoCoError, match="total_rounds"),
    ):
        _ = diloco.progress


# -- when a round is due -----------------------------------------------------------------------------------------------


class Clocked:
    """A phase with a clock of its own."""

    def __init__(self, **plan: Any) -> None:
        self.now = 100.0
        self.phase = Phase(RoundPlan(**{"entry_s": 10.0, **plan}), lambda: self.now)

    def step(self, seconds: float) -> Phase:
        self.now += seconds
        self.phase.count_step()
        self.phase.start_training_clock()
        return self.phase


def test_a_round_is_due_at_the_first_step_after_its_time_since_the_last_mean() -> None:
    one = Clocked()
    assert [one.step(4.0).is_due for _ in range(3)] == [False, False, True]
    one.now += 3.0  # the duration of the round
    one.phase.advance_in_phase(1, one.now)
    assert [one.step(4.0).is_due for _ in range(3)] == [False, False, True]
    one.phase.advance_in_phase(1, one.now - 2.0)  # the others had the mean earlier
    assert [one.step(4.0).is_due for _ in range(2)] == [False, True]
    one.phase.advance_in_phase(1, one.now)
    one.now += 30.0
    assert not one.phase.is_due, "no round is due before a step was made"
    assert one.step(1.0).is_due


def test_work_that_is_sent_early_names_the_time_for_which_training_continues() -> None:
    one = Clocked(overlap_steps=0.5)
    assert [one.step(3.0).is_time_to_send(0) for _ in range(2)] == [False, True]
    one.phase.note_held()
    assert one.phase.ahead_s(0) == pytest.approx(4.0)
    one.step(5.0)
    assert one.phase.is_due
    # the mean came in time, so the next round is due ten seconds after this one was due
    one.phase.advance_in_phase(1, one.now - 4.0)
    assert [one.step(3.0).is_due for _ in range(3)] == [False, False, True]


def test_a_process_that_saw_a_seal_in_the_midst_of_a_phase_counts_from_the_last_look_without_it() -> None:
    one = Clocked(overlap_steps=0.2)
    one.step(25.0)
    one.phase.advance_after_catch_up(1, 0, one.now - 5.0)
    assert not one.phase.is_due
    assert [one.step(3.0).is_due for _ in range(3)] == [False, False, True]


def test_replicas_are_waited_for_as_long_as_two_of_the_slowest_ones_steps_unless_that_is_longer_than_a_phase() -> None:
    one = Clocked()
    one.step(2.0)
    assert one.phase.phase_s == 12.0
    assert [one.phase.apart_s(phase_s) for phase_s in (0.0, 12.0, 14.0, 40.0)] == [0.0, 4.0, 8.0, 10.0]
    assert Phase(RoundPlan(), lambda: 0.0).apart_s(40.0) == 0.0


# -- real processes ----------------------------------------------------------------------------------------------------


def train_as_a_replica(folder: str) -> dict[str, Any]:
    """Train by the clock at this rank's speed. The first attempt of rank 1 is killed in the middle of the run."""
    replica = current_replica()
    dies = replica.rank == 1 and replica.attempt == 0
    torch.set_num_threads(1)
    model = nn.Linear(2, 2)
    begun = os.path.join(folder, "begun")
    with DiLoCo(model, round_seconds=0.4, total_rounds=8, snapshot_every=1, **PLAIN) as diloco:
        diloco.attach_state("optimizer", torch.optim.SGD(model.parameters(), 0.1))
        while diloco.progress < 1:
            if replica.rank == 1 and replica.attempt:
                open(begun, "w").close()
            while diloco.rounds >= 5 and not os.path.exists(begun):  # the others must not reach the end earlier
                time.sleep(0.01)
            time.sleep(STEPS_S[replica.rank])
            nudge(model, torch.rand(()) * 0.1)
            diloco.step()
            if dies and diloco.rounds >= 3:
                diloco._workers.uploads.finish()
                os.kill(os.getpid(), signal.SIGKILL)
        anchor = {name: values.tolist() for name, values in diloco.anchor().items()}
    return {"anchor": anchor, "steps": diloco.inner_step, "rounds": diloco.rounds, "attempt": replica.attempt}


@pytest.mark.filterwarnings("ignore:Only")
@pytest.mark.timeout(300)
def test_a_slow_real_process_delays_no_other_and_a_killed_one_comes_back(tmp_path: Any) -> None:
    run = launch(LOCAL, train_as_a_replica, 3, args={"folder": str(tmp_path)}, restarts="1,backoff=0.05s:0.1s")
    ends = run.results()
    assert [end["attempt"] for end in ends] == [0, 1, 0]
    assert all(end["rounds"] == 8 and end["anchor"] == ends[0]["anchor"] for end in ends)
    assert ends[2]["steps"] < ends[0]["steps"]
    found = seals(view_of(run).store, run_id=run.run_id)
    whole = sum(seal.replicas[2].weight for seal in found if 2 in seal.replicas)
    assert whole == ends[2]["steps"], "each step of the slow replica is in exactly one mean"
