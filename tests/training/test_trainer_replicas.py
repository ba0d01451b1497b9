"""Trainers of other libraries on real replicas: one is killed and resumed, and the run ends like an undisturbed one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.trainer_tasks import LOCAL, STARTS_WITHIN_S, calm_and_killed, has_reported, stop_early, train_for_ever

from executors import launch
from executors.testing import eventually

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # half a minute each, most of it imports


@pytest.mark.parametrize(
    ("example", "needs", "args"),
    [
        ("hf_trainer.py", "transformers", {"steps": 240}),
        ("accelerate_loop.py", "accelerate", {}),
        ("plain_loop.py", "torchdata", {}),
    ],
)
def test_an_example_survives_a_kill_and_is_as_good(
    example: str, needs: str, args: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip(needs)
    args = {**args, "output_dir": str(tmp_path)} if needs == "transformers" else args
    calm, killed = calm_and_killed(f"{EXAMPLES / example}:main", args, round=9)
    for results in (calm, killed):
        assert results[0]["model"] == results[1]["model"], "all replicas end with the same model, bit for bit"
        assert results[0]["loss"] < 0.6 * results[0]["loss_before"]
    assert killed[0]["loss"] == pytest.approx(calm[0]["loss"], rel=0.01)


def test_at_sigterm_the_trainer_saves_its_checkpoint_and_the_replica_ends(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run = launch(LOCAL, train_for_ever, 1, args={"folder": str(tmp_path)})
    eventually(partial(has_reported, run, 0, 0), "the replica trains", within_s=STARTS_WITHIN_S)
    run.cancel()
    assert run.status().status == "cancelled"
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    assert {"trainer_state.json", "optimizer.pt", "scheduler.pt"} <= {path.name for path in checkpoint.iterdir()}
    assert not (checkpoint / "checkpoint-is-incomplete.txt").exists()


@pytest.mark.parametrize(("trainer", "needs"), [("hf", "transformers"), ("lightning", "lightning")])
def test_a_training_that_one_replica_stops_ends_at_one_round_with_one_model(
    trainer: str, needs: str, tmp_path: Path
) -> None:
    pytest.importorskip(needs)
    args = {"trainer": trainer, "folder": str(tmp_path)}
    results = launch(LOCAL, stop_early, 2, args=args, timeout=300).results()
    assert results[0] == results[1], "both replicas end at the same step and round, with the same model"
    assert 20 <= results[0]["step"] < 2000
