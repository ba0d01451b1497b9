"""The objects that a run of real replicas has in its store: never more than the protocol allows, after each write."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from diloco.outer import open_diloco
from diloco.rendezvous.frames import head_bytes
from diloco.rendezvous.round import Limits
from diloco.testing import run_replicas
from executors.store import Data, MemoryStore

N, EVERY, ROUNDS, BLOCK_ELEMENTS = 3, 4, 60, 16
SIZE = 48
KINDS = ("contribution", "mean", "part", "own", "seal", "snapshot", "rest")


class Counting(MemoryStore):
    """Counts the most objects and bytes of each kind that the store has ever had at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most: Counter[str] = Counter()
        self.most_bytes: Counter[str] = Counter()
        self._counting = threading.Lock()

    def put(self, key: str, data: Data) -> None:
        super().put(key, data)
        self._count()

    def put_if_absent(self, key: str, data: Data) -> bool:
        created = super().put_if_absent(key, data)
        self._count()
        return created

    def _count(self) -> None:
        objects: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        with self._counting:
            for entry in self.list("test/diloco/"):
                (kind,) = re.findall(rf"/({'|'.join(KINDS)}|bye|offer)/", entry.key)
                objects[kind] += 1
                sizes[kind] += entry.size_bytes
            self.most |= objects
            self.most_bytes |= sizes


@pytest.mark.parametrize("n_fragments", [1, 2])
@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.filterwarnings("ignore:.* in no average")  # from staggered fragments without a planned end
def test_a_run_of_sixty_rounds_never_has_more_objects_than_the_protocol_allows(sharded: bool, n_fragments: int) -> None:
    store = Counting()

    def body(where: Mapping[str, Any]) -> int:
        model = nn.Sequential(nn.Linear(24, 1, bias=False), nn.Linear(1, 24, bias=False))
        model.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        limits = Limits(small_bytes=0 if sharded else 1 << 20, block_elements=BLOCK_ELEMENTS)
        options: dict[str, Any] = {"inner_steps": n_fragments, "fragments": n_fragments, "snapshot_every": EVERY}
        with open_diloco(model, **options, **where, limits=limits) as diloco:
            diloco.attach_state("data", torch.Generator())
            for _ in range(ROUNDS):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(0.01 * (1 + where["rank"]))
                    model.get_buffer("steps").add_(1)
                diloco.step()
                # rounds take no time here, so saved state is stored before the next round
                diloco._workers.uploads.finish()
            return diloco.rounds

    assert run_replicas(N, body, store=store) == [ROUNDS] * N
    blocks = -(-SIZE // n_fragments // BLOCK_ELEMENTS)
    shards = min(N, blocks) if sharded else 0
    most = store.most
    # the objects of one round, and of the next one until every replica has adopted the first
    assert 0 < most["contribution"] <= 2 * N
    assert most["mean"] <= 3 * EVERY * shards
    assert bool(most["mean"]) is sharded
    assert 0 < most["part"] <= 3  # a snapshot is one part here
    # A record and its tensors for each snapshot, and for the last two rounds after which state was saved.
    assert 0 < most["own"] <= 2 * (3 + 2) * N
    assert 1 <= most["offer"] <= N
    assert 2 <= most["rest"] <= 4  # the rest of round 0, and those of the last snapshots
    # Objects that are never deleted: a pointer every `snapshot_every` rounds, and a seal for each round of up to 100
    # bytes per member.
    assert most["seal"] == ROUNDS
    assert ROUNDS // EVERY // 2 <= most["snapshot"] <= ROUNDS // EVERY + 1
    mean_bytes = 0 if sharded else 4 * SIZE // n_fragments
    assert store.most_bytes["seal"] <= ROUNDS * (100 * N + 256 + mean_bytes)
    assert store.most_bytes["contribution"] <= 2 * N * (4 * SIZE // n_fragments + head_bytes(blocks))
