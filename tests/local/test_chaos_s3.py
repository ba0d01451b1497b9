"""A whole run in a bucket that answers badly: no wrong mean, nothing lost, nothing counted twice, no hang."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from servers.s3.server import S3Server

from diloco.rendezvous.envelope import UNSIGNED
from diloco.rendezvous.frames import Contribution, Seal, head_bytes
from diloco.wires.wire import Floats
from executors import LocalProcessExecutor, Run, launch

ROUNDS, INNER_STEPS = 3, 3
BLOCK_ELEMENTS, N_VALUES = 4, 16  # four blocks
REPLICAS = {False: 4, True: 2}  # the settings with and without a sharded mean; their weights are exact in binary


def count_together(sharded: bool) -> dict[str, Any]:
    """Add 1 to a separate parameter at each step, and average. The sum shows which steps were counted."""
    import torch

    from diloco.outer import open_diloco
    from diloco.rendezvous.round import Limits
    from executors import current_replica

    rank = current_replica().rank
    model = torch.nn.Linear(N_VALUES, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    limits = Limits(small_bytes=0 if sharded else 1 << 20, block_elements=BLOCK_ELEMENTS)
    plain: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0, "snapshot_every": 2}
    steps = 0
    with open_diloco(
        model, inner_steps=INNER_STEPS, total_steps=ROUNDS * INNER_STEPS, **plain, limits=limits
    ) as diloco:
        while diloco.rounds < ROUNDS:
            with torch.no_grad():
                model.weight[0, rank] += 1.0
            steps += 1
            diloco.step()
        anchor = diloco.anchor()["weight"][0]
    return {"anchor": anchor.tolist(), "unsent": (model.weight[0].detach() - anchor).tolist(), "steps": steps}


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_run_in_a_bucket_that_answers_badly_has_every_mean_right_and_loses_nothing(s3: S3Server) -> None:
    s3.misbehave(seed=11, unavailable=0.05, lost=0.02, truncated=0.01, delay_s=0.3, keeps="/diloco/")
    local = LocalProcessExecutor()
    runs = {
        sharded: launch(local, count_together, n, args={"sharded": sharded}, rendezvous=s3.url("runs"))
        for sharded, n in REPLICAS.items()  # run both at the same time, because they mostly wait
    }
    results = {sharded: run.results() for sharded, run in runs.items()}
    kept, suffered = s3.kept(), Counter(row["fault"] for row in s3.requests())
    assert min(suffered[fault] for fault in ("unavailable", "lost", "truncated")) > 0, suffered
    for sharded, run in runs.items():
        steps = [result["steps"] for result in results[sharded]]
        moved = np.zeros(N_VALUES, np.float32)
        for entry in range(ROUNDS):
            moved -= checked_mean(kept, run, entry, sharded)
        for rank, result in enumerate(results[sharded]):
            assert result["anchor"] == moved.tolist()
            assert len(steps) * moved[rank] + result["unsent"][rank] == steps[rank]
        assert steps == [ROUNDS * INNER_STEPS] * REPLICAS[sharded]


def checked_mean(kept: dict[str, list[bytes]], run: Run, entry: int, sharded: bool) -> Floats:
    """Return the mean of an entry, after checking that it is the mean of the sealed contributions of all replicas."""
    under, n = f"runs/{run.run_id}/diloco/main", REPLICAS[sharded]
    (data,) = kept[f"{under}/seal/{entry}"]
    seal = Seal.parse(data, "", UNSIGNED)
    assert sorted(seal.replicas) == list(range(n))
    sealed = []
    for rank, member in seal.replicas.items():
        (payload,) = (
            data[head_bytes(N_VALUES // BLOCK_ELEMENTS) :]
            for data in kept[f"{under}/r{entry}/contribution/{rank}"]
            if Contribution.parse(data, "", UNSIGNED)[1] == member.digest
        )
        sealed.append(np.frombuffer(payload, np.float32))
    assert seal.shards == (n if sharded else 0)
    if sharded:
        shards = [kept[f"{under}/r{entry}/mean/{shard}"] for shard in range(n)]
        assert [len(values) for values in shards] == [1] * n
        head = head_bytes(N_VALUES // BLOCK_ELEMENTS // n)
        mean = np.frombuffer(b"".join(values[0][head:] for values in shards), np.float32)
    else:
        mean = np.frombuffer(seal.mean, np.float32)
    assert mean.tolist() == np.mean(sealed, axis=0, dtype=np.float64).tolist()
    return mean
