"""Ranks that were added to a run: together with joiners, and whether or not they ever start."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from support.patience import ENDLESS
from support.training import PLAIN, next_process, place
from torch import nn

from diloco import DiLoCo
from diloco.errors import ContributionError
from diloco.rendezvous.claims import claim
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.membership import Identity, Membership
from diloco.rendezvous.retrying_store import RetryingStore
from diloco.testing import run_replicas
from diloco.trainers.trainer_link import TrainerLink, location_of, step_of_begin
from executors.attempt import replica_key
from executors.store import MemoryStore
from executors.store.added_ranks import added_key

KEYS = Keys("test", "main")


def patient(store: MemoryStore) -> RetryingStore:
    return RetryingStore(store, clock=lambda: 0.0, tolerance=ENDLESS)


def add(store: MemoryStore, number: int, *ranks: int) -> None:
    store.put(added_key("test", number), json.dumps({"ranks": ranks, "nonce": "n"}).encode())


def join(store: MemoryStore) -> int:
    return claim(patient(store), KEYS, None, 1, "joiner", lambda: None).rank


def test_an_added_rank_that_never_starts_hides_no_other_and_is_taken_by_no_joiner() -> None:
    store = MemoryStore()
    members = Membership(patient(store), KEYS, Identity(0, 1, 0, "me"), lambda: 0.0)
    add(store, 0, 1, 2)
    store.put(added_key("test", 1), b"no record")
    add(store, 2, 4)
    assert join(store) == 3
    for _ in range(3):  # an unreadable record is read again before it is ignored
        members.look_for_joiners()
    assert members.claimed == {0, 3}
    for rank in (2, 5):
        store.put(replica_key("test", rank, 0, "started.json"), b'{"nonce": "another"}')
    members.look_for_joiners()
    assert members.claimed == {0, 2, 3, 5}


@pytest.mark.parametrize("is_before", [True, False])
def test_a_joiner_leaves_a_rank_that_is_added_as_it_claims_it(is_before: bool) -> None:
    class Meanwhile(MemoryStore):
        def put_if_absent(self, key: str, data: Any) -> bool:
            is_claim = key == replica_key("test", 1, 0, "started.json")
            if is_claim and is_before:
                add(self, 0, 1)
            done = super().put_if_absent(key, data)
            if is_claim and not is_before:
                add(self, 0, 1)
            return done

    assert join(Meanwhile()) == 2


def test_an_added_rank_joins_and_ends_with_the_anchor_of_all() -> None:
    store = MemoryStore()
    add(store, 0, 2, 3)
    joined, go_on = threading.Event(), threading.Event()

    def body(where: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        comes_later = where["rank"] == 2
        if comes_later:
            go_on.wait()
        with DiLoCo(
            nn.Linear(2, 2),
            inner_steps=1,
            total_steps=100_000,
            snapshot_every=2,
            **{**where, "world_size": 2, "rank": 3 if comes_later else where["rank"]},
        ) as diloco:
            if comes_later:
                joined.set()
            while diloco.rounds < 3:
                diloco.step()
            go_on.set()
            joined.wait()
            ranks = set[int]()
            while not diloco.is_over:  # on a slow machine, the others have many rounds before the late replica is in
                ranks.update(getattr(diloco.step(), "ranks", ()))
                if ranks == {0, 1, 3}:
                    diloco.stop()
            assert ranks == {0, 1, 3}
            return diloco.anchor()

    one, two, late = run_replicas(3, body, store=store)
    for name, value in one.items():
        assert torch.equal(value, two[name])
        assert torch.equal(value, late[name])


@pytest.mark.parametrize("rank", [1, "join"])
def test_a_rank_that_was_added_joins_a_run_that_began_from_a_checkpoint(rank: Any) -> None:
    """The added rank's trainer has no checkpoint and counts from 0. So the run supplies the step at which it began."""
    store = MemoryStore()
    add(store, 0, 1)
    options: dict[str, Any] = {"inner_steps": 4, "allow_no_rounds": True, **PLAIN}
    first = TrainerLink(nn.Linear(2, 2), 40, {**options, **place(store)}, begun_at=8)
    added = TrainerLink(nn.Linear(2, 2), 40, {**options, **place(store), "rank": rank})
    assert (added.begun_at, added.total_steps, added.trainer_step) == (8, 32, 8)
    for each in (added, first):
        each.diloco.close()


@pytest.mark.parametrize("rank", [1, "join"])
def test_a_rank_that_was_added_before_the_run_began_waits_for_its_first_step(rank: Any) -> None:
    store = MemoryStore()
    add(store, 0, 1)
    options: dict[str, Any] = {"inner_steps": 4, "allow_no_rounds": True, **PLAIN}

    def body(where: Mapping[str, Any]) -> int:
        if where["rank"] == 0:
            threading.Event().wait(0.5)  # stands for the time to load a checkpoint
        place_ = {**where, "world_size": 1, "rank": rank if where["rank"] else 0}
        each = TrainerLink(nn.Linear(2, 2), 40, {**options, **place_}, begun_at=0 if where["rank"] else 8)
        each.diloco.close()
        return each.begun_at

    assert run_replicas(2, body, store=store) == [8, 8]


@pytest.mark.parametrize("is_aborted", [True, False])
def test_a_rank_that_was_added_to_a_run_that_never_begins_does_not_wait_for_ever(is_aborted: bool) -> None:
    store = MemoryStore()
    if is_aborted:
        store.put(KEYS.abort(), b"rank 0: it is over")
    options = {"inner_steps": 4, "round_timeout_s": 1800.0 if is_aborted else 0.1, **place(store), "rank": 1}
    assert step_of_begin(location_of(options), options, waits=True) is None


def test_only_a_replica_that_plans_another_number_of_steps_gets_the_advice_on_shares() -> None:
    # In the last case, the numbers of rounds between two snapshots differ, too: 1 and 2.
    for begun_at, total, planned, is_told in ((0, 40, 40, False), (8, 48, 40, True), (8, 168, 148, True)):
        next_process()
        store = MemoryStore()
        options: dict[str, Any] = {"inner_steps": 4, "allow_no_rounds": True, **PLAIN}
        first = TrainerLink(nn.Linear(2, 2), planned, {**options, **place(store, 0, 2)}, begun_at=8)
        with pytest.raises(ContributionError) as caught:
            TrainerLink(nn.Linear(2, 2), total, {**options, **place(store, 1, 2)}, begun_at=begun_at)
        assert bool(getattr(caught.value, "__notes__", [])) is is_told, caught.value
        first.diloco.close()
