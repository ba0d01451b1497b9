"""Tests which tensors of a model are averaged, and how they are divided into fragments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from diloco import DiLoCo
from diloco.fragments import plan_fragments
from executors.store import MemoryStore


class Decoder(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(layers))
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight  # tied parameters
        self.register_buffer("mask", torch.full((4, 4), float("-inf")))
        self.register_buffer("table", torch.ones(3), persistent=False)


def names(model: nn.Module, fragments: int | list[list[nn.Module | str]]) -> list[list[str]]:
    plan = plan_fragments(model, fragments, sync_buffers=True)
    return [[slot.name for slot in fragment.slots] for fragment in plan]


def test_layers_are_dealt_out_in_turn_and_nothing_is_sent_twice() -> None:
    dealt = names(Decoder(), 2)
    assert [name for name in dealt[0] if name.startswith("layers")][::4] == ["layers.0.0.weight", "layers.2.0.weight"]
    assert [name for name in dealt[1] if name.startswith("layers")][::4] == ["layers.1.0.weight", "layers.3.0.weight"]
    everything = sorted(dealt[0] + dealt[1])
    assert len(everything) == len(set(everything))
    assert [name for name in everything if "embedding" in name or "head" in name] == ["embedding.weight"]


def test_frozen_parameters_constants_and_integer_buffers_stay_local() -> None:
    model = Decoder()
    model.layers[1].requires_grad_(False)
    (sent,) = names(model, 1)
    assert not [name for name in sent if name.startswith("layers.1")]
    assert [name for name in sent if name.startswith("norm.")] == [
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
    ]
    assert "mask" not in sent
    assert "table" not in sent


def test_a_model_without_a_stack_of_layers_is_dealt_out_by_module() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    assert names(model, 2) == [["a.weight", "a.bias"], ["b.weight", "b.bias"]]


def test_fragments_can_be_listed_by_module_and_by_name() -> None:
    model = Decoder(2)
    listed = names(model, [[model.layers[0], "embedding"], ["layers.1", model.norm]])
    assert listed[0][:1] == ["embedding.weight"]
    assert "norm.running_var" in listed[1]


REFUSED: list[tuple[Any, str]] = [
    (0, "fragments must be at least 1, got fragments=0"),
    (99, "fragments=99 is more than the model has"),
    ([["embedding", "layers", "norm"], ["head"]], "'embedding.weight' is in fragments.0. and in fragments.1."),
    ([["embedding", "layers"]], "'norm.weight' is in none of the 1 fragments"),
    ([["embeding"]], "the name 'embeding', and the model has no such parameter or module"),
    (["embedding"], r"fragments\[0\] must be a list"),
]


def test_a_plan_that_does_not_cover_the_model_once_is_refused() -> None:
    for fragments, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            plan_fragments(Decoder(), fragments, sync_buffers=True)


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="no trainable parameters"):
        plan_fragments(nn.Linear(2, 2).requires_grad_(False), 1, sync_buffers=True)


def test_a_fragment_that_the_store_takes_in_no_object_is_refused_before_anything_is_written() -> None:
    class Small(MemoryStore):
        max_object_bytes = 3000

    store, place = Small(), dict[str, Any](rank=0, world_size=2)
    model = nn.Sequential(nn.Linear(20, 20, bias=False), nn.Linear(20, 20, bias=False))
    words = r"fragments=1 and wire='fp32', .* fragment 0 has 4.29e-06 GB, and memory:.* allows 3e-06 GB.*fragments=2"
    with pytest.raises(ValueError, match=words):
        DiLoCo(model, inner_steps=2, store=store, run_id="run", **place)
    assert not list(store.list(""))
    for settings in ({"fragments": 2}, {"wire": "int8"}):
        with DiLoCo(
            model, inner_steps=2, store=store, allow_no_rounds=True, **{**place, "run_id": str(settings)}, **settings
        ):
            pass
