"""Entrypoints that train with the trainers of other libraries."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from executors import LocalProcessExecutor, Run, launch
from executors.attempt import Attempt
from executors.run.resume import resume
from executors.run.run import view_of
from executors.testing import eventually
from support.runs import pid_of

LOCAL = LocalProcessExecutor(term_grace_s=30)
STARTS_WITHIN_S = 100.0  # importing transformers takes long if all cores are busy


def calm_and_killed(
    entrypoint: str | Callable[..., Any], args: Mapping[str, Any], *, round: int
) -> tuple[list[Any], list[Any]]:
    """Return the results of a run of two replicas without a kill, and of a run in which one is killed and comes back.

    The other replica waits while the killed one is absent. Otherwise it would finish first.
    """
    import os

    calm = launch(LOCAL, entrypoint, 2, args=args, seed=1).results()
    run = launch(LOCAL, entrypoint, 2, args=args, seed=1, chaos=[f"kill:rank=1,round={round}"])
    died = Attempt(view_of(run).store, run.run_id, 1, 0).outcome
    eventually(died, "rank 1 is killed", within_s=STARTS_WITHIN_S)
    pid = pid_of(run.handles[0])
    os.kill(pid, signal.SIGSTOP)
    try:
        run = resume(run, ranks=[1])
        eventually(partial(presents_itself, run, 1), "rank 1 trains again", within_s=STARTS_WITHIN_S)
    finally:
        os.kill(pid, signal.SIGCONT)
    return calm, run.results()


def presents_itself(run: Run, rank: int) -> bool:
    """Return True if a rank has sent a contribution to the open round."""
    sent = view_of(run).store.list(f"{run.run_id}/diloco/main/r")
    return any(entry.key.endswith(f"/contribution/{rank}") for entry in sent)


def has_reported(run: Run, rank: int, attempt: int) -> bool:
    """Return True if an attempt of a rank has made steps."""
    replica = run.status().replicas[rank]
    return replica.attempt == attempt and replica.reported.get("step", 0) > 0


def train_for_ever(folder: str) -> None:
    """Train with a Trainer that saves a checkpoint at SIGTERM."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from diloco.trainers.hf import DiLoCoCallback
    from executors import current_replica

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.linear(x.unsqueeze(1)).square().mean()}

    class Slow(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **with_: Any) -> None:
            time.sleep(0.02)
            current_replica().report(step=state.global_step)

    args = TrainingArguments(
        folder, max_steps=1_000_000, report_to="none", disable_tqdm=True, enable_jit_checkpoint=True, use_cpu=True,
        remove_unused_columns=False, save_strategy="no", logging_strategy="no",
    )  # fmt: skip
    data = [{"x": float(at)} for at in range(64)]
    Trainer(Model(), args, train_dataset=data, callbacks=[DiLoCoCallback(inner_steps=5), Slow()]).train()
    raise AssertionError("the replica was cancelled")


def stop_early(trainer: str, folder: str) -> dict[str, Any]:
    """Train 2000 steps. Rank 0 alone asks to stop after step 20. Return the last step and the model."""
    import hashlib

    import torch

    from executors import current_replica

    torch.manual_seed(0)
    train = {"hf": _stop_early_of_hf, "lightning": _stop_early_of_lightning}[trainer]
    step, diloco, model = train(folder, current_replica().rank == 0)
    values = b"".join(values.detach().numpy().tobytes() for values in model.parameters())
    return {"step": step, "rounds": diloco.rounds, "model": hashlib.sha256(values).hexdigest()}


def _stop_early_of_hf(folder: str, decides: bool) -> tuple[int, Any, Any]:
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from diloco.trainers.hf import DiLoCoCallback, replica_arguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.linear(x.unsqueeze(1)).squeeze(1) - x / 64).square().mean()}

    class Stops(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **with_: Any) -> None:
            time.sleep(0.005)  # so that 2000 steps take longer than a replica needs to learn of the decision
            control.should_training_stop |= decides and state.global_step >= 20

    args = TrainingArguments(
        folder, max_steps=2000, report_to="none", disable_tqdm=True, use_cpu=True, remove_unused_columns=False,
        save_strategy="no", logging_strategy="no", learning_rate=1e-3,
    )  # fmt: skip
    ours = DiLoCoCallback(inner_steps=10)
    made = Trainer(
        Model(),
        replica_arguments(args),
        train_dataset=[{"x": float(at)} for at in range(64)],
        callbacks=[ours, Stops()],
    )
    made.train()
    return made.state.global_step, ours.diloco, made.model


def _stop_early_of_lightning(folder: str, decides: bool) -> tuple[int, Any, Any]:
    import lightning.pytorch as lightning
    import torch

    from diloco.trainers.lightning import DiLoCoCallback
    from executors import current_replica

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(1, 1)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            time.sleep(0.005)
            loss: torch.Tensor = (self.linear(batch.unsqueeze(1)).squeeze(1) - batch / 64).square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    class Stops(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop |= decides and trainer.global_step >= 20

    ours = DiLoCoCallback(inner_steps=10)
    trainer = lightning.Trainer(
        max_steps=2000, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[ours, Stops()], default_root_dir=folder,
    )  # fmt: skip
    module, data = Module(), torch.arange(64.0) + current_replica().rank / 2
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=8))  # type: ignore[arg-type]
    return trainer.global_step, ours.diloco, module
