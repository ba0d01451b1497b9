"""Warnings of real replicas are events of their run, on every backend and for every end of the process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.standalone_replicas import Cloud, cloud, ended, shared, ship, site, workspace

from executors import LocalProcessExecutor, Run, attach, launch
from executors.run.run import view_of
from executors.store.url import address_of
from executors.view.report.event_reader import MORE

__all__ = ["cloud", "shared", "site", "workspace"]  # fixtures

JOB = r"""
import logging, multiprocessing, os, signal, subprocess, sys, time, warnings
from executors import ReplicasWarning, current_replica

log = logging.getLogger("diloco.made_up")

def warn():
    log.warning("rank %s: \x1b[31mtwo\nlines <b>of</b> text", current_replica().rank)
    warnings.warn("marked", ReplicasWarning)
    warnings.warn("of the user")
    logging.getLogger("train").warning("of the user")

def die_once():
    me = current_replica()
    for _ in range(3):
        log.warning("attempt %s", me.attempt)
    if me.attempt == 0:
        wait_until_kept(me)
        os.kill(os.getpid(), signal.SIGKILL)

def wait_until_kept(me):
    deadline = time.monotonic() + 60
    while not any(each.key.endswith("warnings.json") for each in me.store.list(me.key(""))):
        assert time.monotonic() < deadline
        time.sleep(0.01)

def leave_at_once():
    warn()
    os._exit(3) if current_replica().rank == 7 else sys.exit(3)

def of_a_helper():
    log.warning("of the helper that was forked")

def help():
    multiprocessing.get_context("fork").Process(target=of_a_helper).start()
    multiprocessing.active_children()
    code = "import logging; logging.getLogger('diloco.x').warning('of the helper that was started')"
    subprocess.run([sys.executable, "-c", code], check=True)
    for each in multiprocessing.active_children():
        each.join()
    log.warning("of the replica")

def flood():
    log.warning("the first")
    for number in range(20000):
        log.warning("number %s", number)

def save():
    os.makedirs("kept", exist_ok=True)
    os.path.exists("kept/pipe") or os.mkfifo("kept/pipe")
    current_replica().save_artifact("kept", "kept")
