"""Entrypoints as users write them: parsers of options, decorators, packages that `python -m` runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cli import HereInstead, Result

ARGPARSE = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--out", default="out")
def main():
    args = parser.parse_args()
    print("lr", args.lr, args.out)
    return {"lr": args.lr}
if __name__ == "__main__":
    main()
"""
AT_IMPORT = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--data", required=True)
args = parser.parse_args()
def main():
    print("data", args.data)
"""
PARSED_IN_THE_GUARD = """
import argparse
def main(args):
    print("lr", args.lr)
if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    main(parser.parse_args())
"""
HYDRA = """
import hydra
from hydra.core.hydra_config import HydraConfig
@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg):
    print("lr", cfg.lr, HydraConfig.get().runtime.output_dir)
if __name__ == "__main__":
    main()
"""
CLICK = """
import click
@click.command()
@click.option("--lr", default=0.1)
def main(lr):
    print("lr", lr)
if __name__ == "__main__":
    main()
"""
TYPER = """
import typer
def main(lr: float = 0.1):
    print("lr", lr)
if __name__ == "__main__":
    typer.run(main)
"""
FIRE = """
import fire
def main(lr=0.1):
    print("lr", lr)
if __name__ == "__main__":
    fire.Fire(main)
"""
PARSERS = {
    "argparse.py": ARGPARSE,
    "in_the_guard.py": PARSED_IN_THE_GUARD,
    "click_main.py": CLICK,
    "typer_main.py": TYPER,
    "fire_main.py": FIRE,
}


@pytest.fixture
def user(here: HereInstead) -> HereInstead:
    """A folder with a script of each kind."""
    folder = here.folder.path
    for name, source in {**PARSERS, "hydra_main.py": HYDRA, "at_import.py": AT_IMPORT}.items():
        (folder / name.replace("argparse", "argparse_main")).write_text(source)
    (folder / "conf").mkdir()
    (folder / "conf/config.yaml").write_text("lr: 0.1\n")
    return here


def log_of(user: HereInstead, result: Result, run_id: str) -> list[str]:
    assert result.code == 0, result
    return user.replicas("logs", run_id).stdout.splitlines()


@pytest.mark.parametrize("name", [name.replace("argparse", "argparse_main") for name in PARSERS])
def test_a_script_parses_its_own_options_and_none_of_this_project(user: HereInstead, name: str) -> None:
    result = user.launch(name, "--run-id", "without", n=2)
    assert [line[:10] for line in log_of(user, result, "without")] == ["[0] lr 0.1", "[1] lr 0.1"]
    result = user.launch(name, "--run-id", "with", "--", "--lr", "0.5", n=1)
    assert log_of(user, result, "with")[0].startswith("[0] lr 0.5")
    result = user.launch(name, "--run-id", "wrong", "--", "--no-such", "0.5", n=1)
    assert result.code == 1
    assert "no-such" in result.stdout, "the message contains the text of the parser"


def test_a_main_that_is_only_called_keeps_its_result(user: HereInstead) -> None:
    result = user.launch("argparse_main.py", "--json", n=1)
    assert result.json["replicas"][0]["result"] == {"lr": 0.1}
    result = user.launch("argparse_main.py:main", "--json", n=1)
    assert result.json["replicas"][0]["result"] == {"lr": 0.1}


def test_each_replica_fills_in_its_own_rank_in_the_options_of_a_script(user: HereInstead) -> None:
    options = ["--out", "out/${rank} of ${world_size}, $${rank}"]
    result = user.launch("argparse_main.py", "--run-id", "mine", "--", *options)
    assert log_of(user, result, "mine") == [f"[{rank}] lr 0.1 out/{rank} of 2, ${{rank}}" for rank in range(2)]


def test_hydra_finds_its_configuration_beside_the_file_and_an_output_folder_per_replica(user: HereInstead) -> None:
    output = "hydra.run.dir=out/${run_id}/${rank}"
    result = user.launch("hydra_main.py", "--run-id", "mine", "--", "lr=0.5", output)
    folder = user.folder.path / "out/mine"
    assert log_of(user, result, "mine") == [f"[{rank}] lr 0.5 {folder / str(rank)}" for rank in range(2)]
    assert {path.name for path in folder.iterdir()} == {"0", "1"}
    wrong = user.launch("hydra_main.py", "--", "no_such=0.5", n=1)
    assert wrong.code == 1
    assert "no_such" in wrong.stdout


def test_the_error_for_options_that_are_parsed_at_import_explains_where_to_put_them(user: HereInstead) -> None:
    result = user.launch("at_import.py")
    assert result.code == 2
    assert "the following arguments are required: --data" in result.stderr
    assert "after --, which runs it as a script: replicas launch at_import.py --n 4 -- …" in result.stderr
    result = user.launch("at_import.py", "--run-id", "mine", "--", "--data", "corpus", n=1)
    assert (result.code, user.replicas("logs", "mine").stdout) == (0, ""), (
        "the file calls no function, so it prints nothing, as with python"
    )


def test_the_error_for_a_misplaced_script_option_explains_where_to_put_it(user: HereInstead) -> None:
    for given in (["--lr", "0.5"], ["5"]):
        result = user.launch("argparse_main.py", *given)
        assert result.code == 2
        assert "Arguments of argparse_main.py go after --: " in result.stderr
        assert f"replicas launch argparse_main.py --n 4 -- {given[0]}" in result.stderr


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("sys.exit(main())", 0),
        ("sys.exit(0)", 0),
        ("sys.exit()", 0),
        ("raise SystemExit(main())", 0),
        ("sys.exit(1)", 1),
        ("sys.exit('no data')", 1),
    ],
)
def test_the_exit_code_of_a_script_decides_its_success(user: HereInstead, end: str, code: int) -> None:
    source = f"import sys\ndef main(): ...\nif __name__ == '__main__':\n    {end}\n"
    (user.folder.path / "leaving.py").write_text(source)
    assert user.launch("leaving.py", n=1).code == code


@pytest.fixture
def package(user: HereInstead) -> Path:
    """A package whose modules import each other relatively."""
    folder = user.folder.path / "of_user"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "data.py").write_text("NAME = 'corpus'\n")
    (folder / "train.py").write_text(f"from .data import NAME{ARGPARSE.replace('args.out', 'NAME, __package__')}")
    (folder / "__main__.py").write_text("from .train import main\nmain()\n")
    return folder


@pytest.mark.parametrize("module", ["of_user", "of_user.train"])
@pytest.mark.usefixtures("package")
def test_a_module_of_a_package_runs_as_python_runs_it_with_m(user: HereInstead, module: str) -> None:
    result = user.launch(module, "-m", "--run-id", "mine", "--", "--lr", "0.5")
    assert log_of(user, result, "mine") == [f"[{rank}] lr 0.5 corpus of_user" for rank in range(2)]
    result = user.launch(module, "-m", "--run-id", "plain", n=1)
    assert log_of(user, result, "plain") == ["[0] lr 0.1 corpus of_user"]
    status = user.replicas("status", "plain").stdout
    assert module in status
    assert "__main__" not in status


@pytest.mark.usefixtures("package")
def test_m_is_for_modules_alone(user: HereInstead) -> None:
    for name in ("argparse_main.py", "of_user.train:main", "of_user/train.py"):
        result = user.launch(name, "-m")
        assert (result.code, result.stderr.splitlines()[0]) == (
            2,
            f"Error: -m needs the name of a module, as in -m pkg.train, got {name!r}.",
        )


def test_a_script_runs_inline_with_its_options_and_leaves_ours_as_they_were(
    user: HereInstead, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    before = [*sys.path], [*sys.meta_path]
    result = user.replicas("launch", "argparse_main.py", "--backend", "inline", "--n", 1, "--", "--lr", "0.5")
    assert result.code == 0, result
    assert "lr 0.5 out" in result.stdout
    result = user.replicas("launch", "argparse_main.py", "--backend", "inline", "--n", 1)
    assert "lr 0.1 out" in result.stdout
    assert before[0] == sys.path
