"""The task of the process in the benchmark of the outer step: measure its time or its memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from xxhash import xxh3_128

from diloco import DiLoCo
from diloco.fragments import Fragment, plan_fragments
from diloco.outer_optimizer import NesterovSGD, Schedule
from diloco.wires import FP32
from diloco.wires.wire import BLOCK_ELEMENTS, Floats, decoded

SCHEDULE = Schedule(lr=0.7, momentum=0.9, warmup=0, n_fragments=1)
ENTRY = 1


def gpt(width: int, layers: int, vocabulary: int) -> nn.Module:
    """Return parameters with the shapes of GPT-2: 12 tensors per layer and 4 more."""
    model = nn.Module()
    shapes: list[tuple[int, ...]] = [(vocabulary, width), (1024, width)]
    for _ in range(layers):
        shapes += [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
        shapes += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    shapes += [(width,), (width,)]
    model.tensors = nn.ParameterList([nn.Parameter(torch.full(shape, 0.1)) for shape in shapes])
    return model


def time_step(width: int, layers: int, vocabulary: int, repetitions: int) -> dict[str, list[float]]:
    """Measure one outer step by several methods in turn, on one thread. The first round is not counted."""
    torch.set_num_threads(1)
    model = gpt(width, layers, vocabulary)
    parameters = list(model.parameters())
    (fragment,) = plan_fragments(model, 1, sync_buffers=False)
    anchor, mean = (torch.full((fragment.n_elements,), value) for value in (0.1, 1e-3))
    ours = NesterovSGD(fragment, anchor, SCHEDULE)
    for parameter, slot in zip(parameters, fragment.slots, strict=True):
        parameter.grad = mean[slot.start : slot.end].view(slot.shape)
    theirs = torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True, foreach=True)
    momentum = torch.zeros_like(anchor)
    methods: dict[str, Callable[[], object]] = {
        "floor": lambda: _stream(anchor, momentum, mean),
        "ours": lambda: ours.step(ENTRY, pieces_of(mean)),
        "sgd": theirs.step,
        "sgd_and_digest": lambda: _step_and_digest(theirs, parameters),
    }
    samples: dict[str, list[float]] = {name: [] for name in methods}
    with torch.no_grad():
        for _ in range(repetitions + 1):
            for name, act in methods.items():
                began = time.perf_counter()
                act()
                samples[name].append(time.perf_counter() - began)
    return {name: taken[1:] for name, taken in samples.items()}


def _step_and_digest(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> str:
    """Step the parameters, and return a digest of them and of their momentum."""
    optimizer.step()
    digest = xxh3_128()
    for tensors in (parameters, [optimizer.state[parameter]["momentum_buffer"] for parameter in parameters]):
        for tensor in tensors:
            digest.update(tensor.detach().numpy().data.cast("B"))
    return digest.hexdigest()


def pieces_of(mean: Tensor) -> Iterator[tuple[int, Floats]]:
    return decoded(FP32, [mean.numpy().data.cast("B")], mean.numel(), BLOCK_ELEMENTS)


def _stream(anchor: Tensor, momentum: Tensor, mean: Tensor) -> None:
    """Read and write the memory that a step needs, once, in the fastest way: two buffers are written, a third is
    read.
    """
    anchor.mul_(1.0)
    momentum.mul_(1.0)
    mean.sum()


def memory_of_step(width: int, layers: int, vocabulary: int, how: str) -> dict[str, float]:
    """Return the memory of the outer optimizer without model and mean, as a multiple of the model."""
    torch.set_num_threads(1)
    model = gpt(width, layers, vocabulary)
    (fragment,) = plan_fragments(model, 1, sync_buffers=False)
    mean = torch.full((fragment.n_elements,), 1e-3)
    with Watch(4 * fragment.n_elements) as watch, torch.no_grad():
        act = _ours(fragment, mean) if how == "ours" else _sgd(model, fragment, mean)
        for _ in range(3):
            act()
    return watch.found


def _ours(fragment: Fragment, mean: Tensor) -> Callable[[], object]:
    optimizer = NesterovSGD(fragment, torch.full((fragment.n_elements,), 0.1), SCHEDULE)
    return lambda: optimizer.step(ENTRY, pieces_of(mean))


def _sgd(model: nn.Module, fragment: Fragment, mean: Tensor) -> Callable[[], object]:
    """Return the usual method: a copy of the parameters as the anchor, and torch's optimizer over it."""
    anchors = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    for parameter, slot in zip(anchors, fragment.slots, strict=True):
        parameter.grad = mean[slot.start : slot.end].view(slot.shape)
    return torch.optim.SGD(anchors, lr=0.7, momentum=0.9, nesterov=True, foreach=True).step


def memory_of_replica(
    width: int, layers: int, vocabulary: int, fragments: int, settings: dict[str, Any] | None = None
) -> dict[str, float]:
    """Return the memory of DiLoCo without the model, as a multiple of the model. Mapped files are not counted.

    Args:
        settings: the arguments of DiLoCo. With `overlap_steps`, rounds run in the background.
    """
    torch.set_num_threads(1)
    model = gpt(width, layers, vocabulary)
    size = sum(parameter.numel() for parameter in model.parameters())
    groups: list[list[str]] = [[] for _ in range(fragments)]
    sizes = [0] * fragments
    for name, tensor in sorted(model.named_parameters(), key=lambda named: -named[1].numel()):
        part = sizes.index(min(sizes))
        groups[part].append(name)
        sizes[part] += tensor.numel()
    with Watch(4 * size) as watch:
        diloco = DiLoCo(model, inner_steps=2 * fragments, fragments=groups, sync_buffers=False, **(settings or {}))
        watch.forget_peak()  # the replicas have agreed on the first anchor
        for _ in range(4 * fragments):
            diloco.step()
    diloco.close()
    return watch.found


class Watch:
    """The anonymous memory of this process during a block: the peak and the end, less the start, as multiples of the
    model.

    `start_peak` is the peak before `forget_peak`.
    """

    def __init__(self, model_bytes: int) -> None:
        self.found: dict[str, float] = {}
        self._model_bytes = model_bytes

    def __enter__(self) -> Watch:
        self._before = self._peak = _anonymous_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def forget_peak(self) -> None:
        self.found["start_peak"] = self._models(self._peak)
        self._peak = _anonymous_bytes()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self.found |= {"peak": self._models(self._peak), "steady": self._models(_anonymous_bytes())}

    def _look(self) -> None:
        while not self._over.wait(0.002):
            self._peak = max(self._peak, _anonymous_bytes())

    def _models(self, size: int) -> float:
        return (size - self._before) / self._model_bytes


def _anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:")) << 10
