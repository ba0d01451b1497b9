"""A run that begins with the model and the outer state of another one."""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.training import adam, nudge
from torch import nn
from torch.optim.swa_utils import AveragedModel

from diloco import DiLoCo
from diloco.errors import ContributionError, DiLoCoError
from diloco.rendezvous.extension import check_source
from diloco.trained_model import ModelSource, read_model
from executors.errors import RunNotFoundError
from executors.replica import Replica, set_current_replica
from executors.settings import Settings
from executors.store import MemoryStore
from executors.store.url import address_of

pytestmark = pytest.mark.filterwarnings("ignore:Only .* rounds", "ignore:.* in no average")


@pytest.fixture(autouse=True)
def _no_replica_is_left() -> Iterator[None]:
    yield
    set_current_replica(None)


def model_of(*sizes: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(n, m) for n, m in itertools.pairwise(sizes)))


def begin(
    store: MemoryStore,
    run_id: str,
    model: nn.Module,
    *,
    source: str | None = None,
    step: int | None = None,
    **options: Any,
) -> DiLoCo:
    """Begin a run of one replica, from the run `source` in the same store if one is named."""
    replica = Replica(rank=0, world_size=1, run_id=run_id, attempt=0, rendezvous=store.url)
    address = None if source is None else address_of(store.url, source)
    record = SimpleNamespace(continues=None, key_id=None, settings=Settings(n=1, from_run=address, from_step=step))
    replica.__dict__ |= {"store": store, "record": record, "claimed_nonce": secrets.token_hex(8)}
    store.put(replica.key("started.json"), f'{{"nonce": "{replica.nonce}"}}'.encode())
    set_current_replica(replica)
    return DiLoCo(model, **{"inner_steps": 2, "total_steps": 40, "snapshot_every": 3, **options})


def train(diloco: DiLoCo, model: nn.Module, until: int) -> DiLoCo:
    while diloco.inner_step < until:
        nudge(model, 0.01 * (1 + diloco.inner_step % 5))
        diloco.step()
        diloco._workers.uploads.finish()
    return diloco


def stored(name: str) -> MemoryStore:
    store = MemoryStore.named(f"warm-{name}-{secrets.token_hex(4)}")
    assert isinstance(store, MemoryStore)
    return store


def test_a_run_from_another_run_begins_with_the_newest_anchor_and_momentum_at_step_0() -> None:
    store, model = stored("newest"), model_of(3, 2, 1)
    old = train(begin(store, "old", model), model, 14)
    anchor = old.anchor()
    momentum = [outer.state_dict()["momentum"] for outer in old._model_state.anchor.outer]
    old._close(in_order=False)

    other = model_of(3, 2, 1)
    new = begin(store, "new", other, source="old", total_steps=8, inner_steps=4)
    assert (new.rounds, new.inner_step) == (0, 0)
    assert all(torch.equal(values, anchor[name]) for name, values in new.anchor().items())
    assert all(torch.equal(values, anchor[name]) for name, values in other.state_dict().items())
    for outer, before in zip(new._model_state.anchor.outer, momentum, strict=True):
        assert torch.equal(outer.state_dict()["momentum"], before)
    assert new._settings.warmup == 0, "a ramp would remove the momentum in the first round"
    train(new, other, 8).close()
    assert new.is_over
    assert read_model(ModelSource(store=store, run_id="new")).step == 8
    assert read_model(ModelSource(store=store, run_id="old")).step == 14, "the old run was not changed"


def test_fragments_wires_and_settings_are_the_new_runs_own() -> None:
    store, model = stored("settings"), model_of(3, 2, 2, 1)
    old = train(begin(store, "old", model, fragments=2), model, 13)
    anchor = old.anchor()
    old._close(in_order=False)
    new = begin(store, "new", model_of(3, 2, 2, 1), source="old", fragments=3, inner_steps=3, wire="int8", outer_lr=0.5)
    assert all(torch.equal(values, anchor[name]) for name, values in new.anchor().items())
    new._close(in_order=False)