"""


@pytest.fixture(autouse=True)
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "warns_job.py").write_text(JOB)
    return tmp_path


def told(run: Run) -> list[tuple[int | None, int | None, str, int]]:
    """Return rank, attempt, text and count of each warning, by rank and attempt."""
    events = [event for event in run.events() if event.kind == "warning"]
    assert [each.text for each in run.warnings()] == [event.why for event in events]
    return sorted((event.rank, event.attempt, event.why, event.count) for event in events)


def test_warnings_of_this_project_and_marked_ones_are_events_and_those_of_the_user_are_in_the_log_alone(
    local: LocalProcessExecutor,
) -> None:
    run = launch(local, "warns_job:warn", 2)
    assert run.wait(60)
    text = "\x1b[31mtwo\nlines <b>of</b> text"
    assert told(run) == [(0, 0, text, 1), (0, 0, "marked", 1), (1, 0, text, 1), (1, 0, "marked", 1)]
    for rank in (0, 1):
        log = run.logs(rank)
        assert f"rank {rank}: " in log
        assert "UserWarning: of the user" in log
        assert "ReplicasWarning: marked" in log
        assert log.count("of the user") == 3, "the log has a warning with its line of source, and a record"
    now = run.status()
    assert (now.n_warnings, [each.rank for each in now.warnings]) == (4, [0, 1])
    assert json.loads(json.dumps(now.to_json()))["replicas"][1]["n_warnings"] == 2
    outcome = run.outcomes()[1]
    assert outcome.warned is not None
    assert (outcome.warned.count, outcome.warned.first) == (2, text)


def test_warnings_of_a_killed_attempt_are_kept_and_the_next_attempt_has_its_own(local: LocalProcessExecutor) -> None:
    run = launch(local, "warns_job:die_once", 1, restarts=1)
    assert run.wait(60)
    assert [each[:3] for each in told(run)] == [(0, 0, "attempt 0"), (0, 1, "attempt 1")]
    assert told(run)[1][3] == 3, "the record of an attempt that ended by itself has the count of each warning"
    (state,) = run.status().replicas
    assert state.warned is not None
    assert state.warned.first == "attempt 1", "status shows the count of the newest attempt"


def test_a_warning_just_before_a_failure_is_written_before_the_outcome(
    local: LocalProcessExecutor,
) -> None:
    run = launch(local, "warns_job:leave_at_once", 1)
    assert run.wait(60)
    assert run.outcomes()[0].reason == "no_result"
    assert len(told(run)) == 2


def test_helpers_of_a_replica_leave_no_events(local: LocalProcessExecutor) -> None:
    run = launch(local, "warns_job:help", 1)
    assert run.wait(60)
    assert told(run) == [(0, 0, "of the replica", 1)]
    log = run.logs(0)
    assert "of the helper that was forked" in log
    assert "of the helper that was started" in log


def test_a_loop_that_warns_leaves_one_small_record_and_its_first_texts(local: LocalProcessExecutor) -> None:
    run = launch(local, "warns_job:flood", 1)
    assert run.wait(60)
    texts = [each.text for each in run.warnings()]
    assert texts[:2] == ["the first", "number 0"]
    assert len(texts) == 10
    assert texts[-1].endswith(MORE)
    sizes = [
        each.size_bytes for each in view_of(run).store.list(f"{run.run_id}/") if each.key.endswith("warnings.json")
    ]
    assert len(sizes) == 1
    assert sizes[0] < 10_000


def test_a_note_of_the_worker_about_a_replica_is_an_event_too(local: LocalProcessExecutor) -> None:
    run = launch(local, "warns_job:save", 1)
    assert run.wait(60)
    assert [text for *_, text, _ in told(run)] == ["save_artifact('kept') skips 'pipe': not a file."]


def test_a_replica_in_the_calling_process_leaves_events_and_its_hook_goes_with_it(
    recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    run = launch("inline", "warns_job:warn", 1)
    assert len(told(run)) == 2
    assert [str(each.message) for each in recwarn] == ["marked", "of the user"]
    assert caplog.text.count("of</b> text") == 1
    import logging

    assert logging.getLogger("diloco").handlers == logging.getLogger("executors").handlers == []


def test_a_replica_in_a_container_leaves_events(cloud: Cloud, shared: Path, tmp_path: Path) -> None:
    def warns() -> None:
        import logging

        logging.getLogger("diloco.made_up").warning("of a container")

    (tmp_path / "empty").mkdir()
    spec = ship(shared, tmp_path / "empty", warns)
    code, out, _ = ended(cloud.start(spec))
    assert (code, out) == (0, "of a container\n")
    assert told(attach(address_of(spec.store_url, spec.run_id))) == [(0, 0, "of a container", 1)]


def test_a_script_that_is_alone_warns_on_stderr_alone(job: Path) -> None:
    (job / "alone.py").write_text("import warns_job\nwarns_job.warn()\n")
    done = subprocess.run([sys.executable, "alone.py"], capture_output=True, text=True, cwd=job, check=True)
    assert "of</b> text" in done.stderr
    assert "ReplicasWarning: marked" in done.stderr


TRAIN = """
import torch
from diloco import DiLoCo
from executors import current_replica

def main():
    model = torch.nn.Linear(2, 1)
    with DiLoCo(model, inner_steps=10, same_data="allow") as diloco:
        for _ in range(25):
            with torch.no_grad():
                model.weight.add_(0.1)
            diloco.step()

def by_episodes():
    model = torch.nn.Linear(2, 1)
    with DiLoCo(model, inner_steps=10, same_data="allow", grace_s=0.2) as diloco:
        for _ in range(20 + 20 * current_replica().rank):
            with torch.no_grad():
                model.weight.add_(0.1)
            diloco.step()

