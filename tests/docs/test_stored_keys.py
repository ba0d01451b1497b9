"""The pages of stored keys and of metrics list what a run really stores and measures."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

from diloco import DiLoCo
from diloco.rendezvous.keys import Keys
from docs.generate.metrics import columns
from docs.generate.stored_keys import OF_RUN_KEYS, stored_keys, stored_keys_page
from executors import InlineExecutor, Run, current_replica, launch
from executors.store import open_store, record_names


def train() -> None:
    """Train with everything that stores an object: DiLoCo, attached state, measurements and an artifact."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(model, inner_steps=1, total_steps=2, snapshot_every=1) as diloco:
        diloco.attach_state("optimizer", optimizer)
        for step in range(2):
            model(torch.randn(8, 4)).sum().backward()
            optimizer.step()
            diloco.step()
            current_replica().report(step=step, loss=1.0)
    current_replica().save_artifact("tables/notes.txt", __file__)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a run of one replica in this process that has ended."""
    return launch(InlineExecutor(), train, n=1, rendezvous=str(tmp_path), run_id="otter")


def test_each_key_of_a_run_has_one_line_on_the_page(run: Run) -> None:
    patterns = [each.expression for each in stored_keys()]
    found = [entry.key for entry in open_store(run.url.removesuffix("/otter")).list("otter/")]
    assert len(found) > 10
    assert {key: n for key in found if (n := sum(bool(each.fullmatch(key)) for each in patterns)) != 1} == {}


def test_each_column_of_the_measurements_of_a_run_is_on_the_page(run: Run) -> None:
    listed = {each.name for each in columns()}
    assert set(run.metrics().to_dict()) - listed <= {"step", "loss", "not_finite"}


def test_each_name_of_a_record_has_a_line_on_the_page() -> None:
    page = stored_keys_page()
    names = [value for name, value in vars(record_names).items() if name.isupper() and isinstance(value, str)]
    assert len(names) > 8
    assert [name for name in names if f"/{name}`" not in page] == []


def test_each_key_of_a_diloco_has_a_line_on_the_page() -> None:
    """A method of `Keys` returns a key, or a prefix of keys that have their own methods."""
    patterns = [each.pattern for each in stored_keys()]
    n_methods = sum(not name.startswith("_") for name, _ in inspect.getmembers(Keys, inspect.isfunction))
    n_prefixes = sum("the prefix" in (each.__doc__ or "") for _, each in inspect.getmembers(Keys, inspect.isfunction))
    n_files_with_two_names = 1
    listed = [pattern for pattern in patterns if "/diloco/" in pattern]
    assert len(listed) == n_methods - n_prefixes - len(OF_RUN_KEYS) + n_files_with_two_names


def test_each_line_of_both_pages_has_a_meaning() -> None:
    assert [each.pattern for each in stored_keys() if not each.meaning] == []
    assert [each.name for each in columns() if not each.meaning] == []


def test_each_column_in_seconds_or_bytes_has_its_unit() -> None:
    units = {each.name: each.unit for each in columns()}
    assert {name: unit for name, unit in units.items() if name.endswith("_s") and unit != "s"} == {}
    assert {units[name] for name in ("up", "down", "rss", "gpu_mem")} == {"bytes"}
