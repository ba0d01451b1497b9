"""A replica's share of a data set: each item is in exactly one share, for every kind of data set."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import pickle
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

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
    def __init__(self, n: int = N) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


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


def hf_map(n: int = N) -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict({"x": list(range(n))})


def hf_stream(n_shards: int) -> Any:
    return hf_map().to_iterable_dataset(num_shards=n_shards)


def hf_items(share: Any) -> list[int]:
    return [item["x"] for item in share]


DATA_SETS: dict[str, tuple[Callable[[], Any], Callable[[Any], list[int]]]] = {
    "list": (lambda: list(range(N)), plain),
    "range": (lambda: range(N), plain),
    "tuple": (lambda: tuple(range(N)), plain),
    "deque, which cannot be sliced": (lambda: deque(range(N)), plain),
    "array": (lambda: np.arange(N), plain),
    "array of Python": (lambda: array("i", range(N)), plain),
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
    assert all(joined), "a joined replica gets items, although a split by rank would give it none"
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
    """A data set of an epoch that has a length."""


class StreamOfAnEpoch(OfAnEpoch, Stream):
    """A data set of an epoch without a length."""


@pytest.mark.parametrize("kind", [SquaresOfAnEpoch, StreamOfAnEpoch])
def test_a_share_hears_of_the_epoch_as_its_data_set_does(kind: type[Any]) -> None:
    share = replica(0, 2).shard(kind())
    for each in (share, pickle.loads(pickle.dumps(share))):
        each.set_epoch(3)  # accelerate calls this method if it exists
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
def test_a_data_set_that_cannot_be_split_is_refused(dataset: Any, message: str) -> None:
    for world_size in (1, 2):
        with pytest.raises(TypeError) as caught:
            replica(0, world_size).shard(dataset)
        assert str(caught.value) == f"shard() takes a data set, {message}."


def test_splits_of_datasets_are_named_where_one_of_them_is_meant() -> None:
    splits = pytest.importorskip("datasets").DatasetDict({"train": hf_map(), "test": hf_map()})
    with pytest.raises(TypeError, match="got a DatasetDict of 'train', 'test': shard one of these"):
        replica(0, 2).shard(splits)


STREAMS_OF_DATASETS = ("datasets.IterableDataset", "datasets.IterableDataset of as many shards")
COUNTED = [kind for kind in DATA_SETS if kind not in STREAMS_OF_DATASETS]


@pytest.mark.parametrize("kind", COUNTED)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_equal_shares_have_the_same_number_of_items_and_no_item_in_common(kind: str, world_size: int) -> None:
    make, items = DATA_SETS[kind]
    found = [items(replica(rank, world_size).shard(make(), equal=True)) for rank in range(world_size)]
    assert {len(each) for each in found} == {N // world_size}
    everything = [item for each in found for item in each]
    assert len(set(everything)) == len(everything)
    assert set(everything) <= set(range(N))


@pytest.mark.parametrize("kind", COUNTED)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_an_added_replica_gets_the_same_number_of_items_as_the_others_and_none_twice(
    kind: str, world_size: int
) -> None:
    make, items = DATA_SETS[kind]
    for rank in (world_size, world_size + 1, world_size + 7):
        found = items(replica(rank, world_size).shard(make(), equal=True))
        assert len(found) == len(set(found)) == N // world_size


@pytest.mark.parametrize(
    "make", [lambda n: range(n), lambda n: Lines(n), lambda n: hf_map(n)], ids=["slice", "stream", "hf"]
)
def test_no_two_replicas_have_the_same_equal_share_also_if_some_were_added(make: Callable[[int], Any]) -> None:
    for world_size in (2, 4):
        shares = [replica(rank, world_size).shard(make(1000), equal=True) for rank in range(world_size + 2)]
        assert len({str(list(share)) for share in shares}) == len(shares)


@pytest.mark.parametrize("kind", COUNTED)
def test_an_equal_share_goes_to_spawned_workers(kind: str) -> None:
    make, items = DATA_SETS[kind]
    there = pickle.loads(pickle.dumps(replica(1, 2).shard(make(), equal=True)))
    assert items(there) == items(replica(1, 2).shard(make(), equal=True))


def test_loaders_of_equal_shares_have_the_same_number_of_batches() -> None:
    for batch_size in range(1, N):
        loaders = [DataLoader(replica(rank, 2).shard(Squares(), equal=True), batch_size) for rank in (0, 1, 5)]
        assert len({len(loader) for loader in loaders}) == 1


def test_equal_shares_of_a_stream_of_datasets_are_refused_with_the_remedy() -> None:
    for n_shards in (3, 4):
        with pytest.raises(
            TypeError, match=r"equal=True\) cannot split a stream of `datasets`.*give DiLoCo the same total_s"
        ):
            replica(0, 2).shard(hf_stream(n_shards), equal=True)


def test_each_replica_refuses_equal_shares_without_items_and_not_only_the_last() -> None:
    for rank in range(3):
        with pytest.raises(
            ValueError, match=r"A data set of 2 items has none for 3 equal shares: use fewer replicas\."
        ):
            replica(rank, 3).shard([1, 2], equal=True)
    with pytest.raises(TypeError, match="equal=True or equal=False, got equal=2"):
        replica(0, 3).shard([1, 2, 3], equal=cast(bool, 2))


def test_a_pickled_iterator_continues_at_its_position() -> None:
    for equal in (False, True):
        share = replica(1, 3).shard(iter(range(N)), equal=equal)
        assert [next(share), next(share)] == [1, 4]
        assert list(pickle.loads(pickle.dumps(share))) == list(share) == [7, 10][: 1 if equal else 2]


def test_the_share_of_a_stream_with_a_length_has_its_own_length() -> None:
    for rank, size in ((0, 6), (1, 5)):
        share = replica(rank, 2).shard(StreamWithLength())
        assert len(share) == len(plain(share)) == size
        assert len(DataLoader(share, batch_size=2)) == 3
    assert not hasattr(replica(0, 2).shard(Stream()), "__len__")


class Pictures(Dataset[int]):
    """A data set like those of torchvision."""

    def __init__(self) -> None:
        self.classes = ["cat", "dog"]
        self.transform: Callable[[int], int] | None = None
        self.targets = [number % 2 for number in range(N)]
        self.tensors = (torch.arange(N), torch.arange(N))
        self.encodings = {"input_ids": [[1]] * N}
        self.inside = Squares()
        self.n_batches = 0

    def __len__(self) -> int:
        return N

    def __getitem__(self, at: int) -> int:
        return at if self.transform is None else self.transform(at)

    def __getitems__(self, indices: list[int]) -> list[int]:
        self.n_batches += 1
        return [self[index] for index in indices]

    @staticmethod
    def collate_fn(items: list[int]) -> tuple[int, ...]:
        return tuple(items)


def negative(item: int) -> int:
    return -item


def test_a_share_has_the_attributes_of_its_data_set() -> None:
    share = replica(1, 2).shard(Pictures())
    assert share.classes == ["cat", "dog"]
    assert share.collate_fn([1, 2]) == (1, 2)
    assert share.inside is share.dataset.inside, "the attribute of the data set is forwarded unchanged"
    assert hasattr(share, "transform")
    assert not hasattr(share, "features")
    with pytest.raises(AttributeError, match="'Pictures' object has no attribute 'features'"):
        _ = share.features
    assert {"classes", "collate_fn", "dataset", "indices"} <= set(dir(share))


def test_a_transform_that_is_set_on_a_share_transforms_its_items() -> None:
    share = replica(1, 2).shard(Pictures())
    share.transform = negative
    assert plain(share) == [-1, -3, -5, -7, -9]
    del share.transform
    assert not hasattr(share.dataset, "transform")


@pytest.mark.parametrize("name", ["targets", "tensors", "encodings"])
def test_a_list_with_a_value_for_each_item_of_the_data_set_is_not_available_from_the_share(name: str) -> None:
    share = replica(1, 2).shard(Pictures())
    assert not hasattr(share, name)
    with pytest.raises(AttributeError, match=rf"\[share\.dataset\.{name}\[i\] for i in share\.indices\]"):
        getattr(share, name)
    with pytest.raises(AttributeError, match=rf"Set share\.dataset\.{name} to values for all of them"):
        setattr(share, name, [0] * len(share))
    assert [share.dataset.targets[i] for i in share.indices] == [1] * 5


def test_a_position_in_a_whole_stream_is_not_taken_for_that_of_a_share() -> None:
    class WithPosition(Stream):
        def state_dict(self) -> dict[str, int]:
            return {}

    assert not hasattr(replica(0, 2).shard(WithPosition()), "state_dict")
    assert not hasattr(replica(0, 2).shard(WithPosition()), "load_state_dict")


def test_a_share_is_a_data_set_of_torch_if_its_data_set_is() -> None:
    assert isinstance(replica(0, 2).shard(Pictures()), Dataset)
    assert not isinstance(replica(0, 2).shard(Pictures()), IterableDataset)
    assert isinstance(replica(0, 2).shard(Stream()), IterableDataset)
    assert len(replica(0, 2).shard(Squares()) + replica(1, 2).shard(Squares())) == N


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda share: pickle.loads(pickle.dumps(share))])
def test_a_copy_of_a_share_has_the_same_items_and_attributes(copied: Callable[[Any], Any]) -> None:
    share = replica(1, 2).shard(Pictures())
    share.transform = negative
    again = copied(share)
    assert (plain(again), again.classes) == (plain(share), share.classes)
    again.set_epoch = print  # a trainer sets this attribute, which stays on the share
    assert "set_epoch" not in vars(again.dataset)


def test_an_unpickled_share_without_a_data_set_does_not_search_attributes_forever() -> None:
    empty = object.__new__(type(replica(1, 2).shard(Pictures())))
    assert not hasattr(empty, "classes")  # forwarding the name without a data set would be a RecursionError
    assert not hasattr(empty, "dataset")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_loader_see_attributes_that_were_set_on_a_share(method: str) -> None:
    share = replica(1, 2).shard(Pictures())
    share.transform = negative
    context = multiprocessing.get_context(method)
    loader = DataLoader(
        share, batch_size=2, num_workers=1, collate_fn=share.collate_fn, multiprocessing_context=context
    )
    assert list(loader) == [(-1, -3), (-5, -7), (-9,)]
    del loader
    # Frees the loader's semaphores. The resource tracker unlinks those that are left when it ends, and later their
    # owner would not find them.
    gc.collect()
    # The resource tracker of "spawn" lives as long as this process. A fixture would report it as left over.
    if method == "spawn":
        cast(Any, resource_tracker)._resource_tracker._stop()


def test_a_loader_fetches_a_whole_batch_of_a_share_at_once() -> None:
    dataset = Pictures()
    assert list(DataLoader(replica(1, 2).shard(dataset), 2, collate_fn=tuple)) == [(1, 3), (5, 7), (9,)]
    assert dataset.n_batches == 3
    assert replica(1, 2).shard(Squares()).__getitems__([0, 4]) == [1, 9]


def test_a_slice_or_a_list_of_numbers_gives_the_same_items_as_the_data_set() -> None:
    share = replica(1, 2).shard(TensorDataset(torch.arange(N)))
    for at, there in (
        (slice(1, 3), [3, 5]),
        (slice(None), [1, 3, 5, 7, 9]),
        (slice(-2, None), [7, 9]),
        (slice(4, 2), []),
        ([0, -1], [1, 9]),
        (np.array([2]), [5]),
        (torch.tensor([2, 0]), [5, 1]),
    ):
        assert share[at][0].tolist() == there
    assert [share[at][0].item() for at in (0, -1, np.int64(2), torch.tensor(3))] == [1, 9, 5, 7]
    everything = replica(0, 2).shard(NegativeSteps())
    assert everything[::-1] == [10, 8, 6, 4, 2, 0]
    assert everything[:0:-1] == [10, 8, 6, 4, 2]
    assert everything[5:5:-1] == []
    sampler = BatchSampler(SequentialSampler(range(5)), 3, drop_last=False)
    batches = [batch.tolist() for (batch,) in DataLoader(share, sampler=sampler, batch_size=None)]
    assert batches == [[1, 3, 5], [7, 9]]


class NegativeSteps(Sequence[int]):
    """A user's own sequence, with an attribute."""

    classes = ("cat", "dog")

    def __len__(self) -> int:
        return N

    def __getitem__(self, at: Any) -> Any:
        return list(range(N))[at]


def test_a_sequence_of_the_user_keeps_its_attributes() -> None:
    class Labelled(list[int]):
        classes = ("cat", "dog")

    for dataset in (NegativeSteps(), Labelled(range(N))):
        share: Any = replica(1, 2).shard(dataset)
        assert (share.classes, plain(share)) == (("cat", "dog"), [1, 3, 5, 7, 9])


@pytest.mark.parametrize("at", ["text", 1.5, [True, False], np.array([True, False]), None])
def test_an_index_that_names_no_item_of_a_share_is_refused(at: Any) -> None:
    with pytest.raises(TypeError, match="A share takes"):
        replica(1, 2).shard(Squares())[at]
    with pytest.raises(IndexError):
        replica(1, 2).shard(Squares())[5]


def test_a_table_is_split_by_its_rows_and_not_by_its_labels() -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"x": range(N)}, index=[float(number) for number in reversed(range(N))])
    shares = [replica(rank, 2).shard(table) for rank in (0, 1)]
    assert [list(share["x"]) for share in shares] == [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9]]


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
