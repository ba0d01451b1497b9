"""Whole runs whose replicas meet in a bucket, on the local backend."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from servers.s3.server import S3Server
from support.processes import is_alive
from support.tasks import meet

from executors import LocalProcessExecutor, attach, launch
from executors.cli.summary import reference
from executors.run_index import forget, state_dir
from executors.testing import eventually

LOCAL = LocalProcessExecutor()


def train_together(steps: int) -> dict[str, object]:
    import torch

    from diloco import DiLoCo
    from executors import current_replica

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    with DiLoCo(model, inner_steps=5, total_steps=steps) as diloco:
        while diloco.inner_step < steps:
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            diloco.step()
        anchor = {name: values.tolist() for name, values in diloco.anchor().items()}
    current_replica().report(step=steps)
    return {"rounds": diloco.rounds, "anchor": anchor}


def test_replicas_train_one_model_together_through_a_bucket(s3: S3Server) -> None:
    run = launch(LOCAL, train_together, 2, args={"steps": 150}, rendezvous=s3.url("runs"))
    first, second = run.results()
    assert first["rounds"] == 30
    assert first == second


def test_a_run_in_a_bucket_is_found_by_its_address_and_removed(s3: S3Server) -> None:
    url = s3.url("runs")
    run = launch(LocalProcessExecutor(preload=()), str, 2, rendezvous=url, run_id="otter")
    assert run.results() == ["", ""]
    place, question_mark, options = url.partition("?")
    again = attach(f"{place}/otter{question_mark}{options}")
    assert [outcome.status for outcome in again.outcomes()] == ["succeeded"] * 2
    assert attach("otter").url == again.url
    assert reference(again) == "otter"
    forget(state_dir() / "otter")  # as on another machine
    assert "&" in again.url
    shell = shlex.shlex(f"replicas logs {reference(again)} -f", posix=True, punctuation_chars=True)
    assert list(shell) == ["replicas", "logs", again.url, "-f"]
    again.remove()
    assert list(again.store.list("")) == []


@pytest.mark.parametrize("is_bucket", [False, True])
def test_a_replica_that_ends_leaves_no_outcome_where_its_run_was_deleted(
    s3: S3Server, tmp_path: Path, is_bucket: bool
) -> None:
    place = s3.url("runs") if is_bucket else tmp_path / "runs"
    run = launch(LOCAL, meet, 1, args={"folder": str(tmp_path), "n": 2}, rendezvous=place, run_id="otter")
    eventually((tmp_path / "0").exists, "it waits")
    (handle,) = run.handles
    for entry in list(run.store.list("")):
        run.store.delete(entry.key)
    (tmp_path / "1").touch()
    eventually(lambda: not is_alive(handle.metadata["supervisor_pid"]), "it has ended")
    left = [entry.key.rpartition("/")[2] for entry in run.store.list("")]
    assert left in ([], ["heartbeat.json"]) if is_bucket else left == []  # asking before each beat would cost
