"""Measures which outer settings suit short runs.

It makes docs/results/outer_settings.json and .md, and a table of docs/explanation/diloco-in-practice.md.

    python examples/measure_outer_settings.py --lines measured.jsonl --write docs/results/outer_settings.json
    python examples/measure_outer_settings.py --lines measured.jsonl --write … --no-more   # of the finished points
    python examples/measure_outer_settings.py --lines more.jsonl --finished docs/results/outer_settings.json --write …

One process plays all replicas of a run in its memory, with the outer optimizer and the schedule of `DiLoCo`. No time
goes into rounds, so the whole grid takes about 40 minutes of one core. Each finished run is one line of the file that
`--lines` names. An interrupted measurement continues at its last point. If you add a setting, the finished points are
measured with this setting only.

The held-out loss of each run is compared with two bounds of the same number of steps. The upper bound is one replica
that trains alone. The lower bound is one process that trains on the batches of all replicas, as data-parallel training
does.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from diloco import DiLoCo
from diloco.demo import ByteTransformer, load_text
from diloco.fragments import Fragment, plan_fragments
from diloco.in_processes import in_processes
from diloco.live_parameters import difference, set_live
from diloco.outer_optimizer import NesterovSGD
from diloco.settings import DiLoCoSettings

Tensors = dict[str, Tensor]
ALONE, DATA_PARALLEL = "one replica alone", "data-parallel"
PAPER = {"outer_momentum": 0.9}
"""Part of each setting that names no other momentum, because the default of `DiLoCo` depends on the plan's length.

If only the momentum is given, the learning rate is 0.7 in all plans.
"""
SETTINGS: dict[str, dict[str, Any]] = {
    "outer_lr=1.0, outer_momentum=0.5": {"outer_lr": 1.0, "outer_momentum": 0.5},
    "outer_lr=1.0, outer_momentum=0.8": {"outer_lr": 1.0, "outer_momentum": 0.8},
    "outer_momentum=0.8": {"outer_momentum": 0.8},
    "outer_momentum=0.9": PAPER,
    "plain averaging": {"outer_lr": 1.0, "outer_momentum": 0.0},
    "no ramp, no final average": {**PAPER, "momentum_warmup": 0, "final_average": False},
}
"""The outer settings that are compared, as arguments of `DiLoCo`.

