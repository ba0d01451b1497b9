"""The cost of the callback for a Trainer of transformers whose step takes 20 ms (T1), compared with the Trainer without
it.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from statistics import median
from typing import Any

from .harness import Comparison, Options, interleave

STEP_S = 0.02
OURS, WITHOUT = "with DiLoCoCallback", "Trainer"


def trainer(options: Options) -> list[Comparison]:
    """T1: a Trainer with the callback and a Trainer without it train the same model in this process, in turn. The
    median of the steps counts, and most steps have no round.
    """
    if find_spec("transformers") is None:
        return []
    n_steps = 20 if options.quick else 200
    with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        methods = {
            OURS: partial(_ms_a_step, folder, n_steps, True),
            WITHOUT: partial(_ms_a_step, folder, n_steps, False),
        }
        found = interleave(methods, options.repetitions(5))
    return [Comparison("T1", "a step of a Trainer", "ms", found, WITHOUT, goals={OURS: 1.01})]


def _ms_a_step(folder: str, n_steps: int, with_ours: bool) -> float:
    import torch
    from transformers import Trainer, TrainingArguments

    from diloco.trainers.hf import DiLoCoCallback

    at: list[float] = []

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            at.append(time.perf_counter())
            time.sleep(STEP_S)
            return {"loss": self.linear(x).square().mean()}

    args = TrainingArguments(
        folder, max_steps=n_steps, report_to="none", disable_tqdm=True, save_strategy="no", logging_strategy="no",
        use_cpu=True, remove_unused_columns=False,
    )  # fmt: skip
    data = [{"x": torch.randn(8)} for _ in range(64)]
    ours = [DiLoCoCallback(inner_steps=n_steps // 2, outer_momentum=0.0)] if with_ours else []
    Trainer(Model(), args, train_dataset=data, callbacks=ours).train()
    return median(end - start for start, end in pairwise(at)) * 1e3
