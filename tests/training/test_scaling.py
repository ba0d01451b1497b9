"""`examples/scaling.py` measures what real runs do, and an interruption changes nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.examples import load_example

from diloco import DiLoCo
from executors import LocalProcessExecutor, current_replica, launch

STEPS, INNER_STEPS, N = 12, 4, 2


def small_corpus() -> None:
    """Read 1 MiB of text, so that a test takes no time for reading."""
    scaling = load_example("scaling.py")
    whole = scaling.corpus(1 << 20)
    scaling.corpus = lambda: whole


def a_plan(**changed: object) -> Any:
    return replace(load_example("scaling.py").Plan("0.14M", "diloco", N, INNER_STEPS, "fp32", 0, STEPS), **changed)


def as_a_replica() -> float:
    """Train one replica of the plan as a user would: in its own process, with rounds through the run's store."""
    small_corpus()
    scaling, replica = load_example("scaling.py"), current_replica()
    torch.set_num_threads(1)
    learner = scaling.Learner(a_plan(), [replica.rank])
    with DiLoCo(learner.model, inner_steps=INNER_STEPS, total_steps=STEPS) as diloco:
        for step in diloco.steps():
            learner.step(step)
            diloco.step()
        learner.model.load_state_dict(diloco.anchor(), strict=False)
    return float(scaling.held_out_loss(learner.model))


@pytest.fixture(autouse=True)
def corpus_of_one_mebibyte(monkeypatch: pytest.MonkeyPatch) -> None:
    scaling = load_example("scaling.py")
    monkeypatch.setattr(scaling, "corpus", scaling.corpus)
    small_corpus()


@pytest.mark.usefixtures("state_home")
def test_the_replicas_of_one_process_reach_the_loss_of_a_real_run_to_the_last_bit() -> None:
    run = launch(LocalProcessExecutor(), as_a_replica, N)
    run.wait(120)
    measured = load_example("scaling.py").train(a_plan())
    assert run.results() == [measured.loss] * N


KILLED = """
import json, os, sys
from pathlib import Path
from training import test_scaling

folder, changed = sys.argv[1], json.loads(sys.argv[2])
test_scaling.small_corpus()
scaling = test_scaling.load_example("scaling.py")
write, written = scaling.Checkpoint.write, []

def write_and_die(checkpoint, state):
    write(checkpoint, state)
    written.append(state)
    if len(written) == 2:
        os._exit(9)

scaling.Checkpoint.write = write_and_die
scaling.train(test_scaling.a_plan(**changed), Path(folder), save_every_s=0.0)
"""


@pytest.mark.parametrize("changed", [{}, {"way": "data-parallel", "inner_steps": 0, "wire": ""}], ids=str)
def test_an_interrupted_run_continues_at_its_checkpoint_with_the_same_bits(
    changed: dict[str, Any], tmp_path: Path
) -> None:
    scaling = load_example("scaling.py")
    plan = a_plan(**changed)
    whole = scaling.train(plan)
    command = [sys.executable, "-c", KILLED, str(tmp_path), json.dumps(changed)]
    assert subprocess.run(command, cwd=Path(__file__).parents[1], check=False).returncode == 9
    continued = scaling.train(plan, tmp_path)
    assert (continued.curve, continued.interruptions) == (whole.curve, 1)
    assert list(tmp_path.iterdir()) == []