The first is its default in rounds of fewer than 50 steps, and the second in rounds of at least 50. Longer runs have
another default.
"""
FOR_BATCH_NORM: dict[str, dict[str, Any]] = {
    "total_steps=None": {**PAPER, "total_steps": None},  # a ramp of 40 rounds, and no final average
    "sync_buffers=False": {**PAPER, "sync_buffers": False},
}
"""Compared for models with BatchNorm only, because their running statistics must fit the averaged parameters."""
GRIDS: dict[int, dict[int, Sequence[int]]] = {
    2: {5: (10, 20, 40, 60), 10: (10, 20, 40, 60), 50: (10, 20)},
    4: {10: (20,)},
}
"""Numbers of rounds, by number of replicas and inner steps per round."""
LONG_STEPS = 600
"""Runs of more steps come last."""
SIDE = 12
"""Height and width of an image, in pixels."""
CONTEXT = 24
"""Bytes of text that a model sees."""
N_IMAGES = 40_000
N_HELD_OUT = 2048


# -- data ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """Examples to train on, and examples to evaluate on."""

    draw: Callable[[int, int, int, torch.Generator], tuple[Tensor, Tensor]]
    """Returns inputs and targets of a share, for a rank, a number of replicas, a batch size and a generator."""
    held_out: tuple[Tensor, Tensor]


@cache
def text() -> Data:
    """Return the sources of Python's standard library, a share for each replica."""
    loaded = load_text()
    share = cache(loaded.share)
    window = torch.arange(CONTEXT + 1)

    def windows(of: Tensor, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(of) - CONTEXT, (batch, 1), generator=generator)
        drawn = of[starts + window].long()
        return drawn[:, :-1], drawn[:, 1:]

    def draw(rank: int, n: int, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return windows(share(rank, n), batch, generator)

    return Data(draw, windows(loaded.held_out, 384, torch.Generator().manual_seed(1)))


GLYPHS = bytes.fromhex(
    "3E5149453E00427F400042615149462141454B311814127F1027454545393C4A49493001710905033649494936"
    "064949291E7E1111117E7F494949363E414141227F4141221C7F494949417F090909013E4149497A7F0808087F"
    "00417F41002040413F017F081422417F404040407F020C027F7F0408107F3E4141413E7F090909063E4151215E"
    "7F09192946464949493101017F01013F4040403F1F2040201F3F4038403F631408146307087008076151494543"
)
"""Digits and capital letters: a byte for each of the 5 columns of 7 pixels, as on old character displays."""
N_CLASSES = 36


def render(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return images of glyphs that are turned, scaled, slanted and shifted, over a faint second glyph and noise."""
    columns = torch.tensor(list(GLYPHS)).view(N_CLASSES, 5)
    bits = (columns[:, None, :] >> torch.arange(7)[None, :, None]) & 1  # (36, 7, 5)
    glyphs = functional.pad(bits.float(), (4, 3, 3, 2))[:, None]  # (36, 1, 12, 12)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, generator=generator)

    def placed(labels: Tensor, shift: float) -> Tensor:
        angle, scale, slant = uniform(-0.25, 0.25), uniform(0.85, 1.15), uniform(-0.2, 0.2)
        cos, sin = torch.cos(angle) / scale, torch.sin(angle) / scale
        rows = [cos, slant - sin, uniform(-shift, shift), sin, cos, uniform(-shift, shift)]
        grid = functional.affine_grid(torch.stack(rows, 1).view(-1, 2, 3), [count, 1, SIDE, SIDE], align_corners=False)
        return functional.grid_sample(glyphs[labels], grid, align_corners=False)

    labels = torch.randint(N_CLASSES, (count,), generator=generator)
    others = torch.randint(N_CLASSES, (count,), generator=generator)
    contrast = uniform(0.7, 1.3)[:, None, None, None]
    noise = 0.25 * torch.randn(count, 1, SIDE, SIDE, generator=generator)
    return contrast * placed(labels, 0.17) + 0.2 * placed(others, 0.9) + noise - 0.25, labels


@cache
def images() -> Data:
    """Return rendered glyphs, a share for each replica."""
    inputs, labels = render(N_IMAGES, torch.Generator().manual_seed(2))

    def draw(rank: int, n: int, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(N_IMAGES // n, (batch,), generator=generator) * n + rank
        return inputs[chosen], labels[chosen]

    return Data(draw, render(N_HELD_OUT, torch.Generator().manual_seed(3)))


# -- models ----------------------------------------------------------------------------------------------------------


class ByteGRU(nn.Module):
    """Predicts the next byte, with one recurrent layer: the equations of `nn.GRU`, which `vmap` does not know."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(256, 3 * width)  # the input's part of the three gates
        self.recurrent = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, time) -> (batch, time, 256)
        gates = self.embedding(tokens)
        state, states = gates.new_zeros(len(tokens), self.width), []
        for of_input in gates.unbind(1):
            (reset, update, new), of_state = of_input.chunk(3, -1), self.recurrent(state).chunk(3, -1)
            new = torch.tanh(new + torch.sigmoid(reset + of_state[0]) * of_state[2])
            state = new + torch.sigmoid(update + of_state[1]) * (state - new)
            states.append(state)
        logits: Tensor = self.head(torch.stack(states, 1))
        return logits


def convolutional(norm: Callable[[int], nn.Module]) -> nn.Module:
    """Return a network of three convolutions, each with its norm."""
    layers: list[nn.Module] = []
    for inside, outside in ((1, 8), (8, 16), (16, 32)):
        layers += [nn.Conv2d(inside, outside, 3, padding=1, bias=False), norm(outside), nn.ReLU(), nn.MaxPool2d(2)]
    layers[-1] = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, N_CLASSES))


