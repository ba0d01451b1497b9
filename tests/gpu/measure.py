"""Measures DiLoCo on one GPU: the cost of a round in the background, training, and a restart.

    PYTHONPATH=.:tests python -m gpu.measure --out measured.json

The file has one JSON object. Each part is written when it has ended, so an interrupted measurement keeps its parts.
REPLICAS_GPU_SMALL=1 uses small models on the CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from diloco import DiLoCo
from diloco.demo import ByteTransformer, load_text
from executors import LocalProcessExecutor, current_replica, launch
from executors.store import MemoryStore

LIMIT_S = 430
"""The seconds after which this process ends. The parts that have ended are in the file by then."""
IS_SMALL = os.environ.get("REPLICAS_GPU_SMALL") == "1"
DEVICE = "cpu" if IS_SMALL else "cuda"


@dataclass(frozen=True)
class Setup:
    """The model and the lengths of the parts.

    Attributes:
        width: features of each byte.
        layers: the number of layers.
        heads: heads of the attention.
        context: bytes that a prediction can see.
        batch: windows in a batch.
        steps_around: steps from one round to the next while the overlap is measured.
        rounds_around: rounds while the overlap is measured.
        steps: inner steps of each replica of the training.
        inner_steps: steps from one round of the training to the next.
    """

    width: int
    layers: int
    heads: int
    context: int
    batch: int
    steps_around: int
    rounds_around: int
    steps: int
    inner_steps: int

    def model(self) -> ByteTransformer:
        """Return the model with the parameters of seed 0, on the device."""
        torch.manual_seed(0)
        return ByteTransformer(self.width, self.layers, self.heads, self.context).to(DEVICE)


LARGE = Setup(768, 17, 12, 512, 8, steps_around=100, rounds_around=4, steps=400, inner_steps=50)  # 121M parameters
SMALL = Setup(64, 2, 2, 64, 4, steps_around=40, rounds_around=2, steps=20, inner_steps=5)
SETUP = SMALL if IS_SMALL else LARGE


class Learner:
    """A model with its AdamW on the device, and a stream of batches.

    Args:
        seed: the seed of the batches.
        n_shares: the number of batches that a step uses.
    """

    def __init__(self, seed: int, n_shares: int = 1) -> None:
        self.model = SETUP.model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 3e-4, fused=DEVICE == "cuda")
        self._text = torch.cat(load_text().training).to(DEVICE)
        self._generator = torch.Generator().manual_seed(seed)
        self._count = SETUP.batch * n_shares

    def step(self) -> None:
        """Make one step. On a GPU it may still run when this returns."""
        starts = torch.randint(len(self._text) - SETUP.context, (self._count,), generator=self._generator).to(DEVICE)
        windows = self._text[starts[:, None] + torch.arange(SETUP.context + 1, device=DEVICE)].long()
        with torch.autocast("cuda", torch.bfloat16) if DEVICE == "cuda" else nullcontext():
            loss = self.model.loss(windows)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()


@torch.no_grad()
def held_out_loss(model: ByteTransformer) -> float:
    """Return the loss on 256 windows of the held-out text, in nats per byte."""
    text = load_text().held_out
    starts = torch.randint(len(text) - SETUP.context, (256,), generator=torch.Generator().manual_seed(1))
    windows = text[starts[:, None] + torch.arange(SETUP.context + 1)].long().to(DEVICE)
    return math.fsum(model.loss(part).item() for part in torch.split(windows, 16)) / 16


def synchronize() -> float:
    """Wait for the device, and return the time."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.monotonic()


# -- the parts ---------------------------------------------------------------------------------------------------------


def overlap() -> dict[str, Any]:
    """Compare the steps during a round in the background with as many steps after it, in turn."""
    learner = Learner(0)
    half = SETUP.steps_around // 2
    diloco = DiLoCo(
        learner.model,
        inner_steps=SETUP.steps_around,
        overlap_steps=half,
        total_steps=SETUP.steps_around * (SETUP.rounds_around + 2),
        store=MemoryStore(),
        run_id="overlap",
        rank=0,
        world_size=1,
        allow_no_rounds=True,
    )
    beside: list[float] = []
    without: list[float] = []
    with diloco:
        for step in range(SETUP.steps_around * (SETUP.rounds_around + 1)):
            if step % half == 0:
                began = synchronize()
            learner.step()
            diloco.step()
            if step % half == half - 1 and step >= SETUP.steps_around - 1:
                # The capture belongs to the last step of a period, and the merge to the step in its middle.
                (beside if step % SETUP.steps_around == half - 1 else without).append((synchronize() - began) / half)
    pairs = list(zip(beside, without, strict=False))
    return {
        "n_parameters": sum(p.numel() for p in learner.model.parameters()),
        "step_s_beside_a_round": median(one for one, _ in pairs),
        "step_s_without": median(other for _, other in pairs),
        "ratio": median(one / other for one, other in pairs),
    }


