"""The page of a calm run reports no rank as drifting, even if the model is small or noisy, or a replica was killed."""

from __future__ import annotations

import random

import pytest
from support.made_up_runs import Scene, made_up

from executors import LocalProcessExecutor, current_replica, launch
from executors.run.run import view_of
from executors.view.report.document import Subject, document
from executors.view.report.rounds import MIN_ROUNDS
from executors.view.run_page import report_document

CALM = range(20)


def drifts(subject: Subject) -> list[str]:
    return [each["text"] for each in document(subject)["in_short"] if "drift" in each["text"]]


Measured = dict[tuple[int, int], float]
"""Numbers of a run by rank and entry."""


def with_norms(subject: Subject, norms: Measured, weights: Measured) -> None:
    """Replace the norms and weights of an invented run."""
    for row in subject.metrics.rounds:
        key = (row.rank, row.entry)
        object.__setattr__(row, "norm", norms.get(key, row.norm))
        object.__setattr__(row, "weight", weights.get(key, row.weight))


def calm_run(seed: int) -> Subject:
    """Invent a run like real ones: 3 to 8 replicas, 4 to 60 rounds, noise by seed, and a kill in every second run."""
    rng = random.Random(seed)
    n, rounds = rng.randint(3, 8), rng.choice([4, 6, 10, 20, 40, 60])
    killed = {1: (rng.randrange(1, rounds - 1),)} if seed % 2 else {}
    subject = made_up(Scene(n=n, rounds=rounds, killed=killed), seed=seed)
    # the standard deviation of the logarithm; 1.0 is a small model near its optimum
    spread = rng.choice([0.05, 0.2, 0.5, 1.0])
    norms, weights = Measured(), Measured()
    for row in subject.metrics.rounds:
        key = (row.rank, row.entry)
        share = 1.0
        if row.attempt and rng.random() < 0.5:  # a replica that came back has made fewer steps, or carries some
            share = rng.choice([0.1, 0.3, 0.5, 0.9])
        weights[key] = 10.0 * share
        tail = rng.choice([1.0] * 29 + [4.0])
        norms[key] = share * rng.lognormvariate(0, spread) * tail * (2 - row.entry / rounds)
    with_norms(subject, norms, weights)
    return subject


@pytest.mark.parametrize("seed", CALM)
def test_the_page_of_a_calm_run_reports_no_rank_as_drifting(seed: int) -> None:
    assert drifts(calm_run(seed)) == []


@pytest.mark.parametrize(("factor", "spread"), [(3.0, 0.1), (0.2, 0.2), (10.0, 0.4)])
def test_a_rank_whose_norms_are_far_off_in_all_rounds_is_named(factor: float, spread: float) -> None:
    rng = random.Random(7)
    subject = made_up(Scene(n=4, rounds=2 * MIN_ROUNDS))
    norms = {
        (row.rank, row.entry): rng.lognormvariate(0, spread) * (factor if row.rank == 2 else 1.0)
        for row in subject.metrics.rounds
    }
    with_norms(subject, norms, {})
    assert drifts(subject) == ["The pseudo-gradients of rank 2 drift: their norms are far from the median."]


def test_a_rank_that_begins_to_drift_late_is_named() -> None:
    rng = random.Random(8)
    subject = made_up(Scene(n=5, rounds=60))
    norms = {
        (row.rank, row.entry): rng.lognormvariate(0, 0.1) * (4.0 if row.rank == 3 and row.entry >= 50 else 1.0)
        for row in subject.metrics.rounds
    }
    with_norms(subject, norms, {})
    assert len(drifts(subject)) == 1


def train(steps: int, seed: int) -> None:
    """Train a toy model until it is near its optimum."""
    import torch

    from diloco import DiLoCo

    replica = current_replica()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model, target = torch.nn.Linear(8, 1), torch.randn(8)
    torch.manual_seed(1000 * seed + replica.rank)  # every replica draws its own inputs
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with DiLoCo(model, inner_steps=5, total_steps=steps) as diloco:
        for _ in diloco.steps():
            inputs = torch.randn(16, 8)
            loss = (model(inputs).squeeze(1) - inputs @ target).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            diloco.step()
            replica.report(loss=loss.item())


@pytest.mark.parametrize("seed", range(3))
def test_the_page_of_a_small_run_with_one_kill_accuses_no_rank(seed: int) -> None:
    run = launch(
        LocalProcessExecutor(),
        train,
        3,
        args={"steps": 100, "seed": seed},
        restarts="1,backoff=0.05s:0.1s",
        chaos=["kill:rank=1,round=6"],
    )
    assert run.wait(120)
    assert run.status().status == "succeeded", run.logs()
    found = report_document(view_of(run))
    assert found["rounds"]["n"] >= MIN_ROUNDS
    assert found["rounds"]["drifting"] == []
