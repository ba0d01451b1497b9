"""Many replicas at once, few at a time, starts that fail, and GPUs that are shared out."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import local_tasks
import pytest
from processes_of_tests import is_alive
from runs_of_tests import pid_of, record_of

from executors import LocalProcessExecutor, attach, launch
from executors.errors import BackendError, LaunchError, RunExistsError
from executors.testing import eventually


def test_64_replicas_run_at_once(local: LocalProcessExecutor, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    run = launch(local, local_tasks.meet, 64, args={"folder": str(folder), "n": 64})
    assert run.results() == list(range(64))


def test_64_hanging_replicas_are_cancelled_at_once(local: LocalProcessExecutor, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    with launch(local, local_tasks.hang, 64, args={"path": str(folder / "r")}) as run:
        eventually(lambda: len(list(folder.glob("r.*"))) == 64)
        pids = [int(path.read_text()) for path in folder.glob("r.*")]
    assert [outcome.status for outcome in run.outcomes()] == ["cancelled"] * 64
    assert not any(is_alive(pid) for pid in pids)


# --- max_parallel


def test_no_more_than_max_parallel_replicas_run_at_once(tmp_path: Path) -> None:
    def entrypoint(folder: str) -> int:
        import os
        import time
        from pathlib import Path

        mine = Path(folder, str(os.getpid()))
        mine.write_text("")
        time.sleep(0.05)  # overlap, if it is allowed
        seen = len(list(Path(folder).iterdir()))
        mine.unlink()
        return seen

    folder = tmp_path / "running"
    folder.mkdir()
    executor = LocalProcessExecutor(preload=(), max_parallel=3)
    seen = launch(executor, entrypoint, 12, args={"folder": str(folder)}).results()
    assert len(seen) == 12
    assert 1 <= max(seen) <= 3


def test_a_waiting_replica_is_pending_and_starts_when_there_is_room(tmp_path: Path) -> None:
    executor = LocalProcessExecutor(preload=(), max_parallel=1, term_grace_s=0.5)
    handles = executor.launch_replicas(2, local_tasks.hang, {"path": str(tmp_path / "r")})
    pid_of(handles[0])
    assert [str(executor.poll(handle)) for handle in handles] == ["running", "pending"]
    executor.cancel(handles[0])
    eventually((tmp_path / "r.1").exists)
    assert executor.poll(handles[1]) == "running"
    executor.cancel(handles[1])


def test_a_waiting_replica_that_is_cancelled_never_starts(tmp_path: Path) -> None:
    executor = LocalProcessExecutor(preload=(), max_parallel=1, term_grace_s=0.5)
    handles = executor.launch_replicas(3, local_tasks.hang, {"path": str(tmp_path / "r")})
    pid_of(handles[0])
    executor.cancel(handles[1])
    assert executor.poll(handles[1]) == "cancelled"
    executor.cancel(handles[0])
    eventually((tmp_path / "r.2").exists)
    assert not (tmp_path / "r.1").exists()
    assert record_of(handles[1], "started.json") is None
    executor.cancel(handles[2])


def test_a_time_limit_counts_from_a_replicas_own_start(tmp_path: Path) -> None:
    def entrypoint() -> str:
        import time

        time.sleep(0.8)
        return "done"

    executor = LocalProcessExecutor(preload=(), max_parallel=1)
    assert launch(executor, entrypoint, 4, timeout=3).results() == ["done"] * 4


@pytest.mark.parametrize("max_parallel", [0, -1])
def test_a_senseless_max_parallel_is_refused(max_parallel: int) -> None:
    with pytest.raises(ValueError, match=f"max_parallel={max_parallel}"):
        LocalProcessExecutor(max_parallel=max_parallel)


# --- starts that fail


def test_a_start_that_fails_at_one_rank_leaves_no_orphan(
    local: LocalProcessExecutor, state_home: Path, tmp_path: Path
) -> None:
    in_the_way = state_home / "replicas/doomed/replicas/0002/0/output.log"
    in_the_way.mkdir(parents=True)  # so that the log of rank 2 cannot be opened
    with pytest.raises(LaunchError, match="replica 2 of 4") as caught:
        launch(local, local_tasks.hang, 4, args={"path": str(tmp_path / "r")}, run_id="doomed")
    assert caught.value.rank == 2
    for path in tmp_path.glob("r.*"):
        assert not is_alive(int(path.read_text()))
    rows = attach("doomed").outcomes()
    assert rows[2].reason == "start_failed"
    assert all(row.status in ("cancelled", "failed") for row in rows)
    assert not list(state_home.glob("replicas/doomed/replicas/0003/0/started.json"))


def test_what_cannot_work_is_refused_before_anything_is_written(local: LocalProcessExecutor, state_home: Path) -> None:
    bad: list[dict[str, Any]] = [
        {"n": 0},
        {"n": -3},
        {"timeout": 0},
        {"timeout": -1},
        {"run_id": "Not Allowed"},
        {"run_id": ""},
        {"run_id": "../escape"},
        {"run_id": "a" * 41},
        {"rendezvous": "memory://here"},
        {"rendezvous": "gopher://there"},
        {"args": {"rank_env": "not a name"}},
    ]
    for options in bad:
        with pytest.raises(ValueError):
            launch(local, local_tasks.rank, **{"n": 1, **options})
    assert not list(state_home.rglob("run.json"))


def test_a_run_id_that_exists_says_how_to_attach(local: LocalProcessExecutor) -> None:
    assert launch(local, local_tasks.rank, 1, run_id="my-run-1").results() == [0]
    with pytest.raises(RunExistsError, match=r"my-run-1.*attach\('my-run-1'\)"):
        launch(local, local_tasks.hang, 1, run_id="my-run-1")
    assert attach("my-run-1").results() == [0]


def test_a_replica_that_cannot_claim_its_start_is_a_failure_and_not_a_hang(
    local: LocalProcessExecutor, tmp_path: Path
) -> None:
    """The working directory is gone before the replicas start."""
    folder = tmp_path / "gone"
    folder.mkdir()
    before = os.getcwd()
    os.chdir(folder)
    try:
        folder.rmdir()
        with pytest.raises(Exception, match=r"."):
            launch(local, local_tasks.rank, 1).results()
    finally:
        os.chdir(before)


# --- GPUs


def gpus(n: int, **options: Any) -> LocalProcessExecutor:
    return LocalProcessExecutor(preload=(), gpus=[str(index) for index in range(n)], **options)


NAMES = {"names": ["CUDA_VISIBLE_DEVICES"]}


def visible_devices(executor: LocalProcessExecutor, n: int, gpu: str | None) -> list[str | None]:
    run = launch(executor, "executors.testing.tasks:variables", n, args=NAMES, gpu=gpu)
    return [result["CUDA_VISIBLE_DEVICES"] for result in run.results()]


def test_gpus_are_split_over_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_devices(gpus(4), 4, "H100") == ["0", "1", "2", "3"]
    assert visible_devices(gpus(4), 2, "H100:2") == ["0,1", "2,3"]
    assert visible_devices(gpus(4), 3, "H100") == ["0", "1", "2"]
    assert visible_devices(LocalProcessExecutor(preload=(), gpus=["5", "GPU-abc"]), 2, "any") == ["5", "GPU-abc"]


def test_without_a_request_the_variable_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    assert visible_devices(gpus(4), 2, None) == ["1,3", "1,3"]


@pytest.mark.parametrize(("n", "gpu"), [(5, "H100"), (3, "H100:2"), (1, "H100:8")])
def test_too_few_gpus_are_refused_with_both_numbers(n: int, gpu: str, state_home: Path) -> None:
    with pytest.raises(BackendError, match=r"4") as caught:
        launch(gpus(4), local_tasks.rank, n, gpu=gpu)
    assert str(n) in str(caught.value)
    assert not list(state_home.rglob("run.json"))


def test_few_gpus_are_shared_by_many_replicas_one_after_the_other() -> None:
    found = visible_devices(gpus(2, max_parallel=2), 6, "H100")
    assert sorted(set(found), key=str) == ["0", "1"]


@pytest.mark.parametrize("gpu", ["", ":2", "H100:0", "H100:x", "H100:-1"])
def test_a_gpu_request_that_means_nothing_is_refused(gpu: str) -> None:
    with pytest.raises(ValueError, match="H100"):
        launch(gpus(4), local_tasks.rank, 1, gpu=gpu)


def test_a_request_without_any_gpu_warns_once_and_goes_on() -> None:
    executor = gpus(0)
    with pytest.warns(RuntimeWarning, match=r"A100-unheard-of.*no GPU") as told:
        assert launch(executor, local_tasks.rank, 1, gpu="A100-unheard-of").results() == [0]
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert launch(executor, local_tasks.rank, 1, gpu="A100-unheard-of").results() == [0]


def test_a_gpu_is_free_again_for_the_next_when_its_replica_was_killed() -> None:
    executor = gpus(1, max_parallel=1, term_grace_s=0.5)
    handles = executor.launch_replicas(2, "executors.testing.tasks:hang_on", {"rank": 0}, gpu="H100")
    os.kill(pid_of(handles[0]), signal.SIGKILL)
    rows = executor.collect(handles, timeout=60)
    assert [row["status"] for row in rows] == ["failed", "succeeded"]
