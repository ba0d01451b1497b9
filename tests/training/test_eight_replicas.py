"""Eight replicas with small wires, fragments and overlap end with one model, although one dies and comes back."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Event
from typing import Any

import pytest
import torch
from support.training import leave, next_process
from torch import Tensor, nn

from diloco.outer import open_diloco
from diloco.rendezvous.claims import _claimed
from diloco.rendezvous.round import Limits, RoundReport
from diloco.testing import run_replicas

N, DIES, STEPS, DIES_AT, HELD_AT = 8, 5, 40, 10, 20
LIMITS = Limits(small_bytes=0, block_elements=300)
WIRES = {"int4": {"wire": "int4"}, "top8": {"wire": "top8"}, "each": {"wire": "top8", "mean_wire": "each"}}
LONGEST_WAIT_S = 120.0


@pytest.fixture(autouse=True)
def _processes_are_forgotten() -> None:
    next_process()


def model_of_two_layers() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(700, 1, bias=False), nn.Linear(900, 1, bias=False))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


@pytest.mark.parametrize("overlap", [{}, {"overlap_steps": 1, "merge": "carry"}], ids=["in turn", "overlap"])
@pytest.mark.parametrize("wire", WIRES)
def test_all_replicas_end_with_one_model_although_one_dies_and_comes_back(wire: str, overlap: dict[str, Any]) -> None:
    is_missed, is_back = Event(), Event()

    def train(where: Mapping[str, Any], reports: list[RoundReport], *, until: int) -> tuple[Any, nn.Module]:
        model = model_of_two_layers()
        given: dict[str, Any] = {"inner_steps": 4, "fragments": 2, "total_steps": STEPS, **WIRES[wire], **overlap}
        diloco = open_diloco(model, **given, **where, limits=LIMITS)
        draw = torch.Generator().manual_seed(1000 * where["rank"] + diloco.inner_step)
        diloco.attach_state("draw", draw)
        if where["rank"] == DIES and until == STEPS:
            is_back.set()
        while not diloco.is_over and diloco.inner_step < until:
            if where["rank"] != DIES and diloco.inner_step == HELD_AT:
                is_missed.set()
                assert is_back.wait(LONGEST_WAIT_S)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=draw))
            if (report := diloco.step()) is not None:
                reports.append(report)
        return diloco, model

    def body(where: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor], list[RoundReport]]:
        reports: list[RoundReport] = []
        if where["rank"] == DIES:
            diloco, _ = train(where, [], until=DIES_AT)
            diloco._saver.save_attached()
            diloco._workers.uploads.finish()
            leave(diloco)
            assert is_missed.wait(LONGEST_WAIT_S)
            for process in [each for each in _claimed if each[2] == DIES]:
                del _claimed[process]  # the next attempt counts as another process
        diloco, model = train(where, reports, until=STEPS)
        diloco.close()
        return list(diloco.anchor().values()), [each.detach() for each in model.parameters()], reports

    results = run_replicas(N, body)
    first, _, reports = results[0]
    for anchor, live, _ in results:
        for one, two, value in zip(first, anchor, live, strict=True):
            assert one.numpy().tobytes() == two.numpy().tobytes() == value.numpy().tobytes()
    assert all(value.isfinite().all() and value.any() for value in first)
    ranks = [report.ranks for report in reports]
    everyone = tuple(range(N))
    assert ranks[0] == ranks[-1] == everyone
    assert tuple(rank for rank in everyone if rank != DIES) in ranks, "no round lacked the dead replica"
