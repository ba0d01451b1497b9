"""The recipes of the README and of the pages do what they promise. `test_pages.py` runs every block of the pages."""

from __future__ import annotations

import copy
import itertools
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.cli import FAST, HereInstead
from support.pages import blocks_of
from support.training import ScheduleFree, leave
from torch.optim import swa_utils

from diloco import DiLoCo
from diloco.testing import run_replicas
from docs.generate.pages import PAGES as FROM_CODE
from executors import attach, launch, list_runs
from executors.replica import Replica

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
# A build of the site leaves pages made from the code in the same folder. They have no recipes, and other directives.
BY_HAND = [
    path for path in sorted((ROOT / "docs").rglob("*.md")) if str(path.relative_to(ROOT / "docs")) not in FROM_CODE
]
PAGES = [README, *(path.read_text() for path in BY_HAND if "_build" not in path.parts)]
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON = [block.text for block in BLOCKS if block.language == "python"]
SHELL = [re.sub(r"(?m)^\$ ", "", block.text) for block in BLOCKS if block.language in ("sh", "console")]
TEXT = [block.text for block in BLOCKS if block.language == "text"]


def block_with(blocks: list[str], words: str) -> str:
    """Return the first block with these words. Blocks of the README come first."""
    return next(text for text in blocks if words in text)


def run(command: list[str], folder: Path) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_python_example_prints_what_the_readme_says_from_an_unguarded_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(block_with(PYTHON, "print(launch("))
    assert run([sys.executable, "script.py"], tmp_path) == block_with(TEXT, "{'rank': 3, 'loss': 0.005}]")
    (launched,) = list_runs()
    assert launched.warnings() == [], "no warning: a function without an optimizer does not train alone"


def test_the_python_example_has_six_lines() -> None:
    lines = [line for line in block_with(PYTHON, "print(launch(").splitlines() if line]
    assert len(lines) <= 6


def test_the_commands_train_follow_collect_and_remove_a_run(here: HereInstead) -> None:
    folder = here.folder.path
    (folder / "train.py").write_text(block_with(PYTHON, "# train.py"))
    outputs = {}
    for line in block_with(SHELL, "--run-id first-try").splitlines():
        program, verb, *arguments = line.split()
        told = here.replicas(verb, *arguments)
        assert (program, told.code) == ("replicas", 0), told
        outputs[verb] = told.stdout
    assert "first-try" in outputs["ls"]
    assert "succeeded" in outputs["status"]
    assert "trained alone" not in "".join(outputs.values())
    assert (folder / "first-try-results" / "results.json").is_file()
    assert "first-try" not in run(["replicas", "ls"], folder)


def test_the_commands_run_scripts_as_they_are(here: HereInstead) -> None:
    folder = here.folder.path
    options = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--lr')\n"
    options += "parser.add_argument('--out')\nargs = parser.parse_args()\nprint(args.lr, args.out)\n"
    hydra = "import hydra\n@hydra.main(version_base=None)\ndef main(cfg): print(cfg.lr)\n"
    hydra += "if __name__ == '__main__': main()\n"
    (folder / "pkg").mkdir()
    (folder / "pkg/train.py").write_text(options)
    printed = []
    for line in block_with(SHELL, "as python train.py").splitlines():
        program, *arguments = shlex.split(line, comments=True)
        (folder / "train.py").write_text(hydra if "hydra" in line else options)
        # this folder has no settings file
        arguments = ["+lr=1e-3" if each == "lr=1e-3" else each for each in arguments]
        told = here.replicas(*arguments[: -1 - arguments[::-1].index("--")], *FAST, *arguments[arguments.index("--") :])
        assert (program, told.code) == ("replicas", 0), told
        printed.append(here.replicas("logs", told.stdout.split(":")[0], "--rank", "3").stdout)
    assert printed == ["1e-3 out/3\n", "1e-3 None\n", "0.001\n"]
    assert len({path.parent for path in (folder / "out").glob("*/*")}) == 1


def lines_of(here: HereInstead, block: str) -> dict[str, str]:
    """Run the lines of a block of the README, and return what each verb printed last."""
    outputs = {}
    for line in block.splitlines():
        if line.startswith("replicas "):
            _, verb, *arguments = line.split()
            told = here.replicas(verb, *arguments)
            assert told.code == 0, told
            outputs[verb] = told.stdout
    return outputs


