"""The Tab key completes verbs, options, backends and runs: in a real bash, with the file that the command installs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from executors.testing.helpers import environment

SCRIPT = """
source "$HOME/.bashrc"
complete -p replicas > /dev/null || exit 3
COMP_WORDS=({words})
COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
{function} replicas
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def call(home: Path, *command: str) -> str:
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command, env=environment(HOME=str(home), PATH=programs), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def complete(home: Path, *words: str) -> list[str]:
    """Return the completions of the last of these words, which are behind `replicas`."""
    quoted = " ".join(f"'{word}'" for word in ("replicas", *words))
    script = SCRIPT.format(words=quoted, function="_replicas_completion")
    return call(home, "bash", "-c", script).split()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder in which the completion of bash is installed."""
    folder = tmp_path_factory.mktemp("home")
    # with a second command, bash stays the parent of the first one, which asks its parents for the name of the shell
    assert "bash completion installed" in call(folder, "bash", "-c", "replicas --install-completion; exit $?")
    return folder


def test_bash_completes_verbs(home: Path) -> None:
    assert complete(home, "la") == ["launch"]


def test_bash_completes_options(home: Path) -> None:
    assert "--restarts" in complete(home, "launch", "--res")


def test_bash_completes_the_names_of_backends(home: Path) -> None:
    assert "modal" in complete(home, "launch", "--backend", "mo")
    assert complete(home, "backends", "slu") == ["slurm"]


def test_bash_completes_the_names_of_runs(home: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def main(): ...\n")
    launched = (
        "replicas",
        "launch",
        f"{tmp_path / 'train.py'}:main",
        "--n",
        "1",
        "--backend",
        "inline",
        "--run-id",
        "quiet-fox-1",
    )
    call(home, *launched)
    assert complete(home, "status", "qui") == ["quiet-fox-1"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_completion_of_other_shells_knows_the_verbs(shell: str, home: Path) -> None:
    """The shells are not needed: each calls the command with these variables when the user presses Tab."""
    asked = {"_REPLICAS_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": "replicas la"}
    variables = [f"{name}={value}" for name, value in {**asked, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}.items()]
    assert "launch" in call(home, "env", *variables, "replicas")
