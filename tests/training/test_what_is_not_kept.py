"""Failed saves are logged, large states are stored in parts, and an unreadable claim belongs to another process."""

from __future__ import annotations

import logging
from time import monotonic
from typing import Any

import numpy as np
import pytest
import torch
from support.patience import lasting
from support.training import PLAIN, leave, next_process, nudge, place
from torch import nn

from diloco import attached_state
from diloco.attached_state import AttachedState
from diloco.outer import open_diloco
from diloco.rendezvous.claims import claim
from diloco.rendezvous.envelope import UNSIGNED
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.membership import Identity
from diloco.rendezvous.phase import RoundPlan
from diloco.rendezvous.retrying_store import RetryingStore
from diloco.rendezvous.round import Limits
from executors.errors import UnwritableStoreError
from executors.store import Data, MemoryStore

KEYS = Keys("test", "main")


class Full(MemoryStore):
    """A store that accepts no object of some kind."""

    refused = "/own/"

    def put(self, key: str, data: Data) -> None:
        if self.refused in key and "/part/0/" not in key:
            raise UnwritableStoreError("No space left on device", key=key)
        super().put(key, data)


class FullOfParts(Full):
    refused = "/part/"


class State:
    """Three arrays and another value."""

    def __init__(self, fill: float) -> None:
        self.values = {str(n): torch.full((100,), fill + n) for n in range(3)}

    def state_dict(self) -> dict[str, object]:
        return {"values": self.values, "number": 7}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.values = state["values"]  # type: ignore[assignment]


class Projector:
    """An object that some optimizers keep for each parameter, from their first step on."""


