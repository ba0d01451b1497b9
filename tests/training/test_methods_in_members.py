"""Each public method of `DiLoCo` in the processes of one replica, for replicated and for sharded models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.members import each_kind, inner_step, run_members, shards_on_cpus, small_model, whole, wrapped
from torch import nn

from diloco import DiLoCo

TOGETHER = {"step", "steps", "sync", "stop", "attach_state", "state_dict", "load_state_dict", "close"}
"""The methods that all members call together."""
ALONE = {"anchor", "rounds", "inner_step", "is_over", "progress"}
"""The methods that each member may call by itself."""
REFUSED = {"average_also"}


def test_the_tests_of_members_know_each_public_method() -> None:
    assert {name for name in vars(DiLoCo) if not name.startswith("_")} == TOGETHER | ALONE | REFUSED


@each_kind
def test_each_public_method_gives_all_members_the_same_answers(kind: str, tmp_path: Path) -> None:
    def body(rank: int, member: int) -> dict[str, Any]:
        plain = small_model()
        model = wrapped(plain, kind)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        diloco = DiLoCo(model, inner_steps=2, total_steps=20)
        with pytest.raises(Exception, match=r"average_also\(\) is not available in a replica of 2 processes"):
            diloco.average_also({"ema": torch.zeros(2)})
        diloco.attach_state("optimizer", optimizer)
        diloco.attach_state("schedule", schedule, follow=True)
        data = torch.Generator().manual_seed(5)
        seen: list[list[Any]] = []
        for step in diloco.steps():
            inner_step(model, optimizer, data)
            report = diloco.step()
            if step == 2:
                seen.append([report.round for report in diloco.sync()])
            if step == 6:
                diloco.stop()
            seen.append(
                [step, None if report is None else report.round, diloco.rounds, diloco.inner_step, diloco.is_over,
                 round(diloco.progress, 5), schedule.last_epoch, optimizer.param_groups[0]["lr"]]
            )  # fmt: skip
        state = diloco.state_dict()
        anchor = diloco.anchor()
        diloco.close()
        live = {name: whole(p) for name, p in plain.named_parameters()}
        return {"seen": seen, "live": live, "anchor": anchor, "state": sorted(state)}

    found = run_members(tmp_path, [2], body)
    leader, follower = found[0, 0], found[0, 1]
    assert not isinstance(leader, str), leader
    assert not isinstance(follower, str), follower
    assert leader["seen"] == follower["seen"]
    assert leader["seen"][-1][4], "stop() has ended the run"
    assert (bool(leader["state"]), follower["state"], follower["anchor"]) == (True, [], {})
    for name, values in leader["anchor"].items():
        assert torch.equal(leader["live"][name], values)
        assert torch.equal(follower["live"][name], values)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle, self.out = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.out(torch.tanh(self.middle(self.embedding((x[:, :3].abs() * 5).long() % 11))))


class Nested(nn.Module):
    """A model that is sharded at several levels, with parameters that are smaller than the number of members."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2))
        self.scale, self.head = nn.Parameter(torch.ones(1)), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = x + block(x) * self.scale
        return self.head(x)


def frozen() -> nn.Module:
    model = small_model()
    model[0].requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "nested": Nested,
    "frozen": frozen,
    "one value": lambda: nn.Sequential(nn.Linear(8, 1), nn.Linear(1, 1), nn.Linear(1, 3)),
    "bfloat16": lambda: small_model().to(torch.bfloat16),
}


def sharded(model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    if isinstance(model, Nested):
        for block in model.blocks:
            fully_shard(block[0], mesh=mesh)  # type: ignore[index]
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def trained(name: str, shape: tuple[int, ...], rank: int) -> Any:
    torch.manual_seed(0)
    plain = MODELS[name]()
    model = sharded(plain, shape) if shape else plain
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    diloco = DiLoCo(model, inner_steps=2, total_steps=4, merge="carry", wire="int8", overlap_steps=1, background=False)
    data, dtype = torch.Generator().manual_seed(5 + rank), next(plain.parameters()).dtype
    for _ in diloco.steps():
        for _ in range(2):  # gradients are accumulated
            model(torch.randn(4, 8, generator=data).to(dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        diloco.step()
    diloco.close()
    return {each: whole(p) for each, p in plain.named_parameters()}


@shards_on_cpus
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=["two shards", "two replicas of two shards"])
@pytest.mark.parametrize("name", list(MODELS))
def test_models_of_all_kinds_have_the_bits_of_one_process(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    (folder := tmp_path / "one").mkdir()
    reference = run_members(folder, [1], lambda rank, member: trained(name, (), rank))[0, 0]
    assert not isinstance(reference, str), reference
    size = shape[0] * shape[-1] if len(shape) > 1 else shape[0]
    (folder := tmp_path / "several").mkdir()
    for place, live in run_members(folder, [size], lambda rank, member: trained(name, shape, rank)).items():
        assert not isinstance(live, str), live
        for each, values in reference.items():
            assert torch.equal(live[each], values), (place, each)