def adamw(parameters: Iterable[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, rate, fused=True)


def sgd(parameters: Iterable[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, rate, momentum=0.9, weight_decay=5e-4, fused=True)


@dataclass(frozen=True)
class Task:
    """A model, its data, and the settings of one replica's training."""

    model: Callable[[], nn.Module]
    data: Callable[[], Data]
    optimizer: Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]
    rate: float
    """The highest inner learning rate."""
    batch: int
    """Examples in each step of a replica."""


TASKS: dict[str, Task] = {
    "transformer": Task(partial(ByteTransformer, 32, 1, 2, CONTEXT), text, adamw, 1e-2, 8),
    "GRU": Task(ByteGRU, text, adamw, 1e-2, 8),
    "ConvNet, BatchNorm, SGD": Task(partial(convolutional, nn.BatchNorm2d), images, sgd, 0.1, 16),
    "ConvNet, BatchNorm, AdamW": Task(partial(convolutional, nn.BatchNorm2d), images, adamw, 1e-2, 16),
    "ConvNet, GroupNorm, AdamW": Task(partial(convolutional, partial(nn.GroupNorm, 4)), images, adamw, 1e-2, 16),
}


class Inner:
    """The inner steps of many models at once: a warm-up, and a cosine down to a tenth of the learning rate.

    The models are stacked, so that one operation serves all of them: they are too small to keep a processor busy one
    by one. The stack is the memory of the models. A change of a model is a change of the stack.
    """

    def __init__(self, task: Task, models: Sequence[nn.Module], *, steps: int) -> None:
        self._task, self._steps = task, steps
        self._shape = deepcopy(models[0]).to("meta")
        self._parameters, self._buffers = stack_module_state(list(models))
        for index, model in enumerate(models):
            for name, parameter in model.named_parameters():
                parameter.data = self._parameters[name].data[index]
            for name, buffer in model.named_buffers():
                buffer.data = self._buffers[name][index]
        self._optimizer = task.optimizer(self._parameters.values(), task.rate)

    def step(self, step: int, batches: Sequence[tuple[Tensor, Tensor]], joined: slice = slice(0)) -> None:
        """Take one step of each model.

        Args:
            step: its number, counted from 0.
            batches: inputs and targets of each model.
            joined: the models that average their gradients, as in data-parallel training. Default: none.
        """
        warm_up = max(1, min(40, self._steps // 5))
        decay = 0.55 + 0.45 * math.cos(math.pi * step / self._steps)
        for group in self._optimizer.param_groups:
            group["lr"] = self._task.rate * min(1.0, (step + 1) / warm_up) * decay
        inputs, targets = (torch.stack(part) for part in zip(*batches, strict=True))
        with sdpa_kernel(SDPBackend.MATH):  # with the other kernels, `vmap` computes one model after the other
            losses = vmap(self._loss)(self._parameters, self._buffers, inputs, targets)
            losses.sum().backward()  # type: ignore[no-untyped-call]
        for parameter in self._parameters.values():
            assert parameter.grad is not None
            if len(gradients := parameter.grad[joined]):
                gradients[:] = gradients.mean(0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _loss(self, parameters: Tensors, buffers: Tensors, inputs: Tensor, targets: Tensor) -> Tensor:
        return loss_of(functional_call(self._shape, (parameters, buffers), (inputs,)), targets)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


@torch.no_grad()
def evaluate(model: nn.Module, data: Data) -> float:
    """Return the mean loss over the held-out examples, with running statistics if the model has some."""
    model.eval()
    inputs, targets = data.held_out
    loss = loss_of(model(inputs), targets).item()
    model.train()
    return loss


def has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(module, _BatchNorm) and module.track_running_stats for module in model.modules())


@torch.no_grad()
def with_new_statistics(model: nn.Module, task: Task) -> nn.Module:
    """Return a copy of a model whose running statistics are those of 1024 examples of the training data."""
    renewed = deepcopy(model).train()
    for module in renewed.modules():
        if isinstance(module, _BatchNorm):
            module.momentum = 1.0  # the statistics of one large batch replace the old ones
    renewed(task.data().draw(0, 1, 1024, torch.Generator().manual_seed(4))[0])
    return renewed


# -- training together -------------------------------------------------------------------------------------------------


def settings_of(given: Mapping[str, Any], *, inner_steps: int, rounds: int, n: int) -> DiLoCoSettings:
    """Return the checked settings that `DiLoCo` has with these arguments, its own defaults included."""
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(DiLoCo.__init__).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    planned = {"inner_steps": inner_steps, "total_steps": inner_steps * rounds}
    settings = DiLoCoSettings.of({**defaults, **planned, **given}, n_fragments=1, world_size=n, rank=0)
    settings.check()
    return settings


class Together:
    """Replicas that average in memory: the arithmetic of `DiLoCo` for one fragment over wire="fp32"."""

    def __init__(
        self, models: Sequence[nn.Module], settings: DiLoCoSettings, *, sync_buffers: bool | None = None
    ) -> None:
        self._models = models
        (self._fragment,) = plan_fragments(models[0], 1, sync_buffers=sync_buffers)
        state = models[0].state_dict()
        self.anchor = torch.cat([state[slot.name].detach().reshape(-1).float() for slot in self._fragment.slots])
        self._outer = NesterovSGD(self._fragment, self.anchor, settings.schedule)
        for model in models:
            set_live(model, self._fragment, self.anchor)

    @property
    def fragment(self) -> Fragment:
        """The place of each tensor in the anchor."""
        return self._fragment

    @torch.no_grad()
    def round(self, entry: int) -> None:
        """Average the pseudo-gradients of all replicas, step the anchor, and copy it to all of them."""
        weight, delta, mean = np.float32(1 / len(self._models)), torch.empty_like(self.anchor), None
        for model in self._models:
            difference(model, self._fragment, self.anchor, delta)
            # Each product and each sum is rounded separately, in the order of the ranks, as in `DiLoCo`.
            product = delta.numpy() * weight
            mean = product if mean is None else mean + product
        assert mean is not None
        self._outer.step(entry, iter([(0, mean)]))
        for model in self._models:
            set_live(model, self._fragment, self.anchor)


@dataclass(frozen=True, kw_only=True)
class Point:
    """A point of the grid: trainings that differ in their outer settings only."""

    task: str
    n: int
    inner_steps: int
    rounds: int
    seed: int

    @property
    def steps(self) -> int:
        return self.inner_steps * self.rounds


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A point of the grid, and the result of each setting."""

    point: Point
    losses: dict[str, float]
    """Held-out losses in nats, by setting."""
    with_new_statistics: dict[str, float]
    """Held-out losses with new running statistics of each BatchNorm; empty if the model has none."""
    seconds: float

    def line(self) -> str:
        named = asdict(self)
        return json.dumps({**named.pop("point"), **named})

    @classmethod
    def of(cls, line: str) -> Measured:
        named = json.loads(line)
        point = Point(**{name: named.pop(name) for name in Point.__dataclass_fields__})
        return cls(point=point, **named)


def settings_for(task: Task) -> dict[str, dict[str, Any]]:
    """Return the settings to compare for a task, by name."""
    return {**SETTINGS, **(FOR_BATCH_NORM if has_batch_norm(task.model()) else {})}


@dataclass(frozen=True)
class Work:
    """A point, and what to train for it.

    Attributes:
        point: the point.
        names: names of settings, `ALONE` and `DATA_PARALLEL`.
    """

    point: Point
    names: tuple[str, ...]


def measure(work: Work) -> Measured:
    """Train with settings on the same batches, and return the held-out losses at the end."""
    torch.set_num_threads(1)
    point = work.point
    began, task, n = time.monotonic(), TASKS[point.task], point.n
    chosen = {name: given for name, given in settings_for(task).items() if name in work.names}
    torch.manual_seed(point.seed)
    first = task.model()
    models = {
        name: [deepcopy(first) for _ in range(1 if name == ALONE else n)]
        for name in (DATA_PARALLEL, *chosen, ALONE)
        if name in work.names
    }
    ranks = [rank for each in models.values() for rank in range(len(each))]
    joined = slice(len(models.get(DATA_PARALLEL, ())))  # the first of all models
    inner = Inner(task, [model for each in models.values() for model in each], steps=point.steps)
    groups = []
    for name, given in chosen.items():
        settings = settings_of(given, inner_steps=point.inner_steps, rounds=point.rounds, n=n)
        groups.append(Together(models[name], settings, sync_buffers=given.get("sync_buffers")))
    generators = [torch.Generator().manual_seed(1000 * point.seed + rank) for rank in range(n)]
    for step in range(point.steps):
        drawn = [task.data().draw(rank, n, task.batch, generators[rank]) for rank in range(n)]
        inner.step(step, [drawn[rank] for rank in ranks], joined=joined)
        if (step + 1) % point.inner_steps == 0:
            for group in groups:
                group.round(step // point.inner_steps)
    ends = {name: each[0] for name, each in models.items()}
    renewed = {}
    if has_batch_norm(first):
        renewed = {name: evaluate(with_new_statistics(end, task), task.data()) for name, end in ends.items()}
    losses = {name: evaluate(end, task.data()) for name, end in ends.items()}
    seconds = round(time.monotonic() - began, 1)
    return Measured(point=point, losses=losses, with_new_statistics=renewed, seconds=seconds)


def grid(seeds: int, tasks: Sequence[str]) -> list[Point]:
    """Return the points of the grid. The longest runs are last; the others are ordered by seed, with short runs
    first."""
    points = [
        Point(task=task, n=n, inner_steps=inner_steps, rounds=rounds, seed=seed)
        for n, by_inner_steps in GRIDS.items()
        for inner_steps, all_rounds in by_inner_steps.items()
        for rounds in all_rounds
        for seed in range(seeds)
        for task in tasks
    ]
    return sorted(points, key=lambda point: (max(point.steps, LONG_STEPS), point.n, point.seed, point.steps))


def left(points: Iterable[Point], finished: Iterable[Measured]) -> list[Work]:
    """Return what is not finished of points: also the settings that were added after a point was measured."""
    losses = {one.point: one.losses for one in finished}
    work = []
    for point in points:
        names = [ALONE, DATA_PARALLEL, *settings_for(TASKS[point.task])]
        if missing := tuple(name for name in names if name not in losses.get(point, {})):
            work.append(Work(point, missing))
    return work


def merged(measured: Iterable[Measured]) -> list[Measured]:
    """Return one record for each point, with the losses of all its records."""
    of_point: dict[Point, Measured] = {}
    for one in measured:
        if (other := of_point.get(one.point)) is not None:
            one = Measured(
                point=one.point,
                losses={**other.losses, **one.losses},
                with_new_statistics={**other.with_new_statistics, **one.with_new_statistics},
                seconds=round(other.seconds + one.seconds, 1),
            )
        of_point[one.point] = one
    return [*of_point.values()]


def read_lines(path: Path) -> list[Measured]:
    """Return the finished points of a file of lines. An incomplete last line is skipped."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return merged(Measured.of(line) for line in lines if line.endswith("\n"))


def begin_line(path: Path) -> None:
    """Remove an incomplete last line, so that the next record begins on a new line."""
    written = path.read_text() if path.exists() else ""
    path.write_text(written[: written.rfind("\n") + 1])


def read_results(path: Path) -> list[Measured]:
    """Return the points of a file that `write_results` wrote."""
    return [Measured.of(json.dumps(point)) for point in json.loads(path.read_text())["points"]]


def write_results(path: Path, measured: Iterable[Measured]) -> None:
    """Write all points and the conditions of the measurement, one line for each point, in the order of the grid."""
    ordered = sorted(measured, key=lambda one: tuple(asdict(one.point).values()))
    about = {
        "about": "Held-out losses (nats) of short runs from a random start, by outer settings. Lower is better.",
        "command": f"python examples/{Path(__file__).name} --lines measured.jsonl --write docs/results/{path.name}",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "machine": platform.machine(),
        },
        "settings": {**SETTINGS, **FOR_BATCH_NORM},
        "tasks": {
            name: {
                "parameters": sum(p.numel() for p in task.model().parameters()),
                "inner_optimizer": task.optimizer.__name__,
                "inner_lr": task.rate,
                "batch": task.batch,
                "data": task.data.__name__,
            }
            for name, task in TASKS.items()
        },
        "text": f"bytes of the sources of Python's standard library, {CONTEXT} in a row",
        "images": f"{N_IMAGES} rendered digits and capital letters of {SIDE} x {SIDE} pixels with noise",
        "inner_schedule": "warm-up over min(40, steps / 5) steps, then a cosine to a tenth",
        "seconds": "wall time of a point on a machine that was busy with other work",
        "with_new_statistics": "the loss after the running statistics were computed again from 1024 training examples",
    }
    head = json.dumps(about, indent=1).removesuffix("\n}")
    points = ",\n".join(f"  {one.line()}" for one in ordered)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head},\n "points": [\n{points}\n ]\n}}\n')


