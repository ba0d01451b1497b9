"""The position in the data is attached state, for common loaders: a replica that starts again sees new data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.training import PLAIN, leave, next_process, nudge, place
from torch import nn

from diloco import DiLoCo
from executors.store import MemoryStore

N = 64
pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata is a package of the torch project
]


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, at: int) -> int:
        return at


def stateful_loader(**options: Any) -> Any:
    kind = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    return kind(Numbers(), batch_size=2, **options)


def shuffled_loader() -> Any:
    return stateful_loader(shuffle=True, generator=torch.Generator().manual_seed(7))


def stream(**options: Any) -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict({"x": list(range(N))}).to_iterable_dataset(**options)


LOADERS: dict[str, Callable[[], Any]] = {
    "StatefulDataLoader": stateful_loader,
    "StatefulDataLoader, shuffled": shuffled_loader,
    "StatefulDataLoader, with workers": lambda: stateful_loader(num_workers=2),
    "StatefulDataLoader of a stream": lambda: pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader(
        stream(num_shards=2), batch_size=2
    ),
    "IterableDataset": lambda: stream(num_shards=2),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_replica_that_comes_back_continues_where_its_data_were(kind: str) -> None:
    def train(store: MemoryStore, steps: int) -> list[str]:
        next_process()
        model, seen, loader = nn.Linear(1, 1), [], LOADERS[kind]()
        diloco = DiLoCo(model, inner_steps=2, total_steps=20, snapshot_every=1, **PLAIN, **place(store))
        diloco.attach_state("data", loader)
        items = iter(loader)
        while diloco.inner_step < steps:
            seen.append(str(next(items)))
            nudge(model, 1.0)
            diloco.step()
        diloco._workers.uploads.finish()
        leave(diloco)
        return seen

    whole, store = train(MemoryStore(), 20), MemoryStore()
    assert len(set(whole)) == 20
    before, after = train(store, 7), train(store, 20)
    assert before[:6] + after == whole, "data after the last round are read again, because that work was lost"


def test_a_data_position_that_cannot_be_saved_is_named() -> None:
    class Prefetching:
        def state_dict(self) -> dict[str, Any]:
            return {"buffer": [{"at": 3, "source": open}]}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    diloco = DiLoCo(nn.Linear(1, 1), inner_steps=2, **place(MemoryStore()))
    with pytest.raises(TypeError, match=r"data\['buffer'\]\[0\]\['source'\] is a builtin_function_or_method,"):
        diloco.attach_state("data", Prefetching())
    leave(diloco)
