"""Running statistics, such as those of a BatchNorm: averaged over any wire, and never carried over as work."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from support.training import leave, next_process, nudge, place
from torch import Tensor, nn

from diloco import DiLoCo, local_buffers
from diloco.local_buffers import LARGE
from diloco.testing import run_replicas
from diloco.wires import WIRES
from executors.store import MemoryStore

VARIANCES = torch.logspace(-5, 0.5, 64)
RELATIVE = [wire.name for wire in WIRES.values() if wire.is_relative]
COARSE = [wire.name for wire in WIRES.values() if not wire.is_relative]


def statistics(model: nn.BatchNorm1d) -> Tensor:
    assert model.running_var is not None
    return model.running_var


def see(model: nn.BatchNorm1d, variances: Tensor, batches: int = 1) -> None:
    """Give the model batches with these variances, which changes its statistics."""
    model.train()
    for _ in range(batches):
        model(torch.randn(64, len(variances)) * variances.sqrt())


@pytest.mark.parametrize("merge", ["anchor", "carry"])
@pytest.mark.parametrize("overlap_steps", [0, 1])
@pytest.mark.parametrize("wire", RELATIVE)
def test_variances_that_are_averaged_stay_positive_and_equal(wire: str, overlap_steps: int, merge: str) -> None:
    def body(where: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        model = nn.BatchNorm1d(len(VARIANCES))
        options: dict[str, Any] = {"overlap_steps": overlap_steps, "merge": merge, "wire": wire}
        with DiLoCo(model, inner_steps=2, total_steps=12, **options, **where) as diloco:
            for step in range(12):
                see(model, VARIANCES * (1 + where["rank"]), 20 if step % 2 else 1)
                diloco.step()
                assert (statistics(model) >= 0).all()
            return diloco.anchor()["running_var"], statistics(model).clone()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as the warning of few rounds
        for anchor, live in run_replicas(2, body):
            assert torch.equal(anchor, live)
            assert (anchor > 0).all()


@pytest.mark.parametrize("background", [False, True])
def test_a_share_of_live_work_that_is_kept_is_none_of_statistics(background: bool) -> None:
    def body(where: Mapping[str, Any]) -> tuple[bool, bool]:
        model = nn.BatchNorm1d(len(VARIANCES))
        options: dict[str, Any] = {"outer_lr": 0.5, "outer_momentum": 0.0, "mix": 0.5, "background": background}
        with DiLoCo(model, inner_steps=1, **options, **where) as diloco:
            for _ in range(2):
                see(model, VARIANCES * (1 + where["rank"]))
                nudge(model, 0.1)
                diloco.step()
            anchor = diloco.anchor()
            return torch.equal(model.weight, anchor["weight"]), torch.equal(statistics(model), anchor["running_var"])

    assert run_replicas(2, body) == [(False, True)] * 2


def test_a_replica_that_was_late_takes_the_statistics_of_the_others() -> None:
    is_sealed = threading.Event()

    def body(where: Mapping[str, Any]) -> bool:
        model = nn.BatchNorm1d(2)
        is_late = where["rank"] == 1
        diloco = DiLoCo(model, inner_steps=4, outer_lr=1.0, outer_momentum=0.0, grace_s=0.5, **where)
        for step in range(4):
            see(model, torch.full((2,), 0.01), 20)
            with torch.no_grad():
                model.weight.add_(0.01)
            if is_late and step == 3:
                assert is_sealed.wait(60)
            report = diloco.step()
        assert report is not None
        assert report.verdict == ("carried" if is_late else "counted")
        is_sealed.set()
        assert not torch.equal(model.weight, diloco.anchor()["weight"]) or not is_late
        taken = torch.equal(statistics(model), diloco.anchor()["running_var"])
        with pytest.raises(RuntimeError, match="enough"), diloco:
            raise RuntimeError("enough")
        return taken and bool((statistics(model) > 0).all())

    assert run_replicas(2, body) == [True, True]


@pytest.mark.parametrize("wires", [{"wire": wire} for wire in COARSE] + [{"mean_wire": "int8"}])
def test_statistics_stay_each_replicas_own_where_a_wire_is_too_coarse(wires: dict[str, Any]) -> None:
    model = nn.BatchNorm1d(2)
    with pytest.warns(UserWarning, match="Each replica keeps its own float buffers.*'running_mean' and 1 more"):
        diloco = DiLoCo(model, inner_steps=1, **wires)
    with diloco:
        see(model, VARIANCES[:2])
        own = statistics(model).clone()
        diloco.step()
        assert diloco.anchor().keys() == {"weight", "bias"}
    assert torch.equal(statistics(model), own)


@pytest.mark.parametrize("wire", COARSE)
def test_averaging_statistics_over_a_coarse_wire_is_refused(wire: str) -> None:
    with pytest.raises(ValueError, match=r"sync_buffers=True is not possible: wire=.* is too coarse.*Use wire='bf16'"):
        DiLoCo(nn.BatchNorm1d(2), wire=wire, sync_buffers=True)


def test_a_model_without_statistics_is_warned_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DiLoCo(nn.Linear(2, 2), wire="int8", allow_no_rounds=True).close()


class Shuffled(nn.Linear):
    """A layer that reads its inputs in an order of its own, and through a mask."""

    def __init__(self, n: int, seed: int) -> None:
        super().__init__(n, n)
        own = torch.Generator().manual_seed(seed)
        self.register_buffer("perm", torch.randperm(n, generator=own))
        self.register_buffer("mask", torch.rand(n, n, generator=own) < 0.5)
        self.register_buffer("scratch", torch.rand(n, generator=own), persistent=False)
        self.register_buffer("seen", torch.tensor(seed))


@pytest.mark.parametrize("n", [8, 512])
@pytest.mark.filterwarnings("ignore:Each replica keeps its own float buffers")  # the buffers are equal at the beginning
def test_a_permutation_in_a_buffer_that_differs_is_reported(n: int, caplog: pytest.LogCaptureFixture) -> None:
    for seeds in ((1, 1), (1, 2)):

        def body(where: Mapping[str, Any], seeds: tuple[int, int] = seeds) -> None:
            model = nn.Sequential(Shuffled(n, seeds[where["rank"]]), nn.BatchNorm1d(n))
            DiLoCo(model, wire="int8", allow_no_rounds=True, **where).close()

        caplog.clear()
        run_replicas(2, body)
        if seeds[0] == seeds[1]:
            assert not caplog.messages
        else:
            (told,) = caplog.messages
            assert ": 0.perm has other values than at rank" in told
            assert "2 frozen parameters and buffers in all" in told


@pytest.mark.parametrize("options", [{"wire": "int8"}, {"sync_buffers": False}])
@pytest.mark.filterwarnings("ignore:Each replica keeps its own float buffers")
def test_statistics_that_no_wire_takes_come_back_with_their_replica(options: dict[str, Any]) -> None:
    def process() -> tuple[nn.BatchNorm1d, DiLoCo]:
        next_process()
        model = nn.BatchNorm1d(len(VARIANCES))
        diloco = DiLoCo(model, inner_steps=2, snapshot_every=1, **options, **where)
        diloco.attach_state("generator", torch.Generator())
        return model, diloco

    where = place()
    model, diloco = process()
    for _ in range(4):
        see(model, VARIANCES)
        diloco.step()
    diloco._workers.uploads.finish()
    again, diloco = process()
    for name, values in model.named_buffers():
        assert torch.equal(dict(again.named_buffers())[name], values), name
    leave(diloco)


def test_a_table_that_never_changes_is_not_kept_again_and_again() -> None:
    next_process()
    store = MemoryStore()
    model = Shuffled(64, 0)
    diloco = DiLoCo(model, inner_steps=1, snapshot_every=1, **place(store))
    diloco.attach_state("generator", torch.Generator())
    for step in range(3):
        nudge(model, 0.1)
        model.get_buffer("seen").fill_(step)
        diloco.step()
    leave(diloco)
    diloco._workers.uploads.finish()
    sizes = [entry.size_bytes for entry in store.list("test/diloco/main/own/")]
    assert 0 < max(sizes) < 4 * 65 * 64 + 1000  # at most the work since the last round
    assert diloco._model_state.local_buffers.changed().keys() == {"seen"}


def test_a_large_table_of_whole_numbers_is_not_read_again_at_each_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    read, digest = [], local_buffers._digest

    def noted(values: Tensor) -> bytes:
        read.append(values.numel())
        return digest(values)

    monkeypatch.setattr(local_buffers, "_digest", noted)
    model = nn.Linear(2, 2)
    model.register_buffer("packed", torch.zeros(LARGE + 1, dtype=torch.int32))
    model.register_buffer("small", torch.zeros(8, dtype=torch.int32))
    # batch normalization writes to such a buffer, and torch does not count that write
    model.register_buffer("means", torch.zeros(LARGE + 2))
    with DiLoCo(model, inner_steps=1, sync_buffers=False, allow_no_rounds=True) as diloco:
        new_buffers = diloco._model_state.local_buffers.changed
        assert sorted(read) == [8, LARGE + 1, LARGE + 2]
        for _ in range(3):
            read.clear()
            assert not new_buffers()
            assert sorted(read) == [8, LARGE + 2]


def test_a_write_to_a_large_table_of_whole_numbers_is_kept() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("packed", torch.zeros(LARGE + 1, dtype=torch.int32))
    with DiLoCo(model, inner_steps=1, allow_no_rounds=True) as diloco:
        new_buffers, first = diloco._model_state.local_buffers.changed, model.get_buffer("packed")
        first[7] = 1
        assert new_buffers().keys() == {"packed"}
        first[7] = 0
        assert not new_buffers(), "a buffer that has its first value again is not saved"
        model.packed = first + 1
        assert new_buffers().keys() == {"packed"}
        model.packed = first
        first.data = first + 2
        assert new_buffers().keys() == {"packed"}
        with torch.inference_mode():  # tensors of this mode have no version
            model.packed = torch.zeros(LARGE + 1, dtype=torch.int32)
            assert not new_buffers()
            model.packed[7] = 1
            assert new_buffers().keys() == {"packed"}