def above_alone(measured: Sequence[Measured], setting: str, *, renewed: bool = False) -> list[float]:
    """Return for each point by how many percent the loss of a setting is above the loss of one replica alone.

    Args:
        measured: the points. Points without this setting are skipped.
        setting: its name.
        renewed: whether to take the loss after the running statistics were computed again.
    """
    losses = [(one.with_new_statistics if renewed else one.losses, one.losses[ALONE]) for one in measured]
    return [100 * (of_point[setting] / alone - 1) for of_point, alone in losses if setting in of_point]


def summary(measured: Sequence[Measured]) -> list[str]:
    """Return the lines of a short table: by setting and inner steps, the mean and the range over all models."""
    of_two = [one for one in measured if one.point.n == 2]
    lengths = sorted({one.point.inner_steps for one in of_two})
    lines = ["| | " + " | ".join(f"`inner_steps={length}`" for length in lengths) + " |"]
    lines.append("|---" * (len(lengths) + 1) + "|")
    for name in (*SETTINGS, DATA_PARALLEL):
        cells = []
        for length in lengths:
            above = above_alone([one for one in of_two if one.point.inner_steps == length], name)
            cells.append(f"{fmean(above):+.1f} % ({min(above):+.0f} … {max(above):+.0f})")
        shown = f"`{name}`" if "=" in name else name
        lines.append(f"| {shown} | " + " | ".join(cells) + " |")
    return lines


