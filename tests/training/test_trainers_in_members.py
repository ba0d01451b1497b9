"""Trainers of other libraries in replicas of several processes: all processes end with one model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.members import run_members, shards_on_cpus
from torch import nn

from executors.replica import current_replica

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]  # the trainers print many hints
N_ITEMS, STEPS, INNER = 48, 12, 4
PER_EPOCH = 12
"""The items of an epoch in each of the two processes of one of two replicas."""


def join_group(member: int, members: int) -> None:
    """Set the variables that a launcher sets in each process of a replica. The process group exists already."""
    os.environ.update(
        RANK=str(member), WORLD_SIZE=str(members), LOCAL_RANK=str(member), LOCAL_WORLD_SIZE=str(members),
        MASTER_ADDR="localhost", MASTER_PORT="1", TORCHELASTIC_RUN_ID="run", GROUP_RANK="0",
    )  # fmt: skip


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    from support.members import whole

    return {name: whole(p) for name, p in model.named_parameters()}


def check_one_model(found: dict[tuple[int, int], Any]) -> None:
    for place, result in found.items():
        assert not isinstance(result, str), f"{place}: {result}"
    first = next(iter(found.values()))["model"]
    for place, result in found.items():
        assert result["model"].keys() == first.keys()
        assert all(torch.equal(values, first[name]) for name, values in result["model"].items()), place


class Model(nn.Module):
    """A model that records the items on which it is trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 1)
        self.seen: list[int] = []

    def forward(self, at: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen += [int(each) for each in at.tolist()]
        x = torch.stack([torch.sin(at + k) for k in range(3)], 1)
        return {"loss": (self.linear(x).squeeze(1) - labels).square().mean()}


class Killed(Exception):
    pass


def train_hf(folder: Path, member: int, *, dies_at: int = 0, **more: Any) -> dict[str, Any]:
    """Train with the Trainer of transformers. Return the model, the steps, the rates and the items."""
    from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from diloco.trainers.hf import DiLoCoCallback, replica_arguments

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    replica = current_replica()
    if replica.members > 1:
        join_group(member, replica.members)
    rates: list[float] = []

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **with_: Any) -> None:
            rates.append(with_["optimizer"].param_groups[0]["lr"])

        def on_step_end(self, args: Any, state: Any, control: Any, **with_: Any) -> None:
            if state.global_step == dies_at and replica.attempt == 0:
                if member == 0:
                    ours.diloco._plain._workers.uploads.finish()
                ours.diloco.__exit__(Killed, Killed(), None)
                raise Killed

    args = TrainingArguments(
        str(folder / "out"), max_steps=STEPS, per_device_train_batch_size=2, learning_rate=0.05, logging_steps=2,
        lr_scheduler_type="cosine", save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
        remove_unused_columns=False, label_names=["labels"], **more,
    )  # fmt: skip
    items = [{"at": float(at), "labels": at / N_ITEMS} for at in range(N_ITEMS)]
    if args.fsdp and args.world_size > 1:
        # Accelerate has FSDP2 only for accelerators, so it must regard the CPUs of this test as such.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_HPU
    ours = DiLoCoCallback(inner_steps=INNER, snapshot_every=1)
    made = Trainer(
        model := Model(),
        replica_arguments(args),
        train_dataset=replica.shard(items, per="replica"),
        callbacks=[ours, Watch()],
    )
    try:
        made.train()
    except Killed:
        return {"step": dies_at, "seen": model.seen}
    return {"model": values_of(made.model), "step": made.state.global_step, "rates": rates, "seen": model.seen}


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp2", marks=shards_on_cpus)])
def test_two_replicas_of_two_processes_end_with_one_model_in_the_trainer_of_transformers(
    kind: str, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    import diloco.trainers.hf  # noqa: F401 - imported before the processes are forked

    more: dict[str, Any] = {} if kind == "ddp" else {"fsdp": True, "fsdp_config": {"version": 2, "min_num_params": 1}}
    found = run_members(tmp_path, [2, 2], lambda rank, member: train_hf(tmp_path, member, **more))
    check_one_model(found)
    assert {result["step"] for result in found.values()} == {STEPS}
    for rank in (0, 1):
        one, other = (set(found[rank, member]["seen"][:PER_EPOCH]) for member in (0, 1))
        assert (len(one | other), one & other) == (2 * PER_EPOCH, set()), "each item is used once in an epoch"
        assert found[rank, 0]["rates"] == found[rank, 1]["rates"]
        assert (tmp_path / f"out/{rank}").is_dir()


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp2", marks=shards_on_cpus)])
def test_a_killed_replica_of_two_processes_continues_the_trainer_with_its_schedule_and_its_data(
    kind: str, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    import diloco.trainers.hf  # noqa: F401 - imported before the processes are forked

    more: dict[str, Any] = {} if kind == "ddp" else {"fsdp": True, "fsdp_config": {"version": 2, "min_num_params": 1}}

    def body(rank: int, member: int) -> dict[str, Any]:
        return train_hf(tmp_path, member, dies_at=8, **more)

    (calm := tmp_path / "calm").mkdir()
    expected = run_members(calm, [2], lambda rank, member: train_hf(calm, member, **more))
    (killed := tmp_path / "killed").mkdir()
    first = run_members(killed, [2], body)
    second = run_members(killed, [2], body, attempt=1)
    check_one_model(second)
    for place, whole_training in expected.items():
        before, after = first[place], second[place]
        assert after["step"] == STEPS
        assert after["rates"] == whole_training["rates"][before["step"] :]
        assert before["seen"] + after["seen"] == whole_training["seen"], "each item is used exactly once"


def test_the_processes_of_a_trainer_that_are_not_those_of_the_replica_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    import diloco.trainers.hf  # noqa: F401 - imported before the processes are forked

    def body(rank: int, member: int) -> dict[str, Any]:
        join_group(member, 2)
        os.environ["REPLICA_MEMBERS"] = "4"
        return train_hf(tmp_path, member)

    assert (
        "rank 1 of 2 in a process group, in a replica of 4. Start them with `replicas launch --procs 2`."
        in (run_members(tmp_path, [2], body)[0, 1])
    )


def train_lightning(folder: Path, member: int, *, is_sharded: bool = False) -> dict[str, Any]:
    """Train with the Trainer of Lightning. Return the model, the steps, the rates and the items."""
    import lightning.pytorch as lightning
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    from diloco.trainers.lightning import DiLoCoCallback

    replica = current_replica()
    join_group(member, replica.members)
    rates: list[float] = []

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def configure_model(self) -> None:
            if is_sharded:
                fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
            loss: torch.Tensor = self.model(batch, batch / N_ITEMS)["loss"]
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), 0.05)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    data = replica.shard(torch.arange(float(N_ITEMS)), per="replica")
    strategy = ModelParallelStrategy(replica.members, 1) if is_sharded else "ddp"
    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", devices=replica.members, strategy=strategy, logger=False,
        callbacks=[DiLoCoCallback(inner_steps=INNER)], enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module := Module(), torch.utils.data.DataLoader(data, batch_size=2, shuffle=True))
    return {"model": values_of(module), "step": trainer.global_step, "rates": rates, "seen": module.model.seen}


