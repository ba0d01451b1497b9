"""The costs of DiLoCo in the user's loop: the search for optimizers that undo a round (T2), and saved state (T3)."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from diloco import DiLoCo
from diloco.fragments import plan_fragments
from diloco.stale_copies.comparison import StaleCopies
from executors.store.file import FileStore

from .harness import Comparison, Options
from .launch import scratch_folder

STEP_S = 0.005
INNER_STEPS = 10


def training_loop(options: Options) -> list[Comparison]:
    """T2 and T3, by the processor time of the training thread, so that the time of other programs does not count."""
    torch.set_num_threads(1)
    with scratch_folder("loop-") as name:
        return [*_checking(options), *_keeping(Path(name), options)]


def _checking(options: Options) -> list[Comparison]:
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(60)])
    stale = StaleCopies(model, plan_fragments(model, 1, sync_buffers=None))
    after, between = list[float](), list[float]()
    stale.check()  # the first step's search through the optimizers
    for _ in range(options.repetitions(2000)):
        stale.before_merge()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01)
        stale.after_merge("round 1")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.0001)  # the optimizer's step: without one, each check would wait for it
        for spent in (after, between):
            began = time.thread_time()
            stale.check()
            spent.append(100 * (time.thread_time() - began) / STEP_S)
    stale.close()
    return [
        Comparison("T2", "looking for an undone round, of 120 parameters", "% of a step of 5 ms",
                   {"the step after a round": after, "any other step": between},
                   goals={"the step after a round": 1.0, "any other step": 0.1}),
    ]  # fmt: skip


def _keeping(folder: Path, options: Options) -> list[Comparison]:
    width, n_rounds = (64, 4) if options.quick else (1000, 16)
    shares, ages = list[float](), list[float]()
    for number in range(options.repetitions(3)):
        store = FileStore(folder / str(number))
        model = nn.Sequential(*[nn.Linear(width, width) for _ in range(10)])
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
        diloco = DiLoCo(model, inner_steps=INNER_STEPS, store=store, run_id="run", rank=0, world_size=1)
        diloco.attach_state("optimizer", optimizer)
        spent, began = _spent_in(diloco), time.thread_time()
        batch, oldest = torch.randn(256, width), 0
        for _ in range(n_rounds * INNER_STEPS):
            oldest = max(oldest, diloco.rounds - max(_kept(store), default=0))
            torch.autograd.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            diloco.step()
        shares.append(100 * sum(spent) / (time.thread_time() - began))
        ages.append(oldest + 1.0)  # the steps since the newest round belong to one more round
        diloco.close()
    what = f"attached AdamW of {10 * width * (width + 1):,} parameters, rounds of {INNER_STEPS} steps"
    return [
        Comparison("T3", f"{what}: kept", "% of the time", {"copies": shares}, goals={"copies": 1.0}),
        Comparison("T3", f"{what}: lost by a kill at worst", "rounds", {"state": ages}, goals={"state": 2.0}),
    ]


def _spent_in(diloco: DiLoCo) -> list[float]:
    """Return a list to which each save of attached state adds the seconds that training waited."""
    spent, keep = list[float](), diloco._saver.save_attached

    def timed() -> None:
        began = time.thread_time()
        keep()
        spent.append(time.thread_time() - began)

    replaced: Any = diloco
    replaced._saver.save_attached = timed
    return spent


def _kept(store: FileStore) -> list[int]:
    """Return the numbers of the rounds after which a state is stored."""
    matches = (re.search(r"/own/0/(\d+)/0/record$", entry.key) for entry in store.list("run/diloco/main/own/"))
    return [int(match[1]) for match in matches if match]
