"""The model of a run, read from its store alone: the anchor of every replica, and its unshared tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.training import adam, leave, next_process, nudge, place
from torch import Tensor, nn

from diloco.errors import DiLoCoError
from diloco.outer import open_diloco
from diloco.rendezvous.round import Limits
from diloco.testing import run_replicas
from diloco.trained_model import ModelSource, read_model, save_model
from diloco.unshared_state import FIRST_BYTES
from executors.errors import CorruptObjectError, RunNotFoundError
from executors.store import MemoryStore

SHARDED = Limits(small_bytes=0, block_elements=50)
WIRES = ("fp32", "bf16", "int8", "int4", "top8", "top8/each")

pytestmark = pytest.mark.filterwarnings(
    "ignore:Only .* rounds", "ignore:.* in no average", "ignore:Each replica keeps its own float"
)


class Tied(nn.Module):
    """Has everything that a `state_dict` may have: trained, frozen and tied parameters, and buffers of three kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(3), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.frozen(self.embedding(tokens))))
        return logits


def train(
    where: Mapping[str, Any], steps: int, options: Mapping[str, Any]
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Train a replica, and return its model's state at the end, and the anchor after each step."""
    torch.manual_seed(where["rank"])
    model = Tied()
    draw = torch.Generator().manual_seed(5)  # threads share the global generator, and frozen values must be equal
    for parameter in model.frozen.parameters():
        nn.init.normal_(parameter, generator=draw)
    anchors = []
    with open_diloco(model, **{"inner_steps": 2, "snapshot_every": 3, **options}, **where) as diloco:
        for _ in range(steps):
            model(torch.randint(7, (4,), generator=torch.Generator().manual_seed(where["rank"])))
            nudge(model.embedding, 0.1 * (1 + where["rank"]))
            nudge(model.norm, 0.05)
            diloco.step()
            anchors.append(diloco.anchor())
    return {name: values.clone() for name, values in model.state_dict().items()}, anchors


def source(store: MemoryStore, **more: Any) -> ModelSource:
    return ModelSource(store=store, run_id="test", **more)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("fragments", [1, 2])
def test_the_stored_model_is_the_one_that_every_replica_ends_with(wire: str, sharded: bool, fragments: int) -> None:
    store, limits = MemoryStore(), SHARDED if sharded else Limits()
    wire, _, mean_wire = wire.partition("/")
    wires = {"wire": wire, "mean_wire": mean_wire or None}
    options = {**wires, "fragments": fragments, "limits": limits, "total_steps": 16}
    (state, _), _ = run_replicas(2, lambda where: train(where, 16, options), store=store)
    found = read_model(source(store, limits=limits))
    assert found.step == 16
    assert not found.missing
    assert found.tensors.keys() == state.keys()
    for name, values in state.items():
        assert torch.equal(found.tensors[name], values), name


def test_a_model_loads_strictly_from_the_file_and_tied_parameters_stay_tied(tmp_path: Path) -> None:
    store = MemoryStore()
    (state, _), _ = run_replicas(2, lambda where: train(where, 8, {"total_steps": 8}), store=store)
    save_model(read_model(source(store)), tmp_path / "model.safetensors")
    model = Tied()
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert all(torch.equal(values, state[name]) for name, values in model.state_dict().items())
    assert model.head.weight is model.embedding.weight


@pytest.mark.parametrize("default", ["device", "dtype"])
def test_the_stored_model_is_whole_whatever_torch_makes_by_default(default: str) -> None:
    store, model = MemoryStore(), Tied()
    defaults = torch.device("meta") if default == "device" else default_dtype(torch.bfloat16)
    with defaults:
        diloco = open_diloco(model, inner_steps=2, total_steps=6, snapshot_every=2, **place(store))
        for _ in range(6):
            nudge(model.embedding, 0.25)
            diloco.step()
        leave(diloco)
        diloco._workers.uploads.finish()
        found = read_model(source(store))
    assert not found.missing
    for name, values in model.state_dict().items():
        assert torch.equal(found.tensors[name], values), name


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def test_names_are_those_of_the_model_without_its_wrappers() -> None:
    store, model = MemoryStore(), Tied()
    model.norm = torch.optim.swa_utils.AveragedModel(model.norm)  # type: ignore[assignment]
    open_diloco(model, inner_steps=1, **place(store)).close()
    found = read_model(source(store))
    assert {"norm.weight", "norm.running_mean", "norm.num_batches_tracked"} <= found.tensors.keys()
    assert not any("module" in name for name in found.tensors)


def test_an_earlier_step_is_the_newest_round_before_it_and_deleted_rounds_are_named() -> None:
    store = MemoryStore()
    (_, anchors), _ = run_replicas(2, lambda where: train(where, 30, {"total_steps": 30}), store=store)
    for step in (24, 25, 30, 1000):
        found = read_model(source(store), step=step)
        assert found.step == min(step - step % 2, 30)
        for name, values in anchors[found.step - 1].items():
            assert torch.equal(found.tensors[name], values)
    assert read_model(source(store), rounds=13).rounds == 13
    with pytest.raises(DiLoCoError, match=r"no longer has the state of step 3.*Available: steps 18 to 30, after every"):
        read_model(source(store), step=3)


def test_the_model_of_a_continuing_run_is_its_newest_round_and_reading_writes_nothing() -> None:
    store = MemoryStore()
    model = nn.Linear(3, 2)
    diloco = open_diloco(model, inner_steps=2, **place(store))
    for step in range(9):
        nudge(model, 0.5)
        diloco.step()
        before = {entry.key for entry in store.list("")}
        found = read_model(source(store))
        assert {entry.key for entry in store.list("")} == before
        assert found.rounds == diloco.rounds == (step + 1) // 2
        assert all(torch.equal(found.tensors[name], values) for name, values in diloco.anchor().items())
    leave(diloco)


def test_tensors_have_the_dtypes_of_the_model_or_the_anchors_own(tmp_path: Path) -> None:
    store = MemoryStore()
    model = nn.Linear(3, 2).bfloat16()
    with open_diloco(model, inner_steps=1, total_steps=3, **place(store)) as diloco:
        for _ in range(3):
            nudge(model, 0.01)
            diloco.step()
        anchor = diloco.anchor()
    live, exact = read_model(source(store)), read_model(source(store), dtype="float32")
    assert {values.dtype for values in live.tensors.values()} == {torch.bfloat16}
    assert all(torch.equal(values, anchor[name]) for name, values in exact.tensors.items())
    save_model(live, tmp_path / "live.safetensors")
    loaded = load_file(tmp_path / "live.safetensors")
    assert all(torch.equal(values, loaded[name]) for name, values in model.state_dict().items())


def test_a_frozen_model_that_is_too_large_to_be_kept_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.unshared_state.FIRST_BYTES", 64)
    store = MemoryStore()
    run_replicas(2, lambda where: train(where, 4, {"total_steps": 4}), store=store)
    found = read_model(source(store))
    assert set(found.missing) == {"frozen.weight", "frozen.bias"}
    assert any("Not in the run: 2 of the model's tensors" in note and "strict=False" in note for note in found.notes)
    assert FIRST_BYTES > 64


def test_buffers_that_are_not_averaged_come_from_one_replica_and_a_note_names_it() -> None:
    store = MemoryStore()
    run_replicas(2, lambda where: train(where, 8, {"total_steps": 8, "wire": "int8"}), store=store)
    found = read_model(source(store))
    (note,) = found.notes
    assert note == "Not averaged: 'norm.running_mean' and 2 more. The values are those of rank 0, after round 4."
    assert found.tensors["norm.num_batches_tracked"].item() == 8


def test_rounds_after_the_newest_snapshot_need_the_outer_optimizer_of_the_user() -> None:
    store = MemoryStore()
    options = {"total_steps": 16, "outer_optimizer": adam}
    (state, _), _ = run_replicas(2, lambda where: train(where, 16, options), store=store)
    without = read_model(source(store))
    assert without.rounds == 6
    assert any("outer_optimizer=" in note for note in without.notes)
    found = read_model(source(store), outer_optimizer=adam)
    assert found.rounds == 8
    assert all(torch.equal(found.tensors[name], values) for name, values in state.items())


def test_a_signed_run_is_read_with_its_key_alone() -> None:
    store, key = MemoryStore(), b"the key of this run"
    options = {"total_steps": 8, "key": key}
    (state, _), _ = run_replicas(2, lambda where: train(where, 8, options), store=store)
    found = read_model(source(store, key=key))
    assert all(torch.equal(found.tensors[name], values) for name, values in state.items())
    for other in (None, b"another key than that"):
        with pytest.raises(CorruptObjectError, match="it was signed with the key"):
            read_model(source(store, key=other))


def test_damaged_objects_never_reach_the_written_model() -> None:
    store = MemoryStore()
    run_replicas(2, lambda where: train(where, 16, {"total_steps": 16, "limits": SHARDED}), store=store)
    whole = read_model(source(store, limits=SHARDED))
    for entry in list(store.list("test/diloco/main/")):
        data = bytes(store.get(entry.key))
        if not data or "/own/" in entry.key or "/contribution/" in entry.key:
            continue
        store.put(entry.key, bytes([*data[:-1], data[-1] ^ 1]))
        try:
            found = read_model(source(store, limits=SHARDED))
        except (CorruptObjectError, DiLoCoError):
            pass
        else:
            # An older copy of the rest replaces it, or a note names the missing tensors.
            may_differ = {"norm.num_batches_tracked", *found.missing}
            both = whole.tensors.keys() - found.missing.keys()
            same = {name for name in both if torch.equal(found.tensors[name], whole.tensors[name])}
            assert found.notes != whole.notes or same == whole.tensors.keys(), entry.key
            assert found.rounds < whole.rounds or same >= whole.tensors.keys() - may_differ, entry.key
        store.put(entry.key, data)


def test_a_name_that_the_run_does_not_have_is_answered_with_those_it_has() -> None:
    store = MemoryStore()
    leave(open_diloco(nn.Linear(2, 1), name="critic", **place(store)))
    next_process()
    with pytest.raises(RunNotFoundError, match=r"no DiLoCo named 'main'\. It has: critic"):
        read_model(source(store))
    assert read_model(source(store, name="critic")).rounds == 0


def test_by_the_clock_rounds_have_numbers_and_no_steps() -> None:
    store = MemoryStore()
    model = nn.Linear(2, 1)
    diloco = open_diloco(model, round_seconds=1e-6, total_rounds=5, **place(store))
    while not diloco.is_over:
        nudge(model, 0.1)
        diloco.step()
    diloco.close()
    found = read_model(source(store))
    assert (found.rounds, found.step) == (5, None)
    assert torch.equal(found.tensors["weight"], model.weight)
    with pytest.raises(DiLoCoError, match="has rounds by the clock, so step=3 does not name a round"):
        read_model(source(store), step=3)
