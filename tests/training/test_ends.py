"""Slow replicas, the end of a planned run, and arguments that DiLoCo refuses before it begins."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from support.training import PLAIN, leave, nudge, place
from torch import nn

from diloco.errors import DiLoCoError
from diloco.outer import open_diloco
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.round import Limits
from diloco.testing import run_replicas
from executors.store import MemoryStore
from executors.store.faulty import FaultyStore
from executors.store.records import exists
from executors.testing import eventually


def test_a_straggler_fulfils_the_plan_and_adds_no_round_of_its_own() -> None:
    others_left = threading.Event()

    def body(where: Mapping[str, Any]) -> tuple[int, int, float, float]:
        late = where["rank"] == 0
        model = nn.Linear(1, 1, bias=False)
        limits = Limits(grace_s=0.05, takeover_after_s=0.01)
        with open_diloco(model, inner_steps=1, total_steps=40, outer_momentum=0.5, **where, limits=limits) as diloco:
            if late:
                others_left.wait()
            while diloco.inner_step < 40:
                nudge(model, -1.0)
                diloco.step()
            anchor = diloco.anchor()["weight"].item()
        others_left.set()
        return diloco.rounds, diloco.inner_step, anchor, model.weight.item()

    late, early = run_replicas(2, body)
    assert late == early
    assert late[:2] == (40, 40)


@pytest.mark.parametrize("is_far", [False, True])
def test_a_late_replica_is_in_phase_again_and_loses_nothing(is_far: bool) -> None:
    """At a distant store, the replica looks for the seal in the background."""
    store = FaultyStore(MemoryStore(), seed=0) if is_far else MemoryStore()
    both_here, early_done = threading.Barrier(2), threading.Event()

    def body(where: Mapping[str, Any]) -> tuple[float, int]:
        model = nn.Linear(1, 1, bias=False)
        late = where["rank"] == 1
        limits = Limits(grace_s=60.0 if late else 0.05, takeover_after_s=0.01)
        with open_diloco(model, inner_steps=1, total_steps=4, **PLAIN, **where, limits=limits) as diloco:
            start = diloco.anchor()["weight"].item()
            # otherwise the late replica would come after the first rounds, and would be out of phase from its start
            both_here.wait()
            if late:
                early_done.wait()
                nudge(model, 4.0)
                # the late replica catches up, sends its work to the open round, and does not wait
                report = diloco.step()
                assert report is not None
                assert (report.round, report.counted, diloco.rounds) == (3, False, 3)
            else:
                for _ in range(3):
                    nudge(model, 1.0)
                    diloco.step()
                early_done.set()
                keys = Keys(where["run_id"], "main")
                eventually(
                    lambda: exists(where["store"], keys.contribution(3, 1)), "the late replica has sent its work"
                )
            report = diloco.step()  # together: the mean of 0 and 4
            assert report is not None
            assert report.ranks == (0, 1)
            assert report.counted
            return diloco.anchor()["weight"].item() - start, diloco.inner_step

    (moved, steps), (late_moved, late_steps) = run_replicas(2, body, store=store)
    assert moved == late_moved == pytest.approx(3.0 + 2.0)
    assert steps == late_steps == 4


def trained(where: Mapping[str, Any], steps: int, **options: Any) -> tuple[int, dict[str, torch.Tensor], nn.Module]:
    own = torch.Generator().manual_seed(where["rank"])
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    with open_diloco(model, total_steps=steps, **options, **where) as diloco:
        while diloco.inner_step < steps:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=own))
            diloco.step()
        assert diloco.inner_step == steps
        assert diloco.sync() == [], "sync() runs no round after the last planned one"
        return diloco.rounds, diloco.anchor(), model


@pytest.mark.parametrize(
    ("steps", "options", "rounds"),
    [
        (355, {"inner_steps": 10}, 36),
        (350, {"inner_steps": 10}, 35),
        (11, {"inner_steps": 10, **PLAIN}, 2),
        (100, {"inner_steps": 10, "fragments": 5, "overlap_steps": 1, **PLAIN}, 54),
        (99, {"inner_steps": 10, "fragments": 5, "overlap_steps": 1, "mix": 0.5, **PLAIN}, 54),
        (98, {"inner_steps": 10, "fragments": 2, **PLAIN}, 21),
        (60, {"inner_steps": 10, "fragments": 5, "overlap_steps": 1, "merge": "carry", "wire": "int4", **PLAIN}, 34),
        (61, {"inner_steps": 10, "overlap_steps": "auto", "wire": "int8", **PLAIN}, 7),
    ],
)
@pytest.mark.filterwarnings("ignore:Only", "ignore:sync.. was called after the end")
def test_every_fragment_has_its_last_round_at_the_last_step(steps: int, options: dict[str, Any], rounds: int) -> None:
    ends = run_replicas(3, lambda where: trained(where, steps, **options))
    for n_rounds, anchor, model in ends:
        assert n_rounds == rounds
        for name, value in model.named_parameters():
            assert torch.equal(value.detach(), anchor[name]), f"{name} is not its anchor"
            assert torch.equal(anchor[name], ends[0][1][name]), f"{name} differs from rank 0's"


def test_training_without_a_single_round_fails_and_reports_the_reason() -> None:
    def body(where: Mapping[str, Any]) -> str:
        model = nn.Linear(1, 1)
        try:
            with open_diloco(model, **where) as diloco:
                for _ in range(400):
                    diloco.step()
        except DiLoCoError as error:
            return str(error)
        return ""

    for message in run_replicas(2, body):
        assert message.startswith("400 steps and no round: inner_steps is 500, ")
    with pytest.warns(UserWarning, match="400 steps and no round"):
        assert run_replicas(1, body) == [""], "a single replica without a round does not fail"


def test_training_without_a_round_is_fine_where_it_is_asked_for_and_where_nothing_was_trained() -> None:
    def body(where: Mapping[str, Any]) -> None:
        with open_diloco(nn.Linear(1, 1), allow_no_rounds=True, **where) as diloco:
            diloco.step()
        with open_diloco(nn.Linear(1, 1), name="other", **where):
            pass

    run_replicas(2, body)


def test_an_error_in_the_body_is_the_one_that_is_reported() -> None:
    def body(where: Mapping[str, Any]) -> None:
        with open_diloco(nn.Linear(1, 1), **where) as diloco:
            diloco.step()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_replicas(2, body)


def test_steps_that_are_in_no_average_are_counted_in_a_warning() -> None:
    def body(where: Mapping[str, Any]) -> str:
        diloco = open_diloco(nn.Linear(1, 1), inner_steps=10, **where)
        for _ in range(25):
            diloco.step()
        try:
            diloco.close()
        except UserWarning as warning:  # the settings of the tests turn warnings into errors
            return str(warning)
        return ""

    for message in run_replicas(2, body):
        assert message.startswith("5 steps of this replica since its last round are in no average")
        assert "total_steps" in message


@pytest.mark.parametrize(("made", "lost"), [(20, ""), (25, "5 steps since its last round are lost. ")])
def test_a_loop_that_ends_before_the_run_is_warned_of_with_the_remedy(made: int, lost: str) -> None:
    """A loop over epochs ends too early in a replica that was started again.

    Steps that the replica made ahead of the others do not count.
    """

    def body(where: Mapping[str, Any]) -> str:
        diloco = open_diloco(nn.Linear(1, 1), inner_steps=10, total_steps=40, **where)
        for _ in range(made if where["rank"] else 40):
            diloco.step()
        try:
            diloco.close()
        except UserWarning as warning:  # the settings of the tests turn warnings into errors
            return str(warning)
        return ""

    first, second = run_replicas(2, body)
    assert first == ""
    assert second == (
        f"The loop of this replica has ended at inner step {made}, before the end of the run (total_steps=40), so "
        f"replicas that continue end with another model. {lost}Continue the loop until diloco.is_over is True."
    )


def test_steps_in_no_average_cause_a_warning_also_if_others_joined_a_run_of_one() -> None:
    where = place()
    model = nn.Linear(1, 1)
    first = open_diloco(model, inner_steps=2, **PLAIN, **where)
    joiner = open_diloco(nn.Linear(1, 1), inner_steps=2, **PLAIN, **{**where, "rank": "join"})
    for _ in range(3):
        nudge(model, 1.0)
        first.step()
    with pytest.warns(UserWarning, match="1 step of this replica since its last round is in no average"):
        first.close()
    leave(joiner)


def test_a_second_diloco_of_the_same_name_is_refused_while_the_first_is_open() -> None:
    where = place()
    with open_diloco(nn.Linear(2, 2), **where):
        with pytest.raises(DiLoCoError, match=r"named 'main' is open in this replica already.*name="):
            open_diloco(nn.Linear(2, 2), **where)
        with open_diloco(nn.Linear(3, 3), name="other", **where):
            pass


@pytest.mark.parametrize("overlap_steps", [0, 3, "auto"])
def test_rounds_that_were_asked_for_are_the_next_planned_ones_and_the_last_is_at_the_last_step(
    overlap_steps: Any,
) -> None:
    model = nn.Linear(1, 1, bias=False)
    with open_diloco(model, inner_steps=8, total_steps=40, overlap_steps=overlap_steps, **PLAIN, **place()) as diloco:
        steps = 0
        while diloco.inner_step < 40 and steps < 100:
            nudge(model, 1.0)
            diloco.step()
            steps += 1
            if steps in (3, 4, 5):
                diloco.sync()
        assert model.weight.item() == diloco.anchor()["weight"].item(), "the last round was after the last step"
    assert (steps, diloco.inner_step, diloco.rounds) == (40, 40, 5)
