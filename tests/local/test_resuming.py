"""Bringing back replicas that ended: new attempts of the same task in the same run."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from dataclasses import replace
from importlib import import_module
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from servers.isolation.gpu import write_torch
from support.runs import pid_of
from support.third_party import PopenExecutor

from executors import LocalProcessExecutor, Run, attach, current_replica, launch
from executors.errors import BackendError, StoreError
from executors.restarts.decision_log import DecisionLog
from executors.run.resume import resume
from executors.run.run import view_of
from executors.run.start_spec import _code_in, check_folder, trusted_task
from executors.testing import eventually

PLAIN = LocalProcessExecutor(preload=(), term_grace_s=0.5)


def second_time_lucky(folder: str) -> dict[str, Any]:
    """Fail in the first attempt of rank 1, and hang in the first attempt of rank 2, until a file exists."""
    replica = current_replica()
    print(f"attempt {replica.attempt}")
    if replica.rank == 1 and replica.attempt == 0:
        raise RuntimeError("not yet")
    while replica.rank == 2 and not Path(folder, "go").exists():
        signal.pause() if replica.attempt == 0 else Path(folder, "go").touch()
    return {"rank": replica.rank, "attempt": replica.attempt, "token": os.environ.get("TOKEN")}


@pytest.fixture
def half_dead(tmp_path: Path) -> Run:
    """A run whose rank 0 succeeded, rank 1 failed, and rank 2 was killed."""
    run = launch(PLAIN, second_time_lucky, 3, args={"folder": str(tmp_path)}, run_id="half-dead")
    eventually(lambda: run.status().replicas[1].status == "failed", "rank 1 fails")
    os.kill(pid_of(run.handles[2]), signal.SIGKILL)
    assert run.wait(30)
    return run


def test_ranks_that_ended_without_success_get_a_new_attempt(half_dead: Run) -> None:
    results = resume(half_dead).results()
    assert [(result["rank"], result["attempt"]) for result in results] == [(0, 0), (1, 1), (2, 1)]


def test_other_rules_may_count_from_a_resume_on(half_dead: Run) -> None:
    run = resume(half_dead, restarts=2, hang_timeout="off")
    run.results()
    policy, resumed = DecisionLog(view_of(run).store, run.run_id).read()
    assert (policy.kind, policy.restarts, policy.hang) == ("policy", "2", "off")
    assert (resumed.kind, resumed.start) == ("resume", {1: 1, 2: 1})
    with pytest.raises(ValueError, match="begin with a number"):
        resume(half_dead, restarts="many")


def test_the_old_run_object_its_old_handles_and_another_process_see_the_new_attempts(half_dead: Run) -> None:
    handles = half_dead.handles
    assert [state.status for state in half_dead.status().replicas] == ["succeeded", "failed", "failed"]
    resume(half_dead).wait(30)
    assert [state.status for state in half_dead.status().replicas] == ["succeeded"] * 3
    assert [outcome.attempt for outcome in half_dead.outcomes()] == [0, 1, 1]
    assert [row["status"] for row in PLAIN.collect(handles)] == ["succeeded"] * 3
    assert attach("half-dead").results()[1]["attempt"] == 1


def test_a_process_that_takes_replicas_as_they_end_gets_a_resumed_one_again(tmp_path: Path) -> None:
    run = launch(PLAIN, second_time_lucky, 3, args={"folder": str(tmp_path)})
    ended = run.as_completed()
    assert {(outcome.rank, str(outcome.status)) for outcome in (next(ended), next(ended))} == {
        (0, "succeeded"),
        (1, "failed"),
    }
    resume(run, ranks=[1])
    again = next(ended)
    assert (again.rank, again.attempt, again.status) == (1, 1, "succeeded")
    os.kill(pid_of(run.handles[2]), signal.SIGKILL)
    assert [(outcome.rank, outcome.reason) for outcome in ended] == [(2, "signal")]
    assert attach(run.run_id).wait(n=3)


def test_logs_are_those_of_the_new_attempt_and_the_old_ones_remain(half_dead: Run, state_home: Path) -> None:
    run = resume(half_dead)
    run.wait(30)
    assert run.logs(rank=1) == "attempt 1\n"
    old = state_home / "replicas" / "half-dead" / "replicas" / "0001" / "0" / "output.log"
    assert old.read_text().startswith("attempt 0\n")


def test_single_ranks_can_be_chosen(half_dead: Run) -> None:
    run = resume(half_dead, ranks=[1])
    assert run.wait(30)
    assert [state.status for state in run.status().replicas] == ["succeeded", "succeeded", "failed"]


def test_a_resumed_replica_can_be_cancelled_and_resumed_again(half_dead: Run, tmp_path: Path) -> None:
    run = resume(half_dead, ranks=[1])
    run.wait(30)
    again = resume(run, ranks=[2])
    again.wait(30)
    assert again.status().replicas[2].attempt == 1


@pytest.fixture
def two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Two folders with a `train.py` of their own; the first is the current one, which `sys.path` names."""
    here, there = tmp_path / "with a space", tmp_path / "other"
    for folder in (here, there):
        folder.mkdir()
        (folder / "train.py").write_text(f"def main():\n    raise RuntimeError({folder.name!r})\n")
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    return here, there


