"""Tests the packages that a remote replica installs: this project's dependencies in their local versions, and the
user's.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest
from servers.s3.server import S3Server

from executors import launch, list_runs
from executors.errors import EntrypointError
from executors.shipping import requirements
from executors.shipping.requirements import OURS, package_name_of

PROJECT = Path(__file__).parents[3]
PINS = tuple(f"{name}=={version(name).partition('+')[0]}" for name in OURS)


def requirements_of(pip: Sequence[str], root: Path, script: Path | None = None) -> tuple[str, ...]:
    """Return the requirements of this project and of the user in one list."""
    ours, users = requirements.requirements_of(pip, root, script)
    return (*ours, *users)


def test_our_requirements_are_pinned_to_the_installed_versions_without_the_local_part(tmp_path: Path) -> None:
    assert requirements_of((), tmp_path) == PINS
    assert f"torch=={version('torch').partition('+')[0]}" in PINS
    assert not [pin for pin in PINS if "+" in pin]


def test_ours_are_all_that_a_replica_imports(s3: S3Server) -> None:
    code = f"""
import json, sys, torch, cloudpickle
plain = set(sys.modules)
from executors import supervisor, worker, open_store, current_replica
from executors.store.watch import open_watch
from executors.store.state_folder import state_path
import diloco, diloco.demo
state_path()
store = open_store({s3.url("runs")!r})
store.put("a", b"b")
open_watch(store).close()
open_watch(open_store(sys.argv[1])).close()
print(json.dumps(sorted({{name.partition(".")[0] for name in set(sys.modules) - plain}} - sys.stdlib_module_names)))
"""
    environ = {**os.environ, "PYTHONPATH": str(PROJECT)}
    folder = os.environ["XDG_STATE_HOME"]
    done = subprocess.run([sys.executable, "-P", "-c", code, folder], env=environ, capture_output=True, check=True)
    by_module = packages_distributions()
    distributions = {
        package_name_of(found) for module in json.loads(done.stdout) for found in by_module.get(module, [])
    }
    brought_by_boto3 = {"botocore", "s3transfer", "jmespath", "urllib3", "python-dateutil", "six"}
    optional = {"certifi", "tornado", "brotli"}  # botocore and tenacity try to import these, and work without them
    known = {package_name_of(name) for name in OURS} | brought_by_boto3 | optional | {"serverless-replicas"}
    assert distributions <= known
    late = {
        "torch",
        "cloudpickle",
        "tenacity",
        "boto3",
    }  # a replica uses botocore, which boto3 brings
    assert "botocore" in distributions
    assert {package_name_of(name) for name in OURS} - late <= distributions


def test_those_given_by_hand_win_over_the_script_header_and_that_over_requirements_txt_and_pyproject(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "mine"\ndependencies = ["from-project>=1"]\n')
    assert requirements_of((), tmp_path) == (*PINS, "from-project>=1")
    (tmp_path / "requirements.txt").write_text("from-file\n")
    assert requirements_of((), tmp_path) == (*PINS, "from-file")
    script = tmp_path / "train.py"
    script.write_text('"""Trains."""\n# /// script\n# requires-python = ">=3.11"\n# [tool.replicas]\n# n = 2\n# ///\n')
    assert requirements_of((), tmp_path, script) == (*PINS, "from-file"), (
        "requirements.txt counts if the header of the script names no requirement"
    )
    script.write_text('# /// script\n# dependencies = [\n#   "from-header>=1",\n# ]\n# [tool.uv]\n# a = 1\n# ///\n')
    assert requirements_of((), tmp_path, script) == (*PINS, "from-header>=1")
    assert requirements_of(["by-hand>=2"], tmp_path, script) == (*PINS, "by-hand>=2")
    script.write_text("# /// script\n# dependencies = []\n# ///\n")
    assert requirements_of((), tmp_path, script) == PINS
    said = f"replicas: {script}: replicas ignore [tool.uv] of its '# /// script' block\n"
    assert capsys.readouterr().err == said
    for text, words in (
        ('dependencies = "einops"', "dependencies must be a list of strings"),
        ('dependencies = ["-e ."]', r"train\.py: replicas accept only requirements.*got '-e \.'"),
        ("dependencies = [", r"train\.py, line 2 is not TOML"),
    ):
        script.write_text(f"# /// script\n# {text}\n# ///\n")
        with pytest.raises(EntrypointError, match=words):
            requirements_of((), tmp_path, script)


def test_a_project_that_is_not_asked_for_its_requirements_may_be_broken(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project\n")
    assert requirements_of(["by-hand>=2"], tmp_path) == (*PINS, "by-hand>=2")
    (tmp_path / "requirements.txt").write_text("from-file\n")
    assert requirements_of((), tmp_path) == (*PINS, "from-file")


def test_a_header_is_found_whatever_else_is_in_the_file(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_bytes(
        b"# -*- coding: latin-1 -*-\r\n# /// script\r\n# dependencies = ['mine']\r\n# ///\r\nx = '\xe9'\r\n"
    )
    assert requirements_of((), tmp_path, script) == (*PINS, "mine")
    script.write_text("# /// other\n# a = 1\n# ///\nx = '# /// script'\n")
    assert requirements_of((), tmp_path, script) == requirements_of((), tmp_path, tmp_path / "gone.py") == PINS


def test_a_script_that_asks_for_another_python_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    minor = sys.version_info[1]
    for asked, problem in (
        (f'">=3.{minor}.99"', None),
        (f'"==3.{minor}.*"', None),
        (
            f'">=3.{minor + 1}"',
            f"requires Python >=3.{minor + 1}, and replicas get the launcher's minor version 3.{minor}",
        ),
        (f'"<3.{minor}"', "requires Python <"),
        ('"three"', "requires-python must be a version specifier, as in '>=3.11', got 'three'"),
        ("3", "requires-python must be a version specifier"),
    ):
        Path("train.py").write_text(f"# /// script\n# requires-python = {asked}\n# ///\ndef main():\n    return 1\n")
        if problem is None:
            assert launch("inline", "train.py", 1).results() == [1]
            continue
        with pytest.raises(EntrypointError, match=re.escape(problem)):
            launch("inline", "train.py", 1)
    assert len(list_runs()) == 2


def test_lines_comments_continuations_and_includes_are_read(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "base.txt").write_text("from-base\n-rdeeper.txt\n")
    (tmp_path / "more" / "deeper.txt").write_text("from-deeper")
    (tmp_path / "requirements.txt").write_text(
        "\ufeff# all of it\n\nplain  # why\n"
        "extra[one,two]>=1,<2 ; python_version > '3'\n"
        "split \\\n  >=3\n"
        "-r more/base.txt\n--requirement=more/deeper.txt\n"
        "at @ https://example.com/at-1.0.zip#sha256=0a\n./local.whl\n",
        encoding="utf-8",
    )
    assert requirements_of((), tmp_path)[len(PINS) :] == (
        "plain",
        "extra[one,two]>=1,<2 ; python_version > '3'",
        "split   >=3",
        "from-base",
        "from-deeper",
        "at @ https://example.com/at-1.0.zip#sha256=0a",
        "./local.whl",
    )


def test_a_requirement_of_the_user_replaces_the_projects_pin_and_names_are_compared_like_in_pip(tmp_path: Path) -> None:
    for named in ("torch", "Torch>=2.9", "torch @ https://example.com/t.whl", "TORCH[x] == 2.0"):
        found = requirements_of([named], tmp_path)
        assert found == (*(pin for pin in PINS if not pin.startswith("torch==")), named), named
    found = requirements_of(["Inotify.Simple==1.0"], tmp_path)
    assert [line for line in found if package_name_of(line) == "inotify-simple"] == ["Inotify.Simple==1.0"]
    assert package_name_of("Inotify_.Simple ~= 1.0") == "inotify-simple"
    assert package_name_of("./a/path.whl") is None


def test_this_project_is_shipped_and_not_required(tmp_path: Path) -> None:
    assert requirements_of(["serverless-replicas[s3]>=0.1", "Serverless_Replicas"], tmp_path) == PINS
    assert requirements_of((), PROJECT) == PINS
    assert requirements_of(["mine"], PROJECT) == (*PINS, "mine")


def test_an_option_of_pip_is_refused_by_name(tmp_path: Path) -> None:
    for line in (
        "-e .", "--no-index", "-c constraints.txt", "--extra-index-url", "-f a b", "a==1 --hash=sha256:0", "--pre", "-",
    ):  # fmt: skip
        (tmp_path / "requirements.txt").write_text(f"fine\n{line}\n")
        with pytest.raises(EntrypointError, match=r"requirements\.txt: replicas accept only requirements.*got '-.*'"):
            requirements_of((), tmp_path)
        with pytest.raises(EntrypointError, match=r"pip=: replicas accept only requirements.*got '-.*'"):
            requirements_of([line], tmp_path)


def test_an_index_is_sent_with_the_requirements_that_are_installed_from_it(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text(
        "--extra-index-url https://download.pytorch.org/whl/cpu\n-i https://mine.example.com/simple\n"
        "--find-links=./wheels\n-f https://example.com/wheels\ntorch==2.13.0+cpu\n"
    )
    ours, users = requirements.requirements_of((), tmp_path)
    assert users == (
        "--extra-index-url=https://download.pytorch.org/whl/cpu",
        "--index-url=https://mine.example.com/simple",
        "--find-links=./wheels",
        "--find-links=https://example.com/wheels",
        "torch==2.13.0+cpu",
    )
    assert not [pin for pin in ours if pin.startswith("torch")]
    assert requirements_of([*users], tmp_path / "elsewhere") == (*ours, *users)


def test_a_local_version_without_an_index_is_refused_before_anything_starts(tmp_path: Path) -> None:
    asks = "Ask for 'torch==2.13.0', or add the index that has it to requirements.txt or pip="
    with pytest.raises(EntrypointError, match=re.escape(asks)) as caught:
        requirements_of(["einops", "torch==2.13.0+cpu"], tmp_path)
    assert "'torch==2.13.0+cpu' has a local version" in str(caught.value)
    url = "torch @ https://download.pytorch.org/whl/cpu/torch-2.13.0%2Bcpu-cp311-linux_x86_64.whl"
    assert requirements_of([url], tmp_path)[-1] == url


def test_credentials_do_not_travel_in_a_requirement(tmp_path: Path) -> None:
    for url in ("https://me:hunter2@example.com/a.whl", "git+https://hunter2@example.com/a.git"):
        with pytest.raises(EntrypointError, match="'mine' has credentials") as caught:
            requirements_of([f"mine @ {url}"], tmp_path)
        assert "hunter2" not in str(caught.value)
    assert requirements_of(["mine @ git+ssh://git@example.com/a.git"], tmp_path)[-1].startswith("mine")
    with pytest.raises(EntrypointError, match="has credentials") as caught:
        requirements_of(["--index-url https://me:hunter2@example.com/simple"], tmp_path)
    assert "hunter2" not in str(caught.value)


def test_a_file_that_cannot_be_read_or_includes_itself_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("-r other.txt")
    with pytest.raises(EntrypointError, match=r"other\.txt cannot be read"):
        requirements_of((), tmp_path)
    (tmp_path / "other.txt").write_text("-r requirements.txt")
    with pytest.raises(EntrypointError, match=r"other\.txt includes itself"):
        requirements_of((), tmp_path)
    (tmp_path / "requirements.txt").unlink()
    (tmp_path / "pyproject.toml").write_text("[project")
    with pytest.raises(EntrypointError, match=r"pyproject\.toml, line 1 is not TOML: .* Correct it, or give pip=\."):
        requirements_of((), tmp_path)


def test_a_dependency_that_is_not_installed_here_is_left_to_the_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executors.shipping.requirements.OURS", (*OURS, "nowhere-to-be-found"))
    assert requirements_of((), tmp_path) == PINS