def test_the_trained_model_is_saved_evaluated_and_trained_further_as_the_readme_says(here: HereInstead) -> None:
    import torch
    from safetensors.torch import load_file

    folder = here.folder.path
    (folder / "train.py").write_text(block_with(PYTHON, "# train.py"))
    (folder / "evaluate.py").write_text(block_with(PYTHON, 'attach("first-try").model()'))
    launched = next(line for line in block_with(SHELL, "--run-id first-try").splitlines() if "launch" in line)
    lines_of(here, launched)
    told = lines_of(here, block_with(SHELL, "replicas model first-try --out"))
    assert "It is the model of first-try after round 30, step 300." in told["model"]
    weights = load_file(folder / "model.safetensors")["weight"]
    assert float(run([sys.executable, "evaluate.py"], folder).split()[1]) == pytest.approx(
        weights.sum().item(), abs=1e-5
    )
    assert torch.equal(weights, attach("first-try").model()["weight"])
    lines_of(here, block_with(SHELL, "--total-steps 800"))
    longer = here.replicas("model", "first-try", "--out", folder / "longer.safetensors")
    assert "after round 80, step 800." in longer.stdout
    lines_of(here, block_with(SHELL, "--from first-try"))
    started = attach("second-try").model(rounds=0)["weight"]
    assert torch.equal(started, load_file(folder / "longer.safetensors")["weight"])


EQUAL_SHARES = """
import torch
from diloco import DiLoCo
from executors import current_replica
from torch.utils.data import DataLoader, TensorDataset

def main():
    replica, dataset, epochs = current_replica(), TensorDataset(torch.randn(65, 1)), 100
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    {block}
    with diloco:
        for _ in range(epochs):
            for (inputs,) in loader:
                model(inputs).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                diloco.step()
    return diloco.inner_step
"""


def test_replicas_with_equal_shares_make_as_many_steps_although_the_items_cannot_be_divided(tmp_path: Path) -> None:
    block = block_with(PYTHON, "shard(dataset, equal=True)").replace("\n", "\n    ")
    (tmp_path / "equal_shares.py").write_text(EQUAL_SHARES.format(block=block))
    with launch("local", f"{tmp_path / 'equal_shares.py'}:main", n=2, timeout=120) as started:
        assert started.results() == [100, 100]


def test_the_smoke_test_of_the_readme_is_the_file_in_examples() -> None:
    def body(text: str) -> list[str]:
        return [line.strip().replace(" -> None", "") for line in text.splitlines() if line.strip()]

    example = (ROOT / "examples" / "ci_smoke_test.py").read_text().split('"""', 2)[2]
    assert body(block_with(PYTHON, "def test_training_runs")) == body(example)


def test_the_pythons_that_the_readme_names_are_those_of_the_package() -> None:
    named = re.search(r"Python ((?:3\.\d+(?:, | or )?)+)", README)
    assert named is not None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    prefix = "Programming Language :: Python :: "
    classified = [each.removeprefix(prefix) for each in project["classifiers"] if each.startswith(prefix)]
    assert re.findall(r"3\.\d+", named[1]) == classified
    assert project["requires-python"] == f">={classified[0]}"
    assert f"Python {named[1].strip()} " in (ROOT / "Makefile").read_text()


def test_every_link_to_a_file_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if "://" not in target:
            assert (ROOT / target).exists(), target


def test_the_files_that_contributors_are_sent_to_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = [word for word in re.findall(r"`([\w./]+)`", text) if "/" in word]
    assert len(paths) > 15
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_a_data_set_whose_items_alternate_has_all_kinds_in_each_share_if_it_is_permuted_first() -> None:
    for rank in (0, 1):
        scope: dict[str, Any] = {"dataset": [0, 1] * 50, "torch": torch, "Subset": torch.utils.data.Subset}
        scope["replica"] = Replica(rank, 2, "kinds", 0, "memory://kinds")
        exec(block_with(PYTHON, "torch.randperm"), scope)
        assert set(scope["share"]) == {0, 1}
        assert len(scope["share"]) == 50