class Quantized(torch.Tensor):
    """A tensor that wraps others, like those of 8-bit optimizers."""

    @staticmethod
    def __new__(cls) -> Quantized:
        return torch.Tensor._make_wrapper_subclass(cls, (3,), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Quantized:
        return cls()  # the result of each operation


class Unfolding(State):
    """Has a state that later contains a value which is neither a tensor nor JSON."""

    more: object = None

    def state_dict(self) -> dict[str, object]:
        return {**super().state_dict(), "more": self.more}


def attached(store: MemoryStore, attempt: int, member: int = 0) -> AttachedState:
    patient, me = RetryingStore(store, clock=monotonic, tolerance=lasting(15.0)), Identity(0, 1, attempt, "n")
    return AttachedState(patient, KEYS, me, lambda job: job(), RoundPlan(), UNSIGNED, member=member)


@pytest.mark.parametrize(("member", "n_lines"), [(0, 1), (1, 0)])
def test_one_of_several_members_reports_that_the_run_continued_without_them(
    member: int, n_lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    found = attached(MemoryStore(), 1, member)
    found.attach("state", State(1.0), 0)
    found.follow(RoundPlan().steps_per_entry, 0)
    assert len([line for line in caplog.messages if "continued at step" in line]) == n_lines


def test_large_attached_state_is_saved_in_parts_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OWN_PART_BYTES", "PART_BYTES"):
        monkeypatch.setattr(attached_state, name, 500)
    store = MemoryStore()
    first = attached(store, 0)
    first.attach("state", State(1.0), 0)
    first.keep(4, [torch.arange(3.0)], [4])
    names = sorted(entry.key.rpartition("/")[2] for entry in store.list(KEYS.own_state(0)))
    assert names == ["record", *(f"tensors.{n}.safetensors" for n in (1, 2, 3)), "tensors.safetensors"]
    state = State(9.0)
    again = attached(store, 1)
    assert again.kept is not None
    assert again.kept.progress([3])[0].tolist() == [0.0, 1.0, 2.0]
    again.attach("state", state, 0)
    assert [values[0].item() for values in state.values.values()] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("shape", [(1000,), (250, 4), (2, 500)])
def test_live_work_and_states_that_are_larger_than_a_part_are_kept_in_parts(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OWN_PART_BYTES", "PART_BYTES"):
        monkeypatch.setattr(attached_state, name, 2000)
    store, large = MemoryStore(), State(1.0)
    large.values["0"] = torch.arange(1000.0).view(shape)
    first = attached(store, 0)
    first.attach("state", large, 0)
    first.keep(4, [torch.arange(1000.0), torch.ones(3)], [4, 4])
    sizes = [entry.size_bytes for entry in store.list(KEYS.own_state(0))]
    assert len(sizes) > 4
    assert max(sizes) < 2000 + 400  # 2000 bytes of tensors, and a header
    again, state = attached(store, 1), State(9.0)
    assert again.kept is not None
    assert again.kept.names() == {"state"}
    assert [part.tolist() for part in again.kept.progress([1000, 3])] == [list(range(1000)), [1.0, 1.0, 1.0]]
    again.attach("state", state, 0)
    assert all(torch.equal(state.values[name], values) for name, values in large.values.items())


def test_a_part_that_is_missing_or_damaged_means_the_record_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OWN_PART_BYTES", "PART_BYTES"):
        monkeypatch.setattr(attached_state, name, 500)
    for rotten in (None, b"?"):
        store = MemoryStore()
        first = attached(store, 0)
        first.attach("state", State(1.0), 0)
        for position in (4, 8):
            first.keep(position, [], [position])
        if rotten is None:
            store.delete(KEYS.own_state_tensors(0, 8, 0, 2))
        else:
            store.put(KEYS.own_state_tensors(0, 8, 0, 2), rotten)
        kept = attached(store, 1).kept
        assert kept is not None
        assert kept.position == 4


def test_attached_state_that_cannot_be_saved_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    kept = attached(Full(), 0)
    kept.attach("state", State(1.0), 0)
    kept.keep(4, [], [4])
    assert "rank 0: attached state could not be stored after round 4: No space left on device" in caplog.text


@pytest.mark.parametrize(("more", "kind"), [(Projector(), "Projector"), (Quantized(), "Quantized of torch.float32")])
def test_a_state_that_becomes_more_than_tensors_is_a_warning_and_training_continues(
    more: object, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    store, unfolding = MemoryStore(), Unfolding(1.0)
    first = attached(store, 0)
    first.attach("optimizer", unfolding, 0)
    first.attach("data", State(5.0), 0)
    unfolding.more = more
    for position in (4, 8):
        first.keep(position, [torch.ones(3)], [position])
    (warning,) = caplog.messages
    assert warning.startswith(f"rank 0: 'optimizer' is not saved: attached/optimizer['more'] is a {kind}, which")
    again, data, optimizer = attached(store, 1), State(0.0), State(0.0)
    assert again.kept is not None
    assert (again.kept.position, again.kept.progress([3])[0].tolist()) == (8, [1.0, 1.0, 1.0])
    again.attach("optimizer", optimizer, 0)
    again.attach("data", data, 0)
    assert [state.values["0"][0].item() for state in (optimizer, data)] == [0.0, 5.0]


def test_a_snapshot_that_cannot_be_kept_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    next_process()
    model = nn.Linear(4, 4)
    with open_diloco(
        model, inner_steps=1, snapshot_every=2, limits=Limits(small_bytes=0), **PLAIN, **place(FullOfParts())
    ) as diloco:
        for _ in range(4):
            nudge(model, 0.1)
            diloco.step()
            diloco._workers.uploads.finish()
    assert "Rank 0 could not store the snapshot after round 2: No space left on device" in caplog.text


@pytest.mark.parametrize("data", [b"", b"{", b'{"nonce": ', np.zeros(9, np.uint8).tobytes()])
def test_a_claim_that_cannot_be_read_is_another_users(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    def pause() -> None:
        assert caplog.text.count("\n") < 9

    caplog.set_level(logging.WARNING)
    for rank, found in ((None, (5, 0)), (4, (4, 1))):
        store = MemoryStore()
        store.put(KEYS.claim(4, 0), data)
        patient = RetryingStore(store, clock=monotonic, tolerance=lasting(15.0))
        me = claim(patient, KEYS, rank, 4, "mine", pause)
        assert (me.rank, me.attempt) == found
    assert "replicas/0004/0/started.json in memory:// cannot be read as a claim" in caplog.text


def test_a_checkpoint_from_before_the_first_round_of_a_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    next_process()
    model = nn.Linear(2, 2)
    diloco = open_diloco(model, inner_steps=1, **PLAIN, **place())
    state = diloco.state_dict()
    for _ in range(3):
        diloco.step()
    monkeypatch.setattr(type(diloco._training_side.runner.replayer), "first", 2)
    with pytest.raises(ValueError, match="it is of round 0, and the run began at 2 and is at 3"):
        diloco.load_state_dict(state)
    leave(diloco)
