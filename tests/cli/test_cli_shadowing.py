"""A user's folder with modules that have the names of Python's modules, of our dependencies, and of our packages."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.cli import FAST, Folder, HereInstead

from executors import LocalProcessExecutor, launch

TRAPS = (
    "logging", "typing", "random", "types", "json", "queue", "signal", "socket", "inspect", "dataclasses", "ast",
    "executors", "diloco", "numpy", "torch", "tenacity", "cloudpickle", "rich", "click", "typer", "platformdirs",
    "boto3", "packaging", "jinja2", "xxhash",
)  # fmt: skip
TRAP = "raise RuntimeError('a module of the user was imported in place of another')\n"
JOB = """
import logging, random, sys
import utils, test
from executors import current_replica

def main():
    assert sys.path[0] == %(folder)r, sys.path
    return [utils.NAME, test.NAME, logging.INFO, hasattr(random, "Random")]
"""
RESULT = ["of the user", "of the user", 20, True]
COMMAND = "import sys; from executors.cli import main; sys.exit(main())"


@pytest.fixture
def trapped(folder: Folder) -> Folder:
    """A user's folder with modules that only the user's code may import."""
    for name in TRAPS:
        (folder.path / f"{name}.py").write_text(TRAP)
    for name in ("utils", "test"):
        (folder.path / f"{name}.py").write_text("NAME = 'of the user'\n")
    (folder.path / "job.py").write_text(JOB % {"folder": str(folder.path)})
    return folder


def command(folder: Folder, *arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """Call the command like its installed script, whose folder is not the folder of the user."""
    script = folder.path.parent / "bin/replicas"
    script.parent.mkdir(exist_ok=True)
    script.write_text(COMMAND)
    done = subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        cwd=folder.path, env={**os.environ, **environ}, capture_output=True, text=True, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.mark.parametrize("entrypoint", ["job.py", "job.py:main", "job:main", "job"])
def test_a_launch_imports_the_users_modules_and_none_that_has_the_name_of_another(
    trapped: Folder, entrypoint: str
) -> None:
    done = command(trapped, "launch", entrypoint, "--n", 2, *FAST, "--run-id", "mine", "--json")
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert done.stdout.count('"of the user"') == 4
    for name in ("logging", "random"):
        told = f"job.py imports {name!r}. In a replica, that is Python's own module, and not your {name}.py"
        assert (told in done.stderr) == (name == "logging"), "only the first reserved name is reported"


def test_torch_is_preloaded_beside_a_module_of_that_name(trapped: Folder) -> None:
    source = "import sys\ndef main(): return sys.modules['torch'].__version__\n"
    (trapped.path / "with_torch.py").write_text(source)
    done = command(trapped, "launch", "with_torch.py", "--n", 1, "--option", 'preload=["torch"]')
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "imports" not in done.stderr, "a module that no file imports is not named"


def test_the_other_verbs_import_nothing_of_the_users_folder(trapped: Folder) -> None:
    assert command(trapped, "launch", "job:main", "--n", 1, *FAST, "--run-id", "mine").returncode == 0
    for verb in (
        "ls", "status mine", "logs mine", "events mine", "wait mine", "collect mine", "report mine --json", "backends",
        f"plan --params 1e3 --n 2 --step 1 --probe --store {trapped.path.parent}/store", "rm mine",
    ):  # fmt: skip
        done = command(trapped, *verb.split())
        assert done.returncode == 0, (verb, done.stdout, done.stderr)


def test_a_script_runs_among_modules_with_the_names_of_others(trapped: Folder) -> None:
    (trapped.path / "script.py").write_text("import logging, utils\nprint(logging.INFO, utils.NAME)\n")
    done = command(trapped, "launch", "script.py", "--n", 1, *FAST, "--run-id", "mine")
    assert (done.returncode, "script.py imports 'logging'" in done.stderr) == (0, True), done.stderr
    assert command(trapped, "logs", "mine").stdout == "[0] 20 of the user\n"


def test_inline_reserves_names_for_the_call_alone(here: HereInstead, trapped: Folder) -> None:
    paths = [*sys.path]
    run = launch("inline", "job.py", 1)
    assert run.results() == [RESULT]
    assert paths == sys.path


def test_a_file_that_is_named_like_a_reserved_module_runs_only_as_a_script(
    local: LocalProcessExecutor, folder: Folder
) -> None:
    (folder.path / "calendar.py").write_text("def main(): ...\n")
    done = command(folder, "launch", "calendar.py", "--n", 1, *FAST)
    assert (done.returncode, done.stdout) == (2, "")
    assert "'calendar.py' would be loaded as 'calendar', which is another module" in done.stderr
    (folder.path / "calendar.py").write_text("print('mine')\n")
    assert command(folder, "launch", "calendar.py", "--n", 1, *FAST).returncode == 0
