"""The page on nanoGPT: its commands are accepted, and its patch turns a script of that form into one that trains one
model.

The scripts here have the form of nanoGPT's: settings in global variables that a file reads from the command line, DDP
if `RANK` is set, and a loop without an end of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.pages import ROOT, blocks_of, check_command, commands_of

from executors import LocalProcessExecutor, launch
from executors.protocol import ReplicaStatus
from executors.run.run import Run

PAGE = ROOT / "examples/nanogpt_command.md"
CONFIGURATOR = """
import sys

for word in sys.argv[1:]:
    name, _, value = word.removeprefix("--").partition("=")
    assert name in globals(), name
    globals()[name] = type(globals()[name])(value)
"""
MODEL = """
import torch
from dataclasses import dataclass


@dataclass
class GPTConfig:
    n_embd: int = 8


class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.lm_head = torch.nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x, y):
        return (torch.tanh(self.lm_head(x)) - y).square().mean()
"""
TRAIN = """
import hashlib
import os
import signal

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed import init_process_group, destroy_process_group

from model import GPTConfig, GPT

out_dir = "out"
max_iters = 200
dies_at = -1
exec(open("configurator.py").read())
ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend="gloo")
    seed_offset = int(os.environ["RANK"])
    master_process = seed_offset == 0
else:
    seed_offset, master_process = 0, True

if master_process:
    os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337 + seed_offset)
torch.backends.cuda.matmul.allow_tf32 = True # allow tf32 on matmul
torch.set_num_threads(1)
model = GPT(GPTConfig())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
if ddp:
    model = DDP(model)
iter_num = 0
raw_model = model.module if ddp else model # unwrap DDP container if needed
running_mfu = -1.0
while True:
    x = torch.randn(4, 8)
    loss = model(x, torch.sin(x))
    loss.backward()
    optimizer.step()
    # flush the gradients as soon as we can, no need for this memory anymore
    optimizer.zero_grad(set_to_none=True)

    is_victim = os.environ["REPLICA_RANK"] == "0" and seed_offset == 1 and os.environ["REPLICA_ATTEMPT"] == "0"
    if iter_num == dies_at and is_victim:
        os.kill(os.getpid(), signal.SIGKILL)
    if master_process:
        print(f"iter {iter_num}: loss {loss.item():.6f}")
    iter_num += 1
    if iter_num > max_iters:
        break

print("model", hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in raw_model.parameters())).hexdigest())

if ddp:
    destroy_process_group()
"""


@pytest.fixture
def folder(state_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a repository of the form of nanoGPT's."""
    for name, text in (("configurator.py", CONFIGURATOR), ("model.py", MODEL), ("train.py", TRAIN)):
        (tmp_path / name).write_text(text.lstrip())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def apply_patch(folder: Path) -> None:
    """Apply the patch of the page, as the page says."""
    (patch,) = [block.text for block in blocks_of(PAGE.read_text(encoding="utf-8")) if block.language == "diff"]
    (folder / "diloco.patch").write_text(patch)
    subprocess.run(["git", "apply", "diloco.patch"], cwd=folder, check=True, capture_output=True, text=True)


def train(way: str, *words: str, restarts: int = 0) -> list[str]:
    """Train two replicas of two processes in one of both ways, and return the output of each replica."""
    local = LocalProcessExecutor(preload=("torch",))
    arguments = [*words, "--out_dir=out-${rank}"]
    run: Run
    if way == "torchrun":
        run = launch(
            local, command=["torchrun", "--nproc-per-node", "2", "train.py", *arguments], n=2, restarts=restarts
        )
    else:
        run = launch(local, "train.py", 2, procs=2, argv=arguments, restarts=restarts)
    run.wait(200)
    outcomes = [each for each in run.outcomes() if each is not None]
    assert [each.status for each in outcomes] == [ReplicaStatus.SUCCEEDED] * 2, outcomes
    assert outcomes[0].attempt == restarts
    assert not left_of(run.run_id)
    return [each.output_tail for each in outcomes]


def left_of(run_id: str) -> list[str]:
    """Return the commands of the processes of a run that still exist."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if f"REPLICA_RUN_ID={run_id}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def losses_in(output: str) -> list[str]:
    return re.findall(r"iter \d+: loss \S+", output)


def models_in(outputs: list[str]) -> list[str]:
    return [model for output in outputs for model in re.findall(r"model (\w{64})", output)]


def test_the_page_has_commands_that_are_accepted() -> None:
    commands = [
        command
        for block in blocks_of(PAGE.read_text(encoding="utf-8"))
        if block.language == "console"
        for command, _ in commands_of(block.text)
    ]
    assert len([command for command in commands if command.startswith("replicas launch")]) == 4
    for command in commands:
        check_command(command)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_patch_of_the_page_applies_to_a_script_of_that_form_and_compiles(folder: Path) -> None:
    apply_patch(folder)
    patched = (folder / "train.py").read_text()
    compile(patched, "train.py", "exec")
    assert patched.count("diloco") == 6


@pytest.mark.timeout(240)
def test_the_script_has_the_same_losses_as_a_command_of_torchrun_and_as_members(folder: Path) -> None:
    one, other = (train(way, "--max_iters=20") for way in ("procs", "torchrun"))
    assert len(losses_in(one[0])) == 21
    assert [losses_in(output) for output in one] == [losses_in(output) for output in other]
    assert len(models_in(one)) == len(models_in(other)) == 4


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("way", ["procs", "torchrun"])
def test_replicas_of_the_patched_script_end_with_one_model_also_if_a_process_was_killed(way: str, folder: Path) -> None:
    apply_patch(folder)
    models = models_in(train(way, "--dies_at=120", restarts=1))
    assert len(models) == 4
    assert len({*models}) == 1
    assert os.path.isdir("out-1")
