"""Checkpoints that are saved and loaded out of phase, while a background round adopts a seal."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from support.training import PLAIN, leave, next_process, nudge, place
from torch import nn

from diloco import DiLoCo
from diloco.rendezvous.phase import Phase
from executors.store import MemoryStore


def zeros() -> nn.Linear:
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


class Late:
    """Two replicas. The second is out of phase, and looks for the seal of round 3 while it trains."""

    def __init__(self) -> None:
        store = MemoryStore()
        self.first, self.model = zeros(), zeros()
        options = {"inner_steps": 1, "allow_no_rounds": True, **PLAIN}
        self.ahead = DiLoCo(self.first, grace_s=0.0, **options, **place(store, world_size=2))
        for _ in range(2):
            self.has_a_round()
        self.late = DiLoCo(self.model, background=True, **options, **place(store, rank=1, world_size=2))
        assert self.late._training_side.is_out_of_phase
        self.late.state_dict()  # merges the work that the late replica sent early, if a round has counted it

    def has_a_round(self) -> None:
        """Let the first replica have a round by itself."""
        nudge(self.first, 1.0)
        self.ahead.step()

    def while_it_adopts(self, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
        """Call a function in the training thread of the second replica while its round thread adopts a seal.

        The rounds continue when the training waits.
        """
        adopts, may_go_on = threading.Event(), threading.Event()
        runner, scheduler = self.late._training_side.runner, self.late._training_side._scheduler
        wait_for_mean, until = runner._wait_for_mean, scheduler.until

        def slowly() -> object:
            adopts.set()
            may_go_on.wait()
            return wait_for_mean()

        def waiting(done: Callable[[], bool]) -> None:
            may_go_on.set()
            until(done)

        monkeypatch.setattr(runner, "_wait_for_mean", slowly)
        self.has_a_round()
        adopts.wait()
        monkeypatch.setattr(scheduler, "until", waiting)
        act()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Late]:
    next_process()
    monkeypatch.setattr(Phase, "has_one_step", property(lambda _: False))  # otherwise it waits for seals
    replicas = Late()
    yield replicas
    leave(replicas.late)
    leave(replicas.ahead)


def test_a_state_that_is_taken_while_a_seal_is_adopted_belongs_to_its_rounds(
    late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = []
    late.while_it_adopts(monkeypatch, lambda: states.append(late.late.state_dict()))
    (state,) = states
    anchors = {2: 2.0, 3: late.ahead.anchor()["weight"][0, 0].item()}
    assert state["anchor"]["weight"].tolist() == [[anchors[state["rounds"]]] * 4]


def test_a_checkpoint_may_be_loaded_while_a_seal_is_adopted(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    state, live = late.late.state_dict(), late.model.weight.detach().clone()
    assert state["rounds"] == 2

    def load() -> None:
        with torch.no_grad():
            late.model.weight.copy_(live)
        late.late.load_state_dict(state)

    late.while_it_adopts(monkeypatch, load)
    assert late.late.rounds == 3
    assert torch.equal(late.late.anchor()["weight"], late.ahead.anchor()["weight"])


def test_a_checkpoint_of_another_model_is_refused_and_the_rounds_continue(late: Late) -> None:
    state = late.late.state_dict()
    state["anchor"] = {"weight": torch.zeros(2, 2)}
    with pytest.raises(ValueError, match="belongs to a model with other parameters"):
        late.late.load_state_dict(state)
    nudge(late.model, 1.0)
    late.late.step()
