"""Tests which modules preload="auto" imports before a local replica starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from executors import LocalProcessExecutor, launch
from executors.backends.local import preload
from executors.backends.local.preload import imports_at_the_top, measure_imports, noted_imports

JOB = """
import os
import heavy
from bundle import part

def main():
    return {"heavy": heavy.PID != os.getpid(), "part": part.PID != os.getpid()}
"""
NOT_HERE = {"heavy": False, "part": False}


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, and a place for packages in which importing leaves the pid."""
    packages = tmp_path / "site-packages"
    (packages / "bundle").mkdir(parents=True)
    (packages / "bundle/__init__.py").touch()
    for name in ("heavy.py", "bundle/part.py"):
        (packages / name).write_text("import os\nPID = os.getpid()\n")
    (packages / "threaded.py").write_text(
        "import heavy, threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.syspath_prepend(tmp_path / "work")
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setattr("executors.backends.local.executor.PRELOAD", ())  # the import of torch takes long
    monkeypatch.setattr(preload, "WORTH_S", -1.0)
    (tmp_path / "work/job.py").write_text(JOB)
    return tmp_path / "work"


def test_the_second_launch_of_a_file_preloads_the_imports_at_its_top(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = LocalProcessExecutor(preload="auto", term_grace_s=0.5)
    assert local.options_to_keep["preload"] == "auto"
    assert launch(local, "job.py", 1).results() == [NOT_HERE]
    assert noted_imports("job:main") == ("os", "heavy", "bundle:part")
    assert launch(local, "job:main", 2).results() == [{"heavy": True, "part": True}] * 2
    assert launch(local, "job.py", 1, env={"HEAVY": "1"}).results() == [NOT_HERE], "importing may read the variable"
    with monkeypatch.context() as patch:
        patch.setenv("HEAVY", "1")
        assert launch(local, "job.py", 1).results() == [NOT_HERE]
    (work / "job.py").write_text(JOB.replace("import heavy\n", "").replace("def main():", "import heavy\ndef main():"))
    assert noted_imports("job.py") == ("os", "bundle:part", "heavy")
    (work / "job.py").write_text(JOB.replace("import heavy\n", "os.nice(0)\nimport heavy\n"))
    assert launch(local, "job.py", 1).results() == [NOT_HERE], (
        "a module is not preloaded if code stands before its import"
    )


def test_a_module_that_starts_threads_is_left_out_and_named(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    local = LocalProcessExecutor(preload="auto", term_grace_s=0.5)
    (work / "job.py").write_text(JOB.replace("import heavy", "import heavy, threaded, json"))
    assert launch(local, "job.py", 1).results() == [NOT_HERE]
    assert noted_imports("job.py") == ("os", "heavy", "json", "bundle:part")
    said = "replicas: preload leaves 'threaded' out: importing it starts threads\n"
    assert capfd.readouterr().err == said
    assert launch(local, "job.py", 1).results() == [{"heavy": True, "part": True}]
    assert capfd.readouterr().err == "", "the line is printed once"


def test_quick_imports_are_not_worth_it(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preload, "WORTH_S", 1e9)
    launch(LocalProcessExecutor(preload="auto", term_grace_s=0.5), "job.py", 1).results()
    assert noted_imports("job.py") == ()


def test_the_top_of_a_file_ends_where_it_does_anything_but_import(work: Path) -> None:
    for text, names in (
        (
            '"""Doc."""\nfrom __future__ import annotations\nimport a.b as c, d\n',
            ["__future__:annotations", "a.b", "d"],
        ),
        ("from a import b, c\nfrom d import *\nX = 1\nimport e\n", ["a:b", "a:c"]),
        ("import os\nos.environ['A'] = '1'\nimport a\n", ["os"]),
        ("import a\nfrom . import b\nimport c\n", ["a"]),
        ("def main(): ...\nimport a\n", []),
    ):
        (work / "top.py").write_text(text)
        assert imports_at_the_top("top.py") == names, text
    assert imports_at_the_top("nowhere.py") == imports_at_the_top("math:sin") == []


def test_measuring_ends_at_the_first_module_of_the_users_own(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (work / "mine.py").write_text("raise SystemExit\n")
    assert measure_imports(["json", "heavy", "mine", "bundle"])["taken"] == ["json", "heavy"]
    assert "bundle" not in sys.modules
    monkeypatch.delitem(sys.modules, "heavy")
    for names in (["mine"], ["no_such_module", "heavy"]):
        assert measure_imports(names)["taken"] == []


def test_one_module_is_not_a_list_of_letters() -> None:
    with pytest.raises(
        ValueError, match=r"preload must be a list of modules such as \['torch'\], or 'auto', got preload='torch'"
    ):
        LocalProcessExecutor(preload="torch")