def table(measured: Sequence[Measured]) -> list[str]:
    """Return the lines of the whole table: means over the seeds for each model and plan."""
    names = [DATA_PARALLEL, *SETTINGS, *FOR_BATCH_NORM]
    head = ["model", "replicas", "inner_steps", "rounds", "seeds", "alone", *names]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    plans: dict[tuple[str, int, int, int], list[Measured]] = {}
    for one in sorted(measured, key=lambda one: tuple(asdict(one.point).values())):
        point = one.point
        plans.setdefault((point.task, point.n, point.inner_steps, point.rounds), []).append(one)
    for plan, points in plans.items():
        cells = [str(value) for value in (*plan, len(points))]
        cells.append(f"{fmean(one.losses[ALONE] for one in points):.3f}")
        for name in names:
            above = [f"{fmean(values):+.1f}" for values in both_above(points, name) if values]
            cells.append(" / ".join(above))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def both_above(measured: Sequence[Measured], setting: str) -> tuple[list[float], list[float]]:
    """Return the percentages of `above_alone` as trained, and with new running statistics."""
    return above_alone(measured, setting), above_alone(measured, setting, renewed=True)


def page(measured: Sequence[Measured], results: str) -> str:
    """Return the page that shows the results.

    Args:
        measured: all points.
        results: the name of the file with the numbers.
    """
    return "\n".join(
        [
            "# Outer settings in short runs",
            "",
            f"`python examples/{Path(__file__).name}` makes this page. The file [{results}]({results}) has all losses",
            "and the method of measurement. A number shows by how many percent the held-out loss is above the loss of",
            "one replica that trains alone for the same steps. Negative is better. Runs start from random parameters.",
            "",
            "## Two replicas, all models: mean and range",
            "",
            *summary(measured),
            "",
            "## Each model and plan: mean of the seeds",
            "",
            "A number behind a slash is the loss after the running statistics of each BatchNorm were computed again.",
            "",
            *table(measured),
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compare outer settings by the loss that short runs end with.")
    parser.add_argument("--lines", type=Path, required=True, metavar="FILE", help="finished runs, one JSON line each")
    parser.add_argument("--finished", type=Path, metavar="FILE", help="a file of --write, whose runs are not repeated")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write all results there, with how they were made")
    parser.add_argument("--no-more", action="store_true", help="measure nothing, and write what is finished")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="seeds 0 to N - 1; 3")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS), help="all")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="1")
    chosen = parser.parse_args(arguments)
    finished = [] if chosen.finished is None else read_results(chosen.finished)
    done = merged([*finished, *read_lines(chosen.lines)])
    work = [] if chosen.no_more else left(grid(chosen.seeds, chosen.tasks), done)
    print(f"{len(done)} points were measured before. {len(work)} have something left.", file=sys.stderr, flush=True)
    if work:
        begin_line(chosen.lines)
    with chosen.lines.open("a") as lines:
        for measured in in_processes(measure, work, chosen.processes):
            lines.write(measured.line() + "\n")
            lines.flush()
    if chosen.write is not None:
        write_results(chosen.write, merged([*finished, *read_lines(chosen.lines)]))
        chosen.write.with_suffix(".md").write_text(page(read_results(chosen.write), chosen.write.name))


if __name__ == "__main__":
    main()
