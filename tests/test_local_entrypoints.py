"""The forms of an entrypoint, launched for real, and what is refused before anything starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import local_tasks
import pytest
from processes_of_tests import children_of, parent_of

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

class Trainer:
    @staticmethod
    def fit(x):
        return x

constant = 3
made_up = __import__("functools").partial(train, y=5)

if __name__ == "__main__":
    open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "ran as a script"), "w").close()
'''


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's project, which is the current directory and on `sys.path`."""
    root = tmp_path / "a project"
    (root / "package" / "deep").mkdir(parents=True)
    (root / "neighbour.py").write_text("NAME = 'neighbour'\n")
    (root / "job.py").write_text(SOURCE)
    (root / "package/__init__.py").write_text("")
    (root / "package/deep/__init__.py").write_text("def f(x):\n    return ['deep', x]\n")
    (root / "package/deep/main_module.py").write_text("def main(x):\n    return ['main of a module', x]\n")
    (root / "package/job.py").write_text(SOURCE.replace("from neighbour", "from neighbour"))
    monkeypatch.chdir(root)
    monkeypatch.setattr(sys, "path", [str(root), *sys.path])
    return root


FORMS: dict[str, Any] = {
    "job:train": ["train", 3, "job"],
    "job.train": ["train", 3, "job"],
    "job": ["main", 2, "neighbour"],
    "package.job:train": ["train", 3, "package.job"],
    "package.deep:f": ["deep", 2],
    "package.deep.f": ["deep", 2],
    "package.deep.main_module": ["main of a module", 2],
    "job.py:train": ["train", 3, "job"],
    "job.py": ["main", 2, "neighbour"],
    "./job.py:train": ["train", 3, "job"],
    "package/../job.py": ["main", 2, "neighbour"],
    "job:made_up": ["train", 7, "job"],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_an_entrypoint_is_called(local: LocalProcessExecutor, project: Path, form: str) -> None:
    assert launch(local, form, 2, args={"x": 2}).results() == [FORMS[form]] * 2
    assert not (project / "ran as a script").exists()


def test_a_file_is_found_from_elsewhere_by_its_absolute_path(
    local: LocalProcessExecutor, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(project)])
    assert launch(local, f"{project}/job.py:train", 1, args={"x": 1}).results() == [["train", 2, "job"]]


def test_the_users_module_is_never_imported_by_the_launcher(local: LocalProcessExecutor, project: Path) -> None:
    run = launch(local, "job:train", 2, args={"x": 1})
    run.wait()
    pids = {line.split()[0] for line in (project / "imported").read_text().splitlines()}
    assert str(os.getpid()) not in pids
    assert "job" not in sys.modules


REFUSED: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "a typo in the function": ("job:trian", {}, ("trian", "Did you mean 'train'?")),
    "a typo in the function of a file": ("job.py:trian", {}, ("trian", "Did you mean 'train'?")),
    "no such module": ("jbo:train", {}, ("jbo",)),
    "no such package": ("nopackage.mod:f", {}, ("nopackage",)),
    "no such file": ("package/jbo.py:train", {}, ("package/jbo.py",)),
    "no main": ("package.deep", {}, ("main",)),
    "no main in a file": ("neighbour.py", {}, ("main",)),
    "not a function": ("job:constant", {}, ("constant", "not a function")),
    "a missing argument": ("job:train", {}, ("'x'",)),
    "an unknown argument": ("job:train", {"x": 1, "z": 2}, ("'z'",)),
    "a typo in an argument": ("job.py", {"X": 1}, ("'X'",)),
    "an argument that is no JSON": ("job:train", {"x": {1, 2}}, ("JSON",)),
    "no form at all": ("job train", {}, ("job train",)),
    "two colons": ("job:train:again", {}, ("job:train:again",)),
    "an empty name": ("", {}, ("''",)),
    "a missing argument of what only importing tells": ("job:made_up", {}, ("x",)),
}


