"""A model that a script changes after `close()` has a number, which is the same on replicas that change it alike."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from weakref import finalize

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from diloco.final_model_check import FinalModelCheck, drop_checks_of
from diloco.stale_copies.optimizer_hook import _watchers


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 2))


def common(model: nn.Module) -> dict[str, Tensor]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}


def batches(seed: int) -> list[Tensor]:
    return list(torch.randn(8, 64, 20, generator=torch.Generator().manual_seed(seed)))


def mark_after(change: Callable[[nn.Module], object]) -> float | None:
    """Return the number that is noted if a script changes the model in this way. None: no number is noted."""
    model, noted = make(), list[float]()
    at_end = FinalModelCheck(model, common(model), noted.append)
    change(model)
    at_end.look()
    at_end.look()
    assert len(noted) <= 1
    return noted[0] if noted else None


@pytest.fixture(autouse=True)
def _nothing_is_watched_in_the_end() -> Iterator[None]:
    yield
    watched = [callback for callbacks in _watchers.values() for callback in callbacks]
    assert not [each for each in watched if isinstance(getattr(each, "__self__", None), FinalModelCheck)]


def test_the_number_is_the_same_whatever_torch_makes_by_default() -> None:
    def change(model: nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter("0.weight").add_(1.0)

    def change_last(model: nn.Module) -> None:
        change(model)
        torch.set_default_device("meta")

    expected = mark_after(change)
    try:
        assert mark_after(change_last) == expected
    finally:
        torch.set_default_device(None)
    assert expected is not None


def evaluate(model: nn.Module) -> None:
    model.eval()
    model(batches(0)[0])
    model.train()


def freeze(model: nn.Module) -> None:
    model.requires_grad_(False)


def load_own(model: nn.Module) -> None:
    model.load_state_dict(model.state_dict())


def train_on(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(batches(0)[0]).square().mean().backward()
    optimizer.step()


def replace_layer(model: Any) -> None:
    model[2] = nn.Linear(30, 5)


@pytest.mark.parametrize(
    "use", [evaluate, freeze, load_own, copy.deepcopy, nn.Module.half, nn.Module.double, train_on, replace_layer]
)
def test_a_model_that_is_used_trained_on_or_cast_has_not_been_changed(use: Callable[[nn.Module], object]) -> None:
    assert mark_after(use) is None


def of_seed(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = common(make())
    return {name: each + 0.02 * torch.randn(each.shape, generator=generator) for name, each in tensors.items()}


def load(model: nn.Module, seed: int) -> None:
    with torch.no_grad():
        for name, tensor in common(model).items():
            tensor.copy_(CHECKPOINTS[seed][name])


CHECKPOINTS = {seed: of_seed(seed) for seed in (1, 2)}


def test_replicas_that_load_different_checkpoints_have_different_numbers() -> None:
    one, same, other = (mark_after(partial(load, seed=seed)) for seed in (1, 1, 2))
    assert one is not None
    assert other is not None
    assert one == same
    assert abs(one - other) > 2e-3


def test_statistics_over_the_same_data_have_one_number_and_those_over_an_own_share_another() -> None:
    one, same, other = (mark_after(partial(update_bn, batches(seed))) for seed in (1, 1, 2))
    assert one is not None
    assert other is not None
    assert one == same
    assert abs(one - other) > 2e-3


def test_a_model_that_is_deleted_at_the_end_of_a_function_is_looked_at_before() -> None:
    noted = list[float]()

    def main(*, is_changed: bool) -> None:
        model = make()
        FinalModelCheck(model, common(model), noted.append)
        if is_changed:
            update_bn(batches(1), model)

    main(is_changed=False)
    assert noted == []
    main(is_changed=True)
    assert len(noted) == 1


def test_a_model_that_the_garbage_collector_deletes_is_looked_at_before() -> None:
    noted = list[float]()
    model: Any = make()
    model.cycle = [model]
    FinalModelCheck(model, common(model), noted.append)
    update_bn(batches(1), model)
    del model
    gc.collect()
    assert len(noted) == 1


def test_only_small_tensors_are_kept_in_memory_until_the_model_is_deleted() -> None:
    model, freed = nn.Sequential(nn.Linear(2000, 1000), nn.Linear(1000, 2)), list[str]()
    for name, tensor in common(model).items():
        finalize(tensor, freed.append, name)
    del tensor
    at_end = FinalModelCheck(model, common(model), lambda _: None)
    model[0] = model[1] = nn.Identity()
    assert freed == ["0.weight"]
    del model
    gc.collect()
    assert sorted(freed) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    at_end.look()


def test_nothing_keeps_the_model_in_memory() -> None:
    freed = list[None]()

    class Model(nn.Linear):
        def __del__(self) -> None:
            freed.append(None)

    model = Model(2, 2)
    at_end = FinalModelCheck(model, common(model), lambda _: None)
    del model
    gc.collect()
    assert len(freed) == 1
    at_end.look()


def test_a_second_diloco_on_the_model_ends_the_look_at_it() -> None:
    def change(model: nn.Module) -> None:
        load(model, 1)
        drop_checks_of(model)

    assert mark_after(change) is None