def test_the_loop_over_epochs_ends_with_the_run_and_begins_where_the_run_is() -> None:
    from executors.store import MemoryStore

    model = torch.nn.Linear(1, 1)
    where: dict[str, Any] = {"store": MemoryStore(), "run_id": "epochs", "rank": 0, "world_size": 1}
    trained: list[int] = []
    diloco = DiLoCo(model, inner_steps=2, total_steps=10, outer_lr=1.0, outer_momentum=0.0, **where)
    for _ in range(4):  # the number of steps of an earlier attempt
        diloco.step()
    loader = CountedLoader()
    scope = {"diloco": diloco, "loader": loader, "itertools": itertools, "train_on": trained.append}
    exec(block_with(PYTHON, "train_on(batch)"), scope)
    assert (trained, diloco.inner_step, diloco.is_over) == ([0, 1, 2, 3, 0, 1], 10, True)
    assert loader.n_epochs == 2, "the loader begins no epoch after the last round"
    diloco.close()


def test_the_loop_over_epochs_continues_to_the_end_of_the_run_where_some_of_its_steps_do_not_count() -> None:
    """The replica was started again, and makes steps ahead of the others."""
    from executors.store import MemoryStore

    model = torch.nn.Linear(1, 1)
    where: dict[str, Any] = {"store": MemoryStore(), "run_id": "epochs", "rank": 0, "world_size": 1}
    diloco = DiLoCo(model, inner_steps=4, total_steps=8, outer_lr=1.0, outer_momentum=0.0, **where)
    trained: list[int] = []

    def train_on(batch: int) -> None:
        trained.append(batch)
        if len(trained) == 3:
            diloco._training_side.phase.set_steps_since(0)

    exec(
        block_with(PYTHON, "train_on(batch)"),
        {"diloco": diloco, "loader": CountedLoader(), "itertools": itertools, "train_on": train_on},
    )
    assert (len(trained), diloco.inner_step, diloco.is_over) == (10, 8, True)
    diloco.close()


class CountedLoader:
    n_epochs = 0

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        self.n_epochs += 1
        return iter(range(4))


def test_the_averaged_model_that_is_evaluated_and_saved_after_a_round_is_the_same_on_each_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def body(where: Mapping[str, Any]) -> list[float]:
        model = torch.nn.Linear(1, 1)
        losses: list[float] = []

        def train_on(batch: float) -> None:
            with torch.no_grad():
                model.weight.add_(batch)

        def save(state: dict[str, torch.Tensor], name: str) -> None:
            torch.save(state, f"{where['rank']}-{name}")

        diloco = DiLoCo(model, inner_steps=2, total_steps=20, outer_lr=1.0, outer_momentum=0.0, **where)
        scope = {
            "model": model, "diloco": diloco, "batches": itertools.repeat(1.0 + where["rank"]), "copy": copy,
            "train_on": train_on, "evaluate": lambda model: model.weight.item(), "held_out_losses": losses,
            "torch": SimpleNamespace(save=save),
        }  # fmt: skip
        exec(block_with(PYTHON, "held_out_losses"), scope)
        leave(diloco)
        return losses

    first, second = run_replicas(2, body)
    assert first == second
    assert first[1] - first[0] == pytest.approx(5 * 2 * 1.5), "the mean has moved by five rounds"
    saved = [torch.load(tmp_path / f"{rank}-anchor-10.pt") for rank in range(2)]
    assert torch.equal(saved[0]["weight"], saved[1]["weight"])
    assert saved[0]["weight"].item() == first[1]


def test_a_schedule_of_epochs_is_right_in_a_replica_that_came_back() -> None:
    from executors.store import MemoryStore

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    where: dict[str, Any] = {"store": MemoryStore(), "run_id": "epochs", "rank": 0, "world_size": 1}
    diloco = DiLoCo(model, inner_steps=2, total_steps=12, outer_lr=1.0, outer_momentum=0.0, **where)
    for _ in range(4):  # the number of steps of an earlier attempt: the first epoch
        optimizer.step()
        diloco.step()
    rates: list[float] = []

    def train_an_epoch() -> None:
        rates.append(optimizer.param_groups[0]["lr"])
        for _ in range(4):
            diloco.step()

    scope = {"diloco": diloco, "loader": range(4), "schedule": schedule, "itertools": itertools}
    scope["train_an_epoch"] = train_an_epoch
    exec(block_with(PYTHON, "while schedule.last_epoch"), scope)
    assert rates == [0.5, 0.25]
    diloco.close()


