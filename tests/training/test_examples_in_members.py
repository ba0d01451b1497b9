"""The examples of replicas with several processes run as they are shipped, and all processes end with one model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.members import shards_on_cpus

from executors import launch

EXAMPLES = Path(__file__).parents[2] / "examples"


def results_of(example: str) -> list[dict[str, Any]]:
    with launch("local", f"{EXAMPLES / example}:main", 2, procs=2, args={"steps": 40}, timeout=150) as run:
        results: list[dict[str, Any]] = run.results()
    for result in results:
        assert result["loss"] < 0.6 * result["loss_before"]
    return results


@pytest.mark.timeout(180)
def test_all_processes_of_the_example_of_ddp_end_with_one_model() -> None:
    first, second = results_of("ddp.py")
    assert len({*first["models"], *second["models"]}) == 1


@shards_on_cpus
@pytest.mark.timeout(180)
def test_both_replicas_of_the_example_of_fully_shard_end_with_one_model() -> None:
    first, second = results_of("fsdp2.py")
    assert (first["model"], first["loss"]) == (second["model"], second["loss"])
