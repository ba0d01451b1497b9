"""The model that is measured on a GPU, and the entrypoints of the replicas that train it.

No statement at the top of this file uses the GPU. Replicas are forked from a process that may have imported this file,
and CUDA does not work in a forked process whose parent has used it.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from diloco import DiLoCo
from diloco.demo import ByteTransformer, Text, load_text
from executors import current_replica, restartable
from executors.store.file import FileStore

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
        inner_steps: steps from one round of the training to the next.
        round_s: the seconds for which a round of the overlap is given time before its merge.
        train_s: the seconds that the replicas should train.
        longest_train_s: the seconds after which the replicas stop training, at the end of a round.
    """

    width: int
    layers: int
    heads: int
    context: int
    batch: int
    inner_steps: int
    round_s: float
    train_s: float
    longest_train_s: float

    def model(self) -> ByteTransformer:
        """Return the model with the parameters of seed 0, on the device."""
        torch.manual_seed(0)
        return ByteTransformer(self.width, self.layers, self.heads, self.context).to(DEVICE)


LARGE = Setup(768, 17, 12, 512, 8, inner_steps=100, round_s=3.0, train_s=60.0, longest_train_s=75.0)  # 121M parameters
SMALL = Setup(64, 2, 2, 64, 4, inner_steps=5, round_s=0.1, train_s=0.2, longest_train_s=60.0)
SETUP = SMALL if IS_SMALL else LARGE


@cache
def text() -> Text:
    """Return the text, which is read once in each process."""
    return load_text()


class Learner:
    """A model with its AdamW on the device, and a stream of batches.

    Args:
        seed: the seed of the batches.
        n_shares: the number of batches that a step uses. Default 1.
    """

    def __init__(self, seed: int, n_shares: int = 1) -> None:
        self.model = SETUP.model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 3e-4, fused=DEVICE == "cuda")
        self._text = torch.cat(text().training).to(DEVICE)
        # The batches are drawn on the device. A copy from ordinary memory would make each step wait for the last one.
        self._generator = torch.Generator(DEVICE).manual_seed(seed)
        self._offsets = torch.arange(SETUP.context + 1, device=DEVICE)
        self._count = SETUP.batch * n_shares

    def compute_gradients(self) -> None:
        """Compute the gradients of one batch. On a GPU the work may still run when this returns."""
        last = len(self._text) - SETUP.context
        starts = torch.randint(last, (self._count,), generator=self._generator, device=DEVICE)
        windows = self._text[starts[:, None] + self._offsets].long()
        with torch.autocast("cuda", torch.bfloat16) if DEVICE == "cuda" else nullcontext():
            loss = self.model.loss(windows)
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """Make one step. On a GPU it may still run when this returns."""
        self.compute_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def warm_up(self) -> None:
        """Load the kernels, without a change of the parameters. The first use of a kernel takes long."""
        for _ in range(3):
            self.compute_gradients()
            self.optimizer.zero_grad()
        synchronize()

    def seconds_per_step(self, n_steps: int = 20) -> float:
        """Make steps, and return the seconds of each.

        Args:
            n_steps: the number of steps that are measured. Default 20.
        """
        for _ in range(5):
            self.step()
        began = synchronize()
        for _ in range(n_steps):
            self.step()
        return (synchronize() - began) / n_steps


@torch.no_grad()
def held_out_loss(model: ByteTransformer) -> float:
    """Return the loss on 256 windows of the held-out text, in nats per byte.

    Args:
        model: the model.
    """
    held_out = text().held_out
    starts = torch.randint(len(held_out) - SETUP.context, (256,), generator=torch.Generator().manual_seed(1))
    windows = held_out[starts[:, None] + torch.arange(SETUP.context + 1)].long().to(DEVICE)
    return math.fsum(model.loss(part).item() for part in torch.split(windows, 16)) / 16


