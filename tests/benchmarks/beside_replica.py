"""The tasks of replicas in the benchmarks of background rounds: measure steps and rounds."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import unquote, urlsplit

import torch
from torch import nn

from diloco import DiLoCo
from executors import current_replica
from executors.store.file import FileStore

sys.path.insert(0, str(Path(__file__).parents[1]))  # the helpers that tests share are below this folder

from support.far_store import FarStore

STEP_S = 0.005


def train(
    n_elements: int, link: dict[str, Any], inner_steps: int, step_s: float, rounds: int, settings: dict[str, Any]
) -> dict[str, Any]:
    """Train on a simulated device that needs `step_s` for a step. The first round is not counted.

    Args:
        link: the slow link to the store. None: the directory itself.

    Returns:
        The total seconds, and for each round the seconds that `DiLoCo.step` blocked and the seconds that the round
        took.
    """
    torch.set_num_threads(1)
    replica = current_replica()
    near = FileStore(Path(unquote(urlsplit(replica.rendezvous).path)))
    store = FarStore(near, **link) if link else near
    model = Flat(n_elements)
    # Each step changes one part of the parameters, because a device would not use this machine's processor for it.
    parts = torch.split(model.flat.detach(), -(-n_elements // inner_steps))
    change = 0.001 * (replica.rank + 1) * torch.randn(len(parts[0]), generator=torch.Generator().manual_seed(0))
    held_up_s: list[float] = []
    busy_s: list[float] = []
    with DiLoCo(
        model, inner_steps=inner_steps, sync_buffers=False, store=store, run_id=replica.run_id, **settings
    ) as diloco:
        began = time.perf_counter()
        for step in range(inner_steps * (rounds + 1)):
            if step == inner_steps:
                began = time.perf_counter()
            stepping = time.perf_counter()
            part = parts[step % len(parts)]
            part.add_(change[: len(part)])
            time.sleep(max(0.0, step_s - (time.perf_counter() - stepping)))
            if step % inner_steps == 0:
                held_up_s.append(0.0)
            stepped = time.perf_counter()
            report = diloco.step()
            held_up_s[-1] += time.perf_counter() - stepped
            if report is not None:
                assert len(report.ranks) == replica.world_size, "a replica is missing in a round"
                busy_s.append(report.busy_s)
        all_s = time.perf_counter() - began
    return {"all_s": all_s, "step_s": held_up_s[1:], "busy_s": busy_s[1:]}


def time_steps(n_elements: int, rounds: int, on_device: bool) -> dict[str, list[float]]:
    """Measure inner steps while a round runs in this process, and while none runs.

    Args:
        on_device: True: a step waits for a device. False: a step consists of operations that are small enough for the
            interpreter and its lock to dominate.
    """
    torch.set_num_threads(1)
    model = Flat(n_elements)
    small = torch.eye(32)

    def step() -> None:
        if on_device:
            time.sleep(STEP_S)
            return
        for _ in range(1000):
            small.mm(small)

    def timed() -> tuple[float, float]:
        began = time.monotonic()
        step()
        return began, time.monotonic() - began

    samples = {"alone": [timed()[1] for _ in range(20)][10:], "beside a round": []}
    inner_steps = 2 * int(max(0.5, n_elements / 10e6) / median(samples["alone"]))
    settings: dict[str, Any] = {"overlap_steps": inner_steps - 1, "merge": "carry"}
    with DiLoCo(model, inner_steps=inner_steps, sync_buffers=False, **settings) as diloco:
        for _ in range(rounds):
            steps: list[tuple[float, float]] = []
            report = None
            while report is None:
                steps.append(timed())
                with torch.no_grad():
                    model.flat[: 1 << 10].add_(0.001)
                report = diloco.step()
            for began, seconds in steps[1:]:  # the first read comes before the contribution is taken
                samples["beside a round" if began <= report.ended else "alone"].append(seconds)
    return samples


class Flat(nn.Module):
    """A model of one parameter."""

    def __init__(self, n_elements: int) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.zeros(n_elements))
