"""A training loop in a process that is not a replica, and the numbers of its rounds that a replica shows."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.training import PLAIN, leave, nudge
from torch import nn

from diloco import DiLoCo
from diloco.errors import DiLoCoError
from executors.replica import Replica, set_current_replica
from executors.testing.helpers import environment

SCRIPT = """
import torch
from diloco import DiLoCo

for _ in range(2):
    model = torch.nn.Linear(4, 1)
    with DiLoCo(model, inner_steps=10, total_steps=300) as diloco:
        for _ in range(300):
            model.bias.data += 1
            diloco.step()
    print(diloco.rounds)
"""


def test_a_script_with_a_diloco_runs_by_itself_and_reports_once_that_it_is_alone(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    ran = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == ["30", "30"]
    (line,) = ran.stderr.splitlines()
    assert line.startswith(
        "replicas: this process is not a replica, so it is alone: world size 1, in memory, and nothing is kept."
    )
    assert line.endswith("replicas launch train.py --n 4")


def test_a_process_that_is_alone_and_has_no_round_is_reported(recwarn: pytest.WarningsRecorder) -> None:
    for is_on_purpose in (False, True):
        with DiLoCo(nn.Linear(1, 1), allow_no_rounds=is_on_purpose) as diloco:
            diloco.step()
    (warning,) = recwarn
    told = "1 step and no round: inner_steps is 500. With other replicas this is an error."
    assert str(warning.message) == told


def test_a_process_that_is_alone_keeps_no_more_for_more_rounds() -> None:
    def stored(rounds: int) -> int:
        with DiLoCo(nn.Linear(1000, 1), inner_steps=1, **PLAIN) as diloco:
            for _ in range(rounds):
                diloco.step()
                diloco._workers.uploads.finish()
            store = diloco._training_side._context.store.store
            return sum(entry.size_bytes for entry in store.list("") if "/r" in entry.key or "/part/" in entry.key)

    assert stored(60) == pytest.approx(stored(6), rel=0.01)


def test_a_replica_with_half_an_environment_does_not_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLICA_RANK", "3")
    with pytest.raises(
        DiLoCoError, match=r"needs the arguments store, run_id, rank and world_size.*REPLICA_WORLD_SIZE, "
    ):
        DiLoCo(nn.Linear(1, 1))


def test_incomplete_arguments_of_a_run_are_refused() -> None:
    with pytest.raises(DiLoCoError, match="needs the arguments store, run_id, rank and world_size"):
        DiLoCo(nn.Linear(1, 1), rank=0, world_size=2)


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[Replica]:
    replica = Replica(rank=0, world_size=1, run_id="test", attempt=0, rendezvous=(tmp_path / "store").as_uri())
    replica.claimed_nonce = "nonce"
    set_current_replica(replica)
    yield replica
    set_current_replica(None)


def test_a_replica_shows_its_first_round_at_once_and_nothing_before(replica: Replica) -> None:
    model = nn.Linear(1, 1)
    with DiLoCo(model, inner_steps=2, **PLAIN) as diloco:
        assert "round" not in replica.reported
        diloco.step()
        assert "round" not in replica.reported
        nudge(model, 1.0)
        report = diloco.step()
        assert report is not None
        assert report.round == diloco.rounds == replica.reported["round"] == 1
        assert "total_steps" not in replica.reported


def test_a_replica_shows_of_how_many_steps_it_trains(replica: Replica) -> None:
    with DiLoCo(nn.Linear(1, 1), inner_steps=2, total_steps=80, allow_no_rounds=True):
        assert replica.reported == {"total_steps": 80}


def test_a_process_that_comes_back_shows_at_once_where_the_run_is(replica: Replica) -> None:
    earlier = DiLoCo(nn.Linear(1, 1), inner_steps=1, snapshot_every=1, **PLAIN)
    for _ in range(3):
        earlier.step()
    leave(earlier)
    later = Replica(0, 1, replica.run_id, 1, replica.rendezvous, claimed_nonce="later")
    set_current_replica(later)
    with DiLoCo(nn.Linear(1, 1), inner_steps=1, snapshot_every=1, **PLAIN):
        assert later.reported["round"] == 3


def test_a_training_after_a_closed_one_of_its_name_is_refused_with_advice(replica: Replica) -> None:
    with DiLoCo(nn.Linear(1, 1), inner_steps=1, **PLAIN) as diloco:
        diloco.step()
    with pytest.raises(DiLoCoError, match=r"has closed a DiLoCo named 'main' already.*DiLoCo\(model, name=…\)"):
        DiLoCo(nn.Linear(1, 1), inner_steps=1, **PLAIN)
    with DiLoCo(nn.Linear(1, 1), inner_steps=1, name="second", **PLAIN) as diloco:
        assert diloco.inner_step == 0
        diloco.step()


def test_the_second_diloco_of_a_replica_does_not_replace_the_plan_of_the_first(replica: Replica) -> None:
    options = {"inner_steps": 1, **PLAIN}
    with DiLoCo(nn.Linear(1, 1), total_steps=80, **options) as first:
        first.step()
        with DiLoCo(nn.Linear(1, 1), total_steps=2, name="critic", **options) as second:
            second.step()
            second.step()
            assert (replica.reported["total_steps"], replica.reported["round"]) == (80, 1)
        first.step()
        assert (replica.reported["total_steps"], replica.reported["round"]) == (80, 2)
    with DiLoCo(nn.Linear(1, 1), name="later", **options) as later:
        assert "total_steps" not in replica.reported, "the first DiLoCo has ended, so its total is not reported"
        later.step()
        assert replica.reported["round"] == 1


def test_a_total_that_the_script_has_reported_stays_where_diloco_has_none(replica: Replica) -> None:
    replica.report(total_steps=20_000)
    with DiLoCo(nn.Linear(1, 1), inner_steps=1, **PLAIN) as first:
        assert replica.reported["total_steps"] == 20_000
        first.step()
    with DiLoCo(nn.Linear(1, 1), inner_steps=1, total_steps=80, name="second", **PLAIN) as second:
        second.step()
    replica.report(total_steps=30_000)
    with DiLoCo(nn.Linear(1, 1), inner_steps=1, name="third", **PLAIN) as third:
        assert replica.reported["total_steps"] == 30_000
        third.step()
