"""Selects one replica's share of a data set: of `datasets`, of torch, a list, an array, a table or an iterable.

This module imports no library. If the data set belongs to a library, that library is already loaded.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, cast

from executors.errors import kind_of

SLICED = (list, tuple, range)
"""The types of which a slice has all attributes. A slice of a subclass may lack some."""
POSITION = ("state_dict", "load_state_dict")
"""The methods of a stream's state, which a share does not have. The state counts the items of all shares. Loaders that
find no such methods count the items of the share.
"""
FEW_COLUMNS = 64
GOLDEN = 0.618033988749895
"""The golden ratio, modulo 1. Its multiples, modulo 1, are far from each other, so the windows of added replicas
differ.
"""


class Place(NamedTuple):
    """The number of a share of a data set, and the number of shares."""

    number: int
    of: int
    is_equal: bool = False
    """Whether all shares have the same number of items. Then `number` may be beyond `of`, for an added replica."""

    def indices(self, n_items: int) -> range:
        """Return the indices of the items in this share, for a data set of known length."""
        if not self.is_equal:
            return range(self.number, n_items, self.of)
        size = n_items // self.of
        if self.number < self.of:
            return range(self.number, size * self.of, self.of)
        # An added replica needs the same number of items as the others, so that its planned steps are the same.
        start = int((n_items - size) * (GOLDEN * (self.number - self.of + 1) % 1.0))
        return range(start, start + size)


def share_of(dataset: Any, index: int, of: int, equal: bool = False) -> Any:
    """Return one share of a data set: every `of`th item, from `index` on.

        share_of(["a", "b", "c"], 0, 2)               # ["a", "c"]
        share_of(["a", "b", "c"], 0, 2, equal=True)   # ["a"]

    Args:
        dataset: the data set, as `Replica.shard` takes it.
        index: the number of the share, from 0. With `equal` it may be `of` or more, for an added replica.
        of: the number of shares.
        equal: True if all shares must have the same number of items.

    Raises:
        TypeError: the object is not a data set, or its order differs between replicas, or `equal` is set and its items
            cannot be counted.
        ValueError: the data set has too few items.
    """
    if problem := _problem_of(dataset):
        raise TypeError(f"shard() takes a data set, {problem}.")
    if of == 1:
        return dataset
    place, n_items = Place(index, of, equal), _length_of(dataset)
    if n_items is not None and n_items <= (of - 1 if equal else index):
        share = f"{of} equal shares" if equal else f"share {index} of {of}"
        raise ValueError(f"A data set of {n_items} items has none for {share}: use fewer replicas.")
    if _is_a(dataset, "datasets", "Dataset", "IterableDataset"):
        return _share_of_datasets(dataset, place)
    # An IterableDataset may also have a length and items by number.
    if not _is_a(dataset, "torch.utils.data", "IterableDataset"):
        can_slice = type(dataset) in SLICED or _is_table(dataset)
        if n_items is not None and (can_slice or hasattr(dataset, "__getitem__")):
            return _sliced(dataset, place.indices(n_items)) if can_slice else _like(Share, dataset, place)
        if isinstance(dataset, Iterator):
            return _like(IteratorShare, dataset, place)
    return _like(IterableShare if n_items is None else IterableShareOfKnownLength, dataset, place)


class _Part:
    """A part of a data set. It has the attributes of the data set, and can be pickled for worker processes.

    Attributes are read from the data set and written to it, so `share.transform = …` changes the items. Written to the
    share, they would have no effect, because the data set makes the items. The share has its own `dataset` and
    `indices`, and its own `set_epoch` if a trainer sets one.
    """

    dataset: Any
    _place: Place
    _n_items: int | None
    _OWN = frozenset({"dataset", "indices", "_place", "_n_items", "_to_skip", "_n_groups", "set_epoch"})

    def __init__(self, dataset: Any, place: Place) -> None:
        self.dataset = dataset
        self._place = place
        self._n_items = _length_of(dataset)

    def __reduce__(self) -> tuple[Any, ...]:  # `_like` may have made the class, and then pickle cannot find it
        return share_of, (self.dataset, *self._place)

    def __repr__(self) -> str:
        return f"<share {self._place.number} of {self._place.of} of {self.dataset!r}>"

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.dataset)})

    def __getattr__(self, name: str) -> Any:
        # Python calls this only for attributes that the share itself lacks. Special methods are never forwarded,
        # because most of them would describe the whole data set. While a share is unpickled it has no data set, so a
        # forward would never end.
        if name.startswith("__") or name in _Part._OWN - {"set_epoch"} or "dataset" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self.dataset, name)
        if self._n_items is not None and _is_of_each_item(value, self._n_items):
            raise AttributeError(
                f"{name!r} of the data set has a value for each of its {self._n_items} items, and this share has only "
                f"some of them. Take only those: [share.dataset.{name}[i] for i in share.indices]."
            )
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # An attribute such as `__class__`, which a library may set on the share itself.
        if name in self._OWN or name.startswith("__"):
            object.__setattr__(self, name, value)
            return
        if (n_items := self._n_items) is not None and _is_of_each_item(getattr(self.dataset, name, None), n_items):
            raise AttributeError(
                f"{name!r} of the data set has a value for each of its {n_items} items. Set share.dataset.{name} to "
                "values for all of them, and not only for the items of this share."
            )
        setattr(self.dataset, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self._OWN:
            object.__delattr__(self, name)
        else:
            delattr(self.dataset, name)


class Share(_Part):
    """A share of a data set with a length."""

    def __init__(self, dataset: Any, place: Place) -> None:
        super().__init__(dataset, place)
        assert self._n_items is not None  # for any other type, `share_of` makes a share of a stream
        self.indices = place.indices(self._n_items)

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Any]:
        return (self.dataset[index] for index in self.indices)

    def __getitem__(self, at: Any) -> Any:
        """Return an item of the share. A slice or a list of numbers returns the same type as for the data set."""
        if isinstance(at, slice):
            return self.dataset[_slice_of(self.indices[at])]
        if not getattr(at, "ndim", 0) and hasattr(at, "__index__"):
            return self.dataset[self.indices[operator.index(at)]]
        return self.dataset[self._listed(at)]

    def __getitems__(self, numbers: Iterable[int]) -> Any:
        """Return a batch for a loader of torch, in one call if the data set supports that."""
        indices = [self.indices[number] for number in numbers]
        at_once = getattr(self.dataset, "__getitems__", None)
        return at_once(indices) if at_once else [self.dataset[index] for index in indices]

    def _listed(self, at: Any) -> list[int]:
        numbers = None if isinstance(at, (str, bytes)) or not hasattr(at, "__iter__") else [*at]
        if numbers is None or not all(hasattr(number, "__index__") for number in numbers):
            raise TypeError(f"A share takes an item's number, a slice, or a list of numbers, got {kind_of(at)}.")
        if any(isinstance(number, bool) or "bool" in str(getattr(number, "dtype", "")) for number in numbers):
            raise TypeError("A share takes the numbers of items, got a mask. Pass the positions at which it is true.")
        return [self.indices[operator.index(number)] for number in numbers]


class IterableShare(_Part):
    """A share of an iterable. It can be iterated several times if the iterable can."""

    def __iter__(self) -> Iterator[Any]:
        return IteratorShare(iter(self.dataset), self._place)

    def __getattr__(self, name: str) -> Any:
        if name in POSITION:
            raise AttributeError(f"{name!r} of a stream counts the items of all shares: a share of it has none.")
        return super().__getattr__(name)


class IterableShareOfKnownLength(IterableShare):
    """A share of an iterable with a length."""

    def __len__(self) -> int:
        assert self._n_items is not None
        return len(self._place.indices(self._n_items))


class IteratorShare(_Part):
    """A share of an iterator, which can be iterated only once.

    It is not `itertools.islice`, because that cannot be pickled from Python 3.14 on.
    """

    def __init__(self, dataset: Iterator[Any], place: Place) -> None:
        super().__init__(dataset, place)
        self._n_items = None  # the length of an iterator is the number of its remaining items
        self._to_skip, self._n_groups = place.number, 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _iterator_share, (self.dataset, self._place, self._to_skip, self._n_groups)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        index, of, is_equal = self._place
        if is_equal:
            return self._next_of_group(index, of)
        for _ in range(self._to_skip):
            next(self.dataset)
        item = next(self.dataset)
        self._to_skip = of - 1
        return item

    def _next_of_group(self, index: int, of: int) -> Any:
        """Return this share's item of the next `of` items, after all of them were read.

        This keeps the shares of a stream equal, although its length is only known at its end.
        """
        group = []
        for _ in range(of):
            group.append(next(self.dataset))
        # An added replica gets the item of a different replica in each group.
        at = index if index < of else index + self._n_groups
        self._n_groups += 1
        return group[at % of]


def _iterator_share(dataset: Iterator[Any], place: Place, to_skip: int, n_groups: int) -> IteratorShare:
    share = cast(IteratorShare, _like(IteratorShare, dataset, place))
    share._to_skip, share._n_groups = to_skip, n_groups
    return share


_classes: dict[tuple[type, type], type[_Part]] = {}
"""A class for each kind of share and kind of data set, which is a subclass of both."""


def _like(kind: type[_Part], dataset: Any, place: Place) -> _Part:
    """Return a share that is also a torch data set if the original is one, because loaders and trainers check the
    class.
    """
    for name in ("IterableDataset", "Dataset"):
        if _is_a(dataset, "torch.utils.data", name):
            kinds = kind, getattr(sys.modules["torch.utils.data"], name)
            return _classes.setdefault(kinds, type(kind.__name__, kinds, {}))(dataset, place)
    return kind(dataset, place)


def _share_of_datasets(dataset: Any, place: Place) -> Any:
    if not place.is_equal:
        from datasets.distributed import split_dataset_by_node

        return split_dataset_by_node(dataset, rank=place.number, world_size=place.of)
    if not hasattr(dataset, "__len__"):
        raise TypeError(
            "shard(equal=True) cannot split a stream of `datasets`, because the number of its items is not known. "
            "Remove equal=True, and give DiLoCo the same total_steps in each replica."
        )
    # A contiguous block, as from `split_dataset_by_node`, is read from the file in one go.
    size, indices = len(dataset) // place.of, place.indices(len(dataset))
    start = place.number * size if place.number < place.of else indices.start
    return dataset.select(range(start, start + size))


def _sliced(dataset: Any, indices: range) -> Any:
    rows = getattr(dataset, "iloc", dataset)  # without `iloc`, a table of pandas would select rows by label
    return rows[_slice_of(indices)]


def _slice_of(indices: range) -> slice:
    """Return the slice that takes these items."""
    if not indices:
        return slice(0, 0)
    return slice(indices.start, indices.stop if indices.stop >= 0 else None, indices.step)


def _is_table(dataset: Any) -> bool:
    """Return True if this is an array or a table. A torch data set may have a shape, too, and is neither."""
    return (
        hasattr(dataset, "shape")
        and hasattr(dataset, "__getitem__")
        and not _is_a(dataset, "torch.utils.data", "Dataset")
    )


def _is_of_each_item(value: Any, n_items: int) -> bool:
    """Return True if a value, or a column in it, has one entry per item of a data set."""
    if isinstance(value, Mapping):
        columns = [*value.values()] if len(value) <= FEW_COLUMNS else []
    else:
        columns = [value, *(value if isinstance(value, (list, tuple)) and len(value) <= FEW_COLUMNS else ())]
    return any(_is_column(column) and _length_of(column) == n_items for column in columns)


def _is_column(value: Any) -> bool:
    """Return True if this is a list or an array. An inner data set of the same length is not a column."""
    is_list = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    return (is_list or hasattr(value, "shape")) and not _is_a(value, "torch.utils.data", "Dataset")


def _length_of(value: Any) -> int | None:
    """Return the number of items of an object; None if it has no length."""
    if not hasattr(type(value), "__len__"):
        return None
    try:
        return len(value)
    # For example, an array without dimensions has no length, and neither has a stream that inherits the method.
    except (TypeError, NotImplementedError):
        return None


def _problem_of(dataset: Any) -> str | None:
    if isinstance(dataset, Mapping):
        return f"got a {type(dataset).__name__} of {', '.join(map(repr, list(dataset)[:5]))}: shard one of these"
    if _is_a(dataset, "torch.utils.data", "DataLoader"):
        return "got a loader: make it of the share, DataLoader(replica.shard(dataset))"
    if isinstance(dataset, Set):
        return f"got a {type(dataset).__name__}, which has another order in each replica: sort it"
    if isinstance(dataset, (str, bytes)) or not (hasattr(dataset, "__iter__") or hasattr(dataset, "__getitem__")):
        return f"got {kind_of(dataset)}"
    return None


def _is_a(value: Any, module: str, *names: str) -> bool:
    """Return True if a value is an instance of a class of a module. The module need not be loaded."""
    kinds = tuple(getattr(sys.modules.get(module), name, type(None)) for name in names)
    return value is not None and isinstance(value, kinds)
