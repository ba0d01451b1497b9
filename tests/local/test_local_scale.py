"""Many replicas at once, a limited number at a time, starts that fail, and the distribution of GPUs."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
from servers.isolation.gpu import write_torch
from support import tasks
from support.processes import is_alive
from support.runs import pid_of, pids_said, record_of

from executors import LocalProcessExecutor, attach, launch
from executors.attempt import Attempt
from executors.errors import BackendError, LaunchError
from executors.run.run import view_of
from executors.testing import eventually


def test_64_replicas_run_at_once_and_are_cancelled_at_once(local: LocalProcessExecutor, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    run = launch(local, tasks.meet, 64, args={"folder": str(folder), "n": 64})
    assert run.results() == list(range(64))
    with launch(local, tasks.hang, 64, args={"path": str(folder / "r")}) as run:
        pids = pids_said(folder, "r.*", 64)
    assert [outcome.status for outcome in run.outcomes()] == ["cancelled"] * 64
    assert not any(map(is_alive, pids))


# --- max_parallel


def test_no_more_than_max_parallel_replicas_run_at_once_and_limits_count_from_their_own_start(tmp_path: Path) -> None:
    def entrypoint(folder: str) -> int:
        import os
        import time
        from pathlib import Path

        mine = Path(folder, str(os.getpid()))
        mine.write_text("")
        time.sleep(0.6)  # overlap, if it is allowed
        seen = len(list(Path(folder).iterdir()))
        mine.unlink()
        return seen

    executor = LocalProcessExecutor(preload=(), max_parallel=3)
    folder = tmp_path / "running"
    folder.mkdir()
    seen = launch(executor, entrypoint, 15, args={"folder": str(folder)}, timeout=2.6).results()
    assert len(seen) == 15
    assert 1 <= max(seen) <= 3


def test_a_waiting_replica_is_pending_and_starts_when_there_is_room_unless_it_was_cancelled(tmp_path: Path) -> None:
    executor = LocalProcessExecutor(preload=(), max_parallel=1, term_grace_s=0.5)
    first, cancelled, last = executor.launch_replicas(3, tasks.hang, {"path": str(tmp_path / "r")})
    pid_of(first)
    assert [str(executor.poll(handle)) for handle in (first, cancelled)] == ["running", "pending"]
    assert executor.stream_logs(cancelled) == ""
    executor.cancel(cancelled)
    assert executor.poll(cancelled) == "cancelled"
    executor.cancel(first)
    eventually((tmp_path / "r.2").exists)
    assert executor.poll(last) == "running"
    assert not (tmp_path / "r.1").exists()
    assert record_of(cancelled, "started.json") is None
    executor.cancel(last)


# --- starts that fail


def test_a_start_that_fails_at_one_rank_leaves_no_orphan(
    local: LocalProcessExecutor, state_home: Path, tmp_path: Path
) -> None:
    in_the_way = state_home / "replicas/doomed/replicas/0002/0/output.log"
    in_the_way.mkdir(parents=True)  # so that the log of rank 2 cannot be opened
    with pytest.raises(LaunchError, match="replica 2 of 4") as caught:
        launch(local, tasks.hang, 4, args={"path": str(tmp_path / "r")}, run_id="doomed")
    assert caught.value.rank == 2
    for path in tmp_path.glob("r.*"):
        assert not is_alive(int(path.read_text()))
    rows = attach("doomed").outcomes()
    assert rows[2].reason == "start_failed"
    assert all(row.status in ("cancelled", "failed") for row in rows)
    assert not list(state_home.glob("replicas/doomed/replicas/0003/0/started.json"))


def test_a_rank_that_cannot_be_started_is_left_out_when_enough_others_can(
    local: LocalProcessExecutor, state_home: Path
) -> None:
    for run_id, n_broken in (("spared", 1), ("doomed", 2)):
        for rank in range(n_broken):
            (state_home / f"replicas/{run_id}/replicas/{rank + 1:04d}/0/output.log").mkdir(parents=True)
    run = launch(local, tasks.rank, 4, min_replicas=3, run_id="spared")
    results = run.results()
    assert [result is None for result in results] == [False, True, False, False]
    assert [str(outcome.status) for outcome in run.outcomes()] == ["succeeded", "failed", "succeeded", "succeeded"]
    assert run.outcomes()[1].reason == "start_failed"
    assert attach("spared").status().status == "succeeded"
    with pytest.raises(LaunchError, match="replica 2 of 4"):
        launch(local, tasks.hang, 4, args={"path": "r"}, min_replicas=3, run_id="doomed")


def test_a_working_directory_that_is_gone_is_a_failure_and_not_a_hang(
    local: LocalProcessExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(Exception, match=r"."):
        launch(local, tasks.rank, 1).results()


# --- options and GPUs


def gpus(n: int, **options: Any) -> LocalProcessExecutor:
    return LocalProcessExecutor(preload=(), gpus=[str(index) for index in range(n)], **options)


@pytest.fixture
def torch_with_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake torch that reports a GPU, on the search path of replicas."""
    monkeypatch.syspath_prepend(write_torch(tmp_path / "gpu", sees_gpu=True))