@pytest.mark.parametrize("entrypoint", ["train.py:main", "train:main"])
def test_other_code_of_the_same_name_is_not_taken_for_the_runs(
    two_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, entrypoint: str
) -> None:
    here, there = two_folders
    launch(PLAIN, entrypoint, 1, run_id="nightly").wait(30)
    monkeypatch.chdir(there)
    with pytest.raises(ValueError, match=f"cd '{here}' && replicas resume nightly"):
        resume(attach("nightly"))
    (there / "train.py").unlink()
    with pytest.raises(ValueError, match=f"cd '{here}' && replicas resume nightly"):
        resume(attach("nightly"))
    assert attach("nightly").status().replicas[0].attempt == 0
    (linked := there / "linked").symlink_to(here)
    monkeypatch.chdir(linked)
    again = resume(attach("nightly"))
    again.wait(30)
    (outcome,) = again.outcomes()
    assert (outcome.attempt, "with a space" in str(outcome.error)) == (1, True)


def test_an_installed_entrypoint_is_resumed_from_any_folder(
    two_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here, there = two_folders
    entrypoints: dict[str, Any] = {
        "a-file": f"{here}/train.py:main",
        "installed": "executors.testing.tasks:no_json",
        "built-in": "time:time",
        "a-function": second_time_lucky,
    }
    for name, entrypoint in entrypoints.items():
        args = {"folder": str(there)} if name == "a-function" else {}
        monkeypatch.chdir(here)
        launch(PLAIN, entrypoint, 1, args=args, run_id=name).wait(30)
        monkeypatch.chdir(there)
        resume(attach(name), ranks=[0]).wait(30)
        assert attach(name).status().replicas[0].attempt == 1, name
    assert "replicas:" not in capsys.readouterr().err


def test_a_function_of_a_module_is_not_taken_from_another_folder(
    two_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = two_folders
    module = import_module("train")
    for name, entrypoint in {"by-name": module.main, "in-a-partial": functools.partial(module.main)}.items():
        monkeypatch.chdir(here)
        launch(PLAIN, entrypoint, 1, run_id=name).wait(30)
        monkeypatch.chdir(there)
        with pytest.raises(ValueError, match=f"cd '{here}' && replicas resume {name}"):
            resume(attach(name))
        assert attach(name).status().replicas[0].attempt == 0


def test_a_module_that_a_finder_of_its_own_serves_is_the_same_in_each_folder(
    two_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Finder:  # as of an editable install
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> Any:
            return spec_from_file_location(name, tmp_path / "editable.py") if name == "editable" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    here, there = (_code_in(str(folder), "editable") for folder in two_folders)
    assert here == there == {str(tmp_path / "editable.py")}


def test_a_callable_of_which_no_one_noted_where_it_is_from_is_not_resumed_in_another_folder(
    two_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = two_folders
    launch(PLAIN, second_time_lucky, 1, args={"folder": str(there)}, run_id="nightly").wait(30)
    task = trusted_task(run := view_of(attach("nightly")))
    monkeypatch.chdir(there)
    check_folder(run, task, "resume")
    with pytest.raises(ValueError, match=f"cd '{here}' && replicas resume nightly"):
        check_folder(run, replace(task, record=replace(task.record, modules=None)), "resume")


def test_other_code_of_the_same_name_that_is_installed_is_not_taken_for_the_runs(
    two_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here, there = two_folders
    (tmp_path / "site").mkdir()
    (there / "train.py").rename(tmp_path / "site" / "train.py")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "site")])
    launch(PLAIN, "train:main", 1, run_id="nightly").wait(30)
    monkeypatch.chdir(there)
    with pytest.raises(ValueError, match=f"cd '{here}' && replicas resume nightly"):
        resume(attach("nightly"))


@pytest.mark.parametrize("entrypoint", ["train.py:main", "train:main"])
def test_no_one_is_sent_to_a_folder_that_does_not_have_the_code(
    two_folders: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    entrypoint: str,
) -> None:
    here, there = two_folders
    launch(PLAIN, entrypoint, 1, run_id="nightly").wait(30)
    monkeypatch.chdir(there)
    (here / "train.py").rename(here / "moved.py")
    resume(attach("nightly")).wait(30)
    assert attach("nightly").status().replicas[0].attempt == 1
    assert (
        f"launched in '{here}', where its code is not found. The code in '{there}' is used" in capsys.readouterr().err
    )


def test_the_error_for_a_new_run_from_a_snapshot_names_a_command_that_begins_one(
    two_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = two_folders
    launch(PLAIN, "train.py:main", 1, run_id="nightly").wait(30)
    monkeypatch.chdir(there)
    with pytest.raises(ValueError, match=f"cd '{here}' && replicas resume --from-snapshot nightly"):
        resume(attach("nightly"), from_snapshot=True)


def test_a_deleted_folder_of_the_launch_is_named_and_the_run_continues_with_the_code_of_this_folder(
    two_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here, there = two_folders
    launch(PLAIN, "train.py:main", 1, run_id="nightly").wait(30)
    monkeypatch.chdir(there)
    here.rename(here.with_name("moved"))
    resume(attach("nightly")).wait(30)
    assert attach("nightly").status().replicas[0].attempt == 1
    assert (
        f"launched in '{here}', where its code is not found. The code in '{there}' is used" in capsys.readouterr().err
    )


def test_launch_with_resume_brings_a_run_back(half_dead: Run, tmp_path: Path) -> None:
    run = launch(PLAIN, second_time_lucky, 3, run_id="half-dead", resume=True)
    assert [result["attempt"] for result in run.results()] == [0, 1, 1]


def test_launch_with_resume_refuses_another_task(half_dead: Run) -> None:
    with pytest.raises(ValueError, match="cannot be resumed as 3 of"):
        launch(PLAIN, print, 3, run_id="half-dead", resume=True)
    with pytest.raises(ValueError, match="needs the run_id"):
        launch(PLAIN, print, 3, resume=True)


def test_launch_with_resume_refuses_other_arguments() -> None:
    fail = "executors.testing.tasks:fail"
    launch(PLAIN, fail, 1, args={"message": "no"}, run_id="as-it-was", seed=3).wait(30)
    with pytest.raises(ValueError, match="with the values of its launch, and 'message' differs"):
        launch(PLAIN, fail, 1, args={"message": "yes"}, run_id="as-it-was", resume=True)
    with pytest.raises(ValueError, match="and 'seed' differs"):
        launch(PLAIN, fail, 1, args={"message": "no"}, seed=4, run_id="as-it-was", resume=True)
    launch(PLAIN, fail, 1, args={"message": "no"}, seed=3, run_id="as-it-was", resume=True).wait(30)
    again = launch(PLAIN, fail, 1, run_id="as-it-was", resume=True)
    assert again.wait(30)
    assert again.status().replicas[0].attempt == 2


def test_launch_with_resume_refuses_arguments_that_a_resume_ignores() -> None:
    for name, value in {"min_replicas": 1, "fail_fast": True, "max_cost": 2.5, "tracker": "trackio"}.items():
        with pytest.raises(ValueError, match=f"A resumed run keeps the {name} of its launch"):
            launch(PLAIN, print, 1, run_id="any", resume=True, **{name: value})  # type: ignore[arg-type]


def test_launch_with_resume_brings_a_script_back_with_the_arguments_it_had(tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text("import sys\nassert sys.argv[1:] == ['--lr', '1']\nsys.exit(3)\n")
    launch(PLAIN, str(script), 1, argv=["--lr", "1"], run_id="a-script").wait(30)
    again = launch(PLAIN, str(script), 1, run_id="a-script", resume=True)
    again.wait(30)
    assert (again.outcomes()[0].attempt, again.outcomes()[0].exit_code) == (1, 3)
    with pytest.raises(ValueError, match="'argv' differs"):
        launch(PLAIN, str(script), 1, argv=[], run_id="a-script", resume=True)


def test_a_task_that_is_not_the_launched_one_is_not_brought_back(half_dead: Run) -> None:
    key = "half-dead/task/task.json"
    task = bytes(view_of(half_dead).store.get(key))
    view_of(half_dead).store.put(key, task.replace(b'"rank_env": null', b'"rank_env": "R"  '))
    with pytest.raises(StoreError, match=r"task/task\.json' .* is not what was launched"):
        resume(half_dead)
    assert half_dead.status().replicas[1].attempt == 0


def test_a_run_that_succeeded_has_nothing_to_resume() -> None:
    run = launch(PLAIN, str, 2)
    run.wait(30)
    with pytest.raises(ValueError, match="no replica to resume: 2 succeeded"):
        resume(run)


def test_values_of_the_environment_have_to_be_given_again(tmp_path: Path) -> None:
    run = launch(PLAIN, second_time_lucky, 2, args={"folder": str(tmp_path)}, env={"TOKEN": "secret"})
    run.wait(30)
    with pytest.raises(ValueError, match="'TOKEN', whose value is not recorded"):
        resume(run)
    assert resume(run, env={"TOKEN": "new"}).results()[1]["token"] == "new"


class InterruptedZygote:
    """The state after Ctrl-C during a launch, while the process that forks replicas still imports torch."""

    def request(self, message: Any) -> Any:
        raise KeyboardInterrupt


def test_a_resume_that_was_interrupted_does_not_spoil_the_next_one(
    half_dead: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as interrupted:
        interrupted.setattr("executors.backends.local.executor.zygote", lambda preload: InterruptedZygote())
        with pytest.raises(KeyboardInterrupt):
            resume(half_dead, ranks=[1])
    assert attach("half-dead").status().replicas[1].status == "cancelled"
    resume(attach("half-dead"), ranks=[1]).wait(30)
    back = attach("half-dead").status().replicas[1]
    assert (back.status, back.attempt) == ("succeeded", 2)


def test_a_resume_that_is_refused_leaves_no_attempt(half_dead: Run) -> None:
    few = LocalProcessExecutor(preload=(), gpus=["0"])
    with pytest.raises(BackendError, match="this machine has 1"):
        resume(Run(view_of(half_dead).store, "half-dead", executor=few), gpu="H100")
    assert [state.attempt for state in attach("half-dead").status().replicas] == [0, 0, 0]


def on_a_gpu(folder: str) -> str:
    """Record the GPU. Fail in the first attempt of rank 1, and otherwise wait until a file exists."""
    replica, devices = current_replica(), os.environ["CUDA_VISIBLE_DEVICES"]
    Path(folder, f"{replica.rank}-{replica.attempt}").write_text(devices)
    if replica.rank == 1 and replica.attempt == 0:
        raise RuntimeError("not yet")
    while not Path(folder, "go").exists():
        time.sleep(0.02)
    return devices


def test_a_rank_that_is_resumed_or_added_gets_a_gpu_that_no_living_rank_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(write_torch(tmp_path / "gpu", sees_gpu=True))
    executor = LocalProcessExecutor(preload=(), term_grace_s=0.5, gpus=["0", "1", "2"])
    run = launch(executor, on_a_gpu, 2, args={"folder": str(tmp_path)}, gpu="H100")
    eventually(lambda: run.status().replicas[1].status == "failed", "rank 1 fails")
    back = resume(run, ranks=[1])
    eventually((tmp_path / "1-1").exists, "rank 1 is resumed")
    for rank in (2, 3):
        assert back.add(executor, 1) == [rank]
        eventually((tmp_path / f"{rank}-0").exists, f"rank {rank} is added")
    (tmp_path / "go").touch()
    assert back.results() == ["0", "1", "2", "0"]
    shares = "every GPU has a replica of this run already: sharing 0 with another."
    assert [shares in back.logs(rank=rank) for rank in range(4)] == [False, False, False, True]


def test_a_rank_that_still_runs_is_left_alone(tmp_path: Path) -> None:
    with launch(PLAIN, second_time_lucky, 3, args={"folder": str(tmp_path)}) as run:
        eventually(lambda: run.status().replicas[1].status == "failed", "rank 1 fails")
        with pytest.raises(ValueError, match=r"Rank 2 of run .* is running; only ranks that have ended are resumed"):
            resume(run, ranks=[1, 2])
        back = resume(run)
        eventually(lambda: back.status().replicas[1].status == "succeeded", "rank 1 succeeds")
        assert back.status().replicas[2].status == "running"


def test_an_aborted_run_stays_aborted(half_dead: Run) -> None:
    view_of(half_dead).store.put("half-dead/abort.json", b'{"who": "rank 1", "why": "a test"}')
    with pytest.raises(StoreError, match="was aborted, which is final"):
        resume(half_dead)


def test_a_stranger_that_cannot_start_single_ranks_is_refused() -> None:
    run = launch(PopenExecutor(), "executors.testing.tasks:fail", 1, args={"message": "no"})
    view_of(run).executor.collect(run.handles, timeout=60)
    with pytest.raises(BackendError, match="starts all ranks or none"):
        resume(run)
