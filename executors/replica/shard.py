"""One replica's share of a data set, by the kind of the data set.

Nothing is imported for it: a data set of `datasets` or torch comes from a module that is loaded.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, cast

from executors.errors import kind_of

SLICED = (list, tuple, range)
"""A slice of exactly these types is whole: of a subclass it may lack the attributes."""
POSITION = ("state_dict", "load_state_dict")
"""The state of a stream counts the items of all shares. Loaders that find none count the items of the share."""
FEW_COLUMNS = 64
GOLDEN = 0.618033988749895
"""Multiples of it, modulo 1, are far from each other, so the windows of added replicas differ."""


class Place(NamedTuple):
    """The number of a share of a data set, and the number of shares."""

    number: int
    of: int
    is_equal: bool = False
    """Whether all shares have the same number of items. Then `number` may be beyond `of`, for an added replica."""

    def indices(self, n_items: int) -> range:
        """Return which items of a data set of a known length are in this share."""
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
        of: how many shares there are.
        equal: whether all shares have the same number of items.

    Raises:
        TypeError: it is not a data set, it has no order that all replicas see, or its items cannot be counted and
            `equal` is set.
        ValueError: it has too few items.
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
    if not _is_a(dataset, "torch.utils.data", "IterableDataset"):  # which may have a length and items by number, too
        can_slice = type(dataset) in SLICED or _is_table(dataset)
        if n_items is not None and (can_slice or hasattr(dataset, "__getitem__")):
            return _sliced(dataset, place.indices(n_items)) if can_slice else _like(Share, dataset, place)
        if isinstance(dataset, Iterator):
            return _like(IteratorShare, dataset, place)
    return _like(IterableShare if n_items is None else IterableShareOfKnownLength, dataset, place)


class _Part:
    """A part of a data set. It has the attributes of the data set, and goes to spawned workers.

    Attributes are read from the data set and written to it, so `share.transform = …` changes the items. A write that
    stayed on the share would be without effect, since the data set makes the items. The share keeps `dataset` and
    `indices`, which are its own, and a `set_epoch` that a trainer puts in the place of the data set's.
    """

    dataset: Any
    _place: Place
    _n_items: int | None
    _OWN = frozenset({"dataset", "indices", "_place", "_n_items", "_to_skip", "_n_groups", "set_epoch"})

    def __init__(self, dataset: Any, place: Place) -> None:
        self.dataset = dataset
        self._place = place
        self._n_items = _length_of(dataset)

    def __reduce__(self) -> tuple[Any, ...]:  # `_like` may have made the class, and pickle cannot find that
        return share_of, (self.dataset, *self._place)

    def __repr__(self) -> str:
        return f"<share {self._place.number} of {self._place.of} of {self.dataset!r}>"

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.dataset)})

    def __getattr__(self, name: str) -> Any:
        # Python asks here only for what the share itself lacks. Special methods are never forwarded: most of them
        # would speak for the whole data set. An unpickled share has no data set yet, and would ask forever.
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
        if name in self._OWN or name.startswith("__"):  # as `__class__`: a library may replace the share's own
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
    """Some items of a data set that has a length, as a data set."""

    def __init__(self, dataset: Any, place: Place) -> None:
        super().__init__(dataset, place)
        assert self._n_items is not None  # `share_of` makes a share of a stream otherwise
        self.indices = place.indices(self._n_items)

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Any]:
        return (self.dataset[index] for index in self.indices)

    def __getitem__(self, at: Any) -> Any:
        """Return an item of the share. A slice, or a list of numbers, gives what the data set gives for such."""
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
    """Some items of an iterable, each time it is iterated."""

    def __iter__(self) -> Iterator[Any]:
        return IteratorShare(iter(self.dataset), self._place)

    def __getattr__(self, name: str) -> Any:
        if name in POSITION:
            raise AttributeError(f"{name!r} of a stream counts the items of all shares: a share of it has none.")
        return super().__getattr__(name)


class IterableShareOfKnownLength(IterableShare):
    """Some items of an iterable that knows how many there are."""

    def __len__(self) -> int:
        assert self._n_items is not None
        return len(self._place.indices(self._n_items))


class IteratorShare(_Part):
    """Some items of an iterator, which go by once.

    An object and not `itertools.islice`, which cannot be pickled from Python 3.14 on.
    """

    def __init__(self, dataset: Iterator[Any], place: Place) -> None:
        super().__init__(dataset, place)
        self._n_items = None  # some iterators have a length, of what is left
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
        """Return this share's item of the next `of` items, once all of these exist.

        Nothing else keeps shares of a stream equal: how many items it has is known at its end only.
        """
        group = []
        for _ in range(of):
            group.append(next(self.dataset))
        at = index if index < of else index + self._n_groups  # an added replica has items of each other in turn
        self._n_groups += 1
        return group[at % of]


def _iterator_share(dataset: Iterator[Any], place: Place, to_skip: int, n_groups: int) -> IteratorShare:
    share = cast(IteratorShare, _like(IteratorShare, dataset, place))
    share._to_skip, share._n_groups = to_skip, n_groups
    return share


_classes: dict[tuple[type, type], type[_Part]] = {}
"""A class for each kind of share and kind of data set, which is a subclass of both."""


def _like(kind: type[_Part], dataset: Any, place: Place) -> _Part:
    """Return a share that is a data set of torch if the data set is one: loaders and trainers check its class."""
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
    # Neighbors, as `split_dataset_by_node` gives them: these are read from the file in one go.
    size, indices = len(dataset) // place.of, place.indices(len(dataset))
    start = place.number * size if place.number < place.of else indices.start
    return dataset.select(range(start, start + size))


def _sliced(dataset: Any, indices: range) -> Any:
    rows = getattr(dataset, "iloc", dataset)  # rows of a table of pandas go by their labels otherwise
    return rows[_slice_of(indices)]


def _slice_of(indices: range) -> slice:
    """Return the slice that takes these items."""
    if not indices:
        return slice(0, 0)
    return slice(indices.start, indices.stop if indices.stop >= 0 else None, indices.step)


def _is_table(dataset: Any) -> bool:
    """Return whether this is an array or a table; a data set of torch may have a shape, too."""
    return (
        hasattr(dataset, "shape")
        and hasattr(dataset, "__getitem__")
        and not _is_a(dataset, "torch.utils.data", "Dataset")
    )


def _is_of_each_item(value: Any, n_items: int) -> bool:
    """Return whether a value, or a column of it, has an entry for each item of a data set."""
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
    except (TypeError, NotImplementedError):  # as of an array of no dimension, or a stream that inherits the method
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
    """Return whether a value is an instance of a class of a module, which need not be loaded."""
    kinds = tuple(getattr(sys.modules.get(module), name, type(None)) for name in names)
    return value is not None and isinstance(value, kinds)