def test_an_earlier_step_is_taken_and_one_that_is_gone_is_refused() -> None:
    store, model = stored("step"), model_of(3, 1)
    train(begin(store, "old", model), model, 24)._close(in_order=False)
    new = begin(store, "new", model_of(3, 1), source="old", step=21)
    expected = read_model(ModelSource(store=store, run_id="old"), step=21).tensors
    assert all(torch.equal(values, expected[name]) for name, values in new.anchor().items())
    new._close(in_order=False)
    with pytest.raises(DiLoCoError, match="no longer has the state of step 1"):
        begin(store, "newer", model_of(3, 1), source="old", step=1)
    with pytest.raises(ValueError, match=r"no longer has the state of step 1\. The earliest state is of step 12"):
        check_source(store, "old", None, 1)
    check_source(store, "old", None, 20)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (model_of(3, 2, 1), "'0.weight' has shape (1, 3), this model has (2, 3); and 3 more"),
        (nn.ModuleDict({"0": nn.Linear(3, 1), "1": nn.Linear(1, 1)}), "'1.weight' of shape (1, 1) is missing there"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_by_name_before_training(model: nn.Module, says: str) -> None:
    store, old_model = stored("misfit"), model_of(3, 1)
    train(begin(store, "old", old_model), old_model, 4)._close(in_order=False)
    with pytest.raises(ContributionError) as refused:
        begin(store, "new", model, source="old")
    assert f"this model cannot start from run 'old': {says}" in str(refused.value)
    assert not list(store.list("new/diloco/main/snapshot/"))


def test_a_parameter_that_was_trained_and_is_frozen_now_is_refused() -> None:
    store, old_model = stored("frozen"), model_of(3, 2, 1)
    train(begin(store, "old", old_model), old_model, 4)._close(in_order=False)
    model = model_of(3, 2, 1)
    model[0].requires_grad_(False)  # type: ignore[index]
    with pytest.raises(ContributionError, match=r"'0.weight' is trained there and frozen here; and 1 more"):
        begin(store, "new", model, source="old")


def test_a_tensor_that_the_new_model_lacks_is_not_loaded_and_named(caplog: pytest.LogCaptureFixture) -> None:
    store, old_model = stored("less"), model_of(3, 3, 1)
    train(begin(store, "old", old_model), old_model, 4)._close(in_order=False)
    with caplog.at_level(logging.WARNING):
        begin(store, "new", model_of(3, 3), source="old")._close(in_order=False)
    assert "starts from round 2, step 4, of run old, at its own step 0. '1.weight' is not loaded" in caplog.text


def test_a_name_that_the_other_run_does_not_have_is_refused() -> None:
    store, old_model = stored("name"), model_of(3, 1)
    begin(store, "old", old_model)._close(in_order=False)
    with pytest.raises(RunNotFoundError, match=r"no DiLoCo named 'critic'\. It has: main"):
        begin(store, "new", model_of(3, 1), source="old", name="critic")
    with pytest.raises(ValueError, match="has no model to start from"):
        check_source(store, "never", None)


def test_an_ema_is_inherited_if_the_other_run_has_one_and_otherwise_begins_again() -> None:
    def with_ema(run_id: str, **options: Any) -> tuple[DiLoCo, nn.Module, AveragedModel]:
        model = model_of(3, 1)
        diloco = begin(store, run_id, model, **options)
        ema = AveragedModel(model)
        diloco.average_also(ema)
        return diloco, model, ema

    store, plain = stored("ema"), model_of(3, 1)
    train(begin(store, "plain", plain), plain, 4)._close(in_order=False)
    first, model, ema = with_ema("first", source="plain")
    for _ in range(4):
        nudge(model, 0.5)
        ema.update_parameters(model)
        first.step()
    first.close()
    second, _, begun = with_ema("second", source="first")
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(begun.parameters(), ema.parameters(), strict=True))
    assert not torch.equal(begun.get_parameter("module.0.weight"), second.anchor()["0.weight"])
    second._close(in_order=False)


def test_the_state_of_an_outer_optimizer_is_inherited_if_both_runs_have_it() -> None:
    store, old_model = stored("given"), model_of(3, 1)
    old = train(begin(store, "old", old_model, outer_optimizer=adam), old_model, 9)
    digests = [outer.digest() for outer in old._model_state.anchor.outer]
    old._close(in_order=False)
    new = begin(store, "new", model_of(3, 1), source="old", outer_optimizer=adam)
    assert [outer.digest() for outer in new._model_state.anchor.outer] == digests
    new._close(in_order=False)
    plain = begin(store, "plain", model_of(3, 1), source="old")
    assert not any(outer.state_dict()["momentum"].any() for outer in plain._model_state.anchor.outer)
    plain._close(in_order=False)
