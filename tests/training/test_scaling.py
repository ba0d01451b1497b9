"""`examples/scaling.py` measures what real runs do, and an interruption changes nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.examples import load_example

from diloco import DiLoCo
from executors import LocalProcessExecutor, current_replica, launch

STEPS, INNER_STEPS, N = 12, 4, 2
WITHOUT_ROUNDS: dict[str, Any] = {"inner_steps": 0, "wire": "", "outer": ""}


def small_corpus() -> None:
    """Read 1 MiB of text, so that a test takes no time for reading."""
    scaling = load_example("scaling.py")
    whole = scaling.corpus(1 << 20)
    scaling.corpus = lambda: whole


def a_plan(**changed: object) -> Any:
    scaling = load_example("scaling.py")
    outer = scaling.outer_of(scaling.DEFAULT_OUTER, INNER_STEPS, STEPS)
    return replace(scaling.Plan("0.14M", "diloco", N, INNER_STEPS, "fp32", 0, STEPS, outer=outer), **changed)


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


def interrupt(folder: Path, changed: dict[str, Any]) -> None:
    """Begin a run in another process, which dies after the second checkpoint."""
    command = [sys.executable, "-c", KILLED, str(folder), json.dumps(changed)]
    assert subprocess.run(command, cwd=Path(__file__).parents[1], check=False).returncode == 9


@pytest.mark.parametrize("changed", [{}, {"way": "data-parallel", **WITHOUT_ROUNDS}], ids=str)
def test_an_interrupted_run_continues_at_its_checkpoint_with_the_same_bits(
    changed: dict[str, Any], tmp_path: Path
) -> None:
    scaling = load_example("scaling.py")
    plan = a_plan(**changed)
    whole = scaling.train(plan)
    interrupt(tmp_path, changed)
    continued = scaling.train(plan, tmp_path)
    assert (continued.curve, continued.interruptions) == (whole.curve, 1)
    assert list(tmp_path.iterdir()) == []


class OneAfterTheOther(ThreadPoolExecutor):
    """Threads that open the replicas of a run one after the other, and then do all else at once."""

    def map(self, fn: Any, *iterables: Any, **options: Any) -> Any:
        """Call a function with each element."""
        return map(fn, *iterables) if fn.__name__ == "_open" else super().map(fn, *iterables, **options)


def test_replicas_that_continue_one_after_the_other_are_all_in_the_next_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaling = load_example("scaling.py")
    plan = a_plan()
    whole = scaling.train(plan)
    interrupt(tmp_path, {})
    monkeypatch.setattr(scaling, "ThreadPoolExecutor", OneAfterTheOther)
    assert scaling.train(plan, tmp_path).curve == whole.curve


PRETRAINED = {"pretrained": 4}


def test_a_pretrained_run_begins_where_the_data_parallel_run_was_and_shares_its_state(tmp_path: Path) -> None:
    scaling = load_example("scaling.py")
    plan = a_plan(**PRETRAINED)
    whole = scaling.train(plan.pretraining, tmp_path, branches=[plan.pretrained])
    shared = tmp_path.joinpath(*(path.name for path in tmp_path.iterdir()))
    written_at = shared.stat().st_mtime_ns
    branched = scaling.train(plan, tmp_path)
    before = [point for point in whole.curve if point[0] <= plan.pretrained]
    assert before == [point for point in branched.curve if point[0] <= plan.pretrained] != []
    assert branched.loss != whole.loss
    assert (shared.stat().st_mtime_ns, [*tmp_path.iterdir()]) == (written_at, [shared])


def test_a_data_parallel_run_continues_from_its_pretraining_with_the_same_bits(tmp_path: Path) -> None:
    scaling = load_example("scaling.py")
    plan = a_plan(**PRETRAINED)
    alone = scaling.train(plan)
    assert scaling.train(plan, tmp_path).curve == alone.curve
    assert scaling.train(plan.pretraining, tmp_path).curve == scaling.train(plan.pretraining).curve


def test_the_published_file_has_all_runs_and_none_of_them_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaling = load_example("scaling.py")
    lines, published, again = tmp_path / "runs.jsonl", tmp_path / "scaling.json", tmp_path / "again.jsonl"
    alone = a_plan(way="alone", n=1, steps=4, **WITHOUT_ROUNDS)
    runs = [scaling.train(alone), scaling.train(a_plan(steps=4))]
    monkeypatch.setattr(scaling, "in_processes", lambda _, plans, n: [run for run in runs if run.plan in plans])
    grid = ["--sizes", "0.14M", "--replicas", str(N), "--inner-steps", str(INNER_STEPS), "--steps", "4"]
    scaling.main(["--lines", str(lines), *grid, "--write", str(published)])
    assert {run.plan for run in scaling.read_runs(published)} == {run.plan for run in runs}
    scaling.main(["--lines", str(again), "--finished", str(published), *grid, "--write", str(tmp_path / "all.json")])
    assert (tmp_path / "all.json").read_text() == published.read_text()
    assert not again.exists()
