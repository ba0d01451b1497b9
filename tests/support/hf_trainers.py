"""A Trainer of transformers with DiLoCo, and callbacks that watch it.

An error in the middle of training stands for a kill: it leaves the same objects in the store.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from diloco.outer import DiLoCo
from executors.replica import current_replica
from support.training import place

transformers = pytest.importorskip("transformers", reason="pip install 'serverless-replicas[hf-trainer]'")
from diloco.trainers.hf import DiLoCoCallback  # noqa: E402

WARNINGS = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata is a package of the torch project
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true"),
]
N_ITEMS, STEPS, INNER = 26, 24, 4
NONE: Mapping[str, Any] = MappingProxyType({})


class Killed(Exception):
    pass


class Model(nn.Module):
    """A model that records the items on which it is trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 1)
        self.drop = nn.Dropout(0.1)
        self.seen: list[int] = []

    def forward(self, at: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.seen += at.tolist()
        x = torch.stack([torch.sin(at + k) for k in range(3)], 1)
        return {"loss": (self.linear(x).squeeze(1) - labels).square().mean(), "logits": labels}


ITEMS = [{"at": float(at), "labels": at / N_ITEMS} for at in range(N_ITEMS)]


class Stream(torch.utils.data.IterableDataset[dict[str, float]]):
    def __iter__(self) -> Iterator[dict[str, float]]:
        return iter(ITEMS)


class Watch(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Watches the training, and ends it at a step as a kill would."""

    def __init__(self, ours: Any, dies_at: int | None = None, notice_at: int | None = None) -> None:
        self.ours = ours
        self.dies_at = dies_at
        self.notice_at = notice_at
        self.rates: dict[int, float] = {}
        self.evaluated: list[int] = []
        self.saved: list[Path] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **with_: Any) -> None:
        self.rates[state.global_step] = with_["optimizer"].param_groups[0]["lr"]
        if state.global_step == self.notice_at:
            page = current_replica().page
            assert page is not None
            page.announce(time.monotonic() + 25, 15)

    def on_step_end(self, args: Any, state: Any, control: Any, **with_: Any) -> None:
        assert all(parameter.grad is None or not parameter.grad.any() for parameter in with_["model"].parameters())
        if state.global_step == self.dies_at:
            self.ours.diloco._workers.uploads.finish()
            self.ours.diloco._close(in_order=False)
            raise Killed

    def on_evaluate(self, args: Any, state: Any, control: Any, **with_: Any) -> None:
        if is_anchor(with_["model"], self.ours.diloco):
            self.evaluated.append(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **with_: Any) -> None:
        self.saved.append(Path(args.output_dir) / f"checkpoint-{state.global_step}")


def is_anchor(model: nn.Module, diloco: DiLoCo) -> bool:
    return all(torch.equal(model.get_parameter(name), values) for name, values in diloco.anchor().items())


def arguments(folder: Path, **more: Any) -> Any:
    options: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 0.05,
        "lr_scheduler_type": "cosine", "logging_steps": 2, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "remove_unused_columns": False, "use_cpu": True, "label_names": ["labels"], **more,
    }  # fmt: skip
    return transformers.TrainingArguments(**options)


def trainer(
    folder: Path, store: Any, options: Mapping[str, Any] = NONE, *, dies_at: int | None = None,
    notice_at: int | None = None, data: Any = ITEMS, **more: Any,
) -> Any:  # fmt: skip
    met = {} if store is None else place(store)  # without a store, its replica names one
    ours = DiLoCoCallback(inner_steps=INNER, outer_lr=1.0, outer_momentum=0.0, **met, **options)
    made = transformers.Trainer(
        Model(), arguments(folder, **more), train_dataset=data, eval_dataset=ITEMS[:4], callbacks=[ours]
    )
    made.ours, made.watch = ours, Watch(ours, dies_at, notice_at)
    made.add_callback(made.watch)
    return made
