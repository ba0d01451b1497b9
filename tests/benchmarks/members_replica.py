"""The tasks of replicas in the benchmarks of several processes. Also a script for torchrun: TASK ARGUMENT…"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from executors import restartable


def step_on(folder: str) -> None:
    """Write the time of the first optimizer step into `folder/steps`, and continue until `folder/stop` exists.

    A replica of one process has no process group, as a script without torchrun has none.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    attempt = os.environ.get("REPLICA_ATTEMPT") or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    model: torch.nn.Module = torch.nn.Linear(64, 64)
    in_group = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if in_group:
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
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
        time.sleep(0.02)


def fail_once(file: str) -> float:
    """Note the time, and fail. The next attempt returns the milliseconds since then."""
    now = time.monotonic()
    if not Path(file).exists():
        Path(file).write_text(repr(time.monotonic()))
        raise ValueError("no luck")
    return 1e3 * (now - float(Path(file).read_text()))


fail_once_in_process = restartable()(fail_once)


def count_steps(steps: int) -> dict[str, Any]:
    """Return the processor time and the wall time of a step of DiLoCo without a round, and of one broadcast, in ms."""
    import torch
    import torch.distributed as dist

    from diloco import DiLoCo

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    word = torch.zeros(12, dtype=torch.int64)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    with DiLoCo(model, inner_steps=10 * steps, total_steps=10 * steps) as diloco:
        found = {}
        for name, act in (("diloco.step()", diloco.step), ("a broadcast", lambda: dist.broadcast(word, 0))):
            for _ in range(10):
                act()
            dist.barrier()
            cpu, wall = time.process_time(), time.monotonic()
            for _ in range(steps):
                act()
            used = time.process_time() - cpu, time.monotonic() - wall
            found[name] = [1e3 * each / steps for each in used]
            dist.barrier()
    dist.destroy_process_group()
    return found


def save(folder: str) -> None:
    """Save for a second after SIGTERM, and write a file then."""
    rank = os.environ["RANK"]

    def handle(*_: object) -> None:
        time.sleep(1)
        Path(folder, f"saved-{rank}").touch()
        sys.exit(0)

    signal.signal(signal.SIGTERM, handle)
    Path(folder, f"ready-{rank}").touch()
    while True:
        time.sleep(0.05)


if __name__ == "__main__":
    {"step_on": step_on, "save": save}[sys.argv[1]](sys.argv[2])
