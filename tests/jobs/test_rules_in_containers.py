"""Rules of a run in containers: the supervisor of each container judges them, from its page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.webhooks import webhook

from executors import launch
from executors.attempt import Attempt
from executors.run.run import view_of

TASK = """
import threading
from executors import current_replica

def main():
    replica = current_replica()
    print(f"CUDA error in attempt {replica.attempt}", flush=True)
    replica.report(loss=9.0 if (replica.rank, replica.attempt) == (1, 0) else 1.0)
    if (replica.rank, replica.attempt) == (1, 0):
        threading.Event().wait()
    return replica.attempt
"""


@pytest.fixture(params=["modal", "hf"])
def backend(request: pytest.FixtureRequest, s3: Any) -> str:
    """Modal or Hugging Face, and a folder with `job.py` to launch from."""
    request.getfixturevalue("modal_runs" if request.param == "modal" else "hf")
    Path("job.py").write_text(TASK)
    return str(request.param)


def test_a_container_judges_the_rules_restarts_its_rank_and_sends_the_notification(backend: str) -> None:
    rules = ["loss > 8 -> restart", "log /CUDA error in attempt 0/", "los > 1"]
    with webhook() as hook:
        restarts = "1,backoff=0.05s:0.1s"
        run = launch(backend, "job.py:main", 2, rules=rules, restarts=restarts, notify=[hook.url], detach=True)
        run.wait(100)
        assert run.results() == [0, 1]
        told = hook.of("rule")
        assert told["run_id"] == run.run_id
        assert "'los > 1' cannot be judged" in told["text"] or "is broken" in told["text"]
    first = Attempt(view_of(run).store, run.run_id, 1, 0).outcome()
    assert first is not None
    assert (first.reason, first.headline) == (
        "rule",
        "The rule 'loss > 8 -> restart' is broken: loss is 9 in report 1.",
    )
    found = {(each.index, each.rank, each.attempt) for each in run.status().rules}
    assert {(0, 1, 0), (1, 0, 0), (1, 1, 0), (2, 0, 0), (2, 1, 1)} <= found
    assert (0, 0, 0) not in found