def run_recipe(words: str, make: Callable[[torch.nn.Module], dict[str, Any]], after_step: str = "") -> list[Any]:
    """Run a recipe of the README in two replicas that train on different data. Return the tensors that the recipe
    averages.
    """

    def body(where: Mapping[str, Any]) -> Any:
        torch.manual_seed(where["rank"])
        model = torch.nn.Linear(8, 1)
        scope = {"model": model, "steps": 40, "DiLoCo": partial(DiLoCo, **where), **vars(swa_utils), **make(model)}
        if not after_step:
            exec(block_with(PYTHON, words), scope)
        diloco: DiLoCo = scope.setdefault("diloco", None) or DiLoCo(
            model, inner_steps=10, total_steps=40, outer_lr=1.0, outer_momentum=0.0, **where
        )
        scope |= {"diloco": diloco, **scope["begin"]()}
        scope.get("made", {})["scope"] = scope  # a recipe may put another optimizer into it
        for _ in diloco.steps():
            x = torch.randn(16, 8) + where["rank"]
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            scope["step"]()
            model.zero_grad()
            if after_step:
                exec(block_with(PYTHON, words), scope)
            else:
                diloco.step()
                scope["after"](scope)
        diloco.close()
        return [values.detach().clone() for values in [*model.parameters(), *scope["result"](scope)]]

    return run_replicas(2, body)


def test_the_recipe_for_an_average_of_weights_ends_with_one_average() -> None:
    def make(model: torch.nn.Module) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        return {
            "begin": dict,
            "step": optimizer.step,
            "after": lambda scope: scope["ema"].update_parameters(model),
            "result": lambda scope: scope["ema"].parameters(),
        }

    first, second = run_recipe("average_also(ema)", make)
    assert all(map(torch.equal, first, second))


def test_the_recipe_for_master_weights_ends_with_one_model() -> None:
    def make(model: torch.nn.Module) -> dict[str, Any]:
        made: dict[str, Any] = {}

        def begin() -> dict[str, Any]:
            masters = [p.detach().clone() for p in model.parameters()]
            made.update(masters=masters, optimizer=torch.optim.AdamW(masters, 0.01))
            return {"masters": masters}

        def step() -> None:
            for master, parameter in zip(made["masters"], model.parameters(), strict=True):
                master.grad = parameter.grad
            made["optimizer"].step()
            for master, parameter in zip(made["masters"], model.parameters(), strict=True):
                parameter.data.copy_(master)

        return {"begin": begin, "step": step, "result": lambda scope: made["masters"]}

    first, second = run_recipe("master.data.copy_", make, after_step="step")
    assert all(map(torch.equal, first, second))


def test_the_recipe_for_an_optimizer_that_begins_at_the_first_weights_ends_with_one_model() -> None:
    class DualAveraging(torch.optim.Optimizer):
        """Each step computes the weights from the first weights and the sum of all gradients.

        The first weights are divided by 4, so that no warning takes them for a copy of the weights.
        """

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter] = {"sum": torch.zeros_like(parameter), "quarter": parameter.detach() * 0.25}

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for parameter, state in self.state.items():
                state["sum"] += parameter.grad
                parameter.copy_(4 * state["quarter"] - 0.02 * state["sum"])

    def make(model: torch.nn.Module) -> dict[str, Any]:
        made: dict[str, Any] = {}

        def begin() -> dict[str, Any]:
            return {"optimizer": DualAveraging(model.parameters()), "make_optimizer": DualAveraging}

        def step() -> None:
            made["scope"]["optimizer"].step()

        return {"begin": begin, "step": step, "result": lambda scope: [], "made": made}

    first, second = run_recipe("make_optimizer", make, after_step="step")
    assert all(map(torch.equal, first, second))


def test_the_recipe_for_a_schedule_free_optimizer_ends_with_one_model() -> None:
    def make(model: torch.nn.Module) -> dict[str, Any]:
        optimizer = ScheduleFree(model.parameters(), 0.02)

        def result(scope: dict[str, Any]) -> list[torch.Tensor]:
            optimizer.eval()
            return list(model.parameters())

        return {
            "optimizer": optimizer,
            "begin": dict,
            "step": optimizer.step,
            "after": lambda scope: None,
            "result": result,
        }

    first, second = run_recipe('optimizer.state[parameter]["z"]', make)
    assert all(map(torch.equal, first, second))
