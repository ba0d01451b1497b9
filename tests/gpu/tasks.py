"""The entrypoints of replicas in the tests that need a GPU. Each of them can also run on the CPU.

No statement at the top of this file uses the GPU. Replicas are forked from a process that may have imported this file,
and CUDA does not work in a forked process whose parent has used it.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from diloco import DiLoCo
from diloco.live_parameters import HeldWork
from executors import current_replica, restartable

CALLS: list[int] = []
"""The attempts of the calls in this process so far."""
USED_S = 1.5
"""The seconds for which the device is used. After a second, the end of an attempt has a row of usage."""


def reserved(device: str) -> int:
    """Return the bytes of the device that torch has taken in this process. 0 on the CPU.

    Args:
        device: "cpu" or "cuda".
    """
    return torch.cuda.memory_reserved() if device == "cuda" else 0


@restartable()
def fail_once_with_memory(device: str, n_elements: int) -> dict[str, Any]:
    """Take memory of the device and raise in the first attempt, and use the device in the second.

    Args:
        device: "cpu" or "cuda".
        n_elements: the float32 elements that each attempt takes.
    """
    me, began = current_replica(), time.monotonic()
    CALLS.append(me.attempt)
    found = {
        "reserved_before": reserved(device),
        "free": torch.cuda.mem_get_info()[0] if device == "cuda" else 0,
        "devices": torch.cuda.device_count() if device == "cuda" else 0,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }
    taken = torch.ones(n_elements, device=device)
    me.report(step=me.attempt + 1)
    if me.attempt == 0:
        raise ValueError(f"The first attempt of rank {me.rank} fails with {taken.nbytes} bytes.")
    while time.monotonic() - began < USED_S:
        taken.mul_(1.0)
        if device == "cuda":
            torch.cuda.synchronize()
    return {**found, "calls": CALLS, "sum": taken[:1000].sum().item(), "reserved": reserved(device)}


def train_exactly(model: nn.Module, diloco: DiLoCo, *, cycles: int) -> int:
    """Train to the end of the run, with steps that give the same bits on each device and in each attempt.

    Args:
        model: the model.
        diloco: its DiLoCo.
        cycles: the cycles for which a GPU is busy before each step, so that a missing wait shows.

    Returns: the number of steps.
    """
    n_steps = 0
    for _ in diloco.steps():
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.device.type == "cuda":
                    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
                parameter.sub_(torch.where(parameter > 0, 0.125, -0.0625).to(parameter.dtype))
        n_steps += 1
        diloco.step()
    return n_steps


def exact_model(device: str, dtype: torch.dtype, width: int = 1024) -> nn.Module:
    """Return a model of two layers whose parameters are multiples of 1/8.

    Args:
        device: "cpu" or "cuda".
        dtype: the type of the parameters.
        width: the inputs and outputs of each layer. Default 1024.
    """
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-8, 9, parameter.shape, generator=generator) / 8)
    return model.to(device=device, dtype=dtype)


def train_with_a_kill(device: str, kills: bool) -> dict[str, Any]:
    """Train with rounds in the background. The first attempt is killed when its second copy has just begun.

    Args:
        device: "cpu" or "cuda".
        kills: False: no attempt is killed.
    """
    me = current_replica()
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else 0
    model = exact_model(device, torch.float32)
    n_holds = 0
    hold = HeldWork.hold

    def hold_and_die(self: HeldWork, who: str) -> None:
        nonlocal n_holds
        n_holds += 1
        if n_holds == 2 and device == "cuda":
            torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]
        hold(self, who)
        if n_holds == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    if kills and me.attempt == 0:
        HeldWork.hold = hold_and_die  # type: ignore[method-assign]
    with DiLoCo(
        model, inner_steps=8, overlap_steps=4, total_steps=40, snapshot_every=1, allow_no_rounds=True
    ) as diloco:
        train_exactly(model, diloco, cycles=1_000_000)
        anchor = torch.cat([values.reshape(-1) for values in diloco.anchor().values()])
    return {
        "attempt": me.attempt,
        "free": free,
        "rounds": diloco.rounds,
        "anchor": anchor.double().sum().item(),
        "anchor_squares": anchor.double().square().sum().item(),
        "live_is_anchor": all(
            torch.equal(live.detach().cpu(), diloco.anchor()[name]) for name, live in model.named_parameters()
        ),
    }


def add_up(device: str) -> list[Any]:
    """Add the numbers of all members with NCCL on GPUs, and with Gloo on the CPU.

    Args:
        device: "cpu" or "cuda".
    """
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        number = dist.get_rank()
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        total = torch.full((1000,), float(number + 1), device=device)
        dist.all_reduce(total)
        return [dist.get_world_size(), total.sum().item()]
    finally:
        dist.destroy_process_group()
