"""The fields of a round report about work: its amount, its treatment, and its norm."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from support.training import PLAIN, leave, next_process, nudge, place
from torch import nn

from diloco.outer import open_diloco
from diloco.rendezvous.envelope import UNSIGNED
from diloco.rendezvous.frames import Seal, SealedReplica
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.round import Limits, RoundReport
from diloco.testing import run_replicas
from executors.metrics.recorder import Recorder
from executors.metrics.rows import Left, Round, parse_line
from executors.replica import Replica
from executors.store import MemoryStore

N = 64


@pytest.fixture(autouse=True)
def _processes_are_forgotten() -> None:
    next_process()


def zeros() -> nn.Linear:
    model = nn.Linear(N, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


@pytest.mark.parametrize(
    "limits", [Limits(), Limits(small_bytes=0, block_elements=16)], ids=["in the seal", "in shards"]
)
def test_norms_are_those_of_ones_own_pseudo_gradient_and_of_the_mean(limits: Limits) -> None:
    def body(where: Mapping[str, Any]) -> list[RoundReport]:
        model = zeros()
        with open_diloco(
            model, inner_steps=2, weight=lambda: 1.0 + 2 * where["rank"], limits=limits, **PLAIN, **where
        ) as d:
            reports = []
            for _ in range(4):
                nudge(model, 1.0 + where["rank"])
                reports += [report] if (report := d.step()) else []
        return reports

    for rank, reports in enumerate(run_replicas(2, body)):
        for report in reports:
            assert (report.verdict, report.work, report.ranks) == ("counted", 1.0 + 2 * rank, (0, 1))
            assert report.norm == pytest.approx(2 * (1 + rank) * math.sqrt(N))
            assert report.mean_norm == pytest.approx((2 * 1 + 4 * 3) / 4 * math.sqrt(N))


@pytest.mark.parametrize(
    ("late", "named", "verdict", "work"),
    [("carry", {1}, "carried", 3), ("drop", {1}, "dropped", 3), ("carry", {0}, "dropped", 3)],
    ids=["late", "late, and to be dropped", "of another process of this rank"],
)
def test_work_that_a_seal_does_not_count_is_carried_or_dropped(
    late: Any, named: set[int], verdict: str, work: float
) -> None:
    store, model = MemoryStore(), zeros()
    diloco = open_diloco(model, inner_steps=3, late=late, **PLAIN, **place(store, world_size=2))
    mean = np.full(N, -1.0, np.float32)
    members = {rank: SealedReplica("another", 0, 1.0, "d" * 32) for rank in named}
    seal = Seal(members, diloco._model_state.digest(0), 0, mean.tobytes())
    store.put_if_absent(Keys("test", "main").seal(0), seal.data("", UNSIGNED))
    for _ in range(3):
        nudge(model, 1.0)
        report = diloco.step()
    assert report is not None
    assert (report.verdict, report.work, report.counted) == (verdict, work, False)
    assert report.mean_norm == pytest.approx(math.sqrt(N))
    assert report.train_s > 0
    leave(diloco)


def test_a_replica_records_each_entry_and_the_work_that_no_round_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are two fragments. Their entries are recorded one by one, also if a step runs several."""
    store = MemoryStore.named("kept")
    replica = Replica(0, 1, "test", 0, store.url, claimed_nonce="n", recorder=Recorder(store, "test", 0, 0, began=0.0))
    replica.__dict__["store"] = store
    monkeypatch.setattr("executors.replica._current", replica)
    model = nn.Sequential(zeros(), zeros())
    with open_diloco(model, inner_steps=4, fragments=2, name="critic", **PLAIN) as diloco:
        for step in range(5):
            nudge(model, 1.0)
            diloco.step()
            replica.report(step=step)
        with torch.no_grad():
            diloco.sync()
        nudge(model, 1.0)
        diloco.step()
    assert replica.recorder is not None
    lines = [json.loads(json.dumps({"t": 0.0, **fields})) for _, fields in replica.recorder._made]
    rows = [parse_line(line, 0, 0, "a line", Counter()) for line in lines]
    rounds = [row for row in rows if isinstance(row, Round)]
    assert [(row.name, row.entry, row.fragment) for row in rounds] == [("critic", n, n % 2) for n in range(4)]
    assert [row.weight for row in rounds] == [2, 4, 3, 1]
    assert [row.left_with for row in rows if isinstance(row, Left)] == [1.0]
    numbers = [numbers for _, numbers in replica.recorder._reported]
    assert numbers == [{"step": n} for n in range(5)], (
        "the numbers of DiLoCo are only in the table, and not in the measurements"
    )