@pytest.mark.parametrize(("entrypoint", "args", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_called_is_refused_before_anything_starts(
    local: LocalProcessExecutor, project: Path, entrypoint: str, args: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(EntrypointError) as caught:
        launch(local, entrypoint, 2, args=args)
    for word in words:
        assert word in str(caught.value)
    assert list_runs() == []


def test_a_callable_that_does_not_take_the_arguments_is_refused(local: LocalProcessExecutor) -> None:
    def entrypoint(steps: int) -> None: ...

    for args in ({}, {"step": 1}, {"steps": 1, "more": 2}):
        with pytest.raises(EntrypointError, match="entrypoint") as caught:
            launch(local, entrypoint, 1, args=args)
        assert isinstance(caught.value, TypeError)
        assert "steps" in str(caught.value)
    assert list_runs() == []


def test_arguments_with_names_that_are_no_strings_are_refused(local: LocalProcessExecutor) -> None:
    args: Any = {1: 2}
    with pytest.raises((TypeError, ValueError)):
        launch(local, "executors.testing.tasks:echo", 1, args=args)
    assert list_runs() == []


def test_a_module_that_raises_while_imported_is_refused_with_its_traceback(
    local: LocalProcessExecutor, project: Path
) -> None:
    (project / "broken.py").write_text("def train():\n    pass\n\nraise RuntimeError('at import')\n")
    with pytest.raises(EntrypointError, match="at import") as caught:
        launch(local, "broken:train", 1)
    assert "line 4" in str(caught.value)


def test_a_module_with_a_syntax_error_is_refused_with_its_line(local: LocalProcessExecutor, project: Path) -> None:
    (project / "broken.py").write_text("def train():\n    pass\n\nthis is not python\n")
    for form in ("broken:train", "broken.py:train"):
        with pytest.raises(EntrypointError, match=r"line 4"):
            launch(local, form, 1)


def test_a_module_that_needs_what_is_not_installed_names_it(local: LocalProcessExecutor, project: Path) -> None:
    (project / "needy.py").write_text("import a_module_nobody_has\n\ndef train():\n    pass\n")
    with pytest.raises(EntrypointError, match="a_module_nobody_has"):
        launch(local, "needy:train", 1)


def test_a_module_that_leaves_or_dies_while_imported_is_refused(local: LocalProcessExecutor, project: Path) -> None:
    for number, text in enumerate(
        ["import sys; sys.exit(0)", "import os; os._exit(0)", "import os; os.kill(os.getpid(), 9)"]
    ):
        (project / f"leaving{number}.py").write_text(f"def train():\n    pass\n\n{text}\n")
        with pytest.raises(EntrypointError, match=f"leaving{number}"):
            launch(local, f"leaving{number}:train", 1)
    assert launch(local, local_tasks.rank, 1).results() == [0], "the zygote is well"


def test_processes_that_a_module_starts_while_it_is_checked_are_ended(
    local: LocalProcessExecutor, project: Path
) -> None:
    (project / "busy.py").write_text(
        "import subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "def train():\n    return 1\n"
    )
    with pytest.raises(EntrypointError):
        launch(local, "busy:train", 1, args={"no_such": 1})


def test_a_module_changed_between_two_launches_is_read_again(local: LocalProcessExecutor, project: Path) -> None:
    for number in range(3):
        (project / "changing.py").write_text(f"def train():\n    return {number}  # {'.' * number}\n")
        assert launch(local, "changing:train", 1).results() == [number]


def test_a_module_named_like_the_function_wins(local: LocalProcessExecutor, project: Path) -> None:
    (project / "package/both.py").write_text("def main():\n    return 'the module'\n")
    (project / "package/__init__.py").write_text("def both():\n    return 'the function'\n")
    assert launch(local, "package.both", 1).results() == ["the module"]


def test_a_file_named_like_another_module_is_refused_by_name(local: LocalProcessExecutor, project: Path) -> None:
    folder = project / "elsewhere"
    folder.mkdir()
    (folder / "random.py").write_text("def main():\n    return 'mine'\n")
    with pytest.raises(EntrypointError, match=r"random.*another module.*Rename"):
        launch(local, f"{folder}/random.py", 1)


def test_what_a_user_module_raises_when_called_has_its_traceback_and_no_frames_of_ours(
    local: LocalProcessExecutor, project: Path
) -> None:
    (project / "raising.py").write_text("def train():\n    return 1 / 0\n")
    with pytest.raises(ReplicaFailedError, match="ZeroDivisionError: division by zero") as caught:
        launch(local, "raising:train", 1).results()
    assert 'raising.py", line 2, in train' in str(caught.value)
    assert "worker.py" not in str(caught.value)


def test_the_rank_variable_of_ones_own_is_set_and_not_an_argument(local: LocalProcessExecutor) -> None:
    args = {"names": ["REPLICA_RANK", "NODE"], "rank_env": "NODE"}
    run = launch(local, "executors.testing.tasks:variables", 2, args=args)
    assert run.results() == [{"REPLICA_RANK": str(rank), "NODE": str(rank)} for rank in range(2)]


def test_an_entrypoint_that_launches_a_run_of_its_own_works(local: LocalProcessExecutor, tmp_path: Path) -> None:
    def entrypoint() -> Any:
        import local_tasks

        from executors import LocalProcessExecutor, launch

        with launch(LocalProcessExecutor(preload=()), local_tasks.rank, 2) as inner:
            return inner.results()

    assert launch(local, entrypoint, 2).results() == [[0, 1], [0, 1]]


def test_replicas_that_use_multiprocessing_work(local: LocalProcessExecutor) -> None:
    def entrypoint(method: str) -> Any:
        import math
        import multiprocessing

        with multiprocessing.get_context(method).Pool(2) as pool:
            return pool.map(math.factorial, [3, 4])

    for method in ("fork", "spawn"):
        assert launch(local, entrypoint, 1, args={"method": method}).results() == [[6, 24]]


def test_nothing_is_left_of_the_checks(local: LocalProcessExecutor, project: Path) -> None:
    run = launch(local, "job:train", 1, args={"x": 1})
    run.wait()
    supervisor = run.handles[0].metadata["supervisor_pid"]
    zygote = parent_of(supervisor)
    if zygote is not None:
        eventually(lambda: set(children_of(zygote)) <= {supervisor}, "only the supervisor is left")