def visible_devices(executor: LocalProcessExecutor, n: int, gpu: str | None) -> list[str | None]:
    run = launch(executor, "executors.testing.tasks:variables", n, args={"names": ["CUDA_VISIBLE_DEVICES"]}, gpu=gpu)
    return [result["CUDA_VISIBLE_DEVICES"] for result in run.results()]


def test_bad_options_and_gpu_requests_are_refused(state_home: Path) -> None:
    for option, value in (("max_parallel", 0), ("max_parallel", -1), ("term_grace_s", -1.0), ("term_grace_s", 1e9)):
        with pytest.raises(ValueError, match=f"{option}={value}"):
            LocalProcessExecutor(**{option: value})  # type: ignore[arg-type]
    for gpu in ("", ":2", "H100:0", "H100:x", "H100:-1"):
        with pytest.raises(ValueError, match="as in 'H100' or 'H100:2'"):
            launch(gpus(4), tasks.rank, 1, gpu=gpu)
    with pytest.raises(BackendError, match=r"replica with 8 GPUs .* this machine has, which is 4\. .*'H100:4'"):
        launch(gpus(4), tasks.rank, 1, gpu="H100:8")
    for n, gpu in ((5, "H100"), (3, "H100:2")):
        with pytest.raises(BackendError, match=rf"{n} replicas with .* this machine has 4\."):
            launch(gpus(4), tasks.rank, n, gpu=gpu)
    assert not list(state_home.rglob("run.json"))


@pytest.mark.usefixtures("torch_with_gpu")
def test_gpus_are_split_over_the_ranks_that_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_devices(gpus(4), 4, "H100") == ["0", "1", "2", "3"]
    assert visible_devices(gpus(4), 2, "H100:2") == ["0,1", "2,3"]
    assert visible_devices(LocalProcessExecutor(preload=(), gpus=["5", "GPU-abc"]), 2, "any") == ["5", "GPU-abc"]
    shared = visible_devices(gpus(2, max_parallel=2), 6, "H100")
    assert sorted(set(shared), key=str) == ["0", "1"], "ranks that run one after the other share the GPUs"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    assert visible_devices(gpus(4), 2, None) == ["1,3", "1,3"], "without a request, the visible devices are unchanged"


def test_a_request_without_any_gpu_warns_once_and_continues() -> None:
    executor = gpus(0)
    with pytest.warns(RuntimeWarning, match=r"A100-unheard-of.*no GPU") as warned:
        assert launch(executor, tasks.rank, 1, gpu="A100-unheard-of").results() == [0]
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert launch(executor, tasks.rank, 1, gpu="A100-unheard-of").results() == [0]


@pytest.mark.parametrize(("cuda", "build"), [("13.0", "is built for CUDA 13.0"), (None, "is a build without CUDA")])
def test_a_replica_whose_torch_sees_no_gpu_does_not_start_where_one_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: str | None, build: str
) -> None:
    monkeypatch.syspath_prepend(write_torch(tmp_path / "no gpu", sees_gpu=False, cuda=cuda))
    ran = tmp_path / "ran"
    run = launch(gpus(1), ran.touch, 1, gpu="H100")
    assert run.wait(timeout=60)
    (outcome,) = run.outcomes()
    assert (outcome.status, outcome.reason, outcome.exit_code) == ("failed", "start_failed", 1)
    assert str(outcome.error).startswith(f"gpu='H100' was asked for, and torch sees no GPU: torch 2.13.0 {build}. ")
    assert not ran.exists()
    assert launch(gpus(1), tasks.rank, 1).results() == [0], "the replica runs, because no GPU was requested"


@pytest.mark.usefixtures("torch_with_gpu")
def test_a_gpu_is_free_again_for_the_next_when_its_replica_was_killed() -> None:
    executor = gpus(1, max_parallel=1, term_grace_s=0.5)
    handles = executor.launch_replicas(2, "executors.testing.tasks:hang_on", {"rank": 0}, gpu="H100")
    os.kill(pid_of(handles[0]), signal.SIGKILL)
    rows = executor.collect(handles, timeout=60)
    assert [row["status"] for row in rows] == ["failed", "succeeded"]


@pytest.mark.usefixtures("torch_with_gpu")
def test_a_restart_waits_until_the_ended_process_is_gone_from_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    listed = tmp_path / "listed"
    tool.write_text(f"#!/bin/sh\necho x >> {tmp_path}/asked\nhead -n 1 {listed}\nsed -i 1d {listed}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def train(listed: str) -> int:
        import os

        from executors import current_replica

        if current_replica().attempt == 0:
            with open(listed, "w") as file:
                file.write(f"{os.getpid()}\n{os.getpid()}\n")
            os._exit(3)
        return current_replica().attempt

    run = launch(gpus(1), train, 1, args={"listed": str(listed)}, gpu="H100", restarts="1,backoff=0.05s:0.05s")
    first, second = (Attempt(view_of(run).store, run.run_id, 0, number) for number in range(2))
    eventually(second.outcome, "the second attempt ends")
    pid = getattr(first.outcome(), "pid", None)
    assert f"waiting until process {pid}, which has ended, is gone from the GPU" in run.logs(rank=0)
    assert len((tmp_path / "asked").read_text().split()) == 3
