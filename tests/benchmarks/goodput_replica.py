"""The tasks of replicas in the benchmarks of goodput: train in steps that sleep, and meet planned faults."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from executors import current_replica, restartable

Fault = tuple[int, int, str]
"""A rank, the inner step from which the fault strikes, and its kind: "raise", or a kind of hang, as in "lock"."""


def train(folder: str, faults: list[Fault], step_s: list[float], settings: dict[str, Any]) -> int:
    """Train a small model, and return the number of rounds.

    Args:
        folder: the folder in which each fault leaves a file when it strikes, so that it strikes once.
        faults: the faults of all ranks. A negative step strikes before the model is made, in each attempt whose number
            is the step's absolute value minus 1.
        step_s: the seconds of an inner step, by rank.
        settings: further arguments for `DiLoCo`.
    """
    replica = current_replica()
    mine = [(number, step, kind) for number, (rank, step, kind) in enumerate(faults) if rank == replica.rank]
    for number, step, kind in mine:
        if step == -1 - replica.attempt:
            _strike(Path(folder, str(number)), kind)
    import torch

    from diloco import DiLoCo

    torch.set_num_threads(1)
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(replica.rank)
    with DiLoCo(model, **settings) as diloco:
        diloco.attach_state("optimizer", optimizer)
        diloco.attach_state("data", data)
        for _ in diloco.steps():
            began = time.monotonic()
            (model(torch.randn(8, 16, generator=data)) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(max(0.0, step_s[replica.rank] - (time.monotonic() - began)))
            for number, step, kind in mine:
                if 0 <= step <= diloco.inner_step:
                    _strike(Path(folder, str(number)), kind)
            diloco.step()
    return diloco.rounds


train_again = restartable()(train)


def _strike(mark: Path, kind: str) -> None:
    from executors.worker.chaos import HANGS

    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return
    print(f"fault {mark.name}: {kind}", flush=True)
    if kind == "raise":
        raise RuntimeError("a planned fault")
    HANGS[kind]()
