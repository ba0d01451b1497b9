"""The public names, on which users may rely."""

from __future__ import annotations

from pathlib import Path

import pytest

import diloco
import executors
import executors.testing
from executors.store.memory import MemoryStore


def test_executors_offers_exactly_these_names() -> None:
    assert sorted(executors.__all__) == [
        "Artifact",
        "Event",
        "HFJobsExecutor",
        "InlineExecutor",
        "KubernetesExecutor",
        "LocalProcessExecutor",
        "Metrics",
        "ModalExecutor",
        "Outcome",
        "RayExecutor",
        "Replica",
        "ReplicaHandle",
        "ReplicaStatus",
        "ReplicasError",
        "ReplicasWarning",
        "Restarts",
        "Run",
        "RunStatus",
        "ServerlessExecutor",
        "SlurmExecutor",
        "Store",
        "attach",
        "current_replica",
        "launch",
        "list_runs",
        "open_store",
        "restartable",
    ]


def test_a_run_offers_exactly_these_names_and_documents_each() -> None:
    """The command takes everything else from `view_of(run)` and `manager_of(run)`."""
    names = [
        "add",
        "artifacts",
        "as_completed",
        "cancel",
        "events",
        "handles",
        "logs",
        "metrics",
        "model",
        "outcomes",
        "ranks",
        "remove",
        "report",
        "results",
        "run_id",
        "save_model",
        "show",
        "status",
        "stop",
        "url",
        "wait",
        "warnings",
    ]
    assert len(names) <= 22
    assert [name for name in dir(executors.Run) if not name.startswith("_")] == names
    assert [name for name in names if not getattr(executors.Run, name).__doc__] == []
    page = Path(__file__).parents[2].joinpath("docs/how-to/follow.md").read_text()
    assert [name for name in names if f"run.{name}" not in page] == []


def test_an_instance_of_a_run_has_no_public_name_that_its_class_lacks() -> None:
    run = executors.Run(MemoryStore(), "brave-otter-7f3a")
    assert {name for name in dir(run) if not name.startswith("_")} == {
        name for name in dir(executors.Run) if not name.startswith("_")
    }


def test_diloco_offers_exactly_these_names() -> None:
    assert sorted(diloco.__all__) == ["DiLoCo", "RoundReport"]


def test_the_contract_suites_are_shipped() -> None:
    assert {"ExecutorContract", "StoreContract"} <= set(executors.testing.__all__)


@pytest.mark.parametrize("package", [executors, diloco])
def test_every_public_name_is_available_and_is_documented(package: object) -> None:
    for name in package.__all__:  # type: ignore[attr-defined]
        assert getattr(package, name).__doc__


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'lauch'"):
        executors.lauch  # noqa: B018
