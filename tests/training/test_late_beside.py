"""Replicas that are late and out of phase, with background rounds, at a store that is slow and fails."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from support.training import PLAIN, leave, next_process, nudge
from torch import nn

from diloco import DiLoCo
from diloco.outer import open_diloco
from diloco.rendezvous.round import Limits
from diloco.testing import run_replicas
from executors.store import Store
from executors.store.faulty import FaultyStore

LIMITS = Limits(grace_s=0.01, takeover_after_s=0.05)


def uncounted(diloco: DiLoCo, model: nn.Module) -> list[tuple[float, float]] | None:
    """For each fragment, return the distance of the live parameters from the anchor, and the reported number of steps.

    Returns: None: in each try, a result arrived between the two reads.
    """
    training, state = diloco._training_side, diloco._model_state
    for _ in range(100):
        training.drain()
        anchors, n_results = training.run_in_round_thread(lambda: (state.anchors_now(), training.runner.n_results))
        if n_results == training._n_merged:
            live = [state.fragments[f].slots[0].name for f in range(len(anchors))]
            away = [model.get_parameter(name).detach()[0] - a for name, a in zip(live, anchors, strict=True)]
            return [(float(by.mean()), float(n)) for by, n in zip(away, training.phase.uncounted_steps, strict=True)]
    return None


def check_what_is_kept(diloco: DiLoCo) -> None:
    """Check that each saved record has the state of the rounds and steps that it names."""
    training, keep = diloco._training_side, diloco._attached.keep

    def checked(position: int, progress: list[torch.Tensor], uncounted_since: list[int], buffers: Any) -> None:
        assert training.run_in_round_thread(lambda: training.runner.position) == position
        if not progress:  # without such a state, the replica must have no uncounted work
            assert not any(training.phase.uncounted_steps)
            assert not any(part.any() for part in diloco._model_state.progress())
            return
        for away, n in zip(progress, training.phase.uncounted_steps, strict=True):
            assert -float(away.mean()) == pytest.approx(n, abs=1e-3)
        keep(position, progress, uncounted_since, buffers)

    diloco.attach_state("generator", torch.Generator())
    diloco._attached.keep = checked  # type: ignore[method-assign,assignment]


def newest_seal(store: Store) -> int:
    return max((int(entry.key.rpartition("/")[2]) for entry in store.list("test/diloco/main/seal/")), default=0)


def wait_until_others_are_ahead(store: Store) -> None:
    """Make a replica slower than the others: they seal two more rounds, or have ended."""
    begin, deadline = newest_seal(store), time.monotonic() + 50 * LIMITS.grace_s
    while newest_seal(store) < begin + 2 and time.monotonic() < deadline:
        time.sleep(LIMITS.grace_s / 5)


@pytest.mark.parametrize(
    "options",
    [
        {"overlap_steps": 3, "merge": "carry", "wire": "int8"},
        {"overlap_steps": "auto", "merge": "carry", "wire": "int4"},
        {"overlap_steps": 1, "fragments": 2, "late": "drop"},
        {"background": True, "carry_rounds": 1},
    ],
    ids=["carry, int8", "auto, int4", "fragments, drop", "no overlap"],
)
def test_live_parameters_differ_from_the_anchor_by_the_work_that_no_mean_has_counted(
    options: dict[str, Any],
) -> None:
    next_process()

    def body(where: Mapping[str, Any]) -> list[bool]:
        rank, dice = where["rank"], random.Random(where["rank"])
        store = FaultyStore(where["store"], seed=rank, delay_s=0.008 if rank == 0 else 0.001, lost=0.02, error=0.02)
        model = nn.Sequential(*[nn.Linear(6, 1, bias=False) for _ in range(2)][: options.get("fragments", 1)])
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        given = {"inner_steps": 4, "mean_wire": "fp32", "same_data": "allow", "snapshot_every": 1, **PLAIN, **options}
        diloco = open_diloco(model, **given, **{**where, "store": store}, limits=LIMITS)
        check_what_is_kept(diloco)
        was_out = []
        for step in range(60):
            if rank == 0 and step % 10 == 9:
                wait_until_others_are_ahead(where["store"])
            nudge(model, 1.0)
            diloco.step()
            was_out.append(diloco._training_side.is_out_of_phase)
            if dice.random() < 0.2:
                for by, n_steps in uncounted(diloco, model) or []:
                    assert by == pytest.approx(n_steps, abs=1e-3), (rank, step)
        leave(diloco)
        return was_out

    outs = run_replicas(3, body)
    assert any(map(any, outs)), "no replica was late, so nothing was tested"