def train_a_replica() -> dict[str, Any]:
    """The entrypoint of a replica of the training."""
    replica = current_replica()
    learner = Learner(replica.rank)
    began = 0.0
    with DiLoCo(learner.model, inner_steps=SETUP.inner_steps, total_steps=SETUP.steps) as diloco:
        began = synchronize()
        for _ in diloco.steps():
            learner.step()
            diloco.step()
        seconds = synchronize() - began
        learner.model.load_state_dict(diloco.anchor(), strict=False)
    return {"loss": held_out_loss(learner.model), "seconds": seconds, "gpu_bytes": _peak_of_device()}


def training() -> dict[str, Any]:
    """Train four replicas on the one device, and one process on as many tokens."""
    n = 2 if IS_SMALL else 4
    run = launch(LocalProcessExecutor(), train_a_replica, n)
    run.wait(240)
    results = run.results()
    tokens = n * SETUP.steps * SETUP.batch * SETUP.context
    learner = Learner(0, n)
    began = synchronize()
    for _ in range(SETUP.steps):
        learner.step()
    seconds = synchronize() - began
    return {
        "replicas": n,
        "tokens": tokens,
        "results": results,
        "tokens_per_s": None if None in results else tokens / max(one["seconds"] for one in results),
        "together": {"loss": held_out_loss(learner.model), "seconds": seconds, "tokens_per_s": tokens / seconds},
    }


def _peak_of_device() -> int:
    return torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0


def train_with_marks(folder: str) -> None:
    """The entrypoint of the run with a kill: it notes when each part of a start has ended."""
    replica = current_replica()
    marks = {"imported": time.monotonic()}
    torch.zeros(1, device=DEVICE)
    marks["device"] = synchronize()
    learner = Learner(replica.rank)
    marks["built"] = synchronize()
    diloco = DiLoCo(learner.model, inner_steps=10, total_steps=None, snapshot_every=1)
    diloco.attach_state("optimizer", learner.optimizer)
    marks["loaded"] = synchronize()
    with diloco:
        while not Path(folder, "end").exists():
            learner.step()
            if "step" not in marks:
                marks["step"] = synchronize()
                part = Path(folder, f"{replica.rank}.{replica.attempt}.part")
                part.write_text(json.dumps(marks))
                part.rename(part.with_suffix(".json"))
            diloco.step()
            if diloco.rounds >= 3:
                Path(folder, f"{replica.rank}.{replica.attempt}.trained").write_text(str(os.getpid()))


def restart() -> dict[str, Any]:
    """Kill a replica, and split the time until its next optimizer step."""
    with tempfile.TemporaryDirectory() as folder:
        run = launch(LocalProcessExecutor(), train_with_marks, 2, args={"folder": folder}, restarts=3)
        try:
            _await(lambda: all(Path(folder, f"{rank}.0.trained").exists() for rank in (0, 1)), 120)
            killed = time.monotonic()
            os.kill(int(Path(folder, "1.0.trained").read_text()), signal.SIGKILL)
            _await(lambda: Path(folder, "1.1.json").exists(), 120)
            marks = json.loads(Path(folder, "1.1.json").read_text())
        finally:
            run.cancel()
            run.wait(60)
    names = ["imported", "device", "built", "loaded", "step"]
    before = dict(zip(names, ["killed", *names], strict=False))
    at = {"killed": killed, **marks}
    return {"whole_s": marks["step"] - killed, **{f"{name}_s": at[name] - at[before[name]] for name in names}}


def _await(condition: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{limit_s:g} s have passed.")
        time.sleep(0.01)


def parts() -> Iterator[Callable[[], dict[str, Any]]]:
    """Yield the parts, the shortest first, so that a limit of time ends the longest."""
    yield overlap
    yield restart
    yield training


def machine() -> dict[str, Any]:
    """Return the device and the versions."""
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else platform.processor() or platform.machine()
    return {"device": device, "torch": torch.__version__, "python": platform.python_version(), "small": IS_SMALL}


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure DiLoCo on one GPU.")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the file for the results")
    chosen = parser.parse_args()
    signal.alarm(LIMIT_S)
    found: dict[str, Any] = {"machine": machine()}
    code = 0
    for part in parts():
        began = time.monotonic()
        try:
            found[part.__name__] = {**part(), "part_s": time.monotonic() - began}
        except Exception:  # noqa: BLE001 - the other parts are measured, too
            traceback.print_exc()
            found[part.__name__] = {"error": traceback.format_exc()}
            code = 1
        print(part.__name__, json.dumps(found[part.__name__]), flush=True)
        chosen.out.write_text(json.dumps(found, indent=1) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