@pytest.mark.parametrize("is_sharded", [False, pytest.param(True, marks=shards_on_cpus)], ids=["ddp", "fsdp2"])
def test_two_replicas_of_two_processes_end_with_one_model_in_the_trainer_of_lightning(
    is_sharded: bool, tmp_path: Path
) -> None:
    pytest.importorskip("lightning")
    import diloco.trainers.lightning  # noqa: F401 - imported before the processes are forked

    found = run_members(tmp_path, [2, 2], lambda rank, member: train_lightning(tmp_path, member, is_sharded=is_sharded))
    check_one_model(found)
    assert {result["step"] for result in found.values()} == {STEPS}
    for rank in (0, 1):
        one, other = (set(found[rank, member]["seen"][:PER_EPOCH]) for member in (0, 1))
        assert not one & other, "Lightning divides the data of a replica among its processes"
        assert found[rank, 0]["rates"] == found[rank, 1]["rates"]


def test_a_trainer_whose_model_fsdp2_has_not_sharded_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from accelerate.state import PartialState
    from support.hf_trainers import INNER as inner_steps
    from support.hf_trainers import arguments
    from transformers import TrainerControl, TrainerState

    from diloco.trainers.hf import DiLoCoCallback

    def body(rank: int, member: int) -> None:
        PartialState._reset_state()
        join_group(member, 2)
        args = arguments(tmp_path, fsdp=True)
        DiLoCoCallback(inner_steps=inner_steps).on_train_begin(args, TrainerState(), TrainerControl(), model=Model())

    given = arguments(tmp_path, fsdp=True).fsdp  # older releases make a list of it
    for text in run_members(tmp_path, [2], body).values():
        assert text == (
            f"ValueError: DiLoCoCallback got fsdp={given!r}, and FSDP2 has not sharded the model. Use fsdp_config="
            "{'version': 2} on GPUs, because FSDP1 is not supported and accelerate shards no model on CPUs."
        )
