"""The tasks of replicas in the benchmarks of restarts. Also a script, for torchrun: `restarts_replica.py FOLDER`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

STEP_S = 0.1


def step_on(folder: str) -> None:
    """Write the time of the first optimizer step into `folder/steps`, and continue until `folder/stop` exists."""
    import torch

    ours = "TORCHELASTIC_RESTART_COUNT" not in os.environ
    rank = os.environ["REPLICA_RANK" if ours else "RANK"]
    attempt = os.environ["REPLICA_ATTEMPT" if ours else "TORCHELASTIC_RESTART_COUNT"]
    torch.set_num_threads(1)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    step = 0
    while not Path(folder, "stop").exists():
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        step += 1
        if step == 1:
            line = f"{rank} {attempt} {os.getpid()} {time.monotonic_ns()}\n".encode()
            file = os.open(f"{folder}/steps", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(file, line)
            os.close(file)
        if ours:
            from executors import current_replica

            current_replica().report(step=step)
        time.sleep(0.02)


def train(rounds: int, round_s: float, orders: str = "") -> dict[str, Any]:
    """Train a small model in steps that sleep, so that rounds do not wait for the processor."""
    import torch

    from diloco import DiLoCo
    from executors import current_replica

    torch.set_num_threads(1)
    inner_steps = max(1, round(round_s / STEP_S))
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rank = current_replica().rank
    data = torch.Generator().manual_seed(rank)
    total = rounds * inner_steps

    def work() -> float:
        return float(diloco._training_side.phase.uncounted_steps[0])  # the steps that no seal has counted yet

    with DiLoCo(model, inner_steps=inner_steps, total_steps=total, weight=work) as diloco:
        diloco.attach_state("optimizer", optimizer)
        diloco.attach_state("data", data)
        while diloco.inner_step < total:
            began = time.monotonic()
            (model(torch.randn(8, 16, generator=data)) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(max(0.0, STEP_S - (time.monotonic() - began)))
            diloco.step()
            if orders:
                _obey(Path(orders, str(rank)))
        anchor = diloco.anchor()
    bits = {name: [value.hex() for value in values.flatten().tolist()] for name, values in anchor.items()}
    return {"rounds": diloco.rounds, "anchor": bits}


def _obey(order: Path) -> None:
    from executors.worker.chaos import Strike, parse

    if order.exists():
        strike = parse(order.read_text())
        order.unlink()
        assert isinstance(strike, Strike)
        strike.strike()


if __name__ == "__main__":
    step_on(sys.argv[1])
