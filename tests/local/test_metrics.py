"""The measurements of real replicas, recomputed from the raw segments: one replica is killed and comes back, and the
other continues.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from executors import LocalProcessExecutor, Run, current_replica, launch
from executors.attempt import Attempt
from executors.metrics.metrics import Metrics
from executors.replica import Replica
from executors.run.resume import resume
from executors.run.run import view_of
from executors.testing import eventually

Lines = dict[tuple[int, int], list[dict[str, Any]]]
"""The steps, by rank and attempt."""
LOCAL = LocalProcessExecutor(preload=(), term_grace_s=0.5)
INNER_STEPS, N_ROUNDS, KILLED_AT, GATES = 4, 12, 14, (24, 36)
KEPT_ENTRIES = KILLED_AT // INNER_STEPS


def train(folder: str) -> int:
    """Train a little. The first attempt of rank 1 is killed when its rounds are in segments. Rank 0 waits until the
    next attempt trains, and then until a round has counted it.

    Returns: the number of steps of this process.
    """
    import torch

    from diloco.outer import open_diloco
    from diloco.rendezvous.round import Limits
    from executors.metrics import recorder

    recorder.NEAR_S = 0.0  # a segment a second
    me, made = current_replica(), 0
    model = torch.nn.Linear(8, 1)
    limits = Limits(grace_s=2.0, takeover_after_s=0.5, round_timeout_s=60.0)
    total_steps = INNER_STEPS * N_ROUNDS
    opened = open_diloco(
        model, inner_steps=INNER_STEPS, total_steps=total_steps, snapshot_every=2, same_data="allow", limits=limits
    )
    with opened as diloco:
        while diloco.inner_step < total_steps:
            if me.rank == 1 and not me.attempt and diloco.inner_step == KILLED_AT:
                eventually(lambda: n_entries(me) == KEPT_ENTRIES, "the rounds of the replica are in segments")
                os.kill(os.getpid(), signal.SIGKILL)
            if me.rank == 0 and diloco.inner_step in GATES:
                eventually(
                    Path(folder, str(diloco.inner_step)).exists,
                    "the other replica has reached the same step",
                    within_s=60,
                )
            if me.attempt:
                Path(folder, str(GATES[0])).touch()
            with torch.no_grad():
                model.weight += 1.0
            time.sleep(0.02)
            made += 1
            me.report(step=diloco.inner_step, loss=1.0 / made)
            report = diloco.step()
            if me.attempt and report is not None and report.counted:
                Path(folder, str(GATES[1])).touch()
    return made


def n_entries(me: Replica) -> int:
    """Count the rounds of an attempt that are in its segments."""
    segments = me.store.list(f"{me.run_id}/metrics/{me.rank:04d}/{me.attempt}/")
    return sum(bytes(me.store.get(entry.key)).count(b'"entry"') for entry in segments)


def test_metrics_of_a_killed_and_resumed_run_equal_its_raw_lines(tmp_path: Path) -> None:
    run = launch(LOCAL, train, 2, args={"folder": str(tmp_path)})
    second = Attempt(view_of(run).store, run.run_id, 1, 1)
    killed = eventually(second.at(0).outcome, "rank 1 is killed", within_s=60)
    assert killed is not None
    assert killed.signal == "SIGKILL"
    resume(run)
    made, found, lines = run.results(), run.metrics(), raw_lines(run)
    assert found.problems == []
    check_ledger(found, lines, made)
    check_time_line(found, lines, run)
    check_rows(found)
    run.remove()
    assert list(view_of(run).store.list(f"{run.run_id}/")) == []


def raw_lines(run: Run) -> Lines:
    """Read all segments without parsing them."""
    folder, lines = Path(view_of(run).store.root) / run.run_id / "metrics", Lines()  # type: ignore[attr-defined]
    for file in sorted(folder.glob("*/*/*.jsonl")):
        rank, attempt, _ = file.relative_to(folder).parts
        lines.setdefault((int(rank), int(attempt)), []).extend(map(json.loads, file.read_text().splitlines()))
    return lines


def check_ledger(found: Metrics, lines: Lines, made: list[int]) -> None:
    counted = {
        key: sum(line["weight"] for line in of_attempt if line.get("verdict") == "counted")
        for key, of_attempt in lines.items()
    }
    ledger = found.ledger
    assert counted[0, 0] == INNER_STEPS * N_ROUNDS == made[0]
    assert counted[1, 0] == INNER_STEPS * KEPT_ENTRIES
    assert ledger.counted == sum(counted.values())
    assert ledger.by_rank[0].made == ledger.by_rank[0].counted == made[0]
    assert 0 < ledger.lost <= INNER_STEPS, "by the pace of the replica, at most INNER_STEPS steps were lost"
    assert ledger.by_rank[1].counted + ledger.carried + ledger.dropped == INNER_STEPS * KEPT_ENTRIES + made[1]
    assert 0 < (ledger.goodput or 0) < 1


def check_time_line(found: Metrics, lines: Lines, run: Run) -> None:
    assert [(span.rank, span.attempt) for span in found.attempts] == [(0, 0), (1, 0), (1, 1)]
    claims, saw = dict[tuple[int, int], float](), dict[tuple[int, int], dict[int, float]]()
    for key in lines:
        claim = view_of(run).store.get(Attempt(view_of(run).store, run.run_id, *key).key("started.json"))
        claims[key] = at = json.loads(bytes(claim))["at"]
        counted = [line for line in lines[key] if line.get("verdict") == "counted"]
        saw[key] = {each["entry"]: at + each["t"] - each["step_s"] - each["reduce_s"] for each in counted}
    first = found.attempts[0]
    for span in found.attempts[1:]:
        own = saw[span.rank, span.attempt]
        late = min((at - saw[0, 0][entry] for entry, at in own.items()), key=abs)
        expected = claims[span.rank, span.attempt] - late - claims[0, 0]
        assert span.started_s - first.started_s == pytest.approx(expected, abs=1e-3)
        assert abs(late) < 1, "the clocks of two replicas on one machine agree"
    killed, back = found.attempts[1:]
    assert killed.ended_s is not None
    assert killed.ended_s < back.started_s
    assert (killed.outcome.signal, back.outcome.status) == ("SIGKILL", "succeeded")  # type: ignore[union-attr]


def check_rows(found: Metrics) -> None:
    mine = [row for row in found.rounds if row.rank == 0]
    assert [row.entry for row in mine] == list(range(N_ROUNDS))
    assert [row.ranks for row in mine[:KEPT_ENTRIES]] == [(0, 1)] * KEPT_ENTRIES
    assert all(row.norm and row.mean_norm and row.up and row.down for row in mine)
    assert all(row.train_s > 0 and row.round_s > 0 for row in mine)
    reported = sorted(row.t for row in found.numbers if row.rank == 0)
    for row, after in zip(mine, [*mine[1:], None], strict=True):
        following = [t for t in reported if t > row.t and (after is None or t < after.t)]
        assert following or after is None, "the first report after each round has a line"
    assert {row.rank for row in found.usage} == {0, 1}


def reports_and_ends() -> None:
    """Report something, and end in one of three ways."""
    me = current_replica()
    me.report(step=me.rank)
    if me.rank == 1:
        raise RuntimeError("on purpose")
    while me.rank == 2:
        signal.pause()


def test_however_a_replica_ends_but_by_sigkill_its_last_lines_are_there() -> None:
    run = launch(LOCAL, reports_and_ends, 3)
    eventually(lambda: run.status().replicas[2].reported.get("step") == 2, "rank 2 has reported", within_s=60)
    run.cancel(2)
    run.wait(60)
    found = run.metrics()
    assert [(row.rank, row.values) for row in found.numbers] == [(rank, {"step": rank}) for rank in range(3)]
    assert [str(span.outcome and span.outcome.status) for span in found.attempts] == [
        "succeeded",
        "failed",
        "cancelled",
    ]
    assert found.problems == []
