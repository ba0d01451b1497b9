"""Whole runs whose replicas meet in a bucket, on the local backend."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from servers.s3.server import S3Server
from support.processes import is_alive
from support.runs import all_gone, launcher, pids_said, said
from support.tasks import hang, meet

from executors import LocalProcessExecutor, Run, attach, launch
from executors.cli.summary import reference
from executors.registry.run_index import forget, state_dir
from executors.run.run import view_of
from executors.testing import eventually

LOCAL = LocalProcessExecutor()
MOST_LATE_S = 20.0  # two requests that are not answered, on a busy machine


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
    assert list(view_of(again).store.list("")) == []


@pytest.mark.parametrize("is_bucket", [False, True])
def test_a_replica_that_ends_leaves_no_outcome_where_its_run_was_deleted(
    s3: S3Server, tmp_path: Path, is_bucket: bool
) -> None:
    place = s3.url("runs") if is_bucket else tmp_path / "runs"
    run = launch(LOCAL, meet, 1, args={"folder": str(tmp_path), "n": 2}, rendezvous=place, run_id="otter")
    eventually((tmp_path / "0").exists, "the replica waits")
    (handle,) = run.handles
    for entry in list(view_of(run).store.list("")):
        view_of(run).store.delete(entry.key)
    (tmp_path / "1").touch()
    eventually(lambda: not is_alive(handle.metadata["supervisor_pid"]), "the supervisor has ended")
    left = [entry.key.rpartition("/")[2] for entry in view_of(run).store.list("")]
    # a check before each heartbeat would cost a request
    assert left in ([], ["heartbeat.json"]) if is_bucket else left == []


def falls_silent(s3: S3Server, how: str) -> None:
    s3.misbehave(**({"unavailable": 1.0} if how == "refuses" else {"latency_s": 300.0}))


def ends_when_it_answers(s3: S3Server, run: Run) -> list[tuple[str, str | None]]:
    """Let the bucket answer again. Return the outcomes of the replicas when their supervisor has recorded them."""
    s3.misbehave()
    supervisor = run.handles[0].metadata["supervisor_pid"]
    eventually(lambda: not is_alive(supervisor), "the supervisor of the replicas has ended")
    return [(str(outcome.status), outcome.reason) for outcome in run.outcomes()]


@pytest.mark.parametrize("how", ["refuses", "is silent"])
def test_a_killed_launcher_leaves_nothing_also_while_the_bucket_does_not_answer(
    s3: S3Server, tmp_path: Path, how: str
) -> None:
    with launcher("hang_in_a_bucket", str(tmp_path), s3.url("runs")) as process:
        run = attach(said(tmp_path / "launched")["run_id"])
        pids = pids_said(tmp_path, "replica.*", 4)
        falls_silent(s3, how)
        process.kill()
        all_gone(pids)
    assert ends_when_it_answers(s3, run) == [("cancelled", "cancelled")] * 4


def test_a_time_limit_holds_while_the_bucket_does_not_answer(s3: S3Server, tmp_path: Path) -> None:
    executor, args = LocalProcessExecutor(preload=(), term_grace_s=0.5), {"path": str(tmp_path / "replica")}
    run = launch(executor, hang, 4, args=args, rendezvous=s3.url("runs"), timeout=15, detach=True)
    pids = pids_said(tmp_path, "replica.*", 4)
    falls_silent(s3, "is silent")
    eventually(lambda: not any(map(is_alive, pids)), "all processes are gone", within_s=15 + MOST_LATE_S)
    assert ends_when_it_answers(s3, run) == [("failed", "timeout")] * 4
