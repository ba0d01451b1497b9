"""A script without `if __name__ == "__main__"` launches exactly n replicas, and is not imported again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from executors.testing.helpers import environment

GUARD = """
import os, sys
with open({trace!r}, "a") as file:  # every import of this script leaves a line
    file.write(f"{{os.getpid()}} {{__name__}}\\n")
if len(open({trace!r}).readlines()) > 1:
    os._exit(99)  # no fork bombs
"""


def run_script(tmp_path: Path, text: str, *python: str) -> tuple[str, list[str]]:
    """Run a script; return what it printed, and a line for each time it was imported."""
    trace = tmp_path / "trace"
    (tmp_path / "train.py").write_text(GUARD.format(trace=str(trace)) + text)
    printed = run_python(tmp_path, *(python or ("train.py",)))
    return printed, trace.read_text().splitlines()


LAUNCH = """
from executors import LocalProcessExecutor, current_replica, launch

BASE = 10

class Helper:
    def add(self, number):
        return BASE + number

def train(scale):
    with open("calls", "a") as file:
        file.write("called\\n")
    return scale * Helper().add(current_replica().rank)

run = launch(LocalProcessExecutor(preload=()), train, 3, args={"scale": 2})
print(run.results())
"""


@pytest.mark.parametrize("python", [(), ("-m", "train")], ids=["as a script", "with -m"])
def test_an_unguarded_script_launches_exactly_n_and_is_not_imported_again(
    tmp_path: Path, python: tuple[str, ...]
) -> None:
    printed, imports = run_script(tmp_path, LAUNCH, *python)
    assert printed == "[20, 22, 24]\n"
    assert len(imports) == 1
    assert imports[0].endswith(" __main__")
    assert (tmp_path / "calls").read_text().splitlines() == ["called"] * 3


def run_python(tmp_path: Path, *command: str, given: str | None = None) -> str:
    """Run Python; return what it printed."""
    ran = subprocess.run(
        [sys.executable, *command], input=given, capture_output=True, text=True, env=environment(), cwd=tmp_path,
        timeout=100,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_a_guarded_script_can_be_given_as_a_file(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("""
from executors import LocalProcessExecutor, launch
def main(x):
    return [__name__, x]
if __name__ == "__main__":
    print(launch(LocalProcessExecutor(preload=()), __file__, 1, args={"x": 1}).results())
""")
    assert run_python(tmp_path, "job.py") == "[['job', 1]]\n"


def test_code_from_stdin_and_from_the_command_line_can_launch(tmp_path: Path) -> None:
    text = """
from executors import LocalProcessExecutor, launch
def train(steps: int) -> dict[str, int]:
    return {"steps": steps}
print(launch(LocalProcessExecutor(preload=()), train, n=2, args={"steps": 3}).results())
"""
    for printed in (run_python(tmp_path, "-", given=text), run_python(tmp_path, "-c", text)):
        assert printed == "[{'steps': 3}, {'steps': 3}]\n"


def test_a_script_that_ends_at_once_leaves_no_message_and_no_process(tmp_path: Path) -> None:
    text = """
import time
from executors import LocalProcessExecutor, launch
run = launch(LocalProcessExecutor(preload=(), term_grace_s=0.5), lambda: time.sleep(600), 2)
print("launched")
"""
    printed, _ = run_script(tmp_path, text)
    assert printed == "launched\n"


def test_a_script_with_arguments_and_a_module_of_its_own_finds_it_in_the_replicas(tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text("WIDTH = 64\n")
    text = """
import my_model
from executors import LocalProcessExecutor, launch
def train():
    import my_model as again
    return [my_model.WIDTH, again.WIDTH]
print(launch(LocalProcessExecutor(preload=()), train, 1).results())
"""
    assert run_script(tmp_path, text)[0] == "[[64, 64]]\n"


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_function_of_the_script_travels_by_value_from_a_child_that_imported_the_script_again(
    tmp_path: Path, method: str
) -> None:
    (tmp_path / "search.py").write_text("""
import multiprocessing, sys
from executors import LocalProcessExecutor, launch

class Helper:
    width = 64

def train(scale):
    return Helper().width * scale

def trial(scale):
    print(launch(LocalProcessExecutor(preload=()), train, 1, args={"scale": scale}).results(), flush=True)

if __name__ == "__main__":
    child = multiprocessing.get_context(sys.argv[1]).Process(target=trial, args=(2,))
    child.start()
    child.join()
""")
    assert run_python(tmp_path, "search.py", method) == "[128]\n"
