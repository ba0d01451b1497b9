"""What users may rely on by name."""

from __future__ import annotations

import pytest

import diloco
import executors
import executors.testing


def test_executors_offers_exactly_these_names() -> None:
    assert sorted(executors.__all__) == [
        "HFJobsExecutor",
        "InlineExecutor",
        "KubernetesExecutor",
        "LocalProcessExecutor",
        "ModalExecutor",
        "RayExecutor",
        "ReplicaHandle",
        "ReplicaStatus",
        "ReplicasError",
        "ReplicasWarning",
        "Run",
        "ServerlessExecutor",
        "SlurmExecutor",
        "Store",
        "attach",
        "current_replica",
        "launch",
        "list_runs",
        "open_store",
    ]


def test_diloco_offers_exactly_these_names() -> None:
    assert sorted(diloco.__all__) == ["DiLoCo", "RoundReport"]


def test_the_contract_suites_are_shipped() -> None:
    assert {"ExecutorContract", "StoreContract"} <= set(executors.testing.__all__)


@pytest.mark.parametrize("package", [executors, diloco])
def test_every_public_name_can_be_had_and_is_documented(package: object) -> None:
    for name in package.__all__:  # type: ignore[attr-defined]
        assert getattr(package, name).__doc__


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'lauch'"):
        executors.lauch  # noqa: B018
