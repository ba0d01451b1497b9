"""Replicas that train on the same data get a warning at once, and an error if it continues."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from support.training import PLAIN, nudge
from torch import nn

from diloco.errors import DuplicateWorkError
from diloco.outer import open_diloco
from diloco.rendezvous.frames import Contribution
from diloco.rendezvous.round import Limits
from diloco.rendezvous.seal import groups_of_same_work
from diloco.testing import run_replicas
from executors import launch
from executors.view.report.root_cause import MAX_CHARACTERS

SHARDED = Limits(small_bytes=0, block_elements=16)
Ends = list[tuple[list[tuple[int, ...]], str]]


def train(steps: Sequence[Sequence[float]], dtype: torch.dtype = torch.float32, **options: Any) -> Ends:
    """Return by rank the ranks with the same work in each round, and the error at the end."""

    def body(where: Mapping[str, Any]) -> tuple[list[tuple[int, ...]], str]:
        model, same = nn.Linear(24, 2, bias=False, dtype=dtype), []
        try:
            with open_diloco(model, inner_steps=1, **{**PLAIN, **options, **where}) as diloco:
                for by in steps[where["rank"]]:
                    nudge(model, by)
                    report = diloco.step()
                    assert report is not None
                    same.append(report.same)
        except DuplicateWorkError as error:
            return same, str(error)
        return same, ""

    return run_replicas(len(steps), body)


@pytest.mark.parametrize("limits", [None, SHARDED])
def test_ranks_that_send_the_same_three_rounds_in_a_row_end_and_the_others_continue(
    limits: Limits | None, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third = train([[1.0] * 5, [2.0] * 5, [1.0] * 5], limits=limits)
    assert first == third
    assert first[0] == [(0, 2)] * 2, "the two ranks ended at the third round"
    assert second == ([()] * 5, "")
    assert first[1] == (
        "Ranks 0 and 2 sent identical contributions 3 rounds in a row, up to round 3: they train on the same data. "
        "Give each replica its own: replica.shard(dataset), or a seed that depends on current_replica().rank. "
        'If it is intended, pass same_data="allow".'
    )
    assert len(f"diloco.errors.DuplicateWorkError: {first[1]}") < MAX_CHARACTERS, "the whole message fits into a table"
    warnings = sorted(record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    said = "Ranks 0 and 2 sent identical contributions in round 1: they train on the same data."
    assert [warning.partition(" Give")[0] for warning in warnings] == [f"rank {rank}: {said}" for rank in (0, 2)]


@pytest.mark.parametrize(
    ("why_not", "steps", "options", "warnings"),
    [
        ("it is allowed", [[1.0] * 4] * 2, {"same_data": "allow"}, 0),
        ("a warning is enough", [[1.0] * 4] * 2, {"same_data": "warn"}, 2),
        ("a model that does not move is another matter", [[0.0] * 4] * 2, {}, 2),
        ("it does not go on", [[1.0, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 2.0, 1.0, 1.0]], {}, 4),
    ],
)
def test_the_same_work_is_not_an_error_in_these_cases(
    why_not: str,
    steps: list[list[float]],
    options: dict[str, Any],
    warnings: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for same, error in train(steps, **options):
        assert not error, why_not
        is_same = [ours == theirs != 0.0 for ours, theirs in zip(*steps, strict=True)]
        assert same == [(0, 1) if each else () for each in is_same]
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == warnings


def test_bf16_replicas_whose_learning_rate_is_0_get_no_warning_about_their_data(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The anchor has digits that bf16 cannot hold. This difference is equal in all replicas, and is not work."""
    steps = [[0.1] + [0.0] * 5, [0.3] + [0.0] * 5]
    for same, error in train(steps, torch.bfloat16, outer_lr=0.3):
        assert (0, 1) in same, "the replicas have different data, so a false alarm is possible"
        assert not error
    assert not [record for record in caplog.records if "train on the same data" in record.getMessage()]
    for _, error in train([[0.1] * 5] * 2, torch.bfloat16, outer_lr=0.3):
        assert "they train on the same data" in error


def test_work_of_ranks_is_compared_by_its_bits_and_empty_work_is_not_compared() -> None:
    def head(rank: int, blocks: str, *, weight: float = 1.0, in_phase: bool = True) -> Contribution:
        norms = (0.0,) if blocks == "z" else (2.0,) * len(blocks)  # z: zeros
        digests = tuple(32 * block for block in blocks)
        return Contribution(rank, 0, "n", weight, 32 * "a", 64, digests, norms, in_phase=in_phase)

    heads = [head(0, "bb"), head(1, "bc"), head(2, "bb", weight=0.5, in_phase=False), head(3, "bc", weight=7.0)]
    silent = [head(4, "", weight=0.0), head(5, "", weight=0.0), head(6, "z"), head(7, "z"), head(8, "b")]
    assert groups_of_same_work({each.rank: each for each in [*heads, *silent]}) == ((0, 2), (1, 3))


def same_everywhere(rounds: int) -> int:
    torch.manual_seed(42)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with open_diloco(model, inner_steps=1, total_steps=rounds, same_data="warn") as diloco:
        for _ in range(rounds):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            diloco.step()
    return diloco.rounds


def test_the_table_and_the_logs_of_a_run_show_replicas_with_the_same_data() -> None:
    run = launch("local", same_everywhere, 2, args={"rounds": 4})
    assert run.results() == [4, 4]
    status = run.status()
    assert [replica.note for replica in status.replicas] == [f"trains on the same data as rank {r}" for r in (1, 0)]
    assert "same_data_as" not in status.used_columns()
    for rank in (0, 1):
        said = "Ranks 0 and 1 sent identical contributions in round 1"
        assert "".join(run.logs(rank)).count(said) == 1


@pytest.mark.parametrize(("moves", "n_warnings"), [((0.0, 0.0, 1.0), 1), ((1.0, 0.0, 0.0), 0)])
def test_a_model_that_has_not_moved_by_its_first_round_is_reported_once(
    moves: tuple[float, ...], n_warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    train([moves, [2.0, 3.0, 4.0]])
    said = [record.getMessage() for record in caplog.records if "no parameter has changed" in record.getMessage()]
    assert len(said) == n_warnings
    assert all(each.startswith("rank 0: no parameter has changed before round 1,") for each in said)
