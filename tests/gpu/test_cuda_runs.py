"""Runs on a GPU: slots, memory after failures, rows of usage, rounds in the background, and members.

Each test also has a variant for the CPU, so that its own code is tried on machines without a GPU.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import Any, Literal

import pytest
import torch

from diloco import DiLoCo
from executors import LocalProcessExecutor, ReplicaStatus, Run, launch
from executors.errors import BackendError
from executors.store import MemoryStore
from gpu import tasks

N_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
CUDA = pytest.param(
    "cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not N_GPUS, reason="this machine has no GPU")], id="cuda"
)
TWO_GPUS = pytest.param(
    "cuda",
    marks=[pytest.mark.cuda, pytest.mark.skipif(N_GPUS < 2, reason="this machine has fewer than two GPUs")],
    id="cuda",
)
GPU = "H200"
"""The name of the GPU that launches request. A local launch needs only its number."""
MIB = 1 << 20


def on(device: str) -> dict[str, Any]:
    """Return the options of a launch on a device."""
    return {"gpu": GPU, "health_check": "gpu"} if device == "cuda" else {}


def executor_for(device: str, max_parallel: int | None = None) -> LocalProcessExecutor:
    """Return an executor that knows the GPUs of this machine, also if the driver's program is not installed."""
    if device == "cuda" and shutil.which("nvidia-smi") is None and "CUDA_VISIBLE_DEVICES" not in os.environ:
        return LocalProcessExecutor(max_parallel=max_parallel, gpus=[str(number) for number in range(N_GPUS)])
    return LocalProcessExecutor(max_parallel=max_parallel)


def outcomes_of(run: Run) -> list[Any]:
    """Wait for the end of a run, and return the results. A failure shows the log."""
    if not run.wait(80):
        run.cancel()
    outcomes = run.outcomes()
    if any(outcome.status is not ReplicaStatus.SUCCEEDED for outcome in outcomes):
        pytest.fail(f"{outcomes}\n{run.logs(tail=60, attempt='all')}")
    return [outcome.result for outcome in outcomes]


@pytest.mark.parametrize("merge", ["anchor", "carry"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_rounds_in_the_background_give_the_bits_of_the_cpu(
    device: str, dtype: torch.dtype, merge: Literal["anchor", "carry"]
) -> None:
    ends = []
    width = 2048 if device == "cuda" else 128
    for where in ("cpu", device):
        model = tasks.exact_model(where, dtype, width)
        with DiLoCo(
            model,
            inner_steps=8,
            overlap_steps=3,
            total_steps=32,
            merge=merge,
            fragments=2,
            store=MemoryStore(),
            run_id="exact",
            rank=0,
            world_size=1,
            allow_no_rounds=True,
        ) as diloco:
            tasks.train_exactly(model, diloco, cycles=5_000_000)
            live = [parameter.detach().cpu() for parameter in model.parameters()]
            ends.append([*diloco.anchor().values(), *live])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_failed_call_and_an_ended_replica_leave_no_memory_on_the_device(device: str) -> None:
    n_bytes = 2048 * MIB if device == "cuda" else MIB
    executor = executor_for(device, max_parallel=1)
    args = {"device": device, "n_elements": n_bytes // 4}
    run = launch(executor, tasks.fail_once_with_memory, 2, args=args, restarts="1,backoff=0.05s:0.05s", **on(device))
    first, second = results = outcomes_of(run)
    for result in results:
        assert result["calls"] == [0, 1], "the second attempt runs in the same process"
        assert result["reserved_before"] < 256 * MIB, "the memory of the failed call is free"
        assert result["sum"] == 1000
    usage = [[row for row in run.metrics().usage if (row.rank, row.attempt) == (rank, 1)] for rank in (0, 1)]
    assert all(rows and rows[-1].rss > 0 for rows in usage)
    if device == "cpu":
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    assert [(result["visible"], result["devices"]) for result in results] == [(visible, 1)] * 2
    assert abs(first["free"] - second["free"]) < 256 * MIB, "the second replica waits for the memory of the first"
    for result, rows in zip(results, usage, strict=True):
        assert n_bytes <= (rows[-1].gpu_mem or 0) <= result["reserved"]
        if importlib.util.find_spec("pynvml") is not None:
            assert rows[-1].gpu_use is not None


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_replica_that_is_killed_while_it_copies_continues_to_the_same_anchor(device: str) -> None:
    whole, killed = (
        outcomes_of(
            launch(
                executor_for(device),
                tasks.train_with_a_kill,
                1,
                args={"device": device, "kills": kills},
                restarts="1,backoff=0.05s:0.05s",
                **on(device),
            )
        )[0]
        for kills in (False, True)
    )
    assert (whole.pop("attempt"), killed.pop("attempt")) == (0, 1)
    free, free_after_a_kill = whole.pop("free"), killed.pop("free")
    assert killed == whole
    assert whole["rounds"] == 5
    assert whole["live_is_anchor"]
    assert abs(free - free_after_a_kill) < 256 * MIB, "the new process starts when the memory of the killed one is free"


@pytest.mark.parametrize("device", ["cpu", TWO_GPUS])
def test_the_members_of_a_replica_add_up_their_numbers(device: str) -> None:
    options: dict[str, Any] = {"gpu": f"{GPU}:2", "procs": "gpu"} if device == "cuda" else {"procs": 2}
    run = launch(executor_for(device), tasks.add_up, 1, args={"device": device}, **options)
    assert outcomes_of(run) == [[2, 3000.0]]


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_launch_of_more_replicas_than_gpus_names_the_number_that_fits(device: str) -> None:
    executor = executor_for(device) if device == "cuda" else LocalProcessExecutor(gpus=("0",))
    n = N_GPUS or 1
    with pytest.raises(BackendError, match=f"Launch fewer, or set max_parallel={n}"):
        launch(executor, tasks.add_up, n + 1, args={"device": device}, gpu=GPU)
