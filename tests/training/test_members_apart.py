"""The processes of one replica where they differ: refusals, errors, weights, buffers, and times of their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.members import each_kind, inner_step, run_members, shards_on_cpus, small_model, whole, wrapped
from torch import nn

from diloco import DiLoCo


def train(diloco: DiLoCo, model: nn.Module, seed: int = 5) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    data = torch.Generator().manual_seed(seed)
    for _ in diloco.steps():
        inner_step(model, optimizer, data)
        diloco.step()


# -- refusals --------------------------------------------------------------------------------------------------------


def test_a_parameter_of_partial_sums_is_refused_by_its_name(tmp_path: Path) -> None:
    def body(rank: int, member: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Partial

        model: Any = small_model()
        weight = DTensor.from_local(model[2].weight.detach(), init_device_mesh("cpu", (2,)), [Partial()])
        model[2].weight = nn.Parameter(weight)
        DiLoCo(model, inner_steps=1)

    for text in run_members(tmp_path, [2], body).values():
        assert text.startswith("TypeError: Parameter '2.weight' is a DTensor with the placement P"), text
        assert "DiLoCo knows Shard and Replicate" in text


def test_a_model_in_fsdp1_is_refused(tmp_path: Path) -> None:
    def body(rank: int, member: int) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel

        DiLoCo(FullyShardedDataParallel(small_model(), device_id=torch.device("cpu")), inner_steps=1)

    for text in run_members(tmp_path, [2], body).values():
        assert text.startswith("TypeError: The model is wrapped in FullyShardedDataParallel"), text
        assert "Shard the model with fully_shard in a process group" in text


def test_the_stages_of_a_pipeline_are_refused_by_the_first_parameter_that_differs(tmp_path: Path) -> None:
    def body(rank: int, member: int) -> None:
        model: Any = small_model()
        DiLoCo(model[:2] if member == 0 else nn.Sequential(model[0], model[1], nn.Linear(7, 1)), inner_steps=1)

    for text in run_members(tmp_path, [2], body).values():
        assert text == (
            "DiLoCoError: Member 1 of this replica does not have the same parameters as member 0: '2.weight' differs. "
            "DiLoCo trains one whole model in a replica, and not the stages of a pipeline."
        )


def test_a_second_process_without_rank_and_group_is_refused_as_in_multiprocessing_spawn(tmp_path: Path) -> None:
    """`mp.spawn` sets no variables, so its processes look like the replica itself."""

    def body(rank: int, member: int) -> str:
        dist.destroy_process_group()
        for name in ("REPLICA_MEMBER", "REPLICA_MEMBERS"):
            del os.environ[name]
        opened = tmp_path / "opened"
        if member == 0:
            with DiLoCo(small_model(), inner_steps=1, allow_no_rounds=True):
                opened.touch()
                while not (tmp_path / "refused").exists():
                    os.sched_yield()
            return "opened"
        while not opened.exists():
            os.sched_yield()
        try:
            DiLoCo(small_model(), inner_steps=1, allow_no_rounds=True)
        finally:
            (tmp_path / "refused").touch()
        return "opened, too"

    found = run_members(tmp_path, [2], body)
    assert found[0, 0] == "opened"
    assert found[0, 1].startswith("DiLoCoError: "), found[0, 1]


# -- the leader's side -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ddp", "sharded"])
def test_the_weight_of_a_replica_is_the_sum_of_its_members_functions(kind: str, tmp_path: Path) -> None:
    """A replica of two with the weights 1 and 2 counts three times as much as a replica of one with the weight 1."""

    def body(rank: int, member: int) -> dict[str, torch.Tensor]:
        plain = small_model()
        model = wrapped(plain, kind) if rank == 0 else plain
        diloco = DiLoCo(
            model, inner_steps=1, total_steps=1, outer_lr=1.0, outer_momentum=0.0, weight=lambda: 1.0 + member
        )
        with torch.no_grad():
            for p in plain.parameters():
                p.add_(4.0 if rank == 0 else 8.0)
        diloco.step()
        diloco.close()
        return {name: whole(p) for name, p in plain.named_parameters()}

    first = dict(small_model().named_parameters())
    for place, live in run_members(tmp_path, [2, 1], body).items():
        assert not isinstance(live, str), live
        for name, values in live.items():
            assert torch.allclose(values, first[name] + 5.0, atol=1e-5), (place, name)


def test_all_members_have_the_leaders_buffers_from_the_start_and_the_averaged_ones_after_a_round(
    tmp_path: Path,
) -> None:
    def body(rank: int, member: int) -> list[dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        norm: Any = model[1]
        norm.num_batches_tracked.fill_(10 + member)
        diloco = DiLoCo(model, inner_steps=1, total_steps=1, outer_lr=1.0, outer_momentum=0.0)
        first = {name: buffer.clone() for name, buffer in model.named_buffers()}
        norm.running_mean.fill_(2.0 + 4 * rank + 100 * member)
        diloco.step()
        diloco.close()
        return [first, {name: buffer.clone() for name, buffer in model.named_buffers()}]

    found = run_members(tmp_path, [2, 1], body)
    for place, result in found.items():
        assert not isinstance(result, str), result
        assert int(result[0]["1.num_batches_tracked"]) == 10, f"{place}: an integer buffer is the leader's"
        assert torch.equal(result[1]["1.running_mean"], torch.full((3,), 4.0)), f"{place}: (2 + 6) / 2, of the leaders"


def went_back(kind: str) -> tuple[bool, int, dict[str, torch.Tensor]]:
    """Train 2 rounds, return to the checkpoint of the first, and train to the end."""
    plain = small_model()
    model = wrapped(plain, kind)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    diloco = DiLoCo(model, inner_steps=1, total_steps=4)
    data = torch.Generator().manual_seed(5)
    state: dict[str, Any] = {}
    saved: list[torch.Tensor] = []
    for step in range(4):
        inner_step(model, optimizer, data)
        diloco.step()
        if step == 0:
            state, saved = diloco.state_dict(), [p.detach().clone() for p in plain.parameters()]
        if step == 1:
            with torch.no_grad():
                for p, values in zip(plain.parameters(), saved, strict=True):
                    p.copy_(values)
            diloco.load_state_dict(state)
    diloco.close()
    return bool(state), diloco.rounds, {name: whole(p) for name, p in plain.named_parameters()}


@each_kind
def test_the_state_is_whole_in_the_leader_and_all_members_return_to_it(kind: str, tmp_path: Path) -> None:
    (folder := tmp_path / "one").mkdir()
    _, rounds, expected = run_members(folder, [1], lambda rank, member: went_back("one"))[0, 0]
    (folder := tmp_path / "two").mkdir()
    found = run_members(folder, [2], lambda rank, member: went_back(kind))
    assert not any(isinstance(result, str) for result in found.values()), found
    for (_, member), (has_state, n, live) in found.items():
        assert (has_state, n) == (member == 0, rounds)
        assert all(torch.equal(live[name], values) for name, values in expected.items())


@each_kind
def test_after_an_early_end_all_members_have_the_anchor(kind: str, tmp_path: Path) -> None:
    def body(rank: int, member: int) -> Any:
        plain = small_model()
        model = wrapped(plain, kind)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        diloco = DiLoCo(model, inner_steps=2)
        data = torch.Generator().manual_seed(5)
        for _ in range(3):  # the last step belongs to no round
            inner_step(model, optimizer, data)
            diloco.step()
        anchor = diloco.anchor()
        diloco.close()
        return anchor, {name: whole(p) for name, p in plain.named_parameters()}

    found = run_members(tmp_path, [2], body)
    assert not any(isinstance(result, str) for result in found.values()), found
    anchor = found[0, 0][0]
    for _, live in found.values():
        assert all(torch.equal(live[name], values) for name, values in anchor.items())


def test_a_block_that_one_member_leaves_by_an_error_waits_for_no_other_member(tmp_path: Path) -> None:
    def body(rank: int, member: int) -> None:
        with DiLoCo(small_model(), inner_steps=10) as diloco:
            diloco.step()
            raise KeyError(f"of member {member}")

    found = run_members(tmp_path, [2], body)
    assert found == {(0, 0): "KeyError: 'of member 0'", (0, 1): "KeyError: 'of member 1'"}


def test_a_leader_that_was_asked_to_end_ends_all_members(tmp_path: Path) -> None:
    def body(rank: int, member: int) -> None:
        diloco: Any = DiLoCo(small_model(), inner_steps=10)
        if member == 0:

            def leave(*, after_round: bool) -> None:
                raise SystemExit(143)

            diloco._plain._leave_if_asked = leave
        diloco.step()

    assert run_members(tmp_path, [2], body) == {(0, 0): "SystemExit: 143", (0, 1): "SystemExit: 143"}


# -- unlike replicas and times of their own --------------------------------------------------------------------------


@shards_on_cpus
def test_a_compiled_replica_and_a_replica_of_two_train_in_one_run(tmp_path: Path) -> None:
    def body(rank: int, member: int) -> Any:
        plain = small_model()
        # The backend "eager" compiles nothing, and wraps the module as each backend does.
        model: Any = torch.compile(plain, backend="eager") if rank == 0 else wrapped(plain, "sharded")
        diloco = DiLoCo(model, inner_steps=2, total_steps=4)
        train(diloco, model, seed=5 + rank)
        anchor = diloco.anchor()
        diloco.close()
        return anchor, {name: whole(p) for name, p in plain.named_parameters()}

    found = run_members(tmp_path, [1, 2], body)
    assert not any(isinstance(result, str) for result in found.values()), found
    anchor = found[0, 0][0]
    for place, (_, live) in found.items():
        assert all(torch.equal(live[name], values) for name, values in anchor.items()), place


@each_kind
@pytest.mark.parametrize(
    "options",
    [
        {"round_seconds": 0.05, "total_rounds": 3},
        {"inner_steps": 3, "total_steps": 9, "overlap_steps": "auto"},
        {"round_seconds": 0.05, "total_rounds": 3, "overlap_seconds": "auto"},
    ],
    ids=["by the clock", "overlap", "overlap by the clock"],
)
def test_rounds_by_the_clock_and_automatic_overlap_end_with_one_model_in_all_members(
    options: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    def body(rank: int, member: int) -> Any:
        plain = small_model()
        model = wrapped(plain, kind)
        diloco = DiLoCo(model, **options)
        train(diloco, model, seed=5 + rank)
        diloco.close()
        return diloco.rounds, {name: whole(p) for name, p in plain.named_parameters()}

    found = run_members(tmp_path, [2, 2], body)
    assert not any(isinstance(result, str) for result in found.values()), found
    rounds, expected = found[0, 0]
    assert rounds == 3
    for place, (n, live) in found.items():
        assert n == rounds, place
        assert all(torch.equal(live[name], values) for name, values in expected.items()), place
