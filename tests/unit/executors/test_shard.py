"""A replica's share of a data set: nobody's item twice, nobody's item left out, whatever the data set is."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from executors.replica import Replica

N = 11


def replica(rank: int, world_size: int, **others: Any) -> Replica:
    return Replica(rank, world_size, **{"run_id": "run", "attempt": 0, "rendezvous": "memory://shard", **others})


class Squares(Dataset[int]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, at: int) -> int:
        return range(N)[at]


class Lines:
    def __iter__(self) -> Iterator[int]:
        return iter(range(N))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(N))


class StreamWithLength(Stream):
    def __len__(self) -> int:
        return N


def loaded(share: Any) -> list[int]:
    """Read a share through a loader of torch."""
    return [int(item) for batch in DataLoader(share, batch_size=2) for item in batch]


def plain(share: Any) -> list[int]:
    return [int(item) for item in share]


def hf_map() -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict({"x": list(range(N))})


def hf_stream(n_shards: int) -> Any:
    return hf_map().to_iterable_dataset(num_shards=n_shards)


def hf_items(share: Any) -> list[int]:
    return [item["x"] for item in share]


DATA_SETS: dict[str, tuple[Callable[[], Any], Callable[[Any], list[int]]]] = {
    "list": (lambda: list(range(N)), plain),
    "range": (lambda: range(N), plain),
    "array": (lambda: np.arange(N), plain),
    "tensor": (lambda: torch.arange(N), plain),
    "torch Dataset": (Squares, loaded),
    "torch Dataset, by index": (Squares, plain),
    "TensorDataset": (lambda: TensorDataset(torch.arange(N)), lambda share: [int(item) for (item,) in share]),
    "torch IterableDataset": (Stream, loaded),
    "torch IterableDataset with a length": (StreamWithLength, loaded),
    "iterable": (Lines, plain),
    "iterator": (lambda: iter(range(N)), plain),
    "datasets.Dataset": (hf_map, hf_items),
    "datasets.IterableDataset": (lambda: hf_stream(3), hf_items),
    "datasets.IterableDataset of as many shards": (lambda: hf_stream(4), hf_items),
}


@pytest.mark.parametrize("kind", DATA_SETS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_item_is_in_one_share_and_a_share_is_there_again_in_the_next_epoch(kind: str, world_size: int) -> None:
    make, items = DATA_SETS[kind]
    shares = [replica(rank, world_size).shard(make()) for rank in range(world_size)]
    found = [items(share) for share in shares]
    assert sorted(item for each in found for item in each) == list(range(N))
    sizes = [len(each) for each in found]
    assert max(sizes) - min(sizes) <= (1 if "as many shards" not in kind else 3)
    if kind != "iterator":
        assert [items(share) for share in shares] == found


@pytest.mark.parametrize("kind", DATA_SETS)
def test_a_replica_that_joined_gets_a_share_too(kind: str) -> None:
    make, items = DATA_SETS[kind]
    joined = [items(replica(rank, 2).shard(make())) for rank in (2, 3)]
    assert all(joined), "an iterable that is split by rank would give it nothing"
    assert joined[0] != joined[1]


@pytest.mark.parametrize("kind", DATA_SETS)
def test_a_share_goes_to_spawned_workers(kind: str) -> None:
    make, items = DATA_SETS[kind]
    there = pickle.loads(pickle.dumps(replica(1, 2).shard(make())))
    assert items(there) == items(replica(1, 2).shard(make()))


class OfAnEpoch:
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class SquaresOfAnEpoch(OfAnEpoch, Squares):
    """One that has a length."""


class StreamOfAnEpoch(OfAnEpoch, Stream):
    """One that has none."""


@pytest.mark.parametrize("kind", [SquaresOfAnEpoch, StreamOfAnEpoch])
def test_a_share_hears_of_the_epoch_as_its_data_set_does(kind: type[Any]) -> None:
    share = replica(0, 2).shard(kind())
    for each in (share, pickle.loads(pickle.dumps(share))):
        each.set_epoch(3)  # as accelerate does, where there is such a method
        assert each.dataset.epoch == 3
    assert not hasattr(replica(0, 2).shard(Stream()), "set_epoch")


def test_a_share_of_fewer_items_than_a_batch_has_takes_is_refused_by_name() -> None:
    for make in (lambda: [1, 2], lambda: TensorDataset(torch.arange(2)), lambda: hf_map().select([0, 1])):
        with pytest.raises(ValueError, match=r"A data set of 2 items has none for share 2 of 3: use fewer replicas\."):
            replica(2, 3).shard(make())


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({"train": [1], "test": [2]}, "got a dict of 'train', 'test': shard one of these"),
        (DataLoader(Squares()), "got a loader: make it of the share, DataLoader(replica.shard(dataset))"),
        ({"a", "b"}, "got a set, which has another order in each replica: sort it"),
        ("corpus.txt", "got a str"),
        (7, "got an int"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(dataset: Any, message: str) -> None:
    for world_size in (1, 2):
        with pytest.raises(TypeError) as caught:
            replica(0, world_size).shard(dataset)
        assert str(caught.value) == f"shard() takes a data set, {message}."


def test_splits_of_datasets_are_named_where_one_of_them_is_meant() -> None:
    splits = pytest.importorskip("datasets").DatasetDict({"train": hf_map(), "test": hf_map()})
    with pytest.raises(TypeError, match="got a DatasetDict of 'train', 'test': shard one of these"):
        replica(0, 2).shard(splits)


def test_a_share_asks_for_the_length_of_its_data_set_once() -> None:
    class Counts(Squares):
        n_asked = 0

        def __len__(self) -> int:
            self.n_asked += 1
            return super().__len__()

    dataset = Counts()
    share = replica(0, 2).shard(dataset)
    before = dataset.n_asked
    assert [share[at] for at in range(2)] == [dataset[0], dataset[2]]
    assert dataset.n_asked == before


def test_a_seed_is_one_attempts_own_and_fits_every_generator() -> None:
    seeds = {replica(rank, 4, run_id=run, attempt=n).seed for rank in range(4) for run in "ab" for n in (0, 1)}
    assert len(seeds) == 16
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert replica(1, 4).seed == replica(1, 4).seed
    np.random.default_rng(max(seeds))
    torch.Generator().manual_seed(max(seeds))
