"""Launches real entrypoints, and tests checks that need an import. The unit tests cover the forms of entrypoints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import tasks
from support.processes import children_of, parent_of

from executors import LocalProcessExecutor, launch, list_runs
from executors.errors import EntrypointError, ReplicaFailedError
from executors.testing import eventually

SOURCE = '''
"""A user's module that leaves a line whenever it is imported."""
import os, sys
from neighbour import NAME

with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "imported"), "a") as file:
    file.write(f"{os.getpid()} {__name__}\\n")

def main(x=0):
    return ["main", x, NAME]

def train(x, *, y=1):
    return ["train", x + y, __name__]

constant = 3
made_up = __import__("functools").partial(train, y=5)

if __name__ == "__main__":
    open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "ran as a script"), "w").close()
'''
BUSY = """
import subprocess, sys
subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
def train(): ...
"""
NEEDING = """
from executors.errors import MissingDependencyError
raise MissingDependencyError("It needs x. Install it with: pip install x")
def train(): ...
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's project, which is the current directory and on `sys.path`."""
    root = tmp_path / "a project"
    (root / "package").mkdir(parents=True)
    (root / "neighbour.py").write_text("NAME = 'neighbour'\n")
    (root / "job.py").write_text(SOURCE)
    (root / "package/__init__.py").write_text("")
    (root / "package/job.py").write_text(SOURCE)
    monkeypatch.chdir(root)
    monkeypatch.setattr(sys, "path", [str(root), *sys.path])
    return root


def test_every_form_of_an_entrypoint_is_called(
    local: LocalProcessExecutor, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forms = {
        "job:train": ["train", 3, "job"],
        "job.train": ["train", 3, "job"],
        "job": ["main", 2, "neighbour"],
        "package.job:train": ["train", 3, "package.job"],
        "job.py:train": ["train", 3, "job"],
        "./job.py:train": ["train", 3, "job"],
        "package.job.train": ["train", 3, "package.job"],
        "job.py": ["main", 2, "neighbour"],
        "package/../job.py": ["main", 2, "neighbour"],
        "job:made_up": ["train", 7, "job"],
    }
    for form, result in forms.items():
        assert launch(local, form, 2, args={"x": 2}).results() == [result] * 2, form
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(project)])
    assert launch(local, f"{project}/job.py:train", 1, args={"x": 1}).results() == [["train", 2, "job"]]
    assert not (project / "ran as a script").exists()
    pids = {line.split()[0] for line in (project / "imported").read_text().splitlines()}
    assert str(os.getpid()) not in pids, "the launcher never imports the user's module"
    assert "job" not in sys.modules


def test_an_entrypoint_that_cannot_be_called_is_refused_before_anything_starts(
    local: LocalProcessExecutor, project: Path
) -> None:
    sources = {
        "raising": "def train(): ...\n\nraise RuntimeError('at import')\n",
        "broken": "def train(): ...\n\nthis is not python\n",
        "needy": "import a_module_nobody_has\n\ndef train(): ...\n",
        "leaving": "import sys\ndef train(): ...\nsys.exit(0)\n",
        "leaving_at_once": "import os\ndef train(): ...\nos._exit(0)\n",
        "dying": "import os\ndef train(): ...\nos.kill(os.getpid(), 9)\n",
        "busy": BUSY,
        "random": "def main(): ...\n",
    }
    (project / "elsewhere").mkdir()
    for name, source in sources.items():
        (project / (f"elsewhere/{name}.py" if name == "random" else f"{name}.py")).write_text(source)
    table: list[tuple[str, dict[str, Any], str]] = [
        ("job:trian", {}, r"trian.*Did you mean 'train'\?"),
        ("job:constant", {}, "constant.*not a function"),
        ("job:made_up", {}, "x"),
        ("job:train", {"x": 1, "z": 2}, "'z'"),
        ("job:train", {"x": {1, 2}}, "JSON"),
        ("raising:train", {}, r"(?s)line 3.*at import"),
        ("broken:train", {}, "line 3"),
        ("broken.py:train", {}, "line 3"),
        ("needy:train", {}, "a_module_nobody_has"),
        ("leaving:train", {}, "leaving"),
        ("leaving_at_once:train", {}, "leaving_at_once"),
        ("dying:train", {}, "dying"),
        ("busy:train", {"no_such": 1}, "no_such"),
        ("elsewhere/random.py", {}, "random.*another module.*Rename"),
    ]
    for entrypoint, args, words in table:
        with pytest.raises(EntrypointError, match=words):
            launch(local, entrypoint, 2, args=args)
    odd_names: Any = {1: 2}
    with pytest.raises((TypeError, ValueError)):
        launch(local, "job:train", 1, args=odd_names)
    assert list_runs() == []
    assert launch(local, tasks.rank, 1).results() == [0], "the zygote is well"


LAUNCHES = """
import os, sys
from pathlib import Path
from executors import launch
noted = Path(__file__).with_name("imported")
with noted.open("a") as file:
    print(os.getpid(), file=file)
if len(noted.read_text().splitlines()) > 3:
    os._exit(9)  # else a test that fails would not end
def train(): return 7
print(launch("local", train, 1).results())
"""


def test_a_module_that_launches_while_a_replica_imports_it_is_refused(
    local: LocalProcessExecutor, project: Path
) -> None:
    (project / "quick.py").write_text(LAUNCHES)
    words = r"launch\(\) is called while '(quick\.py:train|quick:train)' is imported for a replica.*__name__"
    for entrypoint in ("quick.py:train", "quick:train"):
        with pytest.raises(EntrypointError, match=words):
            launch(local, entrypoint, 2)
    assert len((project / "imported").read_text().splitlines()) == 2, (
        "each launch imports the module once, for its check"
    )
    assert list_runs() == []


def test_a_module_that_launches_its_own_function_when_it_is_imported_is_refused_in_the_replica(project: Path) -> None:
    (project / "quick.py").write_text(LAUNCHES)
    environ = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}:{project}"}
    command = [sys.executable, "-P", "-c", "import quick"]
    done = subprocess.run(command, env=environ, cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "launch() is called while the module of a callable is imported for a replica" in done.stderr
    assert len((project / "imported").read_text().splitlines()) == 2
    assert len(list_runs()) == 1
    script = [sys.executable, "quick.py"]
    as_script = subprocess.run(script, env=environ, cwd=project, capture_output=True, check=False)
    assert (as_script.returncode, as_script.stdout) == (0, b"[7]\n"), "a script without a guard can launch itself"


def test_nothing_is_left_of_the_checks(local: LocalProcessExecutor, project: Path) -> None:
    run = launch(local, "job:train", 1, args={"x": 1})
    run.wait()
    supervisor = run.handles[0].metadata["supervisor_pid"]
    guard = parent_of(supervisor)
    zygote = parent_of(guard) if guard is not None else None
    if zygote is not None:
        eventually(lambda: set(children_of(zygote)) <= {guard}, "only the supervisor and its guard are left")


def test_a_module_changed_between_two_launches_is_read_again(local: LocalProcessExecutor, project: Path) -> None:
    for number in range(3):
        (project / "changing.py").write_text(f"def train():\n    return {number}  # {'.' * number}\n")
        assert launch(local, "changing:train", 1).results() == [number]


def test_an_entrypoint_that_lacks_a_package_is_refused_with_the_line_that_installs_it_and_no_traceback(
    local: LocalProcessExecutor, project: Path
) -> None:
    (project / "needing.py").write_text(NEEDING)
    with pytest.raises(EntrypointError) as refused:
        launch(local, "needing:train", n=2)
    assert (
        str(refused.value) == "Entrypoint 'needing:train' cannot be loaded. It needs x. Install it with: pip install x"
    )


def test_an_exception_of_a_user_module_has_its_traceback_without_frames_of_this_project(
    local: LocalProcessExecutor, project: Path
) -> None:
    (project / "dividing.py").write_text("def train():\n    return 1 / 0\n")
    with pytest.raises(ReplicaFailedError, match="ZeroDivisionError: division by zero") as caught:
        launch(local, "dividing:train", 1).results()
    assert 'dividing.py", line 2, in train' in str(caught.value)
    assert "executors/" not in str(caught.value)


def test_entrypoints_may_launch_runs_of_their_own_and_use_multiprocessing(local: LocalProcessExecutor) -> None:
    def entrypoint() -> Any:
        import math
        import multiprocessing

        from support import tasks

        from executors import LocalProcessExecutor, launch

        found: list[Any] = []
        for method in ("fork", "spawn"):
            with multiprocessing.get_context(method).Pool(2) as pool:
                found.append(pool.map(math.factorial, [3, 4]))
        with launch(LocalProcessExecutor(preload=()), tasks.rank, 2) as inner:
            return [*found, inner.results()]

    assert launch(local, entrypoint, 2).results() == [[[6, 24], [6, 24], [0, 1]]] * 2
