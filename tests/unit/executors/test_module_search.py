"""The module that a name means if a user's folder has a module of that name."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from executors import module_search
from executors.module_search import (
    DEPENDENCIES,
    NOT_RESERVED,
    RESERVED,
    ReservedNames,
    describe_hidden,
    new_python,
    reserve_names,
    restored_search_path,
    search_first,
)

ROOTS = ("torch", "numpy", "xxhash", "blake3", "boto3")  # the top packages of all extras
OF_TORCH_ON_A_GPU = ("nvidia-", "cuda-", "triton", "setuptools")  # our code never imports these


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, first on the path, as in a replica."""
    monkeypatch.chdir(tmp_path)
    for name in ("wave", "calendar", "mpmath", "test", "utils_of_user"):
        (tmp_path / f"{name}.py").write_text("MINE = True\n")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(module_search, "_user_folders", set())
    return tmp_path


def is_mine(name: str) -> bool:
    found = importlib.import_module(name)
    sys.modules.pop(name)
    return hasattr(found, "MINE")


def test_reserved_names_are_not_looked_for_in_the_users_folder_and_all_others_are(users: Path) -> None:
    search_first(str(users))
    found = {name: is_mine(name) for name in ("wave", "calendar", "mpmath", "test", "utils_of_user")}
    assert found == {"wave": False, "calendar": False, "mpmath": False, "test": True, "utils_of_user": True}


def test_a_reserved_name_that_is_installed_nowhere_else_is_found_in_the_users_folder(
    users: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (users / "boto3.py").write_text("MINE = True\n")
    monkeypatch.delitem(sys.modules, "boto3", raising=False)
    search_first(str(users))
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if "site-packages" not in entry])
    assert is_mine("boto3")


def test_a_folder_that_pythonpath_names_keeps_its_order(users: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    patched = tmp_path_factory.mktemp("patched")
    (patched / "mpmath.py").write_text("PATCHED = True\n")
    sys.path.insert(0, str(patched))
    search_first(str(users))
    assert hasattr(importlib.import_module("mpmath"), "PATCHED")
    sys.modules.pop("mpmath")


def test_a_user_s_process_is_left_as_it_was(users: Path) -> None:
    before = [*sys.path], [*sys.meta_path]
    with restored_search_path():
        search_first(str(users))
        assert ReservedNames in sys.meta_path
    assert ([*sys.path], [*sys.meta_path]) == before


def test_a_new_python_that_we_start_never_imports_the_users_modules(users: Path) -> None:
    for name in ("logging", "executors", "json"):
        (users / f"{name}.py").write_text("raise RuntimeError\n")
    reserve_names([str(users)])
    sys.path.insert(0, str(users))
    code = "import json, logging, executors; print(executors.__file__, sys.argv[1:])"
    done = subprocess.run(new_python(code, "a", "b"), capture_output=True, text=True, check=True)
    assert done.stdout == f"{Path(module_search.__file__).with_name('__init__.py')} ['a', 'b']\n"


def test_every_dependency_of_this_project_is_reserved() -> None:
    pending, names = ["serverless-replicas", *ROOTS], {*ROOTS}
    while pending:
        name = pending.pop()
        for line in metadata.requires(name) or ():
            needed = re.split(r"[\s;<>=!~\[(]", line, maxsplit=1)[0]
            if "extra ==" in line or needed in names or needed.startswith(OF_TORCH_ON_A_GPU):
                continue
            try:
                metadata.version(needed)
            except metadata.PackageNotFoundError:
                continue  # a package for another system
            names.add(needed)
            pending.append(needed)
    tops = {top for top, owners in metadata.packages_distributions().items() if {*owners} & names and top[0] != "_"}
    mentioned = {top for top in tops if top.isidentifier() and not top.endswith("__mypyc")} - {"isympy"}  # a script
    assert mentioned <= DEPENDENCIES, "an imported package is not reserved: add it to DEPENDENCIES"
    assert {"logging", "executors", "diloco", "numpy", "typing", "random"} <= RESERVED
    assert not NOT_RESERVED & RESERVED


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"train.py": "import random\n", "random.py": ""}, "train.py imports 'random'. In a replica, that is Python's"),
        ({"train.py": "from data import x\n", "data.py": "import numpy\n", "numpy.py": ""}, "data.py imports 'numpy'"),
        ({"train.py": "def f():\n    import logging.config\n", "logging/__init__.py": ""}, "not your logging/__init__"),
        ({"train.py": "import numpy\n", "numpy.py": ""}, "that is the installed package, and not your numpy.py"),
        ({"train.py": "import random\n"}, None),
        ({"train.py": "import data\n", "data.py": "import train\n", "random.py": ""}, None),
        ({"train.py": "from . import random\n", "random.py": ""}, None),
        ({"train.py": "import test\n", "test.py": ""}, None),
        ({"train.py": "def broken(:\n", "random.py": ""}, None),
        ({"random.py": "import random\n"}, None),
    ],
)
def test_a_module_that_a_replica_does_not_get_is_named_if_a_file_imports_it(
    tmp_path: Path, files: dict[str, str], words: str | None
) -> None:
    for name, source in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    said = describe_hidden(tmp_path / next(iter(files)))
    assert said is None if words is None else words in str(said)
