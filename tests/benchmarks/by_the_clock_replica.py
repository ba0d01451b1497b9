"""The task of replicas in the benchmark of rounds by the clock: train the demo's model at a given speed."""

from __future__ import annotations

import time
from typing import Any

import torch

from diloco import DiLoCo
from diloco.demo import Inner, held_out_loss, load_text
from executors import current_replica

LOOKS = 20
"""The number of anchors whose loss is measured."""


def train(steps_s: list[float], seed: int, for_s: float, settings: dict[str, Any]) -> list[tuple[float, float]]:
    """Train for a while. Rank 0 returns the losses of the anchor with their times.

    Args:
        steps_s: the seconds of an inner step, by rank.
    """
    torch.set_num_threads(1)
    replica = current_replica()
    text = load_text()
    inner = Inner(text, replica.rank, replica.world_size, steps=1_000_000, batch=2, seed=seed)
    anchors = [(0.0, {name: values.clone() for name, values in inner.model.state_dict().items()})]
    with DiLoCo(inner.model, outer_lr=1.0, outer_momentum=0.0, **settings) as diloco:
        step, began = 0, time.monotonic()
        while (stepping := time.monotonic()) < began + for_s:
            inner.step(step)
            step += 1
            time.sleep(max(0.0, stepping + steps_s[replica.rank] - time.monotonic()))
            report, at_s = diloco.step(), time.monotonic() - began
            if report is not None and replica.rank == 0 and at_s >= len(anchors) * for_s / LOOKS:
                anchors.append((at_s, diloco.anchor()))
    losses = []
    if replica.rank == 0:
        for at_s, anchor in anchors:
            inner.model.load_state_dict(anchor, strict=False)
            losses.append((at_s, held_out_loss(inner.model, text)))
    return losses
