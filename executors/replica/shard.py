"""One replica's share of a data set, by what the data set is.

Nothing is imported for it: a data set of `datasets` or torch comes from a module that is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import islice
from typing import Any

from executors.errors import kind_of


def share_of(dataset: Any, index: int, of: int) -> Any:
    """Return every `of`th item of a data set, from `index` on.

    Raises:
        TypeError: it is not a data set, or has no order that all replicas see.
        ValueError: it has too few items.
    """
    if problem := _problem_of(dataset):
        raise TypeError(f"shard() takes a data set, {problem}.")
    if of == 1:
        return dataset
    if hasattr(dataset, "__len__") and len(dataset) <= index:
        raise ValueError(f"A data set of {len(dataset)} items has none for share {index} of {of}: use fewer replicas.")
    if _is_a(dataset, "datasets", "Dataset", "IterableDataset"):
        from datasets.distributed import split_dataset_by_node

        return split_dataset_by_node(dataset, rank=index, world_size=of)
    if _is_a(dataset, "torch.utils.data", "IterableDataset"):  # its loader wants one of its kind
        kind: Any = type("IterableShare", (IterableShare, sys.modules["torch.utils.data"].IterableDataset), {})
        return kind(dataset, index, of)
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        can_slice = isinstance(dataset, Sequence) or hasattr(dataset, "shape")  # a list, an array, a table
        return dataset[index::of] if can_slice else Share(dataset, index, of)
    return islice(dataset, index, None, of) if isinstance(dataset, Iterator) else IterableShare(dataset, index, of)


class _Part:
    """A part of a data set, which is told which epoch begins, as the data set is, and goes to spawned workers."""

    def __init__(self, dataset: Any, index: int, of: int) -> None:
        self.dataset = dataset
        self._index = index
        self._of = of
        if hasattr(dataset, "set_epoch"):  # no other name is handed on: a state, or an index, would be of the whole
            self.set_epoch = dataset.set_epoch

    def __reduce__(self) -> tuple[Any, ...]:  # the class may be one that was made in `share_of`
        return share_of, (self.dataset, self._index, self._of)


class Share(_Part):
    """Some items of a data set that has a length, as a data set."""

    def __init__(self, dataset: Any, index: int, of: int) -> None:
        super().__init__(dataset, index, of)
        self._indices = range(index, len(dataset), of)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, at: int) -> Any:
        return self.dataset[self._indices[at]]


class IterableShare(_Part):
    """Some items of an iterable, each time it is iterated."""

    def __iter__(self) -> Iterator[Any]:
        return islice(self.dataset, self._index, None, self._of)


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
