"""One run whose replicas have nothing in common but a bucket: on this machine, on a Slurm cluster, and at Modal.

Everything is real but Modal, which is a server on loopback, and the bucket.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from servers.modal.server import ModalServer

from executors import attach, launch
from executors.store import memory

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(300)]

ARGS = {"steps": 48, "inner_steps": 8, "batch": 2, "data": "text.txt", "seed": 7}
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # more replicas would add in another order


@pytest.mark.usefixtures("slurm")
def test_replicas_on_three_backends_and_one_that_is_added_end_with_one_anchor(modal_runs: ModalServer) -> None:
    Path("text.txt").write_text(Path(memory.__file__).read_text() * 8)
    run = launch("local:1,slurm:1,modal:1", "diloco.demo:train", args=ARGS, env=ONE_THREAD, seed=7, timeout=200)
    assert run.add("slurm", 1, env=ONE_THREAD) == [3]
    results = run.results()
    assert [state.backend for state in attach(run.url).status().replicas] == ["local", "slurm", "modal", "slurm"]
    assert len({result["anchor"] for result in results}) == 1, "every replica holds the same parameters"
    assert {result["rounds"] for result in results} == {6}
    assert len(modal_runs.sandboxes) == 1