def synchronize() -> float:
    """Wait for the device, and return the time of the clock `time.monotonic`, which all processes share."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.monotonic()


def memory() -> dict[str, int]:
    """Return the memory of this process in bytes: the peak and the current parts on the host, and the peak on the GPU.

    Files that are mapped, such as objects of a directory that is the store, count as `host_file`.
    """
    unit = 1 if sys.platform == "darwin" else 1024
    found = {"host_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        name, _, value = line.partition(":")
        if name in ("RssAnon", "RssFile", "RssShmem"):
            found[f"host_{name.removeprefix('Rss').lower()}"] = int(value.split()[0]) * 1024
    if DEVICE == "cuda":
        found["gpu_peak_allocated"] = torch.cuda.max_memory_allocated()
        found["gpu_peak_reserved"] = torch.cuda.max_memory_reserved()
    return found


class ReadTimer:
    """Measures the time during which at least one read of a directory that is the store runs."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self._spans: list[tuple[float, float]] = []

    def install(self) -> None:
        """Measure all reads of this process from now on."""
        get, get_at_most = FileStore.get, FileStore.get_at_most

        def timed(self_: FileStore, key: str, *, start: int = 0, size: int | None = None) -> memoryview:
            return self._add(time.monotonic(), get(self_, key, start=start, size=size))

        def timed_at_most(self_: FileStore, key: str, max_bytes: int) -> memoryview:
            return self._add(time.monotonic(), get_at_most(self_, key, max_bytes))

        FileStore.get, FileStore.get_at_most = timed, timed_at_most  # type: ignore[assignment, method-assign]

    def _add(self, began: float, data: memoryview) -> memoryview:
        self._spans.append((began, time.monotonic()))
        self.n_bytes += data.nbytes
        return data

    @property
    def seconds(self) -> float:
        """The seconds so far. Reads at the same time count once."""
        total, until = 0.0, 0.0
        for began, ended in sorted(self._spans):
            total += max(0.0, ended - max(began, until))
            until = max(until, ended)
        return total


# -- entrypoints -------------------------------------------------------------------------------------------------------


def train(steps: int) -> dict[str, Any]:
    """The entrypoint of a replica of the training.

    Args:
        steps: inner steps of each replica.
    """
    replica = current_replica()
    learner = Learner(replica.rank)
    reports = []
    n_steps = 0
    with DiLoCo(learner.model, inner_steps=SETUP.inner_steps, total_steps=steps) as diloco:
        learner.warm_up()
        began = synchronize()
        for _ in diloco.steps():
            learner.step()
            n_steps += 1
            if (report := diloco.step()) is not None:
                reports.append(report)
                if time.monotonic() - began > SETUP.longest_train_s:
                    diloco.stop()
        seconds = synchronize() - began
        learner.model.load_state_dict(diloco.anchor(), strict=False)
    sums = ("train_s", "late_s", "busy_s", "wait_s", "move_s", "reduce_s", "step_s", "bytes_up", "bytes_down")
    return {
        "loss": held_out_loss(learner.model),
        "seconds": seconds,
        "steps": n_steps,
        "rounds": len(reports),
        "counted": sum(report.counted for report in reports),
        "sums_of_rounds": {name: sum(getattr(report, name) or 0 for report in reports) for name in sums},
        "memory": memory(),
    }


@restartable()
def train_with_marks(folder: str) -> None:
    """The entrypoint of the run with a kill and an error: it notes when each part of a start has ended.

    Args:
        folder: the folder for the notes. The file `end` ends the run, and the file `0.0.raise` ends the first attempt
            of rank 0 with an error.
    """
    replica = current_replica()
    me = f"{replica.rank}.{replica.attempt}"
    marks: dict[str, float] = {"called": time.monotonic()}
    torch.zeros(1, device=DEVICE)
    marks["device"] = synchronize()
    text()
    marks["text"] = synchronize()
    learner = Learner(replica.rank)
    marks["built"] = synchronize()
    timer = ReadTimer()
    timer.install()
    diloco = DiLoCo(learner.model, inner_steps=10, total_steps=None, snapshot_every=1)
    marks["anchor"] = synchronize()
    reads = {"read_anchor_s": timer.seconds}
    diloco.attach_state("optimizer", learner.optimizer)
    marks["optimizer"] = synchronize()
    reads |= {"read_s": timer.seconds, "read_bytes": timer.n_bytes}
    is_trained = False
    with diloco:
        while not Path(folder, "end").exists():
            learner.step()
            if "step" not in marks:
                marks["step"] = synchronize()
                write_once(Path(folder, f"{me}.json"), json.dumps({"marks": marks, "reads": reads}))
            diloco.step()
            if diloco.rounds >= 3 and not is_trained:
                is_trained = True
                write_once(Path(folder, f"{me}.trained"), str(os.getpid()))
            if is_trained and Path(folder, f"{me}.raise").exists():
                write_once(Path(folder, f"{me}.raised"), str(synchronize()))
                raise RuntimeError("This error is a part of the measurement.")


def write_once(file: Path, text: str) -> None:
    """Create a file with its whole text, so that a reader never sees a part of it.

    Args:
        file: the file.
        text: the text.
    """
    part = file.with_name(f"{file.name}.part")
    part.write_text(text)
    part.replace(file)