def changed(how="shares", is_on_one_rank=False):
    train_and_change(how, is_on_one_rank)

def train_and_change(how="shares", is_on_one_rank=False):
    replica = current_replica()
    model = torch.nn.Sequential(torch.nn.Linear(20, 4), torch.nn.BatchNorm1d(4))
    with DiLoCo(model, inner_steps=2, total_steps=4, same_data="allow") as diloco:
        for _ in diloco.steps():
            diloco.step()
    share = 0 if how == "same data" else replica.rank
    batches = torch.randn(4, 64, 20, generator=torch.Generator().manual_seed(share))
    if how != "nothing" and not (is_on_one_rank and replica.rank):
        torch.optim.swa_utils.update_bn(batches, model)
    return model

def alone():
    model = torch.nn.Linear(2, 1)
    torch.optim.SGD(model.parameters(), 0.1).step()
"""


def test_steps_that_are_in_no_average_are_an_event_of_their_run(job: Path) -> None:
    (job / "train_job.py").write_text(TRAIN)
    run = launch("local", "train_job:main", 2)
    assert run.wait(100)
    assert any("5 steps of this replica since its last round are in no average" in e.text for e in run.warnings())


def test_replicas_whose_loops_end_at_different_steps_end_with_different_models_and_the_run_reports_that(
    job: Path,
) -> None:
    (job / "train_job.py").write_text(TRAIN)
    run = launch("local", "train_job:by_episodes", 2)
    assert run.wait(100)
    (warning,) = [each for each in run.warnings() if each.rank is None]
    assert "from rank 0 after round 2 to rank 1 after round 4" in warning.text


def test_replicas_that_change_their_models_in_different_ways_after_the_end_are_warned_of(job: Path) -> None:
    (job / "train_job.py").write_text(TRAIN)
    (job / "script.py").write_text("import train_job\nmodel = train_job.train_and_change()\nprint(model)\n")
    cases: list[tuple[str, dict[str, Any], int]] = [
        ("train_job:changed", {}, 1),
        ("script.py", {}, 1),
        ("train_job:changed", {"args": {"how": "same data"}}, 0),
        ("train_job:changed", {"args": {"how": "nothing"}}, 0),
        ("train_job:changed", {"args": {"is_on_one_rank": True}}, 0),
    ]
    for entrypoint, more, n_warnings in cases:
        run = launch("local", entrypoint, 2, seed=1, **more)  # a few of many random models are nearly equal
        assert run.wait(100)
        found = [each.text for each in run.warnings() if each.rank is None]
        assert len(found) == n_warnings, (entrypoint, more, found)
        assert all(text.startswith("Replicas ended with different models: ranks 0-1 changed theirs") for text in found)


def test_replicas_that_each_trained_alone_report_that_and_those_that_know_their_rank_do_not(job: Path) -> None:
    (job / "train_job.py").write_text(TRAIN)
    (job / "script.py").write_text("import sys, train_job\ntrain_job.alone()\n")
    (job / "by_rank.py").write_text(
        "import os, train_job\ndef main():\n    os.environ['REPLICA_RANK']\n    train_job.alone()\n"
    )
    executor = LocalProcessExecutor(term_grace_s=0.5)
    run = launch(executor, "script.py", 2)
    assert run.wait(100)
    (warning,) = run.warnings()
    assert warning.text.startswith("None of the 2 replicas created a DiLoCo, so each trained alone.")
    assert [event.kind for event in run.events()][-2:] == ["warning", "finished"]
    for entrypoint, n, more in (
        ("script.py", 1, {}),
        ("by_rank.py", 2, {}),
        ("script.py", 2, {"env": {"SHARD": "${rank}"}}),
        ("train_job:main", 2, {}),
    ):
        run = launch(executor, entrypoint, n, **more)  # type: ignore[arg-type]
        assert run.wait(100)
        assert all(each.rank is not None for each in run.warnings()), (entrypoint, n, more)
        assert run.status().status == "succeeded"
