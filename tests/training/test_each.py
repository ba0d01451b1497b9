"""Means that are not stored: each replica computes them from all contributions, and comes to the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from support.training import PLAIN, leave, next_process, nudge, place
from torch import nn

from diloco import DiLoCo
from diloco.outer import open_diloco
from diloco.rendezvous.envelope import UNSIGNED
from diloco.rendezvous.frames import READ_TRIES, MeanHead, head_bytes
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.round import Limits, owners
from diloco.testing import run_replicas
from executors.store import MemoryStore

SHARDED = Limits(small_bytes=0, block_elements=300)
KEYS = Keys("test", "main")


@pytest.fixture(autouse=True)
def _processes_are_forgotten() -> None:
    next_process()


def zeros(n: int = 1000) -> nn.Linear:
    model = nn.Linear(n, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def train(diloco: DiLoCo, model: nn.Module, steps: int, rank: int) -> None:
    draw = torch.Generator().manual_seed(rank + 10 * diloco.inner_step)
    for _ in range(steps):
        nudge(model, torch.randn(1, 1000, generator=draw))
        diloco.step()


@pytest.mark.parametrize("options", [{}, {"overlap_steps": 1, "merge": "carry"}], ids=["in turn", "carry"])
@pytest.mark.parametrize("wire", ["fp32", "int8", "top8"])
def test_all_replicas_come_to_the_bits_of_a_stored_mean_in_fp32(wire: str, options: dict[str, Any]) -> None:
    def body(where: Mapping[str, Any], *, mean_wire: str) -> tuple[bytes, bytes, list[int]]:
        model, moved = zeros(), []
        given: dict[str, Any] = {
            "inner_steps": 2,
            "wire": wire,
            "mean_wire": mean_wire,
            "outer_lr": 0.7,
            "outer_momentum": 0.5,
        }
        diloco = open_diloco(model, **given, **options, **where, limits=SHARDED, weight=1.0 + where["rank"])
        draw = torch.Generator().manual_seed(where["rank"])
        for _ in range(8):
            nudge(model, torch.randn(1, 1000, generator=draw))
            if (report := diloco.step()) is not None:
                assert report.mean_wire == mean_wire
                moved.append(report.bytes_down)
        found = diloco.anchor()["weight"].numpy().tobytes(), model.weight.detach().numpy().tobytes(), moved
        leave(diloco)
        return found

    computed, stored = (run_replicas(3, partial(body, mean_wire=mean_wire)) for mean_wire in ("each", "fp32"))
    for mine, theirs in zip(computed, stored, strict=True):
        assert mine[:2] == theirs[:2]
        assert mine[0] == computed[0][0]


def test_of_a_mean_only_a_head_is_stored_and_contributions_stay() -> None:
    store = MemoryStore()

    def body(where: Mapping[str, Any]) -> None:
        model = zeros()
        with open_diloco(model, inner_steps=2, total_steps=6, wire="top8", mean_wire="each", **where) as diloco:
            train(diloco, model, 6, where["rank"])

    run_replicas(3, body, store=store)
    for entry in range(3):
        key = KEYS.mean(entry, 0)
        data = bytes(store.get(key))
        assert len(data) == head_bytes(1)
        assert MeanHead.parse(data, key, UNSIGNED, wire="each").left_out == ()
        assert all(store.get(KEYS.contribution(entry, rank)) is not None for rank in range(3))


def test_a_replica_that_starts_later_replays_the_rounds_from_contributions() -> None:
    store, anchors = MemoryStore(), []
    given: dict[str, Any] = {"inner_steps": 1, "wire": "top8", "mean_wire": "each", **PLAIN, "snapshot_every": 10}
    for _ in range(2):
        next_process()
        diloco = open_diloco(model := zeros(), **given, **place(store))
        anchors.append(diloco.anchor()["weight"])
        train(diloco, model, 4, 0)
        anchors.append(diloco.anchor()["weight"])
        leave(diloco)
    assert torch.equal(anchors[1], anchors[2])
    assert not torch.equal(anchors[2], anchors[3])


@pytest.mark.parametrize("damaged", range(3))
def test_a_contribution_that_is_damaged_in_the_store_is_left_out_by_all(damaged: int) -> None:
    """The replica that decides may be the sender, which has its own work in memory."""
    limits = Limits(grace_s=60.0, takeover_after_s=0.05)

    class Damaging(MemoryStore):
        """Damages the payload of one rank in the first round."""

        checks_uploads = False

        def put_if_absent(self, key: str, data: Any) -> bool:
            if key == KEYS.contribution(0, damaged):
                whole = bytearray(b"".join(bytes(part) for part in data) if isinstance(data, list) else bytes(data))
                whole[-1] ^= 1
                data = bytes(whole)
            return super().put_if_absent(key, data)

    store = Damaging()

    def body(where: Mapping[str, Any]) -> list[Any]:
        model, reports = zeros(), []
        given: dict[str, Any] = {"inner_steps": 1, "wire": "int8", "mean_wire": "each", **PLAIN}
        diloco = open_diloco(model, **given, **where, limits=limits)
        for step in range(2):
            nudge(model, torch.randn(1, 1000, generator=torch.Generator().manual_seed(step + 7 * where["rank"])))
            reports.append(diloco.step())
        anchor = diloco.anchor()["weight"].numpy().tobytes()
        leave(diloco)
        return [anchor, *[report.ranks for report in reports if report is not None]]

    results = run_replicas(3, body, store=store)
    assert len({result[0] for result in results}) == 1
    assert [result[1:] for result in results] == [[tuple({0, 1, 2} - {damaged}), (0, 1, 2)]] * 3


def test_a_replica_that_cannot_compute_a_mean_does_not_read_all_inputs_again_in_each_look(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The replica that decides has its own work in memory. So the other one needs a snapshot, which comes later."""
    (decider, *_) = owners(0, [0, 1], 0)
    reads: list[str] = []

    class Damaging(MemoryStore):
        """Checks uploads, and damages one payload afterwards."""

        def put_if_absent(self, key: str, data: Any) -> bool:
            is_new = super().put_if_absent(key, data)
            if is_new and key == KEYS.contribution(0, decider):
                whole = bytearray(super().get(key))
                whole[-1] ^= 1
                self.put(key, bytes(whole))
            return is_new

        def get(self, key: str, *, start: int = 0, size: int | None = None) -> memoryview:
            if start >= head_bytes(1):
                reads.append(key)
            return super().get(key, start=start, size=size)

    def body(where: Mapping[str, Any]) -> bytes:
        given: dict[str, Any] = {"inner_steps": 1, "total_steps": 6, "wire": "int8", "mean_wire": "each", **PLAIN}
        limits = Limits(grace_s=0.5)
        model = zeros()
        with open_diloco(model, **given, **where, snapshot_every=2, limits=limits) as diloco:
            while not diloco.is_over:
                train(diloco, model, 1, where["rank"])
            return diloco.anchor()["weight"].numpy().tobytes()

    results = run_replicas(2, body, store=Damaging())
    assert results[0] == results[1]
    assert 0 < reads.count(KEYS.contribution(0, decider)) <= 2 * READ_TRIES
    assert len([record for record in caplog.records if "does not match the digests" in record.getMessage()]) == 1


@pytest.mark.parametrize("checks", [True, False], ids=["checked uploads", "unchecked uploads"])
def test_only_who_decides_reads_its_own_contribution_and_only_if_the_store_does_not_check_uploads(checks: bool) -> None:
    reads: list[str] = []

    class Counting(MemoryStore):
        """Records each read of a payload."""

        checks_uploads = checks

        def get(self, key: str, *, start: int = 0, size: int | None = None) -> memoryview:
            if start >= head_bytes(1):
                reads.append(key)
            return super().get(key, start=start, size=size)

    def body(where: Mapping[str, Any]) -> int:
        diloco = open_diloco(model := zeros(), inner_steps=1, wire="top8", mean_wire="each", **PLAIN, **where)
        nudge(model, torch.randn(1, 1000, generator=torch.Generator().manual_seed(where["rank"])))
        report = diloco.step()
        leave(diloco)
        assert report is not None
        return report.bytes_down

    run_replicas(3, body, store=Counting())
    counts = sorted(reads.count(KEYS.contribution(0, rank)) for rank in range(3))
    assert counts == ([2, 2, 2] if checks else [2, 2, 3])
