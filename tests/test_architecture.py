"""The rules that keep the house in order: who may import whom, what importing costs, how long a file may be."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SDKS = {"modal": "modal.py", "huggingface_hub": "hf_jobs.py", "boto3": "s3*.py", "botocore": "s3*.py"}
STANDS_ALONE = "bootstrap.py"  # runs where our packages are not yet
ADAPTERS = ("executors.local", "executors.modal", "executors.hf_jobs")
GENERIC_LAYER = (
    "executors.run", "executors.known_runs", "executors.launching", "executors.cli", "executors.following",
    "executors.status",
)  # fmt: skip
MAX_LINES = 400


def modules_of(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path, *, only_at_the_top: bool = False) -> set[str]:
    """The modules a file imports, as dotted names; `from a import b` counts as a and a.b."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if only_at_the_top else list(ast.walk(tree))
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(str(node.module))
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def is_inside(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize("path", modules_of("executors"), ids=name_of)
def test_executors_never_import_torch_or_diloco(path: Path) -> None:
    assert not [name for name in imports_of(path) if is_inside(name, "torch", "diloco")]


@pytest.mark.parametrize("path", modules_of("diloco"), ids=name_of)
def test_diloco_knows_of_executors_only_the_store_the_replica_and_the_errors(path: Path) -> None:
    known = ("executors.store", "executors.replica", "executors.errors")
    assert not [
        name
        for name in imports_of(path)
        if is_inside(name, "executors") - is_inside(name, *known) and name != "executors"
    ]


@pytest.mark.parametrize("path", [path for path in modules_of("executors") if name_of(path) in ADAPTERS], ids=name_of)
def test_an_adapter_imports_neither_the_generic_layer_nor_another_adapter(path: Path) -> None:
    others = [adapter for adapter in ADAPTERS if adapter != name_of(path)]
    assert not [name for name in imports_of(path) if is_inside(name, *GENERIC_LAYER, *others)]


@pytest.mark.parametrize("path", modules_of("executors") + modules_of("diloco"), ids=name_of)
def test_an_sdk_is_imported_by_its_own_adapter_alone_and_lazily(path: Path) -> None:
    for sdk, adapter in SDKS.items():
        if not path.match(adapter) and path.name != STANDS_ALONE:
            assert not [name for name in imports_of(path) if is_inside(name, sdk)]
        assert not [name for name in imports_of(path, only_at_the_top=True) if is_inside(name, sdk)]


@pytest.mark.parametrize("path", modules_of("executors") + modules_of("diloco"), ids=name_of)
def test_the_contract_suites_are_imported_by_tests_alone(path: Path) -> None:
    if not is_inside(name_of(path), "executors.testing", "diloco.testing"):
        imported = imports_of(path)
        assert not [name for name in imported if is_inside(name, "executors.testing", "diloco.testing", "pytest")]


def test_the_rendezvous_knows_no_torch() -> None:
    assert not [name for name in imports_of(ROOT / "diloco" / "rendezvous.py") if is_inside(name, "torch")]


def test_importing_executors_pulls_in_nothing_heavy() -> None:
    code = "import sys, json; import executors; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    heavy = {"torch", "diloco", "numpy", "asyncio", "rich", "typer", "importlib.metadata", "tenacity", *SDKS}
    assert heavy.isdisjoint(loaded)


def test_replicas_are_forked_from_a_process_without_hooks_for_it_but_those_of_random() -> None:
    code = """
import os
hooks = []
os.register_at_fork = lambda **hook: hooks.append(next(iter(hook.values())).__module__)
import executors.zygote
print(*hooks)
"""
    hooks = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert set(hooks) <= {"random"}


@pytest.mark.parametrize("package", ["executors", "executors.run", "executors.local", "executors.worker"])
def test_nothing_happens_at_import(package: str) -> None:
    code = f"""
import sys, logging, os
import executors.errors, tenacity, ctypes, cloudpickle, platformdirs  # other people's imports are not ours to judge
seen = []
def hook(event, arguments):
    writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
    if writes or event.startswith(("socket.", "subprocess.", "os.mkdir", "os.fork", "os.putenv")):
        seen.append((event, str(arguments)))
sys.dont_write_bytecode = True
sys.addaudithook(hook)
before = list(logging.root.handlers)
import {package}
assert not seen, seen
assert logging.root.handlers == before
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("path", modules_of("executors") + modules_of("diloco") + modules_of("tests"), ids=name_of)
def test_no_file_is_longer_than_a_reader_can_hold(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


def test_the_folders_at_the_top_are_the_agreed_ones() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    allowed = {
        "pyproject.toml", "README.md", "LICENSE", "Makefile", "constraints.txt", ".gitignore",
        "executors", "diloco", "tests", "examples", "ADRs", ".ci", ".github",
    }  # fmt: skip
    assert {path.split("/")[0] for path in tracked} <= allowed
